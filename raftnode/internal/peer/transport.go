package peer

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Receiver is the Raft member behind a Transport.
type Receiver interface {
	// Receive takes a message of another member. Messages of one stream come one after the
	// other. It may block, which slows the sender down, but must return once the member
	// stops, or Close waits for ever.
	Receive(m *raftpb.Message)
	// Unreachable says that messages to a member were lost. It is called from a goroutine of
	// its own, at most some times a second for one member, and should not block for long.
	Unreachable(id uint64)
}

// Options are the options of a Transport. Nil and zero are valid.
type Options struct {
	Beat         time.Duration // between signs of life on an idle stream, default 250 ms
	Dead         time.Duration // a stream without a sign of life for so long is given up, default 3 s
	ActiveWindow time.Duration // Active looks back so far, default 1.5 s
	QueueLength  int           // messages that may wait for one stream, default 4096
	QueueBytes   int64         // bytes of entries that may wait for one stream, default 128 MiB
	MaxMessage   int           // largest message in bytes, default 64 MiB, the same in all members

	// SnapshotLost is told of each MsgSnap that was not sent, from the goroutine that calls
	// Receiver.Unreachable: the leader owes raft a report (R7).
	SnapshotLost func(to uint64)
	// Refused is told, at most every ten seconds for each reason, that another member turns this one away or is
	// not who it should be. It must not call Close.
	Refused func(peer uint64, r *Refusal)
	// Removed is told, once, that another member says this one was removed from the group.
	// It must not call Close.
	Removed func(by uint64)
}

func (o *Options) withDefaults() Options {
	var c Options
	if o != nil {
		c = *o
	}
	c.Beat = cmp.Or(c.Beat, 250*time.Millisecond)
	c.Dead = cmp.Or(c.Dead, 3*time.Second)
	c.ActiveWindow = cmp.Or(c.ActiveWindow, 1500*time.Millisecond)
	c.QueueLength = cmp.Or(c.QueueLength, 4096)
	c.QueueBytes = cmp.Or(c.QueueBytes, 128<<20)
	c.MaxMessage = cmp.Or(c.MaxMessage, maxPayload)
	return c
}

// PeerStatus is how it stands with one other member.
type PeerStatus struct {
	Member    protocol.Member
	Active    bool   // heard from lately
	Connected bool   // both streams to it stand
	Trouble   string // why not, "" for no reason
}

// Transport carries Raft messages. It keeps two outgoing streams to each member of the
// table, and takes incoming ones through its Handler.
type Transport struct {
	self  Identity
	door  *Door
	recv  Receiver
	opts  Options
	log   *slog.Logger
	epoch time.Time // contacts are kept as time since then

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	notes  *notes
	told   sync.Once // Options.Removed

	mu struct {
		sync.RWMutex
		closed  bool
		peers   map[uint64]*remote
		inbound map[inboundKey]*inbound
		contact map[uint64]*atomic.Int64 // also of senders that no table names yet
	}
}

// remote is another member of the table.
type remote struct {
	member protocol.Member
	lanes  [lanes]*lane
	cancel context.CancelFunc
}

// NewTransport makes the transport of a member that has started. It connects to nobody
// until SetMembers. TLS, logger and the rule for http URLs are the door's.
func NewTransport(id *Identity, door *Door, recv Receiver, opts *Options) *Transport {
	t := &Transport{self: *id, door: door, recv: recv, opts: opts.withDefaults(), log: door.log, epoch: time.Now()}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.mu.peers = map[uint64]*remote{}
	t.mu.inbound = map[inboundKey]*inbound{}
	t.mu.contact = map[uint64]*atomic.Int64{}
	t.notes = &notes{wake: make(chan struct{}, 1), unreachable: map[uint64]bool{}, snapshots: map[uint64]bool{}}
	t.wg.Go(func() { t.notes.run(t.ctx, t) })
	return t
}

// Handler takes the streams of other members, at StreamPath. They last until Close, so a
// server that is shut down in peace waits for that.
func (t *Transport) Handler() http.Handler { return http.HandlerFunc(t.serveStream) }

// Send queues messages for their members and never blocks. What finds no room, or a
// member that cannot be reached, is dropped, and Receiver.Unreachable says so. The
// messages must not be changed any more.
func (t *Transport) Send(msgs []*raftpb.Message) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, m := range msgs {
		to := m.GetTo()
		if to == t.self.ID || raft.IsLocalMsgTarget(to) {
			continue
		}
		if r := t.mu.peers[to]; r == nil || !r.lanes[laneOf(m)].queue.push(m) {
			t.notes.lost(m)
		}
	}
}

// SetMembers replaces the member table: it connects to who is new, reconnects to who has
// moved, and parts with who is gone, who is told so and never let in again. Incarnations
// in the table count like those seen.
func (t *Transport) SetMembers(members []protocol.Member) {
	t.report("note incarnations of the member table", t.door.known.learn(without(members, t.self.ID)))

	next := map[uint64]protocol.Member{}
	for _, m := range without(members, t.self.ID) {
		next[m.ID] = m
	}
	for _, id := range t.replace(next) {
		t.report("note a removed member", t.door.known.remove(id))
		t.expel(id)
	}
}

// replace changes the table and returns the ids that are gone.
func (t *Transport) replace(next map[uint64]protocol.Member) (gone []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil
	}
	for id, r := range t.mu.peers {
		m, stays := next[id]
		if stays && m.URL == r.member.URL {
			r.member = m
			continue
		}
		r.cancel()
		delete(t.mu.peers, id)
		if !stays {
			gone = append(gone, id)
		}
	}
	for id, m := range next {
		if t.mu.peers[id] == nil && !t.door.known.removed(id) {
			t.mu.peers[id] = t.connectLocked(m)
		}
	}
	return gone
}

func (t *Transport) connectLocked(m protocol.Member) *remote {
	ctx, cancel := context.WithCancel(t.ctx)
	r := &remote{member: m, cancel: cancel}
	for kind := range lanes {
		l := newLane(t, m, kind)
		r.lanes[kind] = l
		t.wg.Go(func() { l.run(ctx) })
	}
	return r
}

// expel ends the streams of a removed member with a word why.
func (t *Transport) expel(id uint64) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for key, in := range t.mu.inbound {
		if key.from == id {
			in.abort(refuse(Removed, "member %s was removed from the group", formatID(id)))
		}
	}
}

// Active tells whether a member was heard from lately, on whatever stream.
func (t *Transport) Active(id uint64) bool {
	if id == t.self.ID {
		return true
	}
	at := t.contact(id).Load()
	return at != 0 && time.Since(t.epoch)-time.Duration(at) < t.opts.ActiveWindow
}

// contact is where the last sign of life of a member is kept.
func (t *Transport) contact(id uint64) *atomic.Int64 {
	t.mu.RLock()
	c := t.mu.contact[id]
	t.mu.RUnlock()
	if c != nil {
		return c
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.contact[id] == nil {
		t.mu.contact[id] = new(atomic.Int64)
	}
	return t.mu.contact[id]
}

func (t *Transport) touch(c *atomic.Int64) { c.Store(int64(time.Since(t.epoch))) }

// Status tells how it stands with each other member of the table, sorted by id.
func (t *Transport) Status() []PeerStatus {
	t.mu.RLock()
	ids := slices.Sorted(maps.Keys(t.mu.peers))
	var out []PeerStatus
	for _, id := range ids {
		r := t.mu.peers[id]
		s := PeerStatus{Member: r.member, Connected: true}
		for _, l := range r.lanes {
			connected, trouble := l.status()
			s.Connected = s.Connected && connected
			s.Trouble = cmp.Or(s.Trouble, trouble)
		}
		out = append(out, s)
	}
	t.mu.RUnlock()
	for i := range out {
		out[i].Active = t.Active(out[i].Member.ID)
	}
	return out
}

func (t *Transport) report(what string, err error) {
	if err != nil {
		t.log.Error(what, "err", err)
	}
}

// Close ends all streams and waits for every goroutine. Messages in queues are dropped.
func (t *Transport) Close() error {
	t.mu.Lock()
	t.mu.closed = true
	for _, in := range t.mu.inbound {
		in.abort(nil)
	}
	t.mu.Unlock()
	t.cancel()
	t.wg.Wait()
	return nil
}

// notes tells the Receiver of losses, from one goroutine: whoever sends may be the very
// loop that such a word is for.
type notes struct {
	mu          sync.Mutex
	unreachable map[uint64]bool
	snapshots   map[uint64]bool // those of them that a MsgSnap was lost for
	wake        chan struct{}
}

// noteTime is the least time between two words about losses.
const noteTime = 100 * time.Millisecond

func (n *notes) lost(m *raftpb.Message) {
	n.mu.Lock()
	n.unreachable[m.GetTo()] = true
	if m.GetType() == raftpb.MsgSnap {
		n.snapshots[m.GetTo()] = true
	}
	n.mu.Unlock()
	n.ring()
}

func (n *notes) cut(id uint64) {
	n.mu.Lock()
	n.unreachable[id] = true
	n.mu.Unlock()
	n.ring()
}

func (n *notes) ring() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

func (n *notes) run(ctx context.Context, t *Transport) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.wake:
		}
		n.mu.Lock()
		unreachable, snapshots := n.unreachable, n.snapshots
		n.unreachable, n.snapshots = map[uint64]bool{}, map[uint64]bool{}
		n.mu.Unlock()
		for id := range unreachable {
			t.recv.Unreachable(id)
		}
		for id := range snapshots {
			if t.opts.SnapshotLost != nil {
				t.opts.SnapshotLost(id)
			}
		}
		pause(ctx, noteTime)
	}
}
