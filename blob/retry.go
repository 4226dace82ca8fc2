package blob

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

var errStalled = errors.New("no progress")

// retry runs try until it succeeds, fails for good, or the time is up. The error is that
// of the last try, with the context's when that ended the waiting.
func (s *Store) retry(ctx context.Context, op, key string, try func(context.Context) error) error {
	var first time.Time
	limit := s.opts.Retry.First
	for {
		err := s.open(ctx)
		if err == nil {
			err = try(ctx)
		}
		if err == nil || !IsRetriable(err) {
			return err
		}
		delay := limit/2 + rand.N(limit/2+1)
		limit = min(2*limit, s.opts.Retry.Max)
		if first.IsZero() {
			first = time.Now()
		}
		if s.opts.Retry.Total > 0 && time.Since(first)+delay > s.opts.Retry.Total {
			return fmt.Errorf("gave up after %v: %w", time.Since(first).Round(time.Millisecond), err)
		}
		if s.opts.OnRetry != nil {
			s.opts.OnRetry(op, key, err, delay)
		}
		if cerr := pause(ctx, delay); cerr != nil {
			return fmt.Errorf("%w (last try: %w)", cerr, err)
		}
	}
}

// open is an error when the caller has gone or the Store is closed.
func (s *Store) open(ctx context.Context) error {
	if s.closed.Load() {
		return ErrClosed
	}
	return ctx.Err()
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// watch cancels one try when it makes no progress for too long.
type watch struct {
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timer   *time.Timer // nil: no limit
	timeout time.Duration
}

func (s *Store) watch(ctx context.Context) *watch {
	w := &watch{timeout: s.opts.TryTimeout}
	w.ctx, w.cancel = context.WithCancelCause(context.WithValue(ctx, watchKey{}, w))
	if w.timeout > 0 {
		w.timer = time.AfterFunc(w.timeout, func() { w.cancel(errStalled) })
	}
	return w
}

// progress starts the time anew, stand stops it while others are waited for.
func (w *watch) progress() {
	if w.timer != nil {
		w.timer.Reset(w.timeout)
	}
}

func (w *watch) stand() {
	if w.timer != nil {
		w.timer.Stop()
	}
}

// watchKey finds the watch of a try in its context.
type watchKey struct{}

// Moved tells that bytes have moved, or a step was done, in the driver call that got ctx.
// A driver that sends a body later than it reads it calls this, so that a slow
// connection is not taken for a dead one. Without a Store it does nothing.
func Moved(ctx context.Context) {
	if w, ok := ctx.Value(watchKey{}).(*watch); ok && ctx.Err() == nil {
		w.progress()
	}
}

// result turns the error of a try that the watch broke off into one to try again.
func (w *watch) result(err error) error {
	if err != nil && context.Cause(w.ctx) == errStalled {
		return Retriable(fmt.Errorf("%w for %v: %w", errStalled, w.timeout, err))
	}
	return err
}

func (w *watch) end() {
	w.stand()
	w.cancel(nil)
}

// slot is a place within the limit on requests.
type slot struct {
	limits *limits
	held   bool
	stamp  int
}

func (s *slot) take(ctx context.Context) (err error) {
	s.stamp, err = s.limits.requests.enter(ctx)
	s.held = err == nil
	return err
}

// answered lets the limit learn how the request ended.
func (s *slot) answered(err error) { s.limits.requests.outcome(s.stamp, err) }

// free gives the place back; doing so twice does nothing, as a caller's code may end
// its goroutine while the place is lent out.
func (s *slot) free() {
	if s.held {
		s.held = false
		s.limits.requests.leave()
	}
}

// call is one driver call: within the limit on requests, and watched.
func (s *Store) call(ctx context.Context, f func(w *watch) error) error {
	sl := slot{limits: s.limits}
	if err := sl.take(ctx); err != nil {
		return err
	}
	defer sl.free()
	w := s.watch(ctx)
	defer w.end()
	err := f(w)
	sl.answered(err)
	return w.result(err)
}
