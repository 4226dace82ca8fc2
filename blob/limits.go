package blob

import (
	"context"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
)

// limits are shared by all callers of a Store. Bytes are reserved before a request, and
// each reservation is taken whole, so nobody who holds one half waits for the other.
type limits struct {
	requests *gate
	bytes    *semaphore.Weighted
	maxBytes int64
	rate     *rate.Limiter // nil: unlimited
}

func newLimits(o Options) *limits {
	l := &limits{
		requests: newGate(o),
		bytes:    semaphore.NewWeighted(o.MaxBytes),
		maxBytes: o.MaxBytes,
	}
	if o.BytesPerSecond > 0 {
		l.rate = rate.NewLimiter(rate.Limit(o.BytesPerSecond), burst(o.BytesPerSecond))
	}
	return l
}

// burst is a tenth of a second's bytes, so that a limit holds over short times too, but
// neither silly small pieces nor more than one buffer.
func burst(perSecond int64) int {
	return int(min(max(perSecond/10, 4<<10), pieceSize))
}

// reserve takes n bytes, or all there are if n is more than that.
func (l *limits) reserve(ctx context.Context, n int64) (release func(), err error) {
	n = min(n, l.maxBytes)
	if n <= 0 {
		return func() {}, nil
	}
	if err := l.bytes.Acquire(ctx, n); err != nil {
		return nil, err
	}
	return func() { l.bytes.Release(n) }, nil
}

// piece is the longest read or write to do at once; 0 means any.
func (l *limits) piece() int {
	if l.rate == nil {
		return 0
	}
	return l.rate.Burst()
}

// pay waits until n more bytes are within the rate; n is at most piece().
func (l *limits) pay(ctx context.Context, n int) error {
	if l.rate == nil || n <= 0 {
		return nil
	}
	err := l.rate.WaitN(ctx, n)
	if err != nil && ctx.Err() == nil {
		return context.DeadlineExceeded // the limiter saw that the wait would be too long
	}
	return err
}
