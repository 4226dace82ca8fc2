// Package checkpointtest is the contract of checkpoint.Driver as tests.
//
// A driver passes it whole. Options tell what kind of store lies below: one that
// compares the head in one step (P13) answers differently where a store of names can
// only look afterwards (P3.4), and some stores keep only the newest entries.
package checkpointtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/checkpoint"
)

// Options describe the store below a driver; nil or zero means a store of names that
// keeps all entries and whose clock the test cannot move.
type Options struct {
	// ComparesHead says that Append compares the head's slot and digest and adds the
	// entry in one step. Such a driver refuses an entry that is not built on the head.
	// One without it need not notice: its callers only append to a head that they read.
	ComparesHead bool
	// KeepsBodies is how many of the newest entries Get returns at least; 0 means all
	// that Trim left.
	KeepsBodies int
	// StampsTime says that Append sets the entry's time itself.
	StampsTime bool
	// Forward moves the clock of the store below d. Without it Trim is only tested for
	// what it must not do.
	Forward func(t *testing.T, d checkpoint.Driver, by time.Duration)
	// Writers and Appends are the size of the concurrent tests; default 4 and 15.
	Writers, Appends int
}

func (o *Options) withDefaults() Options {
	var out Options
	if o != nil {
		out = *o
	}
	if out.Writers <= 0 {
		out.Writers = 4
	}
	if out.Appends <= 0 {
		out.Appends = 15
	}
	return out
}

// suite is what a test gets: a driver over an empty store, closed after the test.
type suite struct {
	Options
	d    checkpoint.Driver
	task checkpoint.TaskID
}

var cases = []struct {
	name string
	run  func(t *testing.T, s *suite)
}{
	{"Info", testInfo},
	{"Empty", testEmpty},
	{"AppendAndRead", testAppendAndRead},
	{"RepeatIsSuccess", testRepeat},
	{"TakenSlotIsConflict", testTakenSlot},
	{"RemovedSlotIsNotMine", testRemovedSlot},
	{"NotBuiltOnHead", testNotBuiltOnHead},
	{"InvalidChangesNothing", testInvalid},
	{"LargestEntry", testLargest},
	{"TasksAreApart", testTasksApart},
	{"TasksOddNames", testTasksOddNames},
	{"TrimKeepsHead", testTrimKeepsHead},
	{"TrimAfterADay", testTrimAfterADay},
	{"CancelledAppend", testCancelled},
	{"ConcurrentWriters", testConcurrentWriters},
	{"ConcurrentOwners", testConcurrentOwners},
	{"HeadNeverGoesBack", testHeadNeverGoesBack},
}

// Run tests drivers made by open, each of which must have an empty store of its own.
func Run(t *testing.T, open func(t *testing.T) checkpoint.Driver, opts *Options) {
	o := opts.withDefaults()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d := open(t)
			t.Cleanup(func() {
				if err := d.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
			c.run(t, &suite{Options: o, d: d, task: checkpoint.TaskID{Job: "orders", Task: "p7"}})
		})
	}
}

// names counts entries, so that no two have the same body.
var names atomic.Int64

// entry makes an entry after prev, which is nil for the first.
func entry(prev *checkpoint.Entry, kind checkpoint.Kind) *checkpoint.Entry {
	e := &checkpoint.Entry{
		Kind: kind, Slot: 1, Nonce: checkpoint.NewNonce(), Epoch: 1,
		Time: time.Date(2026, 11, 30, 12, 0, 0, 123456789, time.UTC),
		Body: fmt.Appendf(nil, `{"n":%d}`, names.Add(1)),
	}
	if prev != nil {
		e.Slot, e.Prev, e.Epoch, e.Time = prev.Slot+1, prev.Digest, prev.Epoch, prev.Time
	}
	if kind == checkpoint.Claim && prev != nil {
		e.Epoch++
	}
	return e
}

// add appends n entries after prev and returns them.
func (s *suite) add(t *testing.T, task checkpoint.TaskID, prev *checkpoint.Entry, n int) []*checkpoint.Entry {
	t.Helper()
	var out []*checkpoint.Entry
	for range n {
		kind := checkpoint.Commit
		if prev == nil {
			kind = checkpoint.Claim
		}
		e := entry(prev, kind)
		if err := s.d.Append(t.Context(), task, e); err != nil {
			t.Fatalf("append at slot %d: %v", e.Slot, err)
		}
		out = append(out, e)
		prev = e
	}
	return out
}

// wantHead checks that the log's newest entry is want.
func (s *suite) wantHead(t *testing.T, task checkpoint.TaskID, want *checkpoint.Entry) {
	t.Helper()
	got, err := s.d.Head(t.Context(), task)
	if err != nil {
		t.Fatalf("head: %v", err)
	}
	same(t, got, want)
}

// same compares what both sides must agree on; when the store got an entry is its own affair.
func same(t *testing.T, got, want *checkpoint.Entry) {
	t.Helper()
	g, w := *got, *want
	g.Stored, w.Stored = time.Time{}, time.Time{}
	if d := cmp.Diff(g, w); d != "" {
		t.Fatalf("entry differs (-got +want):\n%s", d)
	}
}

func wantErr(t *testing.T, what string, err error, want ...error) {
	t.Helper()
	for _, w := range want {
		if errors.Is(err, w) {
			return
		}
	}
	t.Fatalf("%s: got error %v, want one of %v", what, err, want)
}

func testInfo(t *testing.T, s *suite) {
	a, err := s.d.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.d.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if a.ID == "" || a.ID != b.ID {
		t.Errorf("identities %q and %q", a.ID, b.ID)
	}
}

func testEmpty(t *testing.T, s *suite) {
	_, err := s.d.Head(t.Context(), s.task)
	wantErr(t, "head of no log", err, fs.ErrNotExist)
	_, err = s.d.Get(t.Context(), s.task, 1)
	wantErr(t, "slot of no log", err, fs.ErrNotExist)
	if err := s.d.Trim(t.Context(), s.task); err != nil {
		t.Errorf("trim of no log: %v", err)
	}
	s.wantTasks(t)
}

// P1: an entry comes back as it was, with its digest; the head is the newest.
func testAppendAndRead(t *testing.T, s *suite) {
	var prev *checkpoint.Entry
	for _, kind := range []checkpoint.Kind{checkpoint.Claim, checkpoint.Commit, checkpoint.Claim, checkpoint.Trim} {
		e := entry(prev, kind)
		stamp := e.Time
		if err := s.d.Append(t.Context(), s.task, e); err != nil {
			t.Fatal(err)
		}
		if e.Digest == "" || !s.StampsTime && !e.Time.Equal(stamp) {
			t.Fatalf("after append: digest %q, time %v", e.Digest, e.Time)
		}
		s.wantHead(t, s.task, e)

		got, err := s.d.Get(t.Context(), s.task, e.Slot)
		if err != nil {
			t.Fatal(err)
		}
		same(t, got, e)
		prev = e
	}
	_, err := s.d.Get(t.Context(), s.task, prev.Slot+1)
	wantErr(t, "slot after the head", err, fs.ErrNotExist)
}

// P3.3, P3.5, P13: a known nonce is success, also when the log has gone on.
func testRepeat(t *testing.T, s *suite) {
	es := s.add(t, s.task, nil, 3)
	for _, e := range es {
		again := *e
		again.Digest = ""
		if err := s.d.Append(t.Context(), s.task, &again); err != nil {
			t.Fatalf("repeat of slot %d: %v", e.Slot, err)
		}
		if again.Digest != e.Digest {
			t.Errorf("repeat of slot %d has digest %s, it had %s", e.Slot, again.Digest, e.Digest)
		}
	}
	s.wantHead(t, s.task, es[2])
}

// P3.3: a slot that another entry has is ErrConflict, and the log stays as it was.
func testTakenSlot(t *testing.T, s *suite) {
	es := s.add(t, s.task, nil, 3)
	for i, prev := range []*checkpoint.Entry{nil, es[0], es[1]} {
		err := s.d.Append(t.Context(), s.task, entry(prev, checkpoint.Claim))
		wantErr(t, fmt.Sprintf("another entry at slot %d", i+1), err, checkpoint.ErrConflict)
	}
	s.wantHead(t, s.task, es[2])
}

// P3.4, F2: whoever comes to a slot that was used and removed does not get it, be it for a
// commit or a claim. Where the clock cannot be moved, nothing is removed and the slot is
// taken.
func testRemovedSlot(t *testing.T, s *suite) {
	es := s.add(t, s.task, nil, 2)
	late := []*checkpoint.Entry{entry(es[0], checkpoint.Commit), entry(es[0], checkpoint.Claim), entry(es[1], checkpoint.Claim)}
	es = append(es, s.add(t, s.task, es[1], 3)...)
	if s.Forward != nil {
		s.Forward(t, s.d, checkpoint.KeepSuperseded+time.Hour)
		if err := s.d.Trim(t.Context(), s.task); err != nil {
			t.Fatal(err)
		}
	}

	for _, e := range late {
		err := s.d.Append(t.Context(), s.task, e)
		wantErr(t, fmt.Sprintf("late %s at slot %d", e.Kind, e.Slot), err, checkpoint.ErrFenced, checkpoint.ErrConflict)
		s.wantHead(t, s.task, es[4])
	}
	s.add(t, s.task, es[4], 1)
}

// P13: a driver that compares the head takes nothing that is not built on it.
func testNotBuiltOnHead(t *testing.T, s *suite) {
	es := s.add(t, s.task, nil, 3)
	if !s.ComparesHead {
		return
	}
	gap := entry(es[2], checkpoint.Commit)
	gap.Slot++
	wantErr(t, "a slot left out", s.d.Append(t.Context(), s.task, gap), checkpoint.ErrConflict)
	other := entry(es[2], checkpoint.Commit)
	other.Prev = es[1].Digest
	wantErr(t, "another predecessor", s.d.Append(t.Context(), s.task, other), checkpoint.ErrConflict)
	s.wantHead(t, s.task, es[2])
}

// What can never work is refused before anything is stored.
func testInvalid(t *testing.T, s *suite) {
	good := entry(nil, checkpoint.Claim)
	err := s.d.Append(t.Context(), checkpoint.TaskID{Job: "a/b", Task: ".."}, good)
	wantErr(t, "invalid task", err, fs.ErrInvalid)

	for what, change := range map[string]func(e *checkpoint.Entry){
		"slot 0":      func(e *checkpoint.Entry) { e.Slot = 0 },
		"no nonce":    func(e *checkpoint.Entry) { e.Nonce = checkpoint.Nonce{} },
		"epoch 0":     func(e *checkpoint.Entry) { e.Epoch = 0 },
		"predecessor": func(e *checkpoint.Entry) { e.Prev = "xyz" },
		"no JSON":     func(e *checkpoint.Entry) { e.Body = []byte("{") },
		"too large":   func(e *checkpoint.Entry) { e.Body = quoted(checkpoint.MaxEntrySize) },
	} {
		e := *good
		change(&e)
		wantErr(t, what, s.d.Append(t.Context(), s.task, &e), fs.ErrInvalid)
	}
	_, err = s.d.Head(t.Context(), s.task)
	wantErr(t, "head", err, fs.ErrNotExist)
}

// quoted is a JSON text of n bytes.
func quoted(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = 'x'
	}
	b[0], b[n-1] = '"', '"'
	return b
}

// P1: an entry of exactly MaxEntrySize bytes is stored and read.
func testLargest(t *testing.T, s *suite) {
	e := entry(nil, checkpoint.Claim)
	e.Body = quoted(checkpoint.MaxEntrySize - 1024)
	data, err := checkpoint.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	e.Body = quoted(len(e.Body) + checkpoint.MaxEntrySize - len(data))
	if err := s.d.Append(t.Context(), s.task, e); err != nil {
		t.Fatal(err)
	}
	s.wantHead(t, s.task, e)
}

// The order of steps between a cancelled Append and its repetition does not matter: the
// entry is in the log once.
func testCancelled(t *testing.T, s *suite) {
	es := s.add(t, s.task, nil, 1)
	e := entry(es[0], checkpoint.Commit)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.d.Append(ctx, s.task, e); err != nil {
		for _, no := range []error{checkpoint.ErrConflict, checkpoint.ErrFenced} {
			if errors.Is(err, no) {
				t.Fatalf("cancelled append: %v", err)
			}
		}
	}
	if err := s.d.Append(t.Context(), s.task, e); err != nil {
		t.Fatalf("repeated append: %v", err)
	}
	s.wantHead(t, s.task, e)
	_, err := s.d.Get(t.Context(), s.task, e.Slot+1)
	wantErr(t, "slot after it", err, fs.ErrNotExist)
}
