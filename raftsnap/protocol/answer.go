package protocol

import (
	"fmt"
	"slices"
)

// Answer says what this member has for the asker. It changes nothing, so it may be asked
// again and again while an answer is held open; Step with Asked is what makes a request to
// make a snapshot count.
//
// A refusal is always typed. Requests that a leader makes are fenced by the term; one that
// a member makes for itself (Needs is the asker) is not, because moving data is not tied
// to a term, only installing it is.
func (m *Machine) Answer(v *View, r InfoRequest) Answer {
	a := Answer{Transfer: r.Transfer, From: v.Self, Term: v.Term, State: None, Applied: v.Applied}
	if a.Refusal = m.refusal(v, r); a.Refusal != nil {
		return a
	}
	if best := fitting(v, r); best != nil {
		a.State, a.ID, a.Lineage, a.Bytes = Ready, best.ID, best.Meta.Lineage, best.Bytes
		return a
	}
	k := &m.maker
	switch {
	case k.stage == makerWaiting:
		a.State = Generating
		a.Reason = fmt.Sprintf("applied is %d, waiting for %d", v.Applied, k.min)
	case k.stage != makerResting && (r.MinIndex <= k.min || r.MinIndex <= k.again || r.Make):
		a.State, a.Reason = Generating, k.why
	case k.failed != "" && m.now < k.until:
		a.State, a.Reason = Failed, k.failed
	case r.Make:
		a.Reason = "not begun"
	case len(v.Held) > 0:
		text := fmt.Sprintf("the newest is %s", v.newestHeld().ID.Short())
		a.Reason, a.Refusal = text, &Refusal{Kind: NothingNewer, Term: v.Term, Text: text}
	default:
		a.Reason = "no snapshot"
	}
	return a
}

// refusal says why a request is not even looked at.
func (m *Machine) refusal(v *View, r InfoRequest) *Refusal {
	forItself := r.Needs != 0 && r.Needs == r.From
	switch {
	case m.closed:
		return &Refusal{Kind: Closed}
	case r.Group != v.Group:
		return &Refusal{Kind: OtherGroup, Text: v.Group}
	case r.Term < v.Term && (r.Make || !forItself):
		return &Refusal{Kind: StaleTerm, Leader: v.Leader, Term: v.Term}
	case r.Make && v.Role == Leader:
		// Of a term that this member has not heard of yet.
		return &Refusal{Kind: Busy, Term: v.Term, Text: "this member leads, and a leader makes no snapshots"}
	case r.Make && m.rescue.env != nil && fitting(v, r) == nil:
		return &Refusal{Kind: Busy, Term: v.Term, Text: "this member is about to install another state"}
	}
	return nil
}

// fitting finds the best held snapshot for a request: of the lineage that the asker holds
// if there is one, else the newest.
func fitting(v *View, r InfoRequest) *Held {
	lineage := r.Lineage
	if i := slices.IndexFunc(v.Held, func(h Held) bool { return h.ID == r.Held }); i >= 0 {
		lineage = v.Held[i].Meta.Lineage
	}
	var best *Held
	for i := range v.Held {
		h := &v.Held[i]
		switch {
		case h.ID.Index < r.MinIndex || h.ID.Term < r.MinTerm || h.ID.Term > r.Term,
			h.Meta.Group != r.Group, r.Needs != 0 && !h.Meta.Conf.Has(r.Needs):
		case best == nil,
			h.Meta.Lineage == lineage && best.Meta.Lineage != lineage,
			(h.Meta.Lineage == lineage) == (best.Meta.Lineage == lineage) && h.ID.Compare(best.ID) > 0:
			best = h
		}
	}
	return best
}
