package raftlog

import (
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// Save makes what a Ready without a snapshot brought durable, and then visible. It is one write, and with mustSync
// one fsync, however many entries there are. Without mustSync only the commit index can be lost in a crash.
func (l *Log) Save(hs *pb.HardState, ents []*pb.Entry, mustSync bool) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.Err(); err != nil {
		return err
	}
	if raft.IsEmptyHardState(hs) && len(ents) == 0 && !mustSync {
		return nil
	}
	next, err := l.join(hs, ents)
	if err != nil {
		return l.fail("save entries", err)
	}
	if err := l.wal.Save(next, ents, mustSync); err != nil {
		return l.fail("save entries", err)
	}
	if len(ents) == 0 {
		l.publish(next, l.mu.list)
		return nil
	}
	l.publish(next, l.mu.list.append(ents))

	return nil
}

// join checks that ents may follow what is held, and gives the hard state to save with them.
func (l *Log) join(hs *pb.HardState, ents []*pb.Entry) (*pb.HardState, error) {
	prev := l.mu.hs // only writers change it
	if raft.IsEmptyHardState(hs) {
		hs = prev
	}
	last := l.mu.list.last()
	if len(ents) > 0 {
		i := ents[0].GetIndex()
		switch {
		case raft.IsEmptyHardState(hs):
			return nil, fmt.Errorf("entry %d before any hard state", i)
		case i > last+1:
			return nil, fmt.Errorf("entry %d follows entry %d", i, last)
		case i <= max(prev.GetCommit(), l.mu.list.index):
			return nil, fmt.Errorf("entry %d is committed as it is", i)
		}
		last = ents[len(ents)-1].GetIndex()
	}
	if hs.GetCommit() > last {
		return nil, fmt.Errorf("commit %d is above the last entry %d", hs.GetCommit(), last)
	}

	return cloneState(hs), nil
}

// ApplySnapshot makes a snapshot that another member gave the beginning of the log, with what else its Ready
// brought (R8.4). The data of the snapshot must be durable. Everything the log held is dropped.
func (l *Log) ApplySnapshot(m *pb.SnapshotMetadata, hs *pb.HardState, ents []*pb.Entry) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.Err(); err != nil {
		return err
	}
	m = cloneMeta(m)
	if i, commit := m.GetIndex(), l.mu.hs.GetCommit(); i <= commit {
		return fmt.Errorf("apply snapshot %d: %w: %d is committed", i, ErrOld, commit)
	}
	next := newList(m, ents)
	hs, err := installedState(m, l.mu.hs, hs, next.last())
	if err != nil {
		return l.fail("apply snapshot", err)
	}
	if err := l.saveInstalled(m, hs, ents); err != nil {
		return l.fail("apply snapshot", err)
	}

	l.mu.Lock()
	l.mu.recorded, l.mu.records = m, []*pb.SnapshotMetadata{m}
	l.mu.hs, l.mu.list = hs, next
	l.mu.Unlock()

	return l.release(m.GetIndex())
}

// installedState gives the hard state that holds once m is installed and entries up to last follow it.
func installedState(m *pb.SnapshotMetadata, prev, hs *pb.HardState, last uint64) (*pb.HardState, error) {
	if raft.IsEmptyHardState(hs) {
		hs = prev
	}
	hs = cloneState(hs)
	if hs == nil || hs.GetTerm() < m.GetTerm() {
		return nil, fmt.Errorf("snapshot %d of term %d is above the term %d", m.GetIndex(), m.GetTerm(), hs.GetTerm())
	}
	if hs.GetCommit() < m.GetIndex() {
		hs.Commit = new(m.GetIndex())
	}
	if hs.GetCommit() > last {
		return nil, fmt.Errorf("commit %d is above the last entry %d", hs.GetCommit(), last)
	}

	return hs, nil
}

// saveInstalled writes the record first, then the commit index that makes it count, then the rest. The commit that
// goes with the record is the record's own: entries that a higher one refers to might not follow it.
func (l *Log) saveInstalled(m *pb.SnapshotMetadata, hs *pb.HardState, ents []*pb.Entry) error {
	if err := l.wal.SaveSnapshot(m); err != nil {
		return err
	}
	at := cloneState(hs)
	at.Commit = new(m.GetIndex())
	if err := l.wal.Save(at, nil, false); err != nil {
		return err
	}
	if len(ents) > 0 || hs.GetCommit() != at.GetCommit() {
		if err := l.wal.Save(hs, ents, false); err != nil {
			return err
		}
	}

	return l.wal.Sync() // a commit index alone is not synced by Save
}

// Record makes a durable and verified snapshot of the group's history, own or taken over, the one that Snapshot
// answers with and that a restart begins at (R4). m carries the configuration as of its index, applied is what the
// member has applied. It refuses with ErrOld, ErrAhead or ErrForked, checked in this order; a refusal changes
// nothing.
func (l *Log) Record(m *pb.SnapshotMetadata, applied uint64) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.Err(); err != nil {
		return err
	}
	if err := l.admit(m, applied); err != nil {
		return fmt.Errorf("record snapshot %d of term %d: %w", m.GetIndex(), m.GetTerm(), err)
	}
	m = cloneMeta(m)
	if err := l.wal.SaveSnapshot(m); err != nil {
		return l.fail("record snapshot", err)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.recorded, l.mu.records = m, append(l.mu.records, m)

	return nil
}

// admit is the list of conditions of R4.
func (l *Log) admit(m *pb.SnapshotMetadata, applied uint64) error {
	i, newest, commit := m.GetIndex(), l.mu.recorded.GetIndex(), l.mu.hs.GetCommit()
	switch {
	case i <= newest:
		return fmt.Errorf("%w: %d is recorded", ErrOld, newest)
	case i > applied:
		return fmt.Errorf("%w: applied is %d", ErrAhead, applied)
	case i > commit:
		return fmt.Errorf("%w: saved commit is %d", ErrAhead, commit)
	case i < l.mu.list.index:
		return fmt.Errorf("%w: the log begins after %d", ErrOld, l.mu.list.index)
	}
	term, err := l.mu.list.termOf(i)
	if err != nil {
		return err
	}
	if term != m.GetTerm() {
		return fmt.Errorf("%w: own term there is %d", ErrForked, term)
	}

	return nil
}

// Compact frees the entries up to and including c, which must not lie above the newest record, and removes what the
// WAL no longer needs to be opened at the newest record at or below c. Entries already gone are no error.
func (l *Log) Compact(c uint64) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.Err(); err != nil {
		return err
	}
	if newest := l.mu.recorded.GetIndex(); c > newest {
		return fmt.Errorf("compact log to %d: %w: the newest record is %d", c, ErrAhead, newest)
	}
	l.publish(l.mu.hs, l.mu.list.above(c))

	return l.release(c)
}

// release gives up the WAL below the newest record at or below c, which a restart can then still begin at.
func (l *Log) release(c uint64) error {
	keep := -1
	for k, m := range l.mu.records {
		if m.GetIndex() <= c {
			keep = k
		}
	}
	if keep < 0 || l.mu.records[keep].GetIndex() <= l.released {
		return nil
	}
	at := l.mu.records[keep].GetIndex()
	if err := l.wal.Release(at); err != nil {
		return l.fail("release log", err)
	}
	l.released = at

	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.records = append([]*pb.SnapshotMetadata(nil), l.mu.records[keep:]...)

	return nil
}

// RaiseCommit is called before Raft starts with what the state machine has applied. A commit index is not always
// synced, the state machine's is; Raft must not find the second above the first (R2). Beyond the log it refuses with
// ErrAhead: entries that this member acknowledged are gone.
func (l *Log) RaiseCommit(applied uint64) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.Err(); err != nil {
		return err
	}
	if applied <= l.mu.hs.GetCommit() {
		return nil
	}
	if last := l.mu.list.last(); applied > last {
		return fmt.Errorf("%w: the state machine has applied %d and the log ends at %d; the log has lost entries: "+
			"remove this member from the group and add it anew with an empty directory", ErrAhead, applied, last)
	}
	hs := cloneState(l.mu.hs)
	hs.Commit = new(applied)
	if err := l.wal.Save(hs, nil, true); err != nil {
		return l.fail("raise commit", err)
	}
	l.publish(hs, l.mu.list)

	return nil
}

// Close closes the WAL. What was saved with mustSync stays.
func (l *Log) Close() error {
	l.write.Lock()
	defer l.write.Unlock()
	l.mu.Lock()
	was := l.mu.closed
	l.mu.closed = true
	l.mu.Unlock()
	if was {
		return nil
	}

	return l.wal.Close()
}

// publish shows readers what is durable.
func (l *Log) publish(hs *pb.HardState, next list) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.hs, l.mu.list = hs, next
}

// fail stops the log: after a failed write nobody knows what is on the disk, and a later fsync that succeeds says
// nothing about the pages of an earlier one that failed.
func (l *Log) fail(op string, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.err = fmt.Errorf("%s: %w", op, err)

	return l.mu.err
}
