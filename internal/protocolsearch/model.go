package protocolsearch

import "fmt"

// Bounds limits a search.
type Bounds struct {
	Slots, Attempts, Claims int // log entries, uploads, claims in all
	Ghosts                  int // PUTs that lose their sender
	Sweeper, Pruner         bool
	Restorer, Expiry        bool
	States                  int // 0: all states; else the search stops there, incomplete
}

// Break is a rule that is left out.
type Break int

// The breaks that the search must find.
const (
	Nothing            Break = iota
	NoNameCheck              // P3.4 left out
	NoNameCheckOfClaim       // P3.4 left out for claims
	AbortDeletes             // P3.5: a timed-out publish is taken for a failed one
	SweepByAge               // P9: what the head does not name is deleted without a void
	HeadDeleted              // P2: the newest name may be removed
	PublishFirst             // P5d: the commit comes before the seal
	BaseNotRechecked         // P5e: a collision does not check the base again
	TrustLostSlot            // 0001: a slot that holds another's entry is taken for a commit that failed
	NoReread                 // P10: a missing blob is taken for damage without reading the head again
)

// model makes successors. It owns the interned entries.
type model struct {
	Bounds
	broken  Break
	entries []entry
	ids     map[entry]id
	bad     string // set when the successor being made breaks a promise
}

func newModel(b Bounds, broken Break) *model {
	if b.Slots > maxSlots || b.Attempts > maxAttempts {
		panic(fmt.Sprintf("bounds %+v exceed the model's", b))
	}
	return &model{Bounds: b, broken: broken, entries: make([]entry, 1), ids: map[entry]id{}}
}

// entry returns an interned entry; entry 0 is what an empty log looks like.
func (m *model) entry(i id) entry { return m.entries[i] }

func (m *model) intern(e entry) id {
	if i, ok := m.ids[e]; ok {
		return i
	}
	i := id(len(m.entries))
	if int(i) != len(m.entries) {
		panic("too many entries")
	}
	m.entries, m.ids[e] = append(m.entries, e), i
	return i
}

// after builds the entry that follows prev, 0 if the log may grow no more.
func (m *model) after(prev id, e entry) id {
	e.prev, e.slot = prev, m.entry(prev).slot+1
	if int(e.slot) > m.Slots {
		return 0
	}
	return m.intern(e)
}

// Event is one step of one actor.
type Event struct{ Actor, Act string }

// String returns "actor: act".
func (e Event) String() string { return e.Actor + ": " + e.Act }

// emit takes a successor and what happened.
type emit func(w world, event Event)

// next emits every successor of w. A world that breaks a promise has m.bad set.
func (m *model) next(w world, out emit) {
	for i := range w.owners {
		m.ownerSteps(w, i, out)
	}
	if m.Sweeper {
		m.agentSteps(w, func(w *world) *agent { return &w.sweeper }, "sweeper", m.sweep, out)
	}
	if m.Pruner {
		m.agentSteps(w, func(w *world) *agent { return &w.pruner }, "pruner", m.prune, out)
	}
	if m.Restorer {
		m.restorerSteps(w, out)
	}
	m.storeSteps(w, out)
}

// storeSteps is what happens without anybody's doing: a late PUT lands, an old name is
// removed, an unsealed blob expires.
func (m *model) storeSteps(w world, out emit) {
	if w.ghost != 0 {
		n := w
		n.ghost = 0
		m.create(&n, w.ghost)
		out(n, Event{"store", "late put lands"})
	}
	if newest := m.entry(w.newest()).slot; newest > 0 {
		for slot := uint8(1); slot < newest; slot++ {
			if w.at(slot) != 0 {
				n := w
				n.names[slot-1] = 0
				out(n, Event{"store", "oldest name removed"})
				break // in ascending order
			}
		}
		if m.broken == HeadDeleted {
			n := w
			n.names[newest-1] = 0
			out(n, Event{"store", "newest name removed"})
		}
	}
	if m.Expiry {
		w.fresh.each(func(att uint8) {
			n := w
			n.fresh &^= one(att)
			out(n, Event{"store", "unsealed blob expires"})
		})
	}
}

// create is a conditional PUT; it reports whether the name was free.
func (m *model) create(w *world, rec id) bool {
	e := m.entry(rec)
	if w.at(e.slot) != 0 {
		return false
	}
	w.names[e.slot-1] = rec
	if w.history[e.slot-1] == 0 {
		w.history[e.slot-1] = rec
		if e.slot > 1 && w.history[e.slot-2] != e.prev {
			m.bad = "history forks: an entry does not follow the one before it"
		}
	}
	return true
}

// inspect tells which promise a world breaks by itself.
func (m *model) inspect(w *world) string {
	for i := m.Slots - 1; i >= 0; i-- {
		if w.history[i] == 0 {
			continue
		}
		if m.entry(w.history[i]).head.named()&^w.blobs() != 0 {
			return "a retained checkpoint has lost a blob"
		}
		return ""
	}
	return ""
}

// outcome is how an append stands after a step of it.
type outcome uint8

const (
	going outcome = iota
	committed
	lost
	fenced
)

// appendSteps makes one step of P3 for an append in progress.
func (m *model) appendSteps(w world, a appender, then func(w world, a appender, o outcome, act string)) {
	e := m.entry(a.rec)
	switch a.stage {
	case put:
		if int(w.ghosts) < m.Ghosts && w.ghost == 0 {
			n := w
			n.ghost = a.rec
			n.ghosts++
			then(n, a, going, "put times out and is still in flight")
		}
		if n := w; m.create(&n, a.rec) {
			then(n, appender{check, a.rec}, going, "put")
			then(n, a, going, "put, answer lost")
		} else {
			then(w, appender{taken, a.rec}, going, "put: name exists")
		}
	case taken:
		switch there := w.at(e.slot); there {
		case a.rec:
			then(w, appender{check, a.rec}, going, "slot holds its own entry")
		case 0:
			then(w, appender{put, a.rec}, going, "slot is gone again")
		default:
			then(w, a, lost, "slot holds another entry")
		}
	case check:
		skip := m.broken == NoNameCheck || m.broken == NoNameCheckOfClaim && e.kind == claim
		if skip || !w.follows(e.slot) {
			m.acknowledge(w, a, then)
		} else {
			then(w, appender{checked, a.rec}, going, "something follows")
		}
	case checked:
		if next := w.at(e.slot + 1); next != 0 && m.entry(next).prev == a.rec {
			m.acknowledge(w, a, then)
		} else {
			then(w, a, fenced, "the name had been used before")
		}
	}
}

func (m *model) acknowledge(w world, a appender, then func(w world, a appender, o outcome, act string)) {
	if w.history[m.entry(a.rec).slot-1] != a.rec {
		m.bad = "acknowledged an entry whose slot in history is another's"
	}
	then(w, a, committed, "acknowledged")
}
