package blobcp_test

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
)

var task = checkpoint.TaskID{Job: "orders", Task: "p7"}

func slotKey(slot int) string { return fmt.Sprintf("t/orders/p7/log/%016x", slot) }

// world is a store in memory with a clock that the test moves.
type world struct {
	t     *testing.T
	mem   *memblob.Driver
	clock *clock
}

func newWorld(t *testing.T) *world {
	m := memblob.New()
	return &world{t, m, newClock(m)}
}

// log opens the task's log through a decorated driver, or directly.
func (w *world) log(through ...blob.Driver) *checkpoint.Log {
	var d blob.Driver = w.clock
	if len(through) > 0 {
		d = through[0]
	}
	s := blob.New(d, &blob.Options{Retry: blob.Retry{First: time.Millisecond, Max: 2 * time.Millisecond}})
	return checkpoint.New(blobcp.New(s, "repo-1"), &checkpoint.Options{
		FirstDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond,
	}).Log(task)
}

// claim takes the next epoch, which must work.
func (w *world) claim(l *checkpoint.Log) *checkpoint.Entry {
	w.t.Helper()
	e, err := l.Append(w.t.Context(), decideClaim)
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

// add commits under an epoch, which must work.
func (w *world) add(l *checkpoint.Log, epoch uint64) *checkpoint.Entry {
	w.t.Helper()
	e, err := l.Append(w.t.Context(), decide(checkpoint.Commit, epoch))
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

// aDayLater trims after everything has become old.
func (w *world) aDayLater() {
	w.t.Helper()
	w.clock.forward(checkpoint.KeepSuperseded + time.Hour)
	if err := w.log().Trim(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
}

func decideClaim(head *checkpoint.Entry) (checkpoint.Draft, error) {
	d := checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1, Body: []byte(`{"who":1}`)}
	if head != nil {
		d.Epoch = head.Epoch + 1
	}
	return d, nil
}

func decide(kind checkpoint.Kind, epoch uint64) func(*checkpoint.Entry) (checkpoint.Draft, error) {
	return func(*checkpoint.Entry) (checkpoint.Draft, error) {
		return checkpoint.Draft{Kind: kind, Epoch: epoch, Body: []byte(`{}`)}, nil
	}
}

// history reads the log from the store itself and checks that its entries follow each
// other from the oldest that is still there; leftovers below a gap are left out.
func (w *world) history() []*checkpoint.Entry {
	w.t.Helper()
	d := blobcp.New(blob.New(w.clock, nil), "repo-1")
	head, err := d.Head(w.t.Context(), task)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		w.t.Fatal(err)
	}
	out := []*checkpoint.Entry{head}
	for slot := head.Slot - 1; slot > 0; slot-- {
		e, err := d.Get(w.t.Context(), task, slot)
		if err != nil || e.Digest != out[0].Prev {
			break
		}
		out = append([]*checkpoint.Entry{e}, out...)
	}
	return out
}

// wantHistory checks that the log ends with exactly these entries.
func (w *world) wantHistory(want ...*checkpoint.Entry) {
	w.t.Helper()
	got := w.history()
	if len(got) < len(want) {
		w.t.Fatalf("log has %d entries, want %d", len(got), len(want))
	}
	for i, e := range got[len(got)-len(want):] {
		if e.Digest != want[i].Digest {
			w.t.Errorf("slot %d is a %s of epoch %d, want the %s of epoch %d at slot %d",
				e.Slot, e.Kind, e.Epoch, want[i].Kind, want[i].Epoch, want[i].Slot)
		}
	}
}

func (w *world) wantErr(what string, err error, want ...error) {
	w.t.Helper()
	for _, e := range want {
		if !errors.Is(err, e) {
			w.t.Errorf("%s: got error %v, want %v", what, err, e)
		}
	}
}

func (w *world) tasks() iter.Seq2[checkpoint.TaskID, error] {
	return blobcp.New(blob.New(w.clock, nil), "repo-1").Tasks(w.t.Context())
}

func put(t *testing.T, w *world, key string, data []byte) {
	t.Helper()
	if err := w.clock.Put(t.Context(), key, blob.Bytes(data), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

// slots returns the objects of the log by key.
func slots(t *testing.T, w *world) map[string][]byte {
	t.Helper()
	s := blob.New(w.clock, nil)
	out := map[string][]byte{}
	for info, err := range s.List(t.Context(), "t/orders/p7/log/", "") {
		if err != nil {
			t.Fatal(err)
		}
		data, err := s.ReadAll(t.Context(), info.Key, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		out[info.Key] = data
	}
	return out
}
