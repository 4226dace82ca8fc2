package blob_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
)

var errSlowDown = errors.New("slow down")

// busy is a store that takes a second for a request and refuses more than some at a time,
// or more than one within some time.
type busy struct {
	blob.Driver
	atOnce   atomic.Int64
	every    time.Duration
	mu       sync.Mutex
	last     time.Time // mu guards
	now      atomic.Int64
	peak     atomic.Int64
	refused  atomic.Int64
	answered atomic.Int64
}

func (b *busy) Stat(context.Context, string) (blob.Info, error) {
	n := b.now.Add(1)
	defer b.now.Add(-1)
	peak(&b.peak, n)
	if n > b.atOnce.Load() || !b.inTime() {
		b.refused.Add(1)
		return blob.Info{}, blob.Throttled(errSlowDown)
	}
	spend(time.Second)
	b.answered.Add(1)
	return blob.Info{}, nil
}

func (b *busy) inTime() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.every == 0 {
		return true
	}
	ok := time.Since(b.last) >= b.every
	if ok {
		b.last = time.Now()
	}
	return ok
}

func stats(t *testing.T, s *blob.Store, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if _, err := s.Stat(t.Context(), fmt.Sprint("k", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// All workers of a Store share the slow-down: few requests are refused although each of
// many callers would begin with its own. When the store allows more, more are sent.
func TestThrottled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := &busy{Driver: memblob.New()}
		b.atOnce.Store(5)
		s := blob.New(b, &blob.Options{MaxRequests: 64, Retry: blob.Retry{Total: -1}})
		stats(t, s, 500)
		// The first 64 come at once. Later, one try in ten or so feels for the limit.
		if n := b.refused.Load(); n > 64+100 {
			t.Errorf("%d of %d requests were refused", n, n+b.answered.Load())
		}
		b.atOnce.Store(1000)
		b.peak.Store(0)
		stats(t, s, 3000)
		if n := b.peak.Load(); n < 60 {
			t.Errorf("only %d requests at a time after the store was free again", n)
		}
	})
}

// Where one request at a time is still too much, pauses come in between.
func TestThrottledByRate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := &busy{Driver: memblob.New(), every: 4 * time.Second}
		b.atOnce.Store(1000)
		s := blob.New(b, &blob.Options{MaxRequests: 16, Retry: blob.Retry{Total: -1}})
		stats(t, s, 200)
		if n := b.refused.Load(); n > 400 {
			t.Errorf("%d requests were refused for 200 that were answered", n)
		}
	})
}

// Who gives up in the line, or in a pause, takes no place with him.
func TestThrottledCancel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := &busy{Driver: memblob.New()}
		b.atOnce.Store(1000)
		s := blob.New(b, &blob.Options{MaxRequests: 2, Retry: blob.Retry{Total: -1}})
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
			var wg sync.WaitGroup
			var failed atomic.Int64
			for i := range 10 {
				wg.Go(func() {
					if _, err := s.Stat(ctx, fmt.Sprint("k", i)); errors.Is(err, context.DeadlineExceeded) {
						failed.Add(1)
					}
				})
			}
			wg.Wait()
			cancel()
			if failed.Load() == 0 {
				t.Error("nobody had to give up")
			}
		}
		b.peak.Store(0)
		stats(t, s, 10)
		if n := b.peak.Load(); n != 2 {
			t.Errorf("%d requests at a time, want 2", n)
		}
	})
}

func TestThrottledIsRetriable(t *testing.T) {
	err := fmt.Errorf("put: %w", blob.Throttled(errSlowDown))
	if !blob.IsThrottled(err) || !blob.IsRetriable(err) || !errors.Is(err, errSlowDown) {
		t.Errorf("%v is not all that it should be", err)
	}
	if blob.IsThrottled(blob.Retriable(errSlowDown)) || blob.Throttled(nil) != nil {
		t.Error("marked without being throttled")
	}
}

// sender reads its body at once and sends it slowly, or not at all.
type sender struct {
	blob.Driver
	moves bool
}

func (s sender) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	for range 10 {
		spend(40 * time.Second)
		if s.moves {
			blob.Moved(ctx)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return s.Driver.Put(ctx, key, body, opts)
}

// A driver that sends from its own memory tells that it gets on.
func TestMoved(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, moves := range []bool{true, false} {
			s := blob.New(sender{memblob.New(), moves}, &blob.Options{TryTimeout: time.Minute, Retry: blob.Retry{Total: time.Second}})
			err := s.Put(t.Context(), "k", blob.Bytes([]byte("v")), blob.PutOptions{})
			if (err == nil) != moves {
				t.Errorf("moves %v: %v", moves, err)
			}
		}
		blob.Moved(t.Context()) // no Store: nothing happens
	})
}

// expirer notes what it was told to do.
type expirer struct {
	blob.Driver
	ttl time.Duration
}

func (e *expirer) InstallExpiry(_ context.Context, ttl time.Duration) error {
	e.ttl = ttl
	return nil
}

func TestInstallExpiry(t *testing.T) {
	plain := blob.New(memblob.New(), nil)
	if err := plain.InstallExpiry(t.Context(), time.Hour); plain.Expires() || !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("a store that expires nothing: %v, %v", plain.Expires(), err)
	}
	e := &expirer{Driver: memblob.New()}
	s := blob.New(e, nil)
	if err := s.InstallExpiry(t.Context(), time.Hour); !s.Expires() || err != nil || e.ttl != time.Hour {
		t.Errorf("a store that does: %v, %v, %v", s.Expires(), err, e.ttl)
	}
}

// What Probe finds says whether two writers can be kept apart.
func TestProbeUnfenced(t *testing.T) {
	if err := blob.New(careless{memblob.New()}, nil).Probe(t.Context()); !errors.Is(err, blob.ErrUnfenced) {
		t.Errorf("no create-if-absent: %v", err)
	}
	d := disorder{careless{memblob.New()}, nil} // more than that is wrong
	if err := blob.New(d, nil).Probe(t.Context()); errors.Is(err, blob.ErrUnfenced) || !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("no order either: %v", err)
	}
}
