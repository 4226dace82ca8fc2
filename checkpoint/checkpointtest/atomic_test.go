package checkpointtest_test

import (
	"context"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/checkpointtest"
)

// The suite fits a driver that compares the head in one step and keeps 64 bodies (P13),
// as replicated ones do.
func TestSuiteOnAtomicDriver(t *testing.T) {
	checkpointtest.Run(t, func(*testing.T) checkpoint.Driver {
		return &atomicDriver{tasks: map[checkpoint.TaskID]*history{}}
	}, &checkpointtest.Options{
		ComparesHead: true, KeepsBodies: kept, StampsTime: true, Writers: 6, Appends: 30,
		Forward: func(_ *testing.T, d checkpoint.Driver, by time.Duration) { d.(*atomicDriver).forward(by) },
	})
}

const kept = 64

// atomicDriver is the least that P13 asks for.
type atomicDriver struct {
	mu    sync.Mutex
	ahead time.Duration
	tasks map[checkpoint.TaskID]*history
}

type history struct {
	entries []*checkpoint.Entry // the newest ones
	results map[checkpoint.Nonce]*checkpoint.Entry
}

func (d *atomicDriver) forward(by time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ahead += by
}

func (d *atomicDriver) Info(ctx context.Context) (checkpoint.Info, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return checkpoint.Info{ID: "atomic"}, ctx.Err()
}

func (d *atomicDriver) Head(ctx context.Context, task checkpoint.TaskID) (*checkpoint.Entry, error) {
	return d.find(ctx, task, 0)
}

func (d *atomicDriver) Get(ctx context.Context, task checkpoint.TaskID, slot uint64) (*checkpoint.Entry, error) {
	return d.find(ctx, task, slot)
}

// find returns a copy of an entry; slot 0 is the newest.
func (d *atomicDriver) find(ctx context.Context, task checkpoint.TaskID, slot uint64) (*checkpoint.Entry, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if h := d.tasks[task]; h != nil {
		for _, e := range slices.Backward(h.entries) {
			if slot == 0 || e.Slot == slot {
				c := *e
				return &c, nil
			}
		}
	}
	return nil, fs.ErrNotExist
}

func (d *atomicDriver) Append(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := task.Validate(); err != nil {
		return err
	}
	if _, err := checkpoint.Encode(e); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	h := d.tasks[task]
	if h == nil {
		h = &history{results: map[checkpoint.Nonce]*checkpoint.Entry{}}
	}
	if known := h.results[e.Nonce]; known != nil {
		e.Time, e.Digest = known.Time, known.Digest
		return nil
	}

	if n := len(h.entries); n == 0 && e.Slot != 1 || n > 0 && (e.Slot != h.entries[n-1].Slot+1 || e.Prev != h.entries[n-1].Digest) {
		return fmt.Errorf("%w: slot %d", checkpoint.ErrConflict, e.Slot)
	}
	return d.applyLocked(task, h, e)
}

// applyLocked stamps the entry as the store's leader would.
func (d *atomicDriver) applyLocked(task checkpoint.TaskID, h *history, e *checkpoint.Entry) error {
	now := time.Now().Add(d.ahead).UTC()
	e.Time = now.Round(0)
	if n := len(h.entries); n > 0 && e.Time.Before(h.entries[n-1].Time) {
		e.Time = h.entries[n-1].Time
	}
	if _, err := checkpoint.Encode(e); err != nil {
		return err
	}
	c := *e
	c.Stored = now
	h.entries = append(h.entries, &c)
	h.entries = h.entries[max(0, len(h.entries)-kept):]
	h.results[e.Nonce] = &c
	d.tasks[task] = h
	return nil
}

func (d *atomicDriver) Tasks(context.Context) iter.Seq2[checkpoint.TaskID, error] {
	d.mu.Lock()
	tasks := slices.Collect(maps.Keys(d.tasks))
	d.mu.Unlock()
	return func(yield func(checkpoint.TaskID, error) bool) {
		for _, task := range tasks {
			if !yield(task, nil) {
				return
			}
		}
	}
}

func (d *atomicDriver) Trim(ctx context.Context, _ checkpoint.TaskID) error { return ctx.Err() }

func (d *atomicDriver) Close() error { return nil }
