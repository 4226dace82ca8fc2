package raftsnap

import (
	"context"
	"testing"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// The tests of Alluxio's SnapshotDirStateMachineStorageTest that concern this layer. There
// the storage decides what the latest snapshot is; here Raft does, by its record.

// alone makes a group of one that makes nothing by itself and records nothing.
func alone(t *testing.T) (*group, *member) {
	t.Helper()
	g := newGroup(t, 1, func(g *group) { g.options = func(o *Options) { o.Protocol.Single = protocol.SingleNever } })
	m := g.member(1)
	m.set(func(m *member) {
		m.record = func(context.Context, protocol.ID) error { return &protocol.Refusal{Kind: protocol.NotNeeded} }
	})
	g.write(60)
	return g, m
}

// records lets Raft have an index as its newest record.
func (m *member) records(id protocol.ID) {
	m.set(func(m *member) { m.recorded = id })
	m.poll()
	m.g.until("it is known", func() bool { return m.status().Recorded == id })
}

func TestReferenceStorageNoSnapshot(t *testing.T) {
	g, m := alone(t)
	g.until("a status", func() bool { return m.status().Why != "" })
	if s := m.status(); s.Recorded.Index != 0 || s.Source != 0 || s.Held != 0 {
		t.Errorf("status %+v, want no snapshot", s)
	}
}

func TestReferenceStorageOnlyUpdateOnLoad(t *testing.T) {
	g, m := alone(t)
	id := m.seed(10)
	g.until("it is seen", func() bool { return m.status().Held == 1 })
	if s := m.status(); s.Recorded.Index != 0 {
		t.Errorf("recorded %d before Raft has it", s.Recorded.Index)
	}
	m.records(id)
}

func TestReferenceStorageSingleSnapshot(t *testing.T) {
	_, m := alone(t)
	m.records(m.seed(10))
	if s := m.status(); s.Source != 1 || s.Behind != 50 {
		t.Errorf("status %+v, want source 1, 50 entries behind", s)
	}
}

func TestReferenceStorageNewerIndex(t *testing.T) {
	_, m := alone(t)
	m.records(m.seed(10))
	m.records(m.seed(20))
}

// In one history a newer term comes with a greater index. The reference also has term 2 at
// a lower index win, which is a fork here: see the inverted test of the replication.
func TestReferenceStorageNewerTerm(t *testing.T) {
	g, m := alone(t)
	m.records(m.seed(10))
	g.lead(1)
	g.write(1)
	id := m.seed(61)
	if id.Term != 2 {
		t.Fatalf("term %d, want 2", id.Term)
	}
	m.records(id)
}

func TestReferenceStorageNoDeletionUnlessSignaled(t *testing.T) {
	_, m := alone(t)
	first := m.seed(10)
	m.records(first)
	for i := uint64(20); i <= 50; i += 10 {
		m.seed(i)
	}
	m.manager.retire()
	if n := m.stored(); n != 5 {
		t.Errorf("%d are held, want all 5: none of the newer ones is recorded", n)
	}
}

func TestReferenceStorageNoopDelete(t *testing.T) {
	_, m := alone(t)
	m.manager.retire()
	id := m.seed(10)
	m.records(id)
	m.manager.retire()
	if n := m.stored(); n != 1 {
		t.Errorf("%d are held, want the only one", n)
	}
}

func TestReferenceStorageDeleteMultiple(t *testing.T) {
	g, m := alone(t)
	var last protocol.ID
	for i := uint64(10); i <= 50; i += 10 {
		last = m.seed(i)
	}
	m.records(last)
	g.until("the newest 2 are left", func() bool { // one may be in use for a moment
		m.manager.retire()
		held := m.store.List()
		return len(held) == 2 && held[1].ID == last
	})
}
