package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// group is a group in memory: the logs of tasks by the rules of P13, and what goes wrong.
type group struct {
	mu      sync.Mutex
	logs    map[cpwire.Task][]cpwire.Entry
	appends int
	// fault is asked before each append and after it was made. An error is the answer.
	fault func(n int, after bool) error
	noise func(n int) bool // somebody else appends before append n
	blind error            // of history
}

func newGroup() *group { return &group{logs: map[cpwire.Task][]cpwire.Entry{}} }

func (g *group) head(_ context.Context, task cpwire.Task) (position, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	log := g.logs[task]
	if len(log) == 0 {
		return position{}, nil
	}
	return position{log[len(log)-1].Slot, log[len(log)-1].Digest}, nil
}

func (g *group) append(_ context.Context, a cpwire.Append) (cpwire.Result, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.appends++
	if g.fault != nil {
		if err := g.fault(g.appends, false); err != nil {
			return cpwire.Result{}, err
		}
	}
	if g.noise != nil && g.noise(g.appends) {
		g.add(cpwire.Append{Task: a.Task, Body: []byte(fmt.Sprint("noise", g.appends))})
	}
	log := g.logs[a.Task]
	var head position
	if n := len(log); n > 0 {
		head = position{log[n-1].Slot, log[n-1].Digest}
	}
	switch {
	case a.Slot <= head.slot:
		return cpwire.Result{Status: cpwire.Conflict, Slot: head.slot, Digest: head.digest}, nil
	case a.Slot != head.slot+1 || a.Prev != head.digest:
		return cpwire.Result{Status: cpwire.NotOnHead, Slot: head.slot, Digest: head.digest}, nil
	}
	e := g.add(a)
	if g.fault != nil {
		if err := g.fault(g.appends, true); err != nil {
			return cpwire.Result{}, err
		}
	}
	return cpwire.Result{Status: cpwire.Appended, Slot: e.Slot, Digest: e.Digest}, nil
}

func (g *group) add(a cpwire.Append) cpwire.Entry {
	log := g.logs[a.Task]
	e := cpwire.Entry{Slot: uint64(len(log)) + 1, Digest: sha256.Sum256(a.Body), Nonce: a.Nonce, Body: a.Body}
	g.logs[a.Task] = append(log, e)
	return e
}

// history keeps as little as a real group does.
func (g *group) history(_ context.Context, task cpwire.Task, after uint64) ([]cpwire.Entry, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.blind != nil {
		return nil, g.blind
	}
	log := g.logs[task]
	if len(log) == 0 {
		return nil, fs.ErrNotExist
	}
	var kept []cpwire.Entry
	for i, e := range log {
		if age := len(log) - i; age > cpwire.KeptRecords || e.Slot <= after {
			continue
		} else if age > cpwire.KeptBodies {
			e.Body = nil
		}
		kept = append(kept, e)
	}
	return kept, nil
}

func load(g benchLog) *bench {
	return &bench{log: g, tasks: 7, commits: 100, bytes: 50, clients: 3, verify: true, note: func(string, ...any) {}}
}

func runLoad(t *testing.T, b *bench) *benchReport {
	t.Helper()
	r, err := b.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// All commits are made, spread over the tasks, and a second run goes on from there.
func TestLoadGoesOn(t *testing.T) {
	g := newGroup()
	for run := 1; run <= 2; run++ {
		r := runLoad(t, load(g))
		if r.Commits != 100 || r.Errors != 0 || r.Lost == nil || *r.Lost != 0 || r.PerSecond <= 0 || r.Max < r.P99 || r.P99 < r.P50 {
			t.Errorf("run %d: %+v", run, r)
		}
		for i := range 7 {
			want := 14 * run
			if i < 2 {
				want += run
			}
			if n := len(g.logs[cpwire.Task{Job: cpwire.BenchJob, Name: fmt.Sprint("t", i)}]); n != want {
				t.Errorf("run %d: task %d has %d entries, want %d", run, i, n, want)
			}
		}
	}
	b := load(g)
	b.verify, b.clients, b.tasks = false, 50, 3
	if r := runLoad(t, b); r.Commits != 100 || r.Lost != nil {
		t.Errorf("more clients than tasks: %+v", r)
	}
}

// Somebody else may append to the same logs; that costs tries, not commits.
func TestLoadBesideOthers(t *testing.T) {
	g := newGroup()
	g.noise = func(n int) bool { return n%3 == 0 }
	if r := runLoad(t, load(g)); r.Commits != 100 || r.Errors != 0 || *r.Lost != 0 {
		t.Errorf("%+v", r)
	}
	g.noise = func(int) bool { return true }
	r := runLoad(t, load(g))
	if r.Commits != 0 || r.Errors != 100 || !strings.Contains(r.cause.Error(), "another writer") {
		t.Errorf("%+v: %v", r, r.cause)
	}
}

// A commit without an answer is an error, whether or not it is in the log, and the next
// one finds the head again.
func TestLoadErrors(t *testing.T) {
	for _, after := range []bool{false, true} {
		g := newGroup()
		g.fault = func(n int, a bool) error {
			if n%10 == 0 && a == after {
				return errors.New("no answer")
			}
			return nil
		}
		r := runLoad(t, load(g))
		if r.Commits != 90 || r.Errors != 10 || *r.Lost != 0 || r.cause == nil {
			t.Errorf("after %t: %+v", after, r)
		}
	}
}

// A group that is gone is not asked for every commit that is left.
func TestLoadGivesUp(t *testing.T) {
	g := newGroup()
	g.fault = func(n int, _ bool) error {
		if n > 20 {
			return errors.New("gone")
		}
		return nil
	}
	r := runLoad(t, load(g))
	if r.Commits != 20 || r.Errors != 80 || g.appends != 20+3*giveUpAfter {
		t.Errorf("%d appends: %+v", g.appends, r)
	}
}

// What was acknowledged and is gone, or is another entry, is found: entries that vanish,
// other digests, other nonces, other bodies, and whole logs.
func TestLoadFindsLoss(t *testing.T) {
	task := cpwire.Task{Job: cpwire.BenchJob, Name: "t0"}
	for name, damage := range map[string]func(g *group) int64{
		"gone":   func(g *group) int64 { g.logs[task] = g.logs[task][:5]; return 10 },
		"digest": func(g *group) int64 { g.logs[task][3].Digest[0] ^= 1; return 1 },
		"nonce":  func(g *group) int64 { g.logs[task][3].Nonce[0] ^= 1; return 1 },
		"body": func(g *group) int64 {
			g.logs[task][3].Body = []byte(strings.ToUpper(string(g.logs[task][3].Body)) + "x")
			return 1
		},
		"log": func(g *group) int64 { delete(g.logs, task); return 15 },
	} {
		g := newGroup()
		b := load(&damaged{group: g, harm: damage})
		r := runLoad(t, b)
		if r.Commits != 100 || *r.Lost != b.log.(*damaged).want {
			t.Errorf("%s: %d lost, want %d", name, *r.Lost, b.log.(*damaged).want)
		}
	}
}

// damaged loses something before the first thing is read back.
type damaged struct {
	*group
	once sync.Once
	harm func(g *group) int64
	want int64
}

func (d *damaged) history(ctx context.Context, task cpwire.Task, after uint64) ([]cpwire.Entry, error) {
	d.once.Do(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.want = d.harm(d.group)
	})
	return d.group.history(ctx, task, after)
}

// More commits of a task than the group keeps are read back in time, and what cannot be
// read back at all is a failure and not a loss.
func TestLoadReadsBackInTime(t *testing.T) {
	b := load(newGroup())
	b.tasks, b.clients, b.commits = 1, 1, 3*cpwire.KeptRecords
	if r := runLoad(t, b); int(r.Commits) != b.commits || *r.Lost != 0 {
		t.Errorf("%+v", r)
	}
	g := newGroup()
	g.blind = errors.New("no member answers")
	if r, err := load(g).run(t.Context()); err == nil || !strings.Contains(err.Error(), "read back: no member answers") {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestLoadInterrupted(t *testing.T) {
	g := newGroup()
	ctx, cancel := context.WithCancelCause(t.Context())
	g.fault = func(n int, after bool) error {
		if n == 20 && after {
			cancel(errInterrupted)
		}
		return nil
	}
	if r, err := load(g).run(ctx); !errors.Is(err, errInterrupted) {
		t.Errorf("%+v, %v", r, err)
	}
}

// A long run tells how far it is.
func TestLoadTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var told []string
		g := newGroup()
		b := load(&slow{g})
		b.tasks, b.clients, b.commits = 1, 1, 3
		b.note = func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, fmt.Sprintf(format, args...))
		}
		r := runLoad(t, b)
		if got := strings.Join(told, "; "); got != "1 of 3 commits; 2 of 3 commits" {
			t.Errorf("told %q", got)
		}
		if r.Seconds != 12 || r.P50 < 3900 || r.P50 > 4000 || r.Max != 4000 || r.PerSecond != 0.25 {
			t.Errorf("%+v", r)
		}
	})
}

// slow answers after four seconds.
type slow struct{ *group }

func (s *slow) append(ctx context.Context, a cpwire.Append) (cpwire.Result, error) {
	<-time.After(4 * time.Second)
	return s.group.append(ctx, a)
}

// Values differ from commit to commit and can be made again.
func TestBenchValues(t *testing.T) {
	b := load(newGroup())
	one, other := &benchTask{id: cpwire.Task{Name: "t1"}}, &benchTask{id: cpwire.Task{Name: "t2"}}
	seen := map[string]bool{}
	for _, n := range []int{1, 7, 8, 9, 2000} {
		b.bytes = n
		if v := b.value(one, 1); len(v) != n || string(v) != string(b.value(one, 1)) {
			t.Errorf("%d bytes: got %d", n, len(v))
		}
	}
	for _, v := range [][]byte{b.value(one, 1), b.value(one, 2), b.value(other, 1)} {
		seen[string(v)] = true
	}
	if b.seed++; len(seen) != 3 || seen[string(b.value(one, 1))] {
		t.Errorf("%d different values of 3", len(seen))
	}
}

// A bucket is never more than 2 % wide, and percentiles are of what was observed.
func TestLatencies(t *testing.T) {
	for us := uint64(0); us < 1<<55; us = us*17/16 + 1 {
		end := bucketEnd(bucketOf(us))
		if end < us || float64(end-us) > 0.016*float64(us) || bucketOf(end) != bucketOf(us) || bucketOf(end+1) != bucketOf(us)+1 {
			t.Fatalf("%d us is in bucket %d, which ends at %d", us, bucketOf(us), end)
		}
	}
	var a, b latencies
	if a.percentile(50) != 0 || a.percentile(99) != 0 {
		t.Error("percentiles of nothing")
	}
	for i := 1; i <= 100; i++ {
		l := &a
		if i%2 == 0 {
			l = &b
		}
		l.observe(time.Duration(i) * time.Microsecond)
	}
	a.observe(time.Hour)
	a.add(&b)
	for p, want := range map[float64]time.Duration{0: time.Microsecond, 1: time.Microsecond, 50: 51 * time.Microsecond, 99: 100 * time.Microsecond, 100: time.Hour} {
		if got := a.percentile(p); got != want {
			t.Errorf("p%v is %s, want %s", p, got, want)
		}
	}
	if a.n != 101 || a.max != time.Hour {
		t.Errorf("%d observations, max %s", a.n, a.max)
	}
	a.observe(-1)
	a.observe(1<<63 - 1)
}
