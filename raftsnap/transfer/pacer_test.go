package transfer

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// move waits for n bytes and returns how long that took.
func move(t *testing.T, p *Pacer, n int) time.Duration {
	t.Helper()
	began := time.Now()
	if err := p.Work().Wait(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	return time.Since(began)
}

// rateOf returns how many bytes per second are granted now, 0 for no limit.
func rateOf(p *Pacer) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if math.IsInf(p.rate, 1) {
		return 0
	}
	return int64(p.rate)
}

// near tells whether got is want to one part in twenty.
func near(got, want float64) bool { return math.Abs(got-want) <= want/20 }

// A limit is kept to, with one transfer and with several (cockroach#58920: a limiter that
// overshot).
func TestPacerLimit(t *testing.T) {
	for _, limit := range []int64{1 << 20, 10 << 20, 123_456_789} {
		synctest.Test(t, func(t *testing.T) {
			p := NewPacer(&PacerOptions{Limit: limit})
			total := 20 * int(limit)
			began := time.Now()
			var wg sync.WaitGroup
			for range 5 {
				wg.Go(func() {
					for moved := 0; moved < total/5; moved += 100_000 {
						move(t, p, 100_000)
					}
				})
			}
			wg.Wait()
			if rate := float64(total) / time.Since(began).Seconds(); !near(rate, float64(limit)) {
				t.Errorf("rate %.0f, limit %d", rate, limit)
			}
		})
	}
}

// Bytes that were not used for a while are not made up for.
func TestPacerNoBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPacer(&PacerOptions{Limit: 1 << 20})
		move(t, p, 1<<20)
		_ = sleep(t.Context(), time.Hour)
		if d := move(t, p, 10<<20); !near(d.Seconds(), 10) {
			t.Errorf("10 s worth of bytes took %v after a pause", d)
		}
	})
}

// Without a limit and without a log that syncs, nothing waits.
func TestPacerUnlimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPacer(nil)
		if d := move(t, p, math.MaxInt32); d != 0 || rateOf(p) != 0 {
			t.Errorf("waited %v at rate %d", d, rateOf(p))
		}
	})
}

func TestPacerCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPacer(&PacerOptions{Limit: 1})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.Work().Wait(ctx, 1<<30); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if err := NewPacer(nil).Work().Wait(ctx, 1); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

// disk is a log's disk whose fsyncs take longer the more bytes per second a transfer moves:
// base up to its capacity, and more beyond.
type disk struct {
	p        *Pacer
	base     time.Duration
	capacity float64
	write    int64 // bytes of each write of the log, every 2 ms
	lowest   int64 // rate seen, 0 for none
}

// run lets the log sync every 2 ms for a while, while transfers move bytes if they do, and
// returns how long the fsyncs took and how many bytes were moved.
func (d *disk) run(t *testing.T, transfer bool, length time.Duration) (fsyncs []time.Duration, bytes int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	recent, total := 0, 0
	if transfer {
		for range 4 {
			wg.Go(func() {
				for d.p.Work().Wait(ctx, 64<<10) == nil {
					mu.Lock()
					recent += 64 << 10
					total += 64 << 10
					mu.Unlock()
					_ = sleep(ctx, time.Millisecond) // the network: 250 MiB/s
				}
			})
		}
	}
	wg.Go(func() {
		rate := 0.0
		for n := 0; ctx.Err() == nil; n++ {
			took := d.base + time.Duration(n%7)*d.base/20
			if rate > d.capacity {
				took = time.Duration(float64(d.base) * (1 + 4*rate/d.capacity))
			}
			fsyncs = append(fsyncs, took)
			d.p.Observe(took, d.write)
			if r := rateOf(d.p); r > 0 && (d.lowest == 0 || r < d.lowest) {
				d.lowest = r
			}
			_ = sleep(t.Context(), 2*time.Millisecond)
			mu.Lock()
			rate = 0.97*rate + 0.03*float64(recent)/0.002
			recent = 0
			mu.Unlock()
		}
	})
	wg.Wait()
	return fsyncs, total
}

// The pacer finds about what the disk can do beside the log, hurts the log seldom, and goes
// as fast as the disk lets it.
func TestPacerYields(t *testing.T) {
	for _, capacity := range []float64{5 << 20, 40 << 20, 150 << 20} {
		synctest.Test(t, func(t *testing.T) {
			d := &disk{p: NewPacer(nil), base: time.Millisecond, capacity: capacity}
			d.run(t, false, 5*time.Second)
			d.run(t, true, 20*time.Second) // finds its rate
			fsyncs, bytes := d.run(t, true, 20*time.Second)
			slow := 0
			for _, f := range fsyncs {
				if f > 2*d.base {
					slow++
				}
			}
			rate := float64(bytes) / 20
			if share := float64(slow) / float64(len(fsyncs)); share > 0.05 {
				t.Errorf("capacity %.0f: %.1f %% of the fsyncs were slow", capacity, 100*share)
			}
			if rate < 0.4*capacity {
				t.Errorf("capacity %.0f: only %.0f bytes/s were moved", capacity, rate)
			}
		})
	}
}

// A log that is slow by itself does not hold a transfer for ever: the rate never goes below
// the floor, and what is slow for long becomes what is normal.
func TestPacerSlowLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{p: NewPacer(&PacerOptions{Floor: 2 << 20}), base: time.Millisecond, capacity: math.Inf(1)}
		d.run(t, false, 5*time.Second)
		d.base = 10 * time.Millisecond
		d.run(t, true, time.Second)
		if d.lowest != 2<<20 {
			t.Errorf("the rate went to %d, want it at the floor of %d", d.lowest, 2<<20)
		}
		if _, bytes := d.run(t, true, 20*time.Second); bytes < 1<<30 {
			t.Errorf("%d bytes in 20 s: the pacer blames itself for a log that is slow anyway", bytes)
		}
	})
}

// A log that somebody else slows down is not left behind: its snapshots keep up with it.
func TestPacerKeepsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{p: NewPacer(nil), base: time.Millisecond, capacity: 1, write: 10 << 10}
		d.run(t, false, 5*time.Second)
		_, bytes := d.run(t, true, 10*time.Second)
		if written := 10 * 500 * d.write; int64(bytes) < 2*written {
			t.Errorf("%d bytes were moved while the log wrote %d", bytes, written)
		}
		_ = sleep(t.Context(), time.Minute)
		d.run(t, false, time.Second)
		if got := d.p.quiet.p99(); got > 2*d.base {
			t.Errorf("baseline %v after a quiet second, want about %v", got, d.base)
		}
	})
}

// Without ever having seen the log undisturbed, the pacer still works, and takes what it
// saw for normal only until it knows better.
func TestPacerNoBaseline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{p: NewPacer(nil), base: time.Millisecond, capacity: 20 << 20}
		if err := d.p.Work().Wait(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		if _, bytes := d.run(t, true, 10*time.Second); bytes < 10<<20 {
			t.Errorf("%d bytes in 10 s", bytes)
		}
		_ = sleep(t.Context(), time.Minute)
		d.run(t, false, time.Second)
		if got := d.p.quiet.p99(); got > 2*d.base {
			t.Errorf("baseline %v after a quiet second, want about %v", got, d.base)
		}
	})
}

// Steady pacing minds the limit only.
func TestPacerSteady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{p: NewPacer(&PacerOptions{Limit: 50 << 20, Steady: true}), base: time.Millisecond, capacity: 1 << 20}
		d.run(t, false, time.Second)
		_, bytes := d.run(t, true, 20*time.Second)
		if !near(float64(bytes)/20, 50<<20) {
			t.Errorf("%d bytes in 20 s at 50 MiB/s", bytes)
		}
	})
}

func TestPercentile(t *testing.T) {
	var all []time.Duration
	if percentile(all) != 0 {
		t.Error("percentile of nothing")
	}
	for i := range 200 {
		all = append(all, time.Duration(200-i))
	}
	if got := percentile(all); got != 198 {
		t.Errorf("p99 of 1..200 is %d, want 198", got)
	}
	var r ring
	for i := range 3 * keepQuiet {
		r.add(time.Duration(i))
	}
	if len(r.all) != keepQuiet || r.p99() < 2*keepQuiet {
		t.Errorf("ring holds %d, p99 %d", len(r.all), r.p99())
	}
}
