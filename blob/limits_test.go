package blob_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
)

// counting notes how many calls, and put bytes, are in progress at once.
type counting struct {
	blob.Driver
	calls, bytes       atomic.Int64
	maxCalls, maxBytes atomic.Int64
}

func (c *counting) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	peak(&c.maxCalls, c.calls.Add(1))
	peak(&c.maxBytes, c.bytes.Add(body.Size))
	defer c.calls.Add(-1)
	defer c.bytes.Add(-body.Size)
	spend(time.Second)
	return c.Driver.Put(ctx, key, body, opts)
}

func peak(v *atomic.Int64, n int64) {
	for old := v.Load(); n > old && !v.CompareAndSwap(old, n); old = v.Load() {
	}
}

func putMany(t *testing.T, s *blob.Store, n, size int) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if err := s.Put(t.Context(), fmt.Sprint(i), blob.Bytes(make([]byte, size)), blob.PutOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// Requests and bytes in flight stay within their limits and use them up (I10).
func TestLimits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := &counting{Driver: memblob.New()}
		putMany(t, blob.New(c, &blob.Options{MaxRequests: 3}), 20, 10)
		if got := c.maxCalls.Load(); got != 3 {
			t.Errorf("%d requests at once, want 3", got)
		}
		c = &counting{Driver: memblob.New()}
		putMany(t, blob.New(c, &blob.Options{MaxBytes: 45}), 20, 10)
		if got := c.maxBytes.Load(); got != 40 {
			t.Errorf("%d bytes at once, want 40", got)
		}
		putMany(t, blob.New(c, &blob.Options{MaxBytes: 5}), 3, 100) // larger than all there is: alone
		if got := c.maxBytes.Load(); got != 100 {
			t.Errorf("%d bytes at once, want 100", got)
		}
	})
}

// With one request and one byte to share, what callers may nest does not deadlock:
// a loop over a listing, open readers, and a body that opens an object.
func TestNoDeadlock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(memblob.New(), &blob.Options{MaxRequests: 1, MaxBytes: 1})
		putMany(t, s, 5, 10)
		a, err := s.Get(t.Context(), "0", 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		for info, err := range s.List(t.Context(), "", "") {
			if err != nil {
				t.Fatal(err)
			}
			body := blob.Body{Size: info.Size, Open: func() (io.ReadCloser, error) {
				if _, err := s.ReadAll(t.Context(), info.Key, 0, info.Size); err != nil {
					return nil, err
				}
				return s.Get(t.Context(), info.Key, 0, -1)
			}}
			if err := s.Put(t.Context(), "copy/"+info.Key, body, blob.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			if len(info.Key) > 5 {
				break
			}
		}
		if _, err := io.ReadAll(a); err != nil {
			t.Error(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
}

// The end of a goroutine in the loop over a listing gives nothing back twice.
func TestGoexitInList(t *testing.T) {
	s := blob.New(memblob.New(), &blob.Options{MaxRequests: 1})
	putMany(t, s, 2, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		t.Run("ends", func(t *testing.T) {
			for range s.List(t.Context(), "", "") {
				t.SkipNow()
			}
		})
	})
	wg.Wait()
	if _, err := s.Stat(t.Context(), "0"); err != nil {
		t.Fatal(err)
	}
}

// Bytes sent and received keep to the rate, whatever pieces they come in.
func TestRate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(memblob.New(), &blob.Options{BytesPerSecond: 1 << 20, TryTimeout: time.Second})
		data := make([]byte, 5<<20)
		plain := blob.Body{Size: int64(len(data)), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(struct{ io.Reader }{bytes.NewReader(data)}), nil
		}}
		start := time.Now()
		check := func(what string) {
			t.Helper()
			if took := time.Since(start); took < 4800*time.Millisecond || took > 5100*time.Millisecond {
				t.Errorf("%s: 5 MiB at 1 MiB/s took %v", what, took)
			}
			start = time.Now()
		}
		if err := s.Put(t.Context(), "a", blob.Bytes(data), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		check("put, source writes")
		if err := s.Put(t.Context(), "b", plain, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		check("put, source is read")
		if got, err := s.ReadAll(t.Context(), "a", 0, -1); err != nil || len(got) != len(data) {
			t.Fatal(len(got), err)
		}
		check("get")
	})
}

// Waiting for a low rate is no stall.
func TestLowRate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(memblob.New(), &blob.Options{BytesPerSecond: 10, TryTimeout: time.Minute})
		if err := s.Put(t.Context(), "a", blob.Bytes(make([]byte, 10<<10)), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	})
}

// Who waits for the rate beyond his deadline is told at once, as if it had passed.
func TestRateDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(memblob.New(), &blob.Options{BytesPerSecond: 10})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := s.Put(ctx, "a", blob.Bytes(make([]byte, 1<<20)), blob.PutOptions{})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

// Who waits for a place is freed by his context.
func TestWaitIsCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := blobtest.NewHold(memblob.New())
		s := blob.New(h, &blob.Options{MaxRequests: 1, TryTimeout: -1})
		gate := h.Before(blobtest.On(blobtest.OpStat, "held"))
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := s.Stat(t.Context(), "held"); !errors.Is(err, fs.ErrNotExist) {
				t.Error(err)
			}
		})
		<-gate.Reached()
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() {
			if _, err := s.Stat(ctx, "waits"); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
		synctest.Wait()
		cancel()
		synctest.Wait()
		gate.Release()
		wg.Wait()
	})
}

// taker puts what lies in memory without a copy.
type taker struct {
	blob.Driver
	got []byte
}

func (d *taker) Put(ctx context.Context, _ string, body blob.Body, _ blob.PutOptions) (err error) {
	d.got, err = body.Memory(ctx)
	return err
}

// A body in memory reaches the driver as it is, at the rate, and any other does not.
func TestMemory(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &taker{Driver: memblob.New()}
		s := blob.New(d, &blob.Options{BytesPerSecond: 1 << 20})
		data := make([]byte, 5<<20)
		start := time.Now()
		if err := s.Put(t.Context(), "a", blob.Bytes(data), blob.PutOptions{}); err != nil || len(d.got) != len(data) || &d.got[0] != &data[0] {
			t.Errorf("put: %v, %d bytes", err, len(d.got))
		}
		if took := time.Since(start); took < 4800*time.Millisecond {
			t.Errorf("5 MiB at 1 MiB/s took %v", took)
		}
		plain := blob.Body{Size: 3, Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data[:3])), nil }}
		other := blob.Bytes(data[:3])
		other.Open = blob.Bytes([]byte("abc")).Open
		for _, body := range []blob.Body{plain, other, blob.Bytes(nil)} {
			if err := s.Put(t.Context(), "b", body, blob.PutOptions{}); err != nil || d.got != nil {
				t.Errorf("put: %v, %d bytes", err, len(d.got))
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := blob.Bytes(data).Memory(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
}
