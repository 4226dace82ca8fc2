package source

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"syscall"
)

// OpenView returns the image of a view. If it fails, what holds the moment is still the
// caller's: Release is not called. The file is opened by nothing but O_PATH, neither here
// nor later: a process that closes any other descriptor of a file loses all the POSIX
// locks that it has on it, those of a database too.
func OpenView(v View) (Image, error) {
	img, err := openSingle(v.Path, filepath.Base(v.Path))
	if err != nil {
		return nil, err
	}
	w := &view{image: img, spec: v}
	e := &img.entries[0]
	if sys, ok := v.File.Sys().(*syscall.Stat_t); !ok || sys.Ino != e.Identity.Ino || sys.Dev != e.Identity.Dev {
		return nil, errors.Join(img.explain(e.Path, errReplaced), img.Release())
	}
	e.Fresh, e.ChunkSize = true, v.ChunkSize
	e.Size, e.Identity.Size = v.Size, v.Size
	for _, info := range v.Locked {
		if sys, ok := info.Sys().(*syscall.Stat_t); ok {
			w.locked = append(w.locked, inode{sys.Dev, sys.Ino})
		}
	}
	lockedFiles.add(w.locked, 1)
	img.remove = w.end
	return w, nil
}

// A view is an image whose only file is not read from where it lies. It is its own File.
type view struct {
	*image
	spec   View
	locked []inode

	// mu is held for reading by whoever reads, so that end waits.
	mu    sync.RWMutex
	ended bool
}

var errReplaced = fmt.Errorf("%w: replaced by another file", ErrChanged)

// same tells whether the path still leads to the file that is read.
func (w *view) same() error {
	at, err := w.tree.stat(w.single)
	if err != nil {
		return err
	}
	if id := w.entries[0].Identity; at.Ino != id.Ino || device(&at) != id.Dev {
		return errReplaced
	}
	return nil
}

// end waits for those who read and lets the moment go.
func (w *view) end() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	defer lockedFiles.add(w.locked, -1)
	return w.spec.Release()
}

func (w *view) Open(path string) (File, error) {
	e, err := w.find(path)
	if err == nil {
		err = w.use(w.same)
	}
	if err != nil {
		return nil, fmt.Errorf("open %w", w.explain(path, err))
	}
	return viewFile{w, e}, nil
}

// use calls f while the moment is held.
func (w *view) use(f func() error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.ended {
		return ErrClosed
	}
	return f()
}

// CacheKey is empty: the identity of the live file says nothing about the moment.
func (w *view) CacheKey() string { return "" }

// A viewFile is the file of a view. It holds nothing of its own.
type viewFile struct {
	*view
	entry *Entry
}

func (f viewFile) Identity() Identity { return f.entry.Identity }
func (f viewFile) Close() error       { return nil }

func (f viewFile) ReadAt(p []byte, off int64) (n int, err error) {
	err = f.use(func() error {
		short := off+int64(len(p)) > f.spec.Size
		if short {
			p = p[:max(0, f.spec.Size-off)]
		}
		if n, err = f.spec.Content.ReadAt(p, off); n == len(p) {
			err = nil
		}
		if err == nil && short {
			return io.EOF
		}
		return err
	})
	if err != nil && err != io.EOF {
		err = fmt.Errorf("read %w", f.explain(f.entry.Path, err))
	}
	return n, err
}

// Runs returns the whole content: databases of pages have no holes worth the search.
func (f viewFile) Runs() ([]Run, error) {
	if f.spec.Size == 0 {
		return nil, nil
	}
	return []Run{{0, f.spec.Size}}, nil
}

func (f viewFile) Check() error {
	err := f.use(func() error {
		if err := f.same(); err != nil || f.spec.Check == nil {
			return err
		}
		return f.spec.Check()
	})
	if err != nil {
		return fmt.Errorf("check %w", f.explain(f.entry.Path, err))
	}
	return nil
}

type inode struct{ dev, ino uint64 }

// inodes counts files. It is safe for concurrent use.
type inodes struct {
	mu    sync.Mutex
	count map[inode]int
}

// lockedFiles are those that the views of this process name as Locked: such locks are the
// process's, so the set is too.
var lockedFiles = inodes{count: map[inode]int{}}

func (s *inodes) add(files []inode, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range files {
		if s.count[f] += n; s.count[f] == 0 {
			delete(s.count, f)
		}
	}
}

// errLocked is a file that is read as a store of its own, under locks that would be lost.
var errLocked = errors.New("is being backed up as a store of its own, and reading it here too would take its locks away: leave it out of this one")

func (s *inodes) check(id Identity) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count[inode{id.Dev, id.Ino}] > 0 {
		return errLocked
	}
	return nil
}
