package raftnode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// simNode is a member of the simulated group, with all that it keeps.
type simNode struct {
	s    *sim
	id   uint64
	name string

	// What survives a crash.
	disk    *walsim.Disk
	first   bool // of the group's first members
	table   []protocol.Member
	durable simState
	store   map[protocol.ID]*simSnapshot
	staging map[protocol.ID]int // pieces received
	full    bool
	failing bool // a write of the log will fail
	removed bool
	rotten  bool // a snapshot has rotted here

	// What does not.
	up      bool
	run     int
	log     *raftlog.Log
	member  *member
	applier *applier
	machine *protocol.Machine
	sm      *simMachine
	works   []work
	busy    bool // works are being done
	seq     uint64
	fetches map[protocol.TransferID]*simFetch
	open    map[protocol.TransferID]bool // began and are not freed
	pending map[uint64]bool              // proposals
}

// simState is a state machine's state: a hash of everything that was applied.
type simState struct {
	applied uint64
	chain   chainLink
}

// simSnapshot is a directory of the store.
type simSnapshot struct {
	held    protocol.Held
	state   simState
	damaged bool
}

// simMachine is the state machine.
type simMachine struct {
	n      *simNode
	state  simState
	frozen map[string]simState
}

func (m *simMachine) Apply(entries []Entry) ([][]byte, error) {
	for _, e := range entries {
		if e.Index != m.state.applied+1 && m.state.applied != 0 && m.state.applied != bootIndex {
			return nil, fmt.Errorf("entry %d after %d", e.Index, m.state.applied)
		}
		m.state = simState{e.Index, m.state.chain.next(e.Index, e.Term, e.Data)}
		m.n.s.learn(m.n, e.Index, m.state.chain)
	}
	if m.n.s.chance(0.05) {
		m.n.durable = m.state
	}
	return make([][]byte, len(entries)), nil
}

func (m *simMachine) AppliedIndex() uint64 { return m.state.applied }
func (m *simMachine) Close() error         { return nil }

func (m *simMachine) Snapshot(dir string) error {
	m.frozen[dir] = m.state
	return nil
}

func (m *simMachine) Install(dir string) error {
	for id, snap := range m.n.store {
		if id.String() != dir {
			continue
		}
		if snap.damaged {
			m.n.s.fail("%s installs damaged snapshot %d", m.n.name, id.Index)
		}
		m.state, m.n.durable = snap.state, snap.state
		m.n.s.learn(m.n, m.state.applied, m.state.chain)
		return nil
	}
	return errors.New("no such directory " + dir)
}

func (s *sim) newNode() *simNode {
	s.nextName++
	n := &simNode{
		s: s, id: uint64(s.nextName), name: fmt.Sprintf("m%d", s.nextName),
		disk:  walsim.New(&walsim.Options{Seed: s.rng.Uint64(), SegmentBytes: 4 << 10}),
		store: map[protocol.ID]*simSnapshot{}, staging: map[protocol.ID]int{},
	}
	s.nodes = append(s.nodes, n)
	return n
}

func (n *simNode) row() protocol.Member { return protocol.Member{ID: n.id, Name: n.name, URL: n.name} }

func (n *simNode) protocolConfig() protocol.Config {
	return protocol.Config{
		Entries: 60, TrailingEntries: 10, MinGap: 200 * time.Millisecond,
		InfoDeadline: 2 * time.Second, MakeDeadline: 4 * time.Second, StartDeadline: 3 * time.Second,
		IdleDeadline: 3 * time.Second, InstallDeadline: 20 * time.Second, StandIn: 5 * time.Second,
		ReportDeadline: 4 * time.Second, BackoffMax: 4 * time.Second, SpreadInterval: 3 * time.Second,
		FloorTime: 10 * time.Second, LogCap: -1, Seed: n.s.seed + n.id,
	}
}

// start is what Node.start does, over the simulated disk (R2).
func (n *simNode) start() {
	if n.up || n.removed {
		return
	}
	n.run++
	n.repair()
	opts := &raftlog.WALOptions{Metadata: []byte(n.name)}
	if n.first {
		index, term := uint64(bootIndex), uint64(bootTerm)
		opts.First = &pb.SnapshotMetadata{Index: &index, Term: &term, ConfState: n.s.initial}
	}
	wal, replay, err := n.disk.Open(opts)
	if err != nil {
		n.s.fail("%s: open log: %v", n.name, err)
		return
	}
	n.log = raftlog.New(wal, replay)
	n.sm = &simMachine{n: n, state: n.durable, frozen: map[string]simState{}}
	at, id, ok := n.startingPoint()
	if !ok {
		n.disk.Crash()
		n.s.after(time.Second, n.start) // until somebody gives a snapshot
		return
	}
	if err := n.log.RaiseCommit(n.sm.AppliedIndex()); err != nil {
		n.s.fail("%s: %v", n.name, err)
		return
	}
	n.launch(at, id)
}

// repair ends the faults of the log's disk.
func (n *simNode) repair() {
	n.failing = false
	n.disk.Fail(walsim.OpSave, 0, nil)
}

// startingPoint mirrors Node.startingPoint.
func (n *simNode) startingPoint() (protocol.Meta, protocol.ID, bool) {
	rec := n.log.Recorded()
	at := protocol.Meta{Group: "g", Term: rec.GetTerm(), Index: rec.GetIndex(), Conf: fromConfState(rec.GetConfState()), Members: n.table}
	id := protocol.ID{Term: rec.GetTerm(), Index: rec.GetIndex()}
	if rec.GetIndex() <= bootIndex {
		return at, id, true
	}
	held := n.heldAt(rec.GetIndex(), rec.GetTerm())
	if n.sm.AppliedIndex() >= rec.GetIndex() {
		if held != nil {
			return held.held.Meta, held.held.ID, true
		}
		return at, id, true
	}
	if held == nil {
		if held = n.refetch(rec.GetIndex()); held == nil {
			return at, id, false
		}
		if err := adopt(n.log, held.held.Meta); err != nil {
			n.s.fail("%s: adopt %d: %v", n.name, held.held.ID.Index, err)
		}
	}
	n.s.counts["restart with install"]++
	if err := n.sm.Install(held.held.ID.String()); err != nil {
		n.s.fail("%s: install at start: %v", n.name, err)
	}
	return held.held.Meta, held.held.ID, true
}

func (n *simNode) heldAt(index, term uint64) *simSnapshot {
	for _, id := range n.heldIDs() {
		snap := n.store[id]
		if id.Index != index || id.Term != term {
			continue
		}
		if snap.damaged {
			delete(n.store, id)
			continue
		}
		return snap
	}
	return nil
}

// refetch takes a snapshot at or above an index from anybody who can be reached.
func (n *simNode) refetch(index uint64) *simSnapshot {
	for _, other := range n.s.nodes {
		if other == n || !other.up || n.s.cut[[2]uint64{n.id, other.id}] || n.s.cut[[2]uint64{other.id, n.id}] {
			continue
		}
		for _, id := range other.heldIDs() {
			if snap := other.store[id]; id.Index >= index && !snap.damaged && snap.held.Meta.Conf.Has(n.id) {
				mine := *snap
				n.store[id] = &mine
				n.s.counts["refetched"]++
				return &mine
			}
		}
	}
	return nil
}

func (n *simNode) launch(at protocol.Meta, id protocol.ID) {
	n.up, n.works, n.busy = true, nil, false
	n.fetches, n.open, n.pending = map[protocol.TransferID]*simFetch{}, map[protocol.TransferID]bool{}, map[uint64]bool{}
	n.applier = newApplier("g", n.lineage(), n.sm, at, n.finish)
	n.machine = protocol.New(n.protocolConfig(), fmt.Sprintf("%s.%d", n.name, n.run))
	m, err := newMember(memberConfig{
		group: "g", id: n.id, electionTicks: 10, heartbeat: 1,
		logger: slog.New(slog.DiscardHandler), now: func() time.Duration { return n.s.now },
	}, n.log, at.Members, id, protocol.NewInstalls(n.protocolConfig()), n)
	if err != nil {
		n.s.fail("%s: %v", n.name, err)
		n.up = false
		return
	}
	n.member = m
	n.s.logf("%s starts at record %d, applied %d", n.name, at.Index, n.sm.state.applied)
	n.s.after(n.s.between(0, simTick), n.ticker(n.run))
}

func (n *simNode) lineage() protocol.Lineage {
	return protocol.Lineage{Maker: n.id, Incarnation: n.name}
}

// ticker ticks a run of the node until it ends.
func (n *simNode) ticker(run int) func() {
	return func() {
		if !n.up || n.run != run {
			return
		}
		n.check(n.member.tick())
		n.member.back(n.held())
		n.pump()
		n.step(protocol.Tick{})
		n.s.after(simTick, n.ticker(run))
	}
}

// later runs something for this run of the node, if it lasts so long.
func (n *simNode) later(d time.Duration, do func()) {
	run := n.run
	n.s.after(d, func() {
		if n.up && n.run == run {
			do()
		}
	})
}

// crash ends the process the hard way.
func (n *simNode) crash() {
	if !n.up {
		return
	}
	n.s.logf("%s crashes at applied %d", n.name, n.sm.state.applied)
	n.s.counts["crash"]++
	n.up = false
	n.run++
	n.disk.Crash()
}

// check crashes a node whose log has failed, as Node does.
func (n *simNode) check(err error) {
	if err == nil {
		return
	}
	if n.full || n.failing && errors.Is(err, errBroken) {
		n.s.counts["log failed"]++
		n.crash()
		n.s.after(5*time.Second, n.start)
		return
	}
	n.s.fail("%s: %v", n.name, err)
}

// pump does what Raft has ready, and lets the state machine go on.
func (n *simNode) pump() {
	if !n.up {
		return
	}
	n.check(n.member.drain())
	if !n.up {
		return
	}
	if n.busy || len(n.works) == 0 {
		return
	}
	n.busy = true
	n.later(n.s.between(0, 20*time.Millisecond), n.applyAll)
}

// applyAll is the applier's goroutine.
func (n *simNode) applyAll() {
	works := n.works
	n.works, n.busy = nil, false
	for _, w := range works {
		if err := n.applier.do(w); err != nil && w.install != nil && n.rotten {
			// It rotted on the way into Raft: the member stops, and fetches one when it starts.
			n.crash()
			n.s.after(time.Second, n.start)
			return
		} else if err != nil {
			n.s.fail("%s: apply: %v", n.name, err)
			return
		}
		if !n.up {
			return
		}
	}
	n.pump()
}

func (n *simNode) receive(msg *pb.Message) {
	if err := n.member.step(msg); err != nil && !n.full {
		n.s.logf("%s: step %v: %v", n.name, msg.GetType(), err)
	}
	n.pump()
}

// finish is told of applied proposals.
func (n *simNode) finish(k proposalKey, _ []byte) {
	if k.run == uint64(n.run) && n.pending[k.seq] {
		delete(n.pending, k.seq)
		n.s.acked = max(n.s.acked, n.sm.state.applied)
	}
}

func (n *simNode) propose() {
	n.seq++
	data := binary.BigEndian.AppendUint64(nil, n.s.rng.Uint64())
	k := proposalKey{uint64(n.run), n.seq}
	n.pending[n.seq] = true
	if err := n.member.propose([][]byte{k.encode(data)}); err != nil {
		delete(n.pending, n.seq)
	}
	n.pump()
}

// changeMembers adds a member, promotes a learner, removes somebody, or moves the lead.
func (n *simNode) changeMembers(other *simNode) {
	s, m := n.s, n.member
	voters, learners := m.conf.GetVoters(), m.conf.GetLearners()
	propose := func(kind pb.ConfChangeType, r protocol.Member) {
		err := m.proposeConf(kind, change{Request: r.Name, Member: r}, n.log.HardState().GetCommit())
		s.logf("%s proposes %v %s: %v", n.name, kind, r.Name, err)
		n.pump()
	}
	switch what := s.rng.IntN(4); {
	case what == 0 && len(voters)+len(learners) < 7 && len(s.nodes) < 12:
		joiner := s.newNode()
		joiner.table = append(m.members(), joiner.row())
		propose(pb.ConfChangeAddLearnerNode, joiner.row())
		s.after(s.between(0, 2*time.Second), joiner.start)
	case what == 1 && len(learners) > 0:
		propose(pb.ConfChangeAddNode, m.table[learners[s.rng.IntN(len(learners))]])
	case what == 2 && len(voters) > 3 && m.table[other.id].ID != 0:
		propose(pb.ConfChangeRemoveNode, other.row())
	case what == 3 && slices.Contains(voters, other.id):
		m.rn.TransferLeader(other.id)
		n.pump()
	}
}

// The node is the outbox of its member.

func (n *simNode) Send(msgs []*pb.Message) {
	for _, msg := range msgs {
		n.s.deliver(n.id, msg.GetTo(), func(to *simNode) {
			if to.removed {
				return
			}
			if _, ok := to.member.table[n.id]; !ok && len(to.member.table) > 0 && to.expelled(n) {
				n.leave()
				return
			}
			to.receive(msg)
		})
	}
}

// expelled reports whether this node has seen the other one's removal.
func (n *simNode) expelled(other *simNode) bool {
	return n.member.delivered >= other.member.delivered && !fromConfState(n.member.conf).Has(other.id) && other.member.delivered > 0
}

// leave is what a member does that is told that it was removed.
func (n *simNode) leave() {
	if n.up {
		n.s.logf("%s is told that it was removed", n.name)
		n.up, n.removed = false, true
		n.run++
		n.disk.Crash()
	}
}

func (n *simNode) Install(e protocol.Envelope) {
	n.later(0, func() { n.step(protocol.InstallAsked{Envelope: e}) })
}

func (n *simNode) Want(minIndex, needs uint64) { n.later(0, func() { n.want(minIndex, needs) }) }

func (n *simNode) want(minIndex, needs uint64) {
	n.step(protocol.Wanted{MinIndex: minIndex, Needs: needs})
}

func (n *simNode) Tell(o protocol.Outcome)           { n.tell(o) }
func (n *simNode) Apply(w work)                      { n.countConf(w); n.works = append(n.works, w) }
func (n *simNode) Readable(uint64, uint64)           {}
func (n *simNode) Led(protocol.Role, uint64, uint64) { clear(n.pending) }
func (n *simNode) Members(rows []protocol.Member)    { n.table = rows }
func (n *simNode) heldIDs() []protocol.ID {
	return slices.SortedFunc(maps.Keys(n.store), protocol.ID.Compare)
}
func (n *simNode) active(id uint64) bool {
	o := n.s.node(id)
	return o.up && !n.s.cut[[2]uint64{o.id, n.id}]
}

// countConf notes what kind of change was committed, and ends a node that sees its own
// removal.
func (n *simNode) countConf(w work) {
	if w.conf == nil || n.member.role != protocol.Leader {
		return
	}
	for _, r := range w.conf.table {
		if r.ID > simMembers && slices.Contains(w.conf.conf.Voters, r.ID) {
			n.s.counts["promoted"]++
		} else if r.ID > simMembers {
			n.s.counts["learner added"]++
		}
	}
	if len(w.conf.conf.Voters) < simMembers {
		n.s.counts["removed"]++
	}
}
