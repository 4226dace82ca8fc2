package raftlog_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// life is a random member: it knows what may be done next and does it.
type life struct {
	rng     *rand.Rand
	log     *raftlog.Log
	term    uint64
	applied uint64
	sync    bool // also what Raft does not ask to be synced
}

// step does one thing and returns its name.
func (m *life) step() (string, error) {
	last, _ := m.log.LastIndex()
	commit := m.log.HardState().GetCommit()
	switch m.rng.IntN(12) {
	case 0:
		m.term++
		return "vote", m.log.Save(state(m.term, commit), nil, true)
	case 1:
		to := commit + m.rng.Uint64N(last-commit+1)
		return "commit", m.log.Save(state(m.term, to), nil, m.sync)
	case 2:
		i := m.log.Recorded().GetIndex() + 1
		if m.applied = commit; i > commit {
			return "nothing", nil
		}
		i += m.rng.Uint64N(commit - i + 1)
		term, err := m.log.Term(i)
		return "record", errors.Join(err, m.log.Record(meta(i, term), m.applied))
	case 3:
		if c := m.log.Recorded().GetIndex(); c > 10 {
			return "compact", m.log.Compact(c - m.rng.Uint64N(10))
		}
		return "nothing", nil
	case 4:
		if m.rng.IntN(3) > 0 {
			return "nothing", nil
		}
		i := commit + 1 + m.rng.Uint64N(60) // below or above the last entry
		m.term++
		return "install", m.log.ApplySnapshot(meta(i, m.term), state(m.term, i), nil)
	case 5:
		if last == commit {
			return "nothing", nil
		}
		m.term++
		from := commit + 1 + m.rng.Uint64N(last-commit)
		return "replace", m.log.Save(state(m.term, commit), heavy(from, from+m.rng.Uint64N(9), m.term, 1+m.rng.IntN(1200)), true)
	}
	ents := heavy(last+1, last+1+m.rng.Uint64N(9), m.term, 1+m.rng.IntN(1200))
	return "append", m.log.Save(state(m.term, commit+m.rng.Uint64N(last-commit+1)), ents, true)
}

// picture is what a log shows.
type picture struct {
	Last     uint64
	State    *pb.HardState
	Recorded *pb.SnapshotMetadata
	Entries  []*pb.Entry
}

// pictureOf shows the log from an index on.
func pictureOf(t testing.TB, l *raftlog.Log, from uint64) (p picture) {
	t.Helper()
	p.State, p.Recorded = l.HardState(), l.Recorded()
	p.Last, _ = l.LastIndex()
	for _, e := range all(t, l) {
		if e.GetIndex() >= from {
			p.Entries = append(p.Entries, e)
		}
	}
	return p
}

func same(a, b picture) bool {
	return a.Last == b.Last && proto.Equal(a.State, b.State) && proto.Equal(a.Recorded, b.Recorded) && sameEntries(a.Entries, b.Entries)
}

// TestEveryCrashLeavesOldOrNew: each write of a random life is cut short at random places in the file, also with
// holes where sectors did not come. The log that opens is the one before the write or the one after it.
func TestEveryCrashLeavesOldOrNew(t *testing.T) {
	for seed := range crashSeeds() {
		d := newDisk(t)
		rng := rand.New(rand.NewPCG(seed, 9))
		m := &life{rng: rng, log: d.log(), term: 1, sync: true}
		for range 60 {
			file, old := d.tail(), d.clone() // of before, as an install removes segments when it is durable
			start := d.used(file)
			lo := span(m.log)[0]
			before := pictureOf(t, m.log, lo)
			what, err := m.step()
			must(t, err)
			if d.tail() != file || what == "nothing" || what == "compact" {
				continue // a new segment has begun, and its beginning is written before it gets its name
			}
			first := max(lo, span(m.log)[0])
			after := pictureOf(t, m.log, first)
			before.Entries = slices.DeleteFunc(before.Entries, func(e *pb.Entry) bool { return e.GetIndex() < first && what != "install" })
			for range 2 {
				c := old.with(file)
				c.tear(rng, start, d.used(file))
				l := c.log()
				if o, n := pictureOf(t, l, lo), pictureOf(t, l, first); !same(o, before) && !same(n, after) {
					t.Fatalf("seed %d, %s: neither old nor new (-new +got):\n%s", seed, what, cmp.Diff(after, n, protocmp.Transform()))
				}
				startsRaft(t, l)
				must(t, l.Close())
			}
		}
		must(t, m.log.Close())
	}
}

// with gives a copy in which a file is as in another directory.
func (d *disk) with(file string) *disk {
	d.t.Helper()
	c := d.clone()
	data, err := os.ReadFile(file)
	must(d.t, err)
	must(d.t, os.WriteFile(filepath.Join(c.dir, filepath.Base(file)), data, 0o600))
	return c
}

// tear makes the last segment look as if only a part of [start, end) had reached the disk.
func (d *disk) tear(rng *rand.Rand, start, end int64) {
	d.change(d.tail(), func(data []byte) []byte {
		switch n := end - start; rng.IntN(3) {
		case 0: // ends anywhere, the space was not reserved
			return data[:start+rng.Int64N(n+1)]
		case 1: // ends with a sector
			if at := start + rng.Int64N(n+1) + 511; at&^511 < end {
				clear(data[at&^511:])
			}
		default: // sectors are missing
			for at := (start + 511) &^ 511; at < end; at += 512 {
				if rng.IntN(3) == 0 {
					clear(data[at:min(at+512, int64(len(data)))])
				}
			}
		}
		return data
	})
}

// startsRaft starts a Raft instance on a log, as a member does; it panics on a log that makes no sense.
func startsRaft(t testing.TB, l *raftlog.Log) *raft.RawNode {
	t.Helper()
	rn, err := raft.NewRawNode(config(1, l))
	must(t, err)
	for rn.HasReady() {
		rd := rn.Ready()
		must(t, l.Save(rd.HardState, rd.Entries, rd.MustSync))
		rn.Advance(rd)
	}
	return rn
}

func config(id uint64, l *raftlog.Log) *raft.Config {
	return &raft.Config{
		ID: id, ElectionTick: 10, HeartbeatTick: 1, Storage: l, MaxSizePerMsg: 1 << 20, MaxInflightMsgs: 64,
		PreVote: true, CheckQuorum: true, StepDownOnRemoval: true, Applied: l.Recorded().GetIndex(),
	}
}

// TestFaultSweep fails the i-th operation of a life, for every kind and i, and crashes. What was acknowledged is
// there afterwards, and Raft starts on it.
func TestFaultSweep(t *testing.T) {
	for op, name := range map[walsim.Op]string{walsim.OpSave: "save", walsim.OpRecord: "record", walsim.OpSync: "sync", walsim.OpRelease: "release"} {
		t.Run(name, func(t *testing.T) {
			for i := range 200 {
				if !faultAt(t, op, i) {
					return // the life ended before the fault
				}
			}
			t.Fatal("the life does not end")
		})
	}
}

func faultAt(t *testing.T, op walsim.Op, i int) (failed bool) {
	d := walsim.New(&walsim.Options{Seed: uint64(i), SegmentBytes: 4 << 10})
	open := func() (raftlog.WAL, *raftlog.Replay, error) { return d.Open(first()) }
	w, r, err := open()
	must(t, err)
	m := &life{rng: rand.New(rand.NewPCG(5, uint64(i))), log: raftlog.New(w, r), term: 1}
	d.Fail(op, i, syscall.EIO)
	acked := pictureOf(t, m.log, 0)
	for range 120 {
		what, err := m.step()
		if err != nil {
			if !errors.Is(err, syscall.EIO) {
				t.Fatalf("%s: %v", what, err)
			}
			failed = true
			break
		}
		acked = pictureOf(t, m.log, 0)
	}
	d.Crash()
	l := mustOpen(t, open)
	compareAcked(t, fmt.Sprintf("fault %d", i), l, acked)
	startsRaft(t, l)
	must(t, l.Close())
	return failed
}

// compareAcked checks that nothing acknowledged is lost: term and vote, entries unless a later write that was not
// acknowledged replaced them, the commit index only as far as it was synced.
func compareAcked(t *testing.T, what string, l *raftlog.Log, acked picture) {
	t.Helper()
	hs := l.HardState()
	if hs.GetTerm() < acked.State.GetTerm() {
		t.Fatalf("%s: term %d, acknowledged %d", what, hs.GetTerm(), acked.State.GetTerm())
	}
	if l.Recorded().GetIndex() < acked.Recorded.GetIndex() {
		t.Fatalf("%s: recorded %v, acknowledged %v", what, l.Recorded(), acked.Recorded)
	}
	if hs.GetTerm() > acked.State.GetTerm() {
		return // the failed write came through after all
	}
	for _, e := range acked.Entries {
		if e.GetIndex() <= span(l)[0] {
			continue
		}
		if term, err := l.Term(e.GetIndex()); err != nil || term != e.GetTerm() {
			t.Fatalf("%s: entry %d of term %d is now %d, %v", what, e.GetIndex(), e.GetTerm(), term, err)
		}
	}
}

// pair writes to the WAL on disk and to the one in memory alike, and ends segments of the second where the first
// does.
type pair struct {
	t    testing.TB
	d    *disk
	real raftlog.WAL
	disk *walsim.Disk
	sim  raftlog.WAL
	tail string
}

func (p *pair) open() *raftlog.Replay {
	p.t.Helper()
	var replay, simulated *raftlog.Replay
	var err error
	p.real, replay, err = p.d.open()
	must(p.t, err)
	p.sim, simulated, err = p.disk.Open(first())
	must(p.t, err)
	equal(p.t, "entries of the simulation", simulated.Entries, replay.Entries)
	rest := *simulated
	rest.Entries = replay.Entries[:0]
	head := *replay
	head.Entries = rest.Entries
	equal(p.t, "replay of the simulation", &rest, &head)
	p.tail = p.d.tail()
	return replay
}

func (p *pair) both(a, b error) error {
	if (a == nil) != (b == nil) {
		p.t.Fatalf("disk: %v, simulation: %v", a, b)
	}
	if tail := p.d.tail(); tail != p.tail {
		p.disk.Cut()
		p.tail = tail
	}
	return a
}

func (p *pair) Save(hs *pb.HardState, ents []*pb.Entry, sync bool) error {
	return p.both(p.real.Save(hs, ents, sync), p.sim.Save(hs, ents, sync))
}

func (p *pair) SaveSnapshot(m *pb.SnapshotMetadata) error {
	return p.both(p.real.SaveSnapshot(m), p.sim.SaveSnapshot(m))
}
func (p *pair) Sync() error            { return p.both(p.real.Sync(), p.sim.Sync()) }
func (p *pair) Release(i uint64) error { return p.both(p.real.Release(i), p.sim.Release(i)) }
func (p *pair) Close() error           { return p.both(p.real.Close(), p.sim.Close()) }

// TestSimulationAgreesWithDisk: one random life on both; after each opening they give the same Replay.
func TestSimulationAgreesWithDisk(t *testing.T) {
	for seed := range uint64(8) {
		p := &pair{t: t, d: newDisk(t), disk: walsim.New(&walsim.Options{Seed: seed})}
		replay := p.open()
		m := &life{rng: rand.New(rand.NewPCG(seed, 3)), term: 1}
		for range 12 {
			m.log = raftlog.New(p, replay)
			for range 10 + m.rng.IntN(40) {
				_, err := m.step()
				must(t, err)
				if real := len(p.d.segments()); real != p.disk.Segments() {
					t.Fatalf("%d segments on disk, %d in the simulation", real, p.disk.Segments())
				}
			}
			before := pictureOf(t, m.log, span(m.log)[0])
			if m.rng.IntN(2) == 0 {
				must(t, m.log.Close())
			} else { // the process is killed; what it had synced is in the files
				must(t, p.Sync())
				c := p.d.clone()
				p.disk.Crash()
				must(t, p.real.Close())
				p.d = c
			}
			lo := span(m.log)[0]
			replay = p.open()
			if got := pictureOf(t, raftlog.New(p, replay), lo); !same(got, before) {
				t.Fatalf("seed %d: log after opening (-want +got):\n%s", seed, cmp.Diff(before, got, protocmp.Transform()))
			}
		}
		must(t, p.Close())
	}
}

// TestCrashCloneIsNotLocked guards the test above: a copy of a directory is free.
func TestCrashCloneIsNotLocked(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	c := d.clone()
	equal(t, "log of the copy", span(c.log()), span(l))
	if filepath.Base(c.tail()) != filepath.Base(d.tail()) {
		t.Error("other segments")
	}
}

func crashSeeds() uint64 {
	switch {
	case testing.Short():
		return 1
	case os.Getenv("SNAPFERRY_LONG") != "":
		return 40
	}
	return 3
}
