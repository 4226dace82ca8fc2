package raftsnap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// What the reference never tested, as far as it concerns this layer.

// stallAfter sends some bytes of each answer and then nothing, without closing.
type stallAfter struct {
	http.ResponseWriter
	r    *http.Request
	left int
}

func (w *stallAfter) Write(p []byte) (int, error) {
	if len(p) <= w.left {
		w.left -= len(p)
		return w.ResponseWriter.Write(p)
	}
	n, _ := w.ResponseWriter.Write(p[:w.left])
	w.left = 0
	http.NewResponseController(w.ResponseWriter).Flush()
	<-w.r.Context().Done()
	return n, w.r.Context().Err()
}

func TestStallWithoutClose(t *testing.T) {
	g := offers(t, 10, 20)
	stalling := g.member(3)
	stalling.set(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool {
			return m.through(func(w http.ResponseWriter) http.ResponseWriter { return &stallAfter{w, r, 500} })(w, r)
		}
	})
	g.begin()
	leader := g.member(1)
	g.until("the leader has the other one", func() bool { return leader.recordedIndex() == 10 })
	if leader.attempts("fetch", func(a Attempt) bool { return a.Outcome != "ok" })[3] == 0 {
		t.Error("the stalling source is not blamed")
	}
}

func TestCorruptChunk(t *testing.T) {
	g := behind(t)
	g.until("two hold the same snapshot", func() bool {
		return g.member(1).recordedIndex() == g.member(2).recordedIndex()
	})
	g.member(2).set(func(m *member) {
		m.fault = m.through(func(w http.ResponseWriter) http.ResponseWriter { return &flippingWriter{w} })
	})
	e := g.msgSnap(1, 3)
	// I6: every byte that is put in place was checked. Install compares it with the state.
	g.until("installed", func() bool { return g.member(3).appliedIndex() >= e.SnapIndex })
}

func TestCorruptFromAllThenWhole(t *testing.T) {
	g := behind(t)
	g.sources(func(m *member) {
		m.fault = m.through(func(w http.ResponseWriter) http.ResponseWriter { return &flippingWriter{w} })
	})
	e := g.msgSnap(1, 3)
	lagging := g.member(3)
	g.until("the transfer has failed", func() bool { return lagging.status().Stats.Failed > 0 })
	if n := lagging.appliedIndex(); n != 0 {
		t.Fatalf("applied %d from corrupt bytes", n)
	}
	g.sources(func(m *member) { m.fault = nil })
	g.again(e, lagging)
}

// again lets the leader ask for an install until it has succeeded, as Raft does whenever it
// was told of a failure.
func (g *group) again(e protocol.Envelope, m *member) {
	g.t.Helper()
	seen := 0
	g.until("installed in the end", func() bool {
		if n := len(ends(g.member(e.From))); n > seen && m.appliedIndex() < e.SnapIndex {
			seen = n
			g.msgSnap(e.From, m.id)
		}
		return m.appliedIndex() >= e.SnapIndex
	})
}

// damage changes one byte of a held snapshot's file on disk.
func (m *member) damage(id protocol.ID, name string) {
	m.g.t.Helper()
	m.set(func(m *member) { m.spoiled = true })
	dir, err := m.store.Dir(id)
	if err != nil {
		m.g.t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	data, err := os.ReadFile(path)
	if err != nil {
		m.g.t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(path, data, 0o644); err != nil {
		m.g.t.Fatal(err)
	}
}

// TestDigestMismatchAtSource: a snapshot that has gone bad on the source's disk is never
// served; it goes into quarantine and another one is taken.
func TestDigestMismatchAtSource(t *testing.T) {
	g := offers(t, 10, 20)
	bad := g.member(3).store.List()[0].ID
	g.member(3).damage(bad, "data/3")
	g.begin()
	leader := g.member(1)
	g.until("the leader has the good one", func() bool { return leader.recordedIndex() == 10 })
	g.until("the bad one is in quarantine", func() bool {
		return get(g.member(3), func(m *member) int { return len(m.events.damaged) }) > 0
	})
	if _, err := g.member(3).store.Get(bad); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the source still holds it: %v", err)
	}
}

func TestScrubFindsDamage(t *testing.T) {
	g := newGroup(t, 3)
	g.write(20)
	leader := g.member(1)
	g.until("the leader has one", func() bool { return leader.recordedIndex() >= 10 })
	bad := get(leader, func(m *member) protocol.ID { return m.recorded })
	leader.damage(bad, "data/1")
	leader.manager.scrub(t.Context())
	g.until("it is in quarantine", func() bool { return get(leader, func(m *member) int { return len(m.events.damaged) }) == 1 })
	// The recorded one is fetched again, in a quiet group too.
	g.until("the leader has it back", func() bool {
		_, err := leader.store.Get(bad)
		return err == nil
	})
	if err := g.compare(leader, bad); err != nil {
		t.Error(err)
	}
}

// TestNoSpaceByReserve: the store refuses before a byte is moved, and another try is made
// once there is room.
func TestNoSpaceByReserve(t *testing.T) {
	g := behind(t)
	lagging := g.member(3)
	lagging.reserve = 1 << 60
	lagging.restart()
	e := g.msgSnap(1, 3)
	leader := g.member(1)
	g.until("the leader is told", func() bool { return len(ends(leader)) > 0 })
	if o := ends(leader)[0]; o.Kind != protocol.InstallFailed {
		t.Errorf("outcome %+v, want failed", o)
	}
	if s := lagging.status(); s.Stats.BytesFetched != 0 {
		t.Errorf("%d bytes were fetched", s.Stats.BytesFetched)
	}
	lagging.reserve = -1
	lagging.restart()
	g.msgSnap(1, 3)
	g.again(e, lagging)
}

// TestDiskFull: the disk fills up while the transfer runs.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=48k"); err != nil {
		t.Skipf("tmpfs cannot be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	g := behind(t)
	lagging := g.member(3)
	lagging.stop()
	roomy := lagging.dir
	lagging.dir = dir
	lagging.start()
	e := g.msgSnap(1, 3)
	leader := g.member(1)
	g.until("the leader is told", func() bool { return len(ends(leader)) > 0 })
	if o := ends(leader)[0]; o.Kind != protocol.InstallFailed {
		t.Errorf("outcome %+v, want failed", o)
	}
	lagging.stop()
	lagging.dir = roomy
	lagging.start()
	g.msgSnap(1, 3)
	g.again(e, lagging)
	lagging.stop() // before the unmount
}

// TestNeedlessFetchIsNoFailure: what is cancelled because nobody needs it any more counts
// apart from what has failed, and says why it was cancelled.
func TestNeedlessFetchIsNoFailure(t *testing.T) {
	g := newGroup(t, 2, func(g *group) {
		g.options = func(o *Options) {
			o.Protocol.StartDeadline, o.Protocol.IdleDeadline, o.Server = time.Hour, time.Hour, nil
		}
	})
	g.member(1).set(func(m *member) { m.paused = true })
	g.member(2).set(func(m *member) { m.freeze = func(context.Context) error { return errors.New("makes none") } })
	g.write(20)
	g.member(2).seed(20)
	at := newGate()
	g.member(2).set(func(m *member) {
		m.fault = func(_ http.ResponseWriter, r *http.Request) bool { return data(r) && at.pass(r.Context()) != nil }
	})
	g.begin()
	at.stand(t)
	leader := g.member(1)
	leader.set(func(m *member) { m.recorded = protocol.ID{Term: 1, Index: 25} })
	leader.poll()
	g.until("the fetch has ended", func() bool { return leader.status().Transfers == 0 })
	if s := leader.status().Stats; s.Failed != 0 || s.Cancelled != 1 {
		t.Errorf("%d failed, %d cancelled, want 0 and 1", s.Failed, s.Cancelled)
	}
	leader.set(func(m *member) { m.recorded = protocol.ID{} })
	fetched := get(leader, func(m *member) []Fetched { return m.events.fetched })
	if len(fetched) != 1 || !strings.Contains(fetched[0].Err.Error(), "not needed any more") {
		t.Errorf("fetches %+v, want one that was not needed any more", fetched)
	}
}

// TestRetentionWhileServing: what is being read stays (R9), whatever is made meanwhile.
func TestRetentionWhileServing(t *testing.T) {
	g := behind(t, func(g *group) {
		g.options = func(o *Options) {
			o.Protocol.StartDeadline, o.Protocol.IdleDeadline = time.Hour, time.Hour
			o.Server = nil // leases that outlast the gate
		}
	})
	at := newGate()
	target := get(g.member(1), func(m *member) protocol.ID { return m.recorded })
	g.sources(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool {
			return data(r) && strings.Contains(r.URL.Path, target.String()) && at.pass(r.Context()) != nil
		}
	})
	e := g.msgSnap(1, 3)
	at.stand(t)
	maker := g.member(g.member(1).status().Source)
	for range 4 {
		had := maker.recordedIndex()
		g.write(15)
		g.until("a newer one is recorded at the maker", func() bool { return maker.recordedIndex() > had || maker.stored() > 3 })
	}
	pinned := 0
	for _, m := range []*member{g.member(1), g.member(2)} {
		if _, err := m.store.Get(target); err == nil {
			pinned++
		}
	}
	if pinned == 0 {
		t.Error("nobody holds the snapshot that is being read any more")
	}
	close(at.open)
	g.until("installed", func() bool { return g.member(3).appliedIndex() >= e.SnapIndex })
}

func (m *member) stored() int { return len(m.store.List()) }

// TestTwoLeaders: a leader whose term has passed is refused and changes nothing.
func TestTwoLeaders(t *testing.T) {
	g := newGroup(t, 3)
	old := g.member(1)
	old.set(func(m *member) { m.believes, m.fault = &belief{term: 1, leader: 1}, hang("/announce") })
	g.lead(2)
	g.write(20)
	g.until("the new leader has one", func() bool { return g.member(2).recordedIndex() >= 10 })
	g.until("the old one is refused", func() bool {
		return slices.ContainsFunc(get(old, func(m *member) []Refused { return m.events.refused }), func(r Refused) bool {
			return r.Kind == protocol.StaleTerm
		})
	})
	// Once it knows, it adopts like everybody.
	old.set(func(m *member) { m.believes, m.fault = nil, nil })
	g.write(1)
	g.until("the old leader has adopted it", func() bool { return old.recordedIndex() >= 10 })
}

// call sends a question to a member as another one would.
func (g *group) call(from, to uint64, change func(*protocol.InfoRequest)) protocol.Answer {
	g.t.Helper()
	r := protocol.InfoRequest{Group: g.name, From: from, Term: g.term, Transfer: "test"}
	change(&r)
	a, err := g.member(from).manager.client.Info(g.t.Context(), g.member(to).url, r)
	if err != nil {
		g.t.Fatal(err)
	}
	return a
}

func TestRefusalsOfQuestions(t *testing.T) {
	g := newGroup(t, 2)
	g.lead(1)
	cases := []struct {
		name   string
		change func(*protocol.InfoRequest)
		want   protocol.RefusalKind
	}{
		{"stale term", func(r *protocol.InfoRequest) { r.Term = 1; r.Make = true }, protocol.StaleTerm},
		{"other group", func(r *protocol.InfoRequest) { r.Group = "other" }, protocol.OtherGroup},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if a := g.call(1, 2, c.change); a.Refusal == nil || a.Refusal.Kind != c.want {
				t.Errorf("answer %+v, want refusal %s", a, c.want)
			}
		})
	}
}

// TestOutcomeAtDeposedLeader: it ends with NOT_LEADER and a hint, and is not silent.
func TestOutcomeAtDeposedLeader(t *testing.T) {
	g := newGroup(t, 3)
	g.lead(2)
	err := g.member(3).manager.client.Outcome(t.Context(), g.member(1).url, protocol.Outcome{
		Group: g.name, From: 3, To: 1, Term: 1, Kind: protocol.Installed, Index: 10,
	})
	r, ok := errors.AsType[*protocol.Refusal](err)
	if !ok || r.Kind != protocol.NotLeader || r.Leader != 2 {
		t.Errorf("error %v, want not_leader with leader 2", err)
	}
	if n := g.member(1).status().Stats.Refused; n == 0 {
		t.Error("the refusal is not counted")
	}
}

// TestAheadOfOwnApplied: a snapshot above the own applied index waits until it is applied
// (R4), and then needs no further entry (a quiet group must not keep it waiting).
func TestAheadOfOwnApplied(t *testing.T) {
	g := newGroup(t, 3)
	leader := g.member(1)
	g.write(15)
	g.until("the leader has one", func() bool { return leader.recordedIndex() >= 10 })
	leader.set(func(m *member) { m.paused = true })
	had := leader.recordedIndex()
	g.write(40)
	go leader.manager.Want(50)
	g.until("a follower has made one above", func() bool {
		return slices.ContainsFunc(g.all()[1:], func(m *member) bool {
			return slices.ContainsFunc(m.store.List(), func(h snapstore.Held) bool { return h.ID.Index >= 50 })
		})
	})
	if got := leader.recordedIndex(); got > 15 || got != had {
		t.Fatalf("recorded %d above what was applied", got)
	}
	leader.set(func(m *member) { m.paused = false })
	g.catchUp()
	g.until("it is recorded", func() bool { return leader.recordedIndex() >= 50 })
}

func TestSizes(t *testing.T) {
	const chunk = 16 << 10
	for _, size := range []int{0, 1, chunk - 1, chunk, chunk + 1, 64 * chunk, 64*chunk + 1} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			g := newGroup(t, 3, func(g *group) {
				g.files = func(index uint64) map[string][]byte { return map[string][]byte{"f": noise(index/5, size)} }
			})
			g.write(20)
			g.until("the leader has one", func() bool { return g.member(1).recordedIndex() >= 10 })
		})
	}
	t.Run("no file", func(t *testing.T) {
		g := newGroup(t, 3, func(g *group) { g.files = func(uint64) map[string][]byte { return map[string][]byte{} } })
		g.write(20)
		g.until("the leader has one", func() bool { return g.member(1).recordedIndex() >= 10 })
	})
}

func TestThousandSmallFiles(t *testing.T) {
	g := newGroup(t, 3, func(g *group) {
		g.options = func(o *Options) { o.Protocol.StartDeadline, o.Protocol.IdleDeadline = time.Minute, time.Minute }
		g.files = func(index uint64) map[string][]byte {
			files := map[string][]byte{}
			for i := range 1000 {
				files[fmt.Sprintf("%d/%d", i%10, i)] = noise(uint64(i)+index/20, i%100)
			}
			return files
		}
	})
	g.member(3).lag()
	g.write(30)
	g.until("the leader has one", func() bool { return g.member(1).recordedIndex() >= 10 })
	e := g.msgSnap(1, 3)
	g.until("installed", func() bool { return g.member(3).appliedIndex() >= e.SnapIndex })
}

// slowWriter sends so many bytes a second.
type slowWriter struct {
	http.ResponseWriter
	ctx   context.Context
	limit *rate.Limiter
}

func (w *slowWriter) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(len(p)-done, w.limit.Burst())
		if err := w.limit.WaitN(w.ctx, n); err != nil {
			return done, err
		}
		if _, err := w.ResponseWriter.Write(p[done : done+n]); err != nil {
			return done, err
		}
		http.NewResponseController(w.ResponseWriter).Flush()
		done += n
	}
	return len(p), nil
}

// TestSlowPeer: as long as bytes move there is no deadline, and the leader hears of it.
func TestSlowPeer(t *testing.T) {
	g := behind(t, func(g *group) {
		g.options = func(o *Options) {
			o.Protocol.StartDeadline, o.Protocol.IdleDeadline = 2*time.Second, 2*time.Second
		}
	})
	limit := rate.NewLimiter(30<<10, 512) // 3.2 s for the whole
	g.sources(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool {
			return m.through(func(w http.ResponseWriter) http.ResponseWriter { return &slowWriter{w, r.Context(), limit} })(w, r)
		}
	})
	e := g.msgSnap(1, 3)
	g.until("installed", func() bool { return g.member(3).appliedIndex() >= e.SnapIndex })
	g.until("the leader knows", func() bool { return len(ends(g.member(1))) == 1 })
	progress := get(g.member(1), func(m *member) int { return len(m.outcomes) }) - 1
	if progress == 0 {
		t.Error("no progress was reported")
	}
	if n := get(g.member(3), func(m *member) int { return len(m.events.fetched) }); n != 1 {
		t.Errorf("%d transfers, want one that takes its time", n)
	}
}

// TestRateBelowIdleDeadline: a transfer that waits for its turn is not idle, however low the
// limit is.
func TestRateBelowIdleDeadline(t *testing.T) {
	g := newGroup(t, 2, func(g *group) {
		g.files = func(uint64) map[string][]byte { return map[string][]byte{"f": noise(1, 3<<19)} }
		g.options = func(o *Options) {
			o.Protocol.StartDeadline, o.Protocol.IdleDeadline = 1500*time.Millisecond, 1500*time.Millisecond
			o.Server = nil // leases that last while the receiver waits for its turn
		}
	})
	leader := g.member(1)
	leader.opts.RateLimit = 400_000 // over 3 s for the one request that it takes
	leader.restart()
	g.write(20)
	g.until("the leader has one", func() bool { return leader.status().Recorded.Index >= 10 })
	fetched := get(leader, func(m *member) []Fetched { return m.events.fetched })
	if len(fetched) != 1 || fetched[0].Err != nil {
		t.Errorf("transfers %+v, want one without an error", fetched)
	}
}

// TestInstallGoesFirst: a transfer that no install needs is cancelled for one (R8).
func TestInstallGoesFirst(t *testing.T) {
	g := newGroup(t, 3, func(g *group) {
		g.options = func(o *Options) { o.Protocol.StartDeadline, o.Protocol.IdleDeadline = time.Hour, time.Hour }
	})
	lagging := g.member(3)
	lagging.lag()
	g.write(30)
	g.until("the leader has one", func() bool { return g.member(1).recordedIndex() >= 10 })
	g.until("all are at rest", func() bool { return g.resting() })

	at := newGate()
	g.sources(func(m *member) {
		m.fault = func(w http.ResponseWriter, r *http.Request) bool { return data(r) && at.pass(r.Context()) != nil }
	})
	lagging.set(func(m *member) { m.deaf = false })
	at.stand(t)
	g.sources(func(m *member) { m.fault = nil })
	e := g.msgSnap(1, 3)
	g.until("installed", func() bool { return lagging.appliedIndex() >= e.SnapIndex })
	fetched := get(lagging, func(m *member) []Fetched { return m.events.fetched })
	if len(fetched) != 2 || fetched[0].Purpose != protocol.Adopt || fetched[1].Purpose != protocol.Rescue || fetched[1].Err != nil {
		t.Errorf("transfers %+v, want one to adopt that was cancelled and one to install", fetched)
	}
}

// TestLeaderAlone: the policies of a group of one (R5).
func TestLeaderAlone(t *testing.T) {
	t.Run("local", func(t *testing.T) {
		g := newGroup(t, 1)
		g.write(20)
		m := g.member(1)
		g.until("it has made one", func() bool { return m.status().Recorded.Index >= 10 })
		if s := m.status(); s.Stats.Generated != 1 || s.Source != 1 || s.Stats.TakenOver != 0 {
			t.Errorf("status %+v, want one of its own", s)
		}
	})
	t.Run("never", func(t *testing.T) {
		g := newGroup(t, 1, func(g *group) { g.options = func(o *Options) { o.Protocol.Single = protocol.SingleNever } })
		m := g.member(1)
		g.write(20)
		g.until("it says why not", func() bool { return strings.Contains(m.status().Why, "never") })
		if i := m.recordedIndex(); i != 0 {
			t.Errorf("recorded %d", i)
		}
		id, err := m.manager.Snapshot(t.Context())
		if err != nil || id.Index < 20 {
			t.Errorf("asked by hand: %v, %v", id, err)
		}
	})
}

// TestEqualSnapshotOnAllPeers: holders of the same id are sources together (R10).
func TestEqualSnapshotOnAllPeers(t *testing.T) {
	g := newGroup(t, 4, func(g *group) { g.options = func(o *Options) { o.Protocol.SpreadInterval = 1 } })
	g.member(4).lag()
	g.write(20)
	g.until("three hold the same one", func() bool {
		a := get(g.member(1), func(m *member) protocol.ID { return m.recorded })
		return a.Index > 0 && a == get(g.member(2), func(m *member) protocol.ID { return m.recorded }) &&
			a == get(g.member(3), func(m *member) protocol.ID { return m.recorded })
	})
	e := g.msgSnap(1, 4)
	if len(e.Holders) != 3 {
		t.Fatalf("holders %v, want three", e.Holders)
	}
	g.until("installed", func() bool { return g.member(4).appliedIndex() >= e.SnapIndex })
	fetched := get(g.member(4), func(m *member) []Fetched { return m.events.fetched })
	if n := len(fetched[len(fetched)-1].Sources); n < 2 {
		t.Errorf("%d sources, want several", n)
	}
}

func TestConcurrentServeToMany(t *testing.T) {
	g := newGroup(t, 6)
	for id := uint64(3); id <= 6; id++ {
		g.member(id).lag()
	}
	g.write(30)
	g.until("the leader has one", func() bool { return g.member(1).recordedIndex() >= 10 })
	g.until("all are at rest", func() bool { return g.resting() })
	var last protocol.Envelope
	for id := uint64(3); id <= 6; id++ {
		last = g.msgSnap(1, id)
	}
	for id := uint64(3); id <= 6; id++ {
		g.until("installed", func() bool { return g.member(id).appliedIndex() >= last.SnapIndex })
	}
	g.until("the leader knows of all", func() bool { return len(ends(g.member(1))) == 4 })
}
