package fsblob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/snapferry/snapferry/blob"
)

// dirSet remembers directories whose own names are known to be durable, so that a put
// into one syncs nothing above it. A directory that was removed and made again has another
// identity.
type dirSet struct {
	mu   sync.Mutex
	dirs map[string]dirID // mu guards
}

// maxDirs bounds the set; to forget costs some syncs.
const maxDirs = 1 << 14

func (s *dirSet) has(dir string, id dirID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	known, ok := s.dirs[dir]
	return ok && known == id
}

func (s *dirSet) add(dir string, id dirID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dirs == nil || len(s.dirs) >= maxDirs {
		s.dirs = map[string]dirID{}
	}
	s.dirs[dir] = id
}

// ensureDir makes a directory of the store and those above it. It also syncs the names of
// those that it finds, unless it knows that this was done: another process may have
// made them a moment ago. fs.ErrNotExist means that a racing Delete has removed one.
func (d *Driver) ensureDir(dir string) error {
	if dir == d.root {
		return d.checkRoot()
	}
	id, err := identify(dir)
	if err == nil && id.unique() && d.durable.has(dir, id) {
		return nil
	}
	if err != nil && !isAbsent(err) {
		return err
	}
	parent := filepath.Dir(dir)
	if err := d.ensureDir(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if id, err = identify(dir); err != nil {
		return err
	}
	if !id.isDir() {
		return fmt.Errorf("%s is an object, so it cannot have others below it", dir)
	}
	if err := syncDir(parent); err != nil {
		return err
	}
	d.durable.add(dir, id)
	return nil
}

// Delete implements blob.Driver. It removes directories that have become empty, and
// returns when the removals are on disk.
func (d *Driver) Delete(ctx context.Context, keys []string) error {
	changed := map[string]bool{}
	failed := map[string]error{}
	for _, k := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		path := d.path(k)
		switch err := unlink(path); {
		case err == nil:
			changed[filepath.Dir(path)] = true
		case !isAbsent(err) && !isDirectory(path):
			failed[k] = explain(err, d.root)
		}
	}
	if len(changed) == 0 {
		if err := d.checkRoot(); err != nil {
			return err
		}
	}
	if err := d.settle(changed); err != nil {
		return explain(err, d.root)
	}
	return blob.JoinKeys(failed)
}

func isDirectory(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.IsDir()
}

// settle prunes and syncs directories out of which something was removed.
func (d *Driver) settle(changed map[string]bool) error {
	left := map[string]bool{}
	for dir := range changed {
		for dir != d.root && rmdir(dir) == nil {
			dir = filepath.Dir(dir)
		}
		left[dir] = true
	}
	for dir := range left {
		if err := syncDir(dir); err != nil && !isAbsent(err) {
			return err
		}
	}
	return nil
}
