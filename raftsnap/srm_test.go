package raftsnap

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// The ten tests of Alluxio's SnapshotReplicationManagerTest, by their names.

func TestReferenceCopySnapshotToLeader(t *testing.T) {
	g := newGroup(t, 3)
	g.write(20)
	leader := g.member(1)
	g.until("the leader has taken a snapshot over", func() bool {
		s := leader.status()
		return s.Stats.TakenOver > 0 && s.Recorded.Index >= 10
	})

	// I12: made by a follower; the same bytes on both.
	s := leader.status()
	if s.Stats.Generated != 0 || s.Stats.TakenOver != 1 || s.Source == 1 || s.Source == 0 {
		t.Errorf("leader's status %+v, want one snapshot taken over and none made", s)
	}
	maker := g.member(s.Source)
	if err := g.compare(maker, s.Recorded); err != nil {
		t.Errorf("the maker's snapshot: %v", err)
	}
	if n := maker.status().Stats.GeneratedFollower; n != 1 {
		t.Errorf("the maker made %d snapshots, want 1", n)
	}
	g.until("the maker notes that it has served", func() bool { return maker.status().Stats.Served == 1 })
}

func TestReferenceCopySnapshotToFollower(t *testing.T) {
	g := newGroup(t, 3)
	leader, lagging := g.member(1), g.member(3)
	lagging.lag()
	g.write(30)
	g.until("the leader has cut its log", func() bool { return get(leader, func(m *member) uint64 { return m.first }) > 1 })

	e := g.msgSnap(1, 3)
	g.until("the follower has installed", func() bool { return get(lagging, func(m *member) uint64 { return m.applied }) >= e.SnapIndex })
	g.until("the leader knows", func() bool { return len(ends(leader)) == 1 })
	if o := ends(leader)[0]; o.Kind != protocol.Installed || o.Index < e.SnapIndex || o.From != 3 {
		t.Errorf("outcome %+v, want installed at %d or above", o, e.SnapIndex)
	}
	if s := lagging.status(); s.Stats.Installed != 1 || s.Stats.Generated+s.Stats.GeneratedFollower != 0 {
		t.Errorf("stats of the follower %+v, want one install", s.Stats)
	}
}

// ends returns the outcomes at a leader that end an install.
func ends(m *member) []protocol.Outcome {
	return get(m, func(m *member) []protocol.Outcome {
		return slices.DeleteFunc(slices.Clone(m.outcomes), func(o protocol.Outcome) bool { return o.Kind == protocol.Progress })
	})
}

// offers makes a group whose followers hold the snapshots given and make no others, while
// the leader has applied 20 entries and wants one that is at least half way.
func offers(t *testing.T, indexes ...uint64) *group {
	t.Helper()
	g := newGroup(t, len(indexes)+1)
	g.member(1).set(func(m *member) { m.paused = true })
	g.followers(func(m *member) { m.freeze = func(context.Context) error { return errors.New("makes none") } })
	g.write(20)
	for i, index := range indexes {
		if index > 0 {
			g.member(uint64(i) + 2).seed(index)
		}
	}
	return g
}

// begin lets the leader apply what the others have applied, so that it wants a snapshot.
func (g *group) begin() {
	g.member(1).set(func(m *member) { m.paused = false })
	g.catchUp()
}

func TestReferenceRequestSnapshotEqualTermHigherIndex(t *testing.T) {
	g := offers(t, 10, 20, 15)
	g.begin()
	leader := g.member(1)
	g.until("the leader has the highest", func() bool { return leader.status().Recorded.Index == 20 })
	if s := leader.status(); s.Source != 3 {
		t.Errorf("source %d, want 3", s.Source)
	}
}

func TestReferenceFailGetInfoEqualTermHigherIndex(t *testing.T) {
	g := offers(t, 10, 20)
	g.member(3).set(func(m *member) { m.fault = hang("/info") })
	g.begin()
	leader := g.member(1)
	g.until("the leader has the other one", func() bool { return leader.status().Recorded.Index == 10 })
}

func TestReferenceFailSnapshotRequestEqualTermHigherIndex(t *testing.T) {
	g := offers(t, 10, 20)
	g.member(3).set(func(m *member) { m.fault = hang("/snapshots/") })
	g.begin()
	leader := g.member(1)
	g.until("the leader has the other one", func() bool { return leader.status().Recorded.Index == 10 })
	g.until("the other transfer has ended", func() bool { return leader.status().Transfers == 0 })
}

func TestReferenceFailFailThenSuccess(t *testing.T) {
	g := offers(t, 20, 20, 0)
	for _, id := range []uint64{2, 3} {
		g.member(id).set(func(m *member) { m.fault = answer(http.StatusInternalServerError, "/snapshots/") })
	}
	g.begin()
	leader := g.member(1)
	g.until("both have failed", func() bool {
		failed := leader.attempts("fetch", func(a Attempt) bool { return a.Outcome != "ok" })
		return failed[2] > 0 && failed[3] > 0
	})
	g.member(4).seed(20)
	g.until("the leader has the third's", func() bool { return leader.status().Recorded.Index == 20 })
	if s := leader.status(); s.Source != 4 {
		t.Errorf("source %d, want 4", s.Source)
	}
}

// The reference asserts that (term 2, index 1) wins against (term 1, index 10). In one valid
// history the term never falls as the index grows, so such a pair is the sign of a forked or
// re-formatted member (R4). Here the one that contradicts the leader's own log goes into
// quarantine with an alarm, and the other one is taken.
func TestReferenceRequestSnapshotHigherTermLowerIndexInverted(t *testing.T) {
	t.Run("lower index", func(t *testing.T) {
		g := offers(t, 10, 0)
		g.member(3).seedForked(1, 2)
		g.lead(1)
		g.begin()
		leader := g.member(1)
		g.until("the leader has the one of its history", func() bool { return leader.status().Recorded.Index == 10 })
	})
	t.Run("chosen by its index", func(t *testing.T) {
		g := offers(t, 10, 0)
		// A re-formatted member thinks well of it.
		g.member(3).set(func(m *member) {
			m.record = func(context.Context, protocol.ID) error { return &protocol.Refusal{Kind: protocol.NotNeeded} }
		})
		forked := g.member(3).seedForked(15, 2)
		g.lead(1)
		g.begin()
		leader := g.member(1)
		g.until("the leader has the one of its history", func() bool { return leader.status().Recorded.Index == 10 })
		g.until("the forked one is in quarantine and the status tells", func() bool {
			return len(get(leader, func(m *member) []Damaged { return m.events.damaged })) > 0 && len(leader.status().Alarms) > 0
		})
		damaged := get(leader, func(m *member) []Damaged { return m.events.damaged })
		if len(damaged) != 1 || damaged[0].ID != forked {
			t.Errorf("quarantine %v, want %s", damaged, forked.Short())
		}
		if alarms := leader.status().Alarms; !strings.Contains(alarms[0], "forked") {
			t.Errorf("alarms %q, want one of a fork", alarms)
		}
	})
}

func TestReferenceInstallSnapshotsInSuccession(t *testing.T) {
	g := newGroup(t, 3)
	g.followers(func(m *member) { m.freeze = func(context.Context) error { return errors.New("makes none") } })
	leader := g.member(1)
	g.write(10)
	for i := uint64(2); i <= 11; i++ {
		g.write(10)
		g.member(2 + i%2).seed(i * 10)
		g.until("the leader has the next one", func() bool { return leader.status().Recorded.Index == i*10 })
	}
	g.until("all are counted", func() bool { return leader.status().Stats.TakenOver == 10 })
}

func TestReferenceDownloadFailure(t *testing.T) {
	g := offers(t, 10, 20)
	g.member(3).set(func(m *member) {
		m.fault = m.through(func(w http.ResponseWriter) http.ResponseWriter { return &limitedWriter{w, 1000} })
	})
	g.begin()
	leader := g.member(1)
	g.until("the leader has the second best", func() bool { return leader.status().Recorded.Index == 10 })
	if n := leader.status().Stats.Failed; n == 0 {
		t.Errorf("no failure is counted")
	}
}

// In the reference the uploader learns that the receiver is unavailable. Here the receiver
// pulls, so the same event is a source that goes away between its answer and the transfer.
func TestReferenceUploadFailure(t *testing.T) {
	g := offers(t, 10, 20)
	best := g.member(3)
	best.set(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/snapshots/") {
				panic(http.ErrAbortHandler)
			}
			return false
		}
	})
	g.begin()
	leader := g.member(1)
	g.until("the leader has the second best", func() bool { return leader.status().Recorded.Index == 10 })
}

// The five tests of RaftSnapshotManagerTest.

func TestReferenceNoneAvailable(t *testing.T) {
	g := offers(t, 0, 0)
	g.begin()
	leader := g.member(1)
	g.until("all were asked in vain", func() bool {
		asked := leader.attempts("info", nil)
		return asked[2] > 0 && asked[3] > 0 && leader.status().Why != ""
	})
	if i := leader.recordedIndex(); i != 0 {
		t.Errorf("recorded %d, want none", i)
	}
}

func TestReferenceSimple(t *testing.T) {
	g := offers(t, 20, 0)
	g.begin()
	leader := g.member(1)
	g.until("the leader has it", func() bool { return leader.status().Recorded.Index == 20 })
	// That the directories are equal is checked by Record, and by the group at the end.
}

func TestReferenceOneUnavailable(t *testing.T) {
	g := offers(t, 20, 20)
	g.member(2).stop()
	g.begin()
	leader := g.member(1)
	g.until("the leader has it", func() bool { return leader.status().Recorded.Index == 20 })
	if s := leader.status(); s.Source != 3 {
		t.Errorf("source %d, want 3", s.Source)
	}
}

func TestReferenceDownloadHigherOne(t *testing.T) {
	g := offers(t, 10, 20)
	g.begin()
	leader := g.member(1)
	g.until("the leader has the higher one", func() bool { return leader.status().Recorded.Index == 20 })
}

func TestReferenceHigherOneUnavailable(t *testing.T) {
	g := offers(t, 10, 20)
	g.member(3).stop()
	g.begin()
	leader := g.member(1)
	g.until("the leader has fallen back", func() bool { return leader.status().Recorded.Index == 10 })
}
