package raftsnap

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// Manager replicates the snapshots of one member of a group. All methods may be called
// from any goroutine; before Start and after Close the ones that ask for something do
// nothing or answer with a refusal of kind Closed.
type Manager struct {
	host   Host
	store  *snapstore.Store
	opts   Options
	server *transfer.Server
	client *transfer.Client
	pacer  *transfer.Pacer
	began  time.Time

	work   context.Context // of all that runs beside the loop; ended by Close
	cancel context.CancelFunc
	works  sync.WaitGroup // what runs beside the loop
	wake   chan struct{}  // the queue has something; one slot
	tidy   chan struct{}  // retention may have something to do; one slot
	idle   chan struct{}  // closed once works are through, while closing
	done   chan struct{}  // closed once the loop has ended

	house sync.Mutex // a round of retention, or the end of a pin that one must not miss
	loop  loop       // owned by the goroutine of run
	count counters

	mu struct {
		sync.Mutex
		state  lifecycle
		queue  []entry
		ticked bool // a Tick is in the queue already
		status Status
	}
}

// lifecycle goes one way.
type lifecycle uint8

const (
	fresh lifecycle = iota
	running
	closing // nothing new is taken in; what ends is still told to the Machine
	closed
)

// New returns a Manager that serves host from store. Nothing happens before Start. The
// store stays the caller's to close, after the Manager.
func New(host Host, store *snapstore.Store, opts *Options) *Manager {
	m := &Manager{
		host: host, store: store, opts: opts.withDefaults(), began: time.Now(),
		wake: make(chan struct{}, 1), tidy: make(chan struct{}, 1),
		idle: make(chan struct{}), done: make(chan struct{}),
	}
	m.work, m.cancel = context.WithCancel(context.Background())
	m.loop = newLoop(protocol.New(m.opts.Protocol, rand.Text()))

	m.pacer = transfer.NewPacer(&transfer.PacerOptions{Limit: m.opts.RateLimit, Steady: m.opts.Unpaced})
	m.client = transfer.NewClient(m.clientOptions())
	m.server = transfer.NewServer(store, (*answers)(m), m.serverOptions())
	return m
}

func (m *Manager) clientOptions() *transfer.ClientOptions {
	o := &transfer.ClientOptions{TLS: m.opts.TLS, Header: m.opts.Header, Timeout: m.opts.CallTimeout}
	if m.opts.HTTP != nil {
		o.Transport = m.opts.HTTP.Transport
	}
	return o
}

func (m *Manager) serverOptions() *transfer.ServerOptions {
	var o transfer.ServerOptions
	if m.opts.Server != nil {
		o = *m.opts.Server
	}
	o.MaxWait, o.Work, o.Ended, o.Damaged = m.opts.MaxWait, m.pacer.Work(), m.served, m.servedDamaged
	return &o
}

// Handler serves the other members under /raftsnap/v1/. It may be used before Start and
// after Close, and then refuses.
func (m *Manager) Handler() http.Handler { return m.server }

// Start begins. The Manager stops at Close or when ctx ends. A second call does nothing.
func (m *Manager) Start(ctx context.Context) {
	m.mu.Lock()
	start := m.mu.state == fresh
	if start {
		m.mu.state = running
	}
	m.mu.Unlock()
	if !start {
		return
	}

	m.works.Go(m.keepHouse)
	m.works.Go(m.keepScrubbing)
	go m.run(context.AfterFunc(ctx, m.end))
	m.Poll()
}

// Close cancels everything, waits for it and returns. What transfers have moved so far
// stays in the store for the next one. Further calls wait as well.
func (m *Manager) Close() error {
	m.end()
	<-m.done
	return nil
}

// end begins the closing, once. The loop does the rest.
func (m *Manager) end() {
	m.mu.Lock()
	before := m.mu.state
	switch before {
	case fresh:
		m.mu.state = closed
	case running:
		m.mu.state = closing
		m.mu.queue = append(m.mu.queue, entry{event: protocol.Close{}})
	}
	m.mu.Unlock()

	switch before {
	case fresh:
		m.cancel()
		m.server.Close()
		m.client.Close()
		close(m.done)
	case running:
		m.nudge()
	}
}

// Poll says that something in the View has changed. It never blocks: what comes of it is
// started, reported or completed in the background.
func (m *Manager) Poll() { m.post(entry{event: protocol.Tick{}}) }

// Install says that the leader wants this member to install a snapshot (R8). It never
// blocks; what becomes of it is told to the leader.
func (m *Manager) Install(e protocol.Envelope) {
	m.post(entry{event: protocol.InstallAsked{Envelope: e}})
}

// Want asks for a recorded snapshot at or above minIndex soon, also in a quiet group. It
// never blocks.
func (m *Manager) Want(minIndex uint64) { m.WantFor(0, minIndex) }

// WantFor is like Want for a snapshot whose configuration has a member (R6): Raft ignores
// one that does not name the receiver.
func (m *Manager) WantFor(member, minIndex uint64) {
	m.post(entry{event: protocol.Wanted{MinIndex: minIndex, Needs: member}})
}

// Snapshot asks for a snapshot that contains all that is applied here now, and returns when
// one is recorded here. The error says why there is none: closed, or ctx ended or
// Options.ManualTimeout passed and what stood in the way until then.
func (m *Manager) Snapshot(ctx context.Context) (protocol.ID, error) {
	ctx, cancel := context.WithTimeout(ctx, m.opts.ManualTimeout)
	defer cancel()

	w := &wish{min: m.host.View().Applied, granted: make(chan protocol.ID, 1)}
	if w.min == 0 && m.taking() {
		return protocol.ID{}, errors.New("snapshot: nothing is applied yet")
	}
	if !m.post(entry{event: protocol.Wanted{MinIndex: w.min}, then: func(l *loop) { l.wishes = append(l.wishes, w) }}) {
		return protocol.ID{}, fmt.Errorf("snapshot at %d: %w", w.min, errClosed)
	}
	select {
	case id := <-w.granted:
		return id, nil
	case <-m.done:
		return protocol.ID{}, fmt.Errorf("snapshot at %d: %w", w.min, errClosed)
	case <-ctx.Done():
		m.post(entry{then: func(l *loop) { l.forget(w) }})
		return protocol.ID{}, fmt.Errorf("snapshot at %d: %s: %w", w.min, m.Status().Why, ctx.Err())
	}
}

// errClosed is what callers get after Close.
var errClosed = &protocol.Refusal{Kind: protocol.Closed, Text: "the member is not running"}

// Status tells what the Manager is doing. It never blocks.
func (m *Manager) Status() Status {
	m.mu.Lock()
	s := m.mu.status
	m.mu.Unlock()
	s.Stats = m.stats()
	return s
}

// ObserveFsync tells how long the WAL's last fsync took, and of how many bytes it was.
// Transfers slow down when it takes longer than usual.
func (m *Manager) ObserveFsync(d time.Duration, bytes int64) { m.pacer.Observe(d, bytes) }
