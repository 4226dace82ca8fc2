package place

import (
	"errors"
	"path"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	removers    = 16 // names that are removed at once
	removeBatch = 16 // names of one directory that one of them takes
)

// removal removes what lies below a tree, several names at a time: on file systems that
// discard freed blocks at once, each removal waits for the disk (BenchmarkTiny).
type removal struct{ slots chan struct{} }

// remove removes p and all below it, read-only directories too. What is not there is fine.
func (t *tree) remove(p string) error {
	err := t.unlink(p, 0)
	if isDirError(err) {
		r := removal{make(chan struct{}, removers-1)}
		return r.dir(t, p, err)
	}
	return absent(err)
}

// isDirError reports whether an error of unlink may mean a directory.
func isDirError(err error) bool { return errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) }

// dir removes a directory. because is why it could not be unlinked like a file.
func (r removal) dir(t *tree, p string, because error) error {
	st, err := t.lstat(p)
	if err != nil {
		return err
	}
	if !isDir(st) {
		return because
	}
	if st.Mode&0o700 != 0o700 {
		if err := t.chmod(p, 0o700); err != nil {
			return err
		}
	}
	if err := r.empty(t, p); err != nil {
		return err
	}
	return t.unlink(p, unix.AT_REMOVEDIR)
}

// empty removes all below p: first what is no directory, and when that is done the
// directories. Each remover holds one descriptor for each KiB of path and one more, so the
// depth of a tree does not matter.
func (r removal) empty(t *tree, p string) error {
	if len(p) > 1024 { // or paths would become longer than the kernel takes
		deep, err := t.sub(p)
		if err != nil {
			return err
		}
		defer deep.close()
		t, p = deep, ""
	}
	names, err := t.names(p)
	if err != nil {
		return err
	}
	dirs, err := r.files(t, p, names)
	if err != nil {
		return err
	}
	return spread(r, dirs, func(d subdir) error { return r.dir(t, path.Join(p, d.name), d.because) })
}

// subdir is a name that could not be unlinked, and why.
type subdir struct {
	name    string
	because error
}

// files unlinks what it can in the directory p and returns the rest.
func (r removal) files(t *tree, p string, names []string) (dirs []subdir, err error) {
	d, err := t.sub(p)
	if err != nil {
		return nil, err
	}
	defer d.close()
	var mu sync.Mutex
	err = spread(r, names, func(name string) error {
		err := d.unlink(name, 0)
		if !isDirError(err) {
			return absent(err)
		}
		mu.Lock()
		defer mu.Unlock()
		dirs = append(dirs, subdir{name, err})
		return nil
	})
	return dirs, err
}

// spread calls f for each item. Batches go to other goroutines while there are free slots,
// and are done here otherwise, so that a remover never waits for a slot.
func spread[T any](r removal, items []T, f func(T) error) error {
	var g errgroup.Group
	each := func(batch []T) error {
		for _, item := range batch {
			if err := f(item); err != nil {
				return err
			}
		}
		return nil
	}
	var err error
	for batch := range slices.Chunk(items, removeBatch) {
		select {
		case r.slots <- struct{}{}:
			g.Go(func() error {
				defer func() { <-r.slots }()
				return each(batch)
			})
		default:
			err = errors.Join(err, each(batch))
		}
	}
	return errors.Join(err, g.Wait())
}
