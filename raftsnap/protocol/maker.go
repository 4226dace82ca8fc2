package protocol

import "time"

// maker is the making of own snapshots. It goes on beside the slot: a member may be asked
// to make one while it receives another.
type maker struct {
	stage    makerStage
	since    time.Duration // of the stage
	min      uint64        // least index of what is being made
	again    uint64        // least index of what is to be made after that, 0 for nothing
	own      bool          // not asked for by another member
	why      string        // it is made
	id       ID            // while recording
	transfer TransferID    // while recording
	late     bool          // the alarm was given

	madeOnce bool
	madeAt   time.Duration
	fails    int // in a row
	failed   string
	until    time.Duration // no new making before, after failures
}

type makerStage uint8

const (
	makerResting   makerStage = iota // "none", or "failed" while failed says why
	makerWaiting                     // "generating": for applied to reach min
	makerMaking                      // "generating"
	makerRecording                   // "ready": it is held, and is being made known to Raft
)

// String returns the word for the stage.
func (s makerStage) String() string {
	return [...]string{"none", "waiting", "generating", "recording"}[s]
}

// owns reports whether a held snapshot is, or may be, what the maker is about to record.
func (k *maker) owns(h Held, v *View) bool {
	return k.stage == makerRecording && k.id == h.ID || k.stage == makerMaking && h.Meta.Lineage == v.Lineage
}

// making reports whether a making is under way that is not late.
func (m *Machine) making() bool {
	k := &m.maker
	return k.stage != makerResting && m.now-k.since < m.cfg.MakeDeadline
}

// askedFor takes another member's request in: it may begin a making, and what is refused
// is counted. Answer tells the asker.
func (m *Machine) askedFor(r InfoRequest) {
	a := m.Answer(m.v, r)
	if a.Refusal != nil && a.Refusal.Kind != NothingNewer {
		m.refuse(r.From, *a.Refusal)
		return
	}
	if !r.Make || a.State == Ready || a.State == Failed {
		return
	}
	index := r.MinIndex
	if h := m.v.newestHeld(); r.Needs != 0 && h.ID.Index >= index && !h.Meta.Conf.Has(r.Needs) {
		// Another one at this index would have the same membership.
		index = h.ID.Index + 1
	}
	m.make(index, false, "asked for")
}

// make begins a making, or has the one under way followed by another if it may turn out
// too old.
func (m *Machine) make(index uint64, own bool, why string) {
	k := &m.maker
	switch k.stage {
	case makerResting:
		k.stage, k.since, k.min, k.own, k.why, k.late = makerWaiting, m.now, index, own, why, false
		k.failed = ""
	case makerWaiting:
		k.min = max(k.min, index)
	default:
		if index > k.min {
			k.again = max(k.again, index)
		}
	}
}

// tendMaker begins what is to be made and watches what is being made.
func (m *Machine) tendMaker() {
	k := &m.maker
	if k.stage == makerResting && m.now >= k.until {
		if index, why := m.own(); why != "" {
			m.make(index, true, why)
		}
	}
	switch k.stage {
	case makerWaiting:
		m.tendWaiting()
	case makerMaking, makerRecording:
		if !k.late && m.now-k.since >= m.cfg.InstallDeadline {
			k.late = true
			m.alarm("%s an own snapshot takes longer than %s", k.stage, m.cfg.InstallDeadline)
		}
	}
}

// tendWaiting makes the snapshot once applied has come far enough. A member that leads by
// now leaves it to the others, and one that is to install another state has none to show.
func (m *Machine) tendWaiting() {
	k, v := &m.maker, m.v
	switch {
	case v.Role == Leader && !m.stillOwn():
		k.stage, k.again = makerResting, 0
	case m.now-k.since >= m.cfg.ApplyDeadline && v.Applied < k.min:
		m.restMaker("applied did not come far enough in time")
	case m.rescue.env != nil || v.Applied < k.min:
	default:
		k.stage, k.since = makerMaking, m.now
		m.emit(Make{MinIndex: k.min})
	}
}

// stillOwn reports whether a making that waits is one that a leader may go on with.
func (m *Machine) stillOwn() bool {
	_, why := m.own()
	return m.maker.own && why != ""
}

// restMaker ends a making without a snapshot.
func (m *Machine) restMaker(failed string) {
	k := &m.maker
	k.stage, k.again = makerResting, 0
	k.fails++
	k.failed, k.until = failed, m.now+m.cfg.backoff(k.fails, m.rng)
}

// made records what was made, if it is still of use.
func (m *Machine) made(h Held) {
	k, v := &m.maker, m.v
	if k.stage != makerMaking {
		return
	}
	k.fails, k.failed, k.madeOnce, k.madeAt = 0, "", true, m.now
	if h.ID.Index <= v.RecordedIndex || h.ID.Index > v.Applied {
		m.endMaking(h.ID.Index)
		return
	}
	k.stage, k.since, k.late = makerRecording, m.now, false
	k.id, k.transfer = h.ID, m.newTransfer()
	m.emit(Record{Transfer: k.transfer, Purpose: m.ordinary(), ID: h.ID, Source: v.Self})
}

// makingRecorded ends the recording of an own snapshot.
func (m *Machine) makingRecorded(e RecordDone) {
	k, v := &m.maker, m.v
	if e.Refusal == nil && e.Err == "" {
		m.recorded(k.id, v.Lineage, []uint64{v.Self})
	} else {
		m.recordFailed(k.id, v.Self, e)
	}
	m.freed(k.transfer, false)
	m.endMaking(k.id.Index)
}

// endMaking rests, or goes on with what was asked for in the meantime.
func (m *Machine) endMaking(index uint64) {
	k := &m.maker
	again := k.again
	k.stage, k.again, k.id, k.transfer = makerResting, 0, ID{}, ""
	if again > index {
		m.make(again, false, "asked for meanwhile")
	}
}

// makeFailed ends a making that went wrong.
func (m *Machine) makeFailed(f Failure) {
	k := &m.maker
	if k.stage != makerMaking {
		return
	}
	m.restMaker(f.Error())
	if f.Kind == FailNoSpace {
		m.refuse(0, Refusal{Kind: NoSpace, Text: f.Text})
	}
	if k.fails >= m.cfg.Attempts {
		m.alarm("making a snapshot has failed %d times in a row: %s", k.fails, f.Error())
	}
}
