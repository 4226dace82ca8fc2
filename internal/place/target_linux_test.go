package place

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/snapshot"
)

// refuse restores and wants an error that says so, with nothing written.
func (w *world) refuse(x *snapshot.Index, target, says string, opts *Options) {
	w.Helper()
	before := listing(w, w.dir)
	_, err := w.restore(x, target, opts)
	if err == nil || !strings.Contains(err.Error(), says) {
		w.Fatalf("restore to %s: got %v, want %q", target, err, says)
	}
	if d := cmp.Diff(before, listing(w, w.dir)); d != "" {
		w.Fatalf("a refused restore changed (-was +is):\n%s", d)
	}
}

func TestRefusedTargets(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", small())
	build(t, w.path("p"), literal{"file": text("f"), "to-file": sym("file"), "to-nothing": sym("absent"), "self": sym("self")})
	w.refuse(x, w.path("p/file"), "not a directory", nil)
	w.refuse(x, w.path("p/to-file"), "not a directory", nil)
	w.refuse(x, w.path("p/to-nothing"), "no such file", nil)
	w.refuse(x, w.path("p/to-nothing/below"), "no such file", nil)
	w.refuse(x, w.path("p/file/below"), w.path("p/file")+" is not a directory; remove it", nil)
	w.refuse(x, w.path("p/to-file/deep/below"), w.path("p/to-file")+" is not a directory; remove it", nil)
	w.refuse(x, w.path("p/self"), "too many", nil)
	w.refuse(x, "/", "root directory", nil)
	w.refuse(x, w.path("p/"+strings.Repeat("n", 250)), "too long", nil)
	x.Entries = append(x.Entries, snapshot.Entry{Path: "zz" + strings.Repeat("n", 300), Mode: 0o644})
	w.refuse(x, w.path("p/new"), "file system takes", nil)
	build(t, w.path("q"), literal{".kv.snapferry": text("in the way")})
	x.Entries = x.Entries[:len(x.Entries)-1]
	w.refuse(x, w.path("q/kv"), "in the way", nil)
}

// A link to a directory is followed, as target and above it, and stays.
func TestLinkedTargets(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	build(t, w.path("real"), literal{"dir/old": text("o")})
	build(t, w.path("p"), literal{"to-dir": sym("../real/dir"), "to-real": sym("../real")})
	_, err := w.restore(x, w.path("p/to-dir"), nil)
	must(t, err)
	same(t, src, w.path("real/dir"))
	w.mustRestore(src, x, w.path("p/to-real/another"), nil)
	only(t, w.path("p"), "to-dir", "to-real")
	only(t, w.path("real"), "another", "dir")
}

// Targets that are one or nested are refused, also through links.
func TestTargetsApart(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", small())
	build(t, w.path("p"), literal{"a/x": text("x"), "link": sym("a")})
	for _, pair := range [][2]string{{"p/a", "p/a"}, {"p/a", "p/link"}, {"p/a", "p/link/new"}, {"p/n", "p/n/deep"}, {"p/n", "p/.n.snapferry"}, {"p/n", "p/.n.snapferry/tree"}} {
		_, err := Restore(t.Context(), []Store{{"one", w.path(pair[0]), x}, {"two", w.path(pair[1]), x}}, w.options())
		if err == nil || !strings.Contains(err.Error(), "in each other") {
			t.Errorf("%v: got %v", pair, err)
		}
	}
	_, err := Restore(t.Context(), []Store{{"one", w.path("p/k"), x}, {"one", w.path("p/l"), x}}, w.options())
	if err == nil {
		t.Error("one store twice: no error")
	}
	only(t, w.path("p"), "a", "link")
}

func mount(t testing.TB, dir, options string) {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o755))
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, options))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

// S8: mount points are refused with the advice, also bind mounts of the same file system;
// a sub-directory and --in-place work; mounts inside are refused in any case.
func TestMountPoints(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	mount(t, w.path("mnt point"), "size=64m")
	w.refuse(x, w.path("mnt point"), "--in-place", nil)
	w.mustRestore(src, x, w.path("mnt point/kv"), nil)

	must(t, os.MkdirAll(w.path("bound"), 0o755))
	must(t, os.MkdirAll(w.path("origin"), 0o755))
	must(t, unix.Mount(w.path("origin"), w.path("bound"), "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(w.path("bound"), unix.MNT_DETACH)) })
	w.refuse(x, w.path("bound"), "mount point", nil)

	w.refuse(x, w.dir, "mounted inside", nil)
	inPlace := w.options()
	inPlace.InPlace = true
	w.refuse(x, w.dir, "mounted inside", inPlace)

	// The link to the first name of a group needs one file system, which in place has.
	w.mustRestore(src, x, w.path("mnt point"), inPlace)
	only(t, w.path("mnt point"), "a", "b", "d", "h", "hh", "hole", "z")
	w.mustRestore(src, x, w.path("bound"), inPlace)
}

// Too little space is found before anything is written, and what an interrupted restore
// holds already is not counted twice.
func TestSpace(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", literal{"a": noise(1, 3<<20), "b": noise(2, 3<<20), "sparse": sparse(64 << 20)})
	mount(t, w.path("mnt"), "size=5m")
	_, err := w.restore(x, w.path("mnt/kv"), nil)
	wantLack(t, err, "has 5.0 MiB free and 6.1 MiB are needed; free space there, or restore to another")
	only(t, w.path("mnt"))
	if w.packs.reads > 0 {
		t.Errorf("%d reads", w.packs.reads)
	}
	must(t, unix.Mount("tmpfs", w.path("mnt"), "", unix.MS_REMOUNT, "size=8m"))
	w.packs.fail = func(n int, _ string) error {
		if n > 18 {
			return errDown
		}
		return nil
	}
	if _, err := w.restore(x, w.path("mnt/kv"), nil); !errors.Is(err, errDown) {
		t.Fatalf("got %v", err)
	}
	w.packs.fail = nil
	w.mustRestore(src, x, w.path("mnt/kv"), nil)

	// The old tree fills the disk by now.
	_, err = w.restore(x, w.path("mnt/kv"), nil)
	wantLack(t, err, "6.1 MiB are needed beside the old tree, which stays until the new one is complete; free space")
	same(t, src, w.path("mnt/kv"))
	only(t, w.path("mnt"), "kv")
	mount(t, w.path("few"), "nr_inodes=5")
	_, err = w.restore(x, w.path("few/kv"), nil)
	wantLack(t, err, "inodes free and 4 are needed; free space")
}

func wantLack(t testing.TB, err error, says string) {
	t.Helper()
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), says) {
		t.Fatalf("got %v, want %q", err, says)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 bytes", 1023: "1023 bytes", 1024: "1.0 KiB", 1<<20 - 1: "1024.0 KiB", 3 << 29: "1.5 GiB", 5 << 50: "5120.0 TiB"} {
		if got := size(n, math.Ceil); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}

// S8: what belongs to the file system and not to the store stays, but only there.
func TestInPlaceKeepsLostFound(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", small())
	inPlace := w.options()
	inPlace.InPlace = true
	mount(t, w.path("mnt"), "size=64m")
	kept := build(t, w.path("mnt"), literal{"lost+found": dir(0o700), "lost+found/#12": text("found"), "stray": text("s")})
	for range 2 {
		_, err := w.restore(x, kept, inPlace)
		must(t, err)
		only(t, kept, "a", "b", "d", "h", "hh", "hole", "lost+found", "z")
		only(t, kept+"/lost+found", "#12")
	}
	must(t, Unfinished(kept))

	srcOwn, own := w.source("own", literal{"lost+found/mine": text("of the store")})
	w.mustRestore(srcOwn, own, kept, inPlace)
	must(t, os.RemoveAll(kept+"/lost+found"))
	giveAway(t, build(t, kept, literal{"lost+found/planted": text("not of root")})+"/lost+found", 12345)
	_, err := w.restore(x, kept, inPlace)
	must(t, err)
	only(t, kept, "a", "b", "d", "h", "hh", "hole", "z")
	plain := build(t, w.path("plain"), literal{"lost+found/f": text("no mount point")})
	_, err = w.restore(x, plain, inPlace)
	must(t, err)
	only(t, plain, "a", "b", "d", "h", "hh", "hole", "z")
}

// The working directory may be the target, lie in it, or be reached through a link.
func TestRelativeTargets(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	for _, c := range [][3]string{{"out/kv", ".", "out/kv"}, {"out/kv/deep/er", "../..", "out/kv"}, {"link", "../kv", "real/kv"}} {
		build(t, w.path(""), literal{"out/kv/deep/er/old": text("old"), "real/er/f": text("f")})
		if _, err := os.Lstat(w.path("link")); err != nil {
			must(t, os.Symlink("real/er", w.path("link")))
		}
		for _, in := range []bool{false, true} {
			must(t, os.MkdirAll(w.path(c[0]), 0o755))
			t.Chdir(w.path(c[0]))
			t.Setenv("PWD", w.path(c[0]))
			opts := w.options()
			opts.InPlace = in
			_, err := w.restore(x, c[1], opts)
			must(t, err)
			same(t, src, w.path(c[2]))
		}
	}
	t.Chdir(build(t, w.path("gone"), literal{"f": text("f")}))
	must(t, os.RemoveAll(w.path("gone")))
	if _, err := w.restore(x, ".", nil); err == nil || !strings.Contains(err.Error(), "enter it anew") {
		t.Errorf("got %v", err)
	}
}

// The disk fills up while staging, by somebody else: the old tree stays.
func TestSpaceTakenMeanwhile(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", literal{"a": noise(1, 3<<20), "b": noise(2, 3<<20)})
	mount(t, w.path("mnt"), "size=8m")
	old := build(t, w.path("mnt/kv"), literal{"old": text("old")})
	before := listing(t, old)
	w.packs.fail = func(n int, _ string) error {
		if n == 2 {
			return os.WriteFile(w.path("mnt/hog"), bytes.Repeat([]byte("x"), 4<<20), 0o600)
		}
		return nil
	}
	if _, err := w.restore(x, old, nil); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("got %v", err)
	}
	if d := cmp.Diff(before, listing(t, old)); d != "" {
		t.Fatal(d)
	}
	must(t, os.Remove(w.path("mnt/hog")))
	w.packs.fail = nil
	w.mustRestore(src, x, old, nil)
}

// One restore of a target at a time; the second is told, and writes nothing.
func TestBusy(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	opts := w.options()
	var second error
	w.packs.fail = func(n int, _ string) error {
		if n == 1 {
			_, second = Restore(context.Background(), []Store{{"kv", w.path("out/kv"), x}}, opts)
		}
		return nil
	}
	w.mustRestore(src, x, w.path("out/kv"), opts)
	if !errors.Is(second, sentinel.Busy) || !errors.Is(second, sentinel.Conflict) {
		t.Fatalf("got %v", second)
	}
}

// A staging of another user is not trusted; one that is halfway through a swap is not
// thrown away either.
func TestForeignStaging(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	planted := build(t, w.path("out/.kv.snapferry"), literal{"tree/a": noise(1, 100_000)})
	giveAway(t, planted, 12345)
	rep := w.mustRestore(src, x, w.path("out/kv"), nil)
	if rep.BytesReused != 0 {
		t.Errorf("used the planted file: %+v", rep)
	}
	build(t, planted, literal{planName: text("{}")})
	giveAway(t, planted, 12345)
	if _, err := w.restore(x, w.path("out/kv"), nil); err == nil || !strings.Contains(err.Error(), "user 12345") {
		t.Errorf("got %v", err)
	}
}

// Where directories cannot be exchanged in one step there are two renames, and the plan
// repairs the moment between (S7).
func TestWithoutExchange(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	target := build(t, w.path("out/kv"), other())
	old := listing(t, target)
	for stop := 0; stop <= 3; stop++ {
		opts, renames := w.options(), 0
		opts.fail = func(op string) error {
			switch op {
			case "exchange":
				return unix.EINVAL
			case "rename":
				renames++
				if _, err := os.Lstat(target); errors.Is(err, fs.ErrNotExist) && stop > 0 {
					stop = -1
					return unix.EIO
				}
			}
			return nil
		}
		_, err := w.restore(x, target, opts)
		if stop >= 0 {
			must(t, err)
			same(t, src, target)
		}
		if stop < 0 {
			if !errors.Is(err, unix.EIO) {
				t.Fatalf("got %v", err)
			}
			if stateOf(t, target, false, old, listing(t, src)) == "" {
				t.Fatal("the old tree did not come back")
			}
			break
		}
	}
	w.mustRestore(src, x, target, nil)
	only(t, w.path("out"), "kv")
}

// An error at the second of two swaps takes the first one back.
func TestSwapIsTakenBack(t *testing.T) {
	w := newWorld(t)
	srcA, a := w.source("a", small())
	srcB, b := w.source("b", other())
	must(t, os.MkdirAll(w.path("out"), 0o755))
	for _, absent := range []bool{true, false} {
		before := listing(t, w.path("out"))
		stores := []Store{{"a", w.path("out/a"), a}, {"b", w.path("out/b"), b}}
		if !absent {
			stores = []Store{{"a", w.path("out/a"), b}, {"b", w.path("out/b"), a}}
		}
		opts, n := w.options(), 0
		opts.fail = func(op string) error {
			if op == "exchange" || op == "place" {
				if n++; n == 2 {
					return unix.EXDEV
				}
			}
			return nil
		}
		_, err := Restore(t.Context(), stores, opts)
		if !errors.Is(err, unix.EXDEV) || !strings.Contains(err.Error(), "--in-place") || errors.Is(err, ErrUnfinished) {
			t.Fatalf("got %v", err)
		}
		for p, was := range before {
			if p != "." && listing(t, w.path("out"))[p] != was {
				t.Fatalf("%s changed", p)
			}
		}
		for _, s := range stores {
			must(t, Unfinished(s.Target))
		}
		_, err = Restore(t.Context(), stores, w.options())
		must(t, err)
	}
	same(t, srcA, w.path("out/b"))
	same(t, srcB, w.path("out/a"))
	only(t, w.path("out"), "a", "b")
}

// The directories may lie under another mount point when the restore is completed.
func TestUnfinishedSurvivesAMove(t *testing.T) {
	a := newArena(t)
	e := a.errand("kv", "meta")
	for e.KillAt = 1; ; e.KillAt++ {
		a.reset()
		if !e.send(t) {
			t.Fatal("never between the stores")
		}
		if a.state("kv") != a.state("meta") {
			break
		}
	}
	must(t, os.Rename(a.path("out"), a.path("moved")))
	if err := Unfinished(a.path("moved/meta")); !errors.Is(err, ErrUnfinished) {
		t.Fatalf("got %v", err)
	}
	must(t, os.Rename(a.path("moved"), a.path("out")))
	e.KillAt = 0
	e.send(t)
	must(t, Unfinished(a.path("out/meta")))
	must(t, Unfinished(a.path("no/such")))
}

// A damaged plan is told, not guessed at.
func TestDamagedPlan(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", small())
	build(t, w.path("out"), literal{".kv.snapferry/plan": text("snapferry restore-plan 1 2 00\n{}"), "kv/a": text("a")})
	if err := Unfinished(w.path("out/kv")); !errors.Is(err, sentinel.Corrupt) {
		t.Errorf("got %v", err)
	}
	w.refuse(x, w.path("out/kv"), "interrupted restore", nil)
}

func TestParseMounts(t *testing.T) {
	got := parseMounts(strings.NewReader("36 35 98:0 /mnt1 /a\\040b\\134c rw - ext3 /dev/root rw\nshort\n37 35 0:1 / / rw - x y z\n"))
	if d := cmp.Diff([]string{`/a b\c`, "/"}, got); d != "" {
		t.Error(d)
	}
	if !within("/a/b", "/a") || within("/ab", "/a") || !within("/a", "/") {
		t.Error("within")
	}
}

// mktree-like depth: a path of nearly the longest length, removed again too.
func TestDeepPaths(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", literal{})
	p := ""
	for len(p) < snapshot.MaxPath-20 {
		p = filepath.Join(p, strings.Repeat("d", 15))
		x.Entries = append(x.Entries, snapshot.Entry{Path: p, Type: snapshot.Dir, Mode: 0o755})
	}
	x.Entries = append(x.Entries, snapshot.Entry{Path: p + "/f", Mode: 0o644, ChunkSize: snapshot.MinChunkSize})
	must(t, x.Validate())
	_, err := w.restore(x, w.path("k"), nil)
	must(t, err)
	_, err = w.restore(x, w.path("k"), nil)
	must(t, err)
	out, err := exec.Command("find", w.path("k"), "-name", "f").Output()
	if err != nil || strings.Count(string(out), "/f\n") != 1 {
		t.Errorf("%d bytes of find, %v", len(out), err)
	}
	only(t, w.dir, "k", "src")
}
