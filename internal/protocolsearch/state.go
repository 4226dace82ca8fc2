package protocolsearch

import "math/bits"

// The model's sizes. Bounds stay within them.
const (
	maxSlots    = 8
	maxAttempts = 4
)

// set holds attempts; attempt n is bit n, 1..maxAttempts.
type set uint8

func one(att uint8) set { return 1 << att }

func (s set) has(att uint8) bool { return s&one(att) != 0 }

// each calls f for the members in ascending order.
func (s set) each(f func(att uint8)) {
	for ; s != 0; s &= s - 1 {
		f(uint8(bits.TrailingZeros8(uint8(s))))
	}
}

// point is a retained checkpoint: the attempt that wrote it and the attempts whose
// blobs it borrowed.
type point struct {
	att  uint8
	refs set
}

func (p point) blobs() set {
	if p.att == 0 {
		return 0
	}
	return one(p.att) | p.refs
}

// head is the body of an entry: the state of the task after it.
type head struct {
	epoch uint8
	kept  [2]point // the older first; attempt 0 is none
	void  set
	done  uint8 // last attempt committed in this epoch
}

func (h head) named() set { return h.kept[0].blobs() | h.kept[1].blobs() }

func (h head) retained(att uint8) (point, bool) {
	for _, p := range h.kept {
		if att != 0 && p.att == att {
			return p, true
		}
	}
	return point{}, false
}

type kind uint8

const (
	claim kind = iota + 1
	commit
	void
	trim
)

// entry is a log entry. by is the incarnation of the owner that made it and stands for
// the nonce; a sweeper or pruner never has two entries at one slot after one predecessor
// that differ in the nonce only.
type entry struct {
	kind     kind
	slot, by uint8
	att      uint8
	prev     id
	head     head
}

// id is the number of an interned entry and stands for its digest. 0 is none.
type id uint16

// pc says where an actor stands.
type pc uint8

const (
	off      pc = iota // not running, or nothing to do
	claiming           // owner: its claim is on its way
	ready              // owner: between attempts
	uploaded           // owner: blobs are put, not sealed
	publish            // owner: its commit is on its way
	reread             // owner: lost a race, head not read again yet
	lateSeal           // owner: publishes before it seals (a break)
	sending            // sweeper, pruner: an entry is on its way
	listed             // restorer: has a listing
	reading            // restorer: reads blobs
	missed             // restorer: a blob was absent
	finished           // restorer
)

// stage says where an append stands.
type stage uint16

const (
	put     stage = iota // send create-if-absent (again)
	taken                // it said that the name exists; read it
	check                // P3.4: list what follows
	checked              // something follows: read the next slot
)

// appender is an append in progress.
type appender struct {
	stage stage
	rec   id
}

type owner struct {
	app   appender
	known id // the head it builds on
	epoch uint16
	pc    pc
	by    uint8
	att   uint8
	base  uint8 // checkpoint it borrows from
	refs  set   // attempts it borrows blobs of
	dels  set   // blobs it has found dead and not deleted yet
}

// agent is the sweeper or the pruner.
type agent struct {
	app  appender
	pc   pc
	dels set
}

type restorer struct {
	pc   pc
	slot uint8
	att  uint8 // the checkpoint it restores
	want set   // blobs not read yet
}

// world is one state of everything. It is comparable, and the widths of its fields are
// chosen so that it has no padding: that halves the time of a search.
type world struct {
	names   [maxSlots]id // the log's objects, by slot-1
	history [maxSlots]id // what was first put at each name
	ghost   id           // a PUT in flight without a sender
	owners  [2]owner
	sweeper agent
	pruner  agent
	reader  restorer
	epochOf [maxAttempts]uint8 // by attempt-1
	fresh   set                // blobs that the store may expire
	sealed  set
	atts    uint8
	claims  uint8
	ghosts  uint16
}

func (w *world) blobs() set { return w.fresh | w.sealed }

func (w *world) remove(blobs set) {
	w.fresh &^= blobs
	w.sealed &^= blobs
}

// newest returns what P2 finds: the greatest name.
func (w *world) newest() id {
	for i := maxSlots - 1; i >= 0; i-- {
		if w.names[i] != 0 {
			return w.names[i]
		}
	}
	return 0
}

func (w *world) follows(slot uint8) bool {
	for _, e := range w.names[slot:] {
		if e != 0 {
			return true
		}
	}
	return false
}

// at returns the entry that lies at a slot, 0 beyond the bounds.
func (w *world) at(slot uint8) id {
	if slot == 0 || int(slot) > maxSlots {
		return 0
	}
	return w.names[slot-1]
}

// dead is P8: the blobs there are that nothing in h names and whose attempt can commit
// no more.
func (w *world) dead(h head) set {
	var out set
	(w.blobs() &^ h.named()).each(func(att uint8) {
		epoch := w.epochOf[att-1]
		if epoch < h.epoch || h.void.has(att) || epoch == h.epoch && att <= h.done {
			out |= one(att)
		}
	})
	return out
}
