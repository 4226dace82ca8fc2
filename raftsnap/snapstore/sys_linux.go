package snapstore

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// canLink says whether links of a file can be told from a file of one name.
const canLink = true

// identify returns what tells a file from every other one and from itself after a change,
// and how many names it has.
func identify(info fs.FileInfo) (mark, uint64) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return mark{}, 1
	}
	return mark{Ino: st.Ino, Size: st.Size, MTime: st.Mtim.Nano()}, uint64(st.Nlink)
}

// lockFile takes the lock of an open file unless somebody has it.
func lockFile(f *os.File) (free bool, err error) {
	err = ignoreEINTR(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
	if err == unix.EWOULDBLOCK {
		return false, nil
	}
	return err == nil, err
}

// volume tells how much room the file system of dir has.
func volume(dir *os.File) (free, total, block int64, err error) {
	var st unix.Statfs_t
	err = ignoreEINTR(func() error { return unix.Fstatfs(int(dir.Fd()), &st) })
	if err != nil {
		return 0, 0, 0, &os.PathError{Op: "statfs", Path: dir.Name(), Err: err}
	}
	block = int64(st.Bsize)
	free = int64(st.Bavail) * block
	if os.Geteuid() == 0 {
		free = int64(st.Bfree) * block
	}
	return free, int64(st.Blocks) * block, block, nil
}

// startWriteback asks the kernel to begin writing. It is a hint; its errors come back at
// the sync.
func startWriteback(f *os.File, offset, length int64) {
	_ = unix.SyncFileRange(int(f.Fd()), offset, length, unix.SYNC_FILE_RANGE_WRITE)
}

func syncData(f *os.File) error {
	if err := ignoreEINTR(func() error { return unix.Fdatasync(int(f.Fd())) }); err != nil {
		return &os.PathError{Op: "sync", Path: f.Name(), Err: err}
	}
	return nil
}

// syncNames syncs a directory. Some file systems have no such sync because they need none.
func syncNames(dir *os.File) error {
	err := dir.Sync()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

func ignoreEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}
