package raftsnap

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// Defects of other systems that must not be ours, under the numbers of their reports. Those
// of the pure core and of Raft's side are tested where these are.

// Alluxio 14102: the upload to the leader was refused as unauthenticated, and nothing else
// was tried, so its log grew.
func TestRegressionAlluxio14102(t *testing.T) {
	g := offers(t, 10, 20)
	g.member(3).set(func(m *member) { m.fault = answer(http.StatusUnauthorized, "/snapshots/") })
	g.begin()
	leader := g.member(1)
	g.until("another one is taken", func() bool { return leader.recordedIndex() == 10 })
	// It heals by itself once the member is let in.
	g.member(3).set(func(m *member) { m.fault = nil })
	g.write(10)
	g.until("the better one is taken", func() bool { return leader.recordedIndex() == 20 })
}

// Alluxio 14934: one best follower that always fails blocked all copies.
func TestRegressionAlluxio14934(t *testing.T) {
	g := newGroup(t, 3)
	g.member(2).set(func(m *member) {
		m.fault = m.through(func(w http.ResponseWriter) http.ResponseWriter { return &limitedWriter{w, 100} })
	})
	leader := g.member(1)
	for range 3 {
		had := leader.recordedIndex()
		g.write(20)
		g.until("the leader has one of the other", func() bool { return leader.recordedIndex() > had })
	}
}

// Alluxio 15873: the trigger is called for each entry, and each call made a client and a
// thread. Here a thousand polls are one look, and nothing is left running.
func TestRegressionAlluxio15873(t *testing.T) {
	g := offers(t, 0, 0)
	g.begin()
	leader := g.member(1)
	g.until("it has asked", func() bool { return leader.attempts("info", nil)[2] > 0 })
	before := runtime.NumGoroutine()
	for range 100_000 {
		leader.manager.Poll()
	}
	if n := runtime.NumGoroutine(); n > before+50 {
		t.Errorf("%d goroutines after the polls, %d before", n, before)
	}
	queued := func() int {
		leader.manager.mu.Lock()
		defer leader.manager.mu.Unlock()
		return len(leader.manager.mu.queue)
	}
	if n := queued(); n > 10 {
		t.Errorf("%d events are queued", n)
	}
}

// Alluxio 12179: the leader kept sending a snapshot that was older than the follower's log.
// It gets an answer that ends it, and no byte moves.
func TestRegressionAlluxio12179(t *testing.T) {
	g := newGroup(t, 3)
	g.write(20)
	leader := g.member(1)
	g.until("the leader has one", func() bool { return leader.recordedIndex() >= 10 })
	g.until("all are at rest", func() bool { return g.resting() })
	fetched := g.member(3).status().Stats.BytesFetched
	g.msgSnap(1, 3)
	g.until("the leader is answered", func() bool { return len(ends(leader)) == 1 })
	if o := ends(leader)[0]; o.Kind != protocol.StepNotNeeded {
		t.Errorf("outcome %+v, want not needed", o)
	}
	if now := g.member(3).status().Stats.BytesFetched; now != fetched {
		t.Errorf("%d bytes were moved for nothing", now-fetched)
	}
}

// Alluxio 12100: index and state of a snapshot did not agree. What Freeze says of the
// instant counts, however far the member has come since.
func TestRegressionAlluxio12100(t *testing.T) {
	g := newGroup(t, 2)
	maker := g.member(2)
	at := newGate()
	maker.set(func(m *member) { m.freeze = at.pass })
	g.write(12)
	at.stand(t)
	g.write(30)
	close(at.open)
	leader := g.member(1)
	g.until("the leader has one", func() bool { return leader.recordedIndex() >= 10 })
	made := get(maker, func(m *member) []Made { return m.events.made })
	if made[0].ID.Index != 12 {
		t.Errorf("made %d, want the index of the frozen state, 12", made[0].ID.Index)
	}
}

// Alluxio 13720: the leader's log grew to 500 GB as nobody gave it a snapshot, and nobody
// was told. The policy makes one over the cap (R5), and before that the status says why.
func TestRegressionAlluxio13720(t *testing.T) {
	g := newGroup(t, 3, func(g *group) {
		g.options = func(o *Options) { o.Protocol.LogCap, o.Protocol.LogCapWait = 5000, 50*time.Millisecond }
	})
	g.followers(func(m *member) { m.freeze = func(context.Context) error { return errors.New("disk trouble") } })
	leader := g.member(1)
	g.write(40)
	g.until("the status says why", func() bool { return leader.status().Why != "" && leader.status().Behind >= 40 })
	if i := leader.recordedIndex(); i != 0 {
		t.Fatalf("recorded %d below the cap", i)
	}
	g.write(60)
	g.until("the leader has made one", func() bool { return leader.status().Recorded.Index >= 40 })
	if s := leader.status(); s.Stats.Generated == 0 || s.Source != 1 {
		t.Errorf("status %+v, want one made by the leader", s)
	}
}

// RATIS-987: an exception in an install left "in progress" for ever.
func TestRegressionRatis987(t *testing.T) {
	g := behind(t)
	m := g.member(3)
	m.set(func(m *member) {
		m.install = func(context.Context, protocol.ID) error { return errors.New("state machine says no") }
	})
	e := g.msgSnap(1, 3)
	leader := g.member(1)
	g.until("the leader is told", func() bool { return len(ends(leader)) > 0 })
	if o := ends(leader)[0]; o.Kind != protocol.InstallFailed || o.Reason == "" {
		t.Errorf("outcome %+v, want failed with a reason", o)
	}
	m.set(func(m *member) { m.install = nil })
	g.msgSnap(1, 3)
	g.again(e, m)
}

// cockroach#87581: the delegate was too stale. The question carries the least index, and a
// member that has nothing at or above it makes a snapshot instead of offering what it has.
func TestRegressionCockroach87581(t *testing.T) {
	g := newGroup(t, 2)
	leader := g.member(1)
	g.member(2).seed1(t, g)
	g.write(50)
	id, err := leader.manager.Snapshot(t.Context())
	if err != nil || id.Index < 50 {
		t.Errorf("snapshot %v, %v, want one at 50", id, err)
	}
}

func (m *member) seed1(t *testing.T, g *group) {
	t.Helper()
	g.do(func() { g.history = append(g.history, 1) })
	m.seed(1)
}

// consul#9609: the restore took longer than the log lasted, so it began anew for ever. A
// target that falls below the leader's log is exchanged for a newer one, and what was moved
// already is not moved again.
func TestRegressionConsul9609(t *testing.T) {
	g := behind(t)
	at := newGate()
	m := g.member(3)
	g.sources(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool { return data(r) && at.pass(r.Context()) != nil }
	})
	first := g.msgSnap(1, 3)
	at.stand(t)
	leader := g.member(1)
	g.sources(func(m *member) { m.fault = nil })
	g.write(40)
	g.until("the leader's log is past the target", func() bool {
		return get(leader, func(m *member) uint64 { return m.first }) > first.SnapIndex+1
	})
	e := g.msgSnap(1, 3)
	close(at.open)
	g.again(e, m)
}

// camunda#4784: a partial snapshot that was left by a restart made the member loop. It is
// resumed: the second run moves only the rest.
func TestRegressionCamunda4784(t *testing.T) {
	const files, size, budget = 80, 64 << 10, 5 << 19
	g := newGroup(t, 3, func(g *group) {
		g.options = func(o *Options) { o.Protocol.StartDeadline, o.Protocol.IdleDeadline = time.Hour, time.Hour }
		g.files = func(uint64) map[string][]byte {
			tree := map[string][]byte{}
			for i := range uint64(files) {
				tree[fmt.Sprint(i)] = noise(i, size)
			}
			return tree
		}
	})
	m := g.member(3)
	m.lag()
	g.write(30)
	g.until("the log is cut", func() bool { return get(g.member(1), func(m *member) uint64 { return m.first }) > 1 })
	g.until("all are at rest", func() bool { return g.resting() })

	// The sources send half of it, not too fast to see how it goes on, and then nothing.
	at, limit := newGate(), rate.NewLimiter(2<<20, 32<<10)
	var sent atomic.Int64
	g.sources(func(src *member) {
		src.fault = func(w http.ResponseWriter, r *http.Request) bool {
			if data(r) && sent.Load() >= budget && at.pass(r.Context()) != nil {
				return true
			}
			return src.through(func(w http.ResponseWriter) http.ResponseWriter {
				return &budgetWriter{slowWriter{w, r.Context(), limit}, &sent, budget, at}
			})(w, r)
		}
	})
	e := g.msgSnap(1, 3)
	g.until("some has been moved", func() bool { return m.status().Moved >= budget/2 })
	m.stop()
	close(at.open)
	m.start()
	g.msgSnap(1, 3)
	g.again(e, m)
	if n := m.status().Stats.BytesFetched; n >= files*size {
		t.Errorf("the second run fetched %d bytes, want less than all", n)
	}
}

// budgetWriter is a slow one that stops at a gate when all of them have sent so much.
type budgetWriter struct {
	slowWriter
	sent   *atomic.Int64
	budget int64
	at     *gate
}

func (w *budgetWriter) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(len(p)-done, w.limit.Burst())
		if w.sent.Add(int64(n)) > w.budget {
			if err := w.at.pass(w.ctx); err != nil {
				return done, err
			}
		}
		if _, err := w.slowWriter.Write(p[done : done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

// tikv#15292: the state said that a snapshot was being applied, but its file was damaged or
// gone, which stopped the member for ever. It is checked before it is handed over, set
// aside, and fetched again.
func TestRegressionTikv15292(t *testing.T) {
	g := behind(t)
	m := g.member(3)
	at := newGate()
	m.set(func(m *member) { m.install = func(ctx context.Context, _ protocol.ID) error { return at.pass(ctx) } })
	e := g.msgSnap(1, 3)
	at.stand(t)
	m.stop()
	m.start()
	held := m.store.List()
	if len(held) != 1 {
		t.Fatalf("%d snapshots are held, want the one of the install", len(held))
	}
	m.damage(held[0].ID, "data/2")
	m.set(func(m *member) { m.install = nil })
	g.msgSnap(1, 3)
	g.again(e, m)
	if len(get(m, func(m *member) []Damaged { return m.events.damaged })) == 0 {
		t.Error("the damage was not noticed")
	}
}

// scylladb#29092: a leader that lost and regained its place met a transfer of its old term.
func TestRegressionScylla29092(t *testing.T) {
	g := newGroup(t, 3)
	at := newGate()
	g.followers(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool { return data(r) && at.pass(r.Context()) != nil }
	})
	g.write(20)
	at.stand(t)
	g.lead(2)
	g.lead(1)
	close(at.open)
	leader := g.member(1)
	taken := func() int64 { s := leader.status().Stats; return s.TakenOver + s.Adopted }
	g.until("the leader has one", func() bool { return taken() > 0 })
	g.until("all are at rest", func() bool { return g.resting() })
	if n := taken(); n != 1 {
		t.Errorf("%d were taken over, want 1", n)
	}
}

// Retention keeps the newest record and what the next increment builds on (R9), also when
// many newer snapshots of others are there.
func TestRetentionKeepsRecordedAndBase(t *testing.T) {
	g := newGroup(t, 1, func(g *group) { g.options = func(o *Options) { o.Protocol.Single = protocol.SingleNever } })
	m := g.member(1)
	g.write(60)
	first, err := m.manager.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m.set(func(m *member) {
		m.record = func(context.Context, protocol.ID) error { return &protocol.Refusal{Kind: protocol.NotNeeded} }
	})
	g.write(5)
	var others []protocol.ID
	for i := uint64(10); i <= 50; i += 10 {
		g.mu.Lock()
		meta := g.metaLocked(m, i)
		g.mu.Unlock()
		meta.Lineage = protocol.Lineage{Maker: 9, Incarnation: "other"}
		others = append(others, m.put(meta))
	}
	m.manager.retire()
	held := m.store.List()
	has := func(id protocol.ID) bool {
		return slices.ContainsFunc(held, func(h snapstore.Held) bool { return h.ID == id })
	}
	if !has(first) {
		t.Error("the recorded snapshot is gone")
	}
	if has(others[0]) {
		t.Error("the oldest of a foreign lineage is still there")
	}
}
