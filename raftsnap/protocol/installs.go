package protocol

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// Report is what Raft is to be told of a MsgSnap: Finish, or Failure (R7).
type Report struct {
	Peer   uint64
	Finish bool
}

// Installs is the leader's book of the MsgSnaps that it has sent and that Raft has not yet
// been told the end of. Each one ends by exactly one Report, whatever happens to it, but
// for two cases in which Raft has left its waiting state by itself and a report would hit
// something else: the leadership is Lost, or another MsgSnap to the same member is Sent.
//
// It also says how far the log must be held for installs in progress (R9), and from how
// long they took how many entries are worth keeping. Used from one goroutine.
type Installs struct {
	cfg   Config
	now   time.Duration
	open  map[uint64]*install
	grace []hold
	took  time.Duration // of an install, measured: rises at once, falls slowly
}

// install is one MsgSnap without an end.
type install struct {
	term, index   uint64
	sent, heard   time.Duration
	bytes         int64
	floorReleased bool
}

// hold keeps the log from an index for some time after an install has ended.
type hold struct {
	index uint64
	until time.Duration
}

// InstallStatus is an install in progress as the leader sees it.
type InstallStatus struct {
	Peer  uint64
	Index uint64
	Bytes int64         // moved so far
	Since time.Duration // when the MsgSnap was sent
}

// NewInstalls makes an empty book.
func NewInstalls(cfg Config) *Installs {
	return &Installs{cfg: cfg.withDefaults(), open: map[uint64]*install{}}
}

// Sent enters a MsgSnap of the given term for the snapshot at index. An install of the
// same member that is still open is replaced without a Report: Raft sends no second one
// before it has left the state that the first put it into.
func (b *Installs) Sent(now time.Duration, peer, term, index uint64) {
	b.advance(now)
	b.open[peer] = &install{term: term, index: index, sent: b.now, heard: b.now}
}

// Outcome takes what a member says of its install; first is the first index of the own
// log. A Refusal tells the member that nobody waits for this: the install is of another
// term, or has ended before.
func (b *Installs) Outcome(now time.Duration, o Outcome, first uint64) ([]Report, *Refusal) {
	b.advance(now)
	in, ok := b.open[o.From]
	switch {
	case !ok:
		return nil, &Refusal{Kind: Gone, Text: fmt.Sprintf("no install of %d is open", o.From)}
	case o.Term != in.term:
		return nil, &Refusal{Kind: StaleTerm, Term: in.term, Text: fmt.Sprintf("the install is of term %d, not %d", in.term, o.Term)}
	}
	switch o.Kind {
	case Progress:
		in.heard, in.bytes = b.now, max(in.bytes, o.Bytes)
		return nil, nil
	case Installed:
		return b.end(o.From, o.Index+1 >= first), nil
	case StepNotNeeded, InstallFailed:
		if o.Index != in.index {
			return nil, &Refusal{Kind: Gone, Text: fmt.Sprintf("the open install is of index %d, not %d", in.index, o.Index)}
		}
		return b.end(o.From, o.Kind == StepNotNeeded), nil
	}
	return nil, nil
}

// SendFailed ends the install of a member that the MsgSnap did not reach, or that it must
// not be sent to (R6), or that has left the group.
func (b *Installs) SendFailed(now time.Duration, peer uint64) []Report {
	b.advance(now)
	if _, ok := b.open[peer]; !ok {
		return nil
	}
	return b.end(peer, false)
}

// Tick ends installs that nothing has been heard of for the report deadline, and lets go
// of floors that are past their bounds; logBytes is the size of the log.
func (b *Installs) Tick(now time.Duration, logBytes int64) []Report {
	b.advance(now)
	b.grace = slices.DeleteFunc(b.grace, func(h hold) bool {
		return b.now >= h.until || logBytes > b.cfg.FloorBytes
	})
	var reports []Report
	for _, peer := range slices.Sorted(maps.Keys(b.open)) {
		in := b.open[peer]
		if b.now-in.sent >= b.cfg.FloorTime || logBytes > b.cfg.FloorBytes {
			in.floorReleased = true
		}
		if b.now-in.heard >= b.cfg.ReportDeadline {
			reports = append(reports, b.end(peer, false)...)
		}
	}
	return reports
}

// Lost empties the book when the leadership is gone: the Progress that Raft would change
// by a report is gone as well.
func (b *Installs) Lost() {
	clear(b.open)
	b.grace = nil
}

// Floor gives the lowest index that an install in progress needs the entries above of.
// The floor of each install ends for good at its bounds in time and in bytes of the log;
// the install goes on and looks for a newer snapshot.
func (b *Installs) Floor() (index uint64, held bool) {
	lower := func(i uint64) {
		if !held || i < index {
			index, held = i, true
		}
	}
	for _, in := range b.open {
		if !in.floorReleased {
			lower(in.index)
		}
	}
	for _, h := range b.grace {
		lower(h.index)
	}
	return index, held
}

// Trailing gives how many entries the log should keep below the recorded snapshot: what
// comes in, at rate entries a second, during twice the measured time of an install. That
// is never less than the setting, never more than four times as many, and the extra ones
// end where TrailingBytes of entries of the given mean size are reached.
func (b *Installs) Trailing(rate, entryBytes float64) uint64 {
	flag := b.cfg.TrailingEntries
	want := min(2*rate*b.took.Seconds(), 4*float64(flag))
	if entryBytes > 0 {
		want = min(want, float64(b.cfg.TrailingBytes)/entryBytes)
	}
	return max(flag, uint64(max(want, 0)))
}

// Status lists the open installs, by member.
func (b *Installs) Status() []InstallStatus {
	var out []InstallStatus
	for _, peer := range slices.Sorted(maps.Keys(b.open)) {
		in := b.open[peer]
		out = append(out, InstallStatus{Peer: peer, Index: in.index, Bytes: in.bytes, Since: in.sent})
	}
	return out
}

// end is the finaliser of an install: the only place where a Report is made.
func (b *Installs) end(peer uint64, finish bool) []Report {
	in := b.open[peer]
	delete(b.open, peer)
	if finish {
		b.measure(b.now - in.sent)
		if !in.floorReleased {
			b.grace = append(b.grace, hold{index: in.index, until: b.now + b.cfg.FloorGrace})
		}
	}
	return []Report{{Peer: peer, Finish: finish}}
}

// measure takes the time of one install into account.
func (b *Installs) measure(took time.Duration) {
	if took < b.took {
		took = (3*b.took + took) / 4
	}
	b.took = took
}

func (b *Installs) advance(now time.Duration) { b.now = max(b.now, now) }
