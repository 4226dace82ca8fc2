package snapferry

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
)

// ledger is an application that keeps its checkpoints in a log of its own: one fsynced
// line each, with the epoch of its own fencing.
type ledger struct {
	t    testing.TB
	path string
}

type ledgerLine struct {
	ID      string
	Markers map[string]string
}

func newLedger(t testing.TB) *ledger { return &ledger{t, filepath.Join(t.TempDir(), "ledger")} }

func (l *ledger) publish(m Markers) {
	l.t.Helper()
	line, err := json.Marshal(ledgerLine{m.Checkpoint, m.Stores})
	check(l.t, err)
	f, err := os.OpenFile(l.path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	check(l.t, err)
	_, err = f.Write(append(line, '\n'))
	check(l.t, errors.Join(err, f.Sync(), f.Close()))
}

// last is the newest line that is whole.
func (l *ledger) last(context.Context) (string, error) {
	f, err := os.Open(l.path)
	if os.IsNotExist(err) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	var line ledgerLine
	for s := bufio.NewScanner(f); s.Scan(); {
		if json.Unmarshal(s.Bytes(), &line) != nil {
			break
		}
	}
	return line.ID, nil
}

// newExternal is a world whose application publishes by itself, over a store that may
// expire at any moment whatever was not sealed.
func newExternal(t *testing.T) (*world, *ledger, *memblob.Driver) {
	d := memblob.New()
	w, l := newWorldOn(t, d), newLedger(t)
	w.opts.External = &External{Last: l.last}
	w.opts.Grace = -1
	return w, l, d
}

func (w *world) upload(task *Task) Markers {
	w.t.Helper()
	p, err := task.Snapshot(w.t.Context(), w.sources(), nil)
	check(w.t, err)
	m, err := p.Upload(w.t.Context())
	check(w.t, err)
	return m
}

// batter does what may happen to blobs at any time: the store expires what it may, and
// somebody collects garbage without grace.
func (w *world) batter(d *memblob.Driver) {
	w.t.Helper()
	d.Expire()
	w.gc(GCOptions{})
	d.Expire()
}

// P6: markers are permanent before the application sees them, whatever it does and for
// however long.
func TestExternalMarkersArePermanent(t *testing.T) {
	w, l, d := newExternal(t)
	task := w.open()
	for i := range 3 {
		w.write(map[string]string{"f": bulk(uint64(i), 100_000)})
		m := w.upload(task)
		w.batter(d)
		w.batter(d)
		wantSameTree(t, w.restore(m.Checkpoint), w.dir)
		if len(m.Stores) != 1 || m.Stores["kv"] == "" {
			t.Fatalf("markers %v", m)
		}
		l.publish(m)
		w.batter(d)
		check(t, task.CleanUp(t.Context(), m.Checkpoint))
		w.batter(d)
		w.wantSound()
		wantSameTree(t, w.restore(""), w.dir)
	}
}

// P6: a crash between Upload and publishing. The application's last checkpoint stays what
// it was, both restore, and the next CleanUp ends the one that nobody published.
func TestExternalCrashBeforePublish(t *testing.T) {
	w, l, d := newExternal(t)
	w.write(map[string]string{"f": bulk(1, 100_000)})
	task := w.open()
	first := w.upload(task)
	l.publish(first)
	check(t, task.CleanUp(t.Context(), first.Checkpoint))
	before := w.restore("")

	w.write(map[string]string{"f": bulk(2, 100_000)})
	lost := w.upload(task) // and here the process dies

	task = w.open()
	w.batter(d)
	wantSameTree(t, w.restore(""), before)
	wantSameTree(t, w.restore(lost.Checkpoint), w.dir)
	w.write(map[string]string{"f": bulk(3, 100_000)})
	third := w.upload(task)
	if got := ids(w.state().Prepared); len(got) != 2 {
		t.Fatalf("prepared %v", got)
	}
	l.publish(third)
	check(t, task.CleanUp(t.Context(), third.Checkpoint))
	w.batter(d)
	if s := w.state(); len(s.Prepared) != 0 || len(s.Retained) != 2 {
		t.Fatalf("prepared %v, retained %v", ids(s.Prepared), ids(s.Retained))
	}
	w.wantOnlyNamed()
	w.wantSound()
}

func ids(list []head.Checkpoint) (out []string) {
	for _, c := range list {
		out = append(out, c.ID)
	}
	return out
}

// P6: a crash between publishing and CleanUp. Open asks the application, confirms what it
// says, and drops nothing; CleanUp, which the application runs again, ends what was
// prepared before it.
func TestExternalCrashBeforeCleanUp(t *testing.T) {
	w, l, d := newExternal(t)
	w.write(map[string]string{"f": bulk(1, 100_000)})
	task := w.open()
	older := w.upload(task)
	w.write(map[string]string{"f": bulk(2, 100_000)})
	published := w.upload(task)
	w.write(map[string]string{"g": bulk(3, 100_000)})
	later := w.upload(task) // was under way when the process died
	l.publish(published)

	task = w.open()
	w.batter(d)
	s := w.state()
	if s.Latest() == nil || s.Latest().ID != published.Checkpoint || len(s.Prepared) != 2 || len(s.Dropped) != 0 {
		t.Fatalf("after Open: %+v", s)
	}
	out := filepath.Join(t.TempDir(), "kv")
	rep, err := task.Restore(t.Context(), map[string]string{"kv": out}, nil)
	if check(t, err); rep.Checkpoint != published.Checkpoint {
		t.Fatalf("restored %s, published is %s", rep.Checkpoint, published.Checkpoint)
	}

	check(t, task.CleanUp(t.Context(), published.Checkpoint))
	if got := ids(w.state().Prepared); len(got) != 1 || got[0] != later.Checkpoint {
		t.Fatalf("after CleanUp: prepared %v, want %s only, as %s was before it", got, later.Checkpoint, older.Checkpoint)
	}
	w.batter(d)
	w.wantSound()
	w.wantOnlyNamed()
}

// P6: Open asks only when the older owner can prepare and confirm nothing more.
func TestExternalLastComesAfterTheClaim(t *testing.T) {
	w, l, d := newExternal(t)
	w.write(map[string]string{"f": bulk(1, 100_000)})
	old := w.open()
	m := w.upload(old)
	asked := false
	w.opts.External = &External{Last: func(ctx context.Context) (string, error) {
		asked = true
		if w.state().Epoch != 2 {
			t.Errorf("asked in epoch %d", w.state().Epoch)
		}
		p, err := old.Snapshot(ctx, w.sources(), nil)
		check(t, err)
		if _, err := p.Upload(ctx); !errors.Is(err, ErrFenced) {
			t.Errorf("the older owner prepared: %v", err)
		}
		if err := old.CleanUp(ctx, m.Checkpoint); !errors.Is(err, ErrFenced) {
			t.Errorf("the older owner confirmed: %v", err)
		}
		return l.last(ctx)
	}}
	l.publish(m)
	w.open()
	if !asked {
		t.Fatal("not asked")
	}
	w.batter(d)
	wantSameTree(t, w.restore(""), w.dir)
}

// What Open cannot learn or does not know fails it; the task stays as it was.
func TestExternalOpenFails(t *testing.T) {
	w, l, _ := newExternal(t)
	w.write(map[string]string{"f": "1"})
	m := w.upload(w.open())
	l.publish(m)
	down := errors.New("database is down")
	w.opts.External = &External{Last: func(context.Context) (string, error) { return "", down }}
	if _, err := Open(t.Context(), kvTask, w.blobs, w.cps, &w.opts); !errors.Is(err, down) {
		t.Fatalf("Open = %v", err)
	}
	w.opts.External = &External{Last: func(context.Context) (string, error) { return "20010101T000000.000000Z-9-9", nil }}
	if _, err := Open(t.Context(), kvTask, w.blobs, w.cps, &w.opts); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "20010101") {
		t.Fatalf("Open = %v", err)
	}
	w.opts.External = &External{Last: l.last}
	w.open()
	wantSameTree(t, w.restore(""), w.dir)
}

// P6, I9: CleanUp can be run again; of what was never prepared it says so and changes
// nothing.
func TestExternalCleanUpAgain(t *testing.T) {
	w, l, _ := newExternal(t)
	task := w.open()
	var last Markers
	for i := range 3 {
		w.write(map[string]string{"f": fmt.Sprint(i)})
		last = w.upload(task)
		l.publish(last)
		for range 3 {
			check(t, task.CleanUp(t.Context(), last.Checkpoint))
		}
	}
	before := ids(w.state().Retained)
	for _, id := range []string{"nonsense", "", "20010101T000000.000000Z-1-1"} {
		if err := task.CleanUp(t.Context(), id); !errors.Is(err, ErrConflict) {
			t.Errorf("CleanUp(%q) = %v", id, err)
		}
	}
	if after := ids(w.state().Retained); fmt.Sprint(after) != fmt.Sprint(before) || len(after) != 3 {
		t.Fatalf("retained %v, was %v", after, before)
	}
	w.wantSound()
}

// P5e, P6: retention is applied by CleanUp as by Commit.
func TestExternalRetention(t *testing.T) {
	w, l, d := newExternal(t)
	w.opts.KeepLast = 2
	task := w.open()
	for i := range 5 {
		w.write(map[string]string{"f": bulk(uint64(i), 50_000)})
		m := w.upload(task)
		l.publish(m)
		check(t, task.CleanUp(t.Context(), m.Checkpoint))
	}
	if s := w.state(); len(s.Retained) != 2 {
		t.Fatalf("retained %v", ids(s.Retained))
	}
	w.batter(d)
	w.wantOnlyNamed()
	if n := w.stored(); n > 110_000 {
		t.Fatalf("%d bytes stored for 100,000", n)
	}
}

// A task has one mode, from its first Open on; Commit is not for those that publish by
// themselves, nor CleanUp for the others.
func TestExternalModeIsBound(t *testing.T) {
	w, _, _ := newExternal(t)
	w.write(map[string]string{"f": "1"})
	task := w.open()
	p, err := task.Snapshot(t.Context(), w.sources(), nil)
	check(t, err)
	if _, err := p.Commit(t.Context()); err == nil || !strings.Contains(err.Error(), "CleanUp") {
		t.Fatalf("Commit = %v", err)
	}
	if _, err := p.Upload(t.Context()); err != nil {
		t.Fatalf("Upload after a refused Commit: %v", err)
	}
	if _, err := p.Publish(t.Context()); !errors.Is(err, ErrClosed) {
		t.Fatalf("Publish = %v", err)
	}
	check(t, p.Abort(t.Context()))
	if got := w.state().Prepared; len(got) != 1 {
		t.Fatalf("Abort after Upload: prepared %v", ids(got))
	}
	internal := w.opts
	internal.External = nil
	if _, err := Open(t.Context(), kvTask, w.blobs, w.cps, &internal); !errors.Is(err, ErrConflict) {
		t.Fatalf("Open in the other mode = %v", err)
	}
	other := TaskID{Job: "orders", Task: "p8"}
	task, err = Open(t.Context(), other, w.blobs, w.cps, &internal)
	check(t, err)
	if err := task.CleanUp(t.Context(), "x"); err == nil {
		t.Fatal("CleanUp of a task that commits")
	}
	if _, err := Open(t.Context(), other, w.blobs, w.cps, &w.opts); !errors.Is(err, ErrConflict) {
		t.Fatalf("Open in the other mode = %v", err)
	}
}

// trim drops all but the newest n checkpoints as another actor does: no epoch is taken.
func (w *world) trim(n int, forget ...string) {
	w.t.Helper()
	v := &view{id: kvTask, blobs: w.blobs, log: w.cps.Log(kvTask)}
	check(w.t, v.amend(w.t.Context(), checkpoint.Trim, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Trim(n, forget, slot, time.Now()), nil
	}))
}

// baseGone is a world in which somebody prunes the base of an attempt, and sweeps, while
// that attempt writes its index.
func baseGone(t *testing.T, d blob.Driver) *world {
	hook := &hookDriver{Driver: d}
	w := newWorldOn(t, hook)
	w.opts.Grace = -1
	w.write(map[string]string{"f": bulk(1, 100_000)})
	var once sync.Once
	hook.before = func(key string, _ int64) error {
		if s := w.state(); isBlob(key) && len(s.Retained) == 2 {
			once.Do(func() {
				w.trim(1)
				w.gc(GCOptions{OlderThan: time.Nanosecond})
			})
		}
		return nil
	}
	return w
}

// P5e: content that an upload borrows from an older checkpoint is pruned before the
// attempt is prepared: it is uploaded again, and the owner does not stay stuck.
func TestExternalBaseGone(t *testing.T) {
	d, l := memblob.New(), newLedger(t)
	w := baseGone(t, d)
	w.opts.External = &External{Last: l.last}
	task := w.open()
	for i := range 4 {
		w.write(map[string]string{"f": bulk(uint64(i%2), 100_000)})
		m := w.upload(task)
		l.publish(m)
		w.batter(d)
		check(t, task.CleanUp(t.Context(), m.Checkpoint))
		wantSameTree(t, w.restore(""), w.dir)
	}
	w.wantSound()
	w.wantOnlyNamed()
}

// A confirmation that comes late does not make an older checkpoint the one that retention
// protects and the next upload is compared with.
func TestExternalLateConfirm(t *testing.T) {
	w, l, _ := newExternal(t)
	w.opts.KeepLast = 1
	w.write(map[string]string{"f": bulk(1, 100_000)})
	task := w.open()
	older := w.upload(task)
	w.write(map[string]string{"f": bulk(2, 100_000)})
	newer := w.upload(task)
	l.publish(newer)
	task = w.open() // confirms the newer one, drops none
	check(t, task.CleanUp(t.Context(), older.Checkpoint))
	s := w.state()
	if s.Latest().ID != newer.Checkpoint || s.Holders["kv"] != newer.Checkpoint {
		t.Fatalf("latest %s, holder %s, want %s", s.Latest().ID, s.Holders["kv"], newer.Checkpoint)
	}
	if len(s.Retained) != 1 {
		t.Fatalf("KeepLast 1 retains %v", ids(s.Retained))
	}
}
