//go:build linux

package grouptest

import (
	"context"
	"sync"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// eyes look at every member all the time, and at what must hold at any moment.
type eyes struct {
	g     *group
	stop  context.CancelFunc
	owned sync.WaitGroup

	mu      sync.Mutex        // guards what was seen
	leaders map[uint64]string // by term
	most    map[string]cpwire.Stats
}

// watch opens the eyes on the members that the group has.
func watch(g *group) *eyes {
	ctx, stop := context.WithCancel(context.Background())
	e := &eyes{g: g, stop: stop, leaders: map[uint64]string{}, most: map[string]cpwire.Stats{}}
	for _, m := range g.members {
		e.owned.Go(func() { e.follow(ctx, m) })
	}
	return e
}

// also looks at a member that came later.
func (e *eyes) also(m *member) {
	ctx, stop := context.WithCancel(context.Background())
	before := e.stop
	e.stop = func() { before(); stop() }
	e.owned.Go(func() { e.follow(ctx, m) })
}

func (e *eyes) close() {
	e.stop()
	e.owned.Wait()
}

// follow compares what a member says of itself with what it said before.
func (e *eyes) follow(ctx context.Context, m *member) {
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	var last cpwire.OwnStatus
	life := 0
	for {
		select {
		case <-again.C:
		case <-ctx.Done():
			return
		}
		m.mu.Lock()
		birth := m.birth
		m.mu.Unlock()
		var now cpwire.OwnStatus
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		err := get(one, m.url+cpwire.PathStatus, &now)
		cancel()
		m.mu.Lock()
		same := birth == m.birth && m.proc != nil
		m.mu.Unlock()
		if err != nil || !same || now.Group == "" {
			continue
		}
		if life != birth {
			life, last = birth, now
		}
		e.judge(m, &last, &now)
		last = now
	}
}

// judge holds what is true of a member at any time.
func (e *eyes) judge(m *member, before, now *cpwire.OwnStatus) {
	t, s := e.g.base, &now.Member
	// I12: a leader makes none while a follower can give one, and here one always can.
	if s.Stats.Generated != 0 {
		t.Errorf("%s made %d snapshots while it led", m.id, s.Stats.Generated)
	}
	// R4: the log is cut below a durable snapshot only.
	if s.FirstIndex > s.Snapshot.Index+1 && s.FirstIndex > 2 {
		t.Errorf("%s has a log that begins at %d and a snapshot of %d", m.id, s.FirstIndex, s.Snapshot.Index)
	}
	if s.Applied > s.LastIndex {
		t.Errorf("%s has applied %d of a log that ends at %d", m.id, s.Applied, s.LastIndex)
	}
	if b := &before.Member; now.Term < before.Term || s.Applied < b.Applied || s.Snapshot.Index < b.Snapshot.Index || s.FirstIndex < b.FirstIndex {
		t.Errorf("%s went back: term %d, applied %d, snapshot %d, log from %d; before %d, %d, %d, %d", m.id,
			now.Term, s.Applied, s.Snapshot.Index, s.FirstIndex, before.Term, b.Applied, b.Snapshot.Index, b.FirstIndex)
	}
	if s.ID != m.id || s.URL != m.url {
		t.Errorf("%s at %s calls itself %s at %s", m.id, m.url, s.ID, s.URL)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.most[m.id] = most(e.most[m.id], s.Stats)
	if s.Role == "leader" {
		if other := e.leaders[now.Term]; other != "" && other != m.id {
			t.Errorf("%s and %s both lead in term %d", m.id, other, now.Term)
		}
		e.leaders[now.Term] = m.id
	}
}

// most keeps the greatest of the counters that tests ask for.
func most(a, b cpwire.Stats) cpwire.Stats {
	a.Installed = max(a.Installed, b.Installed)
	a.TakenOver = max(a.TakenOver, b.TakenOver)
	a.GeneratedFollower = max(a.GeneratedFollower, b.GeneratedFollower)
	return a
}

// seen returns the greatest counters of a member over all its lives.
func (e *eyes) seen(id string) cpwire.Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.most[id]
}

// terms is how many terms were seen to have a leader.
func (e *eyes) terms() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.leaders)
}
