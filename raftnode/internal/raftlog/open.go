package raftlog

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	pb "go.etcd.io/raft/v3/raftpb"
)

// WALOptions says how OpenWAL works. Nil and zero values are valid.
type WALOptions struct {
	// Metadata is stored when the WAL is created and must be the same whenever it is opened.
	Metadata []byte
	// First is the record a new WAL begins with: its index is committed and has no data. Nil begins with nothing, as
	// a member does that joins a group.
	First *pb.SnapshotMetadata
	// MustExist refuses to create a WAL, with fs.ErrNotExist. A member that ran before must not begin anew with an
	// empty log: it would have forgotten its vote and its entries.
	MustExist bool
	// Logger hears of repairs and slow syncs. Nil is silent.
	Logger *slog.Logger
	// ObserveSync is called with the duration of every synced write and with how many bytes
	// of entries it was, nil for nobody.
	ObserveSync func(took time.Duration, bytes int64)
}

// SegmentBytes is the size at which a file of the WAL ends and another one begins. Two of them are allocated in
// advance, so it is also half of the least room that a WAL takes. Entries are removed and kept in whole segments.
const SegmentBytes = 16 << 20

// segmentBytes is SegmentBytes but for tests. The library has it in a variable that running WALs read, so it is set
// once and before the first of them.
var (
	segmentBytes int64 = SegmentBytes
	segmentOnce  sync.Once
)

// OpenWAL opens the WAL in dir, or creates it if dir is empty or absent; a crash leaves either none or a whole one.
// An unfinished group at the end, as a crash leaves it, is cut off. Any other damage is refused with a *DamageError.
func OpenWAL(dir string, opts *WALOptions) (WAL, *Replay, error) {
	w, r, err := openWAL(filepath.Clean(dir), opts)
	if err != nil {
		return nil, nil, fmt.Errorf("open log %s: %w", dir, err)
	}

	return w, r, nil
}

func openWAL(dir string, opts *WALOptions) (_ *fileWAL, _ *Replay, err error) {
	if opts == nil {
		opts = &WALOptions{}
	}
	segmentOnce.Do(func() { wal.SegmentSizeBytes = segmentBytes })
	lg := zapLogger(opts.Logger)
	if err := ensure(lg, dir, opts); err != nil {
		return nil, nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, lock.Close())
		}
	}()
	s, err := scan(dir, opts.Metadata)
	if err != nil {
		return nil, nil, err
	}
	if err := s.repair(opts.Logger); err != nil {
		return nil, nil, err
	}
	if err := sweep(dir, s.names); err != nil {
		return nil, nil, err
	}
	w, err := attach(lg, dir, s)
	if err != nil {
		return nil, nil, err
	}
	w.lock, w.observe = lock, opts.ObserveSync

	return w, s.replay, nil
}

// ensure creates the WAL if there is none.
func ensure(lg *zap.Logger, dir string, opts *WALOptions) error {
	found, err := os.ReadDir(dir)
	switch {
	case err == nil && len(found) > 0:
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case opts.MustExist:
		return fmt.Errorf("%w: the log of a member that ran before is gone: "+
			"remove it from the group and add it anew with an empty directory", fs.ErrNotExist)
	}

	return create(lg, dir, opts)
}

// create builds the WAL under another name, because the library's own way of creating one leaves a moment at which
// it is there without its first record.
func create(lg *zap.Logger, dir string, opts *WALOptions) (err error) {
	draft := dir + ".new"
	for _, leftover := range []string{draft, draft + ".tmp"} { // the second is the library's draft of the first
		if err := os.RemoveAll(leftover); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	w, err := wal.Create(lg, draft, opts.Metadata)
	if err != nil {
		return err
	}
	err = saveFirst(w, opts.First)
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) { // an empty one is no obstacle
		return err
	}
	if err := os.Rename(draft, dir); err != nil {
		return err
	}

	return syncDir(filepath.Dir(dir))
}

// saveFirst writes the record that a group begins with, and commits it.
func saveFirst(w *wal.WAL, m *pb.SnapshotMetadata) error {
	if m.GetIndex() == 0 {
		return nil
	}
	if err := w.SaveSnapshot(toWAL(cloneMeta(m))); err != nil {
		return err
	}

	return w.Save(&pb.HardState{Term: new(m.GetTerm()), Commit: new(m.GetIndex())}, nil)
}

// attach makes the scanned WAL ready for writing.
func attach(lg *zap.Logger, dir string, s *scanned) (_ *fileWAL, err error) {
	start := &walpb.Snapshot{Index: new(uint64(0)), Term: new(uint64(0))}
	if s.replay.Newest != nil {
		start = toWAL(s.replay.Newest)
	}
	w, err := wal.Open(lg, dir, start)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if _, hs, _, err := w.ReadAll(); err != nil {
		return nil, err
	} else if hs.GetCommit() != s.replay.HardState.GetCommit() || hs.GetTerm() != s.replay.HardState.GetTerm() {
		return nil, &DamageError{File: dir, Err: errors.New("two readings differ")}
	}

	// The library names its next segment after the last entry that it read or wrote. After an install there may be
	// none, the name would be too low, and the next opening would look for the record only where it is not. Writing
	// the record again tells the library.
	if s.replay.Newest != nil {
		if err := w.SaveSnapshot(start); err != nil {
			return nil, err
		}
	}

	return &fileWAL{w: w, dir: dir, at: s.at, state: s.replay.HardState}, nil
}

// sweep removes files that a crash left and that the library would use again as they are.
func sweep(dir string, keep []string) error {
	found, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	kept := map[string]bool{}
	for _, name := range keep {
		kept[name] = true
	}
	removed := false
	for _, e := range found {
		name := e.Name()
		if kept[name] || !strings.HasSuffix(name, ".tmp") && !isSegment(name) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			return err
		}
		removed = true
	}
	if !removed {
		return nil
	}

	return syncDir(dir)
}

func toWAL(m *pb.SnapshotMetadata) *walpb.Snapshot {
	return &walpb.Snapshot{Index: new(m.GetIndex()), Term: new(m.GetTerm()), ConfState: m.GetConfState()}
}

func fromWAL(s *walpb.Snapshot) *pb.SnapshotMetadata {
	return &pb.SnapshotMetadata{Index: new(s.GetIndex()), Term: new(s.GetTerm()), ConfState: s.GetConfState()}
}
