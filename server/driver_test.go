package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/checkpointtest"
	"github.com/snapferry/snapferry/checkpoint/raftcp"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// The conformance suite over a group in this process, whose clock it can move.
func TestDriver(t *testing.T) {
	runSuite(t, checkpointtest.Options{}, func(*group) {})
}

// The same while connections break before and after a request was done, outcomes are
// unknown and the leadership moves: no entry is in a log twice, none is lost (P13).
func TestDriverWithFaults(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			runSuite(t, checkpointtest.Options{Writers: 3, Appends: 6}, func(g *group) { g.flaky(seed) })
		})
	}
}

func runSuite(t *testing.T, opts checkpointtest.Options, prepare func(*group)) {
	groups := map[checkpoint.Driver]*group{}
	opts.ComparesHead, opts.KeepsBodies = true, cpwire.KeptBodies
	opts.Forward = func(_ *testing.T, d checkpoint.Driver, by time.Duration) { groups[d].forward(by) }
	checkpointtest.Run(t, func(t *testing.T) checkpoint.Driver {
		g := newGroup(t, 3)
		d, err := raftcp.Open(g.urls(), nil)
		if err != nil {
			t.Fatal(err)
		}
		prepare(g)
		groups[d] = g
		return d
	}, &opts)
}

func driver(t *testing.T, g *group) *raftcp.Driver {
	t.Helper()
	d, err := raftcp.Open(g.urls(), &raftcp.Options{Patience: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

var p7 = checkpoint.TaskID{Job: "orders", Task: "p7"}

func claim() *checkpoint.Entry {
	return &checkpoint.Entry{Kind: checkpoint.Claim, Slot: 1, Nonce: checkpoint.NewNonce(), Epoch: 1, Time: time.Now().UTC()}
}

func follow(e *checkpoint.Entry) *checkpoint.Entry {
	next := *e
	next.Kind, next.Slot, next.Prev, next.Nonce, next.Digest = checkpoint.Commit, e.Slot+1, e.Digest, checkpoint.NewNonce(), ""
	return &next
}

// P3.5: what an error says about the entry is true.
func TestDriverErrors(t *testing.T) {
	cases := []struct {
		name     string
		breakNet func(g *group)
		want     error
		landed   bool
	}{
		{"no leader", func(g *group) { g.lead(-1) }, checkpoint.ErrNoEffect, false},
		{"answers lost", func(g *group) {
			for _, m := range g.members {
				m.breakNet(loseAnswer)
			}
		}, checkpoint.ErrUnknown, true},
		{"connections end", func(g *group) {
			for _, m := range g.members {
				m.breakNet(refuse)
			}
		}, checkpoint.ErrUnknown, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g := newGroup(t, 3)
			d := driver(t, g)
			c.breakNet(g)
			e := claim()
			if err := d.Append(t.Context(), p7, e); !errors.Is(err, c.want) {
				t.Fatalf("append: %v, want %v", err, c.want)
			}
			g.lead(1)
			for _, m := range g.members {
				m.breakNet(nil)
			}
			if _, err := d.Head(t.Context(), p7); (err == nil) != c.landed {
				t.Errorf("head: %v, want an entry %v", err, c.landed)
			}
			if err := d.Append(t.Context(), p7, e); err != nil {
				t.Errorf("append again: %v", err)
			}
			if h, err := d.Head(t.Context(), p7); err != nil || h.Digest != e.Digest || !h.Stored.Equal(e.Stored) || h.Stored.IsZero() {
				t.Errorf("head %+v, %v, want %+v", h, err, e)
			}
		})
	}
}

// A group without a member that answers: nothing was done, and both sides say so.
func TestDriverNobodyThere(t *testing.T) {
	d, err := raftcp.Open([]string{"127.0.0.1:1"}, &raftcp.Options{Patience: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := d.Append(t.Context(), p7, claim()); !errors.Is(err, checkpoint.ErrNoEffect) || errors.Is(err, checkpoint.ErrUnknown) {
		t.Errorf("append: %v", err)
	}
	if _, err := d.Head(t.Context(), p7); err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, checkpoint.ErrUnknown) {
		t.Errorf("head: %v", err)
	}
	if _, err := d.Info(t.Context()); err == nil {
		t.Error("info of nobody")
	}
}

// An entry that comes back after 1,024 others is fenced: nobody can tell what became of it.
func TestDriverForgotten(t *testing.T) {
	g := newGroup(t, 1)
	d := driver(t, g)
	first := claim()
	last := first
	for range cpwire.KeptRecords + 1 {
		if err := d.Append(t.Context(), p7, last); err != nil {
			t.Fatal(err)
		}
		last = follow(last)
	}
	if err := d.Append(t.Context(), p7, first); !errors.Is(err, checkpoint.ErrFenced) {
		t.Errorf("the first entry again: %v", err)
	}
	twin := *last
	twin.Nonce = checkpoint.NewNonce()
	if err := d.Append(t.Context(), p7, last); err != nil {
		t.Fatal(err)
	}
	if err := d.Append(t.Context(), p7, &twin); !errors.Is(err, checkpoint.ErrConflict) {
		t.Errorf("another entry at that slot: %v", err)
	}
	other := *last
	other.Body = []byte(`"another"`)
	if err := d.Append(t.Context(), p7, &other); !errors.Is(err, checkpoint.ErrCorrupt) {
		t.Errorf("another entry with that nonce: %v", err)
	}
}

// Logs of measurements are no tasks, and what is no entry is damage.
func TestDriverForeignBodies(t *testing.T) {
	g := newGroup(t, 1)
	d := driver(t, g)
	c := g.client(nil)
	for _, job := range []string{cpwire.BenchJob, "orders"} {
		a := cpwire.Append{Task: cpwire.Task{Job: job, Name: "p7"}, Slot: 1, Nonce: cpwire.Nonce{1}, Body: []byte("opaque")}
		if _, err := c.Append(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	for task, err := range d.Tasks(t.Context()) {
		if err != nil || task != p7 {
			t.Errorf("task %v, %v", task, err)
		}
	}
	if _, err := d.Head(t.Context(), p7); !errors.Is(err, checkpoint.ErrCorrupt) {
		t.Errorf("head that is no entry: %v", err)
	}
}

// Many processes append to few tasks through a net that breaks: each acknowledged entry is
// in its log once.
func TestExactlyOnce(t *testing.T) {
	g := newGroup(t, 3)
	g.flaky(7)
	var mu sync.Mutex
	acked := map[cpwire.Task]map[cpwire.Nonce]uint64{}
	var wg sync.WaitGroup
	for w := range 8 {
		c := g.client(nil)
		task := cpwire.Task{Job: "j", Name: fmt.Sprint("t", w%3)}
		wg.Go(func() {
			for range 25 {
				n, slot, err := appendSomewhere(t.Context(), c, task)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if acked[task] == nil {
					acked[task] = map[cpwire.Nonce]uint64{}
				}
				acked[task][n] = slot
				mu.Unlock()
			}
		})
	}
	wg.Wait()

	c := g.client(nil)
	for task, nonces := range acked {
		h, err := c.History(t.Context(), task, 0, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range h {
			if nonces[e.Nonce] != e.Slot {
				t.Errorf("%v: slot %d is not where it was acknowledged, %d", task, e.Slot, nonces[e.Nonce])
			}
			delete(nonces, e.Nonce)
		}
		if len(nonces) > 0 {
			t.Errorf("%v: %d acknowledged entries are lost", task, len(nonces))
		}
	}
}

// appendSomewhere appends after whatever the head is, trying again when another was first.
func appendSomewhere(ctx context.Context, c *cpwire.Client, task cpwire.Task) (cpwire.Nonce, uint64, error) {
	for {
		head, err := c.HeadRecord(ctx, task)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return cpwire.Nonce{}, 0, err
		}
		a := cpwire.Append{Task: task, Slot: head.Slot + 1, Prev: head.Digest, Nonce: cpwire.Nonce(checkpoint.NewNonce()), Body: []byte("x")}
		r, err := c.Append(ctx, a)
		if err != nil {
			return cpwire.Nonce{}, 0, err
		}
		if r.Status.InLog() {
			return a.Nonce, r.Slot, nil
		}
	}
}
