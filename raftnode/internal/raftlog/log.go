package raftlog

import (
	"sync"

	"google.golang.org/protobuf/proto"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

var _ raft.Storage = (*Log)(nil)

// Log is the Raft log of a member and the raft.Storage of its Raft instance: every entry that is held is in memory,
// and what was saved is durable in the WAL below.
type Log struct {
	// write is held through a whole change, disk included, and taken before mu.
	write sync.Mutex
	wal   WAL
	// released is the record that the WAL was last released at.
	released uint64

	mu struct {
		sync.RWMutex

		hs       *pb.HardState // replaced, never changed
		list     list
		records  []*pb.SnapshotMetadata // from the oldest one the WAL holds to the newest
		recorded *pb.SnapshotMetadata   // the newest; replaced, never changed
		err      error                  // the first failure
		closed   bool
	}
}

// New makes the log that w and what it replayed describe. The Log owns w from then on.
func New(w WAL, r *Replay) *Log {
	l := &Log{wal: w, released: r.Base.GetIndex()}
	l.mu.hs = r.HardState
	l.mu.list = newList(r.Base, r.Entries)
	l.mu.recorded = r.Newest
	l.mu.records = append(l.mu.records, r.Records...)

	return l
}

// InitialState gives the last hard state and the configuration of the newest record (R2). Raft brings it up to date
// by delivering the entries above that record again.
func (l *Log) InitialState() (*pb.HardState, *pb.ConfState, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	conf := &pb.ConfState{}
	if c := l.mu.recorded.GetConfState(); c != nil {
		conf = proto.Clone(c).(*pb.ConfState)
	}

	return cloneState(l.mu.hs), conf, nil
}

// Entries gives entries of [lo, hi) of at most maxSize encoded bytes together, but always one. It returns
// raft.ErrCompacted if lo is no longer held and raft.ErrUnavailable if hi is not there yet.
func (l *Log) Entries(lo, hi, maxSize uint64) ([]*pb.Entry, error) {
	return l.view().slice(lo, hi, maxSize)
}

// Term gives the term of the entry at i, also of the one before the first.
func (l *Log) Term(i uint64) (uint64, error) { return l.view().termOf(i) }

// FirstIndex gives the index of the first entry that is held, or would be.
func (l *Log) FirstIndex() (uint64, error) { return l.view().index + 1, nil }

// LastIndex gives the index of the last entry, FirstIndex-1 if there is none.
func (l *Log) LastIndex() (uint64, error) { return l.view().last(), nil }

// Snapshot gives the newest recorded snapshot, metadata only (R3). Without one it returns
// raft.ErrSnapshotTemporarilyUnavailable; Raft panics on any other error and on an empty snapshot.
func (l *Log) Snapshot() (*pb.Snapshot, error) {
	m := l.Recorded()
	if m.GetIndex() == 0 {
		return nil, raft.ErrSnapshotTemporarilyUnavailable
	}

	return &pb.Snapshot{Metadata: m}, nil
}

// Recorded gives the newest recorded snapshot, nil if there is none.
func (l *Log) Recorded() *pb.SnapshotMetadata {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.mu.recorded == nil {
		return nil
	}

	return cloneMeta(l.mu.recorded)
}

// HardState gives the last hard state that was saved, nil if there is none.
func (l *Log) HardState() *pb.HardState {
	l.mu.RLock()
	defer l.mu.RUnlock()

	return cloneState(l.mu.hs)
}

// Bytes gives the encoded size of all entries that are held. The files of the WAL take more.
func (l *Log) Bytes() int64 { return l.BytesAbove(0) }

// BytesAbove gives the encoded size of the entries above index.
func (l *Log) BytesAbove(index uint64) int64 { return l.view().bytesAbove(index) }

// Err gives the failure that stopped the log, nil while it works. A log that was closed in good order has
// ErrClosed.
func (l *Log) Err() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.mu.err == nil && l.mu.closed {
		return ErrClosed
	}

	return l.mu.err
}

// view gives the list as it is now.
func (l *Log) view() list {
	l.mu.RLock()
	defer l.mu.RUnlock()

	return l.mu.list
}

func cloneState(hs *pb.HardState) *pb.HardState {
	if hs == nil {
		return nil
	}

	return proto.Clone(hs).(*pb.HardState)
}
