package raftnode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Every first member of a group begins with this record in its log, as if the group had
// already agreed on its membership: no entry has to be replayed to know who votes.
const (
	bootIndex = 1
	bootTerm  = 1
)

// outbox is where a member's decisions go. Calls must not block and must not call back.
type outbox interface {
	// Send sends messages to their members, or drops them.
	Send([]*pb.Message)
	// Install asks for the data of a snapshot that the leader has announced (R8).
	Install(protocol.Envelope)
	// Want asks for a snapshot at or above an index that names a member (R6).
	Want(minIndex, needs uint64)
	// Tell sends the leader the outcome of an install that needed no data.
	Tell(protocol.Outcome)
	// Apply queues committed work for the state machine.
	Apply(work)
	// Readable tells that reads with this number may be answered at index.
	Readable(number, index uint64)
	// Led tells that leadership has changed; what was proposed here may be lost.
	Led(role protocol.Role, term, leader uint64)
	// Members tells who belongs to the group now, oneself included.
	Members([]protocol.Member)
}

// memberConfig is what a member is made of.
type memberConfig struct {
	group         string
	id            uint64
	electionTicks int
	heartbeat     int
	logger        *slog.Logger
	now           func() time.Duration
}

// member is Raft's part of a group member: it decides, and its log remembers. One
// goroutine uses it. It knows nothing of connections, files beside the log, and time
// beside cfg.now.
type member struct {
	cfg      memberConfig
	rn       *raft.RawNode
	log      *raftlog.Log
	out      outbox
	installs *protocol.Installs

	role         protocol.Role
	term, leader uint64
	conf         *pb.ConfState              // after the last change that was committed
	table        map[uint64]protocol.Member // after the same change
	added        map[uint64]uint64          // index of the change that added a member
	pendingConf  uint64                     // no other change before this index is delivered
	confSince    time.Duration              // when the last change was proposed here
	delivered    uint64                     // last entry given to out.Apply

	recorded protocol.ID // of the newest record; its digest is zero when no directory backs it
	handing  *handing    // the install that Raft is being given
	pace     pace
	err      error // final: the log has failed
}

// handing is a snapshot on its way into Raft.
type handing struct {
	meta protocol.Meta
	dir  string
	done func(error) // once the state machine has it
	used bool        // Raft took it
}

// pace measures how many entries a second are committed.
type pace struct {
	at        time.Duration
	index     uint64
	perSecond float64
}

// observe folds what happened since the last call into a moving mean over some seconds.
func (p *pace) observe(now time.Duration, index uint64) {
	dt := (now - p.at).Seconds()
	if dt < 0.5 {
		return
	}
	if p.index > 0 && index >= p.index {
		p.perSecond += (float64(index-p.index)/dt - p.perSecond) * min(1, dt/5)
	}
	p.at, p.index = now, index
}

// newMember starts Raft over a log (R2): i is the newest record, whose table names the
// members.
func newMember(cfg memberConfig, log *raftlog.Log, table []protocol.Member, recorded protocol.ID, book *protocol.Installs, out outbox) (*member, error) {
	_, conf, err := log.InitialState()
	if err != nil {
		return nil, err
	}
	start := recordedIndex(log)
	rn, err := raft.NewRawNode(&raft.Config{
		ID:                        cfg.id,
		ElectionTick:              cfg.electionTicks,
		HeartbeatTick:             cfg.heartbeat,
		Storage:                   log,
		Applied:                   start,
		MaxSizePerMsg:             1 << 20,
		MaxInflightMsgs:           256,
		MaxInflightBytes:          64 << 20,
		MaxUncommittedEntriesSize: 256 << 20,
		MaxCommittedSizePerReady:  16 << 20,
		CheckQuorum:               true,
		PreVote:                   true,
		StepDownOnRemoval:         true,
		DisableProposalForwarding: true,
		Logger:                    raftLogger{cfg.logger},
	})
	if err != nil {
		return nil, err
	}
	m := &member{
		cfg: cfg, rn: rn, log: log, out: out, installs: book,
		conf: conf, table: map[uint64]protocol.Member{}, added: map[uint64]uint64{},
		delivered: start, recorded: recorded,
	}
	for _, r := range table {
		m.table[r.ID] = r
	}
	m.soft()
	return m, nil
}

func recordedIndex(log *raftlog.Log) uint64 {
	if meta := log.Recorded(); meta != nil {
		return meta.GetIndex()
	}
	return 0
}

// tick lets time pass by one unit of Raft.
func (m *member) tick() error {
	m.rn.Tick()
	m.reportAll(m.installs.Tick(m.cfg.now(), m.log.Bytes()))
	m.pace.observe(m.cfg.now(), m.delivered)
	return m.compact()
}

// step takes a message from another member. An error is about the message only.
func (m *member) step(msg *pb.Message) error {
	if !welcome(msg) {
		return fmt.Errorf("%v is not for members to send", msg.GetType())
	}
	if msg.GetType() == pb.MsgSnap {
		return m.stepSnapshot(msg)
	}
	err := m.rn.Step(msg)
	if errors.Is(err, raft.ErrProposalDropped) || errors.Is(err, raft.ErrStepPeerNotFound) {
		return nil // of a member that was removed, say
	}
	return err
}

// welcome keeps out what no member of ours ever sends. Proposals and changes of the
// membership are checked where they are made, which is at the leader, and what is
// malformed would make Raft panic.
func welcome(msg *pb.Message) bool {
	switch msg.GetType() {
	case pb.MsgProp, pb.MsgReadIndex, pb.MsgReadIndexResp, pb.MsgTransferLeader, pb.MsgForgetLeader:
		return false
	case pb.MsgHeartbeatResp:
		n := len(msg.GetContext())
		return n == 0 || n == 8
	}
	return true
}

// unreachable says that a message to a member was not sent.
func (m *member) unreachable(id uint64) {
	m.rn.ReportUnreachable(id)
}

// propose proposes entries in one go, so that one message and one fsync carry them all.
func (m *member) propose(data [][]byte) error {
	if m.role != protocol.Leader {
		return m.notLeader()
	}
	entries := make([]*pb.Entry, len(data))
	for i, d := range data {
		entries[i] = &pb.Entry{Data: d}
	}
	err := m.rn.Step(&pb.Message{Type: pb.MsgProp.Enum(), From: &m.cfg.id, To: &m.cfg.id, Entries: entries})
	if errors.Is(err, raft.ErrProposalDropped) {
		if m.rn.BasicStatus().LeadTransferee != 0 {
			return m.notLeader()
		}
		return ErrBusy
	}
	return err
}

func (m *member) notLeader() error {
	if m.leader == m.cfg.id {
		return &NotLeaderError{}
	}
	return &NotLeaderError{Leader: m.table[m.leader]}
}

// readIndex asks Raft from which index on a read is linearizable; out.Readable tells.
func (m *member) readIndex(number uint64) error {
	if m.role != protocol.Leader {
		return m.notLeader()
	}
	m.rn.ReadIndex(be64(number))
	return nil
}

// drain does everything that Raft has ready, in the order that its documentation and R8
// ask for. An error is final, and returned ever after: the log can no longer be trusted
// to be durable.
func (m *member) drain() error {
	if m.err == nil {
		m.err = m.drainAll()
	}
	return m.err
}

func (m *member) drainAll() error {
	for m.rn.HasReady() {
		rd := m.rn.Ready()
		if rd.SoftState != nil {
			m.soft()
		}
		// A leader's entries may travel while its own disk writes them: Raft counts its
		// own vote for them only after Advance.
		early, late := m.split(rd)
		m.send(early)
		if err := m.save(rd); err != nil {
			return err
		}
		m.send(late)
		if err := m.deliver(rd.CommittedEntries); err != nil {
			return err
		}
		for _, r := range rd.ReadStates {
			m.out.Readable(fromBE64(r.RequestCtx), r.Index)
		}
		m.rn.Advance(rd)
	}
	m.soft()
	return nil
}

// split separates what may be sent before this Ready is durable: a leader's entries. Its
// term is durable already, as Raft counts a candidate's own vote only after Advance.
func (m *member) split(rd raft.Ready) (early, late []*pb.Message) {
	if m.role != protocol.Leader {
		return nil, rd.Messages
	}
	for _, msg := range rd.Messages {
		if t := msg.GetType(); t == pb.MsgApp || t == pb.MsgHeartbeat {
			early = append(early, msg)
		} else {
			late = append(late, msg)
		}
	}
	return early, late
}

// save makes a Ready durable before anything that depends on it happens.
func (m *member) save(rd raft.Ready) error {
	if raft.IsEmptySnap(rd.Snapshot) {
		return m.log.Save(rd.HardState, rd.Entries, rd.MustSync)
	}
	meta := rd.Snapshot.GetMetadata()
	h := m.handing
	if h == nil || h.meta.Index != meta.GetIndex() {
		return fmt.Errorf("raft took snapshot %d, which nobody gave it", meta.GetIndex())
	}
	if err := m.log.ApplySnapshot(meta, rd.HardState, rd.Entries); err != nil {
		return err
	}
	h.used = true
	m.delivered = meta.GetIndex()
	m.setConf(meta.GetConfState(), h.meta.Members)
	m.out.Apply(work{install: &installWork{meta: h.meta, dir: h.dir, done: h.done}})
	return nil
}

func (m *member) setConf(conf *pb.ConfState, table []protocol.Member) {
	m.conf = conf
	m.table = map[uint64]protocol.Member{}
	for _, r := range table {
		m.table[r.ID] = r
	}
	m.out.Members(m.members())
}

// deliver hands committed entries to the state machine. Changes of the membership take
// effect here, between the entries they lie between.
func (m *member) deliver(entries []*pb.Entry) error {
	run := 0
	for i, e := range entries {
		if e.GetType() == pb.EntryNormal {
			continue
		}
		if run < i {
			m.out.Apply(work{entries: entries[run:i]})
		}
		left, err := m.applyConf(e)
		if err != nil {
			return err
		}
		m.out.Apply(work{entries: entries[i : i+1], conf: &confWork{conf: fromConfState(m.conf), table: m.members(), left: left}})
		run = i + 1
	}
	if run < len(entries) {
		m.out.Apply(work{entries: entries[run:]})
	}
	if n := len(entries); n > 0 {
		m.delivered = entries[n-1].GetIndex()
	}
	return nil
}

// soft notices a change of role, term or leader.
func (m *member) soft() {
	s := m.rn.BasicStatus()
	role := m.roleOf(s.RaftState)
	term, leader := s.HardState.GetTerm(), s.Lead
	if role == m.role && term == m.term && leader == m.leader {
		return
	}
	if m.role == protocol.Leader && (role != protocol.Leader || term != m.term) {
		m.installs.Lost()
	}
	if role == protocol.Leader && (m.role != protocol.Leader || term != m.term) {
		// Raft itself refuses a change before everything older is committed.
		m.pendingConf, _ = m.log.LastIndex()
	}
	m.role, m.term, m.leader = role, term, leader
	m.out.Led(role, term, leader)
}

func (m *member) roleOf(s raft.StateType) protocol.Role {
	switch {
	case s == raft.StateLeader:
		return protocol.Leader
	case slices.Contains(m.conf.GetLearners(), m.cfg.id):
		return protocol.Learner
	}
	return protocol.Follower
}

// members returns the member table, sorted by id.
func (m *member) members() []protocol.Member {
	return slices.SortedFunc(maps.Values(m.table), func(a, b protocol.Member) int { return cmp.Compare(a.ID, b.ID) })
}

func (m *member) firstIndex() uint64 {
	first, _ := m.log.FirstIndex() // never fails
	return first
}

// view tells the snapshot protocol how things stand.
func (m *member) view(applied uint64, lineage protocol.Lineage, active func(uint64) bool) protocol.View {
	last, _ := m.log.LastIndex()
	v := protocol.View{
		Group: m.cfg.group, Self: m.cfg.id, Lineage: lineage,
		Role: m.role, Term: m.term, Leader: m.leader,
		Applied: applied, Commit: m.rn.BasicStatus().HardState.GetCommit(),
		First: m.firstIndex(), Last: last, LogBytes: m.log.Bytes(),
		AppliedBytes: m.log.BytesAbove(m.recorded.Index),
	}
	if m.recorded.Index > bootIndex {
		v.RecordedTerm, v.RecordedIndex = m.recorded.Term, m.recorded.Index
	}
	v.Peers = m.peers(active)
	return v
}

func (m *member) peers(active func(uint64) bool) []protocol.Peer {
	match := map[uint64]uint64{}
	if m.role == protocol.Leader {
		m.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) { match[id] = pr.Match })
	}
	var peers []protocol.Peer
	for _, r := range m.members() {
		if r.ID == m.cfg.id {
			continue
		}
		peers = append(peers, protocol.Peer{
			Member: r, Voter: slices.Contains(m.conf.GetVoters(), r.ID), Active: active(r.ID), Match: match[r.ID],
		})
	}
	return peers
}

// hints is what a MsgSnap carries in the place of data.
type hints struct {
	ID      protocol.ID `json:"id"`
	Holders []uint64    `json:"holders"` // members that may hold it
	First   uint64      `json:"first"`
}

func (h hints) encode() []byte {
	data, err := json.Marshal(h)
	if err != nil {
		panic(err) // plain values only
	}
	return data
}
