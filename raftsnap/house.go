package raftsnap

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// Retention is tried when something was recorded or let go, and this often besides,
// because the leases of other members end without a word.
const tidyEvery = 30 * time.Second

// maxAhead bounds the snapshots that are kept for being newer than the recorded one. Few are
// ever parked at one time, and a member that cannot record any must not fill its disk.
const maxAhead = 4

// tidyUp asks for a round of retention soon.
func (m *Manager) tidyUp() {
	select {
	case m.tidy <- struct{}{}:
	default:
	}
}

// keepHouse removes snapshots that nothing needs any more (R9).
func (m *Manager) keepHouse() {
	ticker := time.NewTicker(tidyEvery)
	defer ticker.Stop()
	for {
		select {
		case <-m.tidy:
		case <-ticker.C:
		case <-m.work.Done():
			return
		}
		m.retire()
	}
}

func (m *Manager) retire() {
	m.house.Lock()
	defer m.house.Unlock()
	if _, err := m.store.Retire(m.needed()); err != nil {
		m.opts.Logger.Warn("retention", "error", err)
	}
}

// needed tells what must stay beside the newest snapshots and the pinned ones: what Raft
// has as its newest record (R2) or may still be given, and for the own lineage and the
// recorded one the newest, which the next increment builds on. What is just being given to
// Raft is pinned.
func (m *Manager) needed() func(protocol.ID) bool {
	v := m.view()
	bases := map[protocol.Lineage]protocol.ID{}
	for _, h := range v.Held { // oldest first
		bases[h.Meta.Lineage] = h.ID
	}
	wanted := map[protocol.ID]bool{bases[v.Lineage]: true}
	for _, h := range v.Held {
		if h.ID.Index == v.RecordedIndex && h.ID.Term == v.RecordedTerm {
			wanted[h.ID] = true
			wanted[bases[h.Meta.Lineage]] = true
		}
	}
	for i, h := range slices.Backward(v.Held) {
		if h.ID.Index <= v.RecordedIndex || len(v.Held)-i > maxAhead {
			break
		}
		wanted[h.ID] = true
	}
	return func(id protocol.ID) bool { return wanted[id] }
}

// keepScrubbing reads all snapshots now and then, slowly: damage shows while another
// member still has the bytes.
func (m *Manager) keepScrubbing() {
	if m.opts.ScrubEvery < 0 {
		return
	}
	ticker := time.NewTicker(m.opts.ScrubEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			m.scrub(m.work)
		case <-m.work.Done():
			return
		}
	}
}

func (m *Manager) scrub(ctx context.Context) {
	limit := rate.NewLimiter(rate.Limit(m.opts.ScrubRate), int(min(m.opts.ScrubRate, 1<<30)))
	pace := &snapstore.Work{Wait: func(ctx context.Context, n int) error {
		return waitFor(ctx, limit, n)
	}}
	bad, err := m.store.Scrub(ctx, pace)
	for _, id := range bad {
		m.damaged(id, errScrub)
	}
	if err != nil && ctx.Err() == nil {
		m.opts.Logger.Warn("scrub", "error", err)
	}
}

var errScrub = errors.New("bytes on disk do not fit their digests")

// waitFor takes n tokens, in parts where they are more than the bucket holds.
func waitFor(ctx context.Context, limit *rate.Limiter, n int) error {
	for n > 0 {
		part := min(n, limit.Burst())
		if err := limit.WaitN(ctx, part); err != nil {
			return err
		}
		n -= part
	}
	return nil
}

// damaged puts a snapshot that did not pass its check into quarantine and tells the
// Machine, which gets another one.
func (m *Manager) damaged(id protocol.ID, cause error) {
	m.quarantine(id, cause.Error())
	m.report(protocol.Damaged{ID: id})
}

// servedDamaged is called by the server, which has put the snapshot into quarantine.
func (m *Manager) servedDamaged(id protocol.ID, cause error) {
	m.tellDamaged(id, cause.Error())
	m.report(protocol.Damaged{ID: id})
}

func (m *Manager) quarantine(id protocol.ID, why string) {
	err := m.store.Quarantine(id, why)
	if errors.Is(err, fs.ErrNotExist) {
		return // the server has found the same and was quicker
	}
	if err != nil {
		m.opts.Logger.Error("quarantine", "index", id.Index, "error", err)
	}
	m.tellDamaged(id, why)
	m.Poll()
}

func (m *Manager) tellDamaged(id protocol.ID, why string) {
	m.opts.Logger.Error("snapshot in quarantine", "term", id.Term, "index", id.Index, "why", why)
	observe(m.opts.Observer.Damaged, Damaged{ID: id, Text: why})
}
