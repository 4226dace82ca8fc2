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

// report tells the owner, now if it must be. Somebody who finds it being told elsewhere
// leaves: his bytes will be in the next report.
func (m *meter) report(must bool) {
	if must {
		m.mu.Lock()
	} else if !m.mu.TryLock() {
		return
	}
	defer m.mu.Unlock()
	if now := time.Now(); must || now.Sub(m.last) >= reportEvery {
		m.last = now
		m.tell(m.fetched.Load(), m.reused.Load())
	}
}

// watching returns w, also telling the owner that something is going on.
func (m *meter) watching(w *snapstore.Work) *snapstore.Work {
	return &snapstore.Work{Wait: func(ctx context.Context, bytes int) error {
		m.report(false)
		return w.Wait(ctx, bytes)
	}}
}

func (m *meter) totals() (fetched, reused int64) { return m.fetched.Load(), m.reused.Load() }
