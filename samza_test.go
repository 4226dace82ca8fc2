package snapferry

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/internal/place"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// Where the blob store state backend of Apache Samza loses data, fails or wastes, and
// what happens here instead. The numbers are those of docs/from-samza.md.

// A file of over 1 MiB, changed in place, with its old size, name, owner, mode and even
// its old mtime, is seen, and only the chunk that changed is sent (I5).
func TestSamza01ChangeInPlaceIsSeen(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"big": bulk(1, 9<<20), "other": bulk(2, 2<<20)})
	task := w.open()
	w.mustCommit(task, nil)
	patch(t, filepath.Join(w.dir, "big"), 5<<20, "CHANGED")
	rep := w.mustCommit(task, nil)
	if s := rep.Stores["kv"]; s.FilesUploaded != 1 || s.BytesUploaded != 4<<20 {
		t.Fatalf("change in place: %+v", s)
	}
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// A damaged blob, whatever its size and directory, fails the restore, which leaves no
// target behind (I6).
func TestSamza02DamagedBlobFailsRestore(t *testing.T) {
	d := memblob.New()
	w := newWorldOn(t, d)
	w.write(map[string]string{"a/b/big": bulk(1, 3<<20)})
	rep := w.mustCommit(w.open(), nil)
	check(t, d.Corrupt(w.packsOf(rep.Checkpoint)[0], flip))
	out := filepath.Join(t.TempDir(), "kv")
	_, err := w.repo().Restore(t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
	if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "a/b/big") {
		t.Fatalf("restore = %v, want ErrCorrupt that names the file", err)
	}
	if _, err := os.Lstat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("a target was made: %v", err)
	}
}

// What lies in the target counts by its digest: a change of over 1 MiB that hides behind
// size and mtime is found and mended, and the rest is not fetched.
func TestSamza03LocalFilesAreNotTrusted(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"d/big": bulk(1, 9<<20)})
	rep := w.mustCommit(w.open(), nil)
	out := w.restore(rep.Checkpoint)
	patch(t, filepath.Join(out, "d/big"), 0, strings.Repeat("x", 2<<20))
	got, err := w.repo().Restore(t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
	check(t, err)
	if s := got.Stores["kv"]; s.BytesFetched != 4<<20 || s.BytesReused != 5<<20 {
		t.Fatalf("restore = %+v", s)
	}
	wantSameTree(t, out, w.dir)
}

// meddle commits while change is applied to a file as soon as some of it was read.
func (w *world) meddle(task *Task, path string, change func(full string)) (*CommitReport, error) {
	var once sync.Once
	src := spied{Source: source.Dir(w.dir, nil), read: func(p string, _ int64, _ int) {
		if p == path {
			once.Do(func() { change(filepath.Join(w.dir, path)) })
		}
	}}
	return w.commitFrom(task, map[string]source.Source{"kv": src})
}

// resized are changes of a file that is being read.
var resized = map[string]func(t testing.TB, full string){
	"grows": func(t testing.TB, full string) {
		f, err := os.OpenFile(full, os.O_WRONLY|os.O_APPEND, 0)
		check(t, err)
		_, err = f.WriteString("more")
		check(t, errors.Join(err, f.Close()))
	},
	"shrinks": func(t testing.TB, full string) { check(t, os.Truncate(full, 100)) },
	"is torn": func(t testing.TB, full string) { patch(t, full, 6<<20, bulk(9, 1<<20)) },
}

// A file that grows, shrinks or is overwritten while it is read is never stored as
// something it never was: the commit says which file changed, or, where reading again is
// allowed, stores its new state.
func testMeddled(t *testing.T, name string) {
	change := resized[name]
	w := newWorld(t)
	w.write(map[string]string{"small": "s", "log": bulk(1, 9<<20)})
	task := w.open()
	_, err := w.meddle(task, "log", func(full string) { change(t, full) })
	if !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), "log") {
		t.Fatalf("commit = %v, want ErrChanged that names the file", err)
	}
	if left := w.keys("b/"); len(left) != 0 {
		t.Fatalf("the failed commit left %v", left)
	}
	w.mustCommit(task, nil)

	w.write(map[string]string{"log": bulk(2, 9<<20)})
	w.opts.Reread = true
	task = w.open()
	rep, err := w.meddle(task, "log", func(full string) { change(t, full) })
	check(t, err)
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
	w.wantSound()
}

func TestSamza04ResizedWhileRead(t *testing.T) {
	for _, name := range []string{"grows", "shrinks"} {
		t.Run(name, func(t *testing.T) { testMeddled(t, name) })
	}
}

func TestSamza05OverwrittenWhileRead(t *testing.T) { testMeddled(t, "is torn") }

// A file that changes each time it is looked at fails in the end, with a clear word.
func TestSamza05NeverAtRest(t *testing.T) {
	w := newWorld(t)
	w.opts.Reread = true
	w.write(map[string]string{"log": bulk(1, 1000)})
	var n atomic.Int64
	src := spied{Source: source.Dir(w.dir, nil), read: func(string, int64, int) {
		w.write(map[string]string{"log": bulk(2, int(1000+n.Add(1)))})
	}}
	_, err := w.commitFrom(w.open(), map[string]source.Source{"kv": src})
	if !errors.Is(err, ErrChanged) || n.Load() != walks {
		t.Fatalf("commit = %v after %d looks", err, n.Load())
	}
}

// Names are bytes.
func TestSamza06NamesAreBytes(t *testing.T) {
	w := newWorld(t)
	names := []string{"\xff\xfe", "a\nb", "caf\xe9/x", " ", "\x01", "-rf", "ü", "u\u0308", strings.Repeat("n", 255)}
	for i, n := range names {
		w.write(map[string]string{n: fmt.Sprint(i)})
	}
	rep := w.mustCommit(w.open(), nil)
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// FIFOs, sockets and devices are left out with a warning and never become something
// else; dangling links are kept.
func TestSamza07SpecialFiles(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"d/file": "f"})
	check(t, os.Symlink("nowhere/at/all", filepath.Join(w.dir, "d/dangling")))
	check(t, unix.Mkfifo(filepath.Join(w.dir, "d/fifo"), 0o600))
	l, err := net.Listen("unix", filepath.Join(w.dir, "d/sock"))
	check(t, err)
	defer l.Close()
	rep := w.mustCommit(w.open(), nil)
	out := w.restore(rep.Checkpoint)
	got := portrait(t, out)
	if _, ok := got["d/dangling"]; !ok || len(got) != 4 {
		t.Fatalf("restored %v", got)
	}
	if text := strings.Join(rep.Warnings, "\n"); len(rep.Warnings) != 2 || !strings.Contains(text, "d/fifo") || !strings.Contains(text, "d/sock") {
		t.Fatalf("warnings %q", rep.Warnings)
	}
}

// Clean-up that failed commit after commit leaks nothing for ever: what is dead is found
// again, by the next commit's clean-up and by gc (I8, P8).
func TestSamza08SkippedCleanUpLeaksNothing(t *testing.T) {
	f := blobtest.NewFaults(memblob.New(), func(c blobtest.Call) bool { return c.Op == blobtest.OpDelete })
	w := newWorldOn(t, f)
	w.opts.KeepLast, w.opts.Grace = 1, -1
	task := w.open()
	for i := range 6 {
		w.write(map[string]string{"f": bulk(uint64(i), 100_000)})
		f.FailAt(0, nil)
		if rep := w.mustCommit(task, nil); i > 0 && (len(rep.Warnings) == 0 || !f.Fired()) {
			t.Fatalf("commit %d: warnings %q", i, rep.Warnings)
		}
	}
	f.Heal()
	w.write(map[string]string{"f": bulk(99, 100_000)})
	if rep := w.mustCommit(task, nil); len(rep.Warnings) > 0 {
		t.Fatalf("warnings %q", rep.Warnings)
	}
	if n := w.stored(); n > 110_000 {
		t.Fatalf("%d bytes are stored for 100,000: %v", n, w.keys("b/"))
	}
	w.wantOnlyNamed()
}

// What one place of the tree lost and another has is not deleted: a blob is dead only
// when no live index names it.
func TestSamza09MovedContentIsNotDeleted(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast, w.opts.Grace = 1, -1
	w.write(map[string]string{"a/keep": "k", "a/f": bulk(1, 50_000), "b/g": bulk(2, 50_000)})
	task := w.open()
	w.mustCommit(task, nil)
	for i := range 4 {
		from, to := []string{"a", "b"}[i%2], []string{"b", "a"}[i%2]
		check(t, os.Rename(filepath.Join(w.dir, from, "f"), filepath.Join(w.dir, to, "f")))
		rep := w.mustCommit(task, nil)
		if s := rep.Stores["kv"]; s.BytesUploaded != 0 || s.FilesRemoved != 1 {
			t.Fatalf("move: %+v", s)
		}
		w.wantOnlyNamed()
		w.wantSound()
		wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
	}
}

// Modes, owners, times and attributes come back, and files nobody may read or write do
// not get in the way.
func TestSamza10MetadataIsRestored(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"none": "n", "ro": "r", "sticky/x": "x", "suid": "s", "rodir/x": "x", "owned": "o"})
	full := func(p string) string { return filepath.Join(w.dir, p) }
	check(t, os.Chown(full("owned"), 12345, 54321))
	check(t, unix.Setxattr(full("owned"), "user.note", []byte("kept"), 0))
	for p, m := range map[string]uint32{"none": 0, "ro": 0o444, "sticky": 0o1777, "suid": 0o6755, "rodir/x": 0o400, "rodir": 0o555} {
		check(t, unix.Chmod(full(p), m))
	}
	long := time.Date(1985, 4, 12, 23, 20, 50, 520_000_001, time.UTC)
	check(t, os.Chtimes(full("none"), long, long))
	check(t, os.Chtimes(full("rodir"), long, long))
	rep := w.mustCommit(w.open(), nil)
	out := w.restore(rep.Checkpoint)
	wantSameTree(t, out, w.dir)
	value := make([]byte, 16)
	n, err := unix.Getxattr(filepath.Join(out, "owned"), "user.note", value)
	if err != nil || string(value[:n]) != "kept" {
		t.Fatalf("attribute = %q, %v", value[:max(n, 0)], err)
	}
}

// A file that vanishes between the walk and its reading fails the commit, which leaves
// nothing behind and the task as able as before; where reading again is allowed the
// store is walked again.
func TestSamza11FileVanishes(t *testing.T) {
	for _, reread := range []bool{false, true} {
		t.Run(fmt.Sprint("reread=", reread), func(t *testing.T) {
			w := newWorld(t)
			w.opts.Reread = reread
			w.write(map[string]string{"a": bulk(1, 100_000), "gone": "g"})
			task := w.open()
			src := spied{Source: source.Dir(w.dir, nil), open: func(p string) {
				if p == "gone" {
					check(t, os.Remove(filepath.Join(w.dir, "gone")))
				}
			}}
			_, err := w.commitFrom(task, map[string]source.Source{"kv": src})
			if reread != (err == nil) || err != nil && (!errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), "gone")) {
				t.Fatalf("commit = %v", err)
			}
			if err != nil && len(w.keys("b/")) != 0 {
				t.Fatalf("the failed commit left %v", w.keys("b/"))
			}
			rep := w.mustCommit(task, nil)
			wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
		})
	}
}

// What vanishes later, when only its attributes are left to read, is no different: files,
// directories and links.
func TestSamza11VanishesAfterTheWalk(t *testing.T) {
	for kind, create := range map[string]func(path string) error{
		"file":      func(p string) error { return os.WriteFile(p, []byte("g"), 0o600) },
		"directory": func(p string) error { return os.Mkdir(p, 0o700) },
		"link":      func(p string) error { return os.Symlink("x", p) },
	} {
		for _, reread := range []bool{false, true} {
			t.Run(fmt.Sprint(kind, " reread=", reread), func(t *testing.T) {
				w := newWorld(t)
				w.opts.Reread = reread
				gone := filepath.Join(w.dir, "gone")
				w.write(map[string]string{"a": bulk(1, 100_000)})
				check(t, create(gone))
				task := w.open()
				src := spied{Source: source.Dir(w.dir, nil), xatt: func(p string) {
					if p == "gone" {
						_ = os.Remove(gone)
					}
				}}
				_, err := w.commitFrom(task, map[string]source.Source{"kv": src})
				if reread != (err == nil) || err != nil && !errors.Is(err, ErrChanged) {
					t.Fatalf("commit = %v", err)
				}
				rep := w.mustCommit(task, nil)
				wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
			})
		}
	}
}

// Links are stored and never followed.
func TestSamza12LinksAreNotFollowed(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"d/f": bulk(1, 10_000)})
	for name, to := range map[string]string{"dot": ".", "d/up": "..", "l1": "l2", "l2": "l1", "root": "/", "abs": "/etc/passwd"} {
		check(t, os.Symlink(to, filepath.Join(w.dir, name)))
	}
	rep := w.mustCommit(w.open(), nil)
	if s := rep.Stores["kv"]; s.BytesUploaded != 10_000 {
		t.Fatalf("report %+v", s)
	}
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// A path that leaves the target is refused when an index is written, when it is read, and
// by the kernel if neither had looked (I6).
func TestSamza13PathsStayInTheTarget(t *testing.T) {
	for _, p := range []string{"../x", "a/../../x", "/x", "a//x", "./x", "a\x00b"} {
		e := snapshot.Entry{Path: p, Mode: 0o644}
		x := &snapshot.Index{Job: "j", Task: "t", Store: "kv", Checkpoint: "c", Entries: []snapshot.Entry{{Type: snapshot.Dir, Mode: 0o755}, e}}
		if err := x.Validate(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%q: Validate = %v", p, err)
		}
		if _, _, err := snapshot.Encode(x, "k", nil); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%q: Encode = %v", p, err)
		}
		dir := t.TempDir()
		_, err := place.Restore(t.Context(), []place.Store{{Name: "kv", Target: filepath.Join(dir, "kv"), Index: x}}, &place.Options{})
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); err == nil || len(left) > 0 {
			t.Errorf("%q: restore = %v, left %v", p, err, left)
		}
	}
}

// Offsets have 64 bits, a file may be in many blobs, and each chunk says where it belongs.
func TestSamza14LargeFiles(t *testing.T) {
	w := newWorld(t)
	w.opts.PackSize = 1 << 20
	p := filepath.Join(w.dir, "sparse")
	w.write(map[string]string{"sparse": ""})
	check(t, os.Truncate(p, 9<<30))
	for i, off := range []int64{0, 1<<32 - 4096, 1<<32 + 1<<20, 9<<30 - 8192} {
		patch(t, p, off, bulk(uint64(i), 8192))
	}
	rep := w.mustCommit(w.open(), nil)
	out := w.restore(rep.Checkpoint)
	wantSameTree(t, out, w.dir)
	f, err := os.Open(filepath.Join(out, "sparse"))
	check(t, err)
	defer f.Close()
	for i, off := range []int64{0, 1<<32 - 4096, 1<<32 + 1<<20, 9<<30 - 8192} {
		got := make([]byte, 8192)
		_, err := f.ReadAt(got, off)
		if check(t, err); string(got) != bulk(uint64(i), 8192) {
			t.Errorf("other bytes at %d", off)
		}
	}
	var st unix.Stat_t
	check(t, unix.Stat(filepath.Join(out, "sparse"), &st))
	if st.Blocks > 1<<12 || rep.Stores["kv"].BytesUploaded > 64<<10 {
		t.Errorf("holes were filled: %d blocks, %d bytes sent", st.Blocks, rep.Stores["kv"].BytesUploaded)
	}
}

// Blobs are named by attempt and number, so files of one name do not meet.
func TestSamza15EqualNames(t *testing.T) {
	d := blobtest.NewRecorder(memblob.New())
	w := newWorldOn(t, d)
	w.opts.PackSize = minPackSize
	for i := range 8 {
		w.write(map[string]string{fmt.Sprintf("%d/same/name", i): bulk(uint64(i), 60_000)})
	}
	rep := w.mustCommit(w.open(), nil)
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
	seen := map[string]bool{}
	for _, c := range d.Calls() {
		if c.Op == blobtest.OpPut && isBlob(c.Key()) {
			if seen[c.Key()] {
				t.Errorf("%s was written twice", c.Key())
			}
			seen[c.Key()] = true
		}
	}
}

// A target with other files in it becomes exactly the checkpoint, and only what differs
// is fetched.
func TestSamza16RestoreOverOtherFiles(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": bulk(1, 500_000), "b": bulk(2, 500_000), "d/c": bulk(3, 10_000)})
	rep := w.mustCommit(w.open(), nil)
	out := w.restore(rep.Checkpoint)
	check(t, os.Remove(filepath.Join(out, "b")))
	check(t, os.Rename(filepath.Join(out, "a"), filepath.Join(out, "elsewhere")))
	check(t, os.MkdirAll(filepath.Join(out, "b/now/a/directory"), 0o700))
	check(t, os.WriteFile(filepath.Join(out, "extra"), []byte("e"), 0o600))
	got, err := w.repo().Restore(t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
	check(t, err)
	if s := got.Stores["kv"]; s.BytesFetched != 500_000 || s.BytesReused != 510_000 {
		t.Fatalf("restore = %+v", s)
	}
	wantSameTree(t, out, w.dir)
}

// Sealing and deleting are few calls on new and dead blobs only, and the index bytes that
// a commit writes follow the change.
func TestSamza17WorkFollowsTheChange(t *testing.T) {
	d := blobtest.NewRecorder(memblob.New())
	w := newWorldOn(t, d)
	w.opts.KeepLast, w.opts.Grace = 1, -1
	for i := range 800 {
		name := fmt.Sprintf("d%02d/%04d", i%20, i)
		w.write(map[string]string{name: bulk(uint64(i), 100)})
		check(t, unix.Setxattr(filepath.Join(w.dir, name), "user.x", []byte(bulk(uint64(i), 2000)), 0)) // a large index of few files
	}
	task := w.open()
	w.mustCommit(task, nil)
	first := w.stored() - 800*100
	w.write(map[string]string{"d07/0007": "changed"})
	d.Reset()
	w.mustCommit(task, nil)
	var sealed, deleted []string
	var written int64
	seals, deletes := 0, 0
	for _, c := range d.Calls() {
		switch c.Op {
		case blobtest.OpRemoveTTL:
			seals, sealed = seals+1, append(sealed, c.Keys...)
		case blobtest.OpDelete:
			deletes, deleted = deletes+1, append(deleted, c.Keys...)
		case blobtest.OpPut:
			written += c.Size
		}
	}
	if seals != 1 || len(sealed) != 3 { // pack, index, checkpoint blob
		t.Errorf("%d calls sealed %v", seals, sealed)
	}
	if deletes > 2 || len(deleted) > 3 {
		t.Errorf("%d calls deleted %v", deletes, deleted)
	}
	if first < 1<<20 || written > first/2 {
		t.Errorf("the commit of one file wrote %d bytes; all files took %d beside their content", written, first)
	}
}

// Every byte is read and hashed once, at backup and at restore, however deep it lies; a
// change of mode and a new name send nothing.
func TestSamza18EveryByteOnce(t *testing.T) {
	d := blobtest.NewRecorder(memblob.New())
	w := newWorldOn(t, d)
	deep := strings.Repeat("d/", 12)
	w.write(map[string]string{deep + "f": bulk(1, 6<<20), "g": bulk(2, 1<<20)})
	var n atomic.Int64
	src := map[string]source.Source{"kv": spied{Source: source.Dir(w.dir, nil), n: &n}}
	task := w.open()
	rep, err := w.commitFrom(task, src)
	if check(t, err); n.Load() != 7<<20 {
		t.Errorf("backup read %d bytes of %d", n.Load(), 7<<20)
	}
	d.Reset()
	w.restore(rep.Checkpoint)
	var fetched int64
	for _, c := range d.Calls() {
		if c.Op == blobtest.OpGet && c.Length > 100_000 {
			fetched += c.Length
		}
	}
	if fetched != 7<<20 {
		t.Errorf("restore fetched %d bytes of %d", fetched, 7<<20)
	}
	check(t, os.Chmod(filepath.Join(w.dir, deep+"f"), 0o600))
	check(t, os.Rename(filepath.Join(w.dir, "g"), filepath.Join(w.dir, "renamed")))
	check(t, os.Link(filepath.Join(w.dir, "renamed"), filepath.Join(w.dir, "linked")))
	w.write(map[string]string{"copied": bulk(2, 1<<20)})
	rep = w.mustCommit(task, nil)
	if s := rep.Stores["kv"]; s.BytesUploaded != 0 {
		t.Errorf("new mode, new name, copy: %+v", s)
	}
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// Checkpoints are kept, listed, verified, and restored to any point in time.
func TestSamza19PointsInTime(t *testing.T) {
	w := newWorld(t)
	task := w.open()
	var trees, ids []string
	for i := range 4 {
		w.write(map[string]string{"f": bulk(uint64(i), 5000), fmt.Sprint(i): "new"})
		rep := w.mustCommit(task, map[string]string{"in": fmt.Sprint(i)})
		ids, trees = append(ids, rep.Checkpoint), append(trees, w.restore(rep.Checkpoint))
	}
	list, err := w.repo().List(t.Context(), ListFilter{Job: kvTask.Job})
	check(t, err)
	for i, c := range list {
		if k := len(ids) - 1 - i; c.ID != ids[k] || c.Offsets["in"] != fmt.Sprint(k) {
			t.Errorf("list has %s with %v at %d", c.ID, c.Offsets, i)
		}
	}
	w.wantSound()
	for i, id := range ids {
		out := w.restore(id)
		wantSameTree(t, out, trees[i])
		by := list[len(ids)-1-i].Time.Format(time.RFC3339Nano)
		wantSameTree(t, w.restore(by), trees[i])
	}
	_, err = w.repo().Show(t.Context(), kvTask, at(t, "2001-01-01T00:00:00Z"))
	if !errors.Is(err, ErrNotFound) {
		t.Errorf("before the first: %v", err)
	}
	if !slices.IsSortedFunc(list, func(a, b Checkpoint) int { return strings.Compare(b.ID, a.ID) }) {
		t.Error("not newest first")
	}
}
