package blobcp_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/checkpoint"
)

// scenario is an owner's life with a collision in it. It stops at the first error.
func scenario(ctx context.Context, w *world, l *checkpoint.Log) (acked []*checkpoint.Entry, err error) {
	e, err := l.Append(ctx, decideClaim)
	if err != nil {
		return nil, err
	}
	acked = append(acked, e)
	epoch := e.Epoch

	for i := range 4 {
		if i == 2 { // another writer takes the slot that l will try
			trim, err := w.log().Append(w.t.Context(), decide(checkpoint.Trim, epoch))
			if err != nil {
				return acked, err
			}
			acked = append(acked, trim)
		}
		e, err := l.Append(ctx, decide(checkpoint.Commit, epoch))
		if err != nil {
			return acked, err
		}
		acked = append(acked, e)
	}
	return acked, nil
}

// P3.5, I9: whatever operation's answer is lost, and with it the network, the log holds what
// was acknowledged and at most the one entry whose outcome was said to be unknown;
// Resolve then tells which.
func TestLostAnswerAtEveryOperation(t *testing.T) {
	for i := 0; ; i++ {
		w := newWorld(t)
		f := blobtest.NewFaults(w.clock, nil)
		ctx, giveUp := context.WithCancel(t.Context())
		l := w.log(whenLost(f, giveUp))
		f.LoseAt(i, nil)
		acked, err := scenario(ctx, w, l)
		giveUp()
		if !f.Fired() {
			wantScenarioEnd(t, i, err)
			return
		}
		f.Heal()
		afterFault(t, w, l, acked, err)
	}
}

// whenLost makes the scenario's process give up a few operations after the fault.
func whenLost(f *blobtest.Faults, giveUp func()) blob.Driver {
	after := 0
	return blobtest.NewLatency(f, func(blobtest.Call) time.Duration {
		if f.Fired() {
			after++
		}
		if after == 3 {
			giveUp()
		}
		return 0
	})
}

// The same with one operation that fails before it happens, while the network lives on.
func TestFailureOfEveryOperation(t *testing.T) {
	for i := 0; ; i++ {
		w := newWorld(t)
		f := blobtest.NewFaults(w.clock, nil)
		l := w.log(f)
		f.FailAt(i, nil)
		acked, err := scenario(t.Context(), w, l)
		if !f.Fired() {
			wantScenarioEnd(t, i, err)
			return
		}
		afterFault(t, w, l, acked, err)
	}
}

func wantScenarioEnd(t *testing.T, operations int, err error) {
	t.Helper()
	if err != nil || operations < 15 {
		t.Errorf("scenario without a fault has %d operations and ends with %v", operations, err)
	}
}

// afterFault settles what is unknown and compares the log with what was acknowledged.
func afterFault(t *testing.T, w *world, l *checkpoint.Log, acked []*checkpoint.Entry, err error) {
	t.Helper()
	e, rerr := l.Resolve(t.Context())
	if rerr != nil {
		t.Fatalf("resolve: %v", rerr)
	}
	switch {
	case e != nil && !errors.Is(err, checkpoint.ErrUnknown):
		t.Errorf("error was %v, but its entry is in the log", err)
	case e != nil:
		acked = append(acked, e)
	}

	if got := len(w.history()); got != len(acked) {
		t.Errorf("after %v: log has %d entries, want %d", err, got, len(acked))
	}
	w.wantHistory(acked...)
	w.wantHistory(append(acked, w.claim(w.log()))...)
}

// A damaged newest entry is an error that names its key; it is never skipped, neither by
// readers nor by writers. Damage below it is nobody's business.
func TestDamage(t *testing.T) {
	w := newWorld(t)
	l := w.log()
	w.claim(l)
	w.add(l, 1)
	flip := func(data []byte) []byte {
		data[len(data)-3] ^= 1
		return data
	}
	if err := w.mem.Corrupt(slotKey(1), flip); err != nil {
		t.Fatal(err)
	}
	if _, err := w.log().Head(t.Context()); err != nil {
		t.Errorf("head above a damaged entry: %v", err)
	}

	stale := blobtest.NewStale(w.clock, 1)
	head := w.add(w.log(stale), 1)
	if err := w.mem.Corrupt(slotKey(2), flip); err != nil {
		t.Fatal(err)
	}
	if e, err := w.log(stale).Head(t.Context()); err != nil || e.Digest != head.Digest {
		t.Errorf("head after a damaged entry that the listing ends with: %+v, %v", e, err)
	}

	if err := w.mem.Corrupt(slotKey(3), flip); err != nil {
		t.Fatal(err)
	}
	_, err := w.log().Head(t.Context())
	w.wantErr("damaged head", err, checkpoint.ErrCorrupt)
	if err != nil && !strings.Contains(err.Error(), slotKey(3)) {
		t.Errorf("error does not name the key: %v", err)
	}
	_, err = w.log().Append(t.Context(), decideClaim)
	w.wantErr("claim on a damaged head", err, checkpoint.ErrCorrupt)
	if len(slots(t, w)) != 3 {
		t.Errorf("log has slots %v", slots(t, w))
	}
}

// An entry that lies at another slot's name is damage.
func TestMisplacedEntry(t *testing.T) {
	w := newWorld(t)
	l := w.log()
	w.claim(l)
	w.add(l, 1)
	first := slots(t, w)[slotKey(1)]
	if err := w.mem.Corrupt(slotKey(2), func([]byte) []byte { return first }); err != nil {
		t.Fatal(err)
	}
	_, err := w.log().Head(t.Context())
	w.wantErr("misplaced head", err, checkpoint.ErrCorrupt)
}

// A log that got shorter is damage, not an invitation to write it again.
func TestLogWentBack(t *testing.T) {
	w := newWorld(t)
	l := w.log()
	w.claim(l)
	w.add(l, 1)
	for _, gone := range []int{2, 1} {
		if err := w.mem.Delete(t.Context(), []string{slotKey(gone)}); err != nil {
			t.Fatal(err)
		}
		_, err := l.Head(t.Context())
		w.wantErr("head", err, checkpoint.ErrCorrupt)
	}
}

// Objects with names that are not slots are not entries.
func TestForeignNames(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"zz", "00000000000000FF", "ff", "0000000000000000", "00000000000000001"} {
		put(t, w, "t/orders/p7/log/"+name, []byte("x"))
	}
	put(t, w, "t/orders/p8/log/zz", []byte("x"))
	put(t, w, "t/.hidden/p8/log/0000000000000001", []byte("x"))
	l := w.log()
	w.wantHistory(w.claim(l), w.add(l, 1))

	var got []checkpoint.TaskID
	for task, err := range w.tasks() {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, task)
	}
	if len(got) != 1 || got[0] != task {
		t.Errorf("tasks %v", got)
	}
}
