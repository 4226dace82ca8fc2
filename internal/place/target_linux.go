package place

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// stagingName is the entry of the target that holds the staging of a restore in place.
const stagingName = ".snapferry"

// spot is where a target and its staging are. The staging lies in dir, and so does the
// target, under the name base; in place dir is the target itself and base is "".
type spot struct {
	path string // the target's real path
	dir  string // the real path of the directory that holds the staging
	base string
	gone bool // nothing lies at path
}

// staging is the name of the staging in dir.
func (s spot) staging() string {
	if s.base == "" {
		return stagingName
	}
	return "." + s.base + stagingName
}

// target is a store on its way to its place.
type target struct {
	spot
	store Store
	made  string   // the topmost directory above the target that this run created
	above *tree    // spot.dir
	stage *staging // in above
	left  []string // trees in the staging that an earlier run staged, newest last
	there bool     // the target exists, recovery considered
	tree  *tree    // what becomes the target

	report counters
}

// locate finds where a target really is. A symbolic link to a directory is resolved, as
// are links above it; anything but a directory is refused.
func locate(dir string, inPlace bool) (spot, error) {
	abs, err := absolute(dir)
	if err != nil {
		return spot{}, err
	}
	info, err := os.Lstat(abs)
	if errors.Is(err, fs.ErrNotExist) {
		return locateAbsent(abs, inPlace)
	}
	if errors.Is(err, unix.ENOTDIR) {
		return spot{}, notDir(blocker(abs))
	}
	if err != nil {
		return spot{}, err
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		if info, err = os.Stat(abs); err != nil {
			return spot{}, err
		}
	}
	if !info.IsDir() {
		return spot{}, notDir(dir)
	}
	real, err := filepath.EvalSymlinks(abs)
	return spotAt(real, false, inPlace), err
}

// absolute makes a path absolute by where the working directory really is, as the kernel
// and other programs would, and not by the links of $PWD through which it was entered.
func absolute(dir string) (string, error) {
	if filepath.IsAbs(dir) {
		return filepath.Clean(dir), nil
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Getcwd(buf)
	if errors.Is(err, fs.ErrNotExist) || err == nil && buf[0] != '/' {
		return "", fmt.Errorf("relative path %s: the working directory was removed or replaced; enter it anew or give an absolute path", dir)
	}
	if err != nil {
		return "", fmt.Errorf("relative path %s: working directory: %w", dir, err)
	}
	return filepath.Join(string(buf[:n-1]), dir), nil
}

func notDir(path string) error {
	return fmt.Errorf("%s is not a directory; remove it or choose another target", path)
}

// blocker is the topmost component of a path that exists and is no directory.
func blocker(abs string) string {
	for {
		above := filepath.Dir(abs)
		if info, err := os.Stat(above); err == nil && info.IsDir() || above == abs {
			return abs
		}
		abs = above
	}
}

// locateAbsent resolves the nearest directory above that exists.
func locateAbsent(abs string, inPlace bool) (spot, error) {
	above, rest := filepath.Dir(abs), filepath.Base(abs)
	for {
		real, err := filepath.EvalSymlinks(above)
		if err == nil {
			return spotAt(filepath.Join(real, rest), true, inPlace), nil
		}
		if _, dangling := os.Lstat(above); !errors.Is(err, fs.ErrNotExist) || dangling == nil {
			return spot{}, err
		}
		above, rest = filepath.Dir(above), filepath.Join(filepath.Base(above), rest)
	}
}

func spotAt(real string, gone, inPlace bool) spot {
	if inPlace {
		return spot{path: real, dir: real, gone: gone}
	}
	return spot{path: real, dir: filepath.Dir(real), base: filepath.Base(real), gone: gone}
}

// existing is the directory itself or the nearest one above it that is there.
func existing(dir string) string {
	for {
		if _, err := os.Lstat(dir); err == nil || dir == "/" {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// check refuses what cannot be restored to, before anything is written (S7, S8).
func (t *target) check(points []string, inPlace bool) error {
	if t.path == "/" {
		return errors.New("the root directory cannot be a target")
	}
	if !t.gone {
		if err := t.checkMounts(points, inPlace); err != nil {
			return err
		}
	}
	if inPlace {
		if entryAt(t.store.Index, stagingName) != nil {
			return fmt.Errorf("the store has an entry %s, where a restore in place stages", stagingName)
		}
	}
	return t.checkNames()
}

func (t *target) checkMounts(points []string, inPlace bool) error {
	if p := mountBelow(t.path, points); p != "" {
		return fmt.Errorf("a file system is mounted inside, at %s; unmount it first", p)
	}
	if inPlace {
		return nil
	}
	if isMount(t.path, points) {
		return errors.New("it is a mount point, which cannot be swapped as a whole: " + adviceInPlace)
	}
	var own, above unix.Stat_t
	if err := errors.Join(unix.Stat(t.path, &own), unix.Stat(t.dir, &above)); err != nil {
		return err
	}
	if own.Dev != above.Dev {
		return errors.New("it is on another file system than the directory above it: " + adviceInPlace)
	}
	return nil
}

const adviceInPlace = "restore to a sub-directory of it, or use --in-place, which is not atomic"

// checkNames compares the names with what the file system takes. Some take less than 255
// bytes, and it is better to know before than after fetching.
func (t *target) checkNames() error {
	var st unix.Statfs_t
	if err := unix.Statfs(existing(t.dir), &st); err != nil {
		return err
	}
	limit := int(st.Namelen)
	if limit <= 0 {
		limit = snapshot.MaxName
	}
	if len(t.staging()) > limit {
		return fmt.Errorf("its name is too long: the staging beside it would need %d bytes, the file system takes %d", len(t.staging()), limit)
	}
	for i := range t.store.Index.Entries {
		for c := range strings.SplitSeq(t.store.Index.Entries[i].Path, "/") {
			if len(c) > limit {
				return fmt.Errorf("name %q has %d bytes, the file system takes %d", c, len(c), limit)
			}
		}
	}
	return nil
}

// checkApart refuses targets that are equal or nested, also through symbolic links.
func checkApart(targets []*target) error {
	for i, a := range targets {
		for _, b := range targets[i+1:] {
			if a.store.Name == b.store.Name {
				return fmt.Errorf("restore: store %s is given twice", a.store.Name)
			}
			if touch(a.spot, b.spot) {
				return fmt.Errorf("restore: the targets of stores %s and %s are one directory or lie in each other: %s, %s",
					a.store.Name, b.store.Name, a.path, b.path)
			}
		}
	}
	return nil
}

func touch(a, b spot) bool {
	sa, sb := filepath.Join(a.dir, a.staging()), filepath.Join(b.dir, b.staging())
	return within(a.path, b.path) || within(b.path, a.path) || within(a.path, sb) || within(b.path, sa)
}

// makeParents creates the directories above the staging and remembers the topmost.
func (t *target) makeParents() error {
	if low := existing(t.dir); low != t.dir {
		t.made = filepath.Join(low, strings.SplitN(strings.TrimPrefix(strings.TrimPrefix(t.dir, low), "/"), "/", 2)[0])
	}
	return os.MkdirAll(t.dir, 0o755)
}

// unmakeParents removes the directories that makeParents created, as far as they are empty.
func (t *target) unmakeParents() {
	if t.made == "" {
		return
	}
	for d := t.dir; within(d, t.made); d = filepath.Dir(d) {
		if os.Remove(d) != nil {
			return
		}
	}
}

// fault names store and target in an error.
func (t *target) fault(err error) error {
	return fmt.Errorf("restore store %s to %s: %w", t.store.Name, t.path, err)
}
