package snapferry

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
)

// The sweeps of this file run one life of a task again and again and let its i-th
// operation fail, for every i, until nothing fails any more. What is left must be the
// state before or after the step that failed (I1, I7, I9), never a mixture, and the
// error must have been seen.

// life is a task's life over a repository that begins with checkpoints "1" and "2", a
// dropped one, and what a killed upload left.
type life struct {
	base  *lab
	trees map[string]tree
}

func newLife(t *testing.T) *life {
	r := rand.New(rand.NewPCG(1, 2))
	lf := &life{base: newLab(t), trees: map[string]tree{}}
	tr := tree{"a": "alpha", "dir/b": randomBytes(r, 40<<10), "dir/c": randomBytes(r, 40<<10), "empty": ""}
	for i := range 6 {
		lf.trees[fmt.Sprint(i)] = tr
		tr = tr.with(tree{"a": fmt.Sprint("alpha", i), fmt.Sprint("dir/new", i): randomBytes(r, 40<<10)})
		delete(tr, fmt.Sprint("dir/new", i-1))
	}
	p := lf.base.process(t, nil)
	p.opts.Grace = 0 // so that the blobs of "0" are there still
	task := p.mustOpen()
	for _, n := range []string{"0", "1", "2"} {
		p.mustCommit(task, lf.trees[n], n)
	}
	lf.killUpload(t)
	return lf
}

// killUpload leaves an attempt behind that never committed.
func (lf *life) killUpload(t *testing.T) {
	m := newMortal(lf.base.mem)
	p := lf.base.process(t, m)
	task := p.mustOpen()
	pending := value(task.Snapshot(t.Context(), memStores(tree{"x": "dead"}), nil))(t)
	value(pending.Upload(t.Context()))(t)
	m.kill()
	must(t, pending.Abort(t.Context()))
}

// outcome is how far a life came.
type outcome struct {
	task   *Task
	opened int // warnings until it was open
	step   string
	acked  []string
	warned []string // in reports of commits
	failed string   // the commit that ended with err
	err    error
}

// run goes through the whole life, until an error.
func (lf *life) run(ctx context.Context, p *process, dir string) (o outcome) {
	step := func(name string, f func() error) bool {
		o.step = name
		o.err = f()
		return o.err == nil
	}
	commit := func(n string) func() error {
		return func() error {
			o.failed = n
			rep, err := commitTree(ctx, o.task, lf.trees[n], n)
			if err == nil {
				o.acked, o.failed = append(o.acked, n), ""
				o.warned = append(o.warned, rep.Warnings...)
			}
			return err
		}
	}
	opened := step("open", func() (err error) { o.task, err = p.open(ctx); return err })
	o.opened = len(p.warnings())
	_ = opened &&
		step("commit 3", commit("3")) &&
		step("commit 4", commit("4")) &&
		step("restore", func() error {
			_, err := o.task.Restore(ctx, map[string]string{"kv": filepath.Join(dir, "kv")}, nil)
			return err
		}) &&
		step("gc", func() error {
			r, err := OpenRepo(ctx, p.blobs, p.cps, nil)
			if err == nil {
				_, err = r.GC(ctx, GCOptions{})
			}
			return err
		})
	return o
}

// check holds what must be true after any life, on the undamaged store: the
// checkpoints that were acknowledged, perhaps the one of unknown outcome, and no
// other; all of them whole; and of the target of the restore the old or the new.
func (lf *life) check(l *lab, o outcome, dir string) {
	l.t.Helper()
	sure := append([]string{"1", "2"}, o.acked...)
	want := [][]string{lastOf(sure, 2)}
	if o.failed != "" && errors.Is(o.err, ErrUnknown) {
		want = append(want, lastOf(append(sure, o.failed), 2))
	}
	got := l.listed()
	if !slices.ContainsFunc(want, func(w []string) bool { return slices.Equal(w, got) }) {
		l.t.Fatalf("%s ended with %v; listed are %v, want one of %v", o.step, o.err, got, want)
	}
	lf.checkAll(l)
	restored := readDir(l.t, filepath.Join(dir, "kv"))
	if old := lf.trees["0"]; !sameTree(restored, old) && !sameTree(restored, lf.trees["4"]) {
		l.t.Fatalf("target of the restore is mixed: %v", restored.short())
	}
}

// checkAll reads every byte of every checkpoint.
func (lf *life) checkAll(l *lab) {
	l.t.Helper()
	l.verify()
	for _, c := range l.list() {
		l.wantTree(&c, "kv", lf.trees[c.Offsets["n"]])
	}
}

// goesOn shows that a commit works after it, restores, and that gc leaves what is alive.
func (lf *life) goesOn(l *lab, task *Task, dir string) {
	l.t.Helper()
	before := l.listed()
	_, err := commitTree(l.t.Context(), task, lf.trees["5"], "5")
	if err != nil {
		l.t.Fatalf("next commit: %v", err)
	}
	after := l.listed()
	if len(after) != 2 || after[1] != "5" || before[0] == after[0] && len(before) == 2 && before[1] != after[0] {
		l.t.Fatalf("listed before the next commit %v, after it %v", before, after)
	}
	lf.checkAll(l)
	target := filepath.Join(dir, "kv")
	value(task.Restore(l.t.Context(), map[string]string{"kv": target}, nil))(l.t)
	if got := readDir(l.t, dir); !sameTree(got, (tree{}).below("kv", lf.trees["5"])) {
		l.t.Fatalf("restored %v", got.short())
	}
	l.wantOnlyLive()
	lf.checkAll(l)
}

// Every blob operation fails once before it happens (I1, I2, I3, I9).
func TestFaultBlob(t *testing.T) {
	lf := newLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			fired = lf.failBlob(t, i)
		})
	}
}

func (lf *life) failBlob(t *testing.T, i int) bool {
	l, dir := lf.base.clone(t), fastDir(t)
	writeDir(t, filepath.Join(dir, "kv"), lf.trees["0"])
	f := blobtest.NewFaults(l.mem, nil)
	rec := blobtest.NewRecorder(f)
	p := l.process(t, rec)
	f.FailAt(i, nil)
	o := lf.run(t.Context(), p, dir)
	fired := f.Fired()
	f.Heal()
	if !fired && o.err != nil {
		t.Fatalf("%s: %v", o.step, o.err)
	}
	lf.wantSeen(t, p, o, fired, rec)
	lf.check(l, o, dir)
	if o.task == nil {
		o.task = p.mustOpen()
	}
	lf.goesOn(l, o.task, dir)
	return fired
}

// wantSeen checks that a fault came back as an error, or as a warning from cleaning
// up after what was asked for was done, or that the operation was tried again.
func (lf *life) wantSeen(t *testing.T, p *process, o outcome, fired bool, rec *blobtest.Recorder) {
	t.Helper()
	for _, text := range p.warnings()[o.opened:] {
		if o.err == nil && !slices.Contains(o.warned, text) {
			t.Fatalf("a warning is in no report: %s", text)
		}
	}
	switch {
	case !fired:
	case o.err != nil:
		if !errors.Is(o.err, blobtest.ErrInjected) || errors.Is(o.err, ErrUnsupported) || errors.Is(o.err, ErrCorrupt) {
			t.Fatalf("%s ended with another error: %v", o.step, o.err)
		}
	case len(p.warnings()) == 0:
		lines, calls := rec.Transcript(), rec.Calls()
		at := slices.IndexFunc(lines, func(s string) bool { return strings.HasSuffix(s, ": error") })
		if at < 0 || !slices.ContainsFunc(calls[at+1:], func(c blobtest.Call) bool {
			return c.Op == calls[at].Op && c.Key() == calls[at].Key()
		}) {
			t.Fatalf("nobody saw that %q failed", lines[max(at, 0)])
		}
	}
}

// Every blob operation is once the last one of its process: it is done, its answer is
// lost. A new owner finds the old state or the new and cleans up (I1, I8, I9).
func TestCrashBlob(t *testing.T) {
	lf := newLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			l, dir := lf.base.clone(t), fastDir(t)
			writeDir(t, filepath.Join(dir, "kv"), lf.trees["0"])
			ctx, f := armed(t, l.mem, i, true)
			o := lf.run(ctx, l.process(t, f), dir)
			fired = f.Fired()
			lf.afterCrash(l, o, dir, fired)
		})
	}
}

// afterCrash checks the store and lets a new owner go on. What was not sealed may
// expire at any time, so it does (I2).
func (lf *life) afterCrash(l *lab, o outcome, dir string, fired bool) {
	l.t.Helper()
	if !fired && o.err != nil {
		l.t.Fatalf("%s: %v", o.step, o.err)
	}
	l.mem.Expire()
	lf.check(l, o, dir)
	task := l.process(l.t, nil).mustOpen()
	lf.check(l, o, dir)
	lf.goesOn(l, task, dir)
}

// cpFaults is a checkpoint driver whose i-th call fails: before it happens, or, with
// lose, after it, and every later one too.
type cpFaults struct {
	checkpoint.Driver
	at     int
	lose   bool
	cancel func() // called when a call comes after the lost one

	mu    sync.Mutex
	n     int
	fired bool
}

func (c *cpFaults) around(do func() error) error {
	c.mu.Lock()
	i := c.n
	c.n++
	hit, dead := c.at >= 0 && i == c.at, c.lose && c.at >= 0 && i > c.at
	c.fired = c.fired || hit
	c.mu.Unlock()
	switch {
	case dead:
		c.cancel()
		return blobtest.ErrInjected
	case hit && !c.lose:
		return blobtest.ErrInjected
	}
	err := do()
	if hit {
		return blobtest.ErrInjected
	}
	return err
}

func (c *cpFaults) heal() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = -1
	return c.fired
}

func (c *cpFaults) Info(ctx context.Context) (info checkpoint.Info, err error) {
	err = c.around(func() (err error) { info, err = c.Driver.Info(ctx); return err })
	return info, err
}

func (c *cpFaults) Head(ctx context.Context, id checkpoint.TaskID) (e *checkpoint.Entry, err error) {
	err = c.around(func() (err error) { e, err = c.Driver.Head(ctx, id); return err })
	return e, err
}

func (c *cpFaults) Get(ctx context.Context, id checkpoint.TaskID, slot uint64) (e *checkpoint.Entry, err error) {
	err = c.around(func() (err error) { e, err = c.Driver.Get(ctx, id, slot); return err })
	return e, err
}

func (c *cpFaults) Append(ctx context.Context, id checkpoint.TaskID, e *checkpoint.Entry) error {
	return c.around(func() error { return c.Driver.Append(ctx, id, e) })
}

func (c *cpFaults) Trim(ctx context.Context, id checkpoint.TaskID) error {
	return c.around(func() error { return c.Driver.Trim(ctx, id) })
}

func (c *cpFaults) Tasks(ctx context.Context) iter.Seq2[checkpoint.TaskID, error] {
	if err := c.around(func() error { return nil }); err != nil {
		return func(yield func(checkpoint.TaskID, error) bool) { yield(checkpoint.TaskID{}, err) }
	}
	return c.Driver.Tasks(ctx)
}

// Every call of the checkpoint driver fails once before it happens (P3.5, I9).
func TestFaultCheckpoint(t *testing.T) {
	lf := newLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			l, dir := lf.base.clone(t), fastDir(t)
			writeDir(t, filepath.Join(dir, "kv"), lf.trees["0"])
			c := &cpFaults{at: i}
			p := l.process(t, nil, func(d checkpoint.Driver) checkpoint.Driver { c.Driver = d; return c })
			o := lf.run(t.Context(), p, dir)
			fired = c.heal()
			if o.err != nil && (!fired || !errors.Is(o.err, blobtest.ErrInjected)) {
				t.Fatalf("%s: %v", o.step, o.err)
			}
			lf.check(l, o, dir)
			if o.task == nil {
				o.task = p.mustOpen()
			}
			lf.goesOn(l, o.task, dir)
		})
	}
}

// Every call of the checkpoint driver is once the last whose effect there is (P3.5).
func TestCrashCheckpoint(t *testing.T) {
	lf := newLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			l, dir := lf.base.clone(t), fastDir(t)
			writeDir(t, filepath.Join(dir, "kv"), lf.trees["0"])
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			c := &cpFaults{at: i, lose: true, cancel: cancel}
			p := l.process(t, nil, func(d checkpoint.Driver) checkpoint.Driver { c.Driver = d; return c })
			o := lf.run(ctx, p, dir)
			fired = c.heal()
			lf.afterCrash(l, o, dir, fired)
		})
	}
}

// Every operation on a frozen store fails once (S2): nothing is published, except
// when the store cannot be released after publishing, which is a warning.
func TestFaultSource(t *testing.T) {
	lf := newLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			l := lf.base.clone(t)
			p := l.process(t, nil)
			task := p.mustOpen()
			var n atomic.Int64
			var failed atomic.Value
			step := func(op string) error {
				if n.Add(1) == int64(i)+1 {
					failed.Store(op)
					return fmt.Errorf("%s: %w", op, blobtest.ErrInjected)
				}
				return nil
			}
			two := map[string]source.Source{
				"kv": &memSource{lf.trees["3"], step}, "meta": &memSource{tree{"m": "meta"}, step},
			}
			rep, err := commitStores(t.Context(), task, two, "3")
			op, _ := failed.Load().(string)
			fired = op != ""
			switch listed := l.listed(); {
			case err == nil && fired && (op != "release" || len(rep.Warnings) == 0):
				t.Fatalf("nobody saw that %s failed", op)
			case err != nil && !errors.Is(err, blobtest.ErrInjected):
				t.Fatal(err)
			case err != nil && !slices.Equal(listed, []string{"1", "2"}):
				t.Fatalf("%s failed (%v), listed are %v", op, err, listed)
			case err == nil && !slices.Equal(listed, []string{"2", "3"}):
				t.Fatalf("listed %v", listed)
			}
			lf.checkAll(l)
			must(t, func() error { _, err := commitTree(t.Context(), task, lf.trees["5"], "5"); return err }())
			l.wantOnlyLive()
			lf.checkAll(l)
		})
	}
}

// A repository is made, a task opened and its first checkpoint committed while every
// blob operation fails once, or is the last of its process.
func TestFaultFirst(t *testing.T) {
	for _, lose := range []bool{false, true} {
		for i, fired := 0, true; fired && !t.Failed(); i++ {
			t.Run(fmt.Sprintf("lose=%v/%d", lose, i), func(t *testing.T) { fired = failFirst(t, i, lose) })
		}
	}
}

func failFirst(t *testing.T, i int, lose bool) bool {
	l := &lab{t: t, mem: memblob.New()}
	ctx, f := armed(t, l.mem, i, lose)
	tr := tree{"a": "alpha", "d/b": "beta"}
	_, err := firstCommit(ctx, l, f, tr, "1")
	fired := f.Fired()
	switch {
	case err != nil && lose && fired && errors.Is(err, context.Canceled):
	case err != nil && (!fired || !errors.Is(err, blobtest.ErrInjected) || errors.Is(err, ErrUnsupported)):
		t.Fatal(err)
	case err == nil && lose && fired && i < 5:
		t.Fatal("a repository was made without answers")
	}
	l.mem.Expire()
	value(firstCommit(t.Context(), l, l.mem, tr, "2"))(t)
	want := []string{"2"}
	if err == nil || errors.Is(err, ErrUnknown) {
		want = []string{"1", "2"}
	}
	got := l.listed()
	if !slices.Equal(got, want) && (err == nil || !slices.Equal(got, []string{"2"})) {
		t.Fatalf("first commit: %v; listed %v, want %v", err, got, want)
	}
	for _, c := range l.list() {
		l.wantTree(&c, "kv", tr)
	}
	l.wantOnlyLive()
	return fired
}

// firstCommit makes the repository if there is none yet and commits to it as a new owner.
func firstCommit(ctx context.Context, l *lab, d blob.Driver, tr tree, n string) (*CommitReport, error) {
	blobs := blob.New(d, &blob.Options{Retry: blob.Retry{First: quick, Max: quick}})
	info, _, err := Ensure(ctx, blobs)
	if err != nil {
		return nil, err
	}
	cps := checkpoint.New(blobcp.New(blobs, info.ID), &checkpoint.Options{FirstDelay: quick, MaxDelay: quick})
	task, err := Open(ctx, kvTask, blobs, cps, nil)
	if err != nil {
		return nil, err
	}
	return commitTree(ctx, task, tr, n)
}

// armed returns a driver whose i-th operation fails, or with lose is the last that is
// done, and a context that ends when the process has nobody to talk to any more.
func armed(t *testing.T, d blob.Driver, i int, lose bool) (context.Context, *blobtest.Faults) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	var n atomic.Int64
	f := blobtest.NewFaults(d, func(blobtest.Call) bool {
		if lose && n.Add(1) > int64(i)+1 {
			cancel()
		}
		return true
	})
	if lose {
		f.LoseAt(i, nil)
	} else {
		f.FailAt(i, nil)
	}
	return ctx, f
}

// The commits with which a head outgrows its entry and writes segments (P1).
func TestFaultLongHead(t *testing.T) {
	base := newLab(t)
	p := base.process(t, nil)
	p.opts.KeepLast = KeepAll
	task := p.mustOpen()
	const full = 96 // checkpoints that stand in an entry
	for i := range full {
		p.mustCommit(task, tree{"a": fmt.Sprint(i)}, fmt.Sprint(i))
	}
	before := base.retained()
	for _, lose := range []bool{false, true} {
		for i, fired := 0, true; fired && !t.Failed(); i++ {
			t.Run(fmt.Sprintf("lose=%v/%d", lose, i), func(t *testing.T) {
				l := base.clone(t)
				ctx, f := armed(t, l.mem, i, lose)
				p := l.process(t, f)
				p.opts.KeepLast = KeepAll
				task, err := p.open(ctx)
				if err == nil {
					_, err = commitTree(ctx, task, tree{"a": "more"}, "more")
				}
				fired = f.Fired()
				got := l.retained()
				published := len(got) == full+1
				if !slices.Equal(got[:full], before) || err == nil && !published || published && err != nil && !errors.Is(err, ErrUnknown) {
					t.Fatalf("commit: %v; %d retained", err, len(got))
				}
				next := l.process(t, nil)
				next.opts.KeepLast = KeepAll
				next.mustCommit(next.mustOpen(), tree{"a": "last"}, "last")
				after := l.retained()
				if len(after) != len(got)+1 || !slices.Equal(after[:len(got)], got) {
					t.Fatalf("%d retained after the next commit, %d before", len(after), len(got))
				}
				l.wantOnlyLive()
			})
		}
	}
}

// A disk that is full fails the restore and leaves the target as it was (I7).
func TestRestoreDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	l := newLab(t)
	p := l.process(t, nil)
	task := p.mustOpen()
	r := rand.New(rand.NewPCG(3, 4))
	big := tree{"a": randomBytes(r, 150<<10), "b": randomBytes(r, 150<<10)}
	p.mustCommit(task, big, "1")
	old := tree{"kv/a": "old", "kv/d/x": "old too", "other": "not ours"}
	writeDir(t, dir, old)
	targets := map[string]string{"kv": filepath.Join(dir, "kv")}
	if _, err := task.Restore(t.Context(), targets, nil); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("restore to a full disk: %v", err)
	}
	got := readDir(t, dir)
	maps.DeleteFunc(got, func(name, _ string) bool { return strings.HasPrefix(name, ".kv.snapferry") })
	if !sameTree(got, old) {
		t.Fatalf("target after a failed restore: %v", got.short())
	}
	must(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=4m"))
	value(task.Restore(t.Context(), targets, nil))(t)
	if got := readDir(t, dir); !sameTree(got, tree{"other": "not ours"}.below("kv", big)) {
		t.Fatalf("restored %v", got.short())
	}
}

// A chunk that is larger than a pack has one of its own.
func TestChunkLargerThanPack(t *testing.T) {
	l := newLab(t)
	p := l.process(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r := rand.New(rand.NewPCG(5, 6))
	tr := tree{"a": randomBytes(r, 3*minPackSize), "b": randomBytes(r, 2*minPackSize), "c": "small"}
	value(commitTree(ctx, p.mustOpen(), tr, "1"))(t)
	l.wantTree(&l.list()[0], "kv", tr)
	l.wantOnlyLive()
}

func lastOf(list []string, n int) []string { return list[max(0, len(list)-n):] }
