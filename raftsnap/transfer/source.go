package transfer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// maxLost is how often in a row a lease may be lost without a chunk having come.
const maxLost = 3

// source is what a transfer knows of one member. Fields change under the board's lock.
type source struct {
	Source
	leased  bool
	active  int          // workers that work
	allowed int          // bound of active, lowered when the source is busy
	rest    time.Time    // not to be bothered before
	heard   atomic.Int64 // when a byte came last, in nanoseconds of Unix time

	fails    int // in a row
	lost     int // leases in a row
	lastFail time.Time
	trouble  time.Time         // when the first request began that failed since a byte came
	out      *protocol.Failure // why it is given up

	rate        float64 // bytes per second of one request
	bytes       atomic.Int64
	chunks, bad int64
}

func newSource(s Source) *source { return &source{Source: s, allowed: 1 << 20} }

// hear notes that bytes came. It needs no lock.
func (s *source) hear(n int64) {
	s.heard.Store(time.Now().UnixNano())
	s.bytes.Add(n)
}

// prove notes that a right chunk came.
func (s *source) prove() {
	s.chunks++
	s.fails, s.lost = 0, 0
}

// silent tells for how long the source has given nothing although it was asked: since the
// last byte, or since it was asked for the first time after that. The request that has just
// failed began then.
func (s *source) silent(began time.Time) time.Duration {
	heard := time.Unix(0, s.heard.Load())
	if heard.After(s.trouble) {
		s.trouble = began
	}
	if heard.After(s.trouble) {
		return time.Since(heard)
	}
	return time.Since(s.trouble)
}

// measure learns from a request that has ended how quick the source is.
func (s *source) measure(k *task) {
	if got := k.got.Load(); got > 0 && !k.began.IsZero() {
		rate := float64(got) / max(time.Since(k.began).Seconds(), 1e-6)
		if s.rate > 0 {
			rate = (3*s.rate + rate) / 4
		}
		s.rate = rate
	}
}

// expect guesses how long the source needs for n bytes.
func (s *source) expect(n int64) time.Duration {
	if s.rate == 0 {
		return 0
	}
	return time.Duration(float64(n) / s.rate * float64(time.Second))
}

// dropped gives the source up.
func (s *source) dropped(kind protocol.FailureKind, format string, args ...any) {
	if s.out == nil {
		s.out = &protocol.Failure{Kind: kind, Peer: s.ID, Text: fmt.Sprintf(format, args...)}
	}
}

// failed notes that a request which began then has failed. Only a source that keeps
// failing is given up; several requests that fail together count once.
func (s *source) failed(err error, began time.Time, b *board) {
	now := time.Now()
	silent := s.silent(began) >= b.idle
	refused, _ := errors.AsType[*protocol.Refusal](err)
	busy, _ := errors.AsType[*busyError](err)
	switch {
	case busy != nil:
		s.allowed = max(1, s.active)
		s.rest = now.Add(min(busy.wait, b.idle/4))
		if silent {
			s.dropped(protocol.FailBusy, "%v", err)
		}
		return
	case refused != nil && refused.Kind == protocol.Gone:
		s.leased = false
		if s.lost++; s.lost >= maxLost || isLease(err) {
			s.dropped(protocol.FailGone, "%v", err)
		}
		return
	case refused != nil && refused.Kind != protocol.Closed:
		s.dropped(protocol.FailUnreachable, "%v", err)
		return
	case isCorrupt(err):
		s.dropped(protocol.FailCorrupt, "%v", err)
		return
	case errors.Is(err, errIdle) && silent:
		s.dropped(protocol.FailIdle, "nothing came for %v", b.idle)
		return
	}
	if began.Before(s.lastFail) {
		return
	}
	s.rest = now.Add(b.client.backoff << min(s.fails, 6))
	s.lastFail = now
	if s.fails++; s.fails >= b.client.attempts {
		s.dropped(protocol.FailUnreachable, "%v", err)
	}
}

// leased notes that a source has given a lease.
func (b *board) leased(s *source) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.leased = true
	b.cond.Broadcast()
}

// unleased notes that the lease of a source has run out.
func (b *board) unleased(s *source) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.leased = false
}

// isLeased tells whether a source has given a lease that is not known to be lost.
func (b *board) isLeased(s *source) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return s.leased
}

// holding returns the sources that should be given their lease back.
func (b *board) holding() []*source {
	b.mu.Lock()
	defer b.mu.Unlock()
	var held []*source
	for _, s := range b.sources {
		if s.leased && s.fails == 0 {
			held = append(held, s)
		}
	}
	return held
}

// ready returns a source that may be asked now, or how long to wait for one; neither when
// all are given up.
func (b *board) ready() (*source, time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var wait time.Duration
	for _, s := range b.sources {
		if s.out != nil {
			continue
		}
		d := time.Until(s.rest)
		if d <= 0 {
			return s, 0
		}
		if wait == 0 || d < wait {
			wait = d
		}
	}
	return nil, wait
}

// gravity orders failures by what they tell about the chances of another attempt: that a
// source lies counts most, that it does not have the snapshot any more least.
var gravity = []protocol.FailureKind{protocol.FailCorrupt, protocol.FailIdle, protocol.FailBusy,
	protocol.FailUnreachable, protocol.FailGone}

// why sums up why the sources could not give everything.
func (b *board) why() *protocol.Failure {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []*protocol.Failure
	for _, s := range b.sources {
		if s.out != nil {
			all = append(all, s.out)
		}
	}
	for _, p := range b.orphans {
		for s := range p.bad {
			all = append(all, &protocol.Failure{Kind: protocol.FailCorrupt, Peer: s.ID,
				Text: fmt.Sprintf("gave a wrong chunk of %q at %d", p.Path, p.Offset)})
		}
	}
	if len(all) == 0 {
		return &protocol.Failure{Kind: protocol.FailGone, Text: "no source"}
	}
	rank := func(f *protocol.Failure) int { return slices.Index(gravity, f.Kind) }
	return slices.MinFunc(all, func(x, y *protocol.Failure) int {
		return cmp.Or(cmp.Compare(rank(x), rank(y)), cmp.Compare(x.Peer, y.Peer))
	})
}

// stats sums up.
func (b *board) stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return Stats{Requests: b.requests, Stolen: b.stolen, Sources: sourceStats(b.sources), Others: sourceStats(b.others)}
}

func sourceStats(sources []*source) []SourceStats {
	var out []SourceStats
	for _, s := range sources {
		out = append(out, SourceStats{s.ID, s.bytes.Load(), s.chunks, s.bad, s.out})
	}
	return out
}
