package protocolsearch

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"
)

// Result is what a search found.
type Result struct {
	States    int
	Complete  bool          // every state within the bounds was seen
	Violation string        // the first promise broken, by a shortest path; "" if none is
	Path      []Event       // the events that lead there
	Events    map[Event]int // how many states each event was the first to reach
}

// String is a summary and, if a promise was broken, the path.
func (r Result) String() string {
	s := fmt.Sprintf("%d states, complete: %t", r.States, r.Complete)
	if r.Violation != "" {
		s += fmt.Sprintf("\n%s after %d steps:", r.Violation, len(r.Path))
		for _, e := range r.Path {
			s += "\n  " + e.String()
		}
	}
	return s
}

// Search visits the states within the bounds breadth first, until one breaks a promise.
func Search(b Bounds, broken Break) Result {
	m := newModel(b, broken)
	v := newVisited()
	v.add(world{}, 0)
	r := Result{Events: map[Event]int{}}

	for at := 0; at < len(v.worlds) && r.Violation == ""; at++ {
		if r.States = len(v.worlds); b.States > 0 && r.States > b.States {
			return r
		}
		m.next(v.worlds[at], func(w world, event Event) {
			if bad := m.judge(&w); bad != "" && r.Violation == "" {
				r.Violation, r.Path = bad, append(m.path(v, at), event)
			}
			if v.add(canonical(w), at) {
				r.Events[event]++
			}
		})
	}
	r.States, r.Complete = len(v.worlds), r.Violation == ""
	return r
}

// judge tells which promise the step to w, or w itself, breaks.
func (m *model) judge(w *world) string {
	bad := m.bad
	m.bad = ""
	if bad == "" {
		bad = m.inspect(w)
	}
	return bad
}

// path tells the events that led to a state, by making the successors again.
func (m *model) path(v *visited, at int) []Event {
	var events []Event
	for ; at != 0; at = int(v.parents[at]) {
		var found Event
		m.next(v.worlds[v.parents[at]], func(w world, event Event) {
			if found == (Event{}) && canonical(w) == v.worlds[at] {
				found = event
			}
			m.bad = ""
		})
		events = append(events, found)
	}
	slices.Reverse(events)
	return events
}

// canonical puts the owners in order: they are alike, so which is which tells nothing.
func canonical(w world) world {
	a, b := &w.owners[0], &w.owners[1]
	order := cmp.Or(
		cmp.Compare(a.by, b.by), cmp.Compare(a.pc, b.pc), cmp.Compare(a.dels, b.dels),
	)
	if order < 0 { // a running owner has an incarnation of its own, so a tie is two that are off
		*a, *b = *b, *a
	}
	return w
}

// visited is a set of worlds with the parent of each, in order of discovery.
type visited struct {
	worlds  []world
	parents []uint32
	table   []uint32 // open addressing; index+1, 0 is free
	seed    maphash.Seed
}

func newVisited() *visited {
	return &visited{table: make([]uint32, 1<<12), seed: maphash.MakeSeed()}
}

// add reports whether w is new.
func (v *visited) add(w world, parent int) bool {
	i := v.find(&w)
	if v.table[i] != 0 {
		return false
	}
	v.worlds = append(v.worlds, w)
	v.parents = append(v.parents, uint32(parent))
	v.table[i] = uint32(len(v.worlds))
	if 2*len(v.worlds) > len(v.table) {
		v.grow()
	}
	return true
}

// find returns the place of w in the table, free if w is new.
func (v *visited) find(w *world) int {
	mask := len(v.table) - 1
	i := int(maphash.Comparable(v.seed, *w)) & mask
	for v.table[i] != 0 && v.worlds[v.table[i]-1] != *w {
		i = (i + 1) & mask
	}
	return i
}

func (v *visited) grow() {
	v.table = make([]uint32, 2*len(v.table))
	for n := range v.worlds {
		v.table[v.find(&v.worlds[n])] = uint32(n + 1)
	}
}
