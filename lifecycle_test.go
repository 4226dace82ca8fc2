package snapferry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/source"
)

// What callers of a task rely on, from Open to Close, and who else is at work meanwhile.

// skewed is a store whose clock is ahead of the times of what it holds: time has passed.
type skewed struct {
	blob.Driver
	by time.Duration
}

func (s *skewed) Now(ctx context.Context) (time.Time, error) {
	now, err := s.Driver.(blob.Clock).Now(ctx)
	return now.Add(s.by), err
}

// P10: the hold of a reader that never came back ends after a day, by gc.
func TestHoldEndsAfterADay(t *testing.T) {
	clock := &skewed{Driver: memblob.New()}
	w := newWorldOn(t, clock)
	w.opts.KeepLast, w.opts.Grace = 1, -1
	w.write(map[string]string{"f": bulk(1, 50_000)})
	task := w.open()
	held := w.mustCommit(task, nil).Checkpoint
	v := &view{id: kvTask, blobs: w.blobs, log: w.cps.Log(kvTask)}
	check(t, v.amend(t.Context(), checkpoint.Hold, func(s *head.State, slot uint64) (*head.State, error) {
		return s.AddHold(held, "reader", slot, time.Now())
	}))
	w.write(map[string]string{"f": bulk(2, 50_000)})
	w.mustCommit(task, nil)
	for _, hours := range []time.Duration{0, 23} {
		clock.by = hours * time.Hour
		w.wantOnlyNamed()
		if got := ids(w.state().Live()); !slices.Contains(got, held) {
			t.Fatalf("after %d hours: live %v", hours, got)
		}
	}
	clock.by = 25 * time.Hour
	w.wantOnlyNamed()
	if s := w.state(); len(s.Holds) != 0 || len(s.Live()) != 1 || w.stored() > 60_000 {
		t.Fatalf("after 25 hours: holds %v, live %v", s.Holds, ids(s.Live()))
	}
	w.mustCommit(task, nil)
	w.wantSound()
}

// IfRunning Fail refuses while the current epoch wrote within the window, by the store's
// clock, and takes nothing.
func TestIfRunningFail(t *testing.T) {
	clock := &skewed{Driver: memblob.New()}
	w := newWorldOn(t, clock)
	w.opts.IfRunning = Fail
	w.write(map[string]string{"f": "1"})
	task := w.open() // nobody before
	w.mustCommit(task, nil)
	for by, want := range map[time.Duration]bool{0: false, RunningWindow - time.Minute: false, RunningWindow + time.Minute: true} {
		clock.by = by
		before := len(w.keys(""))
		_, err := Open(t.Context(), kvTask, w.blobs, w.cps, &w.opts)
		if (err == nil) != want || err != nil && (!errors.Is(err, ErrRunning) || !errors.Is(err, ErrConflict)) {
			t.Errorf("after %s: Open = %v", by, err)
		}
		if !want && len(w.keys("")) != before {
			t.Errorf("after %s: a refused Open wrote", by)
		}
	}
}

// DryRun tells what Commit then does, and writes nothing.
func TestDryRunTellsWhatCommitDoes(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": bulk(1, 5<<20), "b": bulk(2, 1000), "empty": ""})
	for i := range 3 {
		before := w.keys("")
		dry, err := DryRun(t.Context(), kvTask, w.blobs, w.cps, w.sources(), &w.opts)
		check(t, err)
		if !slices.Equal(before, w.keys("")) {
			t.Fatal("a dry run wrote")
		}
		if real := w.mustCommit(w.open(), nil); !maps.Equal(dry.Stores, real.Stores) {
			t.Errorf("dry run %+v, commit %+v", dry.Stores, real.Stores)
		}
		check(t, os.Rename(filepath.Join(w.dir, "b"), filepath.Join(w.dir, fmt.Sprint("b", i))))
		w.write(map[string]string{"b": bulk(uint64(i), 3000)})
	}
}

// One commit at a time; what has ended says so; Abort leaves nothing.
func TestOneCommitAtATime(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"f": bulk(1, 100_000)})
	task := w.open()
	p, err := task.Snapshot(t.Context(), w.sources(), nil)
	check(t, err)
	if _, err := task.Snapshot(t.Context(), w.sources(), nil); !errors.Is(err, ErrBusy) {
		t.Errorf("Snapshot = %v", err)
	}
	if _, err := task.Restore(t.Context(), nil, nil); !errors.Is(err, ErrBusy) {
		t.Errorf("Restore = %v", err)
	}
	if err := task.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("Close = %v", err)
	}
	_, err = p.Upload(t.Context())
	check(t, err)
	check(t, p.Abort(t.Context()))
	check(t, p.Abort(t.Context()))
	if left := w.keys("b/"); len(left) > 0 {
		t.Errorf("Abort left %v", left)
	}
	if _, err := p.Publish(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Publish after Abort = %v", err)
	}
	if _, err := p.Commit(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Commit after Abort = %v", err)
	}
	w.mustCommit(task, nil)
	check(t, task.Close())
	if _, err := task.Snapshot(t.Context(), w.sources(), nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Snapshot after Close = %v", err)
	}
}

// Bad input is one clear error and leaves the task usable.
func TestSnapshotRefuses(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"f": "1"})
	task := w.open()
	for want, sources := range map[string]map[string]source.Source{
		"no stores": {},
		"../x":      {"../x": source.Dir(w.dir, nil)},
		"nowhere":   {"kv": source.Dir(w.dir, nil), "zz": source.Dir(filepath.Join(w.dir, "nowhere"), nil)},
	} {
		_, err := task.Snapshot(t.Context(), sources, nil)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("Snapshot = %q, want one line with %q", err, want)
		}
	}
	w.mustCommit(task, nil)
	_, err := Open(t.Context(), TaskID{Job: "a/b", Task: "t"}, w.blobs, w.cps, nil)
	if err == nil {
		t.Error("Open of a job with a slash")
	}
	empty := blob.New(memblob.New(), nil)
	if _, err := Open(t.Context(), kvTask, empty, checkpoint.New(blobcp.New(empty, "x"), nil), nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("Open without a repository = %v", err)
	}
}

// Offsets are bytes, and labels and time come back as they were given.
func TestOffsetsAreBytes(t *testing.T) {
	w := newWorld(t)
	w.opts.Labels = map[string]string{"release": "7"}
	w.write(map[string]string{"f": "1"})
	offsets := map[string]string{"\xff\x00\n": "\x80\x81", "": "empty key", "k": "", strings.Repeat("k", 5000): bulk(1, 50_000)}
	rep := w.mustCommit(w.open(), offsets)
	cp, err := w.repo().Show(t.Context(), kvTask, at(t, rep.Checkpoint))
	check(t, err)
	if !maps.Equal(cp.Offsets, offsets) || cp.Labels["release"] != "7" || !cp.Consistent || cp.Time.IsZero() {
		t.Errorf("checkpoint %+v", cp)
	}
}

// P1: ids and sequences grow whatever the clock does, over owners and failed attempts.
func TestClockGoesBack(t *testing.T) {
	hook := &hookDriver{Driver: memblob.New()}
	w := newWorldOn(t, hook)
	now := time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC)
	w.opts.now = func() time.Time { now = now.Add(-time.Hour); return now }
	last := ""
	for i := range 12 {
		w.write(map[string]string{"f": fmt.Sprint(i)})
		task := w.open()
		if i%3 == 2 {
			hook.before = func(string, int64) error { return errors.New("down") }
			if _, err := w.commit(t.Context(), task, nil); err == nil {
				t.Fatal("no error")
			}
			hook.before = nil
		}
		rep := w.mustCommit(task, nil)
		if rep.Checkpoint <= last || rep.Sequence != uint64(i+1) {
			t.Fatalf("%s (%d) after %s", rep.Checkpoint, rep.Sequence, last)
		}
		last = rep.Checkpoint
	}
	w.wantSound()
}

// P9: gc without grace beside an upload may cost it the attempt, never a checkpoint: the
// commit begins again or says that it was given up, and the next one works.
func TestGCBesideAnUpload(t *testing.T) {
	for _, when := range []int64{1, 2, 3, 4, 5} { // pack, pack, index, checkpoint blob, entry
		t.Run(fmt.Sprint("put ", when), func(t *testing.T) {
			hook := &hookDriver{Driver: memblob.New()}
			w := newWorldOn(t, hook)
			w.opts.PackSize, w.opts.Uploads = minPackSize, 1
			w.write(map[string]string{"base": "b"})
			task := w.open()
			w.mustCommit(task, nil)
			w.write(map[string]string{"f": bulk(1, 60_000), "g": bulk(2, 60_000)})
			var n int64
			var once sync.Once
			hook.before = func(key string, _ int64) error {
				if n++; n == when {
					once.Do(func() { w.gc(GCOptions{}) })
				}
				return nil
			}
			rep, err := w.commit(t.Context(), task, nil)
			hook.before = nil
			if err != nil && !errors.Is(err, ErrConflict) {
				t.Fatalf("commit = %v", err)
			}
			if err == nil {
				wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
			}
			w.wantSound()
			rep = w.mustCommit(task, nil)
			wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
			w.wantOnlyNamed()
		})
	}
}

// Tasks whose names begin alike are apart: listing, gc and verify see each.
func TestTasksApart(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast, w.opts.Grace = 1, time.Hour
	var all []TaskID
	for _, name := range []string{"orders p7", "orders p7-x", "orders p70", "orders p7.a", "orders-2 p7", "order p7"} {
		job, task, _ := strings.Cut(name, " ")
		all = append(all, TaskID{Job: job, Task: task})
	}
	for i, id := range all {
		task, err := Open(t.Context(), id, w.blobs, w.cps, &w.opts)
		check(t, err)
		for k := range 2 {
			w.write(map[string]string{"f": bulk(uint64(10*i+k), 1000)})
			w.mustCommit(task, nil)
		}
	}
	list, err := w.repo().List(t.Context(), ListFilter{})
	if check(t, err); len(list) != len(all) {
		t.Fatalf("%d tasks are listed", len(list))
	}
	if rep := w.gc(GCOptions{}); rep.BlobsDeleted != int64(3*len(all)) {
		t.Errorf("gc = %+v", rep)
	}
	rep, err := w.repo().Verify(t.Context(), VerifyOptions{ReadData: true})
	if check(t, err); !rep.OK || rep.Checkpoints != int64(len(all)) {
		t.Errorf("verify = %+v", rep)
	}
}

// What no bind object tells is skipped, and a damaged one is damage: neither passes for sound.
func TestVerifyWithoutBind(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"f": "1"})
	w.mustCommit(w.open(), nil)
	cps := checkpoint.New(blobcp.New(blob.New(memblob.New(), nil), "another"), nil)
	r, err := OpenRepo(t.Context(), w.blobs, cps, nil)
	check(t, err)

	check(t, w.blobs.Put(t.Context(), bindKey(kvTask), blob.Bytes([]byte("no frame")), blob.PutOptions{}))
	v, err := r.Verify(t.Context(), VerifyOptions{})
	if err != nil || v.OK || len(v.Corrupt) != 1 || v.Corrupt[0].Blob != bindKey(kvTask) {
		t.Errorf("verify with a damaged bind object = %+v, %v", v, err)
	}
	check(t, w.blobs.Delete(t.Context(), []string{bindKey(kvTask)}))
	v, err = r.Verify(t.Context(), VerifyOptions{})
	if err != nil || !v.OK || len(v.Skipped) != 1 {
		t.Errorf("verify without a bind object = %+v, %v", v, err)
	}
}

// F7: gc, verify and Open with another checkpoint store than the task's touch nothing.
func TestForeignCheckpointStore(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast = 1
	w.write(map[string]string{"f": "1"})
	task := w.open()
	w.mustCommit(task, nil)
	w.mustCommit(task, nil)
	before := w.keys("")
	other := blob.New(memblob.New(), nil)
	cps := checkpoint.New(blobcp.New(other, "another"), nil)
	r, err := OpenRepo(t.Context(), w.blobs, cps, nil)
	check(t, err)
	rep, err := r.GC(t.Context(), GCOptions{})
	if !errors.Is(err, ErrForeign) || rep == nil || len(rep.Skipped) != 1 || rep.BlobsDeleted != 0 {
		t.Errorf("gc = %+v, %v", rep, err)
	}
	v, err := r.Verify(t.Context(), VerifyOptions{})
	if err != nil || !v.OK || v.Checkpoints != 0 || len(v.Skipped) != 1 || !strings.HasPrefix(v.Skipped[0], kvTask.String()+": ") {
		t.Errorf("verify = %+v, %v", v, err)
	}
	if list, err := r.List(t.Context(), ListFilter{}); err != nil || len(list) != 0 {
		t.Errorf("list = %+v, %v", list, err)
	}
	if s, err := r.Skipped(t.Context(), ListFilter{Job: kvTask.Job}); err != nil || !slices.Equal(s, v.Skipped) {
		t.Errorf("skipped = %q, %v", s, err)
	}
	if s, err := r.Skipped(t.Context(), ListFilter{Job: "another"}); err != nil || len(s) != 0 {
		t.Errorf("skipped of another job = %q, %v", s, err)
	}
	if s, err := w.repo().Skipped(t.Context(), ListFilter{}); err != nil || len(s) != 0 {
		t.Errorf("skipped where the log is = %q, %v", s, err)
	}
	if _, err := Open(t.Context(), kvTask, w.blobs, cps, &w.opts); !errors.Is(err, ErrForeign) {
		t.Errorf("Open = %v", err)
	}
	if _, err := r.Restore(t.Context(), kvTask, At{}, nil, &RestoreOptions{Dir: t.TempDir()}); !errors.Is(err, ErrForeign) {
		t.Errorf("Restore = %v", err)
	}
	if !slices.Equal(before, w.keys("")) {
		t.Error("something changed")
	}
}

// Hard links come and go, also the first name of a group; nothing is sent twice for it.
func TestHardLinksComeAndGo(t *testing.T) {
	w := newWorld(t)
	full := func(p string) string { return filepath.Join(w.dir, p) }
	w.write(map[string]string{"b": bulk(1, 50_000), "x": bulk(2, 9000)})
	task := w.open()
	for i, step := range []func() error{
		func() error { return os.Link(full("b"), full("c")) },
		func() error { return os.Link(full("b"), full("a")) },
		func() error { return os.Remove(full("a")) },
		func() error { return os.Remove(full("b")) },
		func() error { return os.Rename(full("c"), full("d")) },
		func() error { return os.Link(full("d"), full("e")) },
		func() error { return errors.Join(os.Remove(full("x")), os.Link(full("d"), full("x"))) },
		func() error {
			return errors.Join(os.Remove(full("e")), os.WriteFile(full("e"), []byte(bulk(1, 50_000)), 0o644))
		},
	} {
		if i == 1 {
			w.mustCommit(task, nil)
		}
		check(t, step())
		rep := w.mustCommit(task, nil)
		if s := rep.Stores["kv"]; i > 0 && s.BytesUploaded != 0 {
			t.Errorf("step %d: %+v", i, s)
		}
		wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
	}
	w.wantSound()
}

// Holes come, go and move; sizes change; what is restored is what there was.
func TestHolesComeAndGo(t *testing.T) {
	w := newWorld(t)
	p := filepath.Join(w.dir, "f")
	w.write(map[string]string{"f": bulk(1, 9<<20)})
	task := w.open()
	for i, step := range []func() error{
		func() error { return nil },
		func() error { return os.Truncate(p, 20<<20) },
		func() error { return punch(p, 1<<20, 5<<20) },
		func() error { return punch(p, 7<<20+1000, 100_000) },
		func() error { patch(t, p, 2<<20, bulk(2, 100)); return nil },
		func() error { patch(t, p, 20<<20-1, "x"); return nil },
		func() error { return os.Truncate(p, 3<<20+5) },
		func() error { return punch(p, 0, 3<<20+5) },
		func() error { return os.Truncate(p, 0) },
	} {
		check(t, step())
		rep := w.mustCommit(task, nil)
		out := w.restore(rep.Checkpoint)
		wantSameTree(t, out, w.dir)
		if got, want := blocks(t, filepath.Join(out, "f")), blocks(t, p); got > want+256 {
			t.Errorf("step %d: %d blocks were restored of %d", i, got, want)
		}
	}
	w.wantSound()
}

func punch(path string, off, n int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	return errors.Join(err, f.Close())
}

func blocks(t *testing.T, path string) int64 {
	var st unix.Stat_t
	check(t, unix.Stat(path, &st))
	return st.Blocks
}

// The steps of Commit one by one, for those who do something between them.
func TestUploadThenPublish(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"f": bulk(1, 1000)})
	task := w.open()
	var m Markers
	for seq := uint64(1); seq <= 2; seq++ {
		p, err := task.Snapshot(t.Context(), w.sources(), nil)
		check(t, err)
		if _, err := p.Publish(t.Context()); err == nil || !strings.Contains(err.Error(), "Upload") {
			t.Errorf("Publish before Upload = %v", err)
		}
		m, err = p.Upload(t.Context())
		check(t, err)
		if got := ids(w.state().Live()); slices.Contains(got, m.Checkpoint) || p.Frozen() <= 0 {
			t.Errorf("live after Upload: %v", got)
		}
		rep, err := p.Publish(t.Context())
		if check(t, err); rep.Checkpoint != m.Checkpoint || rep.Sequence != seq || rep.Epoch != task.Epoch() {
			t.Errorf("published %+v, uploaded %s", rep, m.Checkpoint)
		}
		if _, err := p.Publish(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("Publish again = %v", err)
		}
	}
	cp, err := w.repo().Show(t.Context(), kvTask, At{})
	if check(t, err); cp.Stores["kv"].Marker != m.Stores["kv"] {
		t.Errorf("marker %s, uploaded %s", cp.Stores["kv"].Marker, m.Stores["kv"])
	}
	if names, err := task.Stores(); err != nil || !slices.Equal(names, []string{"kv"}) {
		t.Errorf("Stores = %v, %v", names, err)
	}
	w.wantSound()
}

// Part of a tree can be restored, and what a restore would do can be asked.
func TestRestoreOptions(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a/1": "one", "a/2": "two", "b/1": "three", "c": "four"})
	rep := w.mustCommit(w.open(), nil)
	for globs, want := range map[string][]string{
		"a":     {".", "a", "a/1", "a/2"},
		"*/1 c": {".", "a", "a/1", "b", "b/1", "c"},
		"1":     {".", "a", "a/1", "b", "b/1"}, // at any depth
		"x c":   {".", "c"},
	} {
		dir := t.TempDir()
		opts := &RestoreOptions{Dir: dir, Include: strings.Fields(globs), DryRun: true}
		dry, err := w.repo().Restore(t.Context(), kvTask, at(t, rep.Checkpoint), nil, opts)
		check(t, err)
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("a dry run left %v, %v", left, err)
		}
		opts.DryRun = false
		real, err := w.repo().Restore(t.Context(), kvTask, At{}, nil, opts)
		check(t, err)
		if !maps.Equal(dry.Stores, real.Stores) {
			t.Errorf("%s: dry run %+v, restore %+v", globs, dry.Stores, real.Stores)
		}
		if got := slices.Sorted(maps.Keys(portrait(t, filepath.Join(dir, "kv")))); !slices.Equal(got, want) {
			t.Errorf("%s: restored %v, want %v", globs, got, want)
		}
	}
	if _, err := w.repo().Restore(t.Context(), kvTask, At{}, nil, nil); err == nil {
		t.Error("restore to nowhere")
	}
	dir := t.TempDir()
	_, err := w.repo().Restore(t.Context(), kvTask, At{}, nil, &RestoreOptions{Dir: dir, Include: []string{"x", "b/c"}})
	if left, rerr := os.ReadDir(dir); !errors.Is(err, ErrNotFound) || rerr != nil || len(left) > 0 {
		t.Errorf("a part that is not there: %v; left %v, %v", err, left, rerr)
	}
}
