package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/checkpointtest"
	"github.com/snapferry/snapferry/checkpoint/raftcp"
	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/raftnode"
)

// real is a group of servers as users start them, in one process.
type real struct {
	t       testing.TB
	dir     string
	initial map[string]string
	mu      sync.Mutex
	servers map[string]*Server
}

func newReal(t testing.TB, n int) *real {
	t.Helper()
	r := &real{t: t, dir: t.TempDir(), initial: map[string]string{}, servers: map[string]*Server{}}
	for i := range n {
		r.initial[fmt.Sprint("n", i+1)] = "http://" + freeAddress(t)
	}
	t.Cleanup(func() {
		for id := range r.initial {
			r.stop(id)
		}
	})
	for id := range r.initial {
		r.start(id, Options{InitialCluster: r.initial})
	}
	return r
}

// freeAddress finds a port that nobody has. Another process may take it before it is used,
// which the kernel makes unlikely by going round.
func freeAddress(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func (r *real) start(id string, opts Options) {
	opts.ID, opts.Data, opts.Insecure = id, filepath.Join(r.dir, id), true
	opts.Listen = strings.TrimPrefix(r.initial[id], "http://")
	if opts.SnapshotEntries == 0 {
		opts.SnapshotEntries, opts.TrailingEntries = 100, 20
	}
	s, err := Start(context.Background(), opts)
	if err != nil {
		r.t.Errorf("start %s: %v", id, err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.servers[id] = s
}

func (r *real) stop(id string) {
	r.mu.Lock()
	s := r.servers[id]
	delete(r.servers, id)
	r.mu.Unlock()
	if s == nil {
		return
	}
	if err := s.Err(); err != nil {
		r.t.Errorf("%s had stopped: %v", id, err)
	}
	if err := s.Close(); err != nil {
		r.t.Errorf("close %s: %v", id, err)
	}
}

func (r *real) urls() (urls []string) {
	for _, u := range r.initial {
		urls = append(urls, u)
	}
	return urls
}

// driver opens a driver, and waits until the group takes appends.
func (r *real) driver() *raftcp.Driver {
	r.t.Helper()
	d, err := raftcp.Open(r.urls(), &raftcp.Options{Patience: time.Minute})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := d.Append(r.t.Context(), checkpoint.TaskID{Job: "ready", Task: checkpoint.NewNonce().String()}, claim()); err != nil {
		r.t.Fatal(err)
	}
	return d
}

// The conformance suite over a real group, while one member after the other, the leader
// most often, is stopped and started again.
func TestRealGroup(t *testing.T) {
	r := newReal(t, 3)
	status := r.driver()
	defer status.Close()
	stop := make(chan struct{})
	var disturb sync.WaitGroup
	disturb.Go(func() { r.disturb(stop) })

	var n atomic.Int32
	checkpointtest.Run(t, func(t *testing.T) checkpoint.Driver {
		d, err := raftcp.Open(r.urls(), &raftcp.Options{Patience: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		return checkpointtest.Within(d, fmt.Sprint("c", n.Add(1), "-"))
	}, &checkpointtest.Options{ComparesHead: true, KeepsBodies: cpwire.KeptBodies})
	close(stop)
	disturb.Wait()
}

// disturb stops the leader and starts it again, until stop is closed.
func (r *real) disturb(stop <-chan struct{}) {
	c, err := cpwire.New(r.urls(), nil)
	if err != nil {
		r.t.Error(err)
		return
	}
	defer c.Close()
	pause := time.NewTicker(700 * time.Millisecond)
	defer pause.Stop()
	for {
		select {
		case <-stop:
			return
		case <-pause.C:
		}
		s, err := c.Cluster(context.Background())
		if err != nil || s.Leader == "" {
			continue
		}
		r.stop(s.Leader)
		r.start(s.Leader, Options{})
	}
}

// A member that joins has what was there before, and the others' answers to a status.
func TestRealJoin(t *testing.T) {
	r := newReal(t, 1)
	d := r.driver()
	defer d.Close()
	c, err := cpwire.New(r.urls(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	es := fill(t, c, task("p7"), 300)

	r.initial["n2"] = "http://" + freeAddress(t)
	if _, err := c.AddLearner(t.Context(), "n2", r.initial["n2"]); err != nil {
		t.Fatal(err)
	}
	r.start("n2", Options{Join: []string{r.initial["n1"]}})
	if err := c.Promote(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	if err := c.TransferLeader(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Head(t.Context(), task("p7")); err != nil || e.Digest != es[299].Digest {
		t.Errorf("head %+v, %v", e, err)
	}
	s, err := c.Cluster(t.Context())
	if err != nil || s.Leader != "n2" || len(s.Members) != 2 || s.Members[0].Role != "follower" || s.Members[1].Role != "leader" {
		t.Errorf("status %+v, %v", s, err)
	}
	a, b := r.servers["n1"].svc, r.servers["n2"].svc
	waitFor(t, func() bool { return a.state.Load().AppliedIndex() == b.state.Load().AppliedIndex() })
	sa, _, err1 := a.state.Load().Sum()
	sb, _, err2 := b.state.Load().Sum()
	if err1 != nil || err2 != nil || sa != sb {
		t.Errorf("states %v and %v, %v %v", sa, sb, err1, err2)
	}
}

// What can never work is refused before anything is begun.
func TestStartRefuses(t *testing.T) {
	good := Options{ID: "n1", Data: t.TempDir(), Listen: "127.0.0.1:0", Insecure: true}
	for name, change := range map[string]func(o *Options){
		"no id":       func(o *Options) { o.ID = "" },
		"bad id":      func(o *Options) { o.ID = "a/b" },
		"no data":     func(o *Options) { o.Data = "" },
		"no security": func(o *Options) { o.Insecure = false },
		"not in it":   func(o *Options) { o.InitialCluster = map[string]string{"n2": "http://h:1"} },
		"no address":  func(o *Options) { o.Listen = "256.0.0.1:x" },
	} {
		o := good
		change(&o)
		if s, err := Start(t.Context(), o); err == nil {
			t.Errorf("%s: started", name)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A start that cannot go on says so by Done and Err, and its health tells.
func TestStartFails(t *testing.T) {
	s, err := Start(t.Context(), Options{ID: "n1", Data: t.TempDir(), Listen: "127.0.0.1:0", Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	<-s.Done() // neither an initial cluster nor anybody to join
	if s.Err() == nil {
		t.Error("no reason given")
	}
	if err := s.svc.failed(); err == nil {
		t.Error("the service is healthy")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A first start that waits for the others tells whom it waits for, and can be ended without
// anybody taking that for a failure.
func TestWaitingInFirstStart(t *testing.T) {
	away := "http://" + freeAddress(t)
	for role, opts := range map[string]Options{
		"follower": {InitialCluster: map[string]string{"n1": "http://" + freeAddress(t), "n2": away, "n3": "http://" + freeAddress(t)}},
		"learner":  {Join: []string{away}},
	} {
		var log lines
		opts.ID, opts.Data, opts.Listen, opts.Insecure = "n1", t.TempDir(), "127.0.0.1:0", true
		opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
		s, err := Start(t.Context(), opts)
		if err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { return raftnode.Known(opts.Data) }) // it has begun
		c, err := cpwire.New([]string{"http://" + s.Addr().String()}, &cpwire.Options{Patience: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		st, err := c.Cluster(t.Context())
		if err != nil || len(st.Members) != 1 || st.Members[0].Role != role || !st.Members[0].Reachable || !strings.Contains(st.Members[0].Why, away) {
			t.Errorf("status %+v, %v", st, err)
		}
		if _, err := c.Head(t.Context(), task("p7")); err == nil || !strings.Contains(err.Error(), away) {
			t.Errorf("head: %v", err)
		}
		if err := errors.Join(c.Close(), s.Close()); err != nil {
			t.Error(err)
		}
		<-s.Done()
		if err := s.Err(); err != nil || strings.Contains(log.String(), "level=ERROR") {
			t.Errorf("closed, and the reason is %v: %s", err, log.String())
		}
	}
}

// lines is a log that a test reads while it is written.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
