package tasklog

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// model is P13 in the plainest form: everything is kept, and forgotten when asked.
type model map[cpwire.Task]*modelLog

type modelLog struct {
	entries []cpwire.Entry // slot i+1 at i
	trimmed uint64         // bodies below this slot are gone
}

func (m model) append(stamp int64, a cpwire.Append) cpwire.Result {
	l := m[a.Task]
	if l == nil {
		l = &modelLog{}
	}
	var head cpwire.Entry
	if n := len(l.entries); n > 0 {
		head = l.entries[n-1]
	}
	r := cpwire.Result{Status: cpwire.NotOnHead, Slot: head.Slot, Digest: head.Digest, Stored: head.Stored}
	switch {
	case a.Slot == head.Slot+1 && a.Prev == head.Digest:
		e := cpwire.Entry{Slot: a.Slot, Digest: blake3.Sum256(a.Body), Nonce: a.Nonce, Stored: time.Unix(0, stamp).UTC(), Body: a.Body}
		if e.Stored.Before(head.Stored) {
			e.Stored = head.Stored
		}
		l.entries = append(l.entries, e)
		m[a.Task] = l
		return cpwire.Result{Status: cpwire.Appended, Slot: e.Slot, Digest: e.Digest, Stored: e.Stored}
	case a.Slot > head.Slot:
	case head.Slot-a.Slot >= cpwire.KeptRecords:
		r.Status = cpwire.Forgotten
	case l.entries[a.Slot-1].Nonce == a.Nonce:
		e := l.entries[a.Slot-1]
		return cpwire.Result{Status: cpwire.Known, Slot: e.Slot, Digest: e.Digest, Stored: e.Stored}
	default:
		r.Status = cpwire.Conflict
	}
	return r
}

func (m model) trim(stamp int64, task cpwire.Task) {
	l := m[task]
	if l == nil {
		return
	}
	for slot := uint64(1); slot < uint64(len(l.entries)); slot++ {
		if !l.entries[slot].Stored.After(time.Unix(0, stamp).Add(-checkpoint.KeepSuperseded)) {
			l.trimmed = max(l.trimmed, slot+1)
		}
	}
}

// history is what a machine should remember.
func (l *modelLog) history() (es []cpwire.Entry) {
	n := uint64(len(l.entries))
	for _, e := range l.entries[max(n, cpwire.KeptRecords)-cpwire.KeptRecords:] {
		if e.Slot+cpwire.KeptBodies <= n || e.Slot < l.trimmed {
			e.Body = nil
		}
		es = append(es, e)
	}
	return es
}

// script makes random commands, most of which do something, and what the model says of
// them.
type script struct {
	rng   *rand.Rand
	model model
	sent  []cpwire.Append // earlier ones, to be repeated
	clock int64
}

func newScript(seed uint64) *script {
	return &script{rng: rand.New(rand.NewPCG(seed, 1)), model: model{}, clock: 1}
}

func (s *script) command() (data []byte, want []cpwire.Result) {
	s.clock += s.rng.Int64N(int64(2*time.Minute)) - int64(20*time.Second)
	s.clock = max(s.clock, 1)
	if s.rng.IntN(50) == 0 {
		s.clock += s.rng.Int64N(int64(checkpoint.KeepSuperseded))
		task := s.task()
		s.model.trim(s.clock, task)
		return EncodeTrim(s.clock, task), nil
	}
	var as []cpwire.Append
	for range 1 + s.rng.IntN(6) {
		a := s.append()
		as = append(as, a)
		want = append(want, s.model.append(s.clock, a))
	}
	return command(s.clock, as...), want
}

func (s *script) task() cpwire.Task {
	// A few tasks get most of the appends, so that rings turn round.
	n := s.rng.IntN(12)
	if n > 6 {
		n = 0
	}
	return cpwire.Task{Job: "j", Name: fmt.Sprint("t", n)}
}

func (s *script) append() cpwire.Append {
	if len(s.sent) > 0 && s.rng.IntN(5) == 0 {
		back := s.rng.IntN(min(len(s.sent), []int{3, 50, 5000}[s.rng.IntN(3)]))
		return s.sent[len(s.sent)-1-back]
	}
	a := cpwire.Append{Task: s.task(), Slot: 1, Body: make([]byte, s.rng.IntN(100))}
	for i := range a.Nonce {
		a.Nonce[i] = byte(s.rng.Uint32())
	}
	for i := range a.Body {
		a.Body[i] = byte(s.rng.Uint32())
	}
	if l := s.model[a.Task]; l != nil {
		head := l.entries[len(l.entries)-1]
		a.Slot, a.Prev = head.Slot+1, head.Digest
	}
	switch s.rng.IntN(20) {
	case 0:
		a.Slot += 1 + uint64(s.rng.IntN(2))
		a.Prev[0] |= 1
	case 1:
		if a.Slot > 1 {
			a.Prev[3] ^= 1
		}
	case 2:
		if back := 1 + uint64(s.rng.IntN(5)); a.Slot > back+1 {
			a.Slot -= back
		}
	}
	s.sent = append(s.sent, a)
	return a
}

// Two members that get the same commands in different portions, one of which forgets
// what it had not made durable and gets a part of them again, or another one's snapshot,
// answer as the model does and end with the same state.
func TestModel(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			runModel(t, seed, 1200)
		})
	}
}

func runModel(t *testing.T, seed uint64, steps int) {
	s := newScript(seed)
	steady := &kit{t: t, m: open(t, vfs.NewMem())}
	shaky := newShaky(t, seed)
	var log [][]byte
	for len(log) < steps {
		var wants [][]cpwire.Result
		portion := 1 + s.rng.IntN(20)
		for range portion {
			data, want := s.command()
			log, wants = append(log, data), append(wants, want)
		}
		for i, raw := range steady.do(log[len(log)-portion:]...) {
			checkResults(t, len(log)-portion+i, raw, wants[i])
		}
		shaky.advance(log)
	}
	shaky.catchUp(log)

	checkState(t, steady.m, s.model)
	checkState(t, shaky.m, s.model)
	if a, b := sumOf(t, steady.m), sumOf(t, shaky.m); a != b {
		t.Errorf("sums %v and %v", a, b)
	}
}

func checkResults(t *testing.T, at int, raw []byte, want []cpwire.Result) {
	t.Helper()
	if got := results(t, raw); cmp.Diff(got, want) != "" && len(got)+len(want) > 0 {
		t.Fatalf("command %d (-got +want):\n%s", at, cmp.Diff(got, want))
	}
}

func checkState(t *testing.T, m *Machine, want model) {
	t.Helper()
	for task, l := range want {
		got, err := m.History(task, 0, true)
		if d := cmp.Diff(got, l.history()); err != nil || d != "" {
			t.Errorf("history of %v: %v (-got +want):\n%s", task, err, d)
		}
	}
	if tasks, err := m.Tasks(cpwire.Task{}, 100); err != nil || len(tasks) != len(want) {
		t.Errorf("tasks %v, %v, want %d", tasks, err, len(want))
	}
}

// shaky is a machine that is closed, crashes, makes snapshots and goes back to them.
type shaky struct {
	kit
	rng   *rand.Rand
	snaps int
}

func newShaky(t *testing.T, seed uint64) *shaky {
	s := &shaky{kit: kit{t: t, fs: newCrashFS()}, rng: rand.New(rand.NewPCG(seed, 2))}
	s.reopen()
	return s
}

func (s *shaky) reopen() {
	s.t.Helper()
	m, err := Open(stateDir, small(s.fs))
	if err != nil {
		s.t.Fatal(err)
	}
	s.m = m
	s.t.Cleanup(func() { _ = m.Close() }) // of a crashed one too
}

// advance applies some of what the log holds beyond the state, and has an accident now and
// then.
func (s *shaky) advance(log [][]byte) {
	s.t.Helper()
	at := int(s.m.AppliedIndex())
	if n := s.rng.IntN(len(log) - at + 1); n > 0 {
		s.do(log[at : at+n]...)
	}
	switch s.rng.IntN(12) {
	case 0:
		if err := s.m.Close(); err != nil {
			s.t.Fatal(err)
		}
		s.reopen()
	case 1, 2:
		s.fs = s.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: s.rng.IntN(101), RNG: s.rng})
		s.reopen()
	case 3:
		s.snaps++
		if err := s.m.Snapshot(s.snap()); err != nil {
			s.t.Fatal(err)
		}
	case 4:
		if s.snaps > 0 && s.m.AppliedIndex() > 0 {
			if err := s.m.Install(s.snap()); err != nil && s.exists(s.snap()) {
				s.t.Fatal(err)
			}
		}
	}
}

func (s *shaky) snap() string { return fmt.Sprint("data/snap-", s.snaps) }

// exists tells of a snapshot that a crash may have taken.
func (s *shaky) exists(dir string) bool {
	names, err := s.fs.List(dir)
	return err == nil && len(names) > 0
}

func (s *shaky) catchUp(log [][]byte) {
	s.t.Helper()
	if at := s.m.AppliedIndex(); at < uint64(len(log)) {
		s.do(log[at:]...)
	}
}
