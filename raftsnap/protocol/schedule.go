package protocol

import (
	"slices"
	"time"
)

// schedule is what a member remembers in order to decide when a snapshot is due, and who
// makes it (R5, R10).
type schedule struct {
	role       Role
	term       uint64
	recorded   uint64        // index
	recordedAt time.Duration // when that was first seen
	want       want
	lost       bool // the recorded snapshot is damaged

	// Leader: rounds.

	roundAt time.Duration // the last began
	retryAt time.Duration // no new one before, after failures
	fails   int           // of rounds, in a row
	empty   int           // of these in a row: nobody had or made anything
	failed  string        // what the last one found

	// Leader: announcements.

	spreadAt time.Duration // next
	holders  []uint64      // of the recorded one
	held     ID            // that they hold

	// The others: adoption and standing in.

	announce   *Announce // newest that is not adopted
	announceAt time.Duration
	tries      int

	since sinces
}

// sinces tells since when something has been so without a break.
type sinces struct {
	overdue, overCap, wanted stretch
}

type stretch struct {
	on    bool
	start time.Duration
}

// note begins, continues or ends the stretch.
func (s *stretch) note(now time.Duration, on bool) {
	if on && !s.on {
		s.start = now
	}
	s.on = on
}

// lasted reports whether the stretch has lasted for d.
func (s *stretch) lasted(now, d time.Duration) bool { return s.on && now-s.start >= d }

// want is a Wanted that is not satisfied: of several the highest index, which covers the
// others because memberships change one member at a time.
type want struct {
	on         bool
	min, needs uint64
	led        bool // it came while this member was the leader
}

// want coalesces what is wanted.
func (m *Machine) want(e Wanted) {
	w := &m.sched.want
	if !w.on || e.MinIndex > w.min || e.MinIndex == w.min && w.needs == 0 {
		*w = want{on: true, min: e.MinIndex, needs: e.Needs, led: m.v.Role == Leader}
	}
	m.dropWant()
}

// dropWant forgets what is satisfied, and whom there is no need for any more.
func (m *Machine) dropWant() {
	w, v := &m.sched.want, m.v
	if !w.on {
		return
	}
	if w.needs != 0 && !slices.ContainsFunc(v.Peers, func(p Peer) bool { return p.ID == w.needs }) {
		w.needs = 0
	}
	h := v.recordedHeld()
	has := w.needs == 0 || h != nil && h.Meta.Conf.Has(w.needs)
	if v.RecordedIndex >= w.min && has {
		*w = want{}
	}
}

// observe takes from the view what has changed since the last step.
func (m *Machine) observe() {
	s, v := &m.sched, m.v
	if !m.started {
		m.started = true
		s.recordedAt, s.roundAt, s.role, s.term = m.now, m.now-m.cfg.MinGap, v.Role, v.Term
		s.recorded, s.spreadAt = v.RecordedIndex, m.now
		s.lost = v.RecordedIndex > 0 && v.recordedHeld() == nil
	}
	if v.RecordedIndex != s.recorded {
		s.recorded, s.recordedAt = v.RecordedIndex, m.now
		s.fails, s.empty, s.retryAt, s.failed = 0, 0, m.now, ""
	}
	if v.Role != s.role || v.Term != s.term {
		if v.Role == Leader {
			s.retryAt, s.spreadAt, s.fails, s.empty = m.now, m.now, 0, 0
		}
		s.role, s.term = v.Role, v.Term
	}
	if s.lost && v.recordedHeld() != nil {
		s.lost = false
	}
	m.dropWant()
	follower := v.Role != Leader
	quiet := m.slot.stage == Idle && s.announce == nil && m.rescue.env == nil
	s.since.overdue.note(m.now, follower && quiet && m.due(2))
	s.since.wanted.note(m.now, follower && quiet && s.want.on)
	s.since.overCap.note(m.now, !follower && m.cfg.LogCap > 0 && v.LogBytes > m.cfg.LogCap)
	for id, until := range m.skip {
		if m.now >= until {
			delete(m.skip, id)
		}
	}
}

// due reports whether the recorded snapshot is older than times the thresholds.
func (m *Machine) due(times int64) bool {
	v := m.v
	if v.Applied <= v.RecordedIndex {
		return false
	}
	age := v.Applied - v.RecordedIndex
	// Division instead of multiplication: a threshold may be as high as never.
	return age/uint64(times) >= m.cfg.Entries ||
		m.cfg.Bytes > 0 && v.AppliedBytes/times >= m.cfg.Bytes ||
		m.cfg.Interval > 0 && (m.now-m.sched.recordedAt)/time.Duration(times) >= m.cfg.Interval
}

// needed gives the least index of a snapshot that the leader should get now, and whether
// that is urgent. A snapshot that is half way between the recorded one and applied is
// worth taking; what is older is not, since a newer one would soon be due again.
func (m *Machine) needed() (index uint64, urgent, ok bool) {
	v, w := m.v, m.sched.want
	switch {
	case w.on && w.needs != 0:
		return max(w.min, v.RecordedIndex+1), true, true
	case w.on:
		return w.min, true, true
	case m.sched.lost:
		return v.RecordedIndex, true, true
	case m.due(1):
		return v.RecordedIndex + (v.Applied-v.RecordedIndex+1)/2, false, true
	}
	return 0, false, false
}

// beginRound begins a take-over when one is needed and there is somebody to take from.
func (m *Machine) beginRound() {
	s, v := &m.sched, m.v
	index, urgent, ok := m.needed()
	if !ok || m.now < s.retryAt || !urgent && m.now < s.roundAt+m.cfg.MinGap || m.making() {
		return
	}
	var peers []uint64
	for _, p := range v.Peers {
		if p.Active && m.peers.healthy(m.now, p.ID) {
			peers = append(peers, p.ID)
		}
	}
	if len(peers) == 0 {
		return
	}
	s.roundAt = m.now
	m.take(TakeOver)
	m.openRound(round{min: index, minTerm: v.RecordedTerm, term: v.Term, needs: s.want.needs, queue: m.makers(index)}, peers)
}

// roundFailed lets the next round wait.
func (s *schedule) roundFailed(m *Machine, f Failure) {
	s.failed = f.Error()
	if f.Kind == FailCancelled {
		return
	}
	s.fails++
	s.retryAt, s.roundAt = m.now+m.cfg.backoff(s.fails, m.rng), m.now-m.cfg.MinGap
}

// fetched notes a take-over that ended well without a recording.
func (s *schedule) fetched(m *Machine) { s.fails, s.empty, s.retryAt, s.failed = 0, 0, m.now, "" }

// makers lists who may make a snapshot at or above the index, in the order of their turn:
// the maker of the recorded one while it is healthy, then voters, then learners, by id.
func (m *Machine) makers(index uint64) []uint64 {
	var voters, learners []uint64
	sticky := m.sticky()
	for _, p := range m.v.Peers {
		switch {
		case !p.Active || !m.peers.healthy(m.now, p.ID) || p.Match < min(index, m.v.Applied) || p.ID == sticky:
		case p.Voter:
			voters = append(voters, p.ID)
		default:
			learners = append(learners, p.ID)
		}
	}
	if m.able(sticky, index) {
		voters = append([]uint64{sticky}, voters...)
	}
	return append(voters, learners...)
}

// sticky gives the member that made the recorded snapshot, 0 if that is unknown or if the
// member has begun anew since.
func (m *Machine) sticky() uint64 {
	h := m.v.recordedHeld()
	if h == nil {
		return 0
	}
	l := h.Meta.Lineage
	for _, p := range m.v.Peers {
		if p.ID == l.Maker && (p.Incarnation == "" || l.Incarnation == "" || p.Incarnation == l.Incarnation) {
			return p.ID
		}
	}
	return 0
}

// able reports whether a member could make a snapshot at or above the index now.
func (m *Machine) able(id, index uint64) bool {
	return slices.ContainsFunc(m.v.Peers, func(p Peer) bool {
		return p.ID == id && p.Active && m.peers.healthy(m.now, id) && p.Match >= min(index, m.v.Applied)
	})
}

// alone reports whether no other member could make a snapshot, now or later: there is no
// other voter, and no learner that is able to.
func (m *Machine) alone(index uint64) bool {
	return !slices.ContainsFunc(m.v.Peers, func(p Peer) bool { return p.Voter || m.able(p.ID, index) })
}

// own says whether this member should make a snapshot without being asked to, at or above
// which index, and why.
func (m *Machine) own() (index uint64, why string) {
	if m.slot.purpose == Rescue && m.slot.stage != Idle || m.rescue.env != nil {
		return 0, ""
	}
	if m.v.Role == Leader {
		return m.ownAsLeader()
	}
	s, w := &m.sched, m.sched.want
	patience := m.cfg.StandIn + time.Duration(m.rank())*m.cfg.StandIn/2
	switch {
	case m.now < m.maker.madeAt+m.cfg.MinGap && m.maker.madeOnce && !w.on:
		return 0, ""
	case w.on && (!w.led || s.since.wanted.lasted(m.now, patience)):
		return max(w.min, m.v.RecordedIndex+1), "wanted"
	case s.since.overdue.lasted(m.now, patience):
		return m.v.RecordedIndex + 1, "nobody serves a newer one"
	}
	return 0, ""
}

// ownAsLeader names the exceptions to the rule that a leader makes no snapshots (R5).
func (m *Machine) ownAsLeader() (index uint64, why string) {
	s, v := &m.sched, m.v
	index, urgent, ok := m.needed()
	if !ok || m.slot.stage != Idle {
		return 0, ""
	}
	overCap := m.cfg.LogCap > 0 && v.LogBytes > m.cfg.LogCap
	gap := m.now < m.maker.madeAt+m.cfg.MinGap && m.maker.madeOnce
	switch {
	case m.alone(index) && urgent:
		return index, "wanted, and nobody else is able to"
	case m.alone(index) && !gap && (m.cfg.Single == SingleLocal || m.cfg.Single == SingleLogCap && overCap):
		return index, "alone"
	case !m.alone(index) && urgent && s.empty >= m.cfg.Attempts:
		return index, "wanted, and nobody has given one"
	case !m.alone(index) && s.since.overCap.lasted(m.now, m.cfg.LogCapWait) && m.now-s.recordedAt >= m.cfg.LogCapWait:
		return index, "the log is over its cap and nobody has given one"
	}
	return 0, ""
}

// rank is the place of this member among those that stand in: voters by id without the
// leader, then learners.
func (m *Machine) rank() int {
	v := m.v
	n := 0
	for _, p := range v.Peers {
		switch {
		case p.ID == v.Leader:
		case p.Voter && (p.ID < v.Self || v.Role == Learner), !p.Voter && v.Role == Learner && p.ID < v.Self:
			n++
		}
	}
	return n
}

// announced takes an announcement of the leader in. Of several the newest is kept.
func (m *Machine) announced(a Announce) {
	s, v := &m.sched, m.v
	recorded := ID{Term: v.RecordedTerm, Index: v.RecordedIndex}
	switch {
	case a.Group != v.Group:
		m.refuse(a.From, Refusal{Kind: OtherGroup, Text: a.Group})
	case a.Term < v.Term || v.Role == Leader && a.Term == v.Term:
		m.refuse(a.From, Refusal{Kind: StaleTerm, Leader: v.Leader, Term: v.Term})
	case a.ID.Contradicts(recorded):
		m.refuse(a.From, Refusal{Kind: Forked, Text: a.ID.Short()})
		m.alarm("forked: announced snapshot %s of %s contradicts the recorded one at %d, term %d",
			a.ID.Short(), v.nameOf(a.From), recorded.Index, recorded.Term)
	case !m.adoptable(a.ID) || s.announce != nil && s.announce.ID.Index > a.ID.Index:
	case s.announce != nil && s.announce.ID == a.ID:
		s.announce.Holders = a.Holders
	default:
		s.announce, s.announceAt, s.tries = &a, m.now, 0
	}
}

// adoptable reports whether an announced snapshot is worth fetching.
func (m *Machine) adoptable(id ID) bool {
	held := slices.ContainsFunc(m.v.Held, func(h Held) bool { return h.ID == id })
	return !held && m.useful(id) && m.now >= m.skip[id] &&
		!(m.slot.id == id && m.slot.stage != Idle)
}

// beginAdopt fetches what was announced.
func (m *Machine) beginAdopt() {
	s := &m.sched
	a := s.announce
	if a == nil || m.now < s.announceAt {
		return
	}
	if !m.adoptable(a.ID) {
		s.announce = nil
		return
	}
	sources := append([]uint64{a.From}, a.Holders...)
	slices.Sort(sources)
	sources = slices.DeleteFunc(slices.Compact(sources), func(id uint64) bool { return id == m.v.Self || id == 0 })
	if healthy := slices.DeleteFunc(slices.Clone(sources), func(id uint64) bool { return !m.peers.healthy(m.now, id) }); len(healthy) > 0 {
		sources = healthy
	}
	var others []uint64
	for _, p := range m.v.Peers {
		if p.Active && !slices.Contains(sources, p.ID) {
			others = append(others, p.ID)
		}
	}
	m.take(Adopt)
	m.fetch(a.ID, a.Lineage, sources, others)
}

// adoptFailed tries an announced snapshot again later, some times.
func (m *Machine) adoptFailed(id ID, f Failure) {
	s := &m.sched
	if s.announce == nil || s.announce.ID != id || f.Kind == FailCancelled {
		return
	}
	s.tries++
	s.announceAt = m.now + m.cfg.backoff(s.tries, m.rng)
	if f.Kind == FailGone || s.tries >= m.cfg.Attempts {
		s.announce = nil
	}
}

// forgetAnnounce drops an announcement that has been followed.
func (m *Machine) forgetAnnounce(id ID) {
	if a := m.sched.announce; a != nil && a.ID.Index <= id.Index {
		m.sched.announce = nil
	}
}

// recorded is what follows a successful recording: the leader lets everybody know.
func (m *Machine) recorded(id ID, l Lineage, holders []uint64) {
	m.forgetAnnounce(id)
	m.sched.fetched(m)
	slices.Sort(holders)
	m.sched.held, m.sched.holders = id, slices.Compact(holders)
	if m.v.Role == Leader {
		m.spread(id, l)
	}
}

// spread announces a recorded snapshot to all other members.
func (m *Machine) spread(id ID, l Lineage) {
	s, v := &m.sched, m.v
	s.spreadAt = m.now + m.cfg.SpreadInterval
	holders := s.holders
	if s.held != id {
		holders = []uint64{v.Self}
	}
	for _, p := range v.Peers {
		m.emit(Spread{Peer: p.ID, Announce: Announce{
			Group: v.Group, From: v.Self, Term: v.Term, ID: id, Lineage: l, Holders: slices.Clone(holders),
		}})
	}
}

// spreadAgain announces the recorded snapshot from time to time, and when this member has
// just become the leader: an announcement may be lost, and members may have come up since.
func (m *Machine) spreadAgain() {
	if m.v.Role != Leader || m.now < m.sched.spreadAt {
		return
	}
	m.sched.spreadAt = m.now + m.cfg.SpreadInterval
	if h := m.v.recordedHeld(); h != nil {
		m.spread(h.ID, h.Meta.Lineage)
	}
}

// Holders lists the members that are known to hold the snapshot, for the hints of a
// MsgSnap: those that it was taken from, and this one.
func (m *Machine) Holders(id ID) []uint64 {
	if m.sched.held != id {
		return nil
	}
	return slices.Clone(m.sched.holders)
}
