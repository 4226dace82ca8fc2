package raftlog

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// Folder turns the records of a WAL, given one after the other, into a Replay. It is the one place that knows what
// a sequence of records means, whatever they were read from.
//
// Two kinds of snapshot record look alike and are told apart by the commit index in force. At or below it, the
// record is of a snapshot of the own log, which it leaves alone. Above it, the snapshot came from another member and
// replaces the log; it takes effect with the hard state that commits it. A plain reading of the entries would bring
// back an uncommitted tail that such a snapshot had replaced.
type Folder struct {
	hs      *pb.HardState
	records []*pb.SnapshotMetadata

	// ents holds the entries first, first+1, ... without a gap. While nothing is anchored, first is only the index
	// the oldest segment was named after.
	first    uint64
	ents     []*pb.Entry
	anchored bool

	staged  []*pb.Entry          // entries of the group that is open
	pending *pb.SnapshotMetadata // installed snapshot that no hard state has committed yet
}

// NewFolder begins with a WAL whose oldest segment is named after the index next.
func NewFolder(next uint64) *Folder {
	return &Folder{hs: &pb.HardState{}, first: max(next, 1)}
}

// Complete reports whether the records given so far end with a complete group.
func (f *Folder) Complete() bool { return len(f.staged) == 0 && f.pending == nil }

// Entry takes an entry.
func (f *Folder) Entry(e *pb.Entry) error {
	if len(f.staged) > 0 {
		if last := f.staged[len(f.staged)-1]; e.GetIndex() != last.GetIndex()+1 {
			return fmt.Errorf("entry %d follows entry %d", e.GetIndex(), last.GetIndex())
		}
	}
	f.staged = append(f.staged, e)

	return nil
}

// Snapshot takes the record of a snapshot.
func (f *Folder) Snapshot(m *pb.SnapshotMetadata) error {
	if !f.Complete() {
		return fmt.Errorf("record of snapshot %d inside a group", m.GetIndex())
	}
	if m.GetIndex() > f.hs.GetCommit() {
		f.pending = m
		return nil
	}

	return f.record(m)
}

// record takes a snapshot of the own log.
func (f *Folder) record(m *pb.SnapshotMetadata) error {
	i, end := m.GetIndex(), f.first+uint64(len(f.ents))
	switch {
	case i >= end && (f.anchored || len(f.ents) > 0):
		return fmt.Errorf("record of snapshot %d above the last entry %d", i, end-1)
	case i >= f.first && i < end && f.ents[i-f.first].GetTerm() != m.GetTerm():
		return fmt.Errorf("record of snapshot %d of term %d, the entry has term %d", i, m.GetTerm(), f.ents[i-f.first].GetTerm())
	}
	if i+1 == f.first {
		f.anchored = true
	}
	if n := len(f.records); n > 0 && i <= f.records[n-1].GetIndex() {
		return nil // written again when the WAL was opened
	}
	f.records = append(f.records, m)

	return nil
}

// State takes a hard state, which ends a group.
func (f *Folder) State(hs *pb.HardState) error {
	if hs.GetTerm() < f.hs.GetTerm() || hs.GetCommit() < f.hs.GetCommit() {
		return fmt.Errorf("hard state goes back from term %d, commit %d to term %d, commit %d",
			f.hs.GetTerm(), f.hs.GetCommit(), hs.GetTerm(), hs.GetCommit())
	}
	if m := f.pending; m != nil {
		if hs.GetCommit() < m.GetIndex() {
			return fmt.Errorf("installed snapshot %d is followed by commit %d", m.GetIndex(), hs.GetCommit())
		}
		f.records, f.pending = append(f.records, m), nil
		f.first, f.ents, f.anchored = m.GetIndex()+1, nil, true
	}
	if err := f.append(); err != nil {
		return err
	}
	f.hs = hs

	return nil
}

// append moves the staged entries to the log. What they overlap is replaced, as it is in Raft.
func (f *Folder) append() error {
	if len(f.staged) == 0 {
		return nil
	}
	e := f.staged[0]
	if !f.anchored && len(f.ents) == 0 {
		f.first = e.GetIndex()
	}
	i, end := e.GetIndex(), f.first+uint64(len(f.ents))
	switch {
	case i <= f.hs.GetCommit():
		return fmt.Errorf("entry %d written again though %d is committed", i, f.hs.GetCommit())
	case i > end:
		return fmt.Errorf("entry %d follows entry %d", i, end-1)
	case i < f.first:
		f.first, f.ents = i, nil
	}
	f.ents = append(f.ents[:i-f.first], f.staged...)
	f.staged = f.staged[:0]

	return nil
}

// Replay gives the result. An open group at the end is left out of it.
func (f *Folder) Replay() (*Replay, error) {
	base := f.base()
	if base < 0 {
		return nil, errors.New("no record of a snapshot after which all entries are held")
	}

	r := &Replay{Base: cloneMeta(f.records[base])}
	if !raft.IsEmptyHardState(f.hs) {
		r.HardState = proto.Clone(f.hs).(*pb.HardState)
	}
	for _, m := range f.records[base:] {
		if m.GetIndex() > 0 {
			r.Records = append(r.Records, cloneMeta(m))
		}
	}
	if n := len(r.Records); n > 0 {
		r.Newest = r.Records[n-1]
	}
	if skip := r.Base.GetIndex() + 1 - f.first; skip < uint64(len(f.ents)) {
		r.Entries = append(r.Entries, f.ents[skip:]...)
	}
	if last := r.Base.GetIndex() + uint64(len(r.Entries)); f.hs.GetCommit() > last {
		return nil, fmt.Errorf("commit %d is above the last entry %d", f.hs.GetCommit(), last)
	}

	return r, nil
}

// base finds the oldest record with all entries after it; -1 if there is none.
func (f *Folder) base() int {
	for i, m := range f.records {
		if m.GetIndex()+1 >= f.first {
			return i
		}
	}

	return -1
}

// cloneMeta copies m and gives it a ConfState, which Raft wants to be there.
func cloneMeta(m *pb.SnapshotMetadata) *pb.SnapshotMetadata {
	c := proto.Clone(m).(*pb.SnapshotMetadata)
	if c.ConfState == nil {
		c.ConfState = &pb.ConfState{}
	}

	return c
}
