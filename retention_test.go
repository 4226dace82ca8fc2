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
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/pebblesrc"
)

// What is kept, what is dropped, and what need not be sent because it is kept.

// dirs makes sources of several directories, and their content.
func (w *world) dirs(names ...string) map[string]source.Source {
	out := map[string]source.Source{}
	for _, n := range names {
		out[n] = source.Dir(filepath.Join(w.dir, n), nil)
	}
	return out
}

func (w *world) mustCommitFrom(task *Task, sources map[string]source.Source) *CommitReport {
	w.t.Helper()
	rep, err := w.commitFrom(task, sources)
	check(w.t, err)
	return rep
}

// P5e: the newest checkpoint of a store that later ones lack is kept until the store is
// forgotten.
func TestRetentionKeepsTheLastOfEachStore(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast, w.opts.Grace = 2, -1
	w.write(map[string]string{"kv/f": "0", "meta/m": bulk(1, 9000)})
	task := w.open()
	w.mustCommitFrom(task, w.dirs("kv", "meta"))
	held := w.mustCommitFrom(task, w.dirs("kv", "meta"))
	for i := range 5 {
		w.write(map[string]string{"kv/f": fmt.Sprint(i)})
		w.mustCommitFrom(task, w.dirs("kv"))
		if i == 2 {
			task = w.open()
		}
	}
	w.wantOnlyNamed()
	if got := ids(w.state().Retained); len(got) != 3 || got[0] != held.Checkpoint {
		t.Fatalf("retained %v, want %s and two more", got, held.Checkpoint)
	}
	out := filepath.Join(t.TempDir(), "meta")
	_, err := w.repo().Restore(t.Context(), kvTask, At{}, map[string]string{"meta": out}, nil)
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "meta") {
		t.Fatalf("S9: restore of a store that the newest lacks = %v", err)
	}
	_, err = w.repo().Restore(t.Context(), kvTask, at(t, held.Checkpoint), map[string]string{"meta": out}, nil)
	check(t, err)
	wantSameTree(t, out, filepath.Join(w.dir, "meta"))

	check(t, task.Forget("meta"))
	w.mustCommitFrom(task, w.dirs("kv"))
	if got := ids(w.state().Retained); len(got) != 2 || slices.Contains(got, held.Checkpoint) {
		t.Fatalf("after Forget: retained %v", got)
	}
	w.wantOnlyNamed()
	w.wantSound()
}

// Forgetting a store says nothing of a checkpoint that has it again.
func TestRetentionForgetIsNotForTheNew(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast = 1
	w.write(map[string]string{"kv/f": "0", "meta/m": "1"})
	task := w.open()
	check(t, task.Forget("meta"))
	held := w.mustCommitFrom(task, w.dirs("kv", "meta"))
	w.mustCommitFrom(task, w.dirs("kv"))
	w.mustCommitFrom(task, w.dirs("kv"))
	if got := ids(w.state().Retained); len(got) != 2 || got[0] != held.Checkpoint {
		t.Fatalf("retained %v, want %s too", got, held.Checkpoint)
	}
}

// Blobs of what was dropped wait for the grace, by the store's clock, for readers.
func TestRetentionGrace(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast = 1
	task := w.open()
	for i := range 3 {
		w.write(map[string]string{"f": bulk(uint64(i), 50_000)})
		w.mustCommit(task, nil)
	}
	before := w.keys("b/")
	task = w.open()
	w.gc(GCOptions{OlderThan: time.Hour})
	if got := w.keys("b/"); len(got) != len(before) || w.stored() < 150_000 {
		t.Fatalf("%d blobs of %d are left", len(got), len(before))
	}
	if dry := w.gc(GCOptions{DryRun: true}); dry.BlobsDeleted == 0 || len(w.keys("b/")) != len(before) {
		t.Fatalf("dry run: %+v, %d blobs of %d are left", dry, len(w.keys("b/")), len(before))
	} else if real := w.gc(GCOptions{}); *real.counts() != *dry.counts() {
		t.Fatalf("gc deleted %+v, the dry run said %+v", real, dry)
	}
	if again := w.gc(GCOptions{}); again.BlobsDeleted != 0 {
		t.Fatalf("a second gc deleted %+v", again)
	}
	w.wantOnlyNamed()
	w.mustCommit(task, nil)
	w.wantSound()
}

func (r *GCReport) counts() *[2]int64 { return &[2]int64{r.BlobsDeleted, r.BytesDeleted} }

// P1: several hundred checkpoints. The entry stays small, segments are shared, gc keeps
// them, and every checkpoint is listed and restores.
func TestRetentionLongHead(t *testing.T) {
	const n = 200
	w := newWorld(t)
	w.opts.KeepLast, w.opts.CacheDir = KeepAll, ""
	task := w.open()
	var all []string
	for i := range n {
		w.write(map[string]string{"f": fmt.Sprint(i)})
		all = append(all, w.mustCommit(task, map[string]string{"in": fmt.Sprint(i)}).Checkpoint)
		if i%97 == 96 {
			w.gc(GCOptions{})
			task = w.open()
		}
	}
	w.wantOnlyNamed()
	list, err := w.repo().List(t.Context(), ListFilter{})
	check(t, err)
	slices.Reverse(list)
	for i, c := range list {
		if c.ID != all[i] || c.Sequence != uint64(i+1) || c.Offsets["in"] != fmt.Sprint(i) {
			t.Fatalf("list has %+v at %d", c, i)
		}
	}
	if len(list) != n {
		t.Fatalf("%d checkpoints are listed of %d", len(list), n)
	}
	entries := w.keys("log/")
	info, err := w.blobs.Stat(t.Context(), entries[len(entries)-1])
	if check(t, err); info.Size > head.MaxBody+1024 {
		t.Errorf("the head has %d bytes", info.Size)
	}
	for _, i := range []int{0, 1, n / 2, n - 2} {
		data, err := os.ReadFile(filepath.Join(w.restore(all[i]), "f"))
		if check(t, err); string(data) != fmt.Sprint(i) {
			t.Errorf("checkpoint %d has %q", i, data)
		}
	}
	w.wantSound()

	// P2: somebody else trims and sweeps, so that the segments that this owner remembers
	// are gone.
	w.trim(110)
	w.gc(GCOptions{})
	w.write(map[string]string{"f": "after"})
	w.mustCommit(task, nil)
	if got := len(w.state().Retained); got != 111 {
		t.Fatalf("%d are retained", got)
	}
	w.trim(3)
	w.gc(GCOptions{})
	w.wantOnlyNamed()
	w.wantSound()
	w.mustCommit(w.open(), nil)
}

// Content that an older retained checkpoint has is not sent again when it comes back.
func TestRetainedContentIsNotSentAgain(t *testing.T) {
	w := newWorld(t)
	task := w.open()
	for i := range 5 {
		w.write(map[string]string{"f": bulk(uint64(i), 5<<20), "same": bulk(77, 1000)})
		w.mustCommit(task, nil)
	}
	for _, i := range []uint64{0, 3, 1} {
		w.write(map[string]string{"f": bulk(i, 5<<20)})
		rep := w.mustCommit(task, nil)
		if s := rep.Stores["kv"]; s.BytesUploaded != 0 || s.BytesStored != 0 {
			t.Fatalf("content %d comes back: %+v", i, s)
		}
	}
	w.wantSound()
	w.opts.KeepLast, w.opts.Grace = 1, -1
	rep := w.mustCommit(w.open(), nil) // drops all that it borrows from
	w.wantOnlyNamed()
	w.wantSound()
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// Nor when it is in another store, of this commit or not, or the store has another name.
func TestRetainedContentOfOtherStores(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a/f": bulk(1, 300_000), "b/g": bulk(2, 300_000)})
	task := w.open()
	w.mustCommitFrom(task, w.dirs("a", "b"))
	w.write(map[string]string{"a/g": bulk(2, 300_000)})
	if s := w.mustCommitFrom(task, w.dirs("a")).Stores["a"]; s.BytesUploaded != 0 {
		t.Errorf("content of a store that is not in this commit: %+v", s)
	}
	for range 2 {
		other := map[string]source.Source{"c": source.Dir(filepath.Join(w.dir, "b"), nil)}
		if s := w.mustCommitFrom(task, other).Stores["c"]; s.BytesUploaded != 0 {
			t.Errorf("a store with another name: %+v", s)
		}
		task = w.open()
	}
	w.write(map[string]string{"b/f": bulk(1, 300_000), "d/new": bulk(3, 300_000), "b/new": bulk(3, 300_000)})
	rep := w.mustCommitFrom(w.open(), w.dirs("a", "b", "d"))
	if n := rep.Stores["a"].BytesUploaded + rep.Stores["b"].BytesUploaded + rep.Stores["d"].BytesUploaded; n != 300_000 {
		t.Errorf("new content in two stores: %+v", rep.Stores)
	}
	w.wantSound()
}

// P5e: what an attempt borrows from is pruned, and swept, before it commits: it is
// uploaded again, and the report is that of the checkpoint that was published.
func TestBaseGone(t *testing.T) {
	w := baseGone(t, memblob.New())
	task := w.open()
	for i := range 4 {
		w.write(map[string]string{"f": bulk(uint64(i%2), 100_000)})
		rep := w.mustCommit(task, nil)
		if latest := w.state().Latest(); rep.Checkpoint != latest.ID || rep.Sequence != latest.Sequence {
			t.Fatalf("report says %s, published is %s", rep.Checkpoint, latest.ID)
		}
		wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
		if i == 2 && rep.Stores["kv"].BytesUploaded != 100_000 {
			t.Fatalf("nothing was uploaded again: %+v", rep.Stores)
		}
	}
	w.wantSound()
	w.wantOnlyNamed()
}

// S2: without Reread what came after the walk is not part of it. With it the directory is
// walked until it stands still; one that never does is stored file by file, and the
// report says that it is no cut.
func TestChangesAfterTheWalk(t *testing.T) {
	for name, tc := range map[string]struct {
		reread     bool
		changes    int
		consistent bool
		has        []string
	}{
		"library":      {false, 1, true, []string{"f"}},
		"once":         {true, 1, true, []string{"f", "later1"}},
		"all the time": {true, 99, false, []string{"f", "later1", "later2", "later3", "later4"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.opts.Reread = tc.reread
			w.write(map[string]string{"f": bulk(1, 5000)})
			n := 0
			src := spied{Source: source.Dir(w.dir, nil), open: func(string) {
				if n < tc.changes {
					n++
					w.write(map[string]string{fmt.Sprint("later", n): "l"})
				}
			}}
			w.opts.Readers = 1
			rep, err := w.commitFrom(w.open(), map[string]source.Source{"kv": src})
			if check(t, err); rep.Consistent != tc.consistent {
				t.Errorf("consistent=%v", rep.Consistent)
			}
			got := portrait(t, w.restore(rep.Checkpoint))
			delete(got, ".")
			if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, tc.has) {
				t.Errorf("restored %q, want %q", names, tc.has)
			}
		})
	}
}

// S2: a file that is renamed while the directory is walked can be missed under both names.
// A walk that lacks something is not taken for one cut before another one agrees.
func TestMovedDuringTheWalk(t *testing.T) {
	w := newWorld(t)
	w.opts.Reread = true
	w.write(map[string]string{"a/F": "moved about", "b/other": "o"})
	task := w.open()
	w.mustCommit(task, nil)
	walks := 0
	src := hiding{source.Dir(w.dir, nil), func() bool { walks++; return walks == 1 }}
	rep, err := w.commitFrom(task, map[string]source.Source{"kv": src})
	if check(t, err); !rep.Consistent {
		t.Error("not consistent, though the second and third walk agree")
	}
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// hiding is a source whose image lacks a/F when hide says so.
type hiding struct {
	source.Source
	hide func() bool
}

func (h hiding) Freeze(ctx context.Context) (source.Image, error) {
	img, err := h.Source.Freeze(ctx)
	if err != nil || !h.hide() {
		return img, err
	}
	return without{img}, nil
}

type without struct{ source.Image }

func (m without) Entries() []source.Entry {
	return slices.DeleteFunc(slices.Clone(m.Image.Entries()), func(e source.Entry) bool { return e.Path == "a/F" })
}

// A real Pebble database and a func source are one checkpoint: what was written before the
// snapshot is in it, nothing after, and tables are neither read nor sent twice.
func TestPebbleAndFuncSource(t *testing.T) {
	w := newWorld(t)
	db, err := pebble.Open(filepath.Join(w.dir, "db"), &pebble.Options{Logger: mute{}})
	check(t, err)
	defer func() { check(t, db.Close()) }()
	generation := 0
	sources := map[string]source.Source{
		"kv": pebblesrc.New(db, nil),
		"fn": source.Func(func(_ context.Context, dir string) error {
			return os.WriteFile(filepath.Join(dir, "copy"), []byte(fmt.Sprint(generation)), 0o600)
		}, nil),
	}
	put := func(i int) {
		check(t, db.Set([]byte(fmt.Sprintf("%06d", i)), []byte(bulk(uint64(i), 200)), pebble.NoSync))
	}
	task := w.open()
	n := 0
	for range 3 {
		for range 2000 {
			put(n)
			n++
		}
		check(t, db.Flush())
		generation++
		p, err := task.Snapshot(t.Context(), sources, map[string]string{"n": fmt.Sprint(n)})
		check(t, err)
		put(999_999) // after the cut
		rep, err := p.Commit(t.Context())
		check(t, err)
		check(t, db.Delete([]byte("999999"), pebble.NoSync))
		w.wantDatabase(rep.Checkpoint, n, generation)
	}
	check(t, db.Compact(t.Context(), []byte("0"), []byte("9"), false))
	w.mustCommitFrom(task, sources)
	rep := w.mustCommitFrom(task, sources)
	if s := rep.Stores["kv"]; s.BytesUploaded > 256<<10 || s.BytesRetained < 1<<20 {
		t.Errorf("a database at rest: %+v", s) // the log is sent again: each snapshot writes a mark into it
	}
	if left, err := filepath.Glob(filepath.Join(w.dir, ".snapferry*")); err != nil || len(left) > 0 {
		t.Errorf("images stay: %v, %v", left, err)
	}
	w.wantSound()
}

type mute struct{}

func (mute) Infof(string, ...any)  {}
func (mute) Errorf(string, ...any) {}
func (mute) Fatalf(string, ...any) { panic("pebble") }

// wantDatabase restores both stores and counts the keys.
func (w *world) wantDatabase(id string, n, generation int) {
	w.t.Helper()
	dir := w.t.TempDir()
	_, err := w.repo().Restore(w.t.Context(), kvTask, at(w.t, id), nil, &RestoreOptions{Dir: dir})
	check(w.t, err)
	copied, err := os.ReadFile(filepath.Join(dir, "fn", "copy"))
	if check(w.t, err); string(copied) != fmt.Sprint(generation) {
		w.t.Errorf("func source has %q", copied)
	}
	db, err := pebble.Open(filepath.Join(dir, "kv"), &pebble.Options{Logger: mute{}, ErrorIfNotExists: true})
	check(w.t, err)
	defer db.Close()
	it, err := db.NewIter(nil)
	check(w.t, err)
	defer it.Close()
	got := 0
	for it.First(); it.Valid(); it.Next() {
		if string(it.Key()) != fmt.Sprintf("%06d", got) || string(it.Value()) != bulk(uint64(got), 200) {
			w.t.Fatalf("key %q at %d", it.Key(), got)
		}
		got++
	}
	if got != n {
		w.t.Errorf("%d keys, want %d", got, n)
	}
}
