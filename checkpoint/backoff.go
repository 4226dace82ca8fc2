package checkpoint

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff spaces tries: each delay is drawn between half of and the whole of a span
// that doubles, so that writers which collided once drift apart.
type backoff struct {
	span, limit time.Duration
}

func newBackoff(o Options) *backoff { return &backoff{span: o.FirstDelay, limit: o.MaxDelay} }

// sleep waits for the next delay, or until ctx ends and then returns its error.
func (b *backoff) sleep(ctx context.Context) error {
	d := b.span/2 + rand.N(b.span/2+1)
	b.span = min(2*b.span, b.limit)

	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
