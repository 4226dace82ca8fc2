package protocol

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/snapferry/snapferry/snapshot"
)

// world is one Machine with the view of its member, kept as a host would keep it.
type world struct {
	t     testing.TB
	m     *Machine
	v     View
	now   time.Duration
	audit *auditor
	fetch Fetch // the last one
}

// Members of the tests: n of them, this one is self. All have the log that the leader has.
func newWorld(t testing.TB, cfg Config, self uint64, n int) *world {
	w := &world{t: t, m: New(cfg, "run"), audit: newAuditor(t), now: time.Minute}
	w.v = View{
		Group: "g", Self: self, Lineage: Lineage{Maker: self, Incarnation: "i"}, Role: Follower,
		Term: 3, Leader: 1, First: 1,
	}
	for id := uint64(1); id <= uint64(n); id++ {
		if id != self {
			w.v.Peers = append(w.v.Peers, Peer{Member: Member{ID: id, Name: fmt.Sprintf("n%d", id)}, Voter: true, Active: true})
		}
	}
	if self == 1 {
		w.v.Role = Leader
	}
	return w
}

// applied moves the log, and that of all peers, to an index.
func (w *world) applied(i uint64) {
	w.v.Applied, w.v.Commit, w.v.Last = i, i, i
	for j := range w.v.Peers {
		w.v.Peers[j].Match = i
	}
}

// step gives one event to the Machine and keeps the view as a host would.
func (w *world) step(e Event) []Effect {
	w.t.Helper()
	w.before(e)
	effects := w.m.Step(w.now, &w.v, e)
	w.audit.step(w.now, &w.v, e, effects)
	for _, eff := range effects {
		switch eff := eff.(type) {
		case Fetch:
			w.fetch = eff
		case Make:
			w.made(eff)
		case Quarantine:
			w.drop(eff.ID)
		}
	}
	return effects
}

// made checks that a leader makes a snapshot only where nobody else could have (I12, R5).
func (w *world) made(e Make) {
	w.t.Helper()
	voters := slices.ContainsFunc(w.v.Peers, func(p Peer) bool { return p.Voter })
	if w.v.Role == Leader && voters && !w.m.sched.since.overCap.on && w.m.sched.empty < w.m.cfg.Attempts {
		w.audit.fail("a leader makes a snapshot: %s", show(e))
	}
}

// before changes the view as the cause of the event has changed it.
func (w *world) before(e Event) {
	switch e := e.(type) {
	case FetchDone:
		w.hold(e.Held)
	case Made:
		w.hold(e.Held)
	case Damaged:
		w.drop(e.ID)
	case RecordDone:
		if e.Refusal == nil && e.Err == "" {
			w.recorded(e.Transfer)
		}
	case HandDone:
		if e.Outcome.Kind == Installed && w.m.slot.stage == Handing && w.m.slot.transfer == e.Transfer {
			id := w.m.slot.id
			w.v.RecordedIndex, w.v.RecordedTerm = id.Index, id.Term
			w.v.Applied, w.v.Commit = max(w.v.Applied, id.Index), max(w.v.Commit, id.Index)
		}
	}
}

// recorded lets the record of a transfer be in the view.
func (w *world) recorded(t TransferID) {
	var id ID
	switch {
	case w.m.slot.stage == Recording && w.m.slot.transfer == t:
		id = w.m.slot.id
	case w.m.maker.stage == makerRecording && w.m.maker.transfer == t:
		id = w.m.maker.id
	}
	if id.Index > w.v.RecordedIndex {
		w.v.RecordedIndex, w.v.RecordedTerm = id.Index, id.Term
	}
}

func (w *world) hold(h Held) {
	if h.ID.IsZero() || slices.ContainsFunc(w.v.Held, func(o Held) bool { return o.ID == h.ID }) {
		return
	}
	w.v.Held = append(w.v.Held, h)
	slices.SortFunc(w.v.Held, func(a, b Held) int { return a.ID.Compare(b.ID) })
}

func (w *world) drop(id ID) {
	w.v.Held = slices.DeleteFunc(w.v.Held, func(h Held) bool { return h.ID == id })
}

// tick lets time pass in small steps and gives the effects of all of them.
func (w *world) tick(d time.Duration) []Effect {
	w.t.Helper()
	var all []Effect
	for end := w.now + d; w.now < end; {
		w.now += min(100*time.Millisecond, end-w.now)
		all = append(all, w.step(Tick{})...)
	}
	return all
}

// snap makes a held snapshot; the letter stands for its maker's bytes.
func snap(index, term uint64, maker uint64) Held {
	id := ID{Term: term, Index: index, Digest: snapshot.Digest{byte(maker), 1}}
	return Held{ID: id, Bytes: 1000, Meta: Meta{
		Group: "g", Term: term, Index: index, Conf: Conf{Voters: []uint64{1, 2, 3, 4, 5}},
		Lineage: Lineage{Maker: maker, Incarnation: "i"},
	}}
}

// has makes the recorded and held snapshot of a world.
func (w *world) has(h Held) {
	w.hold(h)
	w.v.RecordedIndex, w.v.RecordedTerm = h.ID.Index, h.ID.Term
}

// ready makes the answer of a peer that holds a snapshot.
func (w *world) ready(peer uint64, h Held) InfoCame {
	return InfoCame{Answer{
		Transfer: w.m.slot.transfer, From: peer, Term: w.v.Term, State: Ready,
		ID: h.ID, Lineage: h.Meta.Lineage, Bytes: h.Bytes, Applied: w.v.Applied,
	}}
}

func (w *world) answer(peer uint64, s AnswerState, reason string) InfoCame {
	return InfoCame{Answer{Transfer: w.m.slot.transfer, From: peer, Term: w.v.Term, State: s, Reason: reason}}
}

func (w *world) refusal(peer uint64, k RefusalKind) InfoCame {
	return InfoCame{Answer{Transfer: w.m.slot.transfer, From: peer, Term: w.v.Term, Refusal: &Refusal{Kind: k}}}
}

// find gives the first effect of a type.
func find[E Effect](effects []Effect) (E, bool) {
	for _, e := range effects {
		if e, ok := e.(E); ok {
			return e, true
		}
	}
	var none E
	return none, false
}

// count counts the effects of a type.
func count[E Effect](effects []Effect) int {
	n := 0
	for _, e := range effects {
		if _, ok := e.(E); ok {
			n++
		}
	}
	return n
}

// must gives the effect of a type that has to be there.
func must[E Effect](t testing.TB, effects []Effect) E {
	t.Helper()
	e, ok := find[E](effects)
	if !ok {
		t.Fatalf("no %T in %v", e, showAll(effects))
	}
	return e
}

// mustNot fails if there is an effect of a type.
func mustNot[E Effect](t testing.TB, effects []Effect) {
	t.Helper()
	if e, ok := find[E](effects); ok {
		t.Fatalf("unexpected %s in %v", show(e), showAll(effects))
	}
}

func showAll(effects []Effect) []string {
	out := make([]string, len(effects))
	for i, e := range effects {
		out[i] = show(e)
	}
	return out
}

// small is a configuration with small thresholds.
func small() Config {
	return Config{Entries: 100, Bytes: -1, LogCap: -1, Seed: 1}
}

// settle answers everything that is open as a healthy host and healthy peers would, until
// nothing is left, and fails if that takes longer than all deadlines together.
func (w *world) settle() {
	w.t.Helper()
	for range 3000 {
		w.finishLocal()
		if len(w.audit.open()) == 0 && w.m.slot.stage == Idle {
			return
		}
		w.tick(100 * time.Millisecond)
	}
	w.audit.fail("still open: %v, stage %s", w.audit.open(), w.m.slot.stage)
}

// finishLocal lets the own host finish what it is recording or handing.
func (w *world) finishLocal() {
	for _, t := range slices.Sorted(maps.Keys(w.audit.local)) {
		if w.audit.local[t] == Handing {
			w.step(HandDone{Transfer: t, Outcome: Outcome{Kind: InstallFailed}})
		} else {
			w.step(RecordDone{Transfer: t, Err: "disk"})
		}
	}
}
