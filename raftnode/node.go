package raftnode

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/peer"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftsnap"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// Node is a member of a group. Make it with New, serve its Handler, and Start it.
type Node struct {
	opts Options
	door *peer.Door

	clientTLS *tls.Config
	began     time.Time
	run       uint64 // tells this run's proposals from all others

	openWAL func(dir string, o *raftlog.WALOptions) (raftlog.WAL, *raftlog.Replay, error) // the seam for failing disks

	// Set by Start, before ready is set.
	identity  *peer.Identity
	log       *raftlog.Log
	store     *snapstore.Store
	sm        StateMachine
	transport *peer.Transport
	snaps     *raftsnap.Manager
	member    *member  // the loop's
	applier   *applier // the applier's, save for applied
	stale     bool     // the loop's: what was published is out of date
	ready     atomic.Bool

	box     *mailbox
	pipe    *pipe
	waiting *waiters
	reads   *readers
	view    atomic.Pointer[protocol.View]
	conf    atomic.Pointer[protocol.Conf]
	rows    atomic.Pointer[[]protocol.Member]
	leading latest

	tableChanged chan struct{} // one slot

	mu      sync.Mutex // guards the fields below
	changes map[string]chan error
	err     error

	once    sync.Once       // of stop
	life    context.Context // ends when the node begins to stop
	end     context.CancelFunc
	start   sync.Mutex // held by Start, and by Close when it has ended
	started bool
	owned   sync.WaitGroup
	closing func() error // what Close does, once
}

// leadership is who leads, as the loop saw it last.
type leadership struct {
	role         protocol.Role
	term, leader uint64
}

// New returns a member that is not running yet. Its Handler can be served at once, which
// the others need to start.
func New(opts Options) (*Node, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, wrap("open member", opts.Name, err)
	}
	door, err := peer.NewDoor(opts.Dir, &peer.DoorOptions{TLS: opts.TLS, Insecure: opts.Insecure, Logger: opts.Logger})
	if err != nil {
		return nil, wrap("open member", opts.Name, err)
	}
	if id := door.Identity(); opts.URL == "" && id != nil {
		opts.URL = id.URL
	}
	if opts.URL == "" {
		return nil, wrap("open member", opts.Name, errors.New("a URL is needed"))
	}
	clientTLS, err := opts.TLS.Client()
	if err != nil {
		return nil, wrap("open member", opts.Name, err)
	}
	var run [8]byte
	rand.Read(run[:])
	n := &Node{
		opts: opts, door: door, clientTLS: clientTLS, began: time.Now(), run: binary.BigEndian.Uint64(run[:]) | 1,
		box: newMailbox(), pipe: newPipe(), waiting: newWaiters(), reads: newReaders(),
		openWAL: raftlog.OpenWAL, changes: map[string]chan error{}, tableChanged: make(chan struct{}, 1),
	}
	n.life, n.end = context.WithCancel(context.Background())
	n.closing = sync.OnceValue(n.closeAll)
	return n, nil
}

// Known reports whether a directory belongs to a member already, so that New needs no URL.
func Known(dir string) bool {
	_, err := peer.Load(dir)
	return err == nil
}

// Handler serves the other members, under /raft/v1/ and /raftsnap/v1/. Until Start has
// come far enough it answers 503 where it cannot answer yet.
func (n *Node) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/raft/v1/", n.door)
	mux.Handle("/raft/v1/stream", n.whenReady(func() http.Handler { return n.transport.Handler() }))
	mux.Handle("/raftsnap/v1/", n.whenReady(func() http.Handler { return n.door.Guard(n.snaps.Handler()) }))
	return mux
}

func (n *Node) whenReady(h func() http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !n.ready.Load() {
			http.Error(w, "member is starting", http.StatusServiceUnavailable)
			return
		}
		h().ServeHTTP(w, r)
	})
}

func (n *Node) now() time.Duration { return time.Since(n.began) }

func (n *Node) dir(name string) string { return filepath.Join(n.opts.Dir, name) }

// loop is the one goroutine that Raft runs on.
func (n *Node) loop() {
	ticker := time.NewTicker(n.opts.Tick)
	defer ticker.Stop()
	for {
		var err error
		look := false
		select {
		case <-n.life.Done():
			return
		case <-ticker.C:
			err, look = n.member.tick(), true
		case <-n.box.wake:
		}
		if err == nil {
			err = n.handle(n.box.take())
		}
		if err == nil {
			err = n.member.drain()
		}
		if look || n.stale {
			n.publish()
		}
		if err != nil {
			n.stop(wrap("run member", n.opts.Name, err))
			return
		}
	}
}

func (n *Node) handle(in mail) error {
	full := n.pipe.waiting() >= maxWaiting
	for _, m := range in.messages {
		if full && m.GetType() == pb.MsgApp && len(m.GetEntries()) > 0 {
			continue // the state machine is too slow; Raft sends them again
		}
		if err := n.member.step(m); err != nil {
			n.opts.Logger.Debug("message refused by raft", "type", m.GetType(), "from", m.GetFrom(), "err", err)
		}
	}
	for _, id := range in.unreachable {
		n.member.unreachable(id)
	}
	for _, f := range in.tasks {
		f()
	}
	if len(in.proposals) > 0 {
		n.propose(in)
	}
	if len(in.reads) > 0 {
		if err := n.member.readIndex(n.reads.ask(in.reads)); err != nil {
			n.reads.fail(err, false)
		}
	}
	return n.failure()
}

// failure returns what a task has found out to be final.
func (n *Node) failure() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// maxWaiting is how many bytes may wait for the state machine before proposals are
// refused.
const maxWaiting = 256 << 20

func (n *Node) propose(in mail) {
	err := error(ErrBusy)
	if n.pipe.waiting() < maxWaiting {
		err = n.member.propose(in.proposals)
	}
	if err == nil {
		return
	}
	for _, k := range in.keys {
		n.waiting.answer(k.seq, answer{err: err})
	}
}

// publish makes what the loop knows visible to everybody else, at every tick and when
// something has changed that snapshots depend on.
func (n *Node) publish() {
	n.stale = false
	if n.member.recorded.Index > bootIndex {
		n.member.back(n.store.List())
	}
	v := n.member.view(n.applier.applied.Load(), n.lineage(), n.transport.Active)
	n.view.Store(&v)
	conf := fromConfState(n.member.conf)
	n.conf.Store(&conf)
	n.snaps.Poll()
}

func (n *Node) lineage() protocol.Lineage {
	return protocol.Lineage{Maker: n.identity.ID, Incarnation: n.identity.Incarnation}
}

// apply is the goroutine of the state machine.
func (n *Node) apply() {
	for {
		all := n.pipe.take()
		if all == nil {
			return
		}
		for i, w := range all {
			if n.life.Err() != nil {
				abandon(all[i:])
				return
			}
			err := n.applier.do(w)
			n.pipe.done(w)
			if err != nil {
				n.stop(wrap("run member", n.opts.Name, err))
				abandon(all[i+1:])
				return
			}
			n.reads.reached(n.applier.applied.Load())
			if w.conf != nil && w.conf.left {
				n.leave()
				abandon(all[i+1:])
				return
			}
		}
	}
}

// abandon tells those who wait that work will not be done.
func abandon(all []work) {
	for _, w := range all {
		switch {
		case w.install != nil:
			w.install.done(ErrClosed)
		case w.freeze != nil:
			w.freeze.done(protocol.Meta{}, ErrClosed)
		}
	}
}

// finish answers a proposal of this run.
func (n *Node) finish(k proposalKey, result []byte) {
	if k.run == n.run {
		n.waiting.answer(k.seq, answer{result: result})
	}
}

// stop ends the member's goroutines, with the reason for Err; nil for Close.
func (n *Node) stop(err error) {
	n.once.Do(func() {
		n.mu.Lock()
		n.err = err
		n.mu.Unlock()
		if err != nil {
			n.opts.Logger.Error("member stops", "err", err)
		}
		n.leading.store(leadership{})
		n.end()
		abandon(n.pipe.close())
		left := n.box.close()
		for _, r := range left.reads {
			r.done <- ErrClosed
		}
		n.reads.fail(ErrClosed, true)
		n.waiting.answerAll(answer{err: ErrUnknown})
	})
}

// Done is closed when the member stops, by Close or by itself; Err tells why. Close is
// still needed.
func (n *Node) Done() <-chan struct{} { return n.life.Done() }

// Err is why the member has stopped by itself, nil if it has not.
func (n *Node) Err() error { return n.failure() }

// Close stops the member and waits for everything that it has begun. What was proposed
// and not answered ends with ErrUnknown. A Start under way is ended first. Further calls
// return the same.
func (n *Node) Close() error {
	n.stop(nil)
	return n.closing()
}

func (n *Node) closeAll() error {
	n.start.Lock()
	defer n.start.Unlock()
	var errs []error
	if n.snaps != nil {
		errs = append(errs, n.snaps.Close())
	}
	if n.transport != nil {
		n.transport.Close()
	}
	n.owned.Wait()
	for _, c := range []func() error{n.closeState, n.closeStore, n.closeLog} {
		errs = append(errs, c())
	}
	return wrap("close member", n.opts.Name, errors.Join(errs...))
}

func (n *Node) closeState() error {
	if n.sm == nil {
		return nil
	}
	return n.sm.Close()
}

func (n *Node) closeStore() error {
	if n.store == nil {
		return nil
	}
	return n.store.Close()
}

func (n *Node) closeLog() error {
	if n.log == nil {
		return nil
	}
	return n.log.Close()
}

// nodeOutbox carries out what the member decides. All its methods are called by the loop.
type nodeOutbox struct{ n *Node }

func (o nodeOutbox) Send(msgs []*pb.Message)     { o.n.transport.Send(msgs) }
func (o nodeOutbox) Install(e protocol.Envelope) { o.n.snaps.Install(e) }
func (o nodeOutbox) Want(minIndex, needs uint64) { o.n.snaps.WantFor(needs, minIndex) }
func (o nodeOutbox) Tell(out protocol.Outcome)   { o.n.snaps.Tell(out) }
func (o nodeOutbox) Readable(number, index uint64) {
	o.n.reads.named(number, index, o.n.applier.applied.Load())
}
func (o nodeOutbox) Members(rows []protocol.Member) { o.n.membersChanged(rows) }

func (o nodeOutbox) Apply(w work) {
	if w.conf != nil {
		o.n.changeCommitted(w.entries[0])
	}
	if !o.n.pipe.put(w) {
		abandon([]work{w})
	}
}

func (o nodeOutbox) Led(role protocol.Role, term, leader uint64) {
	n := o.n
	before := n.leading.load()
	if before.role == protocol.Leader && (role != protocol.Leader || before.term != term) {
		// What was proposed may be committed by the next leader, or never.
		n.waiting.answerAll(answer{err: ErrUnknown})
		n.reads.fail(&NotLeaderError{}, false)
		n.failChanges(ErrUnknown)
	}
	n.stale = true
	n.leading.store(leadership{role, term, leader})
	n.opts.Logger.Info("role", "role", role, "term", term, "leader", n.nameOf(leader))
}

// receiver is the mailbox as the transport sees it.
type receiver struct{ n *Node }

func (r receiver) Receive(m *pb.Message) { r.n.box.message(m) }

func (r receiver) Unreachable(id uint64) {
	_ = r.n.box.put(func(in *mail) bool { in.unreachable = append(in.unreachable, id); return true })
}

// leave ends a member whose own log says that it was removed. Its directory refuses to
// start from now on.
func (n *Node) leave() {
	if err := n.door.Retire(); err != nil {
		n.opts.Logger.Error("removal was not noted", "err", err)
	}
	n.stop(wrap("run member", n.opts.Name, ErrRemoved))
}

// removed is told that this member belongs to the group no more. One other member's word
// ends this run, but only the own log ends the directory's use.
func (n *Node) removed(by uint64) {
	n.opts.Logger.Warn("removed from the group", "says", by)
	n.stop(wrap("run member", n.opts.Name, ErrRemoved))
}

// refused is told that another member turns this one away.
func (n *Node) refused(by uint64, r *peer.Refusal) {
	n.opts.Logger.Error("refused by another member", "member", by, "err", r)
}

// snapshotLost is told that a MsgSnap did not leave: Raft waits for its end (R7).
func (n *Node) snapshotLost(to uint64) {
	_ = n.box.task(func() { n.member.reportAll(n.member.installs.SendFailed(n.now(), to)) })
}

// latest is the leadership, which the loop stores and others wait for.
type latest struct {
	mu    sync.Mutex
	value leadership
	next  chan struct{} // closed at the next store
}

func (c *latest) load() leadership {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.value
}

func (c *latest) store(v leadership) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value = v
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}

// wait returns once ok likes the leadership.
func (c *latest) wait(ctx context.Context, ok func(leadership) bool) error {
	for {
		c.mu.Lock()
		if ok(c.value) {
			c.mu.Unlock()
			return nil
		}
		if c.next == nil {
			c.next = make(chan struct{})
		}
		next := c.next
		c.mu.Unlock()
		select {
		case <-next:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
