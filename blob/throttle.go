package blob

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"
)

type throttled struct{ err error }

func (t *throttled) Error() string { return t.err.Error() }
func (t *throttled) Unwrap() error { return t.err }

// Throttled marks an error as the store's wish for fewer requests. It is Retriable too, and
// makes the whole Store slow down.
func Throttled(err error) error {
	if err == nil || IsThrottled(err) {
		return err
	}
	return Retriable(&throttled{err})
}

// IsThrottled tells whether Throttled marked err or one that it wraps.
func IsThrottled(err error) bool {
	_, ok := errors.AsType[*throttled](err)
	return ok
}

// gate lets requests through, up to a number that adapts itself: it is halved when
// the store asks for less, and grows by one for each time that this many have succeeded.
// When not even one at a time is slow enough, pauses come in between, which double.
type gate struct {
	max        float64
	firstPause time.Duration
	maxPause   time.Duration

	mu      sync.Mutex
	limit   float64       // mu guards; from 1 to max
	inUse   int           // mu guards
	waiting list.List     // mu guards; of chan struct{}, closed when its turn has come
	cuts    int           // mu guards; how often limit was cut
	pause   time.Duration // mu guards; between requests, 0 unless limit is 1
	next    time.Time     // mu guards; when the next request may start
}

func newGate(o Options) *gate {
	return &gate{max: float64(o.MaxRequests), limit: float64(o.MaxRequests), firstPause: o.Retry.First, maxPause: o.Retry.Max}
}

// enter waits for a place. The stamp goes back with the outcome.
func (g *gate) enter(ctx context.Context) (stamp int, err error) {
	g.mu.Lock()
	if g.waiting.Len() > 0 || g.inUse >= int(g.limit) {
		turn := make(chan struct{})
		at := g.waiting.PushBack(turn)
		g.mu.Unlock()
		select {
		case <-turn:
		case <-ctx.Done():
			g.giveUp(at, turn)
			return 0, ctx.Err()
		}
		g.mu.Lock()
	} else {
		g.inUse++
	}
	stamp = g.cuts
	wait := g.reserveLocked()
	g.mu.Unlock()

	if wait > 0 {
		if err := pause(ctx, wait); err != nil {
			g.leave()
			return 0, err
		}
	}
	return stamp, nil
}

// reserveLocked returns how long to wait before the request that begins now.
func (g *gate) reserveLocked() time.Duration {
	if g.pause == 0 {
		return 0
	}
	now := time.Now()
	start := now
	if g.next.After(now) {
		start = g.next
	}
	g.next = start.Add(g.pause)
	return start.Sub(now)
}

// giveUp takes a waiter out of the line, or passes its turn on if that has just come.
func (g *gate) giveUp(at *list.Element, turn chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-turn:
		g.inUse--
		g.wakeLocked()
	default:
		g.waiting.Remove(at)
		g.wakeLocked()
	}
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inUse--
	g.wakeLocked()
}

func (g *gate) wakeLocked() {
	for g.waiting.Len() > 0 && g.inUse < int(g.limit) {
		turn := g.waiting.Remove(g.waiting.Front()).(chan struct{})
		g.inUse++
		close(turn)
	}
}

// outcome learns from an answer. A request that began before the last cut says nothing
// about what holds since.
func (g *gate) outcome(stamp int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case IsThrottled(err):
		if stamp == g.cuts {
			g.cutLocked()
		}
	case err == nil:
		g.growLocked()
	}
}

func (g *gate) cutLocked() {
	g.cuts++
	if g.limit == 1 {
		g.pause = min(max(2*g.pause, g.firstPause), g.maxPause)
	}
	g.limit = max(1, g.limit/2)
}

func (g *gate) growLocked() {
	if g.pause > 0 {
		if g.pause /= 2; g.pause < g.firstPause {
			g.pause = 0
		}
		return
	}
	g.limit = min(g.max, g.limit+1/g.limit)
	g.wakeLocked()
}
