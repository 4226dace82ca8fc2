package raftnode_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

func TestProposeAndRead(t *testing.T) {
	g := newGroup(t, 3, nil)
	g.put("a", "1")
	g.put("a", "2")
	lead := g.leader()
	if err := lead.node.ReadIndex(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := lead.sm.pairs()["a"]; got != "2" {
		t.Errorf("a = %q, want 2", got)
	}
	was, err := lead.node.Propose(t.Context(), []byte("a=3"))
	if err != nil || string(was) != "2" {
		t.Errorf("result %q, %v; want 2", was, err)
	}
	var other *raftnode.NotLeaderError
	g.level()
	_, err = g.follower().node.Propose(t.Context(), []byte("a=4"))
	if !errors.As(err, &other) || other.Leader.Name != lead.name {
		t.Errorf("a follower answers %v, want a hint to %s", err, lead.name)
	}
	g.level()
}

func TestSingleMember(t *testing.T) {
	g := newGroup(t, 1, func(o *raftnode.Options) { o.SnapshotEntries, o.TrailingEntries = 50, 10 })
	g.fill("k", 300)
	m := g.members["m1"]
	g.eventually("a snapshot of its own, by policy", func() bool { return m.node.Status().Snapshot.Source == "local" })
	g.stop(m)
	g.start(m, nil)
	g.put("after", "restart")
	if n := len(m.sm.pairs()); n != 301 {
		t.Errorf("%d pairs after the restart, want 301", n)
	}
}

// TestLeaderNeverGenerates holds I12: whoever leads takes over, and all cut their logs.
func TestLeaderNeverGenerates(t *testing.T) {
	g := newGroup(t, 3, func(o *raftnode.Options) { o.SnapshotEntries, o.TrailingEntries = 200, 50 })
	g.fill("k", 2000)
	lead := g.leader()
	g.eventually("the leader has taken a snapshot over", func() bool {
		s := lead.node.Status()
		return s.Role != protocol.Leader || s.Snaps.Stats.TakenOver > 0 && s.First > 1
	})
	g.eventually("the others have snapshots and short logs", func() bool {
		for _, m := range g.members {
			if s := m.node.Status(); s.Snapshot.Index == 0 || s.First == 2 {
				return false
			}
		}
		return true
	})
	for _, m := range g.members {
		if n := m.node.Status().Snaps.Stats.Generated; n != 0 {
			t.Errorf("%s made %d snapshots while it led", m.name, n)
		}
	}
}

func TestLaggingMemberInstalls(t *testing.T) {
	g := newGroup(t, 3, func(o *raftnode.Options) { o.SnapshotEntries, o.TrailingEntries = 200, 50 })
	g.fill("early", 100)
	f := g.follower()
	last := f.node.Status().Last
	g.stop(f)
	g.fill("late", 2000)
	g.eventually("the log is cut past the member that is away", func() bool { return g.leader().node.Status().First > last+1 })
	g.start(f, nil)
	g.eventually("it installs", func() bool { return f.node.Status().Snaps.Stats.Installed > 0 })
	g.level()
	if diff := cmp.Diff(g.leader().sm.pairs(), f.sm.pairs()); diff != "" {
		t.Errorf("states differ (-leader +member):\n%s", diff)
	}
}

// TestNewMember holds R6 and F33: the load has ended, the log is cut, and the new member
// is named by no snapshot; one that names it is made for it.
func TestNewMember(t *testing.T) {
	g := newGroup(t, 3, func(o *raftnode.Options) { o.SnapshotEntries, o.TrailingEntries = 200, 50 })
	g.fill("k", 1000)
	lead := g.leader()
	g.eventually("the log is cut", func() bool { return lead.node.Status().First > 2 })

	m := g.prepare("m4")
	row, err := lead.node.AddLearner(t.Context(), m.name, m.url())
	if err != nil {
		t.Fatal(err)
	}
	if again, err := lead.node.AddLearner(t.Context(), m.name, m.url()); err != nil || again != row {
		t.Errorf("added again: %v, %v; want the same row", again, err)
	}
	g.start(m, []string{lead.url()})
	g.eventually("the new member installs", func() bool { return m.node.Status().Snaps.Stats.Installed > 0 })
	g.level()
	if m.node.Status().Role != protocol.Learner {
		t.Errorf("the new member is a %v", m.node.Status().Role)
	}
	if err := lead.node.Promote(t.Context(), m.name); err != nil {
		t.Fatal(err)
	}
	g.eventually("the new member votes", func() bool { return m.node.Status().Role == protocol.Follower })
	if err := lead.node.Remove(t.Context(), m.name); err != nil {
		t.Fatal(err)
	}
	g.eventually("the removed member stops", func() bool { return errors.Is(m.node.Err(), raftnode.ErrRemoved) })
	if _, err := lead.node.Snapshot(t.Context()); err != nil {
		t.Errorf("manual snapshot: %v", err)
	}
}

func TestTransferLeader(t *testing.T) {
	g := newGroup(t, 3, nil)
	g.put("a", "1")
	lead, f := g.leader(), g.follower()
	if err := lead.node.TransferLeader(t.Context(), f.name); err != nil {
		t.Fatal(err)
	}
	g.eventually("the other one leads", func() bool { return f.node.Status().Role == protocol.Leader })
	if err := lead.node.TransferLeader(t.Context(), "nobody"); !errors.Is(err, raftnode.ErrNoMember) {
		t.Errorf("transfer to nobody: %v", err)
	}
	g.put("a", "2")
}

// TestLeaderStops holds that what was acknowledged is there under the next leader.
func TestLeaderStops(t *testing.T) {
	g := newGroup(t, 3, nil)
	g.fill("k", 200)
	lead := g.leader()
	g.stop(lead)
	g.put("after", "1")
	g.start(lead, nil)
	g.level()
	pairs := lead.sm.pairs()
	for i := range 200 {
		if _, ok := pairs[fmt.Sprintf("k%d", i)]; !ok {
			t.Fatalf("k%d is lost", i)
		}
	}
}

func TestClosedMember(t *testing.T) {
	g := newGroup(t, 1, nil)
	m := g.members["m1"]
	node := m.node
	g.stop(m)
	if _, err := node.Propose(context.Background(), []byte("a=1")); !errors.Is(err, raftnode.ErrClosed) && !errors.Is(err, raftnode.ErrNotLeader) {
		t.Errorf("propose after close: %v", err)
	}
	if err := node.Err(); err != nil {
		t.Errorf("closed on purpose, and Err is %v", err)
	}
}
