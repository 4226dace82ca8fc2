package cpwire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/internal/sentinel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a member that answers as a test says.
type fake struct {
	*httptest.Server
	requests atomic.Int32
	handle   atomic.Pointer[http.HandlerFunc]
}

func newFake(t *testing.T, handle http.HandlerFunc) *fake {
	f := &fake{}
	f.on(handle)
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.requests.Add(1)
		w.Header().Set(HeaderGroup, "g")
		(*f.handle.Load())(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *fake) on(handle http.HandlerFunc) { f.handle.Store(&handle) }

// accept takes every append of a request.
func accept(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	items, n, err := DecodeBatch(b)
	if err != nil {
		fail(CodeInvalid, 400, "")(w, r)
		return
	}
	var results []byte
	for range n {
		var it Item
		it, items, _ = DecodeItem(items)
		results = AppendResult(results, Appended, it.Slot, &Digest{byte(len(it.Body))}, 1)
	}
	_, _ = w.Write(AppendAnswer(nil, results))
}

func fail(code Code, status int, leader string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		f := Failure{Error: &Error{Code: code, Op: "test", Message: "as told"}}
		if code == CodeNotLeader {
			f.Leader = &Member{URL: leader}
		}
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(f)
	}
}

func client(t *testing.T, opts Options, urls ...string) *Client {
	t.Helper()
	if opts.FirstDelay == 0 {
		opts.FirstDelay, opts.MaxDelay = time.Millisecond, 5*time.Millisecond
	}
	c, err := New(urls, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// waitFor polls; it is for what no channel tells.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("the test was over first")
		}
	}
}

// The client finds the leader by the word of a follower, and goes there at once from then on.
func TestFollowsLeader(t *testing.T) {
	leader := newFake(t, accept)
	follower := newFake(t, fail(CodeNotLeader, 421, leader.URL))
	c := client(t, Options{}, follower.URL)
	for range 5 {
		if r, err := c.Append(t.Context(), sample()); err != nil || r.Status != Appended {
			t.Fatalf("append: %+v, %v", r, err)
		}
	}
	if f, l := follower.requests.Load(), leader.requests.Load(); f != 1 || l != 5 {
		t.Errorf("%d requests at the follower, %d at the leader", f, l)
	}
}

// Followers that take each other, or somebody who is gone, for the leader do not trap the
// client.
func TestWrongHints(t *testing.T) {
	gone := newFake(t, accept)
	gone.Close()
	a, b, leader := newFake(t, nil), newFake(t, nil), newFake(t, accept)
	a.on(fail(CodeNotLeader, 421, b.URL))
	b.on(fail(CodeNotLeader, 421, a.URL))
	c := client(t, Options{}, a.URL, b.URL, leader.URL)
	if r, err := c.Append(t.Context(), sample()); err != nil || r.Status != Appended {
		t.Errorf("append: %+v, %v", r, err)
	}

	a.on(fail(CodeNotLeader, 421, gone.URL))
	b.on(fail(CodeNotLeader, 421, gone.URL))
	c = client(t, Options{}, a.URL, b.URL, leader.URL)
	if r, err := c.Append(t.Context(), sample()); err != nil || r.Status != Appended {
		t.Errorf("append: %+v, %v", r, err)
	}
	if n := a.requests.Load() + b.requests.Load(); n > 40 {
		t.Errorf("%d requests at followers", n)
	}
}

// What an error says of the outcome follows from what was sent before (P3.5).
func TestVerdicts(t *testing.T) {
	lose := func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }
	half := func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte{1, 1, 0, 1}) }
	cases := []struct {
		name   string
		handle http.HandlerFunc
		want   error
		not    error
	}{
		{"no leader", fail(CodeNotLeader, 421, ""), sentinel.NoEffect, sentinel.Unknown},
		{"busy", fail(CodeUnavailable, 503, ""), sentinel.NoEffect, sentinel.Unknown},
		{"invalid", fail(CodeInvalid, 400, ""), sentinel.NoEffect, sentinel.Unknown},
		{"newer", fail(CodeUnsupported, 501, ""), sentinel.Unsupported, sentinel.Unknown},
		{"unknown", fail(CodeUnknown, 503, ""), sentinel.Unknown, sentinel.NoEffect},
		{"internal", fail(CodeInternal, 500, ""), sentinel.Unknown, sentinel.NoEffect},
		{"answer lost", lose, sentinel.Unknown, sentinel.NoEffect},
		{"answer damaged", half, sentinel.Unknown, sentinel.NoEffect},
		{"proxy", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(502) }, sentinel.Unknown, sentinel.NoEffect},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, c.handle)
			cl := client(t, Options{Patience: 10 * time.Millisecond}, f.URL)
			_, err := cl.Append(t.Context(), sample())
			if !errors.Is(err, c.want) || errors.Is(err, c.not) {
				t.Errorf("append: %v", err)
			}
			// A read has no outcome that could be unknown, unless a member says so.
			if _, err := cl.Head(t.Context(), sample().Task); err == nil || c.name != "unknown" && errors.Is(err, sentinel.Unknown) {
				t.Errorf("head: %v", err)
			}
		})
	}

	// Unknown first, then a definite no: it stays unknown.
	f := newFake(t, nil)
	f.on(func(w http.ResponseWriter, r *http.Request) {
		f.on(fail(CodeInvalid, 400, ""))
		fail(CodeUnknown, 503, "")(w, r)
	})
	if _, err := client(t, Options{}, f.URL).Append(t.Context(), sample()); !errors.Is(err, sentinel.Unknown) {
		t.Errorf("unknown, then invalid: %v", err)
	}
}

// The request is repeated as it was, nonce and all, until there is an answer.
func TestRepeatsAsItWas(t *testing.T) {
	var mu sync.Mutex
	var bodies []string
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		bodies = append(bodies, string(b))
		n := len(bodies)
		mu.Unlock()
		if n < 4 {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(AppendAnswer(nil, AppendResult(nil, Known, 2, &Digest{}, 1)))
	})
	r, err := client(t, Options{}, f.URL).Append(t.Context(), sample())
	if err != nil || r.Status != Known {
		t.Fatalf("append: %+v, %v", r, err)
	}
	for _, b := range bodies {
		if b != bodies[0] {
			t.Errorf("tries differ: %x and %x", b, bodies[0])
		}
	}
}

// A caller that gives up learns whether its append may be in the log, and the request ends
// when the last one has.
func TestGiveUp(t *testing.T) {
	arrived, ended := make(chan struct{}, 10), make(chan struct{}, 10)
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		arrived <- struct{}{}
		<-r.Context().Done()
		ended <- struct{}{}
	})
	c := client(t, Options{InFlight: 1, TryTimeout: time.Hour}, f.URL)
	ctx, cancel := context.WithCancel(t.Context())
	sent, waiting := make(chan error), make(chan error)
	go func() { _, err := c.Append(ctx, sample()); sent <- err }()
	<-arrived
	go func() { _, err := c.Append(ctx, sample()); waiting <- err }()
	waitFor(t, func() bool { return c.batcher.Waiting() == 1 })
	cancel()
	if err := <-sent; !errors.Is(err, sentinel.Unknown) || !errors.Is(err, context.Canceled) {
		t.Errorf("an append on its way: %v", err)
	}
	if err := <-waiting; !errors.Is(err, sentinel.NoEffect) || errors.Is(err, sentinel.Unknown) {
		t.Errorf("an append in the queue: %v", err)
	}
	<-ended
	f.on(accept)
	if r, err := c.Append(t.Context(), sample()); err != nil || r.Status != Appended {
		t.Errorf("the next one: %+v, %v", r, err)
	}
	if _, err := c.Append(ctx, sample()); !errors.Is(err, sentinel.NoEffect) {
		t.Errorf("begun with a context that has ended: %v", err)
	}
}

// One caller that gives up does not take the others of the request with it.
func TestGiveUpAlone(t *testing.T) {
	hold := make(chan struct{})
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		<-hold
		accept(w, r)
	})
	c := client(t, Options{InFlight: 1}, f.URL)
	first := make(chan error)
	go func() { _, err := c.Append(t.Context(), sample()); first <- err }() // keeps the others together
	waitFor(t, func() bool { return f.requests.Load() == 1 })
	ctx, cancel := context.WithCancel(t.Context())
	gone, stays := make(chan error), make(chan error)
	go func() { _, err := c.Append(ctx, sample()); gone <- err }()
	go func() { _, err := c.Append(t.Context(), sample()); stays <- err }()
	waitFor(t, func() bool { return c.batcher.Waiting() == 2 })
	hold <- struct{}{}
	if err := <-first; err != nil {
		t.Error(err)
	}
	waitFor(t, func() bool { return f.requests.Load() == 2 })
	cancel()
	if err := <-gone; !errors.Is(err, sentinel.Unknown) {
		t.Errorf("the one that gave up: %v", err)
	}
	close(hold)
	if err := <-stays; err != nil {
		t.Errorf("the one that did not: %v", err)
	}
}

// Close ends what is on its way.
func TestClose(t *testing.T) {
	arrived := make(chan struct{}, 10)
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	c, err := New([]string{f.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 2)
	go func() { _, err := c.Append(context.Background(), sample()); errs <- err }()
	go func() { _, err := c.Head(context.Background(), sample().Task); errs <- err }()
	<-arrived
	<-arrived
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-errs; err == nil {
			t.Error("a call ended well")
		}
	}
}

// Status comes from any member, and does not wait long for one that hangs.
func TestAnyMember(t *testing.T) {
	tell := func(w http.ResponseWriter, r *http.Request) { _ = json.NewEncoder(w).Encode(OwnStatus{Group: "g"}) }
	hang := newFake(t, func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	down := newFake(t, tell)
	down.Close()
	good := newFake(t, tell)
	c := client(t, Options{TryTimeout: time.Hour}, hang.URL, down.URL, good.URL)
	if s, err := c.Status(t.Context()); err != nil || s.Group != "g" {
		t.Errorf("status %+v, %v", s, err)
	}
	c = client(t, Options{Patience: 10 * time.Millisecond}, down.URL)
	if _, err := c.Status(t.Context()); err == nil {
		t.Error("nobody there, and a status")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	c = client(t, Options{TryTimeout: time.Hour}, hang.URL)
	if _, err := c.Cluster(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("status of one that hangs: %v", err)
	}
}

// The first read goes on while nobody answers, as appends do, and as long as the client has
// patience.
func TestAnyMemberComesBack(t *testing.T) {
	f := newFake(t, nil)
	f.on(func(w http.ResponseWriter, r *http.Request) {
		if f.requests.Load() < 5 {
			panic(http.ErrAbortHandler)
		}
		_ = json.NewEncoder(w).Encode(ClusterStatus{Group: "g", Leader: "n1"})
	})
	c := client(t, Options{}, f.URL)
	if s, err := c.Cluster(t.Context()); err != nil || s.Leader != "n1" {
		t.Errorf("status %+v, %v", s, err)
	}

	f.on(func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	c = client(t, Options{Patience: 20 * time.Millisecond}, f.URL)
	before := f.requests.Load()
	if _, err := c.Status(t.Context()); err == nil || f.requests.Load() < before+2 {
		t.Errorf("after %d requests: %v", f.requests.Load()-before, err)
	}

	// What will never be otherwise is told at once.
	stranger := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("{}")) }))
	defer stranger.Close()
	c = client(t, Options{Patience: time.Hour}, stranger.URL)
	if _, err := c.Cluster(t.Context()); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("status of a stranger: %v", err)
	}
	secret := httptest.NewUnstartedServer(http.NotFoundHandler())
	secret.Config.ErrorLog = log.New(io.Discard, "", 0)
	secret.StartTLS()
	defer secret.Close()
	c = client(t, Options{Patience: time.Hour}, secret.URL)
	if _, err := c.Cluster(t.Context()); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("status of one without a known certificate: %v", err)
	}
}

// A member that waits in its first start is shown if no other answers, but it is nobody to
// learn the group from.
func TestMemberWithoutGroup(t *testing.T) {
	alone := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(HeaderGroup, "")
		m := MemberStatus{ID: "n9", Why: "waits for others"}
		if r.URL.Path == PathStatus {
			_ = json.NewEncoder(w).Encode(OwnStatus{Member: m})
			return
		}
		_ = json.NewEncoder(w).Encode(ClusterStatus{Members: []MemberStatus{m}})
	})
	down := newFake(t, nil)
	down.Close()
	c := client(t, Options{Patience: 10 * time.Millisecond}, down.URL, alone.URL)
	if s, err := c.Cluster(t.Context()); err != nil || len(s.Members) != 1 || s.Members[0].Why != "waits for others" {
		t.Errorf("status of the group: %+v, %v", s, err)
	}
	if s, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "waits for others") {
		t.Errorf("status: %+v, %v", s, err)
	}
	good := newFake(t, func(w http.ResponseWriter, r *http.Request) { _ = json.NewEncoder(w).Encode(ClusterStatus{Group: "g"}) })
	c = client(t, Options{}, alone.URL, good.URL)
	if s, err := c.Cluster(t.Context()); err != nil || s.Group != "g" {
		t.Errorf("status of the group: %+v, %v", s, err)
	}
}

// An error says once what was tried, however many have told of it.
func TestErrorSaysItOnce(t *testing.T) {
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(400)
		_ = json.NewEncoder(w).Encode(Failure{Error: &Error{Code: CodeInvalid, Op: "list tasks", Message: "no"}})
	})
	for _, err := range client(t, Options{}, f.URL).Tasks(t.Context()) {
		if err == nil || err.Error() != "list tasks: no" || !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("list tasks: %v", err)
		}
	}
}

// How long a learner may take to catch up is for the client to say.
func TestPromoteTellsPatience(t *testing.T) {
	var told Change
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			_ = json.NewDecoder(r.Body).Decode(&told)
		}
		_, _ = w.Write([]byte("{}"))
	})
	for patience, want := range map[time.Duration]time.Duration{time.Minute: time.Minute, 24 * time.Hour: MaxPromote} {
		if err := client(t, Options{Patience: patience}, f.URL).Promote(t.Context(), "n4"); err != nil || told.Wait != want.Milliseconds() {
			t.Errorf("patience %s: %+v, %v", patience, told, err)
		}
	}
}

// While a run is on its way everything that comes gathers, in order, within the bounds.
func TestBatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs [][]int
		b := Batcher[int]{MaxItems: 4, MaxSize: 10, Size: func(i int) int { return i }}
		b.Run = func(items []int) {
			runs = append(runs, items)
			<-time.After(time.Second)
		}
		for _, i := range []int{1, 1, 1, 1, 1, 3, 4, 4, 99, 2} {
			b.Add(i)
			synctest.Wait()
		}
		b.Wait()
		want := "[[1] [1 1 1 1] [3 4] [4] [99] [2]]"
		if got := fmt.Sprint(runs); got != want {
			t.Errorf("runs %v, want %v", got, want)
		}
		b.Add(7)
		b.Wait()
		if len(runs) != 7 {
			t.Errorf("%d runs after one more", len(runs))
		}
	})
}

func TestBatcherWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most, items atomic.Int32
		b := Batcher[int]{Workers: 3}
		b.Run = func(all []int) {
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			items.Add(int32(len(all)))
			<-time.After(time.Second)
			now.Add(-1)
		}
		for range 50 {
			b.Add(1)
			synctest.Wait()
		}
		b.Wait()
		if most.Load() != 3 || items.Load() != 50 {
			t.Errorf("%d runs at once, %d items", most.Load(), items.Load())
		}
	})
}
