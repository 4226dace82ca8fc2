package place

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/snapshot"
)

// small has one of each kind, so that a sweep over all operations stays short.
func small() literal {
	return literal{
		"":      dir(0o755).at(7, 7),
		"a":     noise(1, 100_000).at(1, 2),
		"b":     noise(2, 30_000).own(5, 6).attr("user.k", "v"),
		"d":     dir(0o555).at(3, 4),
		"d/e":   text("").perm(0),
		"d/s":   sym("../a"),
		"h":     noise(3, 1000),
		"hh":    hard("h"),
		"hole":  sparse(1 << 20),
		"z/y/x": text("deep"),
	}
}

// other differs from small in every way.
func other() literal {
	return literal{
		"":    dir(0o555),
		"a":   noise(1, 100_000).perm(0o400),
		"b":   dir(0o500),
		"b/c": text("c").perm(0),
		"h":   noise(9, 30_000),
		"q":   noise(3, 1000),
	}
}

var errDown = errors.New("the store is down")

// I9: a restore cut at any Read leaves the target alone, and the next one goes on with what
// is there rather than fetch it again.
func TestResumeAfterEveryRead(t *testing.T) {
	w := newWorld(t).inMemory()
	src, x := w.source("src", literal{"a": noise(1, 400_000), "b": noise(2, 400_000), "c": noise(3, 9_000), "hole": sparse(1 << 20)})
	for i := 1; ; i++ {
		must(t, os.RemoveAll(w.path("out")))
		w.packs.reads, w.packs.served = 0, 0
		w.packs.fail = func(n int, _ string) error {
			if n >= i {
				return errDown
			}
			return nil
		}
		opts := w.options()
		opts.Workers = 1
		_, err := w.restore(x, w.path("out/kv"), opts)
		if err == nil {
			if i < 4 {
				t.Fatalf("only %d reads", i)
			}
			return
		}
		if !errors.Is(err, errDown) {
			t.Fatalf("cut at %d: %v", i, err)
		}
		if _, err := os.Lstat(w.path("out/kv")); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("cut at %d: target: %v", i, err)
		}
		w.packs.fail = nil
		before := w.packs.served
		rep := w.mustRestore(src, x, w.path("out/kv"), opts)
		if rep.BytesReused != before || (i > 1) != (before > 0) {
			t.Errorf("cut at %d: %d bytes were fetched before, then %+v", i, before, rep)
		}
		only(t, w.path("out"), "kv")
	}
}

// A restore that staged nothing leaves nothing: no staging, no directory made for it.
func TestFailureLeavesNothing(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", small())
	w.packs.fail = func(int, string) error { return fs.ErrNotExist }
	var damage *BlobError
	if _, err := w.restore(x, w.path("new/deep/kv"), nil); !errors.As(err, &damage) || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
	if damage.Blob == "" || damage.Store != "kv" || damage.Path == "" {
		t.Errorf("%+v", damage)
	}
	build(t, w.path("out/kv"), other())
	only(t, w.dir, "out", "src")

	// What the old target holds is staged before anything is fetched, and is kept.
	if _, err := w.restore(x, w.path("out/kv"), nil); err == nil {
		t.Fatal("no error")
	}
	only(t, w.path("out"), ".kv.snapferry", "kv")
}

// Each file operation fails once (I7, I9): the target is the old tree or, when the failure
// came after the swap, the new one; and the next restore succeeds and leaves nothing behind.
func TestFaultSweep(t *testing.T) {
	w := newWorld(t).inMemory()
	src, x := w.source("src", small())
	fresh := listing(t, src)
	for _, inPlace := range []bool{false, true} {
		for i := int64(1); ; i++ {
			w.warn = nil
			must(t, os.RemoveAll(w.path("out")))
			target := build(t, w.path("out/kv"), other())
			old := listing(t, target)
			opts, n, failed := w.options(), new(atomic.Int64), ""
			opts.InPlace = inPlace
			opts.fail = func(op string) error {
				if n.Add(1) == i {
					failed = op
					return unix.EIO
				}
				return nil
			}
			_, err := w.restore(x, target, opts)
			if failed == "" {
				must(t, err)
				break
			}
			if err == nil && len(w.warn) == 0 {
				t.Fatalf("%s (%d) failed and nobody was told", failed, i)
			}
			if err != nil && !errors.Is(err, unix.EIO) {
				t.Fatalf("%s (%d): %v", failed, i, err)
			}
			// Without an error an owner or attribute is missing, and it was said.
			if err != nil && stateOf(t, target, inPlace, old, fresh) == "" && (!inPlace || Unfinished(target) == nil) {
				t.Fatalf("%s (%d): the target is neither old nor new (%v):\n%s", failed, i, err, cmp.Diff(old, listing(t, target)))
			}
			opts = w.options()
			opts.InPlace = inPlace
			w.mustRestore(src, x, target, opts)
			only(t, w.path("out"), "kv")
		}
	}
}

// What an earlier run staged for another checkpoint does not show through: xattrs that are
// not wanted now, two names of one file that are two files now, and holes.
func TestResumeForAnotherCheckpoint(t *testing.T) {
	w := newWorld(t)
	_, first := w.source("first", literal{
		"a": noise(1, 50_000).attr("user.old", "x"), "h": noise(2, 50_000), "hh": hard("h"),
		"sparse": noise(3, 1<<20), "type": noise(4, 20), "d/f": noise(5, 50_000)})
	src, second := w.source("second", literal{
		"a": noise(1, 50_000), "h": noise(2, 50_000), "hh": noise(7, 50_000),
		"sparse": sparse(1 << 20), "type": dir(0o700), "d": noise(5, 50_000)})
	opts := w.options()
	opts.fail = func(op string) error {
		if op == "place" {
			return unix.EIO
		}
		return nil
	}
	if _, err := w.restore(first, w.path("out/kv"), opts); !errors.Is(err, unix.EIO) {
		t.Fatalf("got %v", err)
	}
	rep := w.mustRestore(src, second, w.path("out/kv"), nil)
	if rep.BytesReused < 150_000 {
		t.Errorf("%+v", rep)
	}
	only(t, w.path("out"), "kv")
}

// stateOf tells whether dir is as old or as fresh; "" when it is neither. The staging of a
// restore in place is not looked at, nor what that does to the directory's mtime.
func stateOf(t testing.TB, dir string, inPlace bool, old, fresh map[string]string) string {
	t.Helper()
	got := listing(t, dir)
	maps.DeleteFunc(got, func(p, _ string) bool { return p == stagingName || strings.HasPrefix(p, stagingName+"/") })
	like := func(want map[string]string) bool {
		want = maps.Clone(want)
		if inPlace {
			want["."] = got["."]
		}
		return maps.Equal(want, got)
	}
	switch {
	case like(old):
		return "old"
	case like(fresh):
		return "new"
	}
	return ""
}

// I6: wrong bytes are never written. Wrong once and right at the second try is no damage;
// wrong twice is, and names the blob.
func TestCorruptChunk(t *testing.T) {
	for _, times := range []int64{1, 1000} {
		for name, damage := range map[string]func(p []byte) []byte{
			"flipped": func(p []byte) []byte { p[len(p)/2] ^= 1; return p },
			"short":   func(p []byte) []byte { return p[:len(p)/2] },
			"empty":   func(p []byte) []byte { return nil },
		} {
			w := newWorld(t)
			src, x := w.source("src", literal{"a": noise(1, 300_000)})
			opts, left := w.options(), new(atomic.Int64)
			left.Store(times)
			opts.Read = damaged(w.packs.read, left, damage)
			_, err := w.restore(x, w.path("out/kv"), opts)
			if times == 1 {
				must(t, err)
				same(t, src, w.path("out/kv"))
				continue
			}
			if _, ok := errors.AsType[*BlobError](err); !ok || !errors.Is(err, sentinel.Corrupt) {
				t.Fatalf("%s: got %v", name, err)
			}
			if _, err := os.Lstat(w.path("out/kv")); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("%s: a failed restore made its target", name)
			}
		}
	}
}

func damaged(read func(context.Context, string, int64, int64) (io.ReadCloser, error), left *atomic.Int64, damage func([]byte) []byte) func(context.Context, string, int64, int64) (io.ReadCloser, error) {
	return func(ctx context.Context, blob string, offset, length int64) (io.ReadCloser, error) {
		body, err := read(ctx, blob, offset, length)
		if err != nil || left.Add(-1) < 0 {
			return body, err
		}
		p, err := io.ReadAll(body)
		return io.NopCloser(bytes.NewReader(damage(bytes.Clone(p)))), err
	}
}

// Damage to any byte of any blob is found, by whichever chunk holds it.
func TestEveryBlobIsVerified(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", small())
	for _, key := range slices.Sorted(maps.Keys(w.packs.blobs)) {
		blob := w.packs.blobs[key]
		for at := 0; at < len(blob); at += 4001 {
			blob[at] ^= 0x10
			_, err := w.restore(x, w.path("out"), nil)
			blob[at] ^= 0x10
			if !errors.Is(err, sentinel.Corrupt) {
				t.Fatalf("byte %d of %s: %v", at, key, err)
			}
		}
	}
}

// A canceled context stops a restore with the target untouched.
func TestCancel(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", literal{"a": noise(1, 900_000)})
	ctx, cancel := context.WithCancel(context.Background())
	w.packs.fail = func(n int, _ string) error {
		if n == 3 {
			cancel()
		}
		return nil
	}
	_, err := Restore(ctx, []Store{{Name: "kv", Target: w.path("out/kv"), Index: x}}, w.options())
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	w.packs.fail = nil
	w.mustRestore(src, x, w.path("out/kv"), nil)
}

// A chunk that occurs many times is fetched once.
func TestOneChunkManyPlaces(t *testing.T) {
	w := newWorld(t)
	zeros := &node{data: bytes.Repeat([]byte("ab"), 1<<20), mode: 0o644}
	src, x := w.source("src", literal{"a": zeros, "b": zeros})
	rep := w.mustRestore(src, x, w.path("out"), nil)
	if want := (Report{Files: 2, BytesFetched: snapshot.MinChunkSize, BytesReused: 4<<20 - snapshot.MinChunkSize}); rep != want {
		t.Errorf("got %+v, want %+v", rep, want)
	}
}
