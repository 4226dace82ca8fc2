// Package snapstore keeps whole snapshots of a member's state in a directory: made here,
// received from other members, served to them, and removed when newer ones are there.
//
// The package hides what lies on the disk and in which order it gets there. Each snapshot
// is a directory of files beside a manifest, which names every file and the digest of
// every chunk; a snapshot that List tells of is complete, durable, and the bytes that its
// id says, or else reading it ends in ErrCorrupt. What is not complete has another name
// and never gets that one: a Draft that the state machine fills, or a Receipt that chunks
// from other members fill and that survives restarts.
//
// A Store owns its directory; a second Open of it is refused. All methods of Store, Pin
// and Receipt may be called concurrently, those of a Draft may not. Snapshots do not
// change; they share files by hard links, with each other and with the state machine, which
// therefore must never write to a file again that it put into a draft or linked from a
// snapshot. No method starts a goroutine that outlives it, save that a Receipt flushes
// complete files in the background until it is committed, closed or dropped.
//
// Errors are ErrCorrupt, ErrNoSpace, ErrBusy, ErrClosed, ErrIncomplete, fs.ErrNotExist and
// fs.ErrExist where methods say so, and those of the file system. The layout is described
// in docs/format.md.
package snapstore

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

var (
	// ErrNoSpace says that the disk cannot take what was asked for.
	ErrNoSpace = errors.New("not enough space")
	// ErrIncomplete says that a receipt lacks chunks, which its Missing names.
	ErrIncomplete = errors.New("incomplete")
	// ErrCorrupt says that bytes are not the ones that a digest stands for.
	ErrCorrupt = sentinel.Corrupt
	// ErrBusy says that the directory, or the receipt of a snapshot, is in use already.
	ErrBusy = sentinel.Busy
	// ErrClosed says that the store, draft, receipt or pin was closed.
	ErrClosed = sentinel.Closed
)

// What lies in the directory of a store, beside one directory for each snapshot that has
// the snapshot's id as its name: no two ever have the same (F42).
const (
	lockName       = "LOCK"
	receiveName    = "receive"    // receipts, one directory each
	quarantineName = "quarantine" // damaged snapshots
	draftPrefix    = "draft-"
	asidePrefix    = "drop-" // about to be removed

	// What lies in the directory of a snapshot or a receipt.
	manifestName = "manifest"
	dataName     = "data"
	marksName    = "marks"   // which files were verified
	journalName  = "journal" // of a receipt
	whyName      = "why"     // of a snapshot in quarantine
)

// Defaults of Options, and what bounds the space that leftovers take.
const (
	defaultRetain  = 2
	defaultReserve = 256 << 20 // room for some segments of the Raft log while a transfer runs
	reservePart    = 16        // but no more than this part of a small disk
	maxQuarantined = 2
	maxIdle        = 4 // receipts that nobody works on
)

// Options are the choices that a Store leaves to its owner. The zero value is valid, and
// so is a nil pointer.
type Options struct {
	// Retain is how many of the newest snapshots Retire keeps; 0 stands for 2.
	Retain int
	// Reserve is how many bytes a transfer leaves free on the disk. 0 stands for 256 MiB,
	// or a sixteenth of the disk if that is less; a negative number for nothing.
	Reserve int64
	// Logger hears what Open and Reuse come across that nobody else is told of.
	Logger *slog.Logger

	around func(op, name string, do func() error) error // see disk
}

func (o *Options) withDefaults() Options {
	var opts Options
	if o != nil {
		opts = *o
	}
	opts.Retain = cmp.Or(opts.Retain, defaultRetain)
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	return opts
}

// Held is a snapshot that lies durable and complete in the store.
type Held = protocol.Held

// Store is a directory of snapshots. See the package comment.
type Store struct {
	dir  string
	disk *disk
	lock *os.File
	opts Options

	mu struct { // taken for moments, never around I/O
		sync.Mutex
		held   map[protocol.ID]*holding
		busy   map[protocol.ID]bool // receipts in use
		closed bool
	}
}

// holding is a snapshot of the store.
type holding struct {
	Held
	name  string
	index *snapshot.Index
	pins  int    // guarded by Store.mu
	marks []mark // by entry, as of when its bytes were verified; guarded by Store.mu
}

func (h *holding) data() string { return path.Join(h.name, dataName) }

// Open opens the store in a directory, which is made if need be, and cleans it up: drafts
// and half removed snapshots go, snapshots that are not complete go to quarantine, receipts
// stay for Receive to go on with. An item that cannot be read or removed is logged and left
// for the next time; it does not keep the others from being used. ErrBusy says that another
// process, or this one, has the directory open.
func Open(dir string, opts *Options) (*Store, error) {
	s, err := open(dir, opts.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("open snapshot store %s: %w", dir, err)
	}
	return s, nil
}

func open(dir string, opts Options) (*Store, error) {
	if opts.Retain < 0 {
		return nil, fmt.Errorf("retain %d snapshots", opts.Retain)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{dir: dir, disk: &disk{root: root, around: opts.around}, opts: opts}
	s.mu.held, s.mu.busy = map[protocol.ID]*holding{}, map[protocol.ID]bool{}
	if err := errors.Join(s.takeLock(), s.prepare()); err != nil {
		return nil, errors.Join(err, s.release())
	}
	return s, nil
}

func (s *Store) takeLock() error {
	f, err := s.disk.openNew(lockName)
	if err != nil {
		return err
	}
	var free bool
	err = s.disk.do("lock", lockName, func() (err error) { free, err = lockFile(f); return err })
	if err == nil && !free {
		err = fmt.Errorf("%w: another store has it open", ErrBusy)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	s.lock = f
	return nil
}

// prepare makes the fixed directories and sweeps, if the lock was taken.
func (s *Store) prepare() error {
	if s.lock == nil {
		return nil
	}
	for _, name := range []string{receiveName, quarantineName} {
		if err := s.disk.mkdir(name); err != nil {
			return err
		}
	}
	return s.sweep()
}

// release gives up the lock with the descriptor that holds it.
func (s *Store) release() error {
	err := s.disk.root.Close()
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	return err
}

// Close gives up the directory. Drafts, receipts and pins are to be closed before; files
// that a Pin has opened stay valid.
func (s *Store) Close() error {
	s.mu.Lock()
	was := s.mu.closed
	s.mu.closed = true
	s.mu.Unlock()
	if was {
		return nil
	}
	if err := s.release(); err != nil {
		return fmt.Errorf("close snapshot store %s: %w", s.dir, err)
	}
	return nil
}

// List returns the snapshots, oldest index first.
func (s *Store) List() []Held {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Held
	for _, h := range s.sortedLocked() {
		list = append(list, h.Held)
	}
	return list
}

func (s *Store) sortedLocked() []*holding {
	return slices.SortedFunc(maps.Values(s.mu.held), func(a, b *holding) int { return a.ID.Compare(b.ID) })
}

// Get returns a snapshot, or fs.ErrNotExist.
func (s *Store) Get(id protocol.ID) (Held, error) {
	h, err := s.find(id)
	if err != nil {
		return Held{}, fmt.Errorf("get snapshot: %w", err)
	}
	return h.Held, nil
}

// Dir returns the directory with the files of a snapshot, or fs.ErrNotExist. Nobody may
// change anything there. It stays as long as the snapshot is retained or pinned.
func (s *Store) Dir(id protocol.ID) (string, error) {
	h, err := s.find(id)
	if err != nil {
		return "", fmt.Errorf("find directory of snapshot: %w", err)
	}
	return filepath.Join(s.dir, h.name, dataName), nil
}

func (s *Store) find(id protocol.ID) (*holding, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.findLocked(id)
}

func (s *Store) findLocked(id protocol.ID) (*holding, error) {
	if s.mu.closed {
		return nil, ErrClosed
	}
	h := s.mu.held[id]
	if h == nil {
		return nil, fmt.Errorf("%s: %w", id.Short(), fs.ErrNotExist)
	}
	return h, nil
}

// use finds a snapshot and keeps Retire from it until done is called.
func (s *Store) use(id protocol.ID) (h *holding, done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h, err = s.findLocked(id); err != nil {
		return nil, nil, err
	}
	h.pins++
	return h, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		h.pins--
	}, nil
}

// useAll is use of all snapshots, newest first.
func (s *Store) useAll() (all []*holding, done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all = s.sortedLocked()
	slices.Reverse(all)
	for _, h := range all {
		h.pins++
	}
	return all, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, h := range all {
			h.pins--
		}
	}
}

// marksOf returns a copy of the marks of a snapshot.
func (s *Store) marksOf(h *holding) []mark {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(h.marks)
}

func (s *Store) setMark(h *holding, entry int, m mark) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h.marks[entry] = m
}

// publish gives a complete and durable directory its name as a snapshot. When that fails
// the directory has its old name again, unless the error says that it could not be given
// back; then it is met as a snapshot, which it is, at the next Open. If the snapshot is
// held by then, the directory is one too many.
func (s *Store) publish(from string, m *Manifest, marks []mark) (Held, error) {
	h := &holding{Held: Held{ID: m.ID, Meta: m.Meta, Bytes: m.Bytes()}, name: m.ID.String(), index: m.Index, marks: marks}
	err := s.disk.rename(from, h.name)
	if errors.Is(err, fs.ErrExist) {
		if twin, findErr := s.find(m.ID); findErr == nil {
			return twin.Held, s.disk.discard(from)
		}
	}
	if err == nil {
		err = s.disk.syncDir(".")
	}
	if dir := path.Dir(from); err == nil && dir != "." {
		err = s.disk.syncDir(dir)
	}
	if err != nil {
		return Held{}, errors.Join(err, s.unpublish(h.name, from))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.held[m.ID] = h
	return h.Held, nil
}

// unpublish gives a directory its old name back, unless it has it.
func (s *Store) unpublish(name, from string) error {
	_, err := s.disk.lstat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return s.disk.rename(name, from)
	}
	return err
}
