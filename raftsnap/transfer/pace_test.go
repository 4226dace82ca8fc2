package transfer

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// Under a low limit more time passes before each request than a lease lives. That costs a
// new lease each time, and nothing is waited for twice.
func TestFetchPaceOutlastsLeases(t *testing.T) {
	files := tree{"a": bytesOf(1, 3*snapstore.ChunkSize), "b": bytesOf(2, 5*snapstore.ChunkSize)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	var waited atomic.Int64
	work := &snapstore.Work{Wait: func(_ context.Context, n int) error {
		waited.Add(int64(n))
		p.server.leases.endAll(held.ID, "expired")
		return nil
	}}
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p), Window: 1, Work: work}, files)
	if waited.Load() != held.Bytes {
		t.Errorf("waited for %d bytes, want %d", waited.Load(), held.Bytes)
	}
}

// writeTimes is a receiver that notes the longest time in which nothing came.
type writeTimes struct {
	http.ResponseWriter
	last    time.Time
	longest time.Duration
}

func (w *writeTimes) Write(p []byte) (int, error) {
	w.longest = max(w.longest, time.Since(w.last))
	w.last = time.Now()
	return len(p), nil
}

// A sender that keeps to a low limit is not taken for a dead one, though its receivers
// share the limit.
func TestServeUnderLowLimit(t *testing.T) {
	const receivers, size = 16, 256 << 10
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, bytesOf(1, size), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		s := &Server{ctx: t.Context(), opts: (&ServerOptions{Work: NewPacer(&PacerOptions{Limit: 10_000}).Work()}).withDefaults()}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		if err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for range receivers {
			all.Go(func() {
				w := &writeTimes{last: time.Now()}
				f, err := os.Open(name)
				if err == nil {
					err = s.answer(w, r, nil).send(f, size)
					f.Close()
				}
				if idle := (Fetch{}).withDefaults().Idle; err != nil || w.longest >= idle {
					t.Errorf("nothing came for %v, which is given up after %v; error %v", w.longest, idle, err)
				}
			})
		}
		all.Wait()
	})
}
