package raftlog

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// fileWAL is the WAL on disk.
type fileWAL struct {
	w       *wal.WAL
	dir     string
	lock    *os.File
	state   *pb.HardState // the last one saved
	at      map[uint64]uint64
	observe func(took time.Duration, bytes int64)
}

// Save writes a group. The library syncs by itself unless only the commit index changed.
func (f *fileWAL) Save(hs *pb.HardState, ents []*pb.Entry, sync bool) error {
	if raft.IsEmptyHardState(hs) {
		hs = f.state
	}
	if raft.IsEmptyHardState(hs) {
		if len(ents) > 0 {
			return errors.New("entries without a hard state")
		}
		hs = &pb.HardState{}
	}
	prev := f.state
	if prev == nil {
		prev = &pb.HardState{}
	}
	start := time.Now()
	synced := raft.MustSync(hs, prev, len(ents))
	if err := f.w.Save(hs, ents); err != nil {
		return err
	}
	f.state = hs
	if sync && !synced {
		if err := f.w.Sync(); err != nil {
			return err
		}
	}
	if sync || synced {
		f.observed(start, ents...)
	}

	return nil
}

// SaveSnapshot writes a record and syncs.
func (f *fileWAL) SaveSnapshot(m *pb.SnapshotMetadata) error {
	start := time.Now()
	if err := f.w.SaveSnapshot(toWAL(m)); err != nil {
		return err
	}
	f.observed(start)
	names, err := segments(f.dir)
	if err != nil {
		return err
	}
	f.at[m.GetIndex()] = segmentOf(names[len(names)-1]).seq

	return nil
}

// Sync syncs the last segment; earlier ones were when they ended.
func (f *fileWAL) Sync() error {
	start := time.Now()
	if err := f.w.Sync(); err != nil {
		return err
	}
	f.observed(start)

	return nil
}

func (f *fileWAL) observed(start time.Time, ents ...*pb.Entry) {
	if f.observe == nil {
		return
	}
	bytes := 0
	for _, e := range ents {
		bytes += len(e.GetData())
	}
	f.observe(time.Since(start), int64(bytes))
}

// Release removes the segments that the record at index does not need. The library only gives up its locks.
func (f *fileWAL) Release(index uint64) error {
	seq, ok := f.at[index]
	if !ok {
		return fmt.Errorf("no record of snapshot %d", index)
	}
	names, err := segments(f.dir)
	if err != nil {
		return err
	}
	drop := names[:unneeded(names, index, seq)]
	if len(drop) == 0 {
		return nil
	}
	if err := f.w.ReleaseLockTo(index + 1); err != nil { // it gives up those named below its argument, but for one
		return err
	}
	// The oldest goes first: what is left is the end of the log at every moment.
	for _, name := range drop {
		if err := os.Remove(filepath.Join(f.dir, name)); err != nil {
			return err
		}
	}
	for i := range f.at {
		if i < index {
			delete(f.at, i)
		}
	}

	return syncDir(f.dir)
}

// unneeded counts the segments that nobody reads who opens the WAL at the record at index, written to segment seq.
// A segment is named after the first entry it may hold, so the last one with a name at or below index is needed;
// names go back when Raft replaces entries, and then one segment too many is kept.
func unneeded(names []string, index, seq uint64) int {
	above := slices.IndexFunc(names, func(name string) bool { return segmentOf(name).index > index })
	if above < 0 {
		above = len(names)
	}
	record := slices.IndexFunc(names, func(name string) bool { return segmentOf(name).seq >= seq })

	return max(0, min(above-1, record))
}

// Close closes the files and gives up the directory.
func (f *fileWAL) Close() error { return errors.Join(f.w.Close(), f.lock.Close()) }

// segment is what the name of a segment says.
type segment struct{ seq, index uint64 }

// segmentOf reads a name as the library writes it; isSegment tells whether it is one.
func segmentOf(name string) (s segment) {
	_, _ = fmt.Sscanf(name, "%016x-%016x.wal", &s.seq, &s.index)
	return s
}

func isSegment(name string) bool {
	s := segmentOf(name)
	return name == fmt.Sprintf("%016x-%016x.wal", s.seq, s.index)
}

// segments lists the names of the segments, oldest first.
func segments(dir string) ([]string, error) {
	found, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range found {
		if isSegment(e.Name()) {
			names = append(names, e.Name())
		}
	}

	return names, nil
}

// lockDir keeps other processes out of dir until the result is closed. The locks that the library takes come too
// late: reading and repairing precede them.
func lockDir(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrLocked
		}
		return nil, errors.Join(err, d.Close())
	}

	return d, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}

	return errors.Join(d.Sync(), d.Close())
}
