package protocol

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// round is one survey of the others: who holds something that fits, and for a take-over
// who makes it. It ends with a choice, or with nothing to choose from.
type round struct {
	min, minTerm uint64 // what fits
	term         uint64 // of the asker, and the highest that fits
	needs        uint64
	asks         []ask // by peer

	queue   []uint64      // makers that have not been tried, in rank
	maker   uint64        // the last one that was asked to make, 0 for none
	makerAt time.Duration // when
	readyAt time.Duration // when the first fitting answer came
	ready   bool
}

// ask is what one peer has been asked and has said.
type ask struct {
	peer   uint64
	make   bool
	state  askState
	at     time.Duration // of the last Ask or of the answer to it
	answer Answer
	why    string // there is nothing
}

type askState uint8

const (
	askPending askState = iota
	askGenerating
	askReady
	askNothing
)

// openRound asks all peers at once; the first maker in the queue is asked to make.
func (m *Machine) openRound(r round, peers []uint64) {
	m.enter(Asking)
	r.asks = make([]ask, len(peers))
	for i, p := range peers {
		r.asks[i].peer = p
	}
	m.slot.round = r
	m.nextMaker()
	for i := range m.slot.round.asks {
		if a := &m.slot.round.asks[i]; a.peer != m.slot.round.maker {
			m.send(a)
		}
	}
}

// send asks a peer, for the first time or again. Only the maker is given time to answer;
// from the others it is enough to know what they hold.
func (m *Machine) send(a *ask) {
	r, held := &m.slot.round, m.v.newestHeld()
	req := InfoRequest{
		Group: m.v.Group, From: m.v.Self, Term: r.term, Transfer: m.slot.transfer,
		Held: held.ID, Lineage: held.Meta.Lineage,
		MinTerm: r.minTerm, MinIndex: r.min, Needs: r.needs, Make: a.make,
	}
	if a.make {
		req.Wait = m.cfg.InfoWait
	}
	a.state, a.at = askPending, m.now
	m.emit(Ask{Peer: a.peer, Request: req})
}

// nextMaker asks the next in rank to make a snapshot.
func (m *Machine) nextMaker() {
	r := &m.slot.round
	for len(r.queue) > 0 {
		next := r.queue[0]
		r.queue = r.queue[1:]
		if a := r.find(next); a != nil && a.state != askReady {
			r.maker, r.makerAt = next, m.now
			a.make = true
			m.send(a)
			return
		}
	}
}

func (r *round) find(peer uint64) *ask {
	for i := range r.asks {
		if r.asks[i].peer == peer {
			return &r.asks[i]
		}
	}
	return nil
}

// tendRound lets deadlines act, asks again, brings in the next maker, and ends the round
// when it has got what it can get.
func (m *Machine) tendRound() {
	r := &m.slot.round
	if m.slot.purpose == TakeOver && m.v.Role != Leader {
		m.free(true)
		return
	}
	for i := range r.asks {
		a := &r.asks[i]
		switch {
		case a.state == askPending && m.now-a.at >= m.cfg.InfoDeadline:
			m.noAnswer(a, "no answer within "+m.cfg.InfoDeadline.String())
		case a.state == askGenerating && m.now-a.at >= m.cfg.PollInterval:
			m.send(a)
		}
	}
	if a := r.find(r.maker); a != nil && (a.state == askNothing || m.makerLate()) {
		m.nextMaker()
	}
	switch {
	case r.ready && m.enough():
		m.choose()
	case !r.ready && !m.hopeful():
		m.endRound()
	}
}

// makerLate reports whether the maker has had its time.
func (m *Machine) makerLate() bool { return m.now-m.slot.round.makerAt >= m.cfg.MakeDeadline }

// hopeful reports whether an answer may still come that fits.
func (m *Machine) hopeful() bool {
	r := &m.slot.round
	generating := m.cfg.InfoDeadline
	if r.maker != 0 {
		generating = m.cfg.MakeDeadline
	}
	since := max(m.slot.since, r.makerAt)
	for i := range r.asks {
		switch r.asks[i].state {
		case askReady:
			return true
		case askPending, askGenerating:
			if m.now-since < generating {
				return true
			}
		}
	}
	return false
}

// enough reports whether it is time to choose: nobody is left whose answer could be
// better, or waiting for it is over. A snapshot of another lineage than the one held is
// next to worthless as a difference, so the maker of that lineage is given its time.
func (m *Machine) enough() bool {
	r := &m.slot.round
	waiting := false
	for i := range r.asks {
		a := &r.asks[i]
		waiting = waiting || a.state == askPending && !a.make
		generating := a.make && a.state <= askGenerating
		if generating && !m.makerLate() && m.sticky() == a.peer && !m.heldLineage(m.best().answer.Lineage) {
			return false
		}
	}
	return !waiting || m.now-r.readyAt >= m.cfg.SurveyWait
}

// heldLineage reports whether a snapshot of the lineage is held.
func (m *Machine) heldLineage(l Lineage) bool {
	return !l.IsZero() && slices.ContainsFunc(m.v.Held, func(h Held) bool { return h.Meta.Lineage == l })
}

// best gives the best of the ready answers: lineage that is held, then index, then the
// member that has failed least (R5).
func (m *Machine) best() *ask {
	var best *ask
	for i := range m.slot.round.asks {
		a := &m.slot.round.asks[i]
		if a.state == askReady && (best == nil || m.better(a, best)) {
			best = a
		}
	}
	return best
}

func (m *Machine) better(a, b *ask) bool {
	if la, lb := m.heldLineage(a.answer.Lineage), m.heldLineage(b.answer.Lineage); la != lb {
		return la
	}
	return cmp.Or(
		cmp.Compare(a.answer.ID.Index, b.answer.ID.Index),
		cmp.Compare(a.answer.ID.Term, b.answer.ID.Term),
		cmp.Compare(m.peers.fails(m.now, b.peer), m.peers.fails(m.now, a.peer)),
		cmp.Compare(b.peer, a.peer),
	) > 0
}

// choose takes the best and fetches it from all who hold the same id.
func (m *Machine) choose() {
	r := &m.slot.round
	best := m.best().answer
	sources, others := []uint64{}, []uint64{}
	for i := range r.asks {
		a := &r.asks[i]
		switch {
		case a.state == askReady && a.answer.ID == best.ID:
			sources = append(sources, a.peer)
		case a.answer.From == a.peer:
			others = append(others, a.peer)
		}
		if a.state == askReady && a.answer.ID.Contradicts(best.ID) {
			// Which of the two is wrong the own log will tell when one is recorded.
			m.alarm("forked: snapshot %s of %s and %s of %s cannot be of one history",
				a.answer.ID.Short(), m.v.nameOf(a.peer), best.ID.Short(), m.v.nameOf(best.From))
		}
	}
	m.fetch(best.ID, best.Lineage, sources, others)
}

// endRound frees the slot after a round that found nothing.
func (m *Machine) endRound() {
	r := m.slot.round
	purpose := m.slot.purpose
	m.free(true)
	f := Failure{Kind: FailUnreachable, Text: r.summary(m.v)}
	if purpose == Rescue {
		m.rescueFailed(f)
		return
	}
	if late := r.find(r.maker); late == nil || late.state == askNothing {
		m.sched.empty++
	}
	m.sched.roundFailed(m, f)
}

// summary says of each peer why it gave nothing.
func (r *round) summary(v *View) string {
	if len(r.asks) == 0 {
		return "nobody to ask"
	}
	parts := make([]string, len(r.asks))
	for i := range r.asks {
		a := &r.asks[i]
		parts[i] = v.nameOf(a.peer) + ": " + a.says()
	}
	return strings.Join(parts, "; ")
}

// says puts an ask into words.
func (a *ask) says() string {
	switch a.state {
	case askPending:
		return "no answer yet"
	case askGenerating:
		return "generating"
	case askReady:
		return "has " + a.answer.ID.Short()
	}
	return a.why
}

// infoCame takes an answer in. It must be to the transfer in the slot and from one who
// was asked; that it comes after its deadline does not matter.
func (m *Machine) infoCame(a Answer) {
	s := &m.slot
	if s.stage != Asking || s.transfer != a.Transfer {
		return
	}
	asked := s.round.find(a.From)
	if asked == nil || asked.state == askReady {
		return
	}
	asked.answer, asked.at = a, m.now
	switch {
	case a.Refusal != nil:
		m.refusedInfo(asked, *a.Refusal)
	case a.State == Generating:
		asked.state = askGenerating
	case a.State == Ready:
		m.offered(asked)
	case a.State == Failed:
		m.noAnswer(asked, "failed: "+a.Reason)
	default:
		asked.state, asked.why = askNothing, "has nothing: "+a.Reason
	}
}

// refusedInfo takes a refusal in. Most say nothing against the one who refuses.
func (m *Machine) refusedInfo(a *ask, r Refusal) {
	if r.Kind == NothingNewer {
		a.state, a.why = askNothing, r.Error()
		return
	}
	m.refuse(a.peer, r)
	m.noAnswer(a, r.Error())
	if r.Kind == OtherGroup {
		m.alarm("%s says that it belongs to another group: %s", m.v.nameOf(a.peer), r.Text)
	}
}

// noAnswer counts an ask as failed.
func (m *Machine) noAnswer(a *ask, why string) {
	a.state, a.why = askNothing, why
	m.peers.fail(m.now, a.peer, why)
}

// offered checks an offer before it is believed.
func (m *Machine) offered(a *ask) {
	r, v, id := &m.slot.round, m.v, a.answer.ID
	recorded := ID{Term: v.RecordedTerm, Index: v.RecordedIndex}
	switch {
	case id.Contradicts(recorded):
		m.refuse(a.peer, Refusal{Kind: Forked, Text: id.Short()})
		m.alarm("forked: snapshot %s of %s contradicts the recorded one at %d, term %d",
			id.Short(), m.v.nameOf(a.peer), recorded.Index, recorded.Term)
		m.noAnswer(a, "forked history")
	case id.Index < r.min || id.Term < r.minTerm || id.Term > r.term:
		a.state, a.why = askNothing, "offers "+id.Short()+", which does not fit"
	case m.now < m.skip[id]:
		a.state, a.why = askNothing, "offers "+id.Short()+", which was of no use before"
	default:
		a.state = askReady
		if !r.ready {
			r.ready, r.readyAt = true, m.now
		}
	}
}

// infoFailed counts a peer as one that does not answer.
func (m *Machine) infoFailed(e InfoFailed) {
	s := &m.slot
	if s.stage != Asking || s.transfer != e.Transfer {
		return
	}
	if a := s.round.find(e.Peer); a != nil && a.state != askReady {
		m.noAnswer(a, e.Text)
	}
}
