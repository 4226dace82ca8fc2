package raftsnap

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// gate stops whoever comes to it until it is opened.
type gate struct{ reached, open chan struct{} }

func newGate() *gate { return &gate{make(chan struct{}, 1000), make(chan struct{})} }

func (g *gate) pass(ctx context.Context) error {
	select {
	case g.reached <- struct{}{}:
	default:
	}
	select {
	case <-g.open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stand waits until somebody stands at the gate.
func (g *gate) stand(t *testing.T) {
	t.Helper()
	select {
	case <-g.reached:
	case <-time.After(patience):
		t.Fatal("nobody came to the gate")
	}
}

func (g *gate) before(part string) func(http.ResponseWriter, *http.Request) bool {
	return func(_ http.ResponseWriter, r *http.Request) bool {
		return strings.Contains(r.URL.Path, part) && g.pass(r.Context()) != nil
	}
}

// stages of a take-over by member 1 from members 2 and 3, and how to stop it there.
var takeOverStages = []struct {
	name string
	stop func(g *group, at *gate)
}{
	{"asking", func(g *group, at *gate) { g.followers(func(m *member) { m.fault = at.before("/info") }) }},
	{"making", func(g *group, at *gate) { g.followers(func(m *member) { m.freeze = at.pass }) }},
	{"beginning", func(g *group, at *gate) { g.followers(func(m *member) { m.fault = at.before("/manifest") }) }},
	{"fetching", func(g *group, at *gate) {
		g.followers(func(m *member) {
			m.fault = func(w http.ResponseWriter, r *http.Request) bool { return data(r) && at.pass(r.Context()) != nil }
		})
	}},
	{"recording", func(g *group, at *gate) {
		g.member(1).set(func(m *member) { m.record = func(ctx context.Context, _ protocol.ID) error { return at.pass(ctx) } })
	}},
}

// followers changes the settings of all but member 1.
func (g *group) followers(f func(m *member)) {
	for _, m := range g.all()[1:] {
		m.set(f)
	}
}

// TestLeadershipChangeInEachStage: a demotion changes nothing in a take-over (R5): the
// snapshot is valid for a follower too. A new leader gets one of its own accord.
func TestLeadershipChangeInEachStage(t *testing.T) {
	for _, stage := range takeOverStages {
		t.Run(stage.name, func(t *testing.T) {
			g := newGroup(t, 3)
			at := newGate()
			stage.stop(g, at)
			g.write(20)
			at.stand(t)
			g.lead(2)
			close(at.open)
			g.write(5)
			g.until("all have recorded one", func() bool {
				return g.member(1).recordedIndex() >= 10 && g.member(2).recordedIndex() >= 10 && g.member(3).recordedIndex() >= 10
			})
			g.until("all are at rest", func() bool { return g.resting() })
			for _, m := range g.all() {
				if s := m.status(); s.Stats.Generated > 0 {
					t.Errorf("member %d made %d as leader (I12)", m.id, s.Stats.Generated)
				}
			}
		})
	}
}

// resting tells whether no transfer runs and nothing is pinned.
func (g *group) resting() bool {
	for _, m := range g.all() {
		if s := m.status(); s.Transfers > 0 || s.Leases > 0 {
			return false
		}
	}
	return true
}

// TestRestartInEachStage: the taker ends in each stage and comes back (I9, I11).
func TestRestartInEachStage(t *testing.T) {
	for _, stage := range takeOverStages {
		t.Run(stage.name, func(t *testing.T) {
			g := newGroup(t, 3)
			at := newGate()
			stage.stop(g, at)
			g.write(20)
			at.stand(t)
			leader := g.member(1)
			leader.stop()
			close(at.open)
			leader.start()
			g.until("the leader has recorded one", func() bool { return leader.recordedIndex() >= 10 })
			g.until("all are at rest", func() bool { return g.resting() })
			if s := leader.status(); s.Source == 1 || s.Stats.Generated > 0 {
				t.Errorf("status %+v, want a snapshot of somebody else", s)
			}
		})
	}
}

// installStages are those of an install at member 3.
var installStages = []struct {
	name string
	stop func(g *group, at *gate)
}{
	{"beginning", func(g *group, at *gate) { g.sources(func(m *member) { m.fault = at.before("/manifest") }) }},
	{"fetching", func(g *group, at *gate) {
		g.sources(func(m *member) {
			m.fault = func(w http.ResponseWriter, r *http.Request) bool { return data(r) && at.pass(r.Context()) != nil }
		})
	}},
	{"handing", func(g *group, at *gate) {
		g.member(3).set(func(m *member) { m.install = func(ctx context.Context, _ protocol.ID) error { return at.pass(ctx) } })
	}},
}

func (g *group) sources(f func(m *member)) {
	g.member(1).set(f)
	g.member(2).set(f)
}

// behind makes a group of three in which member 3 needs an install.
func behind(t *testing.T, adjust ...func(*group)) *group {
	t.Helper()
	g := newGroup(t, 3, adjust...)
	g.member(3).lag()
	g.write(30)
	g.until("the log is cut", func() bool { return get(g.member(1), func(m *member) uint64 { return m.first }) > 1 })
	g.until("all are at rest", func() bool { return g.resting() })
	return g
}

// lag keeps a member from applying and from adopting, so that an install has all to do.
func (m *member) lag() { m.set(func(m *member) { m.paused, m.deaf = true, true }) }

func (m *member) appliedIndex() uint64 { return get(m, func(m *member) uint64 { return m.applied }) }

func TestInstallOverLeadershipChange(t *testing.T) {
	for _, stage := range installStages {
		t.Run(stage.name, func(t *testing.T) {
			g := behind(t)
			at := newGate()
			stage.stop(g, at)
			old := g.msgSnap(1, 3)
			at.stand(t)
			g.lead(2)
			close(at.open)
			// R8.3: the old envelope's term has passed. The next one needs no second transfer.
			e := g.msgSnap(2, 3)
			g.until("installed", func() bool { return g.member(3).appliedIndex() >= min(old.SnapIndex, e.SnapIndex) })
			g.until("the new leader knows", func() bool { return len(ends(g.member(2))) > 0 })
			g.until("all are at rest", func() bool { return g.resting() })
		})
	}
}

func TestInstallOverRestart(t *testing.T) {
	for _, stage := range installStages {
		t.Run(stage.name, func(t *testing.T) {
			g := behind(t)
			at := newGate()
			stage.stop(g, at)
			g.msgSnap(1, 3)
			at.stand(t)
			m := g.member(3)
			m.stop()
			close(at.open)
			m.start()
			e := g.msgSnap(1, 3)
			g.until("installed", func() bool { return m.appliedIndex() >= e.SnapIndex })
			g.until("the leader knows", func() bool { return len(ends(g.member(1))) > 0 })
		})
	}
}

// TestOutcomeIsToldAgain: the end of an install reaches the leader (R7), also when the first
// call does not.
func TestOutcomeIsToldAgain(t *testing.T) {
	g := behind(t)
	leader := g.member(1)
	leader.set(func(m *member) { m.fault = answer(http.StatusServiceUnavailable, "/outcome") })
	e := g.msgSnap(1, 3)
	lost := func() int {
		return g.member(3).attempts("tell", func(a Attempt) bool { return a.Outcome != "ok" })[1]
	}
	g.until("installed", func() bool {
		return g.member(3).appliedIndex() >= e.SnapIndex && g.member(3).status().Stats.Installed == 1
	})
	// One of them may still be of progress.
	before := lost()
	g.until("two tries at least were lost", func() bool { return lost() >= before+2 })
	leader.set(func(m *member) { m.fault = nil })
	g.until("the leader knows", func() bool { return len(ends(leader)) == 1 })
}
