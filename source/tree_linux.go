package source

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// errGone says that a name vanished, or became something else, between two looks.
var errGone = errors.New("vanished")

// A tree is an open directory. It hides how everything below is reached: always
// through the descriptor, never through a symbolic link, never through "..", and
// never across a mount.
type tree struct {
	path string // absolute, for messages

	dev      uint64
	mount    uint64
	hasMount bool // the kernel tells mounts apart by number

	// mu guards fd: Release waits for the calls that use it.
	mu sync.RWMutex
	fd int // -1 when closed
}

// openTree opens the directory at an absolute path that holds no symbolic links.
func openTree(path string) (*tree, error) {
	fd, err := retryOpen(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, advise(path, err)
	}
	st, err := statFD(fd)
	if err != nil {
		unix.Close(fd)
		return nil, advise(path, err)
	}
	t := &tree{path: path, fd: fd, dev: device(&st)}
	t.mount, t.hasMount = st.Mnt_id, st.Mask&unix.STATX_MNT_ID != 0
	return t, nil
}

// close gives the descriptor back. Later calls of use fail.
func (t *tree) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.fd < 0 {
		return nil
	}
	err := unix.Close(t.fd)
	t.fd = -1
	return err
}

// use calls f with the descriptor and keeps it open meanwhile.
func (t *tree) use(f func(fd int) error) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.fd < 0 {
		return ErrClosed
	}
	return f(t.fd)
}

// open opens what lies at a relative path; the empty path is the tree itself. A
// missing name, and one that a symbolic link or another kind of file took the place
// of, is errGone.
func (t *tree) open(path string, flags int) (fd int, err error) {
	flags |= unix.O_CLOEXEC | unix.O_NOFOLLOW
	err = t.use(func(dir int) error {
		fd, err = retryOpen(func() (int, error) { return openBeneath(dir, path, flags) })
		return err
	})
	if errors.Is(err, unix.EXDEV) {
		return -1, t.mountError(path)
	}
	return fd, gone(err)
}

// stat returns what lies at a relative path, without following a symbolic link.
func (t *tree) stat(path string) (st unix.Statx_t, err error) {
	fd, err := t.open(path, unix.O_PATH)
	if err != nil {
		return st, err
	}
	defer unix.Close(fd)
	return statFD(fd)
}

// foreign reports whether a name found in the tree leads to another file system or
// is a mount of this one. A regular file may have a device of its own: overlays
// give those.
func (t *tree) foreign(st *unix.Statx_t) bool {
	if t.hasMount && st.Mask&unix.STATX_MNT_ID != 0 {
		return st.Mnt_id != t.mount || st.Mode&unix.S_IFMT == unix.S_IFDIR && device(st) != t.dev
	}
	return device(st) != t.dev
}

func (t *tree) mountError(path string) error {
	return fmt.Errorf("%s: is a mount point inside the store; exclude it and back it up as a store of its own", join(t.path, path))
}

// openat2 is absent before Linux 5.6 and forbidden in some sandboxes.
var noOpenat2 atomic.Bool

func openBeneath(dir int, path string, flags int) (int, error) {
	if path == "" {
		return unix.Openat(dir, ".", flags, 0)
	}
	if !noOpenat2.Load() {
		fd, err := unix.Openat2(dir, path, &unix.OpenHow{
			Flags:   uint64(flags),
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if err != unix.ENOSYS && err != unix.EPERM {
			return fd, err
		}
		if err == unix.EPERM && flags&unix.O_NOATIME != 0 {
			return fd, err
		}
		noOpenat2.Store(true)
	}
	return openSteps(dir, path, flags)
}

// openSteps opens one component after the other. The caller's stat of what it gets
// finds mounts.
func openSteps(dir int, path string, flags int) (int, error) {
	at := dir
	for {
		name, rest, more := strings.Cut(path, "/")
		step := flags
		if more {
			step = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
		}
		fd, err := -1, error(unix.ENOENT)
		if name != "" && name != "." && name != ".." {
			fd, err = unix.Openat(at, name, step, 0)
		}
		if at != dir {
			unix.Close(at)
		}
		if err != nil || !more {
			return fd, err
		}
		at, path = fd, rest
	}
}

// retryOpen repeats an open that a signal interrupted.
func retryOpen(open func() (int, error)) (int, error) {
	for {
		fd, err := open()
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		return fd, err
	}
}

// gone maps the answers of the kernel that mean "not there any more" to errGone.
func gone(err error) error {
	switch err {
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENXIO, unix.ESTALE:
		return fmt.Errorf("%w: %w", errGone, err)
	}
	return err
}

// advise adds the path to an error, and to a refusal what one can do about it.
func advise(path string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s: %w; run as a user who may read it, or exclude it", path, err)
	}
	return fmt.Errorf("%s: %w", path, err)
}

const statMask = unix.STATX_BASIC_STATS | unix.STATX_BTIME | unix.STATX_MNT_ID

func statFD(fd int) (st unix.Statx_t, err error) {
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW, statMask, &st)
	return st, err
}

func statAt(fd int, name string, st *unix.Statx_t) error {
	return gone(unix.Statx(fd, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, statMask, st))
}

func device(st *unix.Statx_t) uint64 { return unix.Mkdev(st.Dev_major, st.Dev_minor) }

// identity takes the identity out of a stat.
func identity(st *unix.Statx_t) Identity {
	id := Identity{
		Dev:   device(st),
		Ino:   st.Ino,
		Size:  int64(st.Size),
		MTime: timespec(st.Mtime),
		CTime: timespec(st.Ctime),
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		id.BTime = timespec(st.Btime)
	}
	return id
}

func timespec(t unix.StatxTimestamp) Timespec {
	return Timespec{Sec: t.Sec, Nsec: int32(t.Nsec)}
}

// join puts a relative path below a directory without touching its bytes.
func join(dir, path string) string {
	switch {
	case path == "":
		return dir
	case strings.HasSuffix(dir, "/"):
		return dir + path
	}
	return dir + "/" + path
}
