package raftsnap

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// maxOpen bounds the questions of other members that are kept open at one time.
const maxOpen = 256

// answers is the Manager as other members see it.
type answers Manager

var _ transfer.Control = (*answers)(nil)

// question is one that is kept open until there is something to say, the wait is over or
// the asker has gone.
type question struct {
	request  protocol.InfoRequest
	deadline time.Duration
	answer   chan protocol.Answer // one slot
}

// Info answers what this member has. With a wait it returns once a snapshot is ready, its
// making has failed, or the question is refused.
func (a *answers) Info(ctx context.Context, r protocol.InfoRequest) protocol.Answer {
	m := (*Manager)(a)
	r.Wait = min(max(r.Wait, 0), m.opts.MaxWait)
	q := &question{request: r, deadline: m.now() + r.Wait, answer: make(chan protocol.Answer, 1)}
	if !m.post(entry{event: protocol.Asked{Request: r}, then: func(l *loop) { m.open(l, q) }}) {
		return m.closedAnswer(r)
	}
	select {
	case answer := <-q.answer:
		return answer
	case <-m.done:
		return m.closedAnswer(r)
	case <-ctx.Done():
		m.post(entry{then: func(l *loop) { l.drop(q) }})
		return refuse(r, m.host.View(), protocol.Refusal{Kind: protocol.Gone, Text: "the asker has gone"})
	}
}

// open takes a question in. What it is answered with now is decided by settle, after the
// events that came with it.
func (m *Manager) open(l *loop, q *question) {
	if len(l.questions) >= maxOpen {
		q.answer <- refuse(q.request, m.host.View(), protocol.Refusal{Kind: protocol.Busy, Text: "too many open questions"})
		return
	}
	l.questions = append(l.questions, q)
}

func (l *loop) drop(q *question) {
	l.questions = slices.DeleteFunc(l.questions, func(o *question) bool { return o == q })
}

// answerAll answers the questions that have waited long enough.
func (m *Manager) answerAll(v *protocol.View) {
	now := m.now()
	m.loop.questions = slices.DeleteFunc(m.loop.questions, func(q *question) bool {
		a := m.loop.machine.Answer(v, q.request)
		if now < q.deadline && !final(a) {
			return false
		}
		q.answer <- a
		return true
	})
}

// final tells whether waiting would not make an answer better. That there is nothing newer
// may change at any time.
func final(a protocol.Answer) bool {
	if a.Refusal != nil {
		return a.Refusal.Kind != protocol.NothingNewer
	}
	return a.State == protocol.Ready || a.State == protocol.Failed
}

// refuseAll ends all open questions at Close.
func (m *Manager) refuseAll() {
	for _, q := range m.loop.questions {
		q.answer <- m.closedAnswer(q.request)
	}
	m.loop.questions = nil
}

func (m *Manager) closedAnswer(r protocol.InfoRequest) protocol.Answer {
	return refuse(r, m.host.View(), *errClosed)
}

func refuse(r protocol.InfoRequest, v protocol.View, why protocol.Refusal) protocol.Answer {
	why.Term = v.Term
	return protocol.Answer{Transfer: r.Transfer, From: v.Self, Term: v.Term, State: protocol.None, Applied: v.Applied, Refusal: &why}
}

// Announce takes a leader's announcement. Nobody waits for what comes of it.
func (a *answers) Announce(_ context.Context, n protocol.Announce) {
	(*Manager)(a).post(entry{event: protocol.Announced{Announce: n}})
}

// Outcome passes what became of an install on to the host.
func (a *answers) Outcome(_ context.Context, o protocol.Outcome) error {
	m := (*Manager)(a)
	if !m.taking() {
		return errClosed
	}
	err := m.host.Outcome(o)
	if refusal, ok := errors.AsType[*protocol.Refusal](err); ok {
		m.observeRefusal(o.From, refusal) // the server counts it
	}
	return err
}
