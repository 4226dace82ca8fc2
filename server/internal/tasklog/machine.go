package tasklog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/raftnode"
)

// Options tunes a Machine. The zero value and nil are valid.
type Options struct {
	// FS is where the state lies; default the operating system's.
	FS vfs.FS
	// MemTableSize is how many bytes are gathered in memory before they become a file;
	// up to four times as many are held. Default 32 MiB.
	MemTableSize uint64
	// CachedTasks is of how many tasks the heads are held in memory; up to twice as many
	// are. Default 100,000.
	CachedTasks int
	// Fatal is told that the state on disk is damaged or cannot be written, found out in
	// the midst of something that cannot go on. It must not return. Default: panic.
	Fatal func(error)
	// Failed is told, once, that the state cannot be written: the disk is full, say. Nothing
	// more is applied then, and what is under way may wait until the disk takes it after
	// all. Default: it is logged.
	Failed func(error)
	// Logger gets what goes wrong in the background; nil discards.
	Logger *slog.Logger

	broken *atomic.Bool // Failed was told
}

func (o *Options) withDefaults() Options {
	var out Options
	if o != nil {
		out = *o
	}
	if out.FS == nil {
		out.FS = vfs.Default
	}
	if out.MemTableSize == 0 {
		out.MemTableSize = 32 << 20
	}
	if out.CachedTasks <= 0 {
		out.CachedTasks = 100_000
	}
	if out.Fatal == nil {
		out.Fatal = func(err error) { panic(err) }
	}
	if out.Logger == nil {
		out.Logger = slog.New(slog.DiscardHandler)
	}
	if out.Failed == nil {
		out.Failed = func(err error) { out.Logger.Error("state", "err", err) }
	}
	out.broken = &atomic.Bool{}
	return out
}

// Entry is one committed entry of Raft's log; its data is a command, empty for entries of
// Raft itself.
type Entry = raftnode.Entry

var _ raftnode.StateMachine = (*Machine)(nil)

// Machine is the state of one member.
type Machine struct {
	opts  Options
	place place

	applied atomic.Uint64
	failed  error // of an Apply or Install; the state can be trusted no more
	heads   cache
	watch   watchers
	// verified are the tables of the newest snapshot, which VerifySnapshot alone uses.
	verified map[tableKey]bool

	mu struct { // guards db against being replaced or closed under a reader
		sync.RWMutex
		db *pebble.DB // nil once closed
	}
}

// errBroken is what Apply says after Failed was told why.
var errBroken = errors.New("the state cannot be written")

// Open opens the state in dir, or begins an empty one there.
func Open(dir string, opts *Options) (*Machine, error) {
	m := &Machine{opts: opts.withDefaults()}
	m.place = place{fs: m.opts.FS, dir: dir}
	m.heads.limit = m.opts.CachedTasks
	db, err := m.openCurrent()
	if err != nil {
		return nil, fmt.Errorf("open state %s: %w (if it is damaged, remove that directory and start again: the state is installed anew)", dir, err)
	}
	applied, err := readApplied(db)
	if err != nil {
		return nil, fmt.Errorf("open state %s: %w", dir, errors.Join(err, db.Close()))
	}
	m.mu.db = db
	m.applied.Store(applied)
	return m, nil
}

func (m *Machine) openCurrent() (*pebble.DB, error) {
	if err := m.place.find(); err != nil {
		return nil, err
	}
	if m.place.number != 0 {
		return m.place.open(m.place.number, false, &m.opts)
	}
	db, err := m.place.open(1, true, &m.opts)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(m.place.syncDir(m.place.dir), m.place.choose(1)); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// AppliedIndex returns the index of the last entry in the state.
func (m *Machine) AppliedIndex() uint64 { return m.applied.Load() }

// Snapshot makes dir, which does not exist, a copy of the state. Its files are links to
// tables that are never written again, and copies; nobody writes to them afterwards.
func (m *Machine) Snapshot(dir string) error {
	if m.failed != nil {
		return m.failed
	}
	// Without a log, what is in memory would be missing.
	if err := m.mu.db.Flush(); err != nil {
		return fmt.Errorf("snapshot state: flush: %w", err)
	}
	if err := m.mu.db.Checkpoint(dir); err != nil {
		return fmt.Errorf("snapshot state: %w", err)
	}
	return nil
}

// Install makes the state what dir holds, which Snapshot made on some member, and leaves
// dir as it is. An error before the new state is chosen leaves the old one in use.
func (m *Machine) Install(dir string) error {
	if m.failed != nil {
		return m.failed
	}
	next := m.place.number + 1
	db, applied, err := m.prepare(next, dir)
	if err != nil {
		return fmt.Errorf("install state %s: %w", dir, errors.Join(err, m.place.fs.RemoveAll(m.place.path(next))))
	}
	if err := m.place.choose(next); err != nil {
		m.failed = fmt.Errorf("install state %s: %w", dir, errors.Join(err, db.Close()))
		return m.failed // which of the two a restart finds is not known
	}

	old := m.swap(db)
	m.applied.Store(applied)
	m.heads.clear()
	m.watch.wakeAll()
	if err := errors.Join(old.Close(), m.place.sweep()); err != nil {
		m.opts.Logger.Warn("old state", "err", err) // debris, swept at the next start
	}
	return nil
}

// prepare makes and opens a database from the files of dir.
func (m *Machine) prepare(number uint64, dir string) (*pebble.DB, uint64, error) {
	if err := m.place.fill(number, dir); err != nil {
		return nil, 0, err
	}
	db, err := m.place.open(number, false, &m.opts)
	if err != nil {
		return nil, 0, err
	}
	applied, err := readApplied(db)
	if err == nil && applied == 0 {
		err = fmt.Errorf("%w: it holds no state", checkpoint.ErrCorrupt)
	}
	if err != nil {
		return nil, 0, errors.Join(err, db.Close())
	}
	return db, applied, nil
}

func (m *Machine) swap(db *pebble.DB) (old *pebble.DB) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, m.mu.db = m.mu.db, db
	return old
}

// Close makes the state durable and closes it.
func (m *Machine) Close() error {
	m.watch.close()
	db := m.swap(nil)
	if db == nil {
		return nil
	}
	m.failed = checkpoint.ErrClosed
	var err error
	if !m.opts.broken.Load() { // else it would wait for the disk
		err = db.Flush()
	}
	if err := errors.Join(err, db.Close()); err != nil {
		return fmt.Errorf("close state: %w", err)
	}
	return nil
}

// read calls f with the database and sees to it that it stays open meanwhile.
func (m *Machine) read(f func(r pebble.Reader) error) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.mu.db == nil {
		return checkpoint.ErrClosed
	}
	return f(m.mu.db)
}

// readApplied returns the index that the state is of; 0 for an empty one.
func readApplied(r pebble.Reader) (uint64, error) {
	b, err := getShort(r, keyApplied, 16)
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b[:]), nil
}

// getShort reads a value of a known size.
func getShort(r pebble.Reader, key []byte, size int) (b [16]byte, err error) {
	v, closer, err := r.Get(key)
	if err != nil {
		return b, err
	}
	if len(v) != size {
		err = fmt.Errorf("%w: key %q has %d bytes", checkpoint.ErrCorrupt, key, len(v))
	}
	copy(b[:], v)
	return b, errors.Join(err, closer.Close())
}

// notExist turns Pebble's word for an absent key into everybody's.
func notExist(err error) error {
	if errors.Is(err, pebble.ErrNotFound) {
		return fs.ErrNotExist
	}
	return err
}
