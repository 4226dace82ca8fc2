package raftsnap

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

func TestCloseRefuses(t *testing.T) {
	g := newGroup(t, 2)
	m, manager := g.member(2), g.member(2).manager
	asker := g.member(1).manager.client
	if err := manager.Close(); err != nil {
		t.Fatal(err)
	}
	if err := manager.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}

	closed := func(what string, err error) {
		t.Helper()
		if r, ok := errors.AsType[*protocol.Refusal](err); !ok || r.Kind != protocol.Closed {
			t.Errorf("%s: %v, want refusal closed", what, err)
		}
	}
	_, err := manager.Snapshot(t.Context())
	closed("Snapshot", err)
	closed("Outcome", asker.Outcome(t.Context(), m.url, protocol.Outcome{Group: "g"}))
	a := (*answers)(manager).Info(t.Context(), protocol.InfoRequest{Group: "g", Wait: time.Hour})
	if a.Refusal == nil || a.Refusal.Kind != protocol.Closed {
		t.Errorf("Info: %+v, want refusal closed", a)
	}

	// None of these may do anything, or wait.
	manager.Poll()
	manager.Want(1)
	manager.Install(protocol.Envelope{})
	manager.Tell(protocol.Outcome{})
	manager.ObserveFsync(time.Millisecond, 100)
	manager.Start(t.Context())
	_ = manager.Status()
}

func TestCloseBeforeStart(t *testing.T) {
	store, err := snapstore.Open(t.TempDir(), &snapstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	g := newGroup(t, 1)
	m := New(g.member(1), store, nil)
	m.Poll()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	m.Start(t.Context())
}

func TestEndOfContextCloses(t *testing.T) {
	g := newGroup(t, 1)
	store, err := snapstore.Open(t.TempDir(), &snapstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	m := New(g.member(1), store, nil)
	ctx, cancel := context.WithCancel(t.Context())
	m.Start(ctx)
	cancel()
	<-m.done
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestLongPoll: a question with a wait is answered when there is something to say, when the
// asker goes, or when the member closes, and never with silence.
func TestLongPoll(t *testing.T) {
	ask := func(g *group, ctx context.Context, wait time.Duration) chan protocol.Answer {
		c := make(chan protocol.Answer, 1)
		m := g.member(2).manager
		go func() {
			c <- (*answers)(m).Info(ctx, protocol.InfoRequest{Group: g.name, From: 1, Term: g.term, Transfer: "t", MinIndex: 15, Wait: wait})
		}()
		g.until("the question is open", func() bool { return opened(m) })
		return c
	}
	never := func(o *Options) { o.Protocol.Entries, o.MaxWait = 1<<60, time.Hour }

	t.Run("ready", func(t *testing.T) {
		g := newGroup(t, 2, func(g *group) { g.options = never })
		c := ask(g, t.Context(), time.Hour)
		g.write(20)
		id := g.member(2).seed(17)
		if a := <-c; a.State != protocol.Ready || a.ID != id {
			t.Errorf("answer %+v, want %s ready", a, id.Short())
		}
	})
	t.Run("something older does not count", func(t *testing.T) {
		g := newGroup(t, 2, func(g *group) { g.options = never })
		g.write(20)
		g.member(2).seed(14)
		c := ask(g, t.Context(), time.Hour)
		id := g.member(2).seed(16)
		if a := <-c; a.State != protocol.Ready || a.ID != id {
			t.Errorf("answer %+v, want %s ready", a, id.Short())
		}
	})
	t.Run("asker gone", func(t *testing.T) {
		g := newGroup(t, 2, func(g *group) { g.options = never })
		ctx, cancel := context.WithCancel(t.Context())
		c := ask(g, ctx, time.Hour)
		cancel()
		<-c
		g.until("the question is forgotten", func() bool { return !opened(g.member(2).manager) })
	})
	t.Run("closed", func(t *testing.T) {
		g := newGroup(t, 2, func(g *group) { g.options = never })
		c := ask(g, t.Context(), time.Hour)
		g.member(2).stop()
		if a := <-c; a.Refusal == nil || a.Refusal.Kind != protocol.Closed {
			t.Errorf("answer %+v, want refusal closed", a)
		}
	})
	t.Run("wait over", func(t *testing.T) {
		g := newGroup(t, 2, func(g *group) { g.options = never })
		a := (*answers)(g.member(2).manager).Info(t.Context(), protocol.InfoRequest{
			Group: g.name, From: 1, Term: g.term, Transfer: "t", MinIndex: 15, Wait: time.Millisecond,
		})
		if a.State != protocol.None || a.Refusal != nil {
			t.Errorf("answer %+v, want none", a)
		}
	})
}

// opened asks the loop whether a question of another member is open.
func opened(m *Manager) bool {
	c := make(chan bool, 1)
	if !m.post(entry{then: func(l *loop) { c <- len(l.questions) > 0 }}) {
		return false
	}
	return <-c
}

func TestManualSnapshot(t *testing.T) {
	quiet := func(g *group) { g.options = func(o *Options) { o.Protocol.Entries = 1 << 60 } }

	t.Run("at the leader", func(t *testing.T) {
		g := newGroup(t, 3, quiet)
		g.write(7)
		id, err := g.member(1).manager.Snapshot(t.Context())
		if err != nil || id.Index != 7 {
			t.Fatalf("%v, %v, want index 7", id, err)
		}
		if s := g.member(1).status(); s.Stats.Generated != 0 || s.Source == 1 {
			t.Errorf("status %+v, want one of a follower (I12)", s)
		}
		again, err := g.member(1).manager.Snapshot(t.Context())
		if err != nil || again != id {
			t.Errorf("in a quiet group %v, %v, want %v again", again, err, id)
		}
	})
	t.Run("at a follower", func(t *testing.T) {
		g := newGroup(t, 3, quiet)
		g.write(7)
		id, err := g.member(3).manager.Snapshot(t.Context())
		if err != nil || id.Index != 7 {
			t.Errorf("%v, %v, want index 7", id, err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		g := newGroup(t, 2, quiet)
		g.member(2).set(func(m *member) { m.freeze = func(context.Context) error { return errors.New("no") } })
		g.write(7)
		ctx, cancel := context.WithCancel(t.Context())
		c := make(chan error, 1)
		go func() {
			_, err := g.member(1).manager.Snapshot(ctx)
			c <- err
		}()
		g.until("the follower was asked", func() bool { return len(get(g.member(2), func(m *member) []Made { return m.events.made })) > 0 })
		cancel()
		if err := <-c; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want canceled", err)
		}
	})
	t.Run("closed", func(t *testing.T) {
		g := newGroup(t, 2, quiet)
		at := newGate()
		g.member(2).set(func(m *member) { m.freeze = at.pass })
		g.write(7)
		c := make(chan error, 1)
		manager := g.member(1).manager
		go func() {
			_, err := manager.Snapshot(t.Context())
			c <- err
		}()
		at.stand(t)
		g.member(1).stop()
		if err := <-c; err == nil {
			t.Error("no error after Close")
		}
	})
}

// TestSourceSurvivesRestart: status tells whom the recorded snapshot came from.
func TestSourceSurvivesRestart(t *testing.T) {
	g := newGroup(t, 3)
	g.write(20)
	leader := g.member(1)
	g.until("the leader has one", func() bool { return leader.status().Recorded.Index >= 10 })
	before := leader.status()
	leader.restart()
	g.until("it knows again", func() bool { s := leader.status(); return s.Recorded == before.Recorded && s.Source == before.Source })
}

// TestAdopted: the others take the leader's snapshot too, and become sources of it (R10).
func TestAdopted(t *testing.T) {
	g := newGroup(t, 4)
	g.write(20)
	g.until("all have the same", func() bool {
		id := get(g.member(1), func(m *member) protocol.ID { return m.recorded })
		for _, m := range g.all() {
			if id.Index == 0 || get(m, func(m *member) protocol.ID { return m.recorded }) != id {
				return false
			}
		}
		return true
	})
	made := int64(0)
	for _, m := range g.all() {
		made += m.status().Stats.GeneratedFollower
	}
	if made != 1 {
		t.Errorf("%d were made, want 1", made)
	}
}

// TestIncrement: the second snapshot of a lineage costs what has changed (R10).
func TestIncrement(t *testing.T) {
	g := newGroup(t, 2, func(g *group) {
		g.files = func(index uint64) map[string][]byte {
			return map[string][]byte{"large": noise(1, 3<<20), "small": noise(index/10, 20_000)}
		}
	})
	leader := g.member(1)
	g.write(20)
	g.until("the first", func() bool { return leader.status().Recorded.Index >= 10 })
	first, had := leader.status().Stats, leader.recordedIndex()
	g.write(20)
	g.until("the second", func() bool { return leader.status().Recorded.Index > had })
	second := leader.status().Stats
	if n := second.BytesFetched - first.BytesFetched; n > 100_000 {
		t.Errorf("the second cost %d bytes, want what has changed", n)
	}
	if n := second.BytesReused - first.BytesReused; n < 3<<20 {
		t.Errorf("%d bytes were reused, want the large file", n)
	}
}

func TestHandlerOfOthersOnly(t *testing.T) {
	g := newGroup(t, 1)
	resp, err := http.Get(g.member(1).url + "/raftsnap/v1/nothing")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode < 400 {
		t.Errorf("status %d for a path that is none", resp.StatusCode)
	}
	http.DefaultClient.CloseIdleConnections()
}
