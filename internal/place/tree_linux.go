package place

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// tree is an open directory, and the only way in which this package touches what lies below
// it. Every path is resolved by the kernel below the descriptor: "..", absolute paths,
// symbolic links anywhere in the path and mount points are errors, never followed (I6).
type tree struct {
	fd   int
	path string                // for messages
	fail func(op string) error // tests: the error to return in place of a change
}

// noOpenat2 is set once the kernel, or a sandbox around it, turned out not to know openat2.
var noOpenat2 atomic.Bool

// openTree opens a directory by a path that is trusted.
func openTree(dir string, fail func(op string) error) (*tree, error) {
	fd, err := retry(func() (int, error) { return unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	return &tree{fd: fd, path: dir, fail: fail}, nil
}

// sub opens a directory below t.
func (t *tree) sub(p string) (*tree, error) {
	fd, err := t.open(p, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return &tree{fd: fd, path: t.join(p), fail: t.fail}, nil
}

// close closes the descriptor. It may be called on nil and more than once.
func (t *tree) close() {
	if t != nil && t.fd >= 0 {
		unix.Close(t.fd)
		t.fd = -1
	}
}

func (t *tree) join(p string) string { return path.Join(t.path, p) }

// do runs one change of the file system and names it in its error.
func (t *tree) do(op, p string, f func() error) error {
	if t.fail != nil {
		if err := t.fail(op); err != nil {
			return &fs.PathError{Op: op, Path: t.join(p), Err: err}
		}
	}
	_, err := retry(func() (struct{}, error) { return struct{}{}, f() })
	return t.named(op, p, err)
}

// named puts operation and path to a bare error.
func (t *tree) named(op, p string, err error) error {
	if _, ok := errors.AsType[*fs.PathError](err); err == nil || ok {
		return err
	}
	return &fs.PathError{Op: op, Path: t.join(p), Err: err}
}

// retry repeats a system call that a signal interrupted.
func retry[T any](f func() (T, error)) (T, error) {
	for {
		if v, err := f(); !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}

// inside reports whether p is a clean relative path: no "", "." or ".." in it, no NUL.
func inside(p string) bool {
	for c := range strings.SplitSeq(p, "/") {
		if c == "" || c == "." || c == ".." || strings.IndexByte(c, 0) >= 0 {
			return false
		}
	}
	return true
}

// open opens what lies at p; "" is the directory itself.
func (t *tree) open(p string, flags int, mode uint32) (int, error) {
	if p == "" {
		p = "."
	} else if !inside(p) {
		return -1, t.named("open", p, errors.New("path leads out of the directory"))
	}
	fd, err := retry(func() (int, error) {
		return openBelow(t.fd, p, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_LARGEFILE, mode)
	})
	if err != nil {
		return -1, t.named("open", p, err)
	}
	return fd, nil
}

func openBelow(fd int, p string, flags int, mode uint32) (int, error) {
	if noOpenat2.Load() {
		return walkBelow(fd, p, flags, mode)
	}
	f, err := unix.Openat2(fd, p, &unix.OpenHow{
		Flags:   uint64(flags),
		Mode:    uint64(mode),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err == unix.ENOSYS || err == unix.EPERM && !knowsOpenat2() {
		noOpenat2.Store(true)
		return walkBelow(fd, p, flags, mode)
	}
	return f, err
}

// knowsOpenat2 tells a sandbox that answers EPERM from a file that may not be opened.
func knowsOpenat2() bool {
	fd, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC})
	if err == nil {
		unix.Close(fd)
	}
	return err == nil
}

// walkBelow does by one openat for each component what openat2 does in one step. A mount
// point is told by its device number, so a bind mount of the same file system is not seen.
func walkBelow(fd int, p string, flags int, mode uint32) (int, error) {
	var top unix.Stat_t
	if err := unix.Fstat(fd, &top); err != nil {
		return -1, err
	}
	at := fd
	for rest, more := p, true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		f, m := flags, mode
		if more {
			f, m = unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0
		}
		next, err := unix.Openat(at, name, f, m)
		if at != fd {
			unix.Close(at)
		}
		if err != nil {
			return -1, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(next, &st); err != nil || st.Dev != top.Dev {
			unix.Close(next)
			return -1, cmpErr(err, unix.EXDEV)
		}
		at = next
	}
	return at, nil
}

func cmpErr(err, instead error) error {
	if err != nil {
		return err
	}
	return instead
}

// at runs f with a descriptor of the directory that holds p and p's name in it.
func (t *tree) at(p string, f func(fd int, name string) error) error {
	if !inside(p) {
		return errors.New("path leads out of the directory")
	}
	dir, name := path.Split(p)
	if dir == "" {
		return f(t.fd, name)
	}
	fd, err := t.open(dir[:len(dir)-1], unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd, name)
}

func (t *tree) mkdir(p string) error {
	return t.do("mkdir", p, func() error {
		return t.at(p, func(fd int, name string) error { return unix.Mkdirat(fd, name, 0o700) })
	})
}

func (t *tree) symlink(target, p string) error {
	return t.do("symlink", p, func() error {
		return t.at(p, func(fd int, name string) error { return unix.Symlinkat(target, fd, name) })
	})
}

// link makes p another name of old. A symbolic link at old is linked, not followed.
func (t *tree) link(old, p string) error {
	return t.do("link", p, func() error {
		return t.at(old, func(ofd int, oname string) error {
			return t.at(p, func(fd int, name string) error { return unix.Linkat(ofd, oname, fd, name, 0) })
		})
	})
}

func (t *tree) unlink(p string, flags int) error {
	return t.do("remove", p, func() error {
		return t.at(p, func(fd int, name string) error { return unix.Unlinkat(fd, name, flags) })
	})
}

// move renames p of t to q of to. flags are those of renameat2.
func (t *tree) move(p string, to *tree, q string, flags uint) error {
	op := "rename"
	switch flags {
	case unix.RENAME_EXCHANGE:
		op = "exchange"
	case unix.RENAME_NOREPLACE:
		op = "place"
	}
	return t.do(op, p, func() error {
		return t.at(p, func(ofd int, oname string) error {
			return to.at(q, func(fd int, name string) error {
				if flags == 0 {
					return unix.Renameat(ofd, oname, fd, name)
				}
				return unix.Renameat2(ofd, oname, fd, name, flags)
			})
		})
	})
}

// lstat returns what lies at p, a symbolic link itself.
func (t *tree) lstat(p string) (st unix.Stat_t, err error) {
	if p == "" {
		return st, t.named("stat", p, unix.Fstat(t.fd, &st))
	}
	err = t.at(p, func(fd int, name string) error {
		return unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	})
	return st, t.named("stat", p, err)
}

// inode returns the inode number at p, or 0 when nothing is there.
func (t *tree) inode(p string) (uint64, error) {
	st, err := t.lstat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return st.Ino, err
}

// names lists the directory at p.
func (t *tree) names(p string) ([]string, error) {
	fd, err := t.open(p, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), t.join(p))
	defer f.Close()
	return f.Readdirnames(-1)
}

// chmod sets the mode of a file or directory, which need not be readable.
func (t *tree) chmod(p string, mode uint32) error {
	return t.do("chmod", p, func() error {
		fd, err := t.open(p, unix.O_PATH, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Chmod(procPath(fd), mode)
	})
}

// procPath is a path for calls that take no descriptor, or none opened with O_PATH.
func procPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

func (t *tree) sync() error {
	return t.do("fsync", "", func() error { return unix.Fsync(t.fd) })
}

// writeFile makes or replaces a small file durably.
func (t *tree) writeFile(name string, data []byte) error {
	return t.do("write", name, func() error {
		tmp := name + ".new"
		fd, err := t.open(tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), t.join(tmp))
		_, err = f.Write(data)
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			return err
		}
		if err := t.move(tmp, t, name, 0); err != nil {
			return err
		}
		return t.sync()
	})
}

// readFile reads a small file; one above 16 MiB is an error.
func (t *tree) readFile(name string) ([]byte, error) {
	fd, err := t.open(name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), t.join(name))
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > 16<<20 {
		return nil, t.named("read", name, errors.New("not a small file"))
	}
	data := make([]byte, info.Size())
	if _, err := f.ReadAt(data, 0); err != nil {
		return nil, err
	}
	return data, nil
}
