package transfer

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

const (
	paceSlice  = 256 << 10              // bytes that are granted in one go
	paceStart  = 32 << 20               // bytes per second that a transfer begins with beside a busy log
	paceGrow   = 8                      // by which part of itself the rate grows after a good look
	paceProbe  = 256                    // the same, close to a rate that has hurt
	paceFloor  = 1 << 20                // default of PacerOptions.Floor
	keepUp     = 2                      // how many times the rate of the log is never yielded
	logWindow  = 500 * time.Millisecond // over which the rate of the log is taken
	lookEvery  = 100 * time.Millisecond // between two looks at the fsyncs
	lookFsyncs = 20                     // fsyncs that a look wants, or waits for
	lookMost   = 500 * time.Millisecond // after which it makes do with fewer
	quietAfter = 2 * time.Second        // since a transfer's last byte, until fsyncs count as undisturbed
	keepQuiet  = 1024                   // undisturbed fsyncs that are remembered
	yieldAt    = 2                      // how many times its baseline the p99 may be
	soonSlow   = 2                      // fsyncs over that mark after which it looks at once
	stuckLooks = 20                     // looks at the lowest rate after which the log counts as slow by itself
)

// PacerOptions tunes a Pacer. The zero value of each field means its default.
type PacerOptions struct {
	// Limit is the greatest rate in bytes per second. 0 means none.
	Limit int64
	// Floor is the rate below which yielding never goes, so that a transfer always ends:
	// 1 MiB/s by default, and at most Limit. Nor does it go below twice what the log
	// writes, lest snapshots fall far behind the log, which is cut by them.
	Floor int64
	// Steady turns yielding off: only Limit counts then.
	Steady bool
}

// Pacer decides how fast transfers may go: never faster than its limit, and slower while
// they hurt the log. It watches how long the log's fsyncs take. While their 99th
// percentile is over twice the one measured when no transfer ran, it halves the rate each
// time it looks, down to a floor that the log's own rate raises; otherwise the rate grows
// by steps, small ones where it has hurt before. A log that does not sync needs no
// consideration, and then only the limit counts.
//
// All transfers of a member share one Pacer. Time is the time package's alone.
type Pacer struct {
	limit, floor float64
	steady       bool

	mu      sync.Mutex      // guards what follows
	bucket  *rate.Limiter   // gives at the rate
	rate    float64         // +Inf for as fast as it goes
	hurt    float64         // the rate that hurt last
	used    time.Time       // when a transfer last asked
	synced  time.Time       // when the log last did
	looked  time.Time       // when the rate was last looked at
	settled time.Time       // fsyncs before it still suffer from an earlier rate
	granted float64         // bytes since looked
	busy    []time.Duration // fsyncs since looked
	slow    int             // of those: over the mark
	mark    time.Duration   // what an fsync may take
	stuck   int             // looks in a row at which the floor was too fast
	logged  float64         // bytes the log wrote since logFrom
	logFrom time.Time       // when logged began
	logRate float64         // bytes per second that the log writes, smoothed
	quiet   ring            // fsyncs beside no transfer
	guess   bool            // quiet holds fsyncs beside a transfer, for want of others
}

// NewPacer makes a Pacer. opts may be nil.
func NewPacer(opts *PacerOptions) *Pacer {
	var o PacerOptions
	if opts != nil {
		o = *opts
	}
	p := &Pacer{limit: math.Inf(1), floor: paceFloor, steady: o.Steady}
	if o.Limit > 0 {
		p.limit = float64(o.Limit)
	}
	if o.Floor > 0 {
		p.floor = float64(o.Floor)
	}
	p.floor = min(p.floor, p.limit)
	p.rate = p.limit
	p.bucket = rate.NewLimiter(asLimit(p.rate), paceSlice)
	return p
}

// Observe tells the Pacer how long an fsync of the log took, and of how many bytes. It is
// cheap.
func (p *Pacer) Observe(fsync time.Duration, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.synced = now
	p.countLocked(now, bytes)
	if now.Sub(p.used) >= quietAfter {
		if p.guess {
			p.quiet, p.guess = ring{}, false
		}
		p.quiet.add(fsync)
		return
	}
	if p.steady || now.Before(p.settled) {
		return
	}
	p.busy = append(p.busy, fsync)
	if p.mark > 0 && fsync > p.mark {
		p.slow++
	}
	p.lookLocked(now)
}

// countLocked measures what the log writes.
func (p *Pacer) countLocked(now time.Time, bytes int64) {
	p.logged += float64(bytes)
	since := now.Sub(p.logFrom)
	if since < logWindow {
		return
	}
	p.logRate = (p.logRate + p.logged/since.Seconds()) / 2
	p.logged, p.logFrom = 0, now
}

// lowestLocked is the rate that yielding ends at.
func (p *Pacer) lowestLocked() float64 {
	return min(p.limit, max(p.floor, keepUp*p.logRate))
}

// Work returns the hook that makes transfers wait for their turn. It may be used by any
// number of them at once.
func (p *Pacer) Work() *snapstore.Work { return &snapstore.Work{Wait: p.wait} }

// wait returns when bytes more may be moved. It takes them by slices, so that a change of
// the rate also concerns who waits already.
func (p *Pacer) wait(ctx context.Context, bytes int) error {
	for bytes > 0 {
		n := min(bytes, paceSlice)
		if d := p.reserve(n); d > 0 {
			if err := sleep(ctx, d); err != nil {
				return err
			}
		}
		bytes -= n
	}
	return ctx.Err()
}

// reserve takes n bytes from the bucket and returns how long to wait for them.
func (p *Pacer) reserve(n int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if now.Sub(p.used) >= quietAfter {
		p.beginLocked(now)
	}
	p.used = now
	p.lookLocked(now)
	p.granted += float64(n)
	return p.bucket.ReserveN(now, n).DelayFrom(now)
}

// beginLocked starts a transfer after a pause: with care where the log is in use.
func (p *Pacer) beginLocked(now time.Time) {
	start := p.limit
	if now.Sub(p.synced) < quietAfter && !p.steady {
		start = min(p.limit, max(paceStart, p.floor))
	}
	p.hurt, p.stuck, p.settled = 0, 0, now
	p.setLocked(now, start)
	// What the bucket has gathered would go at once, and whoever got it would take the limit
	// for a high one and ask for more at a time than comes within any patience.
	p.bucket.ReserveN(now, int(p.bucket.TokensAt(now)))
	p.startLocked(now)
}

// startLocked begins to gather for the next look.
func (p *Pacer) startLocked(now time.Time) {
	p.looked, p.granted, p.busy, p.slow = now, 0, p.busy[:0], 0
	p.mark = yieldAt * p.quiet.p99()
}

// dueLocked tells whether enough was seen for a look.
func (p *Pacer) dueLocked(now time.Time) bool {
	since := now.Sub(p.looked)
	switch {
	case p.steady || now.Before(p.settled):
		return false
	case p.slow >= soonSlow:
		return since >= lookEvery/5
	case len(p.busy) >= lookFsyncs:
		return since >= lookEvery
	}
	return since >= lookMost
}

// lookLocked adapts the rate when it is time to.
func (p *Pacer) lookLocked(now time.Time) {
	if !p.dueLocked(now) {
		return
	}
	switch {
	case len(p.busy) == 0:
		p.setLocked(now, p.limit)
	case p.mark == 0:
		// The log was never seen undisturbed: what it is like now must do for a while.
		p.guess = true
		p.adoptLocked()
	case percentile(p.busy) > p.mark:
		p.yieldLocked(now)
	default:
		p.growLocked(now)
	}
	p.startLocked(now)
}

// yieldLocked halves the rate. What was moved counts, and not a rate that nothing has made
// use of.
func (p *Pacer) yieldLocked(now time.Time) {
	lowest := p.lowestLocked()
	if p.rate <= lowest {
		p.setLocked(now, lowest)
		// Less would not help, or leave snapshots behind: what the log is like now must
		// do, until it is seen undisturbed again.
		if p.stuck++; p.stuck >= stuckLooks {
			p.guess = true
			p.adoptLocked()
		}
		return
	}
	moved := p.granted / max(now.Sub(p.looked).Seconds(), 1e-3)
	p.hurt = min(p.rate, max(moved, lowest))
	p.setLocked(now, max(lowest, p.hurt/2))
	p.settled = now.Add(lookEvery)
}

// growLocked lets the rate grow: quickly where that has done no harm before, slowly where it
// has, and quickly again when it turns out that the harm has passed.
func (p *Pacer) growLocked(now time.Time) {
	step := p.rate / paceGrow
	switch {
	case p.rate > p.hurt*11/10:
		p.hurt = 0
	case p.rate > p.hurt*3/4:
		step = p.rate / paceProbe
	}
	p.stuck = 0
	p.setLocked(now, min(p.limit, p.rate+step))
}

// adoptLocked takes the fsyncs just seen for what is normal.
func (p *Pacer) adoptLocked() {
	for _, d := range p.busy {
		p.quiet.add(d)
	}
}

func (p *Pacer) setLocked(now time.Time, r float64) {
	if r == p.rate {
		return
	}
	p.rate = r
	p.bucket.SetLimitAt(now, asLimit(r))
}

func asLimit(r float64) rate.Limit {
	if math.IsInf(r, 1) {
		return rate.Inf
	}
	return rate.Limit(r)
}

// ring remembers the last durations.
type ring struct {
	all  []time.Duration
	next int
}

func (r *ring) add(d time.Duration) {
	if len(r.all) < keepQuiet {
		r.all = append(r.all, d)
		return
	}
	r.all[r.next] = d
	r.next = (r.next + 1) % keepQuiet
}

func (r *ring) p99() time.Duration { return percentile(r.all) }

// percentile returns the 99th percentile, 0 of nothing.
func percentile(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[(len(sorted)*99+99)/100-1]
}
