package protocol

import (
	"fmt"
	"strings"
	"time"
)

// Status is what a Machine is doing, for display.
type Status struct {
	Stage    Stage
	Purpose  Purpose       // while not Idle
	Since    time.Duration // of the stage
	Transfer TransferID
	ID       ID // from Fetching on
	Sources  []uint64
	Bytes    int64 // moved so far
	Making   string
	Install  bool // an install is under way or waits for its next try
}

// Status tells what is going on.
func (m *Machine) Status() Status {
	s := &m.slot
	return Status{
		Stage: s.stage, Purpose: s.purpose, Since: s.since, Transfer: s.transfer,
		ID: s.id, Sources: s.sources, Bytes: s.bytes,
		Making: m.maker.stage.String(), Install: m.rescue.env != nil,
	}
}

// Why tells people why there is no newer snapshot than the recorded one, in words that
// name who and what it waits for.
func (m *Machine) Why(now time.Duration, v *View) string {
	parts := []string{m.whyState(now, v)}
	switch m.maker.stage {
	case makerWaiting:
		parts = append(parts, fmt.Sprintf("making one waits for entry %d, applied is %d", m.maker.min, v.Applied))
	case makerMaking:
		parts = append(parts, fmt.Sprintf("making one since %s (%s)", ago(now, m.maker.since), m.maker.why))
	case makerRecording:
		parts = append(parts, "recording the own one at "+m.maker.id.Short())
	case makerResting:
		if m.maker.failed != "" {
			parts = append(parts, "the last making failed: "+m.maker.failed)
		}
	}
	return strings.Join(parts, "; ")
}

// whyState puts the slot into words.
func (m *Machine) whyState(now time.Duration, v *View) string {
	s := &m.slot
	doing := func(text string) string { return fmt.Sprintf("%s: %s since %s", s.purpose, text, ago(now, s.since)) }
	switch {
	case m.closed:
		return "closed"
	case s.stage == Asking:
		return doing(fmt.Sprintf("asking for one at or above %d (%s)", s.round.min, s.round.summary(v)))
	case s.stage == Fetching && s.cancel != nil:
		return doing(fmt.Sprintf("fetch of %s is being cancelled (%s)", s.id.Short(), s.cancel.Text))
	case s.stage == Fetching:
		return doing(fmt.Sprintf("fetching %s from %s, %d bytes, the last %s ago", s.id.Short(), v.namesOf(s.sources), s.bytes, ago(now, s.moved)))
	case s.stage == Parked:
		return doing(fmt.Sprintf("%s is held but above applied %d", s.id.Short(), v.Applied))
	case s.stage == Recording:
		return doing("recording " + s.id.Short())
	case s.stage == Handing:
		return doing("raft installs " + s.id.Short())
	case m.rescue.env != nil:
		return fmt.Sprintf("install of %d waits for its next try in %s", m.rescue.env.SnapIndex, wait(now, m.rescue.at))
	case v.Role == Leader:
		return m.reading(now, v).whyLeader()
	}
	return m.reading(now, v).whyFollower()
}

// reading is a copy that looks at the given moment and view. It is for reading only, as
// it shares what the fields point to.
func (m *Machine) reading(now time.Duration, v *View) *Machine {
	c := *m
	c.v, c.now = v, max(now, m.now)
	return &c
}

// whyLeader tells what a leader with a free slot waits for.
func (m *Machine) whyLeader() string {
	now, v := m.now, m.v
	index, urgent, ok := m.needed()
	if !ok {
		return m.whyFresh()
	}
	need := fmt.Sprintf("one at or above %d is due", index)
	switch {
	case m.alone(index) && m.cfg.Single == SingleNever && !urgent:
		return need + ", but this member is alone and its policy is never"
	case m.alone(index) && m.cfg.Single == SingleLogCap && !urgent:
		return need + fmt.Sprintf(", but this member is alone and the log of %d bytes is not over its cap", v.LogBytes)
	case m.alone(index):
		return need + ", and nobody else is able to make it"
	case len(m.makers(index)) == 0:
		return need + ", but no healthy member could make it: " + m.whyNobody()
	case m.now < m.sched.retryAt:
		return need + fmt.Sprintf(", asking again in %s: %s", wait(now, m.sched.retryAt), m.sched.failed)
	}
	return need + ", asking soon"
}

// whyNobody says of each peer why it is no maker.
func (m *Machine) whyNobody() string {
	var parts []string
	for _, p := range m.v.Peers {
		name := m.v.nameOf(p.ID)
		switch sc := m.peers.of[p.ID]; {
		case !p.Active:
			parts = append(parts, name+" is not heard from")
		case sc != nil && m.now < sc.until:
			parts = append(parts, fmt.Sprintf("%s not before %s: %s", name, wait(m.now, sc.until), sc.why))
		default:
			parts = append(parts, fmt.Sprintf("%s has the log up to %d only", name, p.Match))
		}
	}
	if len(parts) == 0 {
		return "there is no other member"
	}
	return strings.Join(parts, ", ")
}

// whyFollower tells what a follower with a free slot waits for.
func (m *Machine) whyFollower() string {
	switch a := m.sched.announce; {
	case a != nil:
		return fmt.Sprintf("adopting %s again in %s", a.ID.Short(), wait(m.now, m.sched.announceAt))
	case !m.due(1) && !m.sched.want.on:
		return m.whyFresh()
	case m.v.Leader == 0:
		return "one is due, and there is no leader to announce it"
	}
	return fmt.Sprintf("one is due, and %s has announced none yet", m.v.nameOf(m.v.Leader))
}

// whyFresh tells when the next one will be due.
func (m *Machine) whyFresh() string {
	v := m.v
	age := v.Applied - min(v.RecordedIndex, v.Applied)
	return fmt.Sprintf("recorded is %d, %d entries ago; one is due after %d", v.RecordedIndex, age, m.cfg.Entries)
}

// nameOf is how people know a member.
func (v *View) nameOf(id uint64) string {
	if id == v.Self {
		return "this member"
	}
	for i := range v.Peers {
		if p := &v.Peers[i]; p.ID == id && p.Name != "" {
			return p.Name
		}
	}
	return fmt.Sprintf("member %d", id)
}

func (v *View) namesOf(ids []uint64) string {
	var names []string
	for _, id := range ids {
		names = append(names, v.nameOf(id))
	}
	return strings.Join(names, ", ")
}

func ago(now, then time.Duration) time.Duration { return max(now-then, 0).Round(time.Millisecond) }

func wait(now, then time.Duration) time.Duration { return max(then-now, 0).Round(time.Millisecond) }
