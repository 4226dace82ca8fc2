package snapferry

import (
	"context"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/internal/head"
)

// Interleavings that break protocols which look right, one a test: an owner is stopped
// at a chosen operation while others go on, and then wakes up.

var (
	atPublish = blobtest.On(blobtest.OpPut, "/log/")
	atSeal    = blobtest.On(blobtest.OpRemoveTTL, "")
	atDelete  = blobtest.On(blobtest.OpDelete, "/b/")
)

// paused is a lab with checkpoint "1", its owner, and the decorator to stop it with.
type paused struct {
	*lab
	hold  *blobtest.Hold
	p     *process
	task  *Task
	first tree
}

func newPaused(t *testing.T) *paused {
	w := &paused{lab: newLab(t), first: tree{"a": "alpha", "d/b": "beta"}}
	w.hold = blobtest.NewHold(w.mem)
	w.p = w.process(t, w.hold)
	w.p.opts.KeepLast = 4
	w.task = w.p.mustOpen()
	w.p.mustCommit(w.task, w.first, "1")
	return w
}

// commitUntil begins a commit and returns when it stands at the gate; wake lets it go
// on and gives its outcome.
func (w *paused) commitUntil(gate *blobtest.Gate, tr tree, n string) (wake func() (*CommitReport, error)) {
	w.t.Helper()
	var rep *CommitReport
	done := make(chan error, 1)
	go func() {
		var err error
		rep, err = commitTree(w.t.Context(), w.task, tr, n)
		done <- err
	}()
	select {
	case <-gate.Reached():
	case err := <-done:
		w.t.Fatalf("the commit ended before the gate: %v", err)
	}
	return func() (*CommitReport, error) {
		gate.Release()
		err := <-done
		return rep, err
	}
}

// rival opens the task in another process.
func (w *paused) rival() (*process, *Task) {
	w.t.Helper()
	p := w.process(w.t, nil)
	p.opts.KeepLast = 4
	return p, p.mustOpen()
}

// want checks what is listed, and every byte of it.
func (w *paused) want(trees map[string]tree, ns ...string) {
	w.t.Helper()
	if got := w.listed(); !slices.Equal(got, ns) {
		w.t.Fatalf("listed %v, want %v", got, ns)
	}
	for _, c := range w.list() {
		w.wantTree(&c, "kv", trees[c.Offsets["n"]])
	}
	w.verify()
}

func wantErr(t testing.TB, err error, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// F1: an owner stopped before publishing is fenced by the claim, which takes the very
// slot it needs; the new owner's state does not fork (P3, P4, I4).
func TestFencePausedBeforePublish(t *testing.T) {
	w := newPaused(t)
	wake := w.commitUntil(w.hold.Before(atPublish), tree{"a": "lost"}, "2a")
	p, task := w.rival()
	dir := t.TempDir()
	value(task.Restore(t.Context(), map[string]string{"kv": filepath.Join(dir, "kv")}, nil))(t)
	if got := readDir(t, filepath.Join(dir, "kv")); !sameTree(got, w.first) {
		t.Fatalf("the new owner restored %v", got)
	}
	p.mustCommit(task, tree{"a": "two"}, "2b")
	before := w.keys("")
	_, err := wake()
	wantErr(t, err, ErrFenced)
	if d := cmp.Diff(w.keys(""), before); d != "" {
		t.Fatalf("the fenced owner changed the store:\n%s", d)
	}
	_, err = commitTree(t.Context(), w.task, tree{"a": "again"}, "3a")
	wantErr(t, err, ErrFenced)
	w.want(map[string]tree{"1": w.first, "2b": {"a": "two"}}, "1", "2b")
	w.wantOnlyLive()
}

// F1, other order: the entry stands before the claim, so it is committed and the new
// owner builds on it; its owner learns that, although it was fenced in between (P3.4).
func TestFencePausedAfterPublish(t *testing.T) {
	w := newPaused(t)
	wake := w.commitUntil(w.hold.After(atPublish), tree{"a": "two"}, "2")
	p, task := w.rival()
	p.mustCommit(task, tree{"a": "three"}, "3")
	if _, err := wake(); err != nil {
		t.Fatalf("a commit that stands in the log: %v", err)
	}
	w.want(map[string]tree{"1": w.first, "2": {"a": "two"}, "3": {"a": "three"}}, "1", "2", "3")
	_, err := commitTree(t.Context(), w.task, tree{"a": "again"}, "4a")
	wantErr(t, err, ErrFenced)
	w.wantOnlyLive()
}

// forgetNames removes every name of the log but the newest, as anybody may a day after.
func (w *paused) forgetNames() {
	w.t.Helper()
	names := w.keys("t/orders/p7/log/")
	must(w.t, w.mem.Delete(w.t.Context(), names[:len(names)-1]))
}

// F2: the slot's name was used, superseded and removed before the paused owner's PUT,
// which therefore succeeds and must not count (P3.4).
func TestFenceReusedName(t *testing.T) {
	w := newPaused(t)
	wake := w.commitUntil(w.hold.Before(atPublish), tree{"a": "lost"}, "2a")
	p, task := w.rival()
	p.mustCommit(task, tree{"a": "two"}, "2b")
	w.forgetNames()
	_, err := wake()
	wantErr(t, err, ErrFenced)
	w.want(map[string]tree{"1": w.first, "2b": {"a": "two"}}, "1", "2b")
	p.mustCommit(task, tree{"a": "three"}, "3")
	w.want(map[string]tree{"1": w.first, "2b": {"a": "two"}, "3": {"a": "three"}}, "1", "2b", "3")
	w.wantOnlyLive()
}

// F2 for a claim: it starts over, so there are never two owners of one epoch.
func TestFenceReusedNameOfClaim(t *testing.T) {
	w := newPaused(t)
	gate := w.hold.Before(atPublish)
	opened := make(chan *Task, 1)
	go func() {
		task, err := w.p.open(t.Context())
		if err != nil {
			t.Error(err)
		}
		opened <- task
	}()
	<-gate.Reached()
	p, task := w.rival()
	p.mustCommit(task, tree{"a": "two"}, "2")
	w.forgetNames()
	gate.Release()
	late := <-opened
	if late == nil || late.Epoch() <= task.Epoch() {
		t.Fatalf("the late claim is %+v, the rival has epoch %d", late, task.Epoch())
	}
	_, err := commitTree(t.Context(), task, tree{"a": "lost"}, "3a")
	wantErr(t, err, ErrFenced)
	w.p.mustCommit(late, tree{"a": "three"}, "3")
	w.want(map[string]tree{"1": w.first, "2": {"a": "two"}, "3": {"a": "three"}}, "1", "2", "3")
	w.wantOnlyLive()
}

// F3: a publish without an answer is no failure: nothing is deleted, so the checkpoint
// is whole when the PUT lands after all (P3.5).
func TestFenceLostPublish(t *testing.T) {
	for _, landed := range []bool{true, false} {
		w := newPaused(t)
		var silent atomic.Bool
		silent.Store(true)
		g := newGhosts(w.mem, func(c blobtest.Call) bool { return silent.Load() && atPublish(c) })
		p := w.process(t, nil)
		task := p.mustOpen()
		ghostly := w.process(t, g)
		task.blobs, task.log = ghostly.blobs, ghostly.cps.Log(kvTask)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-g.reached; cancel() }()
		_, err := commitTree(ctx, task, tree{"a": "two"}, "2")
		cancel()
		wantErr(t, err, ErrUnknown)
		w.mem.Expire()
		if landed {
			g.land()
			w.want(map[string]tree{"1": w.first, "2": {"a": "two"}}, "1", "2")
		}
		silent.Store(false)
		p.mustCommit(task, tree{"a": "three"}, "3")
		w.want(map[string]tree{"2": {"a": "two"}, "3": {"a": "three"}}, "2", "3")
		w.wantOnlyLive()
	}
}

// F4: when an entry is put, nothing it names can expire (P5d).
func TestFenceSealBeforePublish(t *testing.T) {
	w := newPaused(t)
	wake := w.commitUntil(w.hold.Before(atPublish), tree{"a": "two"}, "2")
	if gone := w.mem.Expire(); len(gone) > 0 {
		t.Fatalf("could expire at publishing: %v", gone)
	}
	value(wake())(t)
	w.want(map[string]tree{"1": w.first, "2": {"a": "two"}}, "1", "2")
}

// F4: a blob that expired before the seal fails the attempt.
func TestFenceExpiredBeforeSeal(t *testing.T) {
	w := newPaused(t)
	wake := w.commitUntil(w.hold.Before(atSeal), tree{"a": "two"}, "2a")
	if gone := w.mem.Expire(); len(gone) == 0 {
		t.Fatal("nothing could expire before the seal")
	}
	if _, err := wake(); err == nil || errors.Is(err, ErrUnknown) {
		t.Fatalf("commit of expired blobs: %v", err)
	}
	w.p.mustCommit(w.task, tree{"a": "two"}, "2")
	w.want(map[string]tree{"1": w.first, "2": {"a": "two"}}, "1", "2")
	w.wantOnlyLive()
}

// F5: what was prepared lives, whoever opens with whatever last checkpoint, until a
// clean-up of a later one drops it (P6).
func TestFencePreparedLives(t *testing.T) {
	l := newLab(t)
	p := l.process(t, nil)
	last := ""
	p.opts.External = &External{Last: func(context.Context) (string, error) { return last, nil }}
	task := p.mustOpen()
	upload := func(task *Task, n string) string {
		pending := value(task.Snapshot(t.Context(), memStores(tree{"a": n}), map[string]string{"n": n}))(t)
		return value(pending.Upload(t.Context()))(t).Checkpoint
	}
	x := upload(task, "x")
	must(t, task.CleanUp(t.Context(), x))
	last = x // what the new owner reads ...
	y := upload(task, "y")
	l.mem.Expire()
	second := p.mustOpen() // ... while the old one publishes y
	l.wantOnlyLive()
	dir := t.TempDir()
	value(p.repo().Restore(t.Context(), kvTask, value(ParseAt(y))(t), nil, &RestoreOptions{Dir: dir}))(t)
	if got := readDir(t, dir); !sameTree(got, tree{"kv/a": "y"}) {
		t.Fatalf("restored %v", got)
	}
	must(t, second.CleanUp(t.Context(), y))
	if got := l.listed(); !slices.Equal(got, []string{"x", "y"}) {
		t.Fatalf("listed %v", got)
	}
	wantErr(t, task.CleanUp(t.Context(), y), ErrFenced)
	l.wantOnlyLive()
}

// F6: a sweep that finds an unfinished attempt of the current epoch too old voids it
// first; the owner is told or uploads again, and never publishes what was deleted (P8, P9).
func TestFenceSweepOfLiveAttempt(t *testing.T) {
	for name, match := range map[string]blobtest.Match{"seal": atSeal, "publish": atPublish} {
		t.Run(name, func(t *testing.T) {
			w := newPaused(t)
			two := w.first.with(tree{"a": "two"})
			wake := w.commitUntil(w.hold.Before(match), two, "2")
			if rep := value(w.repo().GC(t.Context(), GCOptions{OlderThan: time.Hour}))(t); rep.BlobsDeleted != 0 {
				t.Fatalf("gc deleted %d blobs of an attempt that is not old", rep.BlobsDeleted)
			}
			if rep := value(w.repo().GC(t.Context(), GCOptions{}))(t); rep.BlobsDeleted == 0 {
				t.Fatal("gc without an age left an unfinished attempt")
			}
			rep, err := wake()
			if err != nil {
				wantErr(t, err, ErrConflict)
				rep = w.p.mustCommit(w.task, two, "2")
			}
			w.want(map[string]tree{"1": w.first, "2": two}, "1", "2")
			if list := w.list(); list[1].ID != rep.Checkpoint || list[1].Sequence != rep.Sequence {
				t.Fatalf("reported %s sequence %d, listed %s sequence %d", rep.Checkpoint, rep.Sequence, list[1].ID, list[1].Sequence)
			}
			w.wantOnlyLive()
		})
	}
}

// F7: gc and owners with another checkpoint store than the one the task is bound to
// touch nothing (bind).
func TestFenceForeignCheckpoints(t *testing.T) {
	w := newPaused(t)
	other := blob.New(memblob.New(), nil)
	foreign := checkpoint.New(blobcp.New(other, "another repository"), nil)
	before := w.keys("")
	blobs := blob.New(w.mem, nil)
	rep, err := value(OpenRepo(t.Context(), blobs, foreign, nil))(t).GC(t.Context(), GCOptions{})
	wantErr(t, err, ErrForeign)
	if rep.BlobsDeleted != 0 || len(rep.Skipped) != 1 {
		t.Fatalf("gc with a foreign store: %+v", rep)
	}
	_, err = Open(t.Context(), kvTask, blobs, foreign, nil)
	wantErr(t, err, ErrForeign)
	must(t, blobs.Delete(t.Context(), []string{bindKey(kvTask)}))
	_, err = w.repo().GC(t.Context(), GCOptions{})
	wantErr(t, err, ErrConflict)
	before = slices.DeleteFunc(before, func(k string) bool { return k == bindKey(kvTask) })
	if d := cmp.Diff(w.keys(""), before); d != "" {
		t.Fatalf("the store was changed:\n%s", d)
	}
}

// F8: what an attempt borrows is pruned and deleted before it publishes: it uploads
// again without (P5e, P12), and reports the checkpoint that it made at last.
func TestFencePrunedBase(t *testing.T) {
	w := newPaused(t)
	r := rand.New(rand.NewPCG(9, 9))
	again := tree{"big": randomBytes(r, 30<<10)}
	w.p.mustCommit(w.task, again, "2")
	w.p.mustCommit(w.task, w.first, "3")
	wake := w.commitUntil(w.hold.Before(atPublish), again, "4") // borrows from 2
	must(t, w.repo().view(kvTask).amend(t.Context(), checkpoint.Trim, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Trim(1, nil, slot, time.Now()), nil
	}))
	w.collectDropped()
	rep := value(wake())(t)
	w.want(map[string]tree{"3": w.first, "4": again}, "3", "4")
	if s := rep.Stores["kv"]; s.BytesUploaded != 30<<10 {
		t.Errorf("uploaded %d bytes, want all again", s.BytesUploaded)
	}
	if got := w.list()[1].ID; got != rep.Checkpoint {
		t.Fatalf("reported %s, listed %s", rep.Checkpoint, got)
	}
	w.wantOnlyLive()
}

// collectDropped deletes what the newest entry shows dropped, without voiding anybody.
func (w *paused) collectDropped() {
	w.t.Helper()
	c := &collector{view: w.repo().view(kvTask), rep: &GCReport{}}
	_, l, err := c.head(w.t.Context())
	must(w.t, err)
	c.l = l
	must(w.t, c.findKept(w.t.Context()))
	c.opts.OlderThan = time.Hour // for attempts under way
	must(w.t, c.sweep(w.t.Context(), value(c.list(w.t.Context()))(w.t)))
	if c.rep.BlobsDeleted == 0 {
		w.t.Fatal("nothing was deleted")
	}
}

// F9: an owner stopped in the middle of cleaning up holds a list of keys to delete. By
// the time it deletes them others own the task; what was dead is dead still (P8).
func TestFencePausedClean(t *testing.T) {
	w := newPaused(t)
	w.task.opts.KeepLast = 1
	two := w.first.with(tree{"a": "two"})
	wake := w.commitUntil(w.hold.Before(atDelete), two, "2")
	p, task := w.rival()
	p.mustCommit(task, w.first, "3") // the content of what is being deleted comes back
	p.mustCommit(task, two, "4")
	w.mem.Expire()
	trees := map[string]tree{"2": two, "3": w.first, "4": two}
	w.want(trees, "2", "3", "4")
	value(wake())(t)
	w.want(trees, "2", "3", "4")
	_, err := commitTree(t.Context(), w.task, tree{"a": "lost"}, "5a")
	wantErr(t, err, ErrFenced)
	w.want(trees, "2", "3", "4")
	w.wantOnlyLive()
}

// An owner stopped before the seal, whose blobs the new owner has swept, is told that
// it was fenced, and not that a blob is absent (I4; the command's exit code 4).
func TestFencePausedBeforeSeal(t *testing.T) {
	w := newPaused(t)
	wake := w.commitUntil(w.hold.Before(atSeal), tree{"a": "lost"}, "2a")
	_, task := w.rival()
	_, err := wake()
	wantErr(t, err, ErrFenced)
	value(commitTree(t.Context(), task, tree{"a": "two"}, "2"))(t)
	w.want(map[string]tree{"1": w.first, "2": {"a": "two"}}, "1", "2")
	w.wantOnlyLive()
}

// A put that lands after its attempt was swept is found by the next sweep (F15).
func TestFenceLatePut(t *testing.T) {
	w := newPaused(t)
	g := newGhosts(w.mem, blobtest.On(blobtest.OpPut, "/b/"))
	p := w.process(t, nil)
	task := p.mustOpen()
	task.blobs = w.process(t, g).blobs
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-g.reached; cancel() }()
	_, err := commitTree(ctx, task, tree{"a": "late"}, "2a")
	wantErr(t, err, context.Canceled)
	cancel()
	before := len(w.keys(blobPrefix(kvTask)))
	g.land()
	if len(w.keys(blobPrefix(kvTask))) == before {
		t.Fatal("nothing landed")
	}
	w.want(map[string]tree{"1": w.first}, "1")
	w.wantOnlyLive()
	w.want(map[string]tree{"1": w.first}, "1")
}

// The entry that records the progress of an upload gets no answer and the upload ends:
// what the entry names is kept, since it may land (P3.5, P5g).
func TestFenceProgressUnknown(t *testing.T) {
	for _, landed := range []bool{true, false} {
		w := newPaused(t)
		var silent atomic.Bool
		silent.Store(true)
		g := newGhosts(w.mem, func(c blobtest.Call) bool { return silent.Load() && atPublish(c) })
		ghostly := w.process(t, g)
		p := w.process(t, nil)
		p.opts.PartialBytes, p.opts.Uploads = 1, 1
		task := p.mustOpen()
		task.blobs, task.log = ghostly.blobs, ghostly.cps.Log(kvTask)
		r := rand.New(rand.NewPCG(10, 10))
		big := tree{"a": randomBytes(r, 60<<10), "b": randomBytes(r, 60<<10), "c": randomBytes(r, 60<<10)}
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-g.reached; cancel() }()
		if _, err := commitTree(ctx, task, big, "2a"); err == nil {
			t.Fatal("commit without answers")
		}
		cancel()
		if landed {
			g.land()
		}
		silent.Store(false)
		must(t, task.resolve(t.Context()))
		w.live() // reads what the head names
		p.mustCommit(task, big, "2")
		w.want(map[string]tree{"1": w.first, "2": big}, "1", "2")
		w.wantOnlyLive()
	}
}

// The same when the upload ends for another reason while that entry is on its way:
// giving the upload up first finds out what became of the entry.
func TestFenceProgressUnderWay(t *testing.T) {
	w := newPaused(t)
	var silent atomic.Bool
	silent.Store(true)
	g := newGhosts(w.mem, func(c blobtest.Call) bool { return silent.Load() && atPublish(c) })
	packs := func(c blobtest.Call) bool { return c.Op == blobtest.OpPut && c.Size > 50<<10 }
	f := blobtest.NewFaults(g, packs)
	hold := blobtest.NewHold(f)
	ghostly := w.process(t, hold)
	p := w.process(t, nil)
	p.opts.PartialBytes, p.opts.Readers, p.opts.Uploads = 1, 1, 2
	task := p.mustOpen()
	task.blobs, task.log = ghostly.blobs, ghostly.cps.Log(kvTask)
	const fourth = 3 // when it begins, one has been answered for sure, and the next records that
	f.FailAt(fourth, nil)
	seen := 0
	gate := hold.Before(func(c blobtest.Call) bool {
		if packs(c) {
			seen++
		}
		return seen == fourth+1
	})
	go func() {
		<-g.reached
		silent.Store(false)
		gate.Release()
	}()
	r := rand.New(rand.NewPCG(12, 12))
	big := tree{}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		big[name] = randomBytes(r, 60<<10)
	}
	_, err := commitTree(t.Context(), task, big, "2a")
	wantErr(t, err, blobtest.ErrInjected)
	must(t, task.resolve(t.Context()))
	if w.live(); task.state.State.Partial == nil { // live reads what the head names
		t.Fatal("the progress is not in the log")
	}
	p.mustCommit(task, big, "2")
	w.want(map[string]tree{"1": w.first, "2": big}, "1", "2")
	w.wantOnlyLive()
}

// movedClock is a store whose clock the test sets.
type movedClock struct {
	*memblob.Driver
	now func() time.Time
}

func (c *movedClock) Now(context.Context) (time.Time, error) { return c.now(), nil }

// The grace of each dropped checkpoint counts by itself: what it shares with one
// dropped earlier stays until its own is over (P10).
func TestGraceOfSharedBlobs(t *testing.T) {
	l := newLab(t)
	r := rand.New(rand.NewPCG(11, 11))
	shared := tree{"big": randomBytes(r, 30<<10)}
	clock := &movedClock{l.mem, time.Now}
	p := l.process(t, clock)
	p.opts.KeepLast, p.opts.Grace = 1, time.Hour
	task := p.mustOpen()
	p.mustCommit(task, shared, "1")
	first := l.keys(blobPrefix(kvTask))
	p.mustCommit(task, shared.with(tree{"a": "two"}), "2") // drops 1
	two := l.list()[0]
	dropped := value(l.mem.Stat(t.Context(), lastOf(l.keys("t/orders/p7/log/"), 1)[0]))(t).Modified
	p.mustCommit(task, tree{"a": "three"}, "3") // drops 2, a moment later
	clock.now = func() time.Time { return dropped.Add(time.Hour) }
	p.mustCommit(task, tree{"a": "four"}, "4")
	if l.has(lastOf(first, 1)[0]) || !l.has(first[0]) {
		t.Fatalf("after the grace of checkpoint 1, while 2 still uses its pack, there are %v", l.keys(blobPrefix(kvTask)))
	}
	l.wantTree(&two, "kv", shared.with(tree{"a": "two"}))
	value(p.repo().GC(t.Context(), GCOptions{OlderThan: time.Hour}))(t)
	l.wantTree(&two, "kv", shared.with(tree{"a": "two"}))
	l.wantOnlyLive()
}
