package protocol

import (
	"fmt"
	"slices"
	"time"
)

// rescue is the install that the leader asks for. One envelope is kept: the highest term,
// then the latest (R8).
type rescue struct {
	env      *Envelope
	transfer TransferID    // the last one that served it
	attempts int           // transfers of this envelope that failed
	fails    int           // in a row, over envelopes, for the back-off
	at       time.Duration // no new transfer before
	told     time.Duration // the leader, of progress
	bytes    int64         // that it was told of
}

// installAsked keeps the envelope, or says at once why not.
func (m *Machine) installAsked(e Envelope) {
	v, r := m.v, &m.rescue
	switch {
	case e.Term < v.Term || r.env != nil && e.Term < r.env.Term || v.Role == Leader:
		refusal := Refusal{Kind: StaleTerm, Leader: v.Leader, Term: v.Term}
		m.refuse(e.From, refusal)
		m.tell(e, Outcome{Kind: InstallFailed, Refusal: &refusal})
	case e.SnapIndex <= v.Commit:
		m.tell(e, Outcome{Kind: StepNotNeeded})
	default:
		r.env, r.attempts, r.told = &e, 0, m.now-m.cfg.ProgressInterval
	}
}

// tell sends an outcome to the leader of an envelope.
func (m *Machine) tell(e Envelope, o Outcome) {
	o.Group, o.From, o.To, o.Term = m.v.Group, m.v.Self, e.From, e.Term
	if o.Index == 0 || o.Kind != Installed {
		o.Index = e.SnapIndex
	}
	if o.Transfer == "" {
		o.Transfer = m.rescue.transfer
	}
	m.emit(Tell{Outcome: o})
}

// endRescue tells the outcome and forgets the envelope.
func (m *Machine) endRescue(o Outcome) {
	m.tell(*m.rescue.env, o)
	m.rescue.env = nil
}

// tendRescue drops an envelope that has become needless, and makes room for one that has
// not: an install goes before everything else that is received.
func (m *Machine) tendRescue() {
	e := m.rescue.env
	if e == nil || m.slot.stage == Handing {
		return
	}
	switch {
	case m.v.Role == Leader:
		m.endRescue(Outcome{Kind: InstallFailed, Refusal: &Refusal{Kind: StaleTerm, Leader: m.v.Self, Term: m.v.Term}})
		m.demoteRescue()
	case e.SnapIndex <= m.v.Commit:
		m.endRescue(Outcome{Kind: StepNotNeeded, Reason: "the log has come this far by itself"})
		m.demoteRescue()
	case m.slot.purpose == Rescue && m.slot.stage == Fetching && m.slot.id.Index+1 < e.First:
		m.cancelFetch(Failure{Kind: FailGone, Text: "the leader's log begins above it by now"})
	case m.slot.purpose != Rescue && m.now >= m.rescue.at:
		m.makeRoom()
	}
}

// demoteRescue goes on with the transfer of an install that is not needed any more as
// with any other snapshot, unless it has only asked so far.
func (m *Machine) demoteRescue() {
	if m.slot.purpose != Rescue {
		return
	}
	if m.slot.stage == Asking {
		m.free(true)
		return
	}
	m.slot.purpose = m.ordinary()
}

// makeRoom pushes an ordinary transfer aside. A recording is soon over and not disturbed.
func (m *Machine) makeRoom() {
	switch m.slot.stage {
	case Asking:
		m.free(true)
	case Parked:
		m.free(false)
	case Fetching:
		m.cancelFetch(Failure{Kind: FailCancelled, Text: "an install goes first"})
	}
}

// beginRescue hands over what is held already, or asks everybody for what would do.
func (m *Machine) beginRescue() {
	e, v := m.rescue.env, m.v
	if m.now < m.rescue.at {
		return
	}
	if e.Term < v.Term {
		// R8.3: what was fetched for it is kept; the new leader's MsgSnap will find it.
		m.endRescue(Outcome{Kind: InstallFailed, Refusal: &Refusal{Kind: StaleTerm, Leader: v.Leader, Term: v.Term}})
		return
	}
	for _, h := range slices.Backward(v.Held) {
		if h.ID.Index >= e.SnapIndex && m.unfit(h, e) == "" {
			m.take(Rescue)
			m.hand(h)
			return
		}
	}
	peers := m.rescuers(e)
	if len(peers) == 0 {
		return
	}
	m.take(Rescue)
	m.rescue.transfer = m.slot.transfer
	m.openRound(round{
		min: max(e.SnapIndex, e.First-min(e.First, 1), v.Commit+1), minTerm: e.SnapTerm,
		term: e.Term, needs: v.Self,
	}, peers)
}

// rescuers lists whom to ask: whoever is heard of, and whoever the envelope names, since
// a member that has just come up has heard of few.
func (m *Machine) rescuers(e *Envelope) []uint64 {
	ids := append([]uint64{e.From}, e.Holders...)
	for _, p := range m.v.Peers {
		if p.Active {
			ids = append(ids, p.ID)
		}
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	return slices.DeleteFunc(ids, func(id uint64) bool { return id == m.v.Self || id == 0 || !m.peers.healthy(m.now, id) })
}

// unfit says why a held snapshot would not do for an envelope, "" if it would (R8.2). The
// announced index is not among the reasons: what was fetched for an older envelope still
// does as long as the leader's log goes on from there.
func (m *Machine) unfit(h Held, e *Envelope) string {
	switch {
	case h.Meta.Group != m.v.Group:
		return "of another group"
	case h.ID.Term > e.Term:
		return "of a later term than the leader's"
	case h.ID.Index+1 < e.First:
		return "below the leader's log"
	case !h.Meta.Conf.Has(m.v.Self):
		return "of a membership without this member"
	case h.ID.Index <= m.v.Commit:
		return "not above the own commit"
	case m.now < m.skip[h.ID]:
		return "found to be of no use before"
	}
	return ""
}

// deliver goes on with a snapshot that was fetched for an install. It reports whether the
// slot is dealt with; if not, the snapshot is one like any other.
func (m *Machine) deliver(h Held) bool {
	e := m.rescue.env
	switch {
	case e == nil:
		return false
	case e.Term < m.v.Term:
		m.endRescue(Outcome{Kind: InstallFailed, Refusal: &Refusal{Kind: StaleTerm, Leader: m.v.Leader, Term: m.v.Term}})
		m.free(false)
	default:
		if why := m.unfit(h, e); why != "" {
			m.skip[h.ID] = m.now + m.cfg.BackoffMax
			m.free(false)
			m.rescueFailed(Failure{Kind: FailGone, Text: fmt.Sprintf("snapshot %s is %s", h.ID.Short(), why)})
			return true
		}
		m.hand(h)
	}
	return true
}

// hand gives the snapshot to Raft with the kept envelope.
func (m *Machine) hand(h Held) {
	s := &m.slot
	s.id, s.lineage, s.env = h.ID, h.Meta.Lineage, *m.rescue.env
	m.rescue.transfer = s.transfer
	m.enter(Handing)
	m.emit(Hand{Transfer: s.transfer, ID: h.ID, Envelope: s.env})
}

// handDone tells the leader what Raft made of the snapshot. A success that comes late is
// a success.
func (m *Machine) handDone(e HandDone) {
	s := &m.slot
	if s.stage != Handing || s.transfer != e.Transfer {
		return
	}
	r, env, o := &m.rescue, s.env, e.Outcome
	if o.Kind == Progress {
		return
	}
	o.Transfer = s.transfer
	if o.Kind == Installed && o.Index == 0 {
		o.Index = s.id.Index
	}
	m.tell(env, o)
	if r.env != nil && r.env.Term == env.Term && r.env.SnapIndex == env.SnapIndex {
		r.env = nil
	}
	m.free(false)
	if o.Kind != InstallFailed {
		r.fails, r.at = 0, m.now
		return
	}
	r.fails++
	r.at = m.now + m.cfg.backoff(r.fails, m.rng)
}

// rescueFailed lets the install wait or gives it up. A target that is gone is exchanged
// for another one at once; a full disk is for people.
func (m *Machine) rescueFailed(f Failure) {
	r := &m.rescue
	if r.env == nil || f.Kind == FailCancelled {
		return
	}
	r.attempts++
	if f.Kind != FailGone {
		r.fails++
		r.at = m.now + m.cfg.backoff(r.fails, m.rng)
	}
	if f.Kind != FailNoSpace && r.attempts < m.cfg.Attempts {
		return
	}
	r.at = max(r.at, m.now+m.cfg.backoff(r.fails, m.rng))
	o := Outcome{Kind: InstallFailed, Reason: f.Error()}
	if f.Kind == FailNoSpace {
		o.Refusal = &Refusal{Kind: NoSpace, Text: f.Text}
	}
	m.endRescue(o)
}

// tellProgress keeps the leader from giving up: while bytes move, and in the stages that
// move none and end by themselves.
func (m *Machine) tellProgress() {
	s, r := &m.slot, &m.rescue
	if r.env == nil || s.purpose != Rescue || s.stage == Idle || m.now-r.told < m.cfg.ProgressInterval {
		return
	}
	switch s.stage {
	case Fetching:
		if s.cancel != nil || s.bytes > 0 && s.bytes == r.bytes {
			return
		}
	case Handing:
		if s.late {
			return
		}
	}
	r.told, r.bytes = m.now, s.bytes
	m.tell(*r.env, Outcome{Kind: Progress, Bytes: s.bytes})
}
