package blobcp_test

import (
	"bytes"
	"context"
	"iter"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/checkpoint/checkpointtest"
)

// The conformance suite in memory and on a file system, with a clock that it can move.
func TestDriver(t *testing.T) {
	stores := map[string]func(t *testing.T) blob.Driver{
		"memory": func(*testing.T) blob.Driver { return memblob.New() },
		"files":  func(t *testing.T) blob.Driver { return openFiles(t, t.TempDir()) },
	}
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			clocks := map[checkpoint.Driver]*clock{}
			checkpointtest.Run(t, func(t *testing.T) checkpoint.Driver {
				c := newClock(open(t))
				d := blobcp.New(blob.New(c, nil), "repo-1")
				clocks[d] = c
				return d
			}, &checkpointtest.Options{
				Forward: func(_ *testing.T, d checkpoint.Driver, by time.Duration) { clocks[d].forward(by) },
			})
		})
	}
}

func openFiles(t *testing.T, dir string) *fsblob.Driver {
	t.Helper()
	d, err := fsblob.Open(dir, &fsblob.Options{Create: true})
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

// clock is a blob driver whose own clock can be moved forward: what was stored before
// keeps its time.
type clock struct {
	blob.Driver
	mu    sync.Mutex
	ahead time.Duration
	put   map[string]time.Duration // how far ahead the clock was when a key was put
}

func newClock(d blob.Driver) *clock { return &clock{Driver: d, put: map[string]time.Duration{}} }

func (c *clock) Unwrap() blob.Driver { return c.Driver }

func (c *clock) forward(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += by
}

func (c *clock) Now(ctx context.Context) (time.Time, error) {
	now, err := c.Driver.(blob.Clock).Now(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	return now.Add(c.ahead), err
}

func (c *clock) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	err := c.Driver.Put(ctx, key, body, opts)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.put[key] = c.ahead
	}
	return err
}

func (c *clock) shift(info blob.Info) blob.Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	info.Modified = info.Modified.Add(c.put[info.Key])
	return info
}

func (c *clock) Stat(ctx context.Context, key string) (blob.Info, error) {
	info, err := c.Driver.Stat(ctx, key)
	return c.shift(info), err
}

func (c *clock) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		for info, err := range c.Driver.List(ctx, prefix, startAfter) {
			if !yield(c.shift(info), err) {
				return
			}
		}
	}
}

// puts is a blob driver whose PUTs a test handles: n counts them from 0, and put does
// what was asked, now or, after the body was read into memory, at any later time.
type puts struct {
	*clock
	mu     sync.Mutex
	n      int
	handle func(n int, put func() error) error
}

func (p *puts) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	p.mu.Lock()
	n, handle := p.n, p.handle
	p.n++
	p.mu.Unlock()
	if handle == nil {
		return p.clock.Put(ctx, key, body, opts)
	}

	var data bytes.Buffer
	if err := body.Copy(ctx, &data); err != nil {
		return err
	}
	return handle(n, func() error {
		return p.clock.Put(context.WithoutCancel(ctx), key, blob.Bytes(data.Bytes()), opts)
	})
}

// on sets what happens to the PUTs from now on; nil lets them through.
func (p *puts) on(handle func(n int, put func() error) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n, p.handle = 0, handle
}
