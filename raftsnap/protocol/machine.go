package protocol

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Machine is the snapshot protocol of one member. It has one slot, in which at most one
// snapshot at a time is asked for, fetched, parked, recorded or handed to Raft, and beside
// it the making of own snapshots, which another member may need at any time.
//
// It hides who makes a snapshot and who takes it over, in which order sources are tried,
// and what each failure leads to. A Machine is used from one goroutine; Answer, Why,
// Status and Holders only read it.
type Machine struct {
	cfg      Config
	instance string
	rng      *rand.Rand
	seq      uint64 // of the last transfer id
	started  bool
	closed   bool

	now time.Duration // of the step in progress
	v   *View         // of the step in progress, nil between steps
	out []Effect      // of the step in progress

	slot    slot
	maker   maker
	rescue  rescue
	sched   schedule
	peers   scores
	skip    map[ID]time.Duration // held or offered snapshots that are of no use until then
	alarmed map[string]time.Duration
}

// New makes the Machine of a member. The instance tells this run of the member from all
// others; it becomes part of transfer ids.
func New(cfg Config, instance string) *Machine {
	cfg = cfg.withDefaults()
	m := &Machine{
		cfg: cfg, instance: instance,
		rng:     rand.New(rand.NewPCG(cfg.Seed, 0x736e6170)),
		skip:    map[ID]time.Duration{},
		alarmed: map[string]time.Duration{},
	}
	m.peers = scores{cfg: &m.cfg, rng: m.rng, of: map[uint64]*score{}}
	return m
}

// Step handles one event and returns what is to be done, in order. The time counts from
// any fixed moment; time that runs backwards is taken as standing still. Everything goes
// on by Tick alone, also in a group where nothing is proposed.
func (m *Machine) Step(now time.Duration, v *View, e Event) []Effect {
	if m.closed {
		return nil
	}
	m.now, m.v, m.out = max(m.now, now), v, nil
	m.observe()
	m.handle(e)
	if !m.closed {
		m.advance()
	}
	m.v = nil
	return m.out
}

// handle takes one event in. What follows from it beyond its own end is advance's.
func (m *Machine) handle(e Event) {
	switch e := e.(type) {
	case Tick:
	case Wanted:
		m.want(e)
	case InstallAsked:
		m.installAsked(e.Envelope)
	case Announced:
		m.announced(e.Announce)
	case Asked:
		m.askedFor(e.Request)
	case InfoCame:
		m.infoCame(e.Answer)
	case InfoFailed:
		m.infoFailed(e)
	case FetchMoved:
		m.fetchMoved(e)
	case FetchDone:
		m.fetchDone(e)
	case FetchEnded:
		m.fetchEnded(e)
	case RecordDone:
		m.recordDone(e)
	case HandDone:
		m.handDone(e)
	case Made:
		m.made(e.Held)
	case MakeFailed:
		m.makeFailed(e.Failure)
	case Damaged:
		m.damaged(e.ID)
	case Close:
		m.close()
	}
}

// advance does what time and the view allow, whatever the event was: that is why nothing
// waits for another entry in a quiet group. The order is the priority: an install pushes
// the rest aside, then what is in the slot goes on, then something new may begin.
func (m *Machine) advance() {
	m.tendRescue()
	m.tendSlot()
	m.tendMaker()
	if m.slot.stage == Idle {
		m.begin()
	}
	m.tellProgress()
	m.spreadAgain()
}

// begin puts something into the free slot, the most urgent that there is.
func (m *Machine) begin() {
	switch {
	case m.rescue.env != nil:
		m.beginRescue()
	case m.beginHeld():
	case m.v.Role == Leader:
		m.beginRound()
	default:
		m.beginAdopt()
	}
}

// close ends everything at once. Staging is kept for the next run of the member.
func (m *Machine) close() {
	m.closed = true
	if m.slot.stage == Fetching && m.slot.cancel == nil {
		m.emit(CancelFetch{Transfer: m.slot.transfer, Why: Failure{Kind: FailCancelled, Text: "the member is closing"}})
	}
	if m.slot.stage != Idle {
		m.free(true)
	}
	if m.maker.stage == makerRecording {
		m.freed(m.maker.transfer, true)
	}
	m.maker = maker{}
	m.rescue = rescue{}
}

// damaged takes note that a held snapshot is of no use any more, and sees to another one
// if it was the recorded one.
func (m *Machine) damaged(id ID) {
	v := m.v
	if id.Index == v.RecordedIndex && id.Term == v.RecordedTerm {
		m.sched.lost = true
	}
	if m.slot.id == id && m.slot.stage == Parked {
		m.free(false)
	}
}

// emit adds an effect to those of the step.
func (m *Machine) emit(e Effect) { m.out = append(m.out, e) }

// alarm tells people of something, at most once a minute in the same words.
func (m *Machine) alarm(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if last, ok := m.alarmed[text]; ok && m.now-last < time.Minute {
		return
	}
	if len(m.alarmed) > 100 {
		clear(m.alarmed)
	}
	m.alarmed[text] = m.now
	m.emit(Alarm{Text: text})
}

// newTransfer gives a transfer id that no other transfer has had.
func (m *Machine) newTransfer() TransferID {
	m.seq++
	return TransferID(fmt.Sprintf("%s-%d", m.instance, m.seq))
}

// freed is the finaliser of every transfer, of the slot and of a making: nothing else
// emits Freed.
func (m *Machine) freed(t TransferID, keep bool) { m.emit(Freed{Transfer: t, Keep: keep}) }
