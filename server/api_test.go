package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftnode"
)

// call sends a plain request to a member, as a script would.
func (m *member) call(method, path, body string, header ...string) (int, http.Header, string) {
	m.g.t.Helper()
	req, err := http.NewRequestWithContext(m.g.t.Context(), method, m.http.URL+path, strings.NewReader(body))
	if err != nil {
		m.g.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := m.http.Client().Do(req)
	if err != nil {
		m.g.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		m.g.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(data)
}

func task(name string) cpwire.Task { return cpwire.Task{Job: "orders", Name: name} }

// fill appends n entries to a task.
func fill(t *testing.T, c *cpwire.Client, task cpwire.Task, n int) (es []cpwire.Entry) {
	t.Helper()
	var prev cpwire.Result
	for i := range n {
		a := cpwire.Append{Task: task, Slot: prev.Slot + 1, Prev: prev.Digest, Nonce: cpwire.Nonce(checkpoint.NewNonce()), Body: fmt.Append(nil, "body ", i)}
		r, err := c.Append(t.Context(), a)
		if err != nil || r.Status != cpwire.Appended {
			t.Fatalf("append at slot %d: %+v, %v", a.Slot, r, err)
		}
		es = append(es, cpwire.Entry{Slot: r.Slot, Digest: r.Digest, Nonce: a.Nonce, Stored: r.Stored, Body: a.Body})
		prev = r
	}
	return es
}

// Every error is JSON with a code that says whether it is worth trying again, and where.
func TestErrors(t *testing.T) {
	g := newGroup(t, 2)
	fill(t, g.client(nil), task("p7"), 3)
	cases := []struct {
		name, method, path, body string
		follower                 bool
		status                   int
		code                     cpwire.Code
	}{
		{"no path", "GET", "/v1/nothing", "", false, 404, cpwire.CodeNotFound},
		{"no log", "GET", "/v1/tasks/orders/p8/head", "", false, 404, cpwire.CodeNotFound},
		{"no entry", "GET", "/v1/tasks/orders/p7/entries/9", "", false, 404, cpwire.CodeNotFound},
		{"bad name", "GET", "/v1/tasks/orders/.p7/head", "", false, 400, cpwire.CodeInvalid},
		{"odd name", "GET", "/v1/tasks/or%2Fders/p7/head", "", false, 400, cpwire.CodeInvalid},
		{"bad slot", "GET", "/v1/tasks/orders/p7/entries/x", "", false, 400, cpwire.CodeInvalid},
		{"bad after", "GET", "/v1/tasks/orders/p7/head?after=x", "", false, 400, cpwire.CodeInvalid},
		{"bad wait", "GET", "/v1/tasks/orders/p7/head?after=9&wait=-1", "", false, 400, cpwire.CodeInvalid},
		{"bad history", "GET", "/v1/tasks/orders/p7/history?after=-1", "", false, 400, cpwire.CodeInvalid},
		{"bad limit", "GET", "/v1/tasks?limit=x", "", false, 400, cpwire.CodeInvalid},
		{"bad page", "GET", "/v1/tasks?after=x", "", false, 400, cpwire.CodeInvalid},
		{"empty append", "POST", "/v1/append", "", false, 400, cpwire.CodeInvalid},
		{"nonsense append", "POST", "/v1/append", "nonsense", false, 400, cpwire.CodeInvalid},
		{"no appends", "POST", "/v1/append", "\x01\x00\x00", false, 400, cpwire.CodeInvalid},
		{"large append", "POST", "/v1/append", strings.Repeat("x", cpwire.MaxRequest+1), false, 413, cpwire.CodeInvalid},
		{"bad change", "POST", "/v1/cluster/promote", "{", false, 400, cpwire.CodeInvalid},
		{"change of nobody", "POST", "/v1/cluster/promote", "{}", false, 400, cpwire.CodeInvalid},
		{"learner without url", "POST", "/v1/cluster/add-learner", `{"id":"n9"}`, false, 400, cpwire.CodeInvalid},
		{"learner at no url", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"::"}`, false, 400, cpwire.CodeInvalid},
		{"learner without port", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"http://h"}`, false, 400, cpwire.CodeInvalid},
		{"learner at port 0", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"http://h:0"}`, false, 400, cpwire.CodeInvalid},
		{"learner at a path", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"http://h:1/p"}`, false, 400, cpwire.CodeInvalid},
		{"learner of another kind", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"ftp://h:1"}`, false, 400, cpwire.CodeInvalid},
		{"learner with tls", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"https://h:1"}`, false, 400, cpwire.CodeInvalid},
		{"wrong method", "GET", "/v1/append", "", false, 405, cpwire.CodeInvalid},
		{"absent member", "POST", "/v1/cluster/remove", `{"id":"n9"}`, false, 404, cpwire.CodeNotFound},
		{"read elsewhere", "GET", "/v1/tasks/orders/p7/head", "", true, 421, cpwire.CodeNotLeader},
		{"trim elsewhere", "POST", "/v1/tasks/orders/p7/trim", "", true, 421, cpwire.CodeNotLeader},
		{"change elsewhere", "POST", "/v1/cluster/add-learner", `{"id":"n9","url":"http://h:1"}`, true, 421, cpwire.CodeNotLeader},
		{"snapshot elsewhere", "POST", "/v1/cluster/snapshot", "", true, 421, cpwire.CodeNotLeader},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			m := g.members[0]
			if c.follower {
				m = g.members[1]
			}
			status, header, body := m.call(c.method, c.path, c.body)
			var f cpwire.Failure
			if err := json.Unmarshal([]byte(body), &f); err != nil || f.Error == nil {
				t.Fatalf("%d %q: %v", status, body, err)
			}
			if status != c.status || f.Error.Code != c.code || f.Error.Message == "" || f.Error.Op == "" {
				t.Errorf("%d %s", status, body)
			}
			if got := header.Get(cpwire.HeaderGroup); got != "group-1" {
				t.Errorf("answer names group %q", got)
			}
			if c.status == 421 && cmp.Diff(f.Leader, &cpwire.Member{ID: "n1", URL: g.members[0].http.URL}) != "" {
				t.Errorf("leader %+v", f.Leader)
			}
		})
	}
	for path, want := range map[string]string{"/v1/append": "POST", "/v1/tasks/orders/p7/head": "GET, HEAD", "/v1/nothing": ""} {
		if status, header, _ := g.members[0].call("DELETE", path, ""); header.Get("Allow") != want || (status == 405) != (want != "") {
			t.Errorf("DELETE %s: %d, allowed are %q", path, status, header.Get("Allow"))
		}
	}
}

// What the node says becomes the right code, also where it says two things.
func TestErrorCodes(t *testing.T) {
	for _, c := range []struct {
		err    error
		code   cpwire.Code
		status int
	}{
		{&raftnode.Error{Op: "propose", Err: fmt.Errorf("%w: %w", raftnode.ErrUnknown, context.Canceled)}, cpwire.CodeUnknown, 503},
		{raftnode.ErrBusy, cpwire.CodeUnavailable, 503},
		{raftnode.ErrClosed, cpwire.CodeUnavailable, 503},
		{raftnode.ErrRemoved, cpwire.CodeUnavailable, 503},
		{context.DeadlineExceeded, cpwire.CodeUnavailable, 503},
		{&raftnode.NotLeaderError{}, cpwire.CodeNotLeader, 421},
		{raftnode.ErrConflict, cpwire.CodeConflict, 409},
		{raftnode.ErrNoMember, cpwire.CodeNotFound, 404},
		{fmt.Errorf("%w: body of slot 1: %w", checkpoint.ErrCorrupt, fs.ErrNotExist), cpwire.CodeCorrupt, 500},
		{errors.New("disk on fire"), cpwire.CodeInternal, 500},
	} {
		g := newGroup(t, 1)
		g.before = func() error { return c.err }
		status, _, body := g.members[0].call("POST", "/v1/tasks/orders/p7/trim", "")
		var f cpwire.Failure
		if err := json.Unmarshal([]byte(body), &f); err != nil || status != c.status || f.Error.Code != c.code {
			t.Errorf("%v: %d %s", c.err, status, body)
		}
	}
}

// A request that means another group is refused, and a client that was given the members
// of two groups says so instead of writing to both.
func TestOtherGroup(t *testing.T) {
	g := newGroup(t, 1)
	status, _, body := g.members[0].call("GET", "/v1/tasks", "", cpwire.HeaderGroup, "group-2")
	if status != 409 || !strings.Contains(body, string(cpwire.CodeOtherGroup)) {
		t.Errorf("%d %s", status, body)
	}

	other := newGroup(t, 1)
	other.id = "group-2"
	c, err := cpwire.New([]string{g.urls()[0], other.urls()[0]}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fill(t, c, task("p7"), 1)
	g.lead(-1)
	if _, err := c.HeadRecord(t.Context(), task("p7")); !errors.Is(err, fs.ErrInvalid) || !strings.Contains(err.Error(), "group-2") {
		t.Errorf("read at another group: %v", err)
	}
	_, err = c.Append(t.Context(), cpwire.Append{Task: task("p8"), Slot: 1, Nonce: cpwire.Nonce{1}})
	if !errors.Is(err, fs.ErrInvalid) || !errors.Is(err, sentinel.NoEffect) {
		t.Errorf("append at another group: %v", err)
	}
}

// Appends that are made at once share requests, requests that come at once share commands,
// and each gets its own result.
func TestBatches(t *testing.T) {
	g := newGroup(t, 1)
	var requests sync.Map
	g.members[0].breakNet(func(w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
		requests.Store(r, true)
		serve(w, r)
	})
	c := g.client(&cpwire.Options{InFlight: 1, TryTimeout: time.Hour})
	const n = 200
	var wg sync.WaitGroup
	g.mu.Lock() // the first request waits, the others gather
	for i := range n {
		wg.Go(func() {
			a := cpwire.Append{Task: task(fmt.Sprint("t", i%100)), Slot: 1, Nonce: cpwire.Nonce{1, byte(i)}, Body: fmt.Append(nil, i)}
			r, err := c.Append(t.Context(), a)
			if err != nil || r.Slot != 1 || r.Status != cpwire.Appended && r.Status != cpwire.Conflict {
				t.Errorf("append %d: %+v, %v", i, r, err)
			}
		})
	}
	g.mu.Unlock()
	wg.Wait()
	count := 0
	requests.Range(func(_, _ any) bool { count++; return true })
	if count > n/2 {
		t.Errorf("%d requests for %d appends", count, n)
	}

	page, err := g.members[0].m.Tasks(cpwire.Task{}, 1000)
	if err != nil || len(page) != 100 {
		t.Errorf("%d tasks, %v", len(page), err)
	}
}

// Requests of many clients share a command when enough are on their way.
func TestSharedCommands(t *testing.T) {
	g := newGroup(t, 1)
	const n = 10 * inFlight
	b := &g.members[0].svc.batcher
	var taken atomic.Int64
	run := b.Run
	b.Run = func(all []*pending) {
		taken.Add(int64(len(all)))
		run(all)
	}
	var wg sync.WaitGroup
	g.mu.Lock() // no command is done before all requests are there
	for i := range n {
		a := cpwire.Append{Task: task(fmt.Sprint("t", i)), Slot: 1, Nonce: cpwire.Nonce{1, byte(i)}, Body: fmt.Append(nil, i)}
		c := g.client(&cpwire.Options{TryTimeout: time.Hour})
		wg.Go(func() {
			if r, err := c.Append(t.Context(), a); err != nil || r.Status != cpwire.Appended || r.Slot != 1 {
				t.Errorf("append %d: %+v, %v", i, r, err)
			}
		})
	}
	waitFor(t, func() bool { return taken.Load()+int64(b.Waiting()) == n })
	g.mu.Unlock()
	wg.Wait()
	if got := g.proposals.Load(); got > 2*inFlight {
		t.Errorf("%d commands for %d requests", got, n)
	}
	for i := range n {
		if e, err := g.members[0].m.Head(task(fmt.Sprint("t", i)), true); err != nil || string(e.Body) != fmt.Sprint(i) {
			t.Errorf("task %d has %q, %v", i, e.Body, err)
		}
	}
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

func TestReads(t *testing.T) {
	g := newGroup(t, 3)
	g.lead(2)
	c := g.client(nil)
	es := fill(t, c, task("p7"), 70)
	last := es[69]

	head, err := c.Head(t.Context(), task("p7"))
	if d := cmp.Diff(head, last); err != nil || d != "" {
		t.Errorf("head: %v (-got +want):\n%s", err, d)
	}
	rec, err := c.HeadRecord(t.Context(), task("p7"))
	if rec.Body != nil || rec.Digest != last.Digest || err != nil {
		t.Errorf("head without body %+v, %v", rec, err)
	}
	if _, err := c.Get(t.Context(), task("p7"), 5); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, sentinel.Unknown) {
		t.Errorf("an entry that is not kept: %v", err)
	}
	if e, err := c.Get(t.Context(), task("p7"), 42); err != nil || cmp.Diff(e, es[41]) != "" {
		t.Errorf("slot 42: %+v, %v", e, err)
	}
	h, err := c.History(t.Context(), task("p7"), 3, true)
	if err != nil || len(h) != 67 || h[0].Body != nil || cmp.Diff(h[3:], es[6:]) != "" {
		t.Errorf("history: %d, %v", len(h), err)
	}
	if _, err := c.History(t.Context(), task("p8"), 0, true); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("history of no log: %v", err)
	}
	if status, _, body := g.members[2].call("GET", "/v1/tasks/orders/p7/head", ""); status != 200 || body != string(last.Body) {
		t.Errorf("plain read: %d %q", status, body)
	}
}

// A leader that is cut off does not hold a client up once the others have a new one.
func TestLeaderCutOff(t *testing.T) {
	g := newGroup(t, 3)
	c := g.client(&cpwire.Options{TryTimeout: 50 * time.Millisecond})
	es := fill(t, c, task("p7"), 1)
	g.members[0].breakNet(hang)
	g.lead(1)
	r, err := c.Append(t.Context(), cpwire.Append{Task: task("p7"), Slot: 2, Prev: es[0].Digest, Nonce: cpwire.Nonce{1}})
	if err != nil || !r.Status.InLog() || r.Slot != 2 {
		t.Errorf("append: %+v, %v", r, err)
	}
	if e, err := c.Head(t.Context(), task("p7")); err != nil || e.Slot != 2 {
		t.Errorf("head: %+v, %v", e, err)
	}
	s, err := c.Cluster(t.Context())
	if err != nil || s.Leader != "n2" || s.Members[0].Reachable {
		t.Errorf("status %+v, %v", s, err)
	}
}

// A listing comes in pages and has every task once.
func TestManyTasks(t *testing.T) {
	g := newGroup(t, 1)
	c := g.client(nil)
	const n = 2*cpwire.MaxPage + 1
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if _, err := c.Append(t.Context(), cpwire.Append{Task: task(fmt.Sprint("t", i)), Slot: 1, Nonce: cpwire.Nonce{1}}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := map[cpwire.Task]bool{}
	for task, err := range c.Tasks(t.Context()) {
		if err != nil || seen[task] {
			t.Fatalf("%v comes twice, or %v", task, err)
		}
		seen[task] = true
	}
	if len(seen) != n {
		t.Errorf("%d tasks, want %d", len(seen), n)
	}
	for range c.Tasks(t.Context()) {
		break
	}
}

// A watcher gets the next entry when it comes, over a change of leader.
func TestWatch(t *testing.T) {
	g := newGroup(t, 3)
	c := g.client(nil)
	got := make(chan uint64)
	go func() {
		defer close(got)
		for at := uint64(0); at < 3; {
			e, err := c.Watch(t.Context(), task("p7"), at)
			if err != nil {
				t.Error(err)
				return
			}
			at = e.Slot
			got <- at
		}
	}()
	w := g.client(nil)
	es := fill(t, w, task("p7"), 1)
	if at := <-got; at != 1 {
		t.Errorf("watched slot %d", at)
	}
	g.lead(1)
	prev := es[0]
	for range 2 {
		r, err := w.Append(t.Context(), cpwire.Append{Task: task("p7"), Slot: prev.Slot + 1, Prev: prev.Digest, Nonce: cpwire.Nonce{byte(prev.Slot), 1}})
		if err != nil {
			t.Fatal(err)
		}
		prev.Slot, prev.Digest = r.Slot, r.Digest
	}
	last := uint64(1)
	for at := range got {
		if at <= last {
			t.Errorf("slot %d after %d", at, last)
		}
		last = at
	}
	if last != 3 {
		t.Errorf("the last one seen is slot %d", last)
	}

	status, _, _ := g.members[1].call("GET", "/v1/tasks/orders/p7/head?after=3&wait=0", "")
	if status != http.StatusNoContent {
		t.Errorf("nothing new: %d", status)
	}
	if status, _, _ := g.members[1].call("GET", "/v1/tasks/orders/p9/head?after=0&wait=0", ""); status != http.StatusNoContent {
		t.Errorf("no log yet: %d", status)
	}
}

func TestHealth(t *testing.T) {
	g := newGroup(t, 1)
	m := g.members[0]
	get := func(path string) int { status, _, _ := m.call("GET", path, ""); return status }
	if get("/healthz") != 200 || get("/readyz") != 200 {
		t.Error("a member that leads is not ready")
	}
	g.lead(-1)
	if get("/healthz") != 200 || get("/readyz") != 503 {
		t.Error("a member without a leader is ready")
	}
	g.lead(0)
	m.svc.state.Store(nil)
	if get("/readyz") != 503 || get("/v1/tasks") != 503 {
		t.Error("a member that starts is ready")
	}
	if status, _, _ := m.call("POST", "/v1/cluster/promote", `{"id":"n1"}`); status != 503 {
		t.Errorf("a change while it starts: %d", status)
	}
	m.svc.state.Store(m.m)
	m.svc.failed = func() error { return errors.New("disk on fire") }
	if get("/healthz") == 200 || get("/readyz") == 200 {
		t.Error("a member that has stopped is healthy")
	}
}

// A request whose body never comes does not stay in the batch.
func TestBrokenRequest(t *testing.T) {
	g := newGroup(t, 1)
	req, err := http.NewRequest("POST", g.members[0].http.URL+"/v1/append", io.MultiReader(bytes.NewReader([]byte{1, 1, 0}), brokenReader{}))
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := g.members[0].http.Client().Do(req); err == nil {
		resp.Body.Close()
		t.Errorf("answered %s", resp.Status)
	}
	fill(t, g.client(nil), task("p7"), 1)
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("gone") }
