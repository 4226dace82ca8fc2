package transfer

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// reportEvery is how often progress is told at most.
const reportEvery = 200 * time.Millisecond

// meter counts the bytes of a transfer and tells its owner of them, not too often.
type meter struct {
	fetched, reused atomic.Int64
	tell            func(fetched, reused int64)

	mu   sync.Mutex // held while tell runs, so that calls do not overlap
	last time.Time  // guarded by mu
	told int64      // guarded by mu; bytes that the owner knows of
}

func newMeter(tell func(fetched, reused int64)) *meter { return &meter{tell: tell} }

// fetch counts bytes that came from the network.
func (m *meter) fetch(n int64) {
	m.fetched.Add(n)
	m.report(false)
}

// reuse says how many bytes needed no network.
func (m *meter) reuse(n int64) {
	m.reused.Store(n)
	m.report(true)
}

// report tells the owner, now if it must be. Somebody who finds it being told elsewhere, or
// told just now, leaves: whoever moves bytes calls catchUp now and then, which makes good
// for the last of them.
func (m *meter) report(must bool) {
	if must {
		m.mu.Lock()
	} else if !m.mu.TryLock() {
		return
	}
	defer m.mu.Unlock()
	if must || time.Since(m.last) >= reportEvery {
		m.reportLocked()
	}
}

func (m *meter) reportLocked() {
	fetched, reused := m.fetched.Load(), m.reused.Load()
	m.last, m.told = time.Now(), fetched+reused
	m.tell(fetched, reused)
}

// catchUp tells the owner of bytes that it has not been told of, and nothing otherwise: a
// report without news is a sign of life.
func (m *meter) catchUp() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fetched.Load()+m.reused.Load() > m.told && time.Since(m.last) >= reportEvery {
		m.reportLocked()
	}
}

// watching returns w, also telling the owner that something is going on.
func (m *meter) watching(w *snapstore.Work) *snapstore.Work {
	return &snapstore.Work{Wait: func(ctx context.Context, bytes int) error {
		m.report(false)
		return w.Wait(ctx, bytes)
	}}
}

// syncPulse is how often it is told that the disk is busy with what has come.
const syncPulse = time.Second

// watchSyncs gives signs of life while the disk makes something durable, until it is called
// off: a slow disk is no stall. One that has not come to an end of anything for longer than
// patience gets none any more. syncing tells how many ends there were, and whether the disk
// is busy.
func (m *meter) watchSyncs(syncing func() (done int64, busy bool), patience time.Duration) (stop func()) {
	quit := make(chan struct{})
	var clock sync.WaitGroup
	clock.Go(func() {
		tick := time.NewTicker(syncPulse)
		defer tick.Stop()
		last, since := int64(-1), time.Time{}
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			done, busy := syncing()
			if done != last || !busy {
				last, since = done, time.Now()
			}
			if busy && time.Since(since) < patience {
				m.report(true)
			}
		}
	})
	return func() {
		close(quit)
		clock.Wait()
	}
}

func (m *meter) totals() (fetched, reused int64) { return m.fetched.Load(), m.reused.Load() }
