package raftnode_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftnode"
)

// durableKV keeps its state when it is closed in peace, as a store on disk does.
type durableKV struct{ *kv }

func openDurableKV(dir string) (raftnode.StateMachine, error) {
	sm, err := openKV(dir)
	if err != nil {
		return nil, err
	}
	return durableKV{sm.(*kv)}, nil
}

func (s durableKV) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, err := json.Marshal(s.state)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, kvFile), data, 0o644)
}

// withoutSnapshots restarts a member whose state is whole and whose snapshots are gone.
func (g *group) withoutSnapshots(m *testMember) {
	g.t.Helper()
	state := m.sm
	g.stop(m)
	if err := (durableKV{state}).Close(); err != nil {
		g.t.Fatal(err)
	}
	g.loseSnapshots(m)
	if err := g.tryStart(m, nil, patience, openDurableKV); err != nil {
		g.t.Fatal(err)
	}
}

func (g *group) loseSnapshots(m *testMember) {
	g.t.Helper()
	for _, file := range snapshotFiles(g.t, m) {
		if err := os.RemoveAll(filepath.Dir(filepath.Dir(file))); err != nil {
			g.t.Fatal(err)
		}
	}
}

// fourth adds m4 to a group that has a snapshot of its own, and makes snapshots that know it.
func (g *group) fourth() *testMember {
	g.t.Helper()
	g.fill("k", 500)
	m4, lead := g.prepare("m4"), g.leader()
	if _, err := lead.node.AddLearner(g.t.Context(), "m4", m4.url()); err != nil {
		g.t.Fatal(err)
	}
	g.start(m4, []string{lead.url()})
	if err := lead.node.Promote(g.t.Context(), "m4"); err != nil {
		g.t.Fatal(err)
	}
	g.fill("l", 1000)
	g.settled()
	return m4
}

// TestTableWithoutSnapshot: a member whose newest snapshot is gone must not go back to the
// table of its first start. With the next snapshot it would tell others that members who
// came later belong to the group no more, and those would be turned away for good.
func TestTableWithoutSnapshot(t *testing.T) {
	for _, kept := range []string{"table kept", "table lost too"} {
		t.Run(kept, func(t *testing.T) {
			g := newGroup(t, 3, short)
			m4 := g.fourth()
			f := g.other(m4)
			if kept != "table kept" {
				if err := os.Remove(filepath.Join(f.dir, "table.json")); err != nil {
					t.Fatal(err)
				}
			}
			g.withoutSnapshots(f)
			if n := len(f.node.Members()); n != 4 {
				t.Errorf("it knows %d members of 4", n)
			}
			y := g.other(m4, f)
			last := y.node.Status().Last
			g.stop(y)
			g.fill("n", 2000)
			g.eventually("the log is cut past y", func() bool { return g.leader().node.Status().First > last+1 })
			g.start(y, nil)
			g.eventually("y installs", func() bool { return y.node.Status().Snaps.Stats.Installed > 0 })
			g.put("after", "all")
			g.level()
			if err := m4.node.Err(); err != nil {
				t.Errorf("nobody removed m4, and it has stopped: %v", err)
			}
		})
	}
}

// other returns a running follower that is none of these.
func (g *group) other(not ...*testMember) *testMember {
	g.t.Helper()
	lead := g.leader()
next:
	for _, m := range g.members {
		for _, n := range append(not, lead) {
			if m == n || m.node == nil {
				continue next
			}
		}
		return m
	}
	g.t.Fatal("no such follower")
	return nil
}

// TestFetchOfALaterTerm: as TestDamagedSnapshotAtStart, but the others lead in a later term
// by now, and so are their snapshots.
func TestFetchOfALaterTerm(t *testing.T) {
	g := newGroup(t, 3, short)
	g.fill("k", 1000)
	g.settled()
	f := g.follower()
	g.stop(f)
	g.loseSnapshots(f)
	lead := g.leader()
	for _, m := range g.members {
		if m != lead && m.node != nil {
			if err := lead.node.TransferLeader(t.Context(), m.name); err != nil {
				t.Fatal(err)
			}
		}
	}
	g.eventually("a new term", func() bool { return g.leader() != lead })
	term := g.leader().node.Status().Term
	g.fill("l", 3000)
	g.eventually("snapshots of the new term", func() bool {
		for _, m := range g.members {
			if m.node != nil && m.node.Status().Snapshot.Term < term {
				return false
			}
		}
		return true
	})
	if err := g.tryStart(f, nil, 30*time.Second, openKV); err != nil {
		t.Errorf("it cannot start: %v", err)
	}
	g.level()
}

// TestFetchFromALaterMember: who came after the first start can help at a start as well.
func TestFetchFromALaterMember(t *testing.T) {
	g := newGroup(t, 3, short)
	m4 := g.fourth()
	f := g.other(m4)
	for _, m := range g.members {
		if m != m4 {
			g.stop(m)
		}
	}
	g.loseSnapshots(f) // and its state machine keeps nothing
	if err := g.tryStart(f, nil, 20*time.Second, openKV); err != nil {
		t.Errorf("it cannot start although m4 holds a snapshot: %v", err)
	}
}
