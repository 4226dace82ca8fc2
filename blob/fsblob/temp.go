package fsblob

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// temp is a file on its way to become an object: unnamed, or named in .tmp and then
// locked, so that a sweep knows that its writer lives.
type temp struct {
	*os.File
	dir  string // .tmp
	name string // "" while it has no name of its own
}

func (d *Driver) create() (*temp, error) {
	dir := filepath.Join(d.root, tempDir)
	if !d.named.Load() {
		f, err := openUnnamed(d.root)
		if err == nil {
			return &temp{File: f, dir: dir}, nil
		}
		if !errors.Is(err, errNoUnnamed) {
			return nil, d.lost(err)
		}
		d.named.Store(true)
	}
	f, err := createNamed(dir)
	if err != nil {
		return nil, d.lost(err)
	}
	return &temp{File: f, dir: dir, name: f.Name()}, nil
}

// lost tells a store that went away from other errors of making a file in it.
func (d *Driver) lost(err error) error {
	if isAbsent(err) {
		if gone := d.checkRoot(); gone != nil {
			return gone
		}
	}
	return err
}

// createNamed makes a locked file in .tmp. Between the making and the locking a sweep may
// take it for a dead one; then it tries again.
func createNamed(dir string) (*os.File, error) {
	for range linkTries {
		f, err := os.OpenFile(filepath.Join(dir, rand.Text()), os.O_CREATE|os.O_EXCL|os.O_RDWR, fileMode)
		if errors.Is(err, fs.ErrNotExist) {
			if err = os.Mkdir(dir, dirMode); err == nil || errors.Is(err, fs.ErrExist) {
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		free, err := lock(f)
		if err != nil {
			return nil, errors.Join(err, os.Remove(f.Name()), f.Close())
		}
		if free && isFile(f, f.Name()) {
			return f, nil
		}
		_ = f.Close() // a sweep has it; nothing was written to it
	}
	return nil, fmt.Errorf("temporary files in %s were removed again and again", dir)
}

// isFile tells whether path still names the open file.
func isFile(f *os.File, path string) bool {
	open, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Lstat(path)
	return err == nil && os.SameFile(open, named)
}

// link gives the file its name as an object unless that is taken (fs.ErrExist).
func (t *temp) link(target string) error {
	if t.name == "" {
		return linkUnnamed(t.File, target)
	}
	err := renameNew(t.name, target)
	if errors.Is(err, errors.ErrUnsupported) {
		err = t.linkNamed(target)
	}
	if err == nil {
		t.name = ""
	}
	return err
}

// linkNamed is for file systems that cannot rename without replacing. A server may say
// that the name exists when it was our own request that made it, sent twice.
func (t *temp) linkNamed(target string) error {
	err := os.Link(t.name, target)
	if err != nil && !(errors.Is(err, fs.ErrExist) && isFile(t.File, target)) {
		return err
	}
	_ = os.Remove(t.name) // a second name of the object by now; a sweep removes it else
	return nil
}

// replace gives the file the name of an object that exists.
func (t *temp) replace(target string) error {
	if t.name == "" {
		if err := t.nameIt(); err != nil {
			return err
		}
	}
	if err := os.Rename(t.name, target); err != nil {
		return err
	}
	t.name = ""
	return nil
}

// nameIt gives an unnamed file a name in .tmp, since only a named one can replace.
func (t *temp) nameIt() error {
	if _, err := lock(t.File); err != nil { // nobody else can have it
		return err
	}
	name := filepath.Join(t.dir, rand.Text())
	if err := os.Mkdir(t.dir, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := linkUnnamed(t.File, name); err != nil {
		return err
	}
	t.name = name
	return nil
}

// discard closes the file, and removes it unless it became an object.
func (t *temp) discard() {
	if t.name != "" {
		_ = os.Remove(t.name) // a sweep removes it else
	}
	_ = t.Close() // synced before, if it matters
}

// SweepTemp implements blob.TempSweeper: it removes the files in .tmp whose writers are
// dead, which is to say that nobody holds their locks.
func (d *Driver) SweepTemp(ctx context.Context) (n int, err error) {
	dir := filepath.Join(d.root, tempDir)
	found, err := readNames(dir)
	if err != nil {
		if isAbsent(err) {
			return 0, d.checkRoot()
		}
		return 0, explain(err, d.root)
	}
	for _, f := range found {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		removed, err := sweep(filepath.Join(dir, f.Name()))
		if err != nil {
			return n, explain(err, d.root)
		}
		if removed {
			n++
		}
	}
	_ = rmdir(dir) // fails while files are in use there
	return n, nil
}

// sweep removes one file unless its writer lives, or it became an object meanwhile.
func sweep(path string) (removed bool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|noFollow, 0)
	if err != nil {
		if isAbsent(err) {
			return false, nil
		}
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if free, err := lock(f); err != nil || !free || !isDead(f) || !isFile(f, path) {
		return false, err
	}
	if err := unlink(path); err != nil && !isAbsent(err) {
		return false, err
	}
	return true, nil
}
