package raftnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	pb "go.etcd.io/raft/v3/raftpb"

	"go.etcd.io/raft/v3"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// send sends messages. A MsgSnap goes without data, and only to a member that the
// snapshot's own configuration names: raft would ignore it otherwise, without a word (R6).
func (m *member) send(msgs []*pb.Message) {
	out := msgs[:0:0]
	for _, msg := range msgs {
		if msg.GetType() != pb.MsgSnap || m.announce(msg) {
			out = append(out, msg)
		}
	}
	if len(out) > 0 {
		m.out.Send(out)
	}
}

// announce puts the hints into a MsgSnap and books it, or reports it as failed and asks
// for a snapshot that will do.
func (m *member) announce(msg *pb.Message) bool {
	to, meta := msg.GetTo(), msg.GetSnapshot().GetMetadata()
	if m.recorded.Index != meta.GetIndex() || m.recorded.Digest.IsZero() {
		m.rn.ReportSnapshot(to, raft.SnapshotFailure) // until one is there again: see back
		return false
	}
	if !fromConfState(meta.GetConfState()).Has(to) {
		m.rn.ReportSnapshot(to, raft.SnapshotFailure)
		m.out.Want(max(m.added[to], meta.GetIndex()+1), to)
		return false
	}
	msg.Snapshot = &pb.Snapshot{
		Metadata: meta,
		Data:     hints{ID: m.recorded, Holders: m.others(to), First: m.firstIndex()}.encode(),
	}
	m.installs.Sent(m.cfg.now(), to, msg.GetTerm(), meta.GetIndex())
	return true
}

// others are the members that may hold the recorded snapshot, since followers adopt it: who
// has not says so at the first question.
func (m *member) others(to uint64) []uint64 {
	var all []uint64
	for _, r := range m.members() {
		if r.ID != to {
			all = append(all, r.ID)
		}
	}
	return all
}

// stepSnapshot takes a MsgSnap (R8.1). What Raft can use without data is stepped at once;
// everything else waits until the data is durable.
func (m *member) stepSnapshot(msg *pb.Message) error {
	// What came before it in the same batch may have replaced the entries that decide.
	if err := m.drain(); err != nil {
		return err
	}
	meta := msg.GetSnapshot().GetMetadata()
	e := protocol.Envelope{
		From: msg.GetFrom(), Term: msg.GetTerm(),
		SnapTerm: meta.GetTerm(), SnapIndex: meta.GetIndex(),
	}
	if msg.GetTerm() < m.term {
		m.tell(e, protocol.Outcome{Kind: protocol.InstallFailed, Refusal: m.staleTerm()})
		return nil
	}
	if m.has(meta) {
		m.tell(e, protocol.Outcome{Kind: protocol.StepNotNeeded})
		return m.rn.Step(msg)
	}
	var h hints
	if err := json.Unmarshal(msg.GetSnapshot().GetData(), &h); err == nil {
		e.Target, e.Holders, e.First = h.ID, h.Holders, h.First
	}
	m.out.Install(e)
	return nil
}

// has reports whether the log needs no snapshot to be where meta is. A longer log that
// is not committed does not count: Raft discards it.
func (m *member) has(meta *pb.SnapshotMetadata) bool {
	if meta.GetIndex() <= m.rn.BasicStatus().HardState.GetCommit() {
		return true
	}
	term, err := m.log.Term(meta.GetIndex())
	return err == nil && term == meta.GetTerm()
}

func (m *member) tell(e protocol.Envelope, o protocol.Outcome) {
	o.Group, o.From, o.To, o.Term, o.Index = m.cfg.group, m.cfg.id, e.From, e.Term, e.SnapIndex
	m.out.Tell(o)
}

func (m *member) staleTerm() *protocol.Refusal {
	return &protocol.Refusal{Kind: protocol.StaleTerm, Term: m.term, Leader: m.leader}
}

// record makes a durable snapshot the one that Raft knows (R4). A refusal leaves
// everything as it was; an error is final.
func (m *member) record(id protocol.ID, meta protocol.Meta, applied uint64) (*protocol.Refusal, error) {
	if refusal := m.unfit(meta); refusal != nil {
		return refusal, nil
	}
	err := m.log.Record(&pb.SnapshotMetadata{
		Index: &meta.Index, Term: &meta.Term, ConfState: toConfState(meta.Conf),
	}, applied)
	var kind protocol.RefusalKind
	switch {
	case err == nil:
		m.recorded = id
		return nil, m.compact()
	case errors.Is(err, raftlog.ErrOld):
		kind = protocol.NotNeeded
	case errors.Is(err, raftlog.ErrAhead):
		kind = protocol.Ahead
	case errors.Is(err, raftlog.ErrForked):
		kind = protocol.Forked
	default:
		return nil, err
	}
	return &protocol.Refusal{Kind: kind, Text: err.Error(), Term: m.term}, nil
}

// back finds the snapshot behind the newest record among those that are held. After a
// start without its directory, or when that was damaged, one of the same index comes from
// another member; the record stays what it is.
func (m *member) back(held []protocol.Held) {
	backed := false
	for _, h := range held {
		if h.ID == m.recorded {
			return
		}
		if h.ID.Index == m.recorded.Index && h.ID.Term == m.recorded.Term {
			m.recorded, backed = h.ID, true
		}
	}
	if !backed {
		m.recorded.Digest = snapshot.Digest{}
	}
}

// install gives Raft a durable snapshot in the place of the one that e announced (R8.3).
// done is called once it is in the state machine. A refusal says that Raft was not given
// it, or had no use for it.
func (m *member) install(e protocol.Envelope, id protocol.ID, meta protocol.Meta, dir string, done func(error)) (*protocol.Refusal, error) {
	if e.Term < m.rn.BasicStatus().HardState.GetTerm() {
		return m.staleTerm(), nil
	}
	if refusal := m.unfit(meta); refusal != nil {
		return refusal, nil
	}
	if meta.Term > e.Term {
		return &protocol.Refusal{Kind: protocol.Forked, Text: fmt.Sprintf("snapshot of term %d for a leader of term %d", meta.Term, e.Term)}, nil
	}
	if !meta.Conf.Has(m.cfg.id) {
		return &protocol.Refusal{Kind: protocol.NothingNewer, Text: fmt.Sprintf("snapshot %d does not name this member", meta.Index)}, nil
	}
	md := &pb.SnapshotMetadata{Index: &meta.Index, Term: &meta.Term, ConfState: toConfState(meta.Conf)}
	m.handing = &handing{meta: meta, dir: dir, done: done}
	defer func() { m.handing = nil }()
	err := m.rn.Step(&pb.Message{
		Type: pb.MsgSnap.Enum(), From: &e.From, To: &m.cfg.id, Term: &e.Term,
		Snapshot: &pb.Snapshot{Metadata: md},
	})
	if err != nil {
		return nil, err
	}
	if err := m.drain(); err != nil {
		return nil, err
	}
	if !m.handing.used {
		return &protocol.Refusal{Kind: protocol.NotNeeded, Text: "raft is past it"}, nil
	}
	m.recorded = id
	return nil, nil
}

// unfit refuses a snapshot of another group, and one whose member table does not have
// everybody that its configuration has: who took it would know a member less.
func (m *member) unfit(meta protocol.Meta) *protocol.Refusal {
	if meta.Group != m.cfg.group {
		return &protocol.Refusal{Kind: protocol.OtherGroup, Text: "snapshot of group " + meta.Group}
	}
	if id, ok := unnamed(meta.Conf, meta.Members); ok {
		return &protocol.Refusal{Kind: protocol.Forked, Text: "its member table lacks " + m.called(id)}
	}
	return nil
}

// called is how people know a member.
func (m *member) called(id uint64) string {
	if r, known := m.table[id]; known && r.Name != "" {
		return r.Name
	}
	return fmt.Sprintf("member %d", id)
}

// unnamed finds a member of a configuration that has no row in a table.
func unnamed(c protocol.Conf, table []protocol.Member) (id uint64, found bool) {
	for _, id := range slices.Concat(c.Voters, c.Learners, c.Outgoing, c.LearnersNext) {
		if !slices.ContainsFunc(table, func(r protocol.Member) bool { return r.ID == id }) {
			return id, true
		}
	}
	return 0, false
}

// outcome takes what a member says of an install that was asked of it (R7).
func (m *member) outcome(o protocol.Outcome) *protocol.Refusal {
	switch {
	case o.Group != m.cfg.group:
		return &protocol.Refusal{Kind: protocol.OtherGroup}
	case m.role != protocol.Leader:
		return &protocol.Refusal{Kind: protocol.NotLeader, Leader: m.leader, Term: m.term}
	}
	reports, refusal := m.installs.Outcome(m.cfg.now(), o, m.firstIndex())
	m.reportAll(reports)
	return refusal
}

func (m *member) reportAll(reports []protocol.Report) {
	for _, r := range reports {
		status := raft.SnapshotFailure
		if r.Finish {
			status = raft.SnapshotFinish
		}
		m.rn.ReportSnapshot(r.Peer, status)
	}
}

// compact cuts the log below the newest record, as far as members that install and
// members a little behind allow (R4, R9).
func (m *member) compact() error {
	c := m.recorded.Index
	if m.recorded.Digest.IsZero() {
		return nil // no directory backs it
	}
	if floor, held := m.installs.Floor(); held {
		c = min(c, floor)
	}
	trailing := m.installs.Trailing(m.pace.perSecond, m.entryBytes())
	if c <= trailing || c-trailing < m.firstIndex() {
		return nil
	}
	return m.log.Compact(c - trailing)
}

// entryBytes is the mean size of an entry in the log.
func (m *member) entryBytes() float64 {
	last, _ := m.log.LastIndex() // never fails
	if n := last + 1 - m.firstIndex(); n > 0 {
		return float64(m.log.Bytes()) / float64(n)
	}
	return 0
}

// fromConfState translates Raft's configuration.
func fromConfState(cs *pb.ConfState) protocol.Conf {
	return protocol.Conf{
		Voters: slices.Clone(cs.GetVoters()), Learners: slices.Clone(cs.GetLearners()),
		Outgoing: slices.Clone(cs.GetVotersOutgoing()), LearnersNext: slices.Clone(cs.GetLearnersNext()),
		AutoLeave: cs.GetAutoLeave(),
	}
}

func toConfState(c protocol.Conf) *pb.ConfState {
	cs := &pb.ConfState{
		Voters: slices.Clone(c.Voters), Learners: slices.Clone(c.Learners),
		VotersOutgoing: slices.Clone(c.Outgoing), LearnersNext: slices.Clone(c.LearnersNext),
	}
	if c.AutoLeave {
		cs.AutoLeave = &c.AutoLeave
	}
	return cs
}
