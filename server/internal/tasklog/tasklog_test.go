package tasklog

import (
	"context"
	"errors"
	"io/fs"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// P13: one step compares the head and adds the entry, or says why not.
func TestAppend(t *testing.T) {
	k := newKit(t)
	first := after(0, cpwire.Digest{}, "one")
	r := k.append(100, first)[0]
	want := cpwire.Result{Status: cpwire.Appended, Slot: 1, Digest: blake3.Sum256([]byte("one")), Stored: time.Unix(0, 100).UTC()}
	if d := cmp.Diff(r, want); d != "" {
		t.Fatalf("first append (-got +want):\n%s", d)
	}
	second := after(1, r.Digest, "two")
	head := k.append(200, second)[0]

	wrong := after(2, head.Digest, "three")
	wrong.Prev[0] ^= 1
	gap := after(3, head.Digest, "four")
	other := after(1, r.Digest, "another two")
	cases := []struct {
		name string
		a    cpwire.Append
		want cpwire.Status
	}{
		{"same again", second, cpwire.Known},
		{"older again", first, cpwire.Known},
		{"slot taken", other, cpwire.Conflict},
		{"first slot taken", after(0, cpwire.Digest{}, "another one"), cpwire.Conflict},
		{"other predecessor", wrong, cpwire.NotOnHead},
		{"slot left out", gap, cpwire.NotOnHead},
	}
	for _, c := range cases {
		got := k.append(300, c.a)[0]
		if got.Status != c.want {
			t.Errorf("%s: %v, want %v", c.name, got.Status, c.want)
		}
		if got.Status != cpwire.Known && (got.Slot != 2 || got.Digest != head.Digest || !got.Stored.Equal(head.Stored)) {
			t.Errorf("%s: result %+v does not tell the head", c.name, got)
		}
	}
	if got := k.append(400, first)[0]; got.Slot != 1 || got.Digest != r.Digest || !got.Stored.Equal(r.Stored) {
		t.Errorf("repeat gives %+v, the first time it was %+v", got, r)
	}
	if e, err := k.m.Head(orders, true); err != nil || e.Slot != 2 || string(e.Body) != "two" || e.Nonce != second.Nonce {
		t.Errorf("head %+v, %v", e, err)
	}
}

// A repeat in the very Ready, or the very command, that holds the first try is known: the
// database does not show that one yet.
func TestRepeatInOneApply(t *testing.T) {
	k := newKit(t)
	one := after(0, cpwire.Digest{}, "one")
	two := after(1, blake3.Sum256([]byte("one")), "two")
	got := k.do(command(1, one, one), command(2, one, two), command(3, two, one))
	var statuses []cpwire.Status
	for _, raw := range got {
		for _, r := range results(t, raw) {
			statuses = append(statuses, r.Status)
		}
	}
	want := []cpwire.Status{cpwire.Appended, cpwire.Known, cpwire.Known, cpwire.Appended, cpwire.Known, cpwire.Known}
	if d := cmp.Diff(statuses, want); d != "" {
		t.Errorf("statuses (-got +want):\n%s", d)
	}
}

// P13: exactly the newest 1,024 are known again, exactly the newest 64 bodies are kept.
func TestRings(t *testing.T) {
	k := newKit(t)
	const n = cpwire.KeptRecords + 100
	as := k.fill(1, n)
	for slot := uint64(1); slot <= n; slot++ {
		want := cpwire.Forgotten
		if slot > n-cpwire.KeptRecords {
			want = cpwire.Known
		}
		if r := k.append(2, as[slot-1])[0]; r.Status != want {
			t.Errorf("repeat of slot %d of %d: %v, want %v", slot, n, r.Status, want)
		}
		e, err := k.m.Get(orders, slot)
		if kept := slot > n-cpwire.KeptBodies; kept != (err == nil) || !kept && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("get slot %d of %d: %v", slot, n, err)
		} else if kept && (string(e.Body) != string(as[slot-1].Body) || e.Digest != blake3.Sum256(e.Body)) {
			t.Errorf("slot %d is %+v", slot, e)
		}
	}

	h, err := k.m.History(orders, 0, true)
	if err != nil || len(h) != cpwire.KeptRecords {
		t.Fatalf("history has %d entries, %v", len(h), err)
	}
	for i, e := range h {
		slot := uint64(n - cpwire.KeptRecords + 1 + i)
		if e.Slot != slot || e.Nonce != as[slot-1].Nonce || (e.Body != nil) != (slot > n-cpwire.KeptBodies) {
			t.Fatalf("history at %d is slot %d, body %v", i, e.Slot, e.Body != nil)
		}
	}
	if h, err := k.m.History(orders, n-5, false); err != nil || len(h) != 5 || h[4].Body != nil {
		t.Errorf("end of history: %d entries, %v", len(h), err)
	}
}

// The time of an entry never goes back, whatever the clocks of leaders say.
func TestTimeNeverGoesBack(t *testing.T) {
	k := newKit(t)
	for _, c := range []struct{ stamp, want int64 }{{500, 500}, {400, 500}, {-1, 500}, {501, 501}} {
		k.fill(c.stamp, 1)
		if e, err := k.m.Head(orders, false); err != nil || e.Stored.UnixNano() != c.want {
			t.Errorf("stamp %d: stored %v, %v, want %d", c.stamp, e.Stored.UnixNano(), err, c.want)
		}
	}
}

// P2 by stamped times: what was superseded less than a day ago stays, and so does the head.
func TestTrim(t *testing.T) {
	day := int64(checkpoint.KeepSuperseded)
	k := newKit(t)
	as := k.fill(1000, 3)
	k.fill(2000, 3)
	wantKept := func(first uint64) {
		t.Helper()
		for slot := uint64(1); slot <= 6; slot++ {
			if _, err := k.m.Get(orders, slot); (err == nil) != (slot >= first) {
				t.Errorf("slot %d: %v, want %d and later kept", slot, err, first)
			}
		}
	}

	k.do(EncodeTrim(1000+day-1, orders))
	wantKept(1)
	k.do(EncodeTrim(1000+day, orders))
	wantKept(3) // slot 3 was superseded at 2000
	if r := k.append(1, as[0])[0]; r.Status != cpwire.Known {
		t.Errorf("repeat of a trimmed entry: %v", r.Status)
	}
	k.do(EncodeTrim(100*day, orders), EncodeTrim(100*day, orders))
	wantKept(6)
	k.do(EncodeTrim(100*day, cpwire.Task{Job: "no", Name: "log"}))
	if e, err := k.m.Head(orders, true); err != nil || e.Slot != 6 {
		t.Errorf("head %+v, %v", e, err)
	}
	k.fill(200*day, cpwire.KeptBodies+3) // over the places of what was trimmed
	if _, err := k.m.Get(orders, 6+4); err != nil {
		t.Error(err)
	}
	if tasks, err := k.m.Tasks(cpwire.Task{}, 10); err != nil || len(tasks) != 1 {
		t.Errorf("tasks %v, %v", tasks, err)
	}
}

// What no member can do gets the same answer from all of them and changes nothing.
func TestStrangeCommands(t *testing.T) {
	k := newKit(t)
	as := k.fill(1, 2)
	good := command(5, as[0])
	longer := append(command(5, as[0]), 0)
	miscounted := command(5, as[0])
	miscounted[commandHeader]++
	newer, other := command(5, as[0]), command(5, as[0])
	newer[0], other[1] = commandVersion+1, 99
	e, err := k.m.Head(orders, false)
	if err != nil {
		t.Fatal(err)
	}
	half := command(5, after(2, e.Digest, "good"), after(3, cpwire.Digest{1}, "bad"))
	half = half[:len(half)-1]

	for name, c := range map[string]struct {
		data []byte
		want error
	}{
		"newer version":   {newer, ErrUnsupported},
		"other kind":      {other, ErrUnsupported},
		"one byte":        {[]byte{1}, ErrMalformed},
		"header only":     {good[:commandHeader], ErrMalformed},
		"cut short":       {good[:len(good)-1], ErrMalformed},
		"bytes after it":  {longer, ErrMalformed},
		"wrong count":     {miscounted, ErrMalformed},
		"good, then bad":  {half, ErrMalformed},
		"trim of nothing": {EncodeTrim(1, orders)[:commandHeader], ErrMalformed},
		"trim and more":   {append(EncodeTrim(1, orders), 0), ErrMalformed},
	} {
		if _, err := DecodeResult(k.do(c.data)[0]); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if now, err := k.m.Head(orders, false); err != nil || cmp.Diff(now, e) != "" {
		t.Errorf("head is %+v, %v, it was %+v", now, err, e)
	}
	if r := k.do(nil)[0]; r != nil {
		t.Errorf("an entry of Raft itself gives %v", r)
	}
	if _, err := DecodeResult(nil); !errors.Is(err, ErrMalformed) {
		t.Errorf("no result: %v", err)
	}
}

// Entries come once and in order; anything else stops the machine for good.
func TestOrderOfEntries(t *testing.T) {
	k := newKit(t)
	k.fill(1, 3)
	if _, err := k.m.Apply(entries(3, nil)); err == nil {
		t.Fatal("an entry was applied twice")
	}
	if _, err := k.m.Apply(entries(4, nil)); err == nil {
		t.Error("the machine went on")
	}
	if err := k.m.Snapshot("snap"); err == nil {
		t.Error("the machine made a snapshot")
	}
}

func TestTasksPages(t *testing.T) {
	k := newKit(t)
	names := []string{"a", "a-", "a.b", "a0", "a-b", "A", "_", "b", "log", "t", "0"}
	want := map[cpwire.Task]bool{}
	for _, job := range append(names, ".bench") {
		for _, name := range names {
			a := after(0, cpwire.Digest{}, job+name)
			a.Task = cpwire.Task{Job: job, Name: name}
			k.append(1, a)
			want[a.Task] = true
		}
	}

	got := map[cpwire.Task]bool{}
	for last := (cpwire.Task{}); ; {
		page, err := k.m.Tasks(last, 7)
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range page {
			if got[task] {
				t.Errorf("%v comes twice", task)
			}
			got[task], last = true, task
		}
		if len(page) < 7 {
			break
		}
	}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("tasks (-got +want):\n%s", d)
	}
}

func TestNoLog(t *testing.T) {
	k := newKit(t)
	_, err1 := k.m.Head(orders, true)
	_, err2 := k.m.Get(orders, 1)
	_, err3 := k.m.History(orders, 0, true)
	for _, err := range []error{err1, err2, err3} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("no log: %v", err)
		}
	}
	k.fill(1, 1)
	for _, slot := range []uint64{0, 2, 1 << 63} {
		if _, err := k.m.Get(orders, slot); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("slot %d: %v", slot, err)
		}
	}
}

// Await misses no change, also one between the look and the wait.
func TestAwait(t *testing.T) {
	k := newKit(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for at := uint64(0); at < 50; at++ {
				if err := k.m.Await(t.Context(), orders, at); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	k.fill(1, 50)
	wg.Wait()

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.m.Await(ctx, orders, 50); !errors.Is(err, context.Canceled) {
		t.Errorf("await of a change that does not come: %v", err)
	}
	if n := k.m.watch.n.Load(); n != 0 {
		t.Errorf("%d are still waiting", n)
	}
}

func TestCloseEndsWaiting(t *testing.T) {
	m, err := Open(stateDir, small(vfs.NewMem()))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- m.Await(context.Background(), orders, 0) }()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, checkpoint.ErrClosed) {
		t.Errorf("await ends with %v", err)
	}
	if _, err := m.Head(orders, true); !errors.Is(err, checkpoint.ErrClosed) {
		t.Errorf("head after close: %v", err)
	}
	if _, err := m.Apply(entries(1, nil)); !errors.Is(err, checkpoint.ErrClosed) {
		t.Errorf("apply after close: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}
