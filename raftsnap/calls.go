package raftsnap

import (
	"context"
	"errors"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Calls to other members at one time. Questions may be kept open for long, so they are
// bounded apart from what is told.
const (
	maxQuestions = 64
	maxTellings  = 64
)

// An end of an install that does not reach the leader costs it an idle deadline, so it is
// tried more than once. The leader's deadline covers what is lost all the same.
const (
	tellTries = 4
	tellPause = 250 * time.Millisecond // doubled each time
)

// calls counts the calls that run. It belongs to the loop.
type calls struct {
	questions, tellings int
	progress            map[uint64]bool // members that a progress report is on its way to
}

func newCalls() calls { return calls{progress: map[uint64]bool{}} }

// ask sends an InfoRequest to another member.
func (m *Manager) ask(f protocol.Ask, url string) {
	if url == "" || m.loop.calls.questions >= maxQuestions {
		// Told later, not now: the Machine is in the middle of a step.
		m.report(protocol.InfoFailed{Transfer: f.Request.Transfer, Peer: f.Peer, Text: "no address is known, or too many questions are open"})
		return
	}
	m.loop.calls.questions++
	m.works.Go(func() {
		e := m.askAt(f, url)
		m.reportThen(entry{event: e, then: func(l *loop) { l.calls.questions-- }})
	})
}

func (m *Manager) askAt(f protocol.Ask, url string) protocol.Event {
	ctx, cancel := context.WithTimeout(m.work, f.Request.Wait+m.opts.CallTimeout)
	defer cancel()
	a, err := m.client.Info(ctx, url, f.Request)
	m.attempt(f.Peer, "info", err)
	switch {
	case err != nil:
		return protocol.InfoFailed{Transfer: f.Request.Transfer, Peer: f.Peer, Text: err.Error()}
	case a.From != f.Peer || a.Transfer != f.Request.Transfer:
		return protocol.InfoFailed{Transfer: f.Request.Transfer, Peer: f.Peer, Text: "the answer is another member's, or to another question"}
	}
	return protocol.InfoCame{Answer: a}
}

// Tell sends the leader what became of an install that it asked for. It is for outcomes
// that the caller knows without this package's help: an install that needs no data.
func (m *Manager) Tell(o protocol.Outcome) {
	m.post(entry{then: func(l *loop) {
		v := m.host.View()
		m.do(protocol.Tell{Outcome: o}, &v)
	}})
}

// tell sends an Outcome to the leader. Progress that finds an earlier report still on its
// way is left out: the next one says more.
func (m *Manager) tell(o protocol.Outcome, url string) {
	progress := o.Kind == protocol.Progress
	c := &m.loop.calls
	if url == "" || c.tellings >= maxTellings || progress && c.progress[o.To] {
		return
	}
	c.tellings++
	if progress {
		c.progress[o.To] = true
	}
	m.works.Go(func() {
		m.tellAt(o, url)
		m.reportThen(entry{then: func(l *loop) {
			l.calls.tellings--
			if progress {
				delete(l.calls.progress, o.To)
			}
		}})
	})
}

func (m *Manager) tellAt(o protocol.Outcome, url string) {
	pause := tellPause
	for try := 1; ; try++ {
		err := m.tellOnce(o, url)
		m.attempt(o.To, "tell", err)
		refusal, refused := errors.AsType[*protocol.Refusal](err)
		if refused {
			m.refused(o.To, refusal)
		}
		if err == nil || refused && refusal.Kind != protocol.Busy || o.Kind == protocol.Progress || try == tellTries {
			return
		}
		select {
		case <-time.After(pause):
			pause *= 2
		case <-m.work.Done():
			return
		}
	}
}

func (m *Manager) tellOnce(o protocol.Outcome, url string) error {
	ctx, cancel := context.WithTimeout(m.work, m.opts.CallTimeout)
	defer cancel()
	return m.client.Outcome(ctx, url, o)
}

// spread sends an Announce to another member, once: the next one makes up for a loss.
func (m *Manager) spread(f protocol.Spread, url string) {
	if url == "" || m.loop.calls.tellings >= maxTellings {
		return
	}
	m.loop.calls.tellings++
	m.works.Go(func() {
		ctx, cancel := context.WithTimeout(m.work, m.opts.CallTimeout)
		defer cancel()
		m.attempt(f.Peer, "spread", m.client.Announce(ctx, url, f.Announce))
		m.reportThen(entry{then: func(l *loop) { l.calls.tellings-- }})
	})
}
