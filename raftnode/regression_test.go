package raftnode

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// slowCounter blocks in Apply while it is told to.
type slowCounter struct {
	counter
	gate sync.RWMutex
}

func (c *slowCounter) Apply(entries []Entry) ([][]byte, error) {
	c.gate.RLock()
	defer c.gate.RUnlock()
	return c.counter.Apply(entries)
}

func oneNode(t *testing.T, sm StateMachine) *Node {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	n, err := New(Options{Name: "m1", Dir: t.TempDir(), URL: url, InitialCluster: map[string]string{"m1": url}, Insecure: true, Tick: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: n.Handler()}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { server.Close() })
	if sm == nil {
		return n
	}
	if err := n.Start(t.Context(), func(string) (StateMachine, error) { return sm, nil }); err != nil {
		t.Fatal(err)
	}
	if err := n.leading.wait(t.Context(), func(l leadership) bool { return l.role == protocol.Leader }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestReadIndexReturnsAfterStop: a read that the loop took out of the mailbox before
// stop and booked after it is never answered.
func TestReadIndexReturnsAfterStop(t *testing.T) {
	sm := &slowCounter{}
	n := oneNode(t, sm)
	if _, err := n.Propose(t.Context(), []byte("before")); err != nil {
		t.Fatal(err)
	}
	sm.gate.Lock()
	for i := uint64(1); i <= 2; i++ { // one in the applier's hands, one in the pipe
		go func() { _, _ = n.Propose(context.Background(), []byte("stuck")) }()
		for there := false; !there; {
			_ = n.onLoop(t.Context(), func() error {
				n.pipe.mu.Lock()
				there = n.member.delivered == n.applier.applied.Load()+i && len(n.pipe.queue) == int(i)-1
				n.pipe.mu.Unlock()
				return nil
			})
		}
	}
	first, second, in := make(chan bool), make(chan bool), make(chan bool)
	_ = n.box.task(func() { close(in); <-first })
	<-in
	arrived := make(chan bool)
	_ = n.box.task(func() { close(arrived); <-second }) // in the same batch as the read
	read := make(chan error, 1)
	go func() { read <- n.ReadIndex(context.Background()) }()
	for {
		n.box.mu.Lock()
		there := len(n.box.reads) > 0
		n.box.mu.Unlock()
		if there {
			break
		}
	}
	close(first)
	<-arrived
	n.stop(nil)
	close(second)
	sm.gate.Unlock()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-read:
		if !errors.Is(err, ErrClosed) {
			t.Errorf("read of a closed member: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("ReadIndex hangs although the member is closed")
	}
}

// TestStartAfterClose: Start of a closed member must refuse and leave nothing open.
func TestStartAfterClose(t *testing.T) {
	n := oneNode(t, nil)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	err := n.Start(t.Context(), func(string) (StateMachine, error) { return &counter{}, nil })
	if err == nil {
		t.Error("a closed member starts")
		_ = n.Close() // or it leaks
	}
}

// TestTicks: bad options are an error and not a panic.
func TestTicks(t *testing.T) {
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("panic: %v", p)
		}
	}()
	url := "http://127.0.0.1:1"
	n, err := New(Options{Name: "m1", Dir: t.TempDir(), URL: url, InitialCluster: map[string]string{"m1": url}, Insecure: true, ElectionTicks: 1})
	if err != nil {
		return
	}
	defer n.Close()
	_ = n.Start(t.Context(), func(string) (StateMachine, error) { return &counter{}, nil })
}

func appendMsg(from, term, prev, prevTerm, commit uint64, terms ...uint64) *pb.Message {
	to := uint64(1)
	m := &pb.Message{Type: pb.MsgApp.Enum(), From: &from, To: &to, Term: &term, Index: &prev, LogTerm: &prevTerm, Commit: &commit}
	for i, tm := range terms {
		m.Entries = append(m.Entries, &pb.Entry{Term: new(tm), Index: new(prev + 1 + uint64(i)), Data: []byte("x")})
	}
	return m
}

// TestSnapshotAfterReplacedTail: a MsgApp that replaces a tail and a MsgSnap that the
// old tail had, in one batch.
func TestSnapshotAfterReplacedTail(t *testing.T) {
	m, out := newTestMember(t, three)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(m.step(appendMsg(2, 2, 1, 1, 1, 2, 2, 2))) // 2..4 of term 2, not committed
	must(m.drain())
	// Leader 3 of term 3 lacks them (its entry is 2 of term 3); then leader 2 of term 4,
	// which has (4,2), commits it and its log is cut: all in one batch.
	must(m.step(appendMsg(3, 3, 1, 1, 1, 3)))
	from, term, i, it := uint64(2), uint64(4), uint64(4), uint64(2)
	must(m.step(&pb.Message{Type: pb.MsgSnap.Enum(), From: &from, To: &m.cfg.id, Term: &term,
		Snapshot: &pb.Snapshot{Metadata: &pb.SnapshotMetadata{Index: &i, Term: &it, ConfState: three}}}))
	if err := m.drain(); err != nil {
		t.Errorf("the member stops: %v", err)
	}
	if len(out.asked) != 1 || len(out.told) != 0 {
		t.Errorf("asked %v, told %v; want the data to be asked for", out.asked, out.told)
	}
}

// TestPeerCannotPanic: what a peer may send must not end the process.
func TestPeerCannotPanic(t *testing.T) {
	for name, msg := range map[string]*pb.Message{
		"proposal without entries":        {Type: pb.MsgProp.Enum()},
		"read without context":            {Type: pb.MsgReadIndex.Enum()},
		"broken configuration change":     {Type: pb.MsgProp.Enum(), Entries: []*pb.Entry{{Type: pb.EntryConfChange.Enum(), Data: []byte{0xff}}}},
		"heartbeat answer, short context": {Type: pb.MsgHeartbeatResp.Enum(), Context: []byte{1}},
		"forwarded change of membership":  {Type: pb.MsgProp.Enum(), Entries: []*pb.Entry{{Type: pb.EntryConfChangeV2.Enum(), Data: nil}}},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newTestMember(t, three)
			lead(t, m)
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("panic: %v", p)
				}
			}()
			from, term := uint64(2), m.term
			msg.From, msg.To = &from, &m.cfg.id
			if msg.GetType() == pb.MsgHeartbeatResp {
				msg.Term = &term
			}
			_ = m.step(msg)
			if err := m.drain(); err != nil {
				t.Error(err)
			}
			if msg.GetType() == pb.MsgReadIndex {
				if err := m.readIndex(1); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestForwardedProposal: DisableProposalForwarding is on, so nobody may propose here
// over the network; least of all a membership change around checkConf.
func TestForwardedProposal(t *testing.T) {
	m, _ := newTestMember(t, three)
	lead(t, m)
	before, _ := m.log.LastIndex()
	from := uint64(2)
	_ = m.step(&pb.Message{Type: pb.MsgProp.Enum(), From: &from, To: &m.cfg.id, Entries: []*pb.Entry{{Data: []byte("x")}}})
	_ = m.drain()
	if after, _ := m.log.LastIndex(); after != before {
		t.Error("a peer's MsgProp is appended")
	}
}

// logOf is a log with entries 2..last of term 1, of which commit are committed.
func logOf(t *testing.T, last, commit uint64) *raftlog.Log {
	t.Helper()
	wal, replay, err := walsim.New(nil).Open(&raftlog.WALOptions{
		First: &pb.SnapshotMetadata{Index: new(uint64(1)), Term: new(uint64(1)), ConfState: three},
	})
	if err != nil {
		t.Fatal(err)
	}
	log := raftlog.New(wal, replay)
	var ents []*pb.Entry
	for i := uint64(2); i <= last; i++ {
		ents = append(ents, &pb.Entry{Term: new(uint64(1)), Index: new(i)})
	}
	if err := log.Save(&pb.HardState{Term: new(uint64(1)), Commit: new(commit)}, ents, true); err != nil {
		t.Fatal(err)
	}
	return log
}

// TestAdoptFetchedSnapshot: a fetched snapshot above the saved commit and inside the log (R2, F34a:
// the commit is not synced), and one that contradicts the uncommitted tail (F36).
func TestAdoptFetchedSnapshot(t *testing.T) {
	for _, tc := range []struct{ index, term uint64 }{{55, 1}, {55, 2}, {80, 2}, {45, 1}} {
		t.Run(fmt.Sprint(tc), func(t *testing.T) {
			log := logOf(t, 60, 50)
			err := adopt(log, protocol.Meta{Group: "g", Index: tc.index, Term: tc.term, Conf: fromConfState(three)})
			if err != nil {
				t.Errorf("a snapshot at %d of term %d, committed by the group, is refused: %v", tc.index, tc.term, err)
			}
		})
	}
}

// TestRefetchAcrossTerms: refetch asks with the term of its own hard state, and nobody
// offers what is of a later term, though adopt would take it (R2: any j >= i).
func TestRefetchAcrossTerms(t *testing.T) {
	conf := protocol.Conf{Voters: []uint64{1, 2, 3}}
	v := &protocol.View{Group: "g", Self: 2, Term: 7, Leader: 2, Role: protocol.Leader, Applied: 950, RecordedTerm: 7, RecordedIndex: 900, Held: []protocol.Held{
		{ID: protocol.ID{Term: 7, Index: 900, Digest: [32]byte{1}}, Meta: protocol.Meta{Group: "g", Term: 7, Index: 900, Conf: conf}},
	}}
	// As askFor makes it, for a member that was away since term 5.
	a := protocol.New(protocol.Config{}, "x").Answer(v, protocol.InfoRequest{Group: "g", From: 1, Needs: 1, Term: math.MaxUint64, Transfer: "start", MinIndex: 500})
	if a.State != protocol.Ready {
		t.Errorf("the answer is %s, %v; this member can never start", a.State, a.Refusal)
	}
}

// TestPromoteUnderLoad: R12 asks for the commit at the request. Promote compares with
// the commit of each try, which a learner one round trip away need never reach.
func TestPromoteUnderLoad(t *testing.T) {
	m, _ := newTestMember(t, &pb.ConfState{Voters: []uint64{1, 2, 3}, Learners: []uint64{4}})
	lead(t, m)
	ack := func(from, index uint64) {
		t.Helper()
		term := m.term
		if err := m.step(&pb.Message{Type: pb.MsgAppResp.Enum(), From: &from, To: &m.cfg.id, Term: &term, Index: &index}); err != nil {
			t.Fatal(err)
		}
		if err := m.drain(); err != nil {
			t.Fatal(err)
		}
	}
	last, _ := m.log.LastIndex()
	ack(4, last)
	commit := m.rn.BasicStatus().HardState.GetCommit()
	for range 50 { // the learner is always one entry behind
		behind, _ := m.log.LastIndex()
		grow(t, m, 1)
		err := m.proposeConf(pb.ConfChangeAddNode, change{Member: m.table[4]}, commit)
		if err == nil {
			return
		}
		ack(4, behind)
	}
	t.Error("50 requests later, each of whose commits it has got long since, it is still a learner")
}

// TestMailboxBytes: the mailbox counts messages and proposals, not their bytes, and
// reads not at all.
func TestMailboxBytes(t *testing.T) {
	b := newMailbox()
	data := make([]byte, MaxProposal) // one piece of memory, counted many times
	var bytes int64
	for b.proposal(proposalKey{1, 1}, data) == nil {
		bytes += int64(len(data))
	}
	if bytes > 1<<30 {
		t.Errorf("%d GiB of proposals may wait while the disk is busy", bytes>>30)
	}
	for range 1 << 20 {
		if b.read(&read{}) != nil {
			return
		}
	}
	t.Error("a million reads may wait")
}

// TestPipeCounts: what the applier has in its hands still takes memory.
func TestPipeCounts(t *testing.T) {
	p := newPipe()
	p.put(work{entries: []*pb.Entry{{Data: make([]byte, 1000)}}})
	p.take()
	if p.waiting() == 0 {
		t.Error("nothing waits, says the pipe, while all of it is unapplied")
	}
}
