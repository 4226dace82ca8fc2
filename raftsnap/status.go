package raftsnap

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// Stats counts since New. The names in JSON are those of the status that scripts read.
type Stats struct {
	Generated         int64 `json:"generated"`          // made while leading
	GeneratedFollower int64 `json:"generated_follower"` // made otherwise
	TakenOver         int64 `json:"taken_over"`         // recorded while leading, made elsewhere
	Adopted           int64 `json:"adopted"`            // recorded otherwise, made elsewhere
	Installed         int64 `json:"installed"`
	Served            int64 `json:"served"`    // transfers to other members that have ended
	Refused           int64 `json:"refused"`   // typed refusals, given and received
	Failed            int64 `json:"failed"`    // makings, transfers, records and installs that ended early
	Cancelled         int64 `json:"cancelled"` // the same where nothing was wrong: superseded, not needed any more, or closed
	BytesFetched      int64 `json:"bytes_fetched"`
	BytesReused       int64 `json:"bytes_reused"`
	BytesServed       int64 `json:"bytes_served"`
}

// counters are the parts of Stats that are counted here.
type counters struct {
	generated, generatedFollower, takenOver, adopted, installed, served, refused, failed, cancelled, fetched, reused atomic.Int64
}

func (m *Manager) stats() Stats {
	c, served := &m.count, m.server.Stats()
	return Stats{
		Generated: c.generated.Load(), GeneratedFollower: c.generatedFollower.Load(),
		TakenOver: c.takenOver.Load(), Adopted: c.adopted.Load(), Installed: c.installed.Load(),
		Served: c.served.Load(), BytesServed: served.Served,
		Refused: c.refused.Load() + served.Refused, Failed: c.failed.Load(), Cancelled: c.cancelled.Load(),
		BytesFetched: c.fetched.Load(), BytesReused: c.reused.Load(),
	}
}

// Status is what a Manager is doing, for people and for metrics.
type Status struct {
	Stage   string        // of what is received: idle, asking, fetching, parked, recording, handing
	Purpose string        // what it is received for, "" while idle
	Since   time.Duration // how long the stage has lasted
	Making  string        // of a snapshot of the own state: none, waiting, generating, recording
	Why     string        // why there is no newer snapshot, in a sentence

	// Recorded is the snapshot that Raft knows; its digest is zero while no snapshot here
	// is that one.
	Recorded protocol.ID
	Source   uint64   // its maker; the own id for one made here, 0 while that is not known
	Holders  []uint64 // members that are known to hold it, nil while none is

	Behind uint64        // entries applied since the recorded snapshot
	Stale  time.Duration // since a snapshot was last recorded or installed here, or since Start

	Transfers int   // to this member, running
	Moved     int64 // their bytes so far, fetched and reused

	Held        int // durable snapshots
	Leases      int // held by members that read them
	PinnedBytes int64
	Alarms      []string // the newest last
	Stats       Stats
}

// maxAlarms are kept for Status.
const maxAlarms = 16

// recorded is the snapshot that Raft was given last by this Manager.
type recorded struct {
	id    protocol.ID
	maker protocol.Lineage
}

// settle publishes the state and serves those who wait for one, after a batch of events.
func (m *Manager) settle() {
	v := m.view()
	m.answerAll(&v)
	m.grant(&v)
	s := m.publish(&v)
	if f := m.opts.Observer.Stepped; f != nil {
		s.Stats = m.stats()
		f(s)
	}
}

// grant answers the callers of Snapshot whose index is recorded.
func (m *Manager) grant(v *protocol.View) {
	l := &m.loop
	if l.recording > 0 {
		return // the view may show it before it is counted
	}
	l.wishes = slices.DeleteFunc(l.wishes, func(w *wish) bool {
		if v.RecordedIndex < w.min {
			return false
		}
		w.granted <- m.recordedID(v).id
		return true
	})
}

// recordedID names the snapshot that the View has as recorded. After a restart only term
// and index are known, and the store must tell the rest.
func (m *Manager) recordedID(v *protocol.View) recorded {
	l := &m.loop
	if l.recorded.id.Index == v.RecordedIndex && l.recorded.id.Term == v.RecordedTerm {
		return l.recorded
	}
	l.recorded = recorded{id: protocol.ID{Term: v.RecordedTerm, Index: v.RecordedIndex}}
	for _, h := range v.Held {
		if h.ID.Index == v.RecordedIndex && h.ID.Term == v.RecordedTerm {
			l.recorded = recorded{id: h.ID, maker: h.Meta.Lineage}
		}
	}
	return l.recorded
}

func (m *Manager) publish(v *protocol.View) Status {
	l, now, served := &m.loop, m.now(), m.server.Stats()
	rec, at := m.recordedID(v), l.machine.Status()
	s := Status{
		Stage: at.Stage.String(), Since: now - at.Since, Making: at.Making, Why: l.machine.Why(now, v),
		Recorded: rec.id, Source: rec.maker.Maker, Holders: l.machine.Holders(rec.id),
		Behind: v.Applied - min(v.Applied, v.RecordedIndex), Stale: now - l.success,
		Transfers: len(l.fetches), Held: len(v.Held),
		Leases: served.Leases, PinnedBytes: served.PinnedBytes,
		Alarms: slices.Clone(l.alarms),
	}
	if at.Stage != protocol.Idle {
		s.Purpose = at.Purpose.String()
	}
	for _, r := range l.fetches {
		s.Moved += r.moved.Load()
	}
	m.mu.Lock()
	m.mu.status = s
	m.mu.Unlock()
	return s
}

// served is called when another member has done with a snapshot of this one, or has lost it.
func (m *Manager) served(e transfer.LeaseEnd) {
	if e.Bytes > 0 || e.Why == "released" {
		m.count.served.Add(1)
	}
	observe(m.opts.Observer.Served, Served{Peer: e.Peer, ID: e.ID, Bytes: e.Bytes, Duration: e.Duration, Why: e.Why})
	m.tidyUp()
}

// alarm is for people: it is logged and kept for Status.
func (m *Manager) alarm(text string) {
	m.opts.Logger.Error("alarm", "text", text)
	observe(m.opts.Observer.Alarm, text)
	l := &m.loop
	if slices.Contains(l.alarms, text) {
		return
	}
	l.alarms = append(l.alarms, text)
	l.alarms = l.alarms[max(0, len(l.alarms)-maxAlarms):]
}

// refused counts and tells a refusal that this member gave or got.
func (m *Manager) refused(peer uint64, r *protocol.Refusal) {
	m.count.refused.Add(1)
	m.observeRefusal(peer, r)
}

func (m *Manager) observeRefusal(peer uint64, r *protocol.Refusal) {
	m.opts.Logger.Debug("refused", "peer", peer, "kind", r.Kind, "text", r.Text)
	observe(m.opts.Observer.Refused, Refused{Peer: peer, Kind: r.Kind})
}

// attempt tells how a call to another member ended.
func (m *Manager) attempt(peer uint64, what string, err error) {
	observe(m.opts.Observer.Attempt, Attempt{Peer: peer, What: what, Outcome: outcomeOf(err)})
}

func outcomeOf(err error) string {
	if err == nil {
		return "ok"
	}
	if r, ok := errors.AsType[*protocol.Refusal](err); ok {
		return string(r.Kind)
	}
	if f, ok := errors.AsType[*protocol.Failure](err); ok {
		return string(f.Kind)
	}
	return string(protocol.FailUnreachable)
}

// observeFetch tells the end of a transfer, and of each of its sources.
func (m *Manager) observeFetch(f protocol.Fetch, stats transfer.Stats, took time.Duration, err error) {
	for _, s := range stats.Sources {
		failed := err // of the whole, where the source was not given up
		if s.Failed != nil {
			failed = s.Failed
		}
		m.attempt(s.ID, "fetch", failed)
	}
	observe(m.opts.Observer.Fetched, Fetched{
		ID: f.Target, Purpose: f.Purpose, Sources: f.Sources,
		Fetched: stats.Fetched, Reused: stats.Reused, Duration: took, Err: err,
	})
}

func observe[T any](f func(T), what T) {
	if f != nil {
		f(what)
	}
}
