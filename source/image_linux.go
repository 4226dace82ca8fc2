package source

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"golang.org/x/sys/unix"
)

// An image is the Image of a tree of files.
type image struct {
	tree     *tree
	entries  []Entry
	skipped  []string
	single   string // name in the tree of the only entry; empty for a directory
	cacheKey string
	probeDir string
	flusher  flusher

	remove   func() error // what Release does after the tree is closed; nil for nothing
	released sync.Once
	outcome  error
}

var _ Image = (*image)(nil)

func (m *image) Entries() []Entry  { return m.entries }
func (m *image) CacheKey() string  { return m.cacheKey }
func (m *image) ProbeDir() string  { return m.probeDir }
func (m *image) Skipped() []string { return m.skipped }

func (m *image) Release() error {
	m.released.Do(func() {
		m.outcome = m.tree.close()
		if m.remove != nil {
			m.outcome = errors.Join(m.outcome, m.remove())
		}
	})
	return m.outcome
}

func (m *image) Open(path string) (File, error) {
	f, err := m.open(path)
	if err != nil {
		return nil, fmt.Errorf("open %w", m.explain(path, err))
	}
	return f, nil
}

func (m *image) open(path string) (*file, error) {
	e, err := m.find(path)
	if err != nil {
		return nil, err
	}
	if e.Type != Regular {
		return nil, fmt.Errorf("is a %s, not a file", e.Type)
	}
	if err := lockedFiles.check(e.Identity); err != nil {
		return nil, err
	}
	fd, err := m.openFile(e)
	if err != nil {
		return nil, err
	}
	f := &file{img: m, entry: e, fd: fd}
	if err := f.settle(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return f, nil
}

// openFile opens without waiting (the name may lead to a FIFO by now) and, where
// the kernel allows, without moving the access time.
func (m *image) openFile(e *Entry) (int, error) {
	const flags = unix.O_RDONLY | unix.O_NONBLOCK
	fd, err := m.tree.open(m.real(e.Path), flags|unix.O_NOATIME)
	if errors.Is(err, unix.EPERM) {
		return m.tree.open(m.real(e.Path), flags)
	}
	return fd, err
}

// real returns the path in the tree of an entry's path.
func (m *image) real(path string) string {
	if m.single != "" {
		return m.single
	}
	return path
}

func (m *image) find(path string) (*Entry, error) {
	e := findEntry(m.entries, path)
	if e == nil {
		return nil, fs.ErrNotExist
	}
	return e, nil
}

// explain names the path in full and turns errGone into ErrChanged.
func (m *image) explain(path string, err error) error {
	if errors.Is(err, errGone) {
		err = fmt.Errorf("%w: %w", ErrChanged, err)
	}
	return advise(join(m.tree.path, m.real(path)), err)
}
