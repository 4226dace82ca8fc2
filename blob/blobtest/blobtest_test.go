package blobtest_test

import (
	"errors"
	"io/fs"
	"sync"
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

// Decorators that are told nothing change nothing: they pass the suite.
func TestDecoratorsConform(t *testing.T) {
	for name, wrap := range map[string]func(blob.Driver) blob.Driver{
		"Faults":   func(d blob.Driver) blob.Driver { return blobtest.NewFaults(d, nil) },
		"Recorder": func(d blob.Driver) blob.Driver { return blobtest.NewRecorder(d) },
		"Latency": func(d blob.Driver) blob.Driver {
			return blobtest.NewLatency(d, func(blobtest.Call) time.Duration { return 0 })
		},
		"Stale": func(d blob.Driver) blob.Driver { return blobtest.NewStale(d, 0) },
		"Hold":  func(d blob.Driver) blob.Driver { return blobtest.NewHold(d) },
	} {
		t.Run(name, func(t *testing.T) {
			blobtest.Run(t, func(*testing.T) blob.Driver { return wrap(memblob.NewVersioned()) }, &blobtest.Options{Large: 100_000})
		})
	}
}

func put(t *testing.T, d blob.Driver, key string) error {
	t.Helper()
	return d.Put(t.Context(), key, blob.Bytes([]byte(key)), blob.PutOptions{IfAbsent: true})
}

func TestFaults(t *testing.T) {
	inner := memblob.New()
	f := blobtest.NewFaults(inner, func(c blobtest.Call) bool { return c.Op == blobtest.OpPut })
	f.FailAt(1, nil)
	for i, key := range []string{"a", "b", "c"} {
		if err := put(t, f, key); (i == 1) != errors.Is(err, blobtest.ErrInjected) {
			t.Errorf("put %s: %v", key, err)
		}
	}
	if !f.Fired() || f.Count() != 3 {
		t.Errorf("fired %v after %d", f.Fired(), f.Count())
	}
	f.LoseAt(0, errors.ErrUnsupported)
	for _, key := range []string{"d", "e"} {
		if err := put(t, f, key); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("put %s: %v", key, err)
		}
	}
	f.Heal()
	if err := put(t, f, "f"); err != nil || f.Fired() {
		t.Errorf("healed: %v", err)
	}
	var got []string
	for info := range f.List(t.Context(), "", "") {
		got = append(got, info.Key)
	}
	if diff := cmp.Diff(got, []string{"a", "c", "d", "f"}); diff != "" {
		t.Errorf("what happened (-got +want):\n%s", diff)
	}
}

func TestRecorder(t *testing.T) {
	r := blobtest.NewRecorder(memblob.New())
	s := blob.New(r, nil)
	opts := blob.PutOptions{IfAbsent: true, TTL: time.Hour}
	for range 2 {
		_ = s.Put(t.Context(), "a/b", blob.Bytes([]byte("x")), opts)
	}
	_, _ = s.ReadAll(t.Context(), "a/b", 0, 1)
	_, _ = s.ReadAll(t.Context(), "no", 0, -1)
	for range s.List(t.Context(), "a/", "a/a") {
		break
	}
	_ = s.RemoveTTL(t.Context(), []string{"a/b", "c"})
	_ = s.Delete(t.Context(), []string{"a/b", "c"})
	want := []string{
		"put a/b 1 if-absent ttl=1h0m0s",
		"put a/b 1 if-absent ttl=1h0m0s: exists",
		"get a/b [0+1]",
		"get no: not exist",
		"list a/ after=a/a",
		"removettl a/b c: not exist",
		"delete a/b c",
	}
	if diff := cmp.Diff(r.Transcript(), want); diff != "" {
		t.Errorf("transcript (-got +want):\n%s", diff)
	}
	if len(r.Calls()) != len(want) {
		t.Errorf("%d calls", len(r.Calls()))
	}
	if r.Reset(); len(r.Transcript()) != 0 {
		t.Error("not reset")
	}
}

func TestLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := blobtest.NewLatency(memblob.New(), func(c blobtest.Call) time.Duration { return time.Duration(c.Size) * time.Second })
		start := time.Now()
		if err := put(t, d, "four"); err != nil || time.Since(start) != 4*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

func TestStale(t *testing.T) {
	s := blobtest.NewStale(memblob.New(), 2)
	list := func() (keys []string) {
		for info := range s.List(t.Context(), "", "") {
			keys = append(keys, info.Key)
		}
		return keys
	}
	for _, key := range []string{"a", "b", "c"} {
		if err := put(t, s, key); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(list(), []string{"a"}); diff != "" {
		t.Errorf("after puts:\n%s", diff)
	}
	if err := s.Delete(t.Context(), []string{"a"}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(list(), []string{"a", "b"}); diff != "" {
		t.Errorf("after a delete:\n%s", diff)
	}
	if _, err := s.Stat(t.Context(), "a"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat is stale too: %v", err)
	}
	s.CatchUp()
	if diff := cmp.Diff(list(), []string{"b", "c"}); diff != "" {
		t.Errorf("caught up:\n%s", diff)
	}
}

// An operation at a gate has not happened yet, or has already, and others pass it.
func TestHold(t *testing.T) {
	for _, after := range []bool{false, true} {
		h := blobtest.NewHold(memblob.New())
		arm := h.Before
		if after {
			arm = h.After
		}
		gate := arm(blobtest.On(blobtest.OpPut, "slow"))
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := put(t, h, "slow"); err != nil {
				t.Error(err)
			}
		})
		<-gate.Reached()
		if err := put(t, h, "fast"); err != nil {
			t.Error(err)
		}
		if _, err := h.Stat(t.Context(), "slow"); (err == nil) != after {
			t.Errorf("after %v: at the gate: %v", after, err)
		}
		gate.Release()
		gate.Release()
		wg.Wait()
		if _, err := h.Stat(t.Context(), "slow"); err != nil {
			t.Error(err)
		}
	}
}
