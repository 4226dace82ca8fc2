package raftnode

import (
	"log/slog"
	"testing"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// recorder is an outbox that only remembers.
type recorder struct {
	sent   []*pb.Message
	onSend func(*pb.Message)
	wants  []uint64
	asked  []protocol.Envelope
	told   []protocol.Outcome
	works  []work
}

func (r *recorder) Send(msgs []*pb.Message) {
	for _, m := range msgs {
		if r.onSend != nil {
			r.onSend(m)
		}
	}
	r.sent = append(r.sent, msgs...)
}
func (r *recorder) Install(e protocol.Envelope)           { r.asked = append(r.asked, e) }
func (r *recorder) Want(_, needs uint64)                  { r.wants = append(r.wants, needs) }
func (r *recorder) Tell(o protocol.Outcome)               { r.told = append(r.told, o) }
func (r *recorder) Apply(w work)                          { r.works = append(r.works, w) }
func (r *recorder) Readable(uint64, uint64)               {}
func (r *recorder) Led(protocol.Role, uint64, uint64)     {}
func (r *recorder) Members([]protocol.Member)             {}
func (r *recorder) of(t pb.MessageType) (n []*pb.Message) { return filter(r.sent, t) }

func filter(msgs []*pb.Message, t pb.MessageType) (out []*pb.Message) {
	for _, m := range msgs {
		if m.GetType() == t {
			out = append(out, m)
		}
	}
	return out
}

// newTestMember makes member 1 of a group over a simulated log that begins at index 1.
func newTestMember(t *testing.T, conf *pb.ConfState) (*member, *recorder) {
	t.Helper()
	index, term := uint64(bootIndex), uint64(bootTerm)
	wal, replay, err := walsim.New(nil).Open(&raftlog.WALOptions{
		First: &pb.SnapshotMetadata{Index: &index, Term: &term, ConfState: conf},
	})
	if err != nil {
		t.Fatal(err)
	}
	var table []protocol.Member
	for _, id := range append(append([]uint64{}, conf.GetVoters()...), conf.GetLearners()...) {
		table = append(table, protocol.Member{ID: id, Name: string(rune('a' + id - 1)), URL: "http://x"})
	}
	out := &recorder{}
	m, err := newMember(memberConfig{
		group: "g", id: 1, electionTicks: 10, heartbeat: 1,
		logger: slog.New(slog.DiscardHandler), now: func() time.Duration { return 0 },
	}, raftlog.New(wal, replay), table, protocol.ID{Term: term, Index: index}, protocol.NewInstalls(protocol.Config{}), out)
	if err != nil {
		t.Fatal(err)
	}
	return m, out
}

// TestNewTermIsDurableFirst: a group with one voter elects it within one Ready, and its
// entries must not travel before the term that they carry is durable.
func TestNewTermIsDurableFirst(t *testing.T) {
	m, out := newTestMember(t, &pb.ConfState{Voters: []uint64{1}, Learners: []uint64{2}})
	out.onSend = func(msg *pb.Message) {
		if durable := m.log.HardState().GetTerm(); msg.GetTerm() > durable {
			t.Errorf("%v of term %d is sent while term %d is durable", msg.GetType(), msg.GetTerm(), durable)
		}
	}
	if err := m.rn.Campaign(); err != nil {
		t.Fatal(err)
	}
	if err := m.drain(); err != nil {
		t.Fatal(err)
	}
	if m.role != protocol.Leader || len(out.of(pb.MsgApp)) == 0 {
		t.Fatalf("it is a %v and sent %d appends", m.role, len(out.of(pb.MsgApp)))
	}
}

// lead makes member 1 of {1,2,3} the leader, with its first entry acknowledged by 2.
func lead(t *testing.T, m *member) {
	t.Helper()
	if err := m.rn.Campaign(); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []pb.MessageType{pb.MsgPreVoteResp, pb.MsgVoteResp} {
		if err := m.drain(); err != nil {
			t.Fatal(err)
		}
		from, term := uint64(2), m.rn.BasicStatus().HardState.GetTerm()
		if kind == pb.MsgPreVoteResp {
			term++
		}
		if err := m.step(&pb.Message{Type: kind.Enum(), From: &from, To: &m.cfg.id, Term: &term}); err != nil {
			t.Fatal(err)
		}
	}
	acknowledge(t, m, 2)
	if m.role != protocol.Leader {
		t.Fatalf("it is a %v", m.role)
	}
}

// acknowledge lets a member have everything that is in the leader's log.
func acknowledge(t *testing.T, m *member, from uint64) {
	t.Helper()
	if err := m.drain(); err != nil {
		t.Fatal(err)
	}
	last, _ := m.log.LastIndex()
	term := m.rn.BasicStatus().HardState.GetTerm()
	err := m.step(&pb.Message{Type: pb.MsgAppResp.Enum(), From: &from, To: &m.cfg.id, Term: &term, Index: &last})
	if err == nil {
		err = m.drain()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// fallBehind makes member 3 one that needs a snapshot.
func fallBehind(t *testing.T, m *member) {
	t.Helper()
	three, term, zero, yes := uint64(3), m.rn.BasicStatus().HardState.GetTerm(), uint64(0), true
	for _, msg := range []*pb.Message{
		{Type: pb.MsgHeartbeatResp.Enum(), From: &three, To: &m.cfg.id, Term: &term},
		{Type: pb.MsgAppResp.Enum(), From: &three, To: &m.cfg.id, Term: &term, Index: &term, Reject: &yes, RejectHint: &zero},
	} {
		last, _ := m.log.LastIndex()
		if msg.GetType() == pb.MsgAppResp {
			msg.Index = &last
		}
		if err := m.step(msg); err != nil {
			t.Fatal(err)
		}
		if err := m.drain(); err != nil {
			t.Fatal(err)
		}
	}
}

// grow puts n entries into the log and has them committed by member 2.
func grow(t *testing.T, m *member, n int) {
	t.Helper()
	for range n {
		if err := m.propose([][]byte{[]byte("entry")}); err != nil {
			t.Fatal(err)
		}
	}
	acknowledge(t, m, 2)
}

func recordAt(t *testing.T, m *member, index uint64, conf protocol.Conf) (*protocol.Refusal, error) {
	t.Helper()
	term, err := m.log.Term(index)
	if err != nil {
		t.Fatal(err)
	}
	meta := protocol.Meta{Group: "g", Term: term, Index: index, Conf: conf, Members: m.members()}
	return m.record(protocol.ID{Term: term, Index: index, Digest: [32]byte{1}}, meta, m.delivered)
}

var three = &pb.ConfState{Voters: []uint64{1, 2, 3}}

// TestSnapshotWithoutTheReceiver holds R6 and F33: a MsgSnap that does not name its
// receiver is not sent but reported as failed, and a better snapshot is asked for.
func TestSnapshotWithoutTheReceiver(t *testing.T) {
	m, out := newTestMember(t, three)
	m.installs = protocol.NewInstalls(protocol.Config{TrailingEntries: 1})
	lead(t, m)
	grow(t, m, 50)
	if refusal, err := recordAt(t, m, 40, protocol.Conf{Voters: []uint64{1, 2}}); refusal != nil || err != nil {
		t.Fatal(refusal, err)
	}
	fallBehind(t, m)
	if n := len(out.of(pb.MsgSnap)); n != 0 {
		t.Errorf("%d MsgSnap sent to a member that they do not name", n)
	}
	if len(out.wants) == 0 || out.wants[len(out.wants)-1] != 3 {
		t.Errorf("snapshots asked for: %v, want one for member 3", out.wants)
	}
}

// TestSnapshotCarriesHints holds R6 and R7: no data, but who holds it; the end of the
// install is reported once, and the log stays for it until then (R9).
func TestSnapshotCarriesHints(t *testing.T) {
	m, out := newTestMember(t, three)
	m.installs = protocol.NewInstalls(protocol.Config{TrailingEntries: 1})
	lead(t, m)
	grow(t, m, 50)
	if refusal, err := recordAt(t, m, 40, fromConfState(three)); refusal != nil || err != nil {
		t.Fatal(refusal, err)
	}
	fallBehind(t, m)
	snaps := out.of(pb.MsgSnap)
	if len(snaps) != 1 || len(snaps[0].GetSnapshot().GetData()) == 0 || len(snaps[0].GetSnapshot().GetData()) > 4096 {
		t.Fatalf("%d MsgSnap sent, or without hints", len(snaps))
	}
	grow(t, m, 50)
	if refusal, err := recordAt(t, m, 90, fromConfState(three)); refusal != nil || err != nil {
		t.Fatal(refusal, err)
	}
	if first := m.firstIndex(); first > 41 {
		t.Errorf("the log begins at %d while an install at 40 is open", first)
	}
	o := protocol.Outcome{Group: "g", From: 3, To: 1, Term: m.term, Kind: protocol.Installed, Index: 40}
	if refusal := m.outcome(o); refusal != nil {
		t.Fatal(refusal)
	}
	if refusal := m.outcome(o); refusal == nil {
		t.Error("the same end is taken twice")
	}
}

// TestRecordRefusals holds R4.
func TestRecordRefusals(t *testing.T) {
	m, _ := newTestMember(t, three)
	lead(t, m)
	grow(t, m, 50)
	conf := fromConfState(three)
	for _, tc := range []struct {
		name    string
		meta    protocol.Meta
		applied uint64
		want    protocol.RefusalKind
	}{
		{"other group", protocol.Meta{Group: "h", Term: m.term, Index: 20, Conf: conf}, 50, protocol.OtherGroup},
		{"ahead of applied", protocol.Meta{Group: "g", Term: m.term, Index: 30, Conf: conf}, 20, protocol.Ahead},
		{"another term", protocol.Meta{Group: "g", Term: m.term + 1, Index: 30, Conf: conf}, 50, protocol.Forked},
		{"the boot record", protocol.Meta{Group: "g", Term: bootTerm, Index: bootIndex, Conf: conf}, 50, protocol.NotNeeded},
	} {
		tc.meta.Members = m.members()
		refusal, err := m.record(protocol.ID{Digest: [32]byte{1}}, tc.meta, tc.applied)
		if err != nil || refusal == nil || refusal.Kind != tc.want {
			t.Errorf("%s: %v, %v; want %v", tc.name, refusal, err, tc.want)
		}
	}
	if m.recorded.Index != bootIndex {
		t.Errorf("refused, and recorded at %d", m.recorded.Index)
	}
}

// TestStaleEnvelope holds R8.3: a snapshot of a past leader is kept and not installed.
func TestStaleEnvelope(t *testing.T) {
	m, out := newTestMember(t, three)
	lead(t, m)
	e := protocol.Envelope{From: 2, Term: m.term - 1, SnapTerm: 1, SnapIndex: 500}
	meta := protocol.Meta{Group: "g", Term: 1, Index: 500, Conf: fromConfState(three), Members: m.members()}
	refusal, err := m.install(e, protocol.ID{}, meta, "", nil)
	if err != nil || refusal == nil || refusal.Kind != protocol.StaleTerm {
		t.Errorf("%v, %v; want stale term", refusal, err)
	}
	from, term, index := uint64(2), m.term-1, uint64(500)
	err = m.step(&pb.Message{
		Type: pb.MsgSnap.Enum(), From: &from, To: &m.cfg.id, Term: &term,
		Snapshot: &pb.Snapshot{Metadata: &pb.SnapshotMetadata{Index: &index, Term: &term, ConfState: three}},
	})
	if err != nil || len(out.asked) != 0 || len(out.told) != 1 || out.told[0].Refusal == nil {
		t.Errorf("%v: asked %v, told %v; want one refusal", err, out.asked, out.told)
	}
}

// TestChangesOneAtATime holds R12.
func TestChangesOneAtATime(t *testing.T) {
	m, _ := newTestMember(t, three)
	lead(t, m)
	add := func(id uint64, name string) error {
		return m.proposeConf(pb.ConfChangeAddLearnerNode, change{Request: name, Member: protocol.Member{ID: id, Name: name, URL: name}}, 0)
	}
	if err := add(4, "d"); err != nil {
		t.Fatal(err)
	}
	if err := add(5, "e"); err == nil {
		t.Error("a second change is proposed before the first is committed")
	}
	acknowledge(t, m, 2)
	if err := m.proposeConf(pb.ConfChangeAddNode, change{Member: protocol.Member{ID: 4}}, 1000); err == nil {
		t.Error("a learner that has nothing is promoted")
	}
	if err := add(5, "e"); err != nil {
		t.Errorf("the next change: %v", err)
	}
}
