package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/server/internal/tasklog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// group is a group in one process: what is proposed to the member that leads is agreed on
// at once. It stands for raftnode where a test needs faults that it chooses itself.
type group struct {
	t       *testing.T
	id      string
	members []*member

	mu     sync.Mutex
	leader int // -1 for none
	term   uint64
	index  uint64
	ahead  time.Duration // of the clocks
	// after is asked once a proposal is in the log; an error of its is what the proposer
	// gets.
	after func() error
	// before is asked before a proposal is; its error is what the proposer gets.
	before func() error
	lag    string        // member that cannot be promoted
	waits  time.Duration // for a member to be promoted

	proposals atomic.Int64
}

// member is one of a group, with its API behind a net that a test can break.
type member struct {
	g    *group
	i    int
	name string
	m    *tasklog.Machine
	svc  *service
	http *httptest.Server

	learner bool
	status  raftnode.Status
	net     atomic.Pointer[func(w http.ResponseWriter, r *http.Request, serve http.HandlerFunc)]
}

func newGroup(t *testing.T, n int) *group {
	t.Helper()
	g := &group{t: t, id: "group-1", term: 1, after: func() error { return nil }, before: func() error { return nil }}
	for i := range n {
		m, err := tasklog.Open("state", &tasklog.Options{FS: vfs.NewMem()})
		if err != nil {
			t.Fatal(err)
		}
		one := &member{g: g, i: i, name: fmt.Sprint("n", i+1), m: m}
		one.svc = newService(one, slog.New(slog.DiscardHandler))
		one.svc.now = g.now
		one.svc.state.Store(m)
		api := one.svc.handler()
		one.http = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if broken := one.net.Load(); broken != nil {
				(*broken)(w, r, api.ServeHTTP)
				return
			}
			api.ServeHTTP(w, r)
		}))
		g.members = append(g.members, one)
		t.Cleanup(func() {
			one.http.Close()
			one.svc.close()
			one.svc.cluster.http.CloseIdleConnections()
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return g
}

func (g *group) urls() (urls []string) {
	for _, m := range g.members {
		urls = append(urls, m.http.URL)
	}
	return urls
}

// lead makes a member the leader; -1 for none.
func (g *group) lead(i int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leader, g.term = i, g.term+1
}

func (g *group) now() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return time.Now().Add(g.ahead)
}

func (g *group) forward(by time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ahead += by
}

// client returns a client of the group whose retries are quick.
func (g *group) client(opts *cpwire.Options) *cpwire.Client {
	g.t.Helper()
	if opts == nil {
		opts = &cpwire.Options{}
	}
	opts.FirstDelay, opts.MaxDelay = time.Millisecond, 20*time.Millisecond
	c, err := cpwire.New(g.urls(), opts)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			g.t.Error(err)
		}
	})
	return c
}

func (m *member) Group() string { return m.g.id }

func (m *member) leaderLocked() (protocol.Member, bool) {
	if m.g.leader < 0 {
		return protocol.Member{}, false
	}
	return m.g.members[m.g.leader].row(), true
}

func (m *member) row() protocol.Member {
	return protocol.Member{ID: uint64(m.i + 1), Name: m.name, URL: m.http.URL}
}

func (m *member) mayLeadLocked() error {
	if m.g.leader == m.i {
		return nil
	}
	leader, _ := m.leaderLocked()
	return &raftnode.Error{Op: "propose", Err: &raftnode.NotLeaderError{Leader: leader}}
}

func (m *member) Propose(ctx context.Context, data []byte) ([]byte, error) {
	g := m.g
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := m.mayLeadLocked(); err != nil {
		return nil, err
	}
	if err := g.before(); err != nil {
		return nil, err
	}
	g.index++
	g.proposals.Add(1)
	var result []byte
	for _, one := range g.members {
		rs, err := one.m.Apply([]tasklog.Entry{{Index: g.index, Term: g.term, Data: slices.Clone(data)}})
		if err != nil {
			return nil, err
		}
		if one == m {
			result = rs[0]
		}
	}
	return result, g.after()
}

func (m *member) ReadIndex(ctx context.Context) error {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	return m.mayLeadLocked()
}

func (m *member) Leader() (protocol.Member, bool) {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	return m.leaderLocked()
}

func (m *member) Status() raftnode.Status {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	s := m.status
	leader, _ := m.leaderLocked()
	s.Name, s.URL, s.Term, s.Leader, s.Applied = m.name, m.http.URL, m.g.term, leader.Name, m.m.AppliedIndex()
	if m.g.leader == m.i {
		s.Role = protocol.Leader
	}
	s.Members = nil
	for _, one := range m.g.members {
		role := protocol.Follower
		switch {
		case one.i == m.g.leader:
			role = protocol.Leader
		case one.learner:
			role = protocol.Learner
		}
		s.Members = append(s.Members, raftnode.MemberStatus{Member: one.row(), Role: role})
	}
	return s
}

func (m *member) AddLearner(_ context.Context, name, url string) (protocol.Member, error) {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	for _, one := range m.g.members {
		if one.name == name && one.http.URL == url {
			return one.row(), m.mayLeadLocked()
		}
	}
	return protocol.Member{ID: 99, Name: name, URL: url}, m.mayLeadLocked()
}

// change does what all changes do first.
func (m *member) change(name string, do func(one *member) error) error {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	if err := m.mayLeadLocked(); err != nil {
		return err
	}
	for _, one := range m.g.members {
		if one.name == name {
			return do(one)
		}
	}
	return &raftnode.Error{Op: "change", Subject: name, Err: raftnode.ErrNoMember}
}

func (m *member) Promote(ctx context.Context, name string) error {
	return m.change(name, func(one *member) error {
		if until, ok := ctx.Deadline(); ok {
			m.g.waits = time.Until(until)
		}
		if m.g.lag == name {
			return &raftnode.Error{Op: "promote", Subject: name, Err: raftnode.ErrConflict}
		}
		one.learner = false
		return nil
	})
}

func (m *member) Remove(_ context.Context, name string) error {
	return m.change(name, func(one *member) error {
		m.g.members = slices.DeleteFunc(slices.Clone(m.g.members), func(x *member) bool { return x == one })
		return m.g.after()
	})
}

func (m *member) TransferLeader(_ context.Context, name string) error {
	return m.change(name, func(one *member) error {
		m.g.leader, m.g.term = one.i, m.g.term+1
		return nil
	})
}

func (m *member) Snapshot(context.Context) (protocol.ID, error) {
	return protocol.ID{Term: 1, Index: 7}, nil
}

// The ways in which a net breaks.
var (
	// refuse ends the connection before the request is looked at.
	refuse = func(w http.ResponseWriter, r *http.Request, _ http.HandlerFunc) { panic(http.ErrAbortHandler) }
	// loseAnswer does what was asked and ends the connection.
	loseAnswer = func(w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
		serve(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	}
	// hang answers nothing while the client waits.
	hang = func(w http.ResponseWriter, r *http.Request, _ http.HandlerFunc) {
		_, _ = io.Copy(io.Discard, r.Body) // else the end of the client is not noticed
		<-r.Context().Done()
	}
)

func (m *member) breakNet(how func(http.ResponseWriter, *http.Request, http.HandlerFunc)) {
	if how == nil {
		m.net.Store(nil)
		return
	}
	m.net.Store(&how)
}

// flaky breaks every few requests in every way, and lets the leadership move with it.
func (g *group) flaky(seed uint64) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 0))
	roll := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return rng.IntN(n)
	}
	for _, m := range g.members {
		m.breakNet(func(w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
			switch roll(12) {
			case 0:
				refuse(w, r, serve)
			case 1:
				loseAnswer(w, r, serve)
			case 2:
				g.lead(roll(len(g.members)+1) - 1)
			case 3:
				g.lead(roll(len(g.members)))
			}
			serve(w, r)
		})
	}
	fault := func() error {
		switch roll(12) {
		case 0:
			return raftnode.ErrUnknown
		case 1:
			g.leader = roll(len(g.members)) // the lock is held
			return fmt.Errorf("%w: %w", raftnode.ErrUnknown, context.DeadlineExceeded)
		}
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.after, g.before = fault, fault
}
