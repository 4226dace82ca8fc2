package raftsnap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/raftsnap/transfer"
	"github.com/snapferry/snapferry/snapshot"
)

// do carries out one effect. It never waits: what takes time gets a goroutine of its own,
// whose end comes back as an event.
func (m *Manager) do(f protocol.Effect, v *protocol.View) {
	if m.loop.stopping && !ending(f) {
		return
	}
	switch f := f.(type) {
	case protocol.Ask:
		m.ask(f, urlOf(v, f.Peer))
	case protocol.Tell:
		m.tell(f.Outcome, urlOf(v, f.Outcome.To))
	case protocol.Spread:
		m.spread(f, urlOf(v, f.Peer))
	case protocol.Fetch:
		m.fetch(f, v)
	case protocol.CancelFetch:
		m.cancelFetch(f.Transfer, &f.Why)
	case protocol.Make:
		leading := v.Role == protocol.Leader
		m.works.Go(func() { m.makeSnapshot(leading) })
	case protocol.Record:
		m.loop.recording++
		m.works.Go(func() { m.record(f) })
	case protocol.Hand:
		m.works.Go(func() { m.hand(f) })
	case protocol.Quarantine:
		m.works.Go(func() { m.quarantine(f.ID, f.Text) })
	case protocol.Freed:
		m.freed(f)
	case protocol.Refused:
		m.refused(f.Peer, &f.Refusal)
	case protocol.Alarm:
		m.alarm(f.Text)
	default:
		panic(fmt.Sprintf("raftsnap: unknown effect %T", f))
	}
}

// ending tells whether an effect may be carried out after Close: it starts nothing.
func ending(f protocol.Effect) bool {
	switch f.(type) {
	case protocol.CancelFetch, protocol.Freed, protocol.Refused, protocol.Alarm:
		return true
	}
	return false
}

// urlOf returns where another member is reached, "" if the View does not know it.
func urlOf(v *protocol.View, id uint64) string {
	for _, p := range v.Peers {
		if p.ID == id {
			return p.URL
		}
	}
	return ""
}

// fetching is a transfer to this member that runs.
type fetching struct {
	effect protocol.Fetch
	cancel context.CancelCauseFunc
	moved  atomic.Int64 // bytes fetched and reused
	waits  atomic.Int64 // for the pacer, that are going on
	begun  atomic.Int64 // waits and reports of progress so far

	// The loop's.
	seen  int64 // of begun
	alive int64 // times that work was seen that moves no bytes
	told  int64 // bytes that the Machine knows of
}

// paced is the pacer's hook that also shows that the transfer is at work: it looks for bytes
// to reuse, or waits for its turn.
func (r *fetching) paced(w *snapstore.Work) *snapstore.Work {
	return &snapstore.Work{Wait: func(ctx context.Context, n int) error {
		r.begun.Add(1)
		r.waits.Add(1)
		defer r.waits.Add(-1)
		return w.Wait(ctx, n)
	}}
}

// progress is what the Machine is told of the bytes moved. Its idle deadline is for silent
// sources, so work without bytes counts as one byte each time that it is looked for.
func (r *fetching) progress() int64 {
	if begun := r.begun.Load(); begun > r.seen || r.waits.Load() > 0 {
		r.seen = begun
		r.alive++
	}
	return r.moved.Load() + r.alive
}

func (m *Manager) fetch(f protocol.Fetch, v *protocol.View) {
	ctx, cancel := context.WithCancelCause(m.work)
	r := &fetching{effect: f, cancel: cancel}
	m.loop.fetches[f.Transfer] = r
	sources, others := sourcesOf(v, f.Sources), sourcesOf(v, f.Others)
	m.works.Go(func() {
		defer cancel(nil)
		m.runFetch(ctx, r, sources, others)
	})
}

func sourcesOf(v *protocol.View, ids []uint64) []transfer.Source {
	var sources []transfer.Source
	for _, id := range ids {
		if url := urlOf(v, id); url != "" {
			sources = append(sources, transfer.Source{ID: id, URL: url})
		}
	}
	return sources
}

func (m *Manager) runFetch(ctx context.Context, r *fetching, sources, others []transfer.Source) {
	began := time.Now()
	held, stats, err := m.fetchFrom(ctx, r, sources, others)
	m.count.fetched.Add(stats.Fetched)
	m.count.reused.Add(stats.Reused)
	m.observeFetch(r.effect, stats, time.Since(began), err)

	end := entry{then: func(l *loop) { delete(l.fetches, r.effect.Transfer) }}
	if err == nil {
		end.event = protocol.FetchDone{Transfer: r.effect.Transfer, Held: held}
	} else {
		m.countEnd(context.Cause(ctx))
		end.event = protocol.FetchEnded{Transfer: r.effect.Transfer, Failure: failureOf(ctx, err)}
	}
	m.reportThen(end)
}

func (m *Manager) fetchFrom(ctx context.Context, r *fetching, sources, others []transfer.Source) (protocol.Held, transfer.Stats, error) {
	if held, err := m.store.Get(r.effect.Target); err == nil {
		return held, transfer.Stats{}, nil // another way here was quicker
	}
	if len(sources)+len(others) == 0 {
		return protocol.Held{}, transfer.Stats{}, &protocol.Failure{Kind: protocol.FailUnreachable, Text: "no address of any source is known"}
	}
	return m.client.Fetch(ctx, transfer.Fetch{
		Store: m.store, ID: r.effect.Target, Transfer: r.effect.Transfer,
		Sources: sources, Others: others,
		// A source is given up well before the Machine would give up the whole transfer.
		Idle: m.opts.Protocol.IdleDeadline / 2,
		Work: r.paced(m.pacer.Work()), Extra: m.extra(),
		Progress: func(fetched, reused int64) {
			r.moved.Store(fetched + reused)
			r.begun.Add(1) // it is a sign of life also without news
		},
	})
}

// extra is where bytes may lie beside the store.
func (m *Manager) extra() []string {
	if m.opts.StateDir == "" {
		return nil
	}
	return []string{m.opts.StateDir}
}

// moved tells the Machine how far the transfers have come. It runs once for each batch of
// events, so at the pace of ticks and not of the bytes.
func (m *Manager) moved() {
	for id, r := range m.loop.fetches {
		if now := r.progress(); now > r.told {
			r.told = now
			m.step(protocol.FetchMoved{Transfer: id, Bytes: now})
		}
	}
}

func (m *Manager) cancelFetch(id protocol.TransferID, why *protocol.Failure) {
	if r := m.loop.fetches[id]; r != nil {
		r.cancel(why)
	}
}

// freed ends what a transfer may still have here. Staging that is of no more use goes with
// the next round of retention.
func (m *Manager) freed(f protocol.Freed) {
	m.cancelFetch(f.Transfer, &protocol.Failure{Kind: protocol.FailCancelled, Text: "nobody waits for it any more"})
	m.tidyUp()
}

// makeSnapshot freezes the state and makes a snapshot of it. Whether it counts as a
// leader's is decided by what this member was when the making was.
func (m *Manager) makeSnapshot(leading bool) {
	began := time.Now()
	made, err := m.makeFrom(m.work)
	made.Leader, made.Duration, made.Err = leading, time.Since(began), err
	if err != nil {
		m.countEnd(nil)
		observe(m.opts.Observer.Made, made.Made)
		m.report(protocol.MakeFailed{Failure: failureOf(m.work, err)})
		return
	}
	if made.Leader {
		m.count.generated.Add(1)
	} else {
		m.count.generatedFollower.Add(1)
	}
	observe(m.opts.Observer.Made, made.Made)
	m.report(protocol.Made{Held: made.held})
}

// making is a Made with what came of it.
type making struct {
	Made
	held protocol.Held
}

func (m *Manager) makeFrom(ctx context.Context) (making, error) {
	var made making
	draft, err := m.store.Draft()
	if err != nil {
		return made, err
	}
	began := time.Now()
	meta, err := m.host.Freeze(ctx, draft.Dir())
	made.Frozen = time.Since(began)
	if err != nil {
		draft.Abort()
		return made, fmt.Errorf("freeze: %w", err)
	}
	made.held, err = draft.Commit(ctx, meta, m.pacer.Work())
	if err != nil {
		draft.Abort()
		return made, err
	}
	made.ID, made.Bytes = made.held.ID, made.held.Bytes
	return made, nil
}

// record gives Raft a snapshot to cut its log by (R4).
func (m *Manager) record(f protocol.Record) {
	began := time.Now()
	held, release, err := m.give(f.ID, func(held protocol.Held) error {
		return m.host.Record(m.work, f.ID, held.Meta)
	})
	defer release()
	done := protocol.RecordDone{Transfer: f.Transfer}
	switch refusal, ok := errors.AsType[*protocol.Refusal](err); {
	case ok:
		done.Refusal = refusal
	case err != nil:
		done.Err = err.Error()
		m.countEnd(nil)
	default:
		m.countRecord(f)
	}
	observe(m.opts.Observer.Recorded, Recorded{ID: f.ID, Purpose: f.Purpose, Source: f.Source, Duration: time.Since(began), Err: err})
	m.reportThen(entry{event: done, then: func(l *loop) {
		l.recording--
		m.gave(l, held, err == nil)
	}})
}

func (m *Manager) countRecord(f protocol.Record) {
	switch {
	case f.Source == m.host.View().Self:
	case f.Purpose == protocol.TakeOver:
		m.count.takenOver.Add(1)
	default:
		m.count.adopted.Add(1)
	}
}

// hand gives Raft a snapshot to replace the state by (R8.3).
func (m *Manager) hand(f protocol.Hand) {
	began := time.Now()
	var outcome protocol.Outcome
	held, release, err := m.give(f.ID, func(held protocol.Held) (err error) {
		dir, err := m.store.Dir(f.ID)
		if err == nil {
			outcome, err = m.host.Install(m.work, f.Envelope, f.ID, held.Meta, dir)
		}
		return err
	})
	defer release()
	if err != nil {
		outcome = m.handFailed(f, err)
	}
	installed := outcome.Kind == protocol.Installed
	switch {
	case installed:
		m.count.installed.Add(1)
	case outcome.Kind == protocol.InstallFailed:
		m.countEnd(nil)
	}
	observe(m.opts.Observer.Install, Installed{ID: f.ID, Outcome: outcome.Kind, Duration: time.Since(began), Err: err})
	done := protocol.HandDone{Transfer: f.Transfer, Outcome: outcome}
	m.reportThen(entry{event: done, then: func(l *loop) { m.gave(l, held, installed) }})
}

// handFailed is the outcome where the host did not give one.
func (m *Manager) handFailed(f protocol.Hand, err error) protocol.Outcome {
	v := m.host.View()
	o := protocol.Outcome{
		Group: v.Group, From: v.Self, To: f.Envelope.From, Term: f.Envelope.Term,
		Transfer: f.Transfer, Kind: protocol.InstallFailed, Index: f.Envelope.SnapIndex, Reason: err.Error(),
	}
	o.Refusal, _ = errors.AsType[*protocol.Refusal](err)
	return o
}

// give checks a snapshot and lets use have it, pinned. One that is damaged goes into
// quarantine, and the Machine is told. release is to be called last, when the host and the
// Machine know what came of it.
func (m *Manager) give(id protocol.ID, use func(protocol.Held) error) (held protocol.Held, release func(), err error) {
	pin, err := m.store.Pin(id, "raft")
	if errors.Is(err, fs.ErrNotExist) {
		err = &protocol.Refusal{Kind: protocol.Gone, Text: "it is not held here any more"}
	}
	if err != nil {
		return protocol.Held{}, func() {}, err
	}
	release = func() { m.unpin(pin) }
	if held, err = m.store.Get(id); err != nil {
		return held, release, err
	}
	if err := m.store.Verify(m.work, id, m.pacer.Work()); err != nil {
		if errors.Is(err, snapshot.ErrCorrupt) {
			m.damaged(id, err)
		}
		return held, release, err
	}
	return held, release, use(held)
}

// unpin lets a snapshot go, but not in the middle of a round of retention: that one may
// have asked what is needed before the snapshot was recorded.
func (m *Manager) unpin(pin *snapstore.Pin) {
	m.house.Lock()
	defer m.house.Unlock()
	_ = pin.Close() // of a directory that was only read
}

// gave notes in the loop what Raft has now.
func (m *Manager) gave(l *loop, held protocol.Held, success bool) {
	if success {
		l.recorded = recorded{id: held.ID, maker: held.Meta.Lineage}
		l.success = m.now()
	}
	m.tidyUp()
}

// failureOf says in the protocol's words why something ended early.
func failureOf(ctx context.Context, err error) protocol.Failure {
	if f, ok := errors.AsType[*protocol.Failure](err); ok {
		return *f
	}
	kind := protocol.FailLocal
	switch {
	case ctx.Err() != nil:
		kind = protocol.FailCancelled
	case errors.Is(err, snapstore.ErrNoSpace) || errors.Is(err, syscall.ENOSPC):
		kind = protocol.FailNoSpace
	case errors.Is(err, snapshot.ErrCorrupt):
		kind = protocol.FailCorrupt
	}
	return protocol.Failure{Kind: kind, Text: err.Error()}
}

// countEnd counts what has ended early: as cancelled if nothing was wrong with it, and as
// failed otherwise, also if it was given up for being too slow. why is what it was cancelled
// for, nil if it was not.
func (m *Manager) countEnd(why error) {
	f, given := errors.AsType[*protocol.Failure](why)
	if m.work.Err() != nil || given && f.Kind != protocol.FailIdle {
		m.count.cancelled.Add(1)
		return
	}
	m.count.failed.Add(1)
}
