package snapstore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"
)

const (
	// writeSize is how many bytes a write call has. Much larger ones make the kernel look
	// for large runs of free memory, which is slow on a virtual machine.
	writeSize = 128 << 10
	// readSize is how many bytes are read between two steps of hashing, and two waits.
	readSize = 256 << 10
	// writebackSize is from how many bytes on a chunk is sent to the disk at once, so that
	// the sync at the end has little to wait for and no big wave of writes meets the log.
	writebackSize = 1 << 20
)

// disk makes every call to the file system below the directory of a store. Names are slash
// separated and relative to that directory, which none of them can leave: they go through
// an os.Root.
type disk struct {
	root *os.Root
	// around, if set, is called with each operation in place of it: tests fail it, kill the
	// process before it, or note what it made durable.
	around func(op, name string, do func() error) error
}

func (d *disk) do(op, name string, do func() error) error {
	var err error
	if d.around == nil {
		err = do()
	} else {
		err = d.around(op, name, do)
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}

func (d *disk) open(name string) (f *os.File, err error) {
	err = d.do("open", name, func() error { f, err = d.root.Open(name); return err })
	return f, err
}

// openNew opens a file for writing and creates it if need be.
func (d *disk) openNew(name string) (f *os.File, err error) {
	err = d.do("create", name, func() error {
		f, err = d.root.OpenFile(name, os.O_RDWR|os.O_CREATE, fileMode)
		return err
	})
	return f, err
}

func (d *disk) lstat(name string) (info fs.FileInfo, err error) {
	err = d.do("stat", name, func() error { info, err = d.root.Lstat(name); return err })
	return info, err
}

func (d *disk) names(name string) (list []fs.DirEntry, err error) {
	err = d.do("list", name, func() error {
		f, err := d.root.Open(name)
		if err != nil {
			return err
		}
		list, err = f.ReadDir(-1)
		return errors.Join(err, f.Close())
	})
	return list, err
}

// readFile reads a file of at most limit bytes.
func (d *disk) readFile(name string, limit int64) (data []byte, err error) {
	err = d.do("read", name, func() error {
		f, err := d.root.Open(name)
		if err != nil {
			return err
		}
		data, err = io.ReadAll(io.LimitReader(f, limit+1))
		if err == nil && int64(len(data)) > limit {
			err = corruptf("%s has more than %d bytes", name, limit)
		}
		return errors.Join(err, f.Close())
	})
	return data, err
}

func (d *disk) readAt(f *os.File, name string, p []byte, offset int64) error {
	return d.do("read", name, func() error {
		_, err := f.ReadAt(p, offset)
		return err
	})
}

// writeFile makes a file with the given content. With durable set it is on the disk when
// the call returns, though not yet its name.
func (d *disk) writeFile(name string, data []byte, durable bool) error {
	f, err := d.openNew(name)
	if err != nil {
		return err
	}
	err = d.truncate(f, name, int64(len(data)))
	if err == nil {
		err = d.write(f, name, data, 0)
	}
	if err == nil && durable {
		err = d.sync(f, name)
	}
	return errors.Join(err, f.Close())
}

// write writes in small pieces and starts the writeback of long ones.
func (d *disk) write(f *os.File, name string, p []byte, offset int64) error {
	return d.do("write", name, func() error {
		for at := 0; at < len(p); at += writeSize {
			if _, err := f.WriteAt(p[at:min(at+writeSize, len(p))], offset+int64(at)); err != nil {
				return err
			}
		}
		if len(p) >= writebackSize {
			startWriteback(f, offset, int64(len(p)))
		}
		return nil
	})
}

func (d *disk) truncate(f *os.File, name string, size int64) error {
	return d.do("truncate", name, func() error { return f.Truncate(size) })
}

// syncError says that a sync failed. What the disk has then nobody knows, and a second sync
// may succeed though the first one lost what it was for; so there must be none.
type syncError struct{ error }

func (e *syncError) Unwrap() error { return e.error }

func isSyncError(err error) bool {
	_, ok := errors.AsType[*syncError](err)
	return ok
}

// sync makes the bytes of a file durable, and its length.
func (d *disk) sync(f *os.File, name string) error {
	if err := d.do("sync", name, func() error { return syncData(f) }); err != nil {
		return &syncError{err}
	}
	return nil
}

// syncDir makes the names in a directory durable.
func (d *disk) syncDir(name string) error {
	err := d.do("syncdir", name, func() error {
		f, err := d.root.Open(name)
		if err != nil {
			return err
		}
		return errors.Join(syncNames(f), f.Close())
	})
	if err != nil {
		return &syncError{err}
	}
	return nil
}

// mkdir makes a directory unless it exists.
func (d *disk) mkdir(name string) error {
	err := d.do("mkdir", name, func() error { return d.root.Mkdir(name, dirMode) })
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

func (d *disk) rename(from, to string) error {
	return d.do("rename", to, func() error { return d.root.Rename(from, to) })
}

func (d *disk) link(from, to string) error {
	return d.do("link", to, func() error { return d.root.Link(from, to) })
}

// remove removes a file, or a directory with all that is in it. What is not there is fine.
func (d *disk) remove(name string) error {
	return d.do("remove", name, func() error { return d.root.RemoveAll(name) })
}

// discard removes a directory that must not be met half removed: it loses its name first.
func (d *disk) discard(name string) error {
	aside := asidePrefix + path.Base(name)
	if err := d.remove(aside); err != nil {
		return err
	}
	err := d.rename(name, aside)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if dir := path.Dir(name); err == nil && dir != "." {
		err = d.syncDir(dir)
	}
	if err == nil {
		err = d.syncDir(".")
	}
	if err == nil {
		err = d.remove(aside)
	}
	return err
}
