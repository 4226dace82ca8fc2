package place

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// mounts returns the mount points of this process's view of the file system. Without a
// readable /proc it returns none; then device numbers have to tell.
func mounts() []string {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close()
	return parseMounts(f)
}

// parseMounts takes the fifth field of each line, in which space, tab, newline and
// backslash are written in octal.
func parseMounts(r io.Reader) []string {
	var points []string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if f := bytes.Fields(lines.Bytes()); len(f) > 4 {
			points = append(points, unescape(string(f[4])))
		}
	}
	return points
}

func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// isMount reports whether a file system is mounted at dir, which must be a real path.
func isMount(dir string, points []string) bool {
	var sx unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, 0, &sx)
	if err == nil && sx.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return sx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
	}
	for _, p := range points {
		if p == dir {
			return true
		}
	}
	var own, above unix.Stat_t
	return unix.Stat(dir, &own) == nil && unix.Stat(filepath.Dir(dir), &above) == nil && own.Dev != above.Dev
}

// mountBelow returns a mount point inside dir, or "".
func mountBelow(dir string, points []string) string {
	for _, p := range points {
		if within(p, dir) && p != dir {
			return p
		}
	}
	return ""
}

// within reports whether path is dir or lies below it. Both are clean absolute paths.
func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
