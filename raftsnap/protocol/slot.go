package protocol

import (
	"slices"
	"time"
)

// Stage is what the slot of a Machine is occupied with.
type Stage uint8

// The stages of the slot. Recording and Handing are the only ones that wait for the own
// host alone; they have no deadline but an alarm, and a late success counts.
const (
	Idle      Stage = iota
	Asking          // others what they have, and one of them to make a snapshot
	Fetching        // moving one here
	Parked          // durable here, but above the own applied index
	Recording       // making it the one that Raft knows (R4)
	Handing         // giving it to Raft as an install (R8)
)

// String returns the word for the stage.
func (s Stage) String() string {
	return [...]string{"idle", "asking", "fetching", "parked", "recording", "handing"}[s]
}

// slot holds the one transfer in which this member is the receiver. It begins with take
// and ends with free, and nothing else sets its stage to or from Idle.
type slot struct {
	stage    Stage
	purpose  Purpose
	transfer TransferID
	since    time.Duration // of the stage

	round   round    // while Asking
	id      ID       // from Fetching on
	lineage Lineage  // of it, where known
	sources []uint64 // of it

	bytes     int64
	moved     time.Duration // last time that bytes grew
	cancel    *Failure      // why the fetch is being cancelled
	cancelled time.Duration // when

	env  Envelope // while Handing
	late bool     // the alarm of Recording or Handing was given
}

// take occupies the slot with a new transfer.
func (m *Machine) take(p Purpose) {
	m.slot = slot{purpose: p, transfer: m.newTransfer(), since: m.now}
}

// enter moves the transfer to its next stage.
func (m *Machine) enter(s Stage) { m.slot.stage, m.slot.since = s, m.now }

// free empties the slot. Every path on which a transfer ends goes through here.
func (m *Machine) free(keep bool) {
	m.freed(m.slot.transfer, keep)
	m.slot = slot{}
}

// tendSlot lets time and the view act on what is in the slot.
func (m *Machine) tendSlot() {
	switch m.slot.stage {
	case Asking:
		m.tendRound()
	case Fetching:
		m.tendFetch()
	case Parked:
		m.tendParked()
	case Recording, Handing:
		if !m.slot.late && m.now-m.slot.since >= m.cfg.InstallDeadline {
			m.slot.late = true
			m.alarm("%s snapshot %s takes longer than %s", m.slot.stage, m.slot.id.Short(), m.cfg.InstallDeadline)
		}
	}
}

// ordinary is the purpose of a snapshot that no install needs.
func (m *Machine) ordinary() Purpose {
	if m.v.Role == Leader {
		return TakeOver
	}
	return Adopt
}

// fetch begins to move the snapshot here.
func (m *Machine) fetch(id ID, lineage Lineage, sources, others []uint64) {
	s := &m.slot
	s.round = round{}
	s.id, s.lineage, s.sources = id, lineage, sources
	s.bytes, s.moved = 0, m.now
	m.enter(Fetching)
	m.emit(Fetch{Transfer: s.transfer, Purpose: s.purpose, Target: id, Sources: slices.Clone(sources), Others: others})
}

// fetching reports whether an event belongs to the fetch in the slot. What comes from any
// other transfer is late or strange, and changes nothing.
func (m *Machine) fetching(t TransferID) bool {
	return m.slot.stage == Fetching && m.slot.transfer == t
}

// cancelFetch ends the fetch early, for a reason that decides what follows.
func (m *Machine) cancelFetch(why Failure) {
	if m.slot.cancel != nil {
		return
	}
	m.slot.cancel, m.slot.cancelled = &why, m.now
	m.emit(CancelFetch{Transfer: m.slot.transfer, Why: why})
}

// tendFetch watches a fetch. Its clock is the bytes: they must begin, and go on, in time,
// but may take as long as they need.
func (m *Machine) tendFetch() {
	s := &m.slot
	quiet := m.now - s.moved
	switch {
	case s.cancel != nil:
		if m.now-s.cancelled >= m.cfg.CancelDeadline {
			m.fetchFailed(*s.cancel)
		}
	case s.purpose != Rescue && !m.useful(s.id):
		m.cancelFetch(Failure{Kind: FailCancelled, Text: "not needed any more"})
	case s.bytes == 0 && quiet >= m.cfg.StartDeadline:
		m.cancelFetch(Failure{Kind: FailIdle, Text: "no first byte within " + m.cfg.StartDeadline.String()})
	case s.bytes > 0 && quiet >= m.cfg.IdleDeadline:
		m.cancelFetch(Failure{Kind: FailIdle, Text: "no byte within " + m.cfg.IdleDeadline.String()})
	}
}

// useful reports whether a snapshot is worth recording, or worth having because the
// recorded one is damaged.
func (m *Machine) useful(id ID) bool {
	v := m.v
	if id.Index == v.RecordedIndex && id.Term == v.RecordedTerm {
		return m.recordedHeld() == nil
	}
	return id.Index > v.RecordedIndex
}

func (m *Machine) fetchMoved(e FetchMoved) {
	if m.fetching(e.Transfer) && e.Bytes > m.slot.bytes {
		m.slot.bytes, m.slot.moved = e.Bytes, m.now
	}
}

// fetchDone goes on with a durable snapshot. One that comes in spite of a cancellation is
// as good as any other.
func (m *Machine) fetchDone(e FetchDone) {
	if !m.fetching(e.Transfer) {
		return
	}
	s := &m.slot
	if e.Held.ID != s.id || e.Held.Meta.Group != m.v.Group {
		m.fetchFailed(Failure{Kind: FailCorrupt, Text: "another snapshot came than was asked for"})
		return
	}
	for _, peer := range s.sources {
		m.peers.good(peer)
	}
	s.cancel, s.lineage = nil, e.Held.Meta.Lineage
	if s.purpose == Rescue && m.deliver(e.Held) {
		return
	}
	s.purpose = m.ordinary()
	m.place()
}

// place decides what becomes of a durable snapshot that is not for an install (R4).
func (m *Machine) place() {
	s := &m.slot
	switch {
	case s.id.Index <= m.v.RecordedIndex:
		// The same snapshot as the recorded one was fetched because that was damaged.
		if s.id.Index == m.v.RecordedIndex {
			m.sched.lost = false
		} else {
			m.refuse(m.source(), Refusal{Kind: NotNeeded, Text: "older than what is recorded"})
		}
		m.sched.fetched(m)
		m.free(false)
	case s.id.Index > m.v.Applied:
		m.enter(Parked)
	default:
		m.record()
	}
}

// tendParked records a parked snapshot as soon as it can be, and lets go of the slot when
// that takes too long: the snapshot stays in the store and is recorded from there.
func (m *Machine) tendParked() {
	s := &m.slot
	switch {
	case s.id.Index <= m.v.RecordedIndex, s.id.Index <= m.v.Applied:
		m.place()
	case m.now-s.since >= m.cfg.ApplyDeadline:
		m.refuse(m.source(), Refusal{Kind: Ahead, Text: "applied did not reach it in time"})
		m.free(false)
	}
}

// record asks for the snapshot in the slot to be recorded.
func (m *Machine) record() {
	s := &m.slot
	m.enter(Recording)
	m.emit(Record{Transfer: s.transfer, Purpose: s.purpose, ID: s.id, Source: m.source()})
}

// source is the member that the snapshot in the slot counts as taken from: its maker if
// that was among the sources.
func (m *Machine) source() uint64 {
	s := &m.slot
	if len(s.sources) == 0 || slices.Contains(s.sources, s.lineage.Maker) {
		return s.lineage.Maker
	}
	return s.sources[0]
}

// fetchEnded goes on after a fetch without a snapshot.
func (m *Machine) fetchEnded(e FetchEnded) {
	if !m.fetching(e.Transfer) {
		return
	}
	if c := m.slot.cancel; c != nil && e.Failure.Kind == FailCancelled {
		m.fetchFailed(*c)
		return
	}
	m.fetchFailed(e.Failure)
}

// fetchFailed blames, frees the slot, and leaves to the purpose what follows.
func (m *Machine) fetchFailed(f Failure) {
	m.blame(f)
	purpose, id := m.slot.purpose, m.slot.id
	// A full disk is not made better by half a snapshot on it.
	m.free(f.Kind != FailNoSpace)
	switch purpose {
	case Rescue:
		m.rescueFailed(f)
	case TakeOver:
		m.sched.roundFailed(m, f)
	case Adopt:
		m.adoptFailed(id, f)
	}
}

// blame counts a failure against those who caused it.
func (m *Machine) blame(f Failure) {
	s := &m.slot
	switch f.Kind {
	case FailCancelled, FailGone:
	case FailNoSpace:
		m.refuse(0, Refusal{Kind: NoSpace, Text: f.Text})
		m.alarm("no space for snapshot %s", s.id.Short())
	case FailLocal:
		m.alarm("snapshot %s cannot be stored: %s", s.id.Short(), f.Text)
	default:
		blamed := []uint64{f.Peer}
		if f.Peer == 0 {
			blamed = s.sources
		}
		for _, peer := range blamed {
			m.peers.fail(m.now, peer, f.Error())
		}
	}
}

// recordDone ends the recording of the slot, or of an own making.
func (m *Machine) recordDone(e RecordDone) {
	s := &m.slot
	switch {
	case m.maker.stage == makerRecording && e.Transfer == m.maker.transfer:
		m.makingRecorded(e)
		return
	case s.stage != Recording || s.transfer != e.Transfer:
		return
	}
	if e.Refusal == nil && e.Err == "" {
		holders := append([]uint64{m.v.Self}, s.sources...)
		m.recorded(s.id, s.lineage, holders)
		m.free(false)
		return
	}
	if e.Refusal != nil && e.Refusal.Kind == Ahead {
		m.enter(Parked)
		return
	}
	m.recordFailed(s.id, m.source(), e)
	m.free(false)
}

// recordFailed deals with a snapshot that cannot be recorded, and keeps it from being
// tried again at once.
func (m *Machine) recordFailed(id ID, source uint64, e RecordDone) {
	m.skip[id] = m.now + m.cfg.BackoffMax
	switch {
	case e.Refusal == nil:
		m.alarm("snapshot %s cannot be recorded: %s", id.Short(), e.Err)
		return
	case e.Refusal.Kind == Forked:
		m.emit(Quarantine{ID: id, Text: "forked: " + e.Refusal.Text})
		m.alarm("forked: snapshot %s of %s contradicts the own log: %s", id.Short(), m.v.nameOf(source), e.Refusal.Text)
		if source != m.v.Self {
			m.peers.fail(m.now, source, "forked history")
		}
	}
	m.refuse(source, *e.Refusal)
}

// refuse counts a typed refusal.
func (m *Machine) refuse(peer uint64, r Refusal) { m.emit(Refused{Peer: peer, Refusal: r}) }

// beginHeld records the newest snapshot that lies in the store unrecorded: left over from
// a crash, from a parking that took too long, or from an install of a term that passed.
func (m *Machine) beginHeld() bool {
	v := m.v
	for _, h := range slices.Backward(v.Held) {
		if h.ID.Index <= v.RecordedIndex || h.ID.Index > v.Applied || h.Meta.Group != v.Group ||
			m.now < m.skip[h.ID] || h.ID == m.sched.held || m.maker.owns(h, v) {
			continue
		}
		m.take(m.ordinary())
		m.slot.id, m.slot.lineage = h.ID, h.Meta.Lineage
		m.record()
		return true
	}
	return false
}

// recordedHeld finds the recorded snapshot in the store, nil if it is not there.
func (m *Machine) recordedHeld() *Held { return m.v.recordedHeld() }

// recordedHeld finds the recorded snapshot among the held ones, nil if it is not there.
func (v *View) recordedHeld() *Held {
	for i := range v.Held {
		if h := &v.Held[i]; h.ID.Index == v.RecordedIndex && h.ID.Term == v.RecordedTerm {
			return h
		}
	}
	return nil
}

// newestHeld gives the newest held snapshot, the zero one if there is none.
func (v *View) newestHeld() Held {
	if len(v.Held) == 0 {
		return Held{}
	}
	return v.Held[len(v.Held)-1]
}
