package place

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// rich is a tree with everything that section 6 of the design lists.
func rich() literal {
	return literal{
		"":                     dir(0o750).at(1_700_000_000, 42),
		"empty":                text(""),
		"one":                  text("x").perm(0o600).at(1, 1),
		"old":                  text("1970").perm(0o640).own(12345, 54321).at(5, 123),
		"before":               text("before 1970").at(-5, 7),
		"future":               text("2100").at(4_102_444_800, 7),
		"secret":               text("none").perm(0),
		"setuid":               text("s").perm(0o4755).own(7, 8),
		"setgid":               text("set gid").perm(0o2755).own(7, 8),
		"attr":                 text("with attr").attr("user.origin", "somewhere"),
		"readonly-attr":        text("a").perm(0o444).attr("user.x", "y"),
		"big":                  noise(1, 300_000).at(9, 9),
		"exact":                noise(2, 64<<10),
		"twice/a":              noise(3, 40_000),
		"twice/b":              noise(3, 40_000),
		"hard/1":               noise(4, 20_000),
		"hard/2":               hard("hard/1"),
		"hard/3":               hard("hard/1"),
		"hard/empty":           text(""),
		"hard/empty2":          hard("hard/empty"),
		"hole":                 sparse(8<<20).at(3, 3),
		"all-hole":             {size: 2 << 20, mode: 0o644},
		"emptydir/inner":       dir(0o700).at(11, 12),
		"rodir":                dir(0o555).at(77, 1),
		"rodir/inside":         text("in").perm(0o444),
		"rodir/deeper":         dir(0o500),
		"rodir/deeper/f":       text("f"),
		"sticky":               dir(0o1777),
		"nothing":              dir(0),
		"attrdir":              dir(0o755).attr("user.d", "dir"),
		"rel":                  sym("one").at(55, 66),
		"dangling":             sym("/nonexistent/x").own(3, 4),
		"loop":                 sym("."),
		"names/new\nline":      text("n"),
		"names/\xff\xfe bytes": text("b"),
		"names/..dots":         text("d"),
		"names/-rf":            text("r"),
	}
}

// world is a place to restore in: a source, its index, and a pack store.
type world struct {
	testing.TB
	dir   string
	packs *packs
	warn  []string
	mu    sync.Mutex
}

func newWorld(t testing.TB) *world {
	watchDescriptors(t)
	return &world{TB: t, dir: t.TempDir(), packs: newPacks()}
}

// inMemory puts the world on a tmpfs, so that sweeps of hundreds of restores take seconds.
func (w *world) inMemory() *world {
	w.Helper()
	mount(w, w.dir, "mode=0755")
	return w
}

func (w *world) path(p string) string { return filepath.Join(w.dir, p) }

// source builds a tree and returns its path and index.
func (w *world) source(name string, l literal) (string, *snapshot.Index) {
	w.Helper()
	d := build(w, w.path(name), l)
	return d, w.packs.snap(w, d)
}

func (w *world) options() *Options {
	return &Options{Checkpoint: "c1", Read: w.packs.read, Workers: 3, Warn: func(store, path string, err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.warn = append(w.warn, store+" "+path+": "+err.Error())
	}}
}

// restore restores one store to target.
func (w *world) restore(x *snapshot.Index, target string, opts *Options) (Report, error) {
	if opts == nil {
		opts = w.options()
	}
	rep, err := Restore(context.Background(), []Store{{Name: "kv", Target: target, Index: x}}, opts)
	return rep["kv"], err
}

// mustRestore restores and compares.
func (w *world) mustRestore(src string, x *snapshot.Index, target string, opts *Options) Report {
	w.Helper()
	rep, err := w.restore(x, target, opts)
	must(w, err)
	same(w, src, target)
	return rep
}

func TestRoundTrip(t *testing.T) {
	for name, d := range map[string]durability{"each": syncEach, "whole": syncWhole} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			src, x := w.source("src", rich())
			opts := w.options()
			opts.durability = d
			var files, bytes int64
			opts.OnFile = func(string, *snapshot.Entry, time.Duration) { w.mu.Lock(); files++; w.mu.Unlock() }
			opts.OnBytes = func(_ string, n int64) { w.mu.Lock(); bytes += n; w.mu.Unlock() }
			rep := w.mustRestore(src, x, w.path("out/deep/kv"), opts)
			only(t, w.path("out/deep"), "kv")
			if len(w.warn) > 0 {
				t.Errorf("warnings: %q", w.warn)
			}
			if rep.Files != files || bytes != rep.BytesFetched+rep.BytesReused || rep.BytesReused != 40_000 {
				t.Errorf("report %+v, told of %d files, %d bytes", rep, files, bytes)
			}
		})
	}
}

// The other way of resolving paths, for kernels without openat2, gives the same.
func TestRoundTripWithoutOpenat2(t *testing.T) {
	noOpenat2.Store(true)
	defer noOpenat2.Store(false)
	w := newWorld(t)
	src, x := w.source("src", rich())
	w.mustRestore(src, x, w.path("out/kv"), nil)
	w.mustRestore(src, x, w.path("out/kv"), nil)
}

// What is in the target goes if it is not in the index, is replaced if it differs, and is
// not read again from the store if it is equal. Nothing beside the target is touched.
func TestDirtyTarget(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", rich())
	target := build(t, w.path("out/kv"), literal{
		"big":              noise(1, 300_000).perm(0o400),
		"empty":            dir(0o755), // other types
		"emptydir":         text("a file"),
		"rel":              text("no link"),
		"hole":             sym("big"),
		"stray/dir":        dir(0o000),
		"stray/ro/f":       text("stray").perm(0),
		"stray/ro":         dir(0o555),
		"twice/a":          noise(9, 40_000),
		".kv.snapferry/xx": text("not ours, but in the target"),
	})
	must(t, os.WriteFile(w.path("out/beside"), []byte("b"), 0o644))
	rep := w.mustRestore(src, x, target, nil)
	if rep.BytesReused != 300_000+40_000 {
		t.Errorf("%+v", rep)
	}
	only(t, w.path("out"), "beside", "kv")

	w.packs.reads = 0
	rep = w.mustRestore(src, x, target, nil)
	if rep.BytesFetched != 0 || w.packs.reads != 0 {
		t.Errorf("unchanged target: %+v, %d reads", rep, w.packs.reads)
	}
}

// Bytes count, not names: a renamed file, a piece of another file and a file of another
// store are all sources (S6).
func TestReuseByDigest(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", literal{"a": noise(1, 100_000), "b": noise(2, 70_000), "c": sparse(4 << 20)})
	target := build(t, w.path("out/kv"), literal{
		"x/renamed": noise(1, 100_000), "b": noise(2, 64<<10), "other": sparse(4 << 20)})
	rep := w.mustRestore(src, x, target, nil)
	if want := int64(70_000 - 64<<10); rep.BytesFetched != want {
		t.Errorf("fetched %d, want %d", rep.BytesFetched, want)
	}
}

// Nothing of the old target may be written to or linked into the new tree (F27): what has
// it open or linked keeps its bytes.
func TestOldFilesAreOnlyRead(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", literal{"a": noise(1, 100_000)})
	target := build(t, w.path("out/kv"), literal{"a": noise(1, 100_000).perm(0o640)})
	must(t, os.Link(filepath.Join(target, "a"), w.path("kept")))
	before := listing(t, w.dir)["kept"]
	w.mustRestore(src, x, target, nil)
	var kept, now unix.Stat_t
	must(t, unix.Stat(w.path("kept"), &kept))
	must(t, unix.Stat(filepath.Join(target, "a"), &now))
	if kept.Ino == now.Ino {
		t.Error("the new tree shares a file with the old one")
	}
	if after := listing(t, w.dir)["kept"]; after != before {
		t.Errorf("was %s, is %s", before, after)
	}
}

func TestDryRun(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", rich())
	target := build(t, w.path("out/kv"), literal{"somewhere": noise(1, 300_000)})
	before := listing(t, w.path("out"))
	opts := w.options()
	opts.DryRun = true
	rep, err := w.restore(x, target, opts)
	must(t, err)
	fresh, err := w.restore(x, w.path("absent/kv"), opts)
	must(t, err)
	if w.packs.reads > 0 {
		t.Errorf("%d reads", w.packs.reads)
	}
	same(t, w.path("out"), w.path("out"))
	if after := listing(t, w.path("out")); len(after) != len(before) {
		t.Errorf("wrote: %v", after)
	}
	only(t, w.dir, "out", "src")
	real, err := w.restore(x, target, nil)
	must(t, err)
	if rep != real || fresh.BytesFetched != real.BytesFetched+300_000 {
		t.Errorf("foretold %+v, was %+v; into nothing %+v", rep, real, fresh)
	}
}

// Stores are restored together, and share what lies in any of the targets.
func TestSeveralStores(t *testing.T) {
	w := newWorld(t)
	srcA, a := w.source("a", rich())
	srcB, b := w.source("b", literal{"f": noise(1, 300_000), "g": noise(8, 9)})
	build(t, w.path("out/kv"), literal{"old": text("old")})
	rep, err := Restore(t.Context(), []Store{
		{Name: "kv", Target: w.path("out/kv"), Index: a}, {Name: "meta", Target: w.path("elsewhere/meta"), Index: b}}, w.options())
	must(t, err)
	same(t, srcA, w.path("out/kv"))
	same(t, srcB, w.path("elsewhere/meta"))
	only(t, w.path("out"), "kv")
	only(t, w.path("elsewhere"), "meta")
	if rep["meta"].Files != 2 || rep["kv"].BytesFetched+rep["meta"].BytesFetched > 700_000 {
		t.Errorf("%+v", rep)
	}
}

// S8: in place, the directory itself stays, with its inode, and all else is as ever.
func TestInPlace(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", rich())
	target := build(t, w.path("out/kv"), literal{
		"big": noise(1, 300_000), "empty": dir(0o755), "stray/x": text("strayed"), "rodir": dir(0o555), "rodir/old": text("o")})
	var before, after unix.Stat_t
	must(t, unix.Stat(target, &before))
	opts := w.options()
	opts.InPlace = true
	rep := w.mustRestore(src, x, target, opts)
	must(t, unix.Stat(target, &after))
	if before.Ino != after.Ino || rep.BytesReused != 340_000 {
		t.Errorf("inode %d, was %d; %+v", after.Ino, before.Ino, rep)
	}
	w.mustRestore(src, x, target, opts)
	w.mustRestore(src, x, w.path("fresh/kv"), opts)
	x.Entries = append([]snapshot.Entry{x.Entries[0], {Path: stagingName, Type: snapshot.Dir}}, x.Entries[1:]...)
	if _, err := w.restore(x, target, opts); err == nil {
		t.Error("an entry with the name of the staging was taken")
	}
}

// Owners that cannot be set are warnings, or errors if so wished.
func TestStrictOwner(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", rich())
	opts := w.options()
	deny := func(op string) error {
		if op == "chown" {
			return unix.EPERM
		}
		return nil
	}
	opts.fail = deny
	_, err := w.restore(x, w.path("out/kv"), opts)
	must(t, err)
	if len(w.warn) < len(x.Entries)/2 {
		t.Errorf("%d warnings", len(w.warn))
	}
	for name, mode := range map[string]uint32{"setuid": 0o755, "setgid": 0o755, "sticky": 0o1777} {
		var st unix.Stat_t
		must(t, unix.Stat(w.path("out/kv/"+name), &st))
		if st.Mode&0o7777 != mode {
			t.Errorf("%s: mode %o without its owner, want %o", name, st.Mode&0o7777, mode)
		}
	}
	if n := strings.Count(strings.Join(w.warn, "\n"), "set-user-ID"); n != 1 {
		t.Errorf("told %d times of dropped set-user-ID bits", n)
	}
	opts = w.options()
	opts.fail, opts.StrictOwner = deny, true
	if _, err := w.restore(x, w.path("strict/kv"), opts); !errors.Is(err, unix.EPERM) {
		t.Errorf("got %v", err)
	}
	w.mustRestore(src, x, w.path("strict/kv"), nil)
}

// Names of owners are looked up only when asked for; unknown ones fall back to numbers.
func TestOwnerNames(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", literal{"a": text("a").own(1, 1), "b": text("b").own(1, 1)})
	for i := range x.Entries {
		x.Entries[i].User, x.Entries[i].Group = "nobody", "no such group"
	}
	for _, byName := range []bool{false, true} {
		opts := w.options()
		opts.OwnerNames = byName
		_, err := w.restore(x, w.path("out"), opts)
		must(t, err)
		var st unix.Stat_t
		must(t, unix.Stat(w.path("out/a"), &st))
		if (st.Uid == 65534) != byName || st.Gid != 1 {
			t.Errorf("by name %v: owner %d:%d", byName, st.Uid, st.Gid)
		}
	}
}
