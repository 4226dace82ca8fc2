package blob_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errBusy = errors.New("server busy")

// bubble runs a test in fake time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// Every verb is tried again after a passing error, and only then.
func TestRetryEveryVerb(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := blobtest.NewFaults(memblob.NewVersioned(), nil)
		var retries []string
		s := blob.New(f, &blob.Options{OnRetry: func(op, key string, err error, delay time.Duration) {
			if delay <= 0 || !errors.Is(err, errBusy) {
				t.Errorf("retry of %s after %v for %v", op, delay, err)
			}
			retries = append(retries, strings.TrimSpace(op+" "+key))
		}})
		verbs := []struct {
			name string
			do   func() error
		}{
			{"put a/b", func() error { return s.Put(t.Context(), "a/b", blob.Bytes([]byte("v")), blob.PutOptions{}) }},
			{"get a/b", func() error { _, err := s.ReadAll(t.Context(), "a/b", 0, -1); return err }},
			{"stat a/b", func() error { _, err := s.Stat(t.Context(), "a/b"); return err }},
			{"list a/", func() error { return listErr(s.List(t.Context(), "a/", "")) }},
			{"seal a/b", func() error { return s.RemoveTTL(t.Context(), []string{"a/b"}) }},
			{"now", func() error { _, err := s.Now(t.Context()); return err }},
			{"delete a/b", func() error { return s.Delete(t.Context(), []string{"a/b"}) }},
			{"get deleted a/b", func() error {
				r, err := s.GetDeleted(t.Context(), "a/b", 0, -1)
				if err == nil {
					err = r.Close()
				}
				return err
			}},
		}
		var want []string
		for _, v := range verbs {
			f.FailAt(0, blob.Retriable(errBusy))
			if err := v.do(); err != nil {
				t.Errorf("%s: %v", v.name, err)
			}
			want = append(want, v.name)
			f.FailAt(0, errBusy)
			if err := v.do(); !errors.Is(err, errBusy) {
				t.Errorf("%s: permanent error: %v", v.name, err)
			}
			if f.Count() != 1 {
				t.Errorf("%s: %d tries after a permanent error", v.name, f.Count())
			}
		}
		if diff := cmp.Diff(retries, want); diff != "" {
			t.Errorf("retries (-got +want):\n%s", diff)
		}
	})
}

func listErr(seq iter.Seq2[blob.Info, error]) error {
	for _, err := range seq {
		if err != nil {
			return err
		}
	}
	return nil
}

// broken always fails in a way that could pass.
func broken() *blobtest.Faults {
	f := blobtest.NewFaults(memblob.New(), nil)
	f.LoseAt(0, blob.Retriable(errBusy))
	return f
}

// The pauses double up to the longest, with jitter down to a half, until the time is up.
func TestBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var delays []time.Duration
		s := blob.New(broken(), &blob.Options{
			Retry:   blob.Retry{First: time.Second, Max: 8 * time.Second, Total: time.Minute},
			OnRetry: func(_, _ string, _ error, d time.Duration) { delays = append(delays, d) },
		})
		start := time.Now()
		_, err := s.Stat(t.Context(), "a")
		if !errors.Is(err, errBusy) || !strings.Contains(err.Error(), "gave up after") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(start); took > time.Minute || took < 50*time.Second {
			t.Errorf("gave up after %v", took)
		}
		limit := time.Second
		for i, d := range delays {
			if d < limit/2 || d > limit {
				t.Errorf("pause %d is %v, want %v to %v", i, d, limit/2, limit)
			}
			limit = min(2*limit, 8*time.Second)
		}
	})
}

// The caller's deadline ends the tries, and both errors are told.
func TestDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		s := blob.New(broken(), &blob.Options{Retry: blob.Retry{Total: -1}})
		err := s.Put(ctx, "a", blob.Bytes(nil), blob.PutOptions{})
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errBusy) {
			t.Errorf("got %v", err)
		}
	})
}

// A try without progress is broken off and made again.
func TestStalledTry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := blobtest.NewHold(memblob.New())
		s := blob.New(h, &blob.Options{TryTimeout: time.Minute})
		gate := h.Before(blobtest.On(blobtest.OpPut, "k"))
		start := time.Now()
		if err := s.Put(t.Context(), "k", blob.Bytes([]byte("v")), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		<-gate.Reached()
		if took := time.Since(start); took < time.Minute || took > 2*time.Minute {
			t.Errorf("took %v", took)
		}
		h.Before(blobtest.On(blobtest.OpGet, "k"))
		if got, err := s.ReadAll(t.Context(), "k", 0, -1); err != nil || string(got) != "v" {
			t.Errorf("got %q, %v", got, err)
		}
	})
}

// stalling reads a byte of each body and then waits for the end of the try, twice.
type stalling struct {
	blob.Driver
	tries atomic.Int64
}

func (s *stalling) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	if s.tries.Add(1) > 2 {
		return s.Driver.Put(ctx, key, body, opts)
	}
	r, err := body.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := r.Read(make([]byte, 1)); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// A put that stalls behind some bytes is broken off too.
func TestStallInTheMiddle(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(&stalling{Driver: memblob.New()}, &blob.Options{TryTimeout: time.Minute})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		if err := s.Put(ctx, "k", blob.Bytes([]byte("value")), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	})
}

// slowBody makes progress, slowly.
type slowBody struct{ io.Reader }

func (s slowBody) Read(p []byte) (int, error) {
	spend(40 * time.Second)
	return s.Reader.Read(p[:min(len(p), 1)])
}

func (slowBody) Close() error { return nil }

// A slow body, a slow reader and a slow loop are no stall.
func TestSlowIsNotStalled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(memblob.New(), &blob.Options{TryTimeout: time.Minute, OnRetry: func(op, _ string, err error, _ time.Duration) {
			t.Errorf("retry of %s: %v", op, err)
		}})
		body := blob.Body{Size: 5, Open: func() (io.ReadCloser, error) { return slowBody{strings.NewReader("01234")}, nil }}
		for _, k := range []string{"a", "b"} {
			if err := s.Put(t.Context(), k, body, blob.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, err := range s.List(t.Context(), "", "") {
			if err != nil {
				t.Fatal(err)
			}
			spend(time.Hour)
		}
		r, err := s.Get(t.Context(), "a", 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		spend(time.Hour)
		got, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil || string(got) != "01234" {
			t.Fatalf("got %q, %v", got, err)
		}
	})
}

// breaking is a driver whose streams break after a few bytes.
type breaking struct {
	blob.Driver
	after int64
	opens atomic.Int64
	err   error
}

func (b *breaking) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	b.opens.Add(1)
	r, err := b.Driver.Get(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	return &brokenStream{r, b.after, b.err}, nil
}

type brokenStream struct {
	io.ReadCloser
	left int64
	err  error
}

func (b *brokenStream) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// A stream that breaks is opened again where it broke; one that is damaged is not.
func TestReaderResumes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := &breaking{Driver: memblob.New(), after: 3, err: blob.Retriable(errBusy)}
		s := blob.New(b, nil)
		if err := s.Put(t.Context(), "k", blob.Bytes([]byte("0123456789")), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, length := range []int64{-1, 9} {
			b.opens.Store(0)
			got, err := s.ReadAll(t.Context(), "k", 1, length)
			if err != nil || string(got) != "123456789" || b.opens.Load() < 3 {
				t.Errorf("length %d: %q, %v, %d opens", length, got, err, b.opens.Load())
			}
		}
		b.err = blob.ErrCorrupt
		got, err := s.ReadAll(t.Context(), "k", 0, -1)
		if !errors.Is(err, blob.ErrCorrupt) || got != nil {
			t.Errorf("damaged: %q, %v", got, err)
		}
		b.after, b.err = 0, blob.Retriable(errBusy)
		if _, err := s.ReadAll(t.Context(), "k", 0, -1); !errors.Is(err, errBusy) {
			t.Errorf("no byte ever: %v", err)
		}
	})
}

// flakyList breaks after each second object.
type flakyList struct{ blob.Driver }

func (f flakyList) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		n := 0
		for info, err := range f.Driver.List(ctx, prefix, after) {
			if n++; n == 3 {
				yield(blob.Info{}, blob.Retriable(errBusy))
				return
			}
			if !yield(info, err) {
				return
			}
		}
	}
}

// A listing that breaks goes on after the last key that it gave.
func TestListResumes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := blob.New(flakyList{memblob.New()}, nil)
		var want, got []string
		for i := range 9 {
			key := fmt.Sprintf("k/%d", i)
			want = append(want, key)
			if err := s.Put(t.Context(), key, blob.Bytes(nil), blob.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		for info, err := range s.List(t.Context(), "k/", "") {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, info.Key)
		}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Error(diff)
		}
	})
}

// disorder lists what it should not.
type disorder struct {
	blob.Driver
	keys []string
}

func (d disorder) List(context.Context, string, string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		for _, k := range d.keys {
			if !yield(blob.Info{Key: k}, nil) {
				return
			}
		}
	}
}

// Drivers are not trusted with the order, on which the log stands (P2).
func TestListChecksOrder(t *testing.T) {
	for _, keys := range [][]string{{"a/2", "a/1"}, {"a/1", "a/1"}, {"b/1"}, {"a/0"}} {
		s := blob.New(disorder{memblob.New(), keys}, nil)
		if err := listErr(s.List(t.Context(), "a/", "a/0")); !errors.Is(err, blob.ErrCorrupt) {
			t.Errorf("%q: %v", keys, err)
		}
	}
}

// choosy fails chosen keys of a batch, each a given number of times.
type choosy struct {
	blob.Driver
	fail  map[string]int
	err   map[string]error
	calls [][]string
}

func (c *choosy) Delete(ctx context.Context, keys []string) error {
	c.calls = append(c.calls, keys)
	failed := map[string]error{}
	for _, k := range keys {
		if c.fail[k] > 0 {
			c.fail[k]--
			failed[k] = c.err[k]
		}
	}
	return blob.JoinKeys(failed)
}

// Batches have at most 1,000 keys; only keys whose error may pass are tried again; the
// others are told, and nothing keeps the rest from being deleted.
func TestDeleteBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var keys []string
		for i := range 2500 {
			keys = append(keys, fmt.Sprintf("k/%04d", i))
		}
		c := &choosy{
			Driver: memblob.New(),
			fail:   map[string]int{"k/0003": 2, "k/0007": 1, "k/1500": 1},
			err:    map[string]error{"k/0003": blob.Retriable(errBusy), "k/0007": fs.ErrPermission, "k/1500": blob.Retriable(errBusy)},
		}
		err := blob.New(c, nil).Delete(t.Context(), keys)
		d, ok := errors.AsType[*blob.DeleteError](err)
		if !ok || len(d.Errors) != 1 || !errors.Is(d.Errors["k/0007"], fs.ErrPermission) || !errors.Is(err, fs.ErrPermission) {
			t.Errorf("got %v", err)
		}
		var sizes []int
		for _, call := range c.calls {
			sizes = append(sizes, len(call))
		}
		if diff := cmp.Diff(sizes, []int{1000, 1, 1, 1000, 1, 500}); diff != "" {
			t.Error(diff)
		}
	})
}

// A body is opened again for each try, before any limit is taken.
func TestBodyIsReopened(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := blobtest.NewFaults(memblob.New(), nil)
		s := blob.New(f, nil)
		opened, closed := 0, 0
		body := blob.Body{Size: 3, Open: func() (io.ReadCloser, error) {
			opened++
			return closeFunc{bytes.NewReader([]byte("abc")), func() { closed++ }}, nil
		}}
		f.FailAt(0, blob.Retriable(errBusy))
		if err := s.Put(t.Context(), "k", body, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if opened != 2 || closed != 2 {
			t.Errorf("%d opened, %d closed", opened, closed)
		}
		f.LoseAt(0, blob.Retriable(errBusy))
		err := s.Put(t.Context(), "k2", body, blob.PutOptions{IfAbsent: true})
		if !errors.Is(err, errBusy) || opened != closed {
			t.Errorf("%v, %d opened, %d closed", err, opened, closed)
		}
	})
}

type closeFunc struct {
	io.Reader
	close func()
}

func (c closeFunc) Close() error { c.close(); return nil }

// spend lets fake time pass.
func spend(d time.Duration) { <-time.After(d) }
