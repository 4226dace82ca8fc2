package raftnode_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// group is a Raft group in this process, over real connections.
type group struct {
	t       *testing.T
	tune    func(*raftnode.Options)
	tls     *raftnode.TLS
	initial map[string]string
	members map[string]*testMember
}

// testMember is a member and what it is served by.
type testMember struct {
	name, dir, addr string
	scheme          string
	listener        net.Listener // of the first start: the port is nobody else's until then
	node            *raftnode.Node
	sm              *kv
	server          *http.Server
	served          sync.WaitGroup
}

const patience = 60 * time.Second

// newGroup starts n members m1, m2, … and waits for a leader.
func newGroup(t *testing.T, n int, tune func(*raftnode.Options)) *group {
	t.Helper()
	return newGroupWith(t, n, tune, nil)
}

func newGroupWith(t *testing.T, n int, tune func(*raftnode.Options), tls *raftnode.TLS) *group {
	t.Helper()
	g := &group{t: t, tune: tune, tls: tls, initial: map[string]string{}, members: map[string]*testMember{}}
	for i := range n {
		m := g.prepare(fmt.Sprintf("m%d", i+1))
		g.initial[m.name] = m.url()
	}
	var starting sync.WaitGroup
	for _, m := range g.members {
		starting.Go(func() { g.start(m, nil) })
	}
	starting.Wait()
	t.Cleanup(func() {
		for _, m := range g.members {
			g.stop(m)
		}
	})
	if !t.Failed() {
		g.leader()
	}
	return g
}

// prepare makes a member that has an address and a directory, and does not run.
func (g *group) prepare(name string) *testMember {
	g.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		g.t.Fatal(err)
	}
	m := &testMember{name: name, dir: g.t.TempDir(), addr: l.Addr().String(), scheme: "http", listener: l}
	if g.tls != nil {
		m.scheme = "https"
	}
	g.t.Cleanup(func() { l.Close() }) // closed twice where the member was started
	g.members[name] = m
	return m
}

func (m *testMember) url() string { return m.scheme + "://" + m.addr }

// start runs a member on its directory.
func (g *group) start(m *testMember, join []string) {
	g.t.Helper()
	if err := g.tryStart(m, join, patience, openKV); err != nil {
		g.t.Errorf("start %s: %v", m.name, err)
	}
}

// tryStart serves and starts a member, and returns what Start says.
func (g *group) tryStart(m *testMember, join []string, limit time.Duration, open func(string) (raftnode.StateMachine, error)) error {
	g.t.Helper()
	opts := raftnode.Options{
		Name: m.name, Dir: m.dir, URL: m.url(), InitialCluster: g.initial, Join: join, Insecure: g.tls == nil, TLS: g.tls,
		Tick: 20 * time.Millisecond, Logger: logger(m.name),
	}
	if len(join) > 0 {
		opts.InitialCluster = nil
	}
	if g.tune != nil {
		g.tune(&opts)
	}
	node, err := raftnode.New(opts)
	if err != nil {
		return err
	}
	m.node = node
	l := m.listener
	if m.listener = nil; l == nil {
		if l, err = net.Listen("tcp", m.addr); err != nil {
			return err
		}
	}
	m.server = &http.Server{Handler: node.Handler(), ErrorLog: log.New(io.Discard, "", 0)}
	if err := raftnode.ConfigureServer(m.server, opts.TLS); err != nil {
		return err
	}
	m.served.Go(func() {
		if g.tls != nil {
			_ = m.server.ServeTLS(l, "", "")
			return
		}
		_ = m.server.Serve(l)
	})
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return node.Start(ctx, func(dir string) (raftnode.StateMachine, error) {
		sm, err := open(dir)
		switch sm := sm.(type) {
		case *kv:
			m.sm = sm
		case durableKV:
			m.sm = sm.kv
		}
		return sm, err
	})
}

// logger is quiet unless the test is asked to talk.
func logger(name string) *slog.Logger {
	if os.Getenv("SNAPFERRY_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})).With("member", name)
}

// stop ends a member; its directory stays.
func (g *group) stop(m *testMember) {
	if m.node == nil {
		return
	}
	m.server.Close()
	if err := m.node.Close(); err != nil {
		g.t.Errorf("close %s: %v", m.name, err)
	}
	m.served.Wait()
	m.node = nil
}

// eventually waits until ok, and fails with what it says otherwise.
func (g *group) eventually(what string, ok func() bool) {
	g.t.Helper()
	end := time.After(patience)
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for !ok() {
		select {
		case <-end:
			for _, m := range g.members {
				if m.node != nil {
					s := m.node.Status()
					g.t.Logf("%s: %v of term %d, leader %s, applied %d, log %d..%d, snapshot %+v, %s, why: %s, err: %v",
						m.name, s.Role, s.Term, s.Leader, s.Applied, s.First, s.Last, s.Snapshot, s.Snaps.Stage, s.Snaps.Why, m.node.Err())
				}
			}
			g.t.Fatalf("not in %v: %s", patience, what)
		case <-again.C:
		}
	}
}

// leader waits for a leader and returns it.
func (g *group) leader() (lead *testMember) {
	g.t.Helper()
	g.eventually("a leader", func() bool {
		lead = nil
		for _, m := range g.members {
			if m.node != nil && m.node.Status().Role == protocol.Leader {
				lead = m
			}
		}
		return lead != nil
	})
	return lead
}

// follower returns a running member that does not lead.
func (g *group) follower() *testMember {
	lead := g.leader()
	for _, m := range g.members {
		if m.node != nil && m != lead {
			return m
		}
	}
	g.t.Fatal("no follower runs")
	return nil
}

// put sets a key, whoever leads, until it is acknowledged.
func (g *group) put(key, value string) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		_, err := g.leader().node.Propose(ctx, []byte(key+"="+value))
		if err == nil {
			return
		}
		if ctx.Err() != nil || !errors.Is(err, raftnode.ErrNotLeader) && !errors.Is(err, raftnode.ErrUnknown) && !errors.Is(err, raftnode.ErrBusy) {
			g.t.Fatalf("put %s: %v", key, err)
		}
	}
}

// fill puts n keys, many at once.
func (g *group) fill(prefix string, n int) {
	g.t.Helper()
	var all sync.WaitGroup
	for w := range 16 {
		all.Go(func() {
			for i := w; i < n; i += 16 {
				g.put(fmt.Sprintf("%s%d", prefix, i), "v")
			}
		})
	}
	all.Wait()
}

// level waits until all running members have applied the same.
func (g *group) level() {
	g.t.Helper()
	g.eventually("all members level", func() bool {
		var applied []uint64
		for _, m := range g.members {
			if m.node != nil {
				applied = append(applied, m.node.Status().Applied)
			}
		}
		for _, a := range applied {
			if a != applied[0] || a == 0 {
				return false
			}
		}
		return true
	})
}
