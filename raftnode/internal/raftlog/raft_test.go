package raftlog_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// TestF34AppliedAboveTheCommit: the state machine is durable up to 12, the commit index of 12 was not synced. Raft
// panics on that; after RaiseCommit it starts (probe X2).
func TestF34AppliedAboveTheCommit(t *testing.T) {
	start := func(l *raftlog.Log) (panicked any) {
		defer func() { panicked = recover() }()
		must(t, l.Record(meta(12, 1), 12))
		_, err := raft.NewRawNode(config(1, l))
		must(t, err)
		return nil
	}
	onBoth(t, first(), func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		must(t, l.Save(state(1, 10), entries(2, 12, 1), true))
		l = reopen(t, l, open)
		cfg := config(1, l)
		cfg.Applied = 12
		func() {
			defer func() {
				if recover() == nil {
					t.Error("raft takes an applied index above the commit: RaiseCommit is not needed")
				}
			}()
			_, _ = raft.NewRawNode(cfg)
		}()
		must(t, l.RaiseCommit(12))
		if p := start(l); p != nil {
			t.Fatalf("raft after RaiseCommit: %v", p)
		}
	})
}

// TestF34ConfChangeAboveTheRecord: a member that starts at its newest record gets the changes above it again and
// ends with the same configuration, though its state machine is past them (probe X3b). Starting at what the state
// machine applied would skip them.
func TestF34ConfChangeAboveTheRecord(t *testing.T) {
	change, err := proto.Marshal(&pb.ConfChangeV2{Changes: []*pb.ConfChangeSingle{{Type: pb.ConfChangeAddLearnerNode.Enum(), NodeId: new(uint64(4))}}})
	must(t, err)
	onBoth(t, first(), func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		ents := entries(2, 106, 3)
		ents[101] = &pb.Entry{Index: new(uint64(103)), Term: new(uint64(3)), Type: pb.EntryConfChangeV2.Enum(), Data: change}
		must(t, l.Save(state(3, 106), ents, true))
		must(t, l.Record(meta(100, 3), 106))
		must(t, l.Compact(60))
		l = reopen(t, l, open)
		m := &member{id: 1, log: l, applied: 105}
		m.start(t)
		m.pump(t)
		if m.delivered[0] != 101 || !slices.Equal(m.conf.GetLearners(), []uint64{4}) {
			t.Fatalf("delivered %v, configuration %v", m.delivered, m.conf)
		}
	})
}

// TestF38TrailingEntriesWithRaft: the log begins at the older record, raft at the newer one; what lies between the
// newer one and the commit is delivered again, what lies between the two can be sent to others (probe X9).
func TestF38TrailingEntriesWithRaft(t *testing.T) {
	onBoth(t, first(), func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		must(t, l.Save(state(3, 100), heavy(2, 100, 3, 2000), true))
		must(t, l.Record(meta(40, 3), 100))
		must(t, l.Save(state(3, 100), heavy(101, 110, 3, 2000), true))
		must(t, l.Record(meta(90, 3), 100))
		must(t, l.Compact(40))
		l = reopen(t, l, open)
		if s := span(l); s[0] > 41 || s[1] != 110 {
			t.Fatalf("log %v", s)
		}
		m := &member{id: 1, log: l, applied: 100}
		m.start(t)
		m.pump(t)
		if len(m.delivered) != 10 || m.delivered[0] != 91 {
			t.Fatalf("delivered %v", m.delivered)
		}
		got, err := l.Entries(41, 91, 1<<40)
		must(t, err)
		equal(t, "trailing entries", got, heavy(41, 90, 3, 2000))
	})
}

// TestF37ConfigurationOfTheRecord: a restart begins with the configuration that was recorded with the snapshot, not
// with the newest one; with the newest one raft panics on the change that led to it (probe X3).
func TestF37ConfigurationOfTheRecord(t *testing.T) {
	joint := &pb.ConfChangeV2{Transition: pb.ConfChangeTransitionJointExplicit.Enum(), Changes: []*pb.ConfChangeSingle{
		{Type: pb.ConfChangeAddNode.Enum(), NodeId: new(uint64(4))}, {Type: pb.ConfChangeRemoveNode.Enum(), NodeId: new(uint64(3))}}}
	replay := func(conf *pb.ConfState) (panicked any) {
		defer func() { panicked = recover() }()
		l, _ := simulated(t)
		must(t, l.Save(state(3, 101), entries(2, 101, 3), true))
		must(t, l.Record(&pb.SnapshotMetadata{Index: new(uint64(100)), Term: new(uint64(3)), ConfState: conf}, 101))
		startsRaft(t, l).ApplyConfChange(joint)
		return nil
	}
	if p := replay(&pb.ConfState{Voters: []uint64{1, 2, 3}}); p != nil {
		t.Errorf("configuration as of the index: %v", p)
	}
	if replay(&pb.ConfState{Voters: []uint64{1, 2, 4}, VotersOutgoing: []uint64{1, 2, 3}}) == nil {
		t.Error("raft takes the current configuration: recording the old one is not needed")
	}
}

// TestF38InstallSurvivesACrash: etcd#10219, a snapshot whose commit index is lost ends in "tocommit out of range".
func TestF38InstallSurvivesACrash(t *testing.T) {
	for seed := range uint64(20) {
		d := walsim.New(&walsim.Options{Seed: seed})
		open := func() (raftlog.WAL, *raftlog.Replay, error) { return d.Open(first()) }
		l := mustOpen(t, open)
		must(t, l.Save(state(3, 10), entries(2, 20, 3), true))
		must(t, l.ApplySnapshot(meta(300, 3), state(3, 300), nil))
		d.Crash()
		l = mustOpen(t, open)
		equal(t, "hard state", l.HardState(), state(3, 300))
		m := &member{id: 2, log: l, applied: 300}
		m.start(t)
		must(t, m.rn.Step(&pb.Message{Type: pb.MsgHeartbeat.Enum(), From: new(uint64(1)), To: new(uint64(2)), Term: new(uint64(3)), Commit: new(uint64(300))}))
		m.pump(t)
	}
}

// member is a raft instance over a Log, with a state machine that is durable at once.
type member struct {
	id        uint64
	open      opener
	log       *raftlog.Log
	rn        *raft.RawNode
	conf      *pb.ConfState
	applied   uint64
	delivered []uint64 // by this instance
	installs  int
	state     map[uint64]string
	out       []*pb.Message
}

func (m *member) start(t testing.TB) {
	t.Helper()
	must(t, m.log.RaiseCommit(m.applied))
	rn, err := raft.NewRawNode(config(m.id, m.log))
	must(t, err)
	m.rn, m.delivered = rn, nil
	_, m.conf, _ = m.log.InitialState()
}

// pump does what raft asks for, in the documented order.
func (m *member) pump(t testing.TB) {
	t.Helper()
	for m.rn.HasReady() {
		rd := m.rn.Ready()
		if raft.IsEmptySnap(rd.Snapshot) {
			must(t, m.log.Save(rd.HardState, rd.Entries, rd.MustSync))
		} else {
			must(t, m.log.ApplySnapshot(rd.Snapshot.GetMetadata(), rd.HardState, rd.Entries))
			m.install(rd.Snapshot)
		}
		m.out = append(m.out, rd.Messages...)
		for _, e := range rd.CommittedEntries {
			m.apply(t, e)
		}
		m.rn.Advance(rd)
	}
}

func (m *member) apply(t testing.TB, e *pb.Entry) {
	t.Helper()
	m.delivered = append(m.delivered, e.GetIndex())
	if e.GetType() == pb.EntryConfChangeV2 {
		cc := &pb.ConfChangeV2{}
		must(t, proto.Unmarshal(e.GetData(), cc))
		m.conf = m.rn.ApplyConfChange(cc)
	}
	if e.GetIndex() <= m.applied {
		return // R2: skipped up to the applied index, but not the change above
	}
	m.applied = e.GetIndex()
	if m.state != nil && len(e.GetData()) > 0 {
		m.state[e.GetIndex()] = string(e.GetData())
	}
}

// install takes the state out of the message, as if it had been transferred.
func (m *member) install(s *pb.Snapshot) {
	m.installs++
	m.applied, m.conf = s.GetMetadata().GetIndex(), s.GetMetadata().GetConfState()
}

// TestSingleVoter: a group of one goes through crashes; what was delivered stays delivered.
func TestSingleVoter(t *testing.T) {
	d := walsim.New(&walsim.Options{Seed: 4, SegmentBytes: 2 << 10})
	opts := &raftlog.WALOptions{First: meta(1, 1, 1)}
	m := &member{id: 1, state: map[uint64]string{}}
	for round := range 12 {
		w, r, err := d.Open(opts)
		must(t, err)
		m.log = raftlog.New(w, r)
		m.start(t)
		must(t, m.rn.Campaign())
		m.pump(t)
		for k := range 30 {
			must(t, m.rn.Propose(fmt.Appendf(nil, "%d.%d", round, k)))
			m.pump(t)
		}
		if round%2 == 1 {
			term, err := m.log.Term(m.applied)
			must(t, err)
			must(t, m.log.Record(&pb.SnapshotMetadata{Index: new(m.applied), Term: new(term), ConfState: m.conf}, m.applied))
			must(t, m.log.Compact(m.applied-20))
		}
		if len(m.state) != 30*(round+1) {
			t.Fatalf("round %d: %d values applied", round, len(m.state))
		}
		d.Crash()
	}
	if d.Segments() > 6 {
		t.Errorf("%d segments were kept", d.Segments())
	}
}

// group is three members in one process, whose disks crash.
type group struct {
	t       *testing.T
	rng     *rand.Rand
	members []*member
	disks   []*walsim.Disk
	away    uint64 // the member that nothing reaches, if any
}

func newGroup(t *testing.T, seed uint64) *group {
	g := &group{t: t, rng: rand.New(rand.NewPCG(seed, 8))}
	for id := uint64(1); id <= 3; id++ {
		d := walsim.New(&walsim.Options{Seed: seed*10 + id, SegmentBytes: 3 << 10})
		m := &member{id: id, state: map[uint64]string{}}
		m.open = func() (raftlog.WAL, *raftlog.Replay, error) { return d.Open(first()) }
		g.members, g.disks = append(g.members, m), append(g.disks, d)
		g.restart(m)
	}
	return g
}

func (g *group) restart(m *member) {
	w, r, err := m.open()
	must(g.t, err)
	m.log = raftlog.New(w, r)
	m.start(g.t)
}

// settle delivers messages until there are none, losing one in ten.
func (g *group) settle() {
	for {
		var msgs []*pb.Message
		for _, m := range g.members {
			m.pump(g.t)
			msgs, m.out = append(msgs, m.out...), nil
		}
		if len(msgs) == 0 {
			return
		}
		for _, msg := range msgs {
			g.deliver(msg)
		}
	}
}

func (g *group) deliver(msg *pb.Message) {
	from, to := g.members[msg.GetFrom()-1], g.members[msg.GetTo()-1]
	if g.rng.IntN(10) == 0 || from.id == g.away || to.id == g.away {
		if msg.GetType() == pb.MsgSnap {
			from.rn.ReportSnapshot(to.id, raft.SnapshotFailure)
		}
		return
	}
	if msg.GetType() == pb.MsgSnap { // the data goes along
		for i, v := range from.state {
			if i <= msg.GetSnapshot().GetMetadata().GetIndex() {
				to.state[i] = v
			}
		}
	}
	_ = to.rn.Step(proto.Clone(msg).(*pb.Message)) // a removed sender is no error of the test
	if msg.GetType() == pb.MsgSnap {
		from.rn.ReportSnapshot(to.id, raft.SnapshotFinish)
	}
}

// turn is a tick, a proposal, and now and then a record or a crash.
func (g *group) turn(k int) {
	for _, m := range g.members {
		m.rn.Tick()
	}
	for _, m := range g.members {
		if m.rn.BasicStatus().RaftState == raft.StateLeader {
			_ = m.rn.Propose(fmt.Appendf(nil, "value %d", k)) // may be dropped amid a transfer
		}
	}
	g.settle()
	m := g.members[g.rng.IntN(3)]
	switch g.rng.IntN(12) {
	case 0:
		g.record(m)
	case 1:
		g.disks[m.id-1].Crash()
		g.restart(m)
	case 2:
		g.away = uint64(g.rng.IntN(4))
	}
}

func (g *group) record(m *member) {
	i := m.applied
	if i <= m.log.Recorded().GetIndex() {
		return
	}
	term, err := m.log.Term(i)
	must(g.t, err)
	must(g.t, m.log.Record(&pb.SnapshotMetadata{Index: new(i), Term: new(term), ConfState: m.conf}, i))
	must(g.t, m.log.Compact(i-min(i, g.rng.Uint64N(8))))
}

// TestThreeMembersCrash: three members lose their processes and what was not synced, again and again. They agree,
// nothing applied is lost, and the group goes on (I1).
func TestThreeMembersCrash(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() {
		seeds = 5
	}
	installs := 0
	for seed := range seeds {
		g := newGroup(t, seed)
		for k := range 400 {
			g.turn(k)
		}
		g.away = 0
		for range 100 { // quiet, so that all catch up
			for _, m := range g.members {
				m.rn.Tick()
			}
			g.settle()
		}
		for _, m := range g.members[1:] {
			if m.applied != g.members[0].applied || len(m.state) != len(g.members[0].state) {
				t.Fatalf("seed %d: member %d applied %d values up to %d, member 1 %d up to %d",
					seed, m.id, len(m.state), m.applied, len(g.members[0].state), g.members[0].applied)
			}
			for i, v := range g.members[0].state {
				if m.state[i] != v {
					t.Fatalf("seed %d: entry %d is %q at member %d, %q at member 1", seed, i, m.state[i], m.id, v)
				}
			}
		}
		if n := len(g.members[0].state); n < 100 {
			t.Errorf("seed %d: only %d values", seed, n)
		}
		installs += g.members[0].installs + g.members[1].installs + g.members[2].installs
	}
	if installs == 0 {
		t.Error("no snapshot was installed")
	}
}
