package protocol

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// auditor checks each step of a Machine for what must hold whatever happens.
type auditor struct {
	t      testing.TB
	begun  map[TransferID]bool
	freed  map[TransferID]bool
	fetch  TransferID           // open one, "" for none
	local  map[TransferID]Stage // what the own host is at
	making bool
	closed bool
	log    []string
}

func newAuditor(t testing.TB) *auditor {
	return &auditor{t: t, begun: map[TransferID]bool{}, freed: map[TransferID]bool{}, local: map[TransferID]Stage{}}
}

func (a *auditor) fail(format string, args ...any) {
	a.t.Helper()
	a.t.Fatalf("%s\nafter:\n%s", fmt.Sprintf(format, args...), strings.Join(a.log[max(0, len(a.log)-80):], "\n"))
}

// step takes one step of the Machine in.
func (a *auditor) step(now time.Duration, v *View, e Event, effects []Effect) {
	a.t.Helper()
	if _, tick := e.(Tick); !tick || len(effects) > 0 {
		a.log = append(a.log, fmt.Sprintf("%v %s", now, showEvent(e)))
	}
	a.event(e)
	for _, eff := range effects {
		a.log = append(a.log, "    "+show(eff))
		a.effect(v, eff)
	}
	if _, ok := e.(Close); ok {
		a.closed = true
		for t := range a.begun {
			if !a.freed[t] {
				a.fail("closed, but transfer %s was not freed", t)
			}
		}
	}
}

func (a *auditor) event(e Event) {
	switch e := e.(type) {
	case FetchDone:
		if e.Transfer == a.fetch {
			a.fetch = ""
		}
	case FetchEnded:
		if e.Transfer == a.fetch {
			a.fetch = ""
		}
	case RecordDone:
		if a.local[e.Transfer] == Recording {
			delete(a.local, e.Transfer)
		}
	case HandDone:
		if a.local[e.Transfer] == Handing && e.Outcome.Kind != Progress {
			delete(a.local, e.Transfer)
		}
	case Made, MakeFailed:
		a.making = false
	}
}

// effect checks one effect against the ones before it.
func (a *auditor) effect(v *View, e Effect) {
	a.t.Helper()
	if a.closed {
		a.fail("effect after Close: %s", show(e))
	}
	switch e := e.(type) {
	case Ask:
		a.use(e.Request.Transfer)
		a.member(v, e.Peer)
	case Fetch:
		a.use(e.Transfer)
		if a.fetch != "" {
			a.fail("fetch %s while %s is open", e.Transfer, a.fetch)
		}
		a.fetch = e.Transfer
		if len(e.Sources) == 0 || slices.Contains(e.Sources, v.Self) || e.Target.IsZero() {
			a.fail("bad fetch: %s", show(e))
		}
	case CancelFetch:
		a.use(e.Transfer)
		if a.fetch != e.Transfer {
			a.fail("cancel of %s, which is not open", e.Transfer)
		}
		if e.Why.Kind == "" || e.Why.Text == "" {
			a.fail("cancel of %s without a reason", e.Transfer)
		}
	case Record:
		a.use(e.Transfer)
		a.local[e.Transfer] = Recording
		if e.ID.Index > v.Applied || e.ID.Index <= v.RecordedIndex {
			a.fail("record of %s with applied %d, recorded %d (R4)", e.ID.Short(), v.Applied, v.RecordedIndex)
		}
	case Hand:
		a.use(e.Transfer)
		a.local[e.Transfer] = Handing
		a.hand(v, e)
	case Make:
		if a.making {
			a.fail("two makings at once")
		}
		a.making = true
		if v.Applied < e.MinIndex {
			a.fail("make of %d with applied %d", e.MinIndex, v.Applied)
		}
	case Freed:
		a.free(e.Transfer)
	case Spread:
		a.member(v, e.Peer)
		if v.Role != Leader {
			a.fail("announcement by a %s", v.Role)
		}
	case Tell:
		if e.Outcome.To == v.Self {
			a.fail("outcome to oneself")
		}
	}
}

// hand checks R8: an install never goes below what is committed, never brings a term
// above the leader's, never belongs to a term that has passed.
func (a *auditor) hand(v *View, e Hand) {
	a.t.Helper()
	i := slices.IndexFunc(v.Held, func(h Held) bool { return h.ID == e.ID })
	switch {
	case i < 0:
		a.fail("%s is handed over but not held", e.ID.Short())
	case e.ID.Index <= v.Commit, e.ID.Term > e.Envelope.Term, e.Envelope.Term < v.Term, e.ID.Index+1 < e.Envelope.First:
		a.fail("bad hand: %s with commit %d, term %d", show(e), v.Commit, v.Term)
	case !v.Held[i].Meta.Conf.Has(v.Self):
		a.fail("%s does not name this member", e.ID.Short())
	}
}

func (a *auditor) use(t TransferID) {
	a.t.Helper()
	if a.freed[t] {
		a.fail("transfer %s is used after it was freed", t)
	}
	a.begun[t] = true
}

func (a *auditor) free(t TransferID) {
	a.t.Helper()
	if !a.begun[t] || a.freed[t] {
		a.fail("transfer %s freed: begun %v, freed before %v", t, a.begun[t], a.freed[t])
	}
	a.freed[t] = true
	delete(a.local, t)
	if a.fetch == t {
		a.fetch = ""
	}
}

// member checks that a message goes to another member. A rescued member may know its
// leader and the holders from the envelope alone, so who is not in the table passes.
func (a *auditor) member(v *View, peer uint64) {
	a.t.Helper()
	if peer == v.Self || peer == 0 {
		a.fail("message to %d", peer)
	}
}

// open lists the transfers that have begun and not ended.
func (a *auditor) open() []TransferID {
	var out []TransferID
	for t := range a.begun {
		if !a.freed[t] {
			out = append(out, t)
		}
	}
	slices.Sort(out)
	return out
}

// show puts an effect on one line.
func show(e Effect) string {
	switch e := e.(type) {
	case Ask:
		r := e.Request
		s := fmt.Sprintf("ask %d >=%d", e.Peer, r.MinIndex)
		if r.Make {
			s += " make"
		}
		if r.Needs != 0 {
			s += fmt.Sprintf(" needs %d", r.Needs)
		}
		return s
	case Fetch:
		s := fmt.Sprintf("fetch (%s) %s from %v", e.Purpose, e.Target.Short(), e.Sources)
		if len(e.Others) > 0 {
			s += fmt.Sprintf(" others %v", e.Others)
		}
		return s
	case CancelFetch:
		return fmt.Sprintf("cancel (%s)", e.Why.Kind)
	case Record:
		return fmt.Sprintf("record (%s) %s source %d", e.Purpose, e.ID.Short(), e.Source)
	case Hand:
		return fmt.Sprintf("hand %s for %d@%d of %d", e.ID.Short(), e.Envelope.SnapIndex, e.Envelope.SnapTerm, e.Envelope.From)
	case Tell:
		return "tell " + showOutcome(e.Outcome)
	case Spread:
		return fmt.Sprintf("spread %d %s holders %v", e.Peer, e.Announce.ID.Short(), e.Announce.Holders)
	case Make:
		return fmt.Sprintf("make >=%d", e.MinIndex)
	case Quarantine:
		return "quarantine " + e.ID.Short()
	case Freed:
		if e.Keep {
			return "freed, keep"
		}
		return "freed"
	case Refused:
		return fmt.Sprintf("refused %d %s", e.Peer, e.Refusal.Error())
	case Alarm:
		return "alarm: " + e.Text
	}
	return fmt.Sprintf("%T", e)
}

func showOutcome(o Outcome) string {
	s := fmt.Sprintf("%d %s %d", o.To, o.Kind, o.Index)
	if o.Bytes != 0 {
		s += fmt.Sprintf(" bytes %d", o.Bytes)
	}
	if o.Refusal != nil {
		s += fmt.Sprintf(" refusal %s term %d leader %d", o.Refusal.Kind, o.Refusal.Term, o.Refusal.Leader)
	}
	if o.Reason != "" {
		s += " (" + o.Reason + ")"
	}
	return s
}

func showEvent(e Event) string {
	return strings.TrimPrefix(fmt.Sprintf("%T", e), "protocol.") + fmt.Sprintf("%+v", e)
}
