package raftnode

import (
	"container/heap"
	crand "crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// The simulation runs a whole group in one goroutine from one seed: the members' real
// decisions (member, applier, protocol.Machine, protocol.Installs, raftlog) over a
// simulated network, clock and disk. Messages are lost, delayed, reordered and doubled,
// members are cut off and crash with unsynced data, disks fill up, snapshots rot on disk
// and on the way, and the membership changes meanwhile. When the faults stop, everybody
// has to catch up.

var simSeed = flag.Uint64("sim.seed", 0, "run the simulation with this seed only, and talk")

// sim is the world.
type sim struct {
	t       testing.TB
	seed    uint64
	rng     *rand.Rand
	now     time.Duration
	events  events
	order   uint64
	nodes   []*simNode
	initial *pb.ConfState
	cut     map[[2]uint64]bool // directed
	calm    bool               // no more faults
	calmAt  time.Duration
	talk    bool
	failed  bool

	chain    map[uint64]chainLink // what everybody has to have at an index
	acked    uint64               // the highest index that was acknowledged
	nextName int
	copies   uint64 // to give every snapshot bytes of its own
	counts   map[string]int
}

// chainLink binds the state at an index: the hash of all entries up to it.
type chainLink [sha256.Size]byte

func (c chainLink) next(index, term uint64, data []byte) chainLink {
	b := append(c[:], binary.BigEndian.AppendUint64(nil, index)...)
	b = binary.BigEndian.AppendUint64(b, term)
	return sha256.Sum256(append(b, data...))
}

// event is something that happens at a time.
type event struct {
	at    time.Duration
	order uint64
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	last := old[len(old)-1]
	*e = old[:len(old)-1]
	return last
}

const (
	simMembers  = 5
	simFaults   = 40 * time.Second  // of simulated time
	simPatience = 240 * time.Second // until everybody must have caught up
	simTick     = 100 * time.Millisecond
)

// seeded makes Raft's own randomness, which it takes from crypto/rand, come from the seed.
func seeded(seed uint64) (restore func()) {
	was := crand.Reader
	var key [32]byte
	binary.BigEndian.PutUint64(key[:], seed)
	crand.Reader = rand.NewChaCha8(key)
	return func() { crand.Reader = was }
}

func newSim(t testing.TB, seed uint64) *sim {
	s := &sim{
		t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 0x5eed)), talk: *simSeed != 0,
		cut: map[[2]uint64]bool{}, chain: map[uint64]chainLink{}, counts: map[string]int{},
		initial: &pb.ConfState{},
	}
	for i := range simMembers {
		s.initial.Voters = append(s.initial.Voters, uint64(i+1))
	}
	var table []protocol.Member
	for range simMembers {
		n := s.newNode()
		table = append(table, n.row())
	}
	for _, n := range s.nodes {
		n.table = slices.Clone(table)
		n.first = true
		n.start()
	}
	return s
}

func (s *sim) after(d time.Duration, do func()) {
	s.order++
	heap.Push(&s.events, event{s.now + d, s.order, do})
}

// chance is true with a probability.
func (s *sim) chance(p float64) bool { return s.rng.Float64() < p }

// between draws a duration.
func (s *sim) between(a, b time.Duration) time.Duration {
	return a + time.Duration(s.rng.Int64N(int64(b-a)+1))
}

func (s *sim) fail(format string, args ...any) {
	if !s.failed {
		s.failed = true
		s.t.Errorf("seed %d at %v: %s", s.seed, s.now, fmt.Sprintf(format, args...))
	}
}

func (s *sim) logf(format string, args ...any) {
	if s.talk {
		fmt.Fprintf(os.Stderr, "%10v %s\n", s.now, fmt.Sprintf(format, args...))
	}
}

// run lets events happen until the time has come, or something has failed.
func (s *sim) run(until time.Duration) {
	for len(s.events) > 0 && !s.failed && s.events[0].at <= until {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.do()
	}
	s.now = max(s.now, until)
}

func (s *sim) node(id uint64) *simNode {
	for _, n := range s.nodes {
		if n.id == id {
			return n
		}
	}
	return nil
}

// reachable tells whether a message passes from one member to another.
func (s *sim) reachable(from, to uint64) bool {
	n := s.node(to)
	return n != nil && n.up && !s.cut[[2]uint64{from, to}]
}

// deliver carries something from one member to another, as a network does.
func (s *sim) deliver(from, to uint64, do func(*simNode)) {
	if !s.calm && s.chance(0.02) {
		return
	}
	times := 1
	if !s.calm && s.chance(0.01) {
		times = 2
	}
	for range times {
		delay := s.between(time.Millisecond, 10*time.Millisecond)
		if !s.calm && s.chance(0.05) {
			delay += s.between(0, 300*time.Millisecond)
		}
		s.after(delay, func() {
			if s.reachable(from, to) {
				do(s.node(to))
			}
		})
	}
}

// call asks a member and brings back the answer, or says after a while that there is none.
func (s *sim) call(from *simNode, to uint64, ask func(*simNode) func(), fail func()) {
	run, answered := from.run, false
	back := func(do func()) {
		if !answered && from.up && from.run == run {
			answered = true
			do()
		}
	}
	s.deliver(from.id, to, func(n *simNode) {
		reply := ask(n)
		s.deliver(to, from.id, func(*simNode) { back(reply) })
	})
	s.after(2*time.Second, func() { back(fail) })
}

// learn checks a state that a member has come to against all others (state machine
// safety).
func (s *sim) learn(n *simNode, index uint64, link chainLink) {
	known, ok := s.chain[index]
	if !ok {
		s.chain[index] = link
		return
	}
	if known != link {
		s.fail("%s has another state at %d than the others", n.name, index)
	}
}

// load proposes things to whoever leads, or thinks so.
func (s *sim) load() {
	if s.calm && s.now > s.calmAt+5*time.Second {
		return // a quiet group has to finish what it has begun
	}
	for _, n := range s.nodes {
		if n.up && n.member.role == protocol.Leader {
			n.propose()
		}
	}
	s.after(s.between(5*time.Millisecond, 40*time.Millisecond), s.load)
}

// nemesis does something bad now and then.
func (s *sim) nemesis() {
	if s.calm {
		return
	}
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	switch s.rng.IntN(11) {
	case 0, 1:
		n.crash()
		s.after(s.between(100*time.Millisecond, 8*time.Second), n.start)
	case 2:
		s.isolate(n)
	case 3:
		other := s.nodes[s.rng.IntN(len(s.nodes))]
		s.logf("cut %s -> %s", n.name, other.name)
		s.cut[[2]uint64{n.id, other.id}] = true
	case 4:
		s.logf("heal")
		clear(s.cut)
	case 5:
		n.rot()
	case 6:
		n.full = !n.full
		s.logf("%s: disk full: %v", n.name, n.full)
	case 7, 8:
		s.change(n)
	case 9:
		if n.up {
			s.logf("%s: a write of its log will fail", n.name)
			n.failing = true
			n.disk.Fail(walsim.OpSave, s.rng.IntN(10), errBroken)
		}
	case 10:
		if n.up {
			n.want(n.applier.applied.Load(), 0)
		}
	}
	s.after(s.between(200*time.Millisecond, 2*time.Second), s.nemesis)
}

func (s *sim) isolate(n *simNode) {
	s.logf("isolate %s", n.name)
	for _, other := range s.nodes {
		s.cut[[2]uint64{n.id, other.id}] = true
		s.cut[[2]uint64{other.id, n.id}] = true
	}
}

// change changes the membership, if somebody leads.
func (s *sim) change(other *simNode) {
	for _, lead := range s.nodes {
		if lead.up && lead.member.role == protocol.Leader {
			lead.changeMembers(other)
			return
		}
	}
}

// settle ends all faults.
func (s *sim) settle() {
	s.logf("calm")
	s.calm, s.calmAt = true, s.now
	clear(s.cut)
	for _, n := range s.nodes {
		n.full = false
		n.repair()
		if !n.up && !n.removed {
			n.start()
		}
	}
}

// leader returns the one leader of the highest term, if there is one.
func (s *sim) leader() (lead *simNode) {
	for _, n := range s.nodes {
		if n.up && n.member.role == protocol.Leader && (lead == nil || n.member.term > lead.member.term) {
			lead = n
		}
	}
	return lead
}

// done reports whether everybody that the leader knows is where it is, with nothing
// under way.
func (s *sim) done() (bool, string) {
	lead := s.leader()
	if lead == nil {
		return false, "nobody leads"
	}
	if open := lead.member.installs.Status(); len(open) > 0 {
		return false, fmt.Sprintf("%s has open installs: %+v", lead.name, open)
	}
	for _, row := range lead.member.members() {
		n := s.node(row.ID)
		if n.up && n.removed || !n.up {
			return false, n.name + " is down"
		}
		if got, want := n.applier.applied.Load(), lead.applier.applied.Load(); got != want || got < s.acked {
			return false, fmt.Sprintf("%s is at %d, the leader %s at %d, acknowledged is %d; %s", n.name, got, lead.name, want, s.acked, n.machine.Why(s.now, n.view()))
		}
		if len(n.fetches) > 0 || len(n.open) > 0 {
			return false, fmt.Sprintf("%s still moves %d snapshots, and has not freed %v", n.name, len(n.fetches), n.open)
		}
	}
	return true, ""
}

// simulate runs one seed to its end.
func simulate(t testing.TB, seed uint64) *sim {
	defer seeded(seed)()
	s := newSim(t, seed)
	s.after(0, s.load)
	s.after(3*time.Second, s.nemesis)
	s.run(simFaults)
	s.settle()
	why := ""
	for end := s.now + simPatience; s.now < end && !s.failed; {
		s.run(s.now + time.Second)
		var ok bool
		if ok, why = s.done(); ok && s.now > s.calmAt+8*time.Second {
			break
		}
	}
	if ok, _ := s.done(); !ok {
		s.fail("not settled %v after the last fault: %s", s.now-s.calmAt, why)
	}
	return s
}

// seedsThatFailed once showed a bug; they stay here so that it does not come back.
var seedsThatFailed = []uint64{
	1796076140006367973, // a snapshot above the saved commit was adopted at a start
	1796076792463492568, // a snapshot rotted between its fetch and its install
	1796086002415163556, // a snapshot rotted after it was verified for its install
}

// TestSimulation holds I11 and I12 in groups under every fault that the world knows.
func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		simulate(t, *simSeed)
		return
	}
	seeds := 200
	first := uint64(1)
	if testing.Short() {
		seeds = 30
	}
	if os.Getenv("SNAPFERRY_CHAOS") != "" {
		seeds, first = 3000, uint64(time.Now().UnixNano())
	}
	for _, seed := range seedsThatFailed {
		simulate(t, seed)
	}
	sums := map[string]int{}
	for i := range seeds {
		s := simulate(t, first+uint64(i))
		for what, n := range s.counts {
			sums[what] += n
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d seeds: %v", seeds, sums)
	for _, what := range []string{"installed", "taken over", "adopted", "made", "crash", "log failed", "restart with install", "learner added", "promoted", "removed"} {
		if sums[what] == 0 {
			t.Errorf("in no seed anything was %q: the simulation does not reach it", what)
		}
	}
}
