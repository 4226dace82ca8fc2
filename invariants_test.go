package snapferry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/source"
)

// I5: "unchanged" is claimed only on proof.

// looker is a world that counts what a commit reads.
type looker struct {
	*world
	task *Task
	n    atomic.Int64
}

func newLooker(t *testing.T) *looker {
	l := &looker{world: newWorld(t)}
	l.write(map[string]string{"a": bulk(1, 40_000), "b": bulk(2, 30_000), "d/c": bulk(3, 20_000)})
	l.task = l.open()
	l.commit()
	return l
}

const lookerBytes = 90_000

// commit commits, checks that what was committed is what is there, and returns how much
// was read for it.
func (l *looker) commit() int64 {
	l.t.Helper()
	l.n.Store(0)
	src := spied{Source: source.Dir(l.dir, nil), n: &l.n}
	rep, err := l.commitFrom(l.task, map[string]source.Source{"kv": src})
	check(l.t, err)
	read := l.n.Load()
	wantSameTree(l.t, l.restore(rep.Checkpoint), l.dir)
	return read
}

// wantRead commits and checks how much was read, where identities can be cached at all;
// elsewhere everything is read each time.
func (l *looker) wantRead(what string, want int64) {
	l.t.Helper()
	got := l.commit()
	if !ext4(l.t, l.dir) {
		want = got
	}
	if got != want {
		l.t.Errorf("%s: %d bytes were read, want %d", what, got, want)
	}
}

func TestI5Changes(t *testing.T) {
	l := newLooker(t)
	a := filepath.Join(l.dir, "a")
	l.wantRead("nothing changed", 0)

	patch(t, a, 100, "X")
	l.wantRead("a byte, same size and mtime", 40_000)
	l.wantRead("nothing changed", 0)

	info, err := os.Stat(a)
	check(t, err)
	check(t, os.WriteFile(a+".new", []byte(bulk(9, 40_000)), 0o644))
	check(t, os.Chtimes(a+".new", info.ModTime(), info.ModTime()))
	check(t, os.Rename(a+".new", a))
	l.wantRead("replaced by a file of the same size and mtime", 40_000)

	b := filepath.Join(l.dir, "b")
	check(t, os.Rename(a, a+".x"))
	check(t, os.Rename(b, a))
	check(t, os.Rename(a+".x", b))
	l.wantRead("two files have changed places", 70_000)

	check(t, os.Chmod(a, 0o600))
	l.wantRead("new mode", 30_000)
	check(t, unix.Setxattr(b, "user.x", []byte("1"), 0))
	l.wantRead("new attribute", 40_000)
	l.wantRead("nothing changed", 0)
}

// A store through a mapping into a page that is dirty already moves no time; the flush
// before reading makes it move one.
func TestI5MappedWriter(t *testing.T) {
	l := newLooker(t)
	f, err := os.OpenFile(filepath.Join(l.dir, "a"), os.O_RDWR, 0)
	check(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, 40_000, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	check(t, err)
	defer func() { check(t, unix.Munmap(m)) }()
	for i := range 6 {
		m[10+i] ^= 0xff
		if got := l.commit(); got < 40_000 {
			t.Fatalf("store %d through the mapping was missed: %d bytes read", i, got)
		}
	}
}

// Losing or damaging the cache costs reading, never correctness.
func TestI5CacheLostOrDamaged(t *testing.T) {
	l := newLooker(t)
	files := func() []string {
		list, err := filepath.Glob(filepath.Join(l.opts.CacheDir, "*"))
		check(t, err)
		return list
	}
	if ext4(t, l.dir) && len(files()) == 0 {
		t.Fatal("no cache was kept")
	}
	for name, change := range map[string]func(data []byte) []byte{
		"flipped":   func(b []byte) []byte { b[len(b)-5] ^= 1; return b },
		"truncated": func(b []byte) []byte { return b[:len(b)/2] },
		"empty":     func([]byte) []byte { return nil },
		"foreign":   func([]byte) []byte { return []byte("something else altogether") },
	} {
		for _, f := range files() {
			data, err := os.ReadFile(f)
			check(t, err)
			if len(data) > 0 {
				check(t, os.WriteFile(f, change(data), 0o600))
			}
		}
		patch(t, filepath.Join(l.dir, "b"), 7, name)
		l.wantRead(name, lookerBytes)
		l.wantRead("nothing changed", 0)
	}
	check(t, os.RemoveAll(l.opts.CacheDir))
	patch(t, filepath.Join(l.dir, "b"), 7, "lost")
	l.wantRead("lost", lookerBytes)
}

// The cache speaks of one directory, and its word counts only together with the base: a
// commit from another place in between is not mistaken for it.
func TestI5CacheAndBaseMustAgree(t *testing.T) {
	l := newLooker(t)
	here, there := l.dir, t.TempDir()
	l.dir = there
	l.write(map[string]string{"a": bulk(11, 40_000), "b": bulk(12, 30_000), "d/c": bulk(13, 20_000)})
	l.commit()
	l.dir = here
	l.commit() // the cache knows these files, the base is of the others
	l.wantRead("nothing changed", 0)
}

// After a restore the cache knows nothing of the target, whatever the files look like.
func TestI5RestoreIsANewIncarnation(t *testing.T) {
	l := newLooker(t)
	first := l.state().Latest().ID
	patch(t, filepath.Join(l.dir, "a"), 0, "second")
	l.commit()
	repo, err := OpenRepo(t.Context(), l.blobs, l.cps, &RepoOptions{CacheDir: l.opts.CacheDir})
	check(t, err)
	_, err = repo.Restore(t.Context(), kvTask, at(t, first), map[string]string{"kv": l.dir}, nil)
	check(t, err)
	l.wantRead("restored", lookerBytes)
	l.wantRead("nothing changed", 0)
}

// A commit that failed after it had read teaches the cache nothing that a base lacks.
func TestI5FailedCommitTeachesNothing(t *testing.T) {
	hook := &hookDriver{Driver: memblob.New()}
	w := newWorldOn(t, hook)
	w.write(map[string]string{"a": bulk(1, 40_000)})
	task := w.open()
	w.mustCommit(task, nil)
	patch(t, filepath.Join(w.dir, "a"), 0, "changed")
	down := errors.New("down")
	hook.before = func(key string, _ int64) error { return down }
	if _, err := w.commit(t.Context(), task, nil); err == nil {
		t.Fatal("no error")
	}
	hook.before = nil
	for range 2 {
		rep := w.mustCommit(w.open(), nil)
		wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
	}
}

// I7: killed at any moment of a restore of two stores, each is the whole old or the whole
// new tree, and the next try completes both.

func childRestore(t *testing.T, e errandSpec) {
	w := onDisk(t, e, plain)
	var files atomic.Int64
	watch := &Observer{Progress: func(p Progress) {
		if files.Add(p.Files) == e.Size && p.Files > 0 && e.KillAt > 0 { // what is left is to swap
			time.AfterFunc(time.Duration(e.KillAt)*time.Microsecond, die)
		}
	}}
	repo, err := OpenRepo(t.Context(), w.blobs, w.cps, &RepoOptions{Observer: watch})
	check(t, err)
	_, err = repo.Restore(t.Context(), kvTask, At{}, nil, &RestoreOptions{Dir: e.Out})
	check(t, err)
}

// arena is where restores of two stores are killed.
type arena struct {
	*world
	e    errandSpec
	old  string
	is   map[string]map[string]string // the new trees
	was  map[string]map[string]string
	both []string
}

func newArena(t *testing.T) *arena {
	a := &arena{e: errandSpec{Name: "restore", Repo: t.TempDir(), Dir: t.TempDir(), Out: t.TempDir()}, both: []string{"kv", "meta"}}
	a.world, a.old = onDisk(t, a.e, plain), t.TempDir()
	const files = 4
	for i := range files {
		a.write(map[string]string{fmt.Sprintf("kv/%d/f", i): bulk(uint64(i), 20_000), fmt.Sprintf("meta/%d", i): bulk(uint64(i+50), 3000)})
	}
	_, err := a.commitFrom(a.open(), a.dirs(a.both...))
	check(t, err)
	a.is, a.was = map[string]map[string]string{}, map[string]map[string]string{}
	for _, s := range a.both {
		a.is[s] = portrait(t, filepath.Join(a.dir, s))
		check(t, os.MkdirAll(filepath.Join(a.old, s, "x"), 0o755))
		check(t, os.WriteFile(filepath.Join(a.old, s, "x/old"), []byte(s), 0o644))
	}
	return a
}

func (a *arena) reset() {
	a.t.Helper()
	for _, s := range a.both {
		check(a.t, os.RemoveAll(filepath.Join(a.e.Out, s)))
		check(a.t, os.CopyFS(filepath.Join(a.e.Out, s), os.DirFS(filepath.Join(a.old, s))))
		a.was[s] = portrait(a.t, filepath.Join(a.e.Out, s))
	}
}

// state is "old" or "new"; a mixture fails the test.
func (a *arena) stateOf(s string) string {
	a.t.Helper()
	switch got := portrait(a.t, filepath.Join(a.e.Out, s)); {
	case maps.Equal(got, a.was[s]):
		return "old"
	case maps.Equal(got, a.is[s]):
		return "new"
	}
	a.t.Fatalf("killed %d us into the swap: store %s is neither old nor new", a.e.KillAt, s)
	return ""
}

func TestI7TwoStoresKilled(t *testing.T) {
	a := newArena(t)
	a.e.Size = 8
	seen := map[string]int{}
	for us := int64(50); us < 60_000; us += us / 2 {
		a.reset()
		a.e.KillAt = us
		_, killed, _ := sendErrand(t, a.e)
		kv, meta := a.stateOf("kv"), a.stateOf("meta")
		seen[kv+"/"+meta]++
		if !killed && kv+meta != "newnew" {
			t.Fatalf("not killed, and %s/%s", kv, meta)
		}
		if kv != meta {
			from := map[string]source.Source{"kv": source.Dir(filepath.Join(a.e.Out, "kv"), nil)}
			if _, err := a.commitFrom(a.open(), from); err == nil {
				t.Error("S7: the store of an unfinished restore was backed up")
			}
		}
		a.e.KillAt = 0
		sendErrand(t, a.e)
		for _, s := range a.both {
			wantSameTree(t, filepath.Join(a.e.Out, s), filepath.Join(a.dir, s))
		}
		left, err := os.ReadDir(a.e.Out)
		if check(t, err); len(left) != 2 {
			t.Fatalf("left beside the targets: %v", left)
		}
	}
	t.Logf("after the kill: %v", seen)
}

// I1, I8, I9: a process killed before or after any operation on its repository leaves the
// old or the new checkpoint as the last one; the next goes on, and nothing is left over.

func childCommits(t *testing.T, e errandSpec) {
	var n atomic.Int64
	w := onDisk(t, e, func(d blob.Driver) blob.Driver {
		return &countdown{Driver: d, step: func() bool { return n.Add(1) == e.KillAt }}
	})
	w.opts.KeepLast, w.opts.Grace, w.opts.PackSize = 2, -1, minPackSize
	w.mustCommit(w.open(), nil)
}

// countdown is a driver whose process dies at a certain step: before or after a change.
type countdown struct {
	blob.Driver
	step func() bool
}

func (d *countdown) around(do func() error) error {
	if d.step() {
		die()
	}
	err := do()
	if d.step() {
		die()
	}
	return err
}

func (d *countdown) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	return d.around(func() error { return d.Driver.Put(ctx, key, body, opts) })
}

func (d *countdown) Delete(ctx context.Context, keys []string) error {
	return d.around(func() error { return d.Driver.Delete(ctx, keys) })
}

func (d *countdown) RemoveTTL(ctx context.Context, keys []string) error {
	return d.around(func() error { return d.Driver.RemoveTTL(ctx, keys) })
}

func TestI9KilledAtEveryStep(t *testing.T) {
	e := errandSpec{Name: "commit", Repo: t.TempDir(), Dir: t.TempDir(), Cache: t.TempDir()}
	w := onDisk(t, e, plain)
	w.write(map[string]string{"a": bulk(1, 100_000), "b": bulk(2, 50_000)})
	sendErrand(t, e)
	last := w.state().Latest().ID
	for at := int64(1); ; at++ {
		w.write(map[string]string{"b": bulk(uint64(at), 50_000)})
		e.KillAt = at
		_, killed, _ := sendErrand(t, e)
		w.wantSound()
		switch now := w.state().Latest().ID; {
		case now == last:
			if !killed {
				t.Fatalf("step %d: not killed, and nothing committed", at)
			}
		case now > last:
			wantSameTree(t, w.restore(""), w.dir)
			last = now
		}
		if at%4 == 0 {
			w.wantOnlyNamed()
		}
		if !killed {
			if at < 10 {
				t.Fatalf("only %d steps", at)
			}
			break
		}
	}
	e.KillAt = 0
	sendErrand(t, e)
	wantSameTree(t, w.restore(""), w.dir)
	w.wantOnlyNamed()
	w.wantSound()
}

// I10: memory is bounded by options and not by the size of the state.

// vast is a source of one file that no disk holds: its content follows from the offset.
type vast struct {
	source.Image
	size   int64
	unique bool
}

func (v vast) Freeze(ctx context.Context) (source.Image, error) { return v, nil }

func (v vast) Entries() []source.Entry {
	root := source.Entry{Type: source.Directory, Mode: 0o755}
	return []source.Entry{root, {Path: "vast", Mode: 0o644, Size: v.size, Links: 1, Identity: source.Identity{Size: v.size}}}
}

func (v vast) Open(string) (source.File, error)      { return vastFile{v: v}, nil }
func (v vast) Xattrs(string) ([]source.Xattr, error) { return nil, nil }
func (v vast) CacheKey() string                      { return "" }
func (v vast) Skipped() []string                     { return nil }
func (v vast) Release() error                        { return nil }

type vastFile struct {
	source.File
	v vast
}

func (f vastFile) Identity() source.Identity   { return source.Identity{Size: f.v.size} }
func (f vastFile) Runs() ([]source.Run, error) { return []source.Run{{Length: f.v.size}}, nil }
func (f vastFile) Check() error                { return nil }
func (f vastFile) Close() error                { return nil }

func (f vastFile) ReadAt(p []byte, off int64) (int, error) {
	clear(p) // a buffer of the engine, with what was in it before
	p[0] = 1
	if f.v.unique {
		for i := 0; i+8 <= len(p); i += 4096 {
			at := uint64(off) + uint64(i)
			for k := range 8 {
				p[i+k] = byte(at >> (8 * k))
			}
		}
	}
	return len(p), nil
}

// sink is a driver that forgets packs when it has read them.
type sink struct{ blob.Driver }

func (s sink) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	if body.Size < 1<<20 {
		return s.Driver.Put(ctx, key, body, opts)
	}
	if err := body.Copy(ctx, io.Discard); err != nil {
		return err
	}
	return s.Driver.Put(ctx, key, blob.Bytes(nil), opts)
}

const vastSize = 1 << 30

// childMemory commits 1 GiB of unique content and 1 GiB that repeats, and restores e.Size
// bytes that repeat.
func childMemory(t *testing.T, e errandSpec) {
	w := newWorldOn(t, sink{memblob.New()})
	w.opts.PackSize, w.opts.CacheDir = 8<<20, ""
	rep := w.mustCommitFrom(w.open(), map[string]source.Source{"unique": vast{size: vastSize, unique: true}, "repeats": vast{size: vastSize}})
	if s := rep.Stores; s["unique"].BytesUploaded+s["repeats"].BytesUploaded != vastSize+4<<20 {
		t.Errorf("uploaded %+v", s)
	}
	w = onDisk(t, e, plain)
	w.mustCommitFrom(w.open(), map[string]source.Source{"kv": vast{size: e.Size}})
	got, err := w.repo().Restore(t.Context(), kvTask, At{}, map[string]string{"kv": filepath.Join(e.Out, "kv")}, nil)
	check(t, err)
	if s := got.Stores["kv"]; s.BytesFetched != 4<<20 {
		t.Errorf("restored %+v", s)
	}
}

func TestI10Memory(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector takes memory of its own")
	}
	e := errandSpec{Name: "memory", Repo: t.TempDir(), Out: t.TempDir(), Size: 256 << 20}
	_, _, usage := sendErrand(t, e)
	const most = 300 << 10 // KiB, the budget of the command
	if usage.Maxrss > most {
		t.Errorf("2 GiB took %d KiB of memory, at most %d are allowed", usage.Maxrss, most)
	}
	t.Logf("peak %d MiB", usage.Maxrss>>10)
}

// I10: goroutines and open files are bounded by options, and none is left.
func TestI10Goroutines(t *testing.T) {
	w := newWorld(t)
	w.opts.Readers, w.opts.Uploads, w.opts.PackSize, w.opts.CacheDir = 4, 2, minPackSize, ""
	for i := range 600 {
		w.write(map[string]string{fmt.Sprintf("%02d/%d", i%20, i): bulk(uint64(i), 500)})
	}
	w.write(map[string]string{"big": bulk(1, 20<<20)})
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		check(t, err)
		return len(list)
	}
	var most, open atomic.Int64
	look := func() {
		most.Store(max(most.Load(), int64(runtime.NumGoroutine())))
		open.Store(max(open.Load(), int64(descriptors())))
	}
	before, files := runtime.NumGoroutine(), descriptors()
	src := spied{Source: source.Dir(w.dir, nil), read: func(string, int64, int) { look() }}
	rep, err := w.commitFrom(w.open(), map[string]source.Source{"kv": src})
	check(t, err)
	if n := int(most.Load()) - before; n > 4*4+2+8 {
		t.Errorf("a commit with 4 readers ran %d goroutines", n)
	}
	if n := int(open.Load()) - files; n > 4+8 {
		t.Errorf("a commit with 4 readers held %d files open", n)
	}
	w.opts.Observer = &Observer{Progress: func(Progress) { look() }}
	repo, err := OpenRepo(t.Context(), w.blobs, w.cps, &RepoOptions{Workers: 4, Observer: w.opts.Observer})
	check(t, err)
	most.Store(0)
	open.Store(0)
	_, err = repo.Restore(t.Context(), kvTask, at(t, rep.Checkpoint), map[string]string{"kv": filepath.Join(t.TempDir(), "kv")}, nil)
	check(t, err)
	if n := int(most.Load()) - before; n > 60 {
		t.Errorf("a restore with 4 workers ran %d goroutines", n)
	}
	if n := int(open.Load()) - files; n > 100 {
		t.Errorf("a restore with 4 workers held %d files open", n)
	}
	if after := descriptors(); after > files {
		t.Errorf("%d files are open, were %d", after, files)
	}
	for i := 0; runtime.NumGoroutine() > before; i++ {
		if runtime.Gosched(); i > 1_000_000 {
			t.Fatalf("%d goroutines are left, were %d", runtime.NumGoroutine(), before)
		}
	}
}
