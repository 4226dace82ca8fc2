package fsblob

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	hasUnnamed = true
	noFollow   = unix.O_NOFOLLOW
)

// dirID tells a directory from one that had its name and inode number before.
type dirID struct {
	major, minor uint32
	ino          uint64
	born         unix.StatxTimestamp
	mode         uint16
}

func (id dirID) isDir() bool { return id.mode == unix.S_IFDIR }

// unique is false where the file system keeps no birth time: numbers are used again.
func (id dirID) unique() bool { return id.born != unix.StatxTimestamp{} }

func identify(path string) (dirID, error) {
	var st unix.Statx_t
	err := ignoreEINTR(func() error {
		return unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_BTIME, &st)
	})
	if err != nil {
		return dirID{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return dirID{st.Dev_major, st.Dev_minor, st.Ino, st.Btime, st.Mode & unix.S_IFMT}, nil
}

// openUnnamed makes a file without a name in a directory's file system.
func openUnnamed(dir string) (*os.File, error) {
	var fd int
	err := ignoreEINTR(func() (err error) {
		fd, err = unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, fileMode)
		return err
	})
	switch err {
	case nil:
	case unix.EOPNOTSUPP, unix.EISDIR, unix.EINVAL:
		return nil, errNoUnnamed
	default:
		return nil, &os.PathError{Op: "create in", Path: dir, Err: err}
	}
	// The name is for messages; the file has none.
	f := os.NewFile(uintptr(fd), dir)
	if _, err := os.Lstat(procPath(f)); err != nil { // no /proc here: it could not be linked
		return nil, errors.Join(errNoUnnamed, f.Close())
	}
	return f, nil
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// linkUnnamed names an unnamed file, unless the name is taken.
func linkUnnamed(f *os.File, target string) error {
	err := ignoreEINTR(func() error {
		return unix.Linkat(unix.AT_FDCWD, procPath(f), unix.AT_FDCWD, target, unix.AT_SYMLINK_FOLLOW)
	})
	switch err {
	case nil:
		return nil
	case unix.EPERM, unix.EOPNOTSUPP, unix.ENOSYS, unix.EINVAL:
		return errNoUnnamed
	}
	return &os.PathError{Op: "link", Path: target, Err: err}
}

// renameNew renames unless the new name is taken. It is errors.ErrUnsupported where the
// file system cannot do that in one step.
func renameNew(old, new string) error {
	err := ignoreEINTR(func() error {
		return unix.Renameat2(unix.AT_FDCWD, old, unix.AT_FDCWD, new, unix.RENAME_NOREPLACE)
	})
	switch err {
	case nil:
		return nil
	case unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP:
		return errors.ErrUnsupported
	}
	return &os.LinkError{Op: "rename", Old: old, New: new, Err: err}
}

// startWriteback asks the kernel to begin writing; it is a hint, its errors come back at
// the sync.
func startWriteback(f *os.File, offset, length int64) {
	_ = unix.SyncFileRange(int(f.Fd()), offset, length, unix.SYNC_FILE_RANGE_WRITE)
}

func syncFile(f *os.File) error { return f.Sync() }

// syncDir makes the names in a directory durable. Some file systems have no such sync
// because they need none.
func syncDir(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	err = f.Sync()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	return errors.Join(err, f.Close())
}

// lock takes the lock of a file if it is free.
func lock(f *os.File) (free bool, err error) {
	err = ignoreEINTR(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
	switch err {
	case nil:
		return true, nil
	case unix.EWOULDBLOCK:
		return false, nil
	}
	return false, &os.PathError{Op: "lock", Path: f.Name(), Err: err}
}

// isDead says whether the writer of a file whose lock was free is dead: always.
func isDead(*os.File) bool { return true }

func unlink(path string) error {
	if err := ignoreEINTR(func() error { return unix.Unlink(path) }); err != nil {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

func rmdir(path string) error { return ignoreEINTR(func() error { return unix.Rmdir(path) }) }

func ignoreEINTR(f func() error) error {
	for {
		if err := f(); err != syscall.EINTR {
			return err
		}
	}
}
