package raftnode

import (
	"slices"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// view is what the machine sees.
func (n *simNode) view() *protocol.View {
	v := n.member.view(n.applier.applied.Load(), n.lineage(), n.active)
	v.Held = n.held()
	return &v
}

func (n *simNode) held() (all []protocol.Held) {
	for _, id := range n.heldIDs() {
		all = append(all, n.store[id].held)
	}
	return all
}

// step gives the machine an event and does what it says, as raftsnap.Manager does.
func (n *simNode) step(e protocol.Event) {
	if !n.up {
		return
	}
	for _, f := range n.machine.Step(n.s.now, n.view(), e) {
		n.do(f)
	}
	n.pump()
}

func (n *simNode) do(f protocol.Effect) {
	s := n.s
	switch f := f.(type) {
	case protocol.Ask:
		n.ask(f)
	case protocol.Fetch:
		n.fetch(f)
	case protocol.CancelFetch:
		if fetch := n.fetches[f.Transfer]; fetch != nil {
			n.later(s.between(0, 50*time.Millisecond), func() { fetch.end(protocol.FailCancelled, 0) })
		}
	case protocol.Record:
		n.open[f.Transfer] = true
		n.later(s.between(0, 20*time.Millisecond), func() { n.record(f) })
	case protocol.Hand:
		n.open[f.Transfer] = true
		n.later(s.between(0, 20*time.Millisecond), func() { n.hand(f) })
	case protocol.Tell:
		n.tell(f.Outcome)
	case protocol.Spread:
		s.deliver(n.id, f.Peer, func(to *simNode) { to.step(protocol.Announced{Announce: f.Announce}) })
	case protocol.Make:
		n.make()
	case protocol.Quarantine:
		s.logf("%s quarantines %d: %s", n.name, f.ID.Index, f.Text)
		delete(n.store, f.ID)
	case protocol.Freed:
		delete(n.open, f.Transfer)
	case protocol.Alarm:
		s.logf("%s: alarm: %s", n.name, f.Text)
	}
}

func (n *simNode) ask(f protocol.Ask) {
	n.s.call(n, f.Peer, func(to *simNode) func() {
		to.step(protocol.Asked{Request: f.Request})
		answer := protocol.Answer{Transfer: f.Request.Transfer, From: to.id, Refusal: &protocol.Refusal{Kind: protocol.Closed}}
		if to.up {
			answer = to.machine.Answer(to.view(), f.Request)
		}
		return func() { n.step(protocol.InfoCame{Answer: answer}) }
	}, func() {
		n.step(protocol.InfoFailed{Transfer: f.Request.Transfer, Peer: f.Peer, Text: "no answer"})
	})
}

func (n *simNode) tell(o protocol.Outcome) {
	n.s.deliver(n.id, o.To, func(to *simNode) {
		to.member.outcome(o)
		to.pump()
	})
}

// record is Manager.record over host.Record.
func (n *simNode) record(f protocol.Record) {
	snap := n.store[f.ID]
	if snap == nil {
		n.step(protocol.RecordDone{Transfer: f.Transfer, Err: "it is gone"})
		return
	}
	refusal, err := n.member.record(f.ID, snap.held.Meta, n.applier.applied.Load())
	if err != nil {
		n.check(err)
		return
	}
	if refusal == nil {
		what := map[bool]string{true: "taken over", false: "adopted"}[n.member.role == protocol.Leader]
		if f.Source == n.id {
			what = "recorded own"
		}
		n.s.counts[what]++
		n.s.logf("%s: %s snapshot %d of %d; log begins at %d", n.name, what, f.ID.Index, f.Source, n.member.firstIndex())
		if got := fromConfState(n.log.Recorded().GetConfState()); !cmp.Equal(got, snap.held.Meta.Conf, cmpopts.EquateEmpty()) {
			n.s.fail("%s recorded %d with another configuration than its manifest has:\n%s",
				n.name, f.ID.Index, cmp.Diff(snap.held.Meta.Conf, got))
		}
		n.retire()
	}
	n.step(protocol.RecordDone{Transfer: f.Transfer, Refusal: refusal})
}

// retire keeps the two newest snapshots and the recorded one (R9).
func (n *simNode) retire() {
	ids := n.heldIDs()
	for _, id := range ids[:max(0, len(ids)-2)] {
		if id.Index != n.member.recorded.Index {
			delete(n.store, id)
		}
	}
	n.checkCut()
}

// checkCut holds I11: the log begins at most one above the newest record, which was
// durable when it was recorded.
func (n *simNode) checkCut() {
	rec := n.log.Recorded()
	if first := n.member.firstIndex(); first > rec.GetIndex()+1 {
		n.s.fail("%s: the log begins at %d, the newest record is %d", n.name, first, rec.GetIndex())
	}
}

// hand is Manager.hand over host.Install.
func (n *simNode) hand(f protocol.Hand) {
	snap := n.store[f.ID]
	outcome := protocol.Outcome{Group: "g", From: n.id, To: f.Envelope.From, Term: f.Envelope.Term, Transfer: f.Transfer, Kind: protocol.InstallFailed, Index: f.Envelope.SnapIndex}
	if snap == nil || snap.damaged { // the Manager verifies before it hands over
		delete(n.store, f.ID)
		n.step(protocol.HandDone{Transfer: f.Transfer, Outcome: outcome})
		return
	}
	run := n.run
	refusal, err := n.member.install(f.Envelope, f.ID, snap.held.Meta, f.ID.String(), func(err error) {
		if err != nil || n.run != run {
			return
		}
		n.s.counts["installed"]++
		n.s.logf("%s installed %d", n.name, f.ID.Index)
		outcome.Kind, outcome.Index = protocol.Installed, f.ID.Index
		n.retire()
		n.later(0, func() { n.step(protocol.HandDone{Transfer: f.Transfer, Outcome: outcome}) })
	})
	if err != nil {
		n.check(err)
		return
	}
	if refusal != nil {
		outcome.Refusal = refusal
		if refusal.Kind == protocol.NotNeeded {
			outcome.Kind = protocol.StepNotNeeded
		}
		n.later(0, func() { n.step(protocol.HandDone{Transfer: f.Transfer, Outcome: outcome}) })
	}
	n.pump()
}

// make is Manager.makeSnapshot over host.Freeze.
func (n *simNode) make() {
	s := n.s
	if n.member.role == protocol.Leader && s.calm && s.now > s.calmAt+20*time.Second {
		s.fail("%s leads and makes a snapshot although everybody is well", n.name)
	}
	s.copies++
	dir, digest := string(rune(s.copies)), snapshot.Sum([]byte{byte(n.id), byte(s.copies), byte(s.copies >> 8), byte(s.copies >> 16)})
	n.works = append(n.works, work{freeze: &freezeWork{dir: dir, done: func(meta protocol.Meta, err error) {
		state := n.sm.frozen[dir]
		n.later(s.between(10*time.Millisecond, time.Second), func() {
			if err != nil || n.full {
				n.step(protocol.MakeFailed{Failure: protocol.Failure{Kind: protocol.FailLocal, Text: "cannot"}})
				return
			}
			s.counts["made"]++
			id := protocol.ID{Term: meta.Term, Index: meta.Index, Digest: digest}
			snap := &simSnapshot{held: protocol.Held{ID: id, Meta: meta, Bytes: 1000}, state: state}
			n.store[id] = snap
			n.step(protocol.Made{Held: snap.held})
		})
	}}})
	n.pump()
}

// rot damages a snapshot at rest. The next one who reads it notices. One that was verified
// and is just about to be installed is not at rest: between the two are milliseconds, and a
// state machine that wants to know even of those checks what it copies.
func (n *simNode) rot() {
	ids := slices.DeleteFunc(n.heldIDs(), func(id protocol.ID) bool {
		return slices.ContainsFunc(n.works, func(w work) bool { return w.install != nil && w.install.dir == id.String() })
	})
	if len(ids) == 0 {
		return
	}
	id := ids[n.s.rng.IntN(len(ids))]
	n.s.logf("%s: snapshot %d rots", n.name, id.Index)
	n.store[id].damaged, n.rotten = true, true
	if n.up && n.s.chance(0.5) { // a scrub finds it
		delete(n.store, id)
		n.later(0, func() { n.step(protocol.Damaged{ID: id}) })
	}
}

// simFetch is a transfer at its receiver.
type simFetch struct {
	n       *simNode
	f       protocol.Fetch
	failed  map[uint64]bool
	bad     int
	stalled int
	over    bool
}

const simPieces = 6

func (n *simNode) fetch(f protocol.Fetch) {
	if len(n.fetches) > 0 {
		n.s.fail("%s has two transfers at once", n.name)
	}
	n.open[f.Transfer] = true
	fetch := &simFetch{n: n, f: f, failed: map[uint64]bool{}}
	n.fetches[f.Transfer] = fetch
	n.s.logf("%s fetches %d to %v from %v", n.name, f.Target.Index, f.Purpose, f.Sources)
	n.later(n.s.between(0, 100*time.Millisecond), fetch.move)
}

// move gets one piece.
func (x *simFetch) move() {
	n, s := x.n, x.n.s
	if x.over {
		return
	}
	if n.full {
		x.end(protocol.FailNoSpace, 0)
		return
	}
	source := x.source()
	switch {
	case source == nil && len(x.failed) >= len(x.f.Sources):
		x.end(protocol.FailGone, x.f.Sources[0])
		return
	case source == nil:
		if x.stalled++; x.stalled > 10 {
			x.end(protocol.FailUnreachable, x.f.Sources[0])
			return
		}
	case source.store[x.f.Target].damaged || !s.calm && s.chance(0.05): // the digest tells
		x.bad++
		if source.store[x.f.Target].damaged {
			x.failed[source.id] = true
			delete(source.store, x.f.Target)
			source.step(protocol.Damaged{ID: x.f.Target})
		}
	default:
		x.stalled = 0
		n.staging[x.f.Target]++
		if n.staging[x.f.Target] >= simPieces {
			x.done(source)
			return
		}
		n.step(protocol.FetchMoved{Transfer: x.f.Transfer, Bytes: int64(n.staging[x.f.Target])})
	}
	if n.up {
		n.later(s.between(10*time.Millisecond, 200*time.Millisecond), x.move)
	}
}

// source picks one that answers and holds the target.
func (x *simFetch) source() *simNode {
	s := x.n.s
	var able []*simNode
	for _, id := range x.f.Sources {
		from := s.node(id)
		if from == nil || from == x.n || from.up && from.store[x.f.Target] == nil {
			x.failed[id] = true
			continue
		}
		if !x.failed[id] && s.reachable(x.n.id, id) && s.reachable(id, x.n.id) {
			able = append(able, from)
		}
	}
	if len(able) == 0 {
		return nil
	}
	return able[s.rng.IntN(len(able))]
}

func (x *simFetch) done(source *simNode) {
	x.over = true
	n := x.n
	delete(n.fetches, x.f.Transfer)
	delete(n.staging, x.f.Target)
	mine := *source.store[x.f.Target]
	n.store[x.f.Target] = &mine
	n.step(protocol.FetchDone{Transfer: x.f.Transfer, Held: mine.held})
}

func (x *simFetch) end(kind protocol.FailureKind, peer uint64) {
	if x.over {
		return
	}
	x.over = true
	delete(x.n.fetches, x.f.Transfer)
	x.n.step(protocol.FetchEnded{Transfer: x.f.Transfer, Failure: protocol.Failure{Kind: kind, Peer: peer, Text: "simulated"}})
}
