package snapferry

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
)

// world is a repository in memory and a directory to back up.
type world struct {
	t     *testing.T
	blobs *blob.Store
	cps   *checkpoint.Store
	dir   string
	opts  Options
}

var kvTask = TaskID{Job: "orders", Task: "p7"}

func newWorld(t *testing.T) *world { return newWorldOn(t, memblob.New()) }

func newWorldOn(t *testing.T, d blob.Driver) *world {
	t.Helper()
	w := &world{t: t, blobs: blob.New(d, nil), dir: t.TempDir()}
	info, _, err := Ensure(t.Context(), w.blobs)
	if err != nil {
		t.Fatal(err)
	}
	w.cps = checkpoint.New(blobcp.New(w.blobs, info.ID), nil)
	w.opts.CacheDir = t.TempDir()
	return w
}

func (w *world) write(files map[string]string) {
	w.t.Helper()
	for name, data := range files {
		p := filepath.Join(w.dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			w.t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(data), 0o644); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) open() *Task {
	w.t.Helper()
	task, err := Open(w.t.Context(), kvTask, w.blobs, w.cps, &w.opts)
	if err != nil {
		w.t.Fatal(err)
	}
	return task
}

func (w *world) sources() map[string]source.Source {
	return map[string]source.Source{"kv": source.Dir(w.dir, nil)}
}

func (w *world) commit(ctx context.Context, task *Task, offsets map[string]string) (*CommitReport, error) {
	p, err := task.Snapshot(ctx, w.sources(), offsets)
	if err != nil {
		return nil, err
	}
	return p.Commit(ctx)
}

func (w *world) mustCommit(task *Task, offsets map[string]string) *CommitReport {
	w.t.Helper()
	rep, err := w.commit(w.t.Context(), task, offsets)
	if err != nil {
		w.t.Fatal(err)
	}
	return rep
}

func (w *world) repo() *Repo {
	w.t.Helper()
	r, err := OpenRepo(w.t.Context(), w.blobs, w.cps, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func TestCommitThenCommit(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha", "d/b": "beta", "empty": ""})
	task := w.open()
	rep := w.mustCommit(task, map[string]string{"in": "1"})
	if s := rep.Stores["kv"]; s.FilesUploaded != 2 || s.BytesUploaded != 9 {
		t.Fatalf("first commit: %+v", s)
	}
	w.write(map[string]string{"a": "ALPHA"})
	rep = w.mustCommit(task, map[string]string{"in": "2"})
	if s := rep.Stores["kv"]; s.FilesUploaded != 1 || s.BytesUploaded != 5 || s.BytesRetained != 4 {
		t.Fatalf("second commit: %+v", s)
	}
	list, err := w.repo().List(t.Context(), ListFilter{})
	if err != nil || len(list) != 2 {
		t.Fatalf("List = %v, %v", list, err)
	}
	if list[0].Offsets["in"] != "2" || list[0].Sequence != 2 || list[0].ID <= list[1].ID {
		t.Fatalf("List = %+v", list)
	}
	v, err := w.repo().Verify(t.Context(), VerifyOptions{ReadData: true})
	if err != nil || !v.OK || v.Checkpoints != 2 {
		t.Fatalf("Verify = %+v, %v", v, err)
	}
	gc, err := w.repo().GC(t.Context(), GCOptions{})
	if err != nil || gc.BlobsDeleted != 0 {
		t.Fatalf("GC = %+v, %v", gc, err)
	}
}

func TestRestoreRoundTrip(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha", "d/b": "beta", "empty": ""})
	task := w.open()
	first := w.mustCommit(task, nil)
	w.write(map[string]string{"a": "ALPHA", "new": "n"})
	w.mustCommit(task, nil)
	out := filepath.Join(t.TempDir(), "kv")
	if _, err := task.Restore(t.Context(), map[string]string{"kv": out}, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(out, "a")); err != nil || string(got) != "ALPHA" {
		t.Fatalf("a = %q, %v", got, err)
	}
	at, err := ParseAt(first.Checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	rep, err := w.repo().Restore(t.Context(), kvTask, at, map[string]string{"kv": out}, nil)
	if err != nil || rep.Checkpoint != first.Checkpoint {
		t.Fatalf("Restore = %+v, %v", rep, err)
	}
	if _, err := os.Stat(filepath.Join(out, "new")); !os.IsNotExist(err) {
		t.Fatalf("extra file stayed: %v", err)
	}
	w.dir = out
	if s := w.mustCommit(task, nil).Stores["kv"]; s.BytesUploaded != 0 {
		t.Fatalf("commit of a restored tree: %+v", s)
	}
}

// I5: the identity cache is shared by all tasks and repositories that back up one
// directory, so what it proves must hold against any of their indexes, attributes
// included.
func TestAttributesAgainstForeignCache(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"f": "bytes"})
	p := filepath.Join(w.dir, "f")
	set := func(v string) {
		if err := unix.Setxattr(p, "user.k", []byte(v), 0); err != nil {
			t.Fatal(err)
		}
	}
	commit := func(job string) {
		task, err := Open(t.Context(), TaskID{Job: job, Task: "p"}, w.blobs, w.cps, &w.opts)
		if err != nil {
			t.Fatal(err)
		}
		w.mustCommit(task, nil)
	}
	set("A")
	commit("a")
	set("B")
	commit("b")
	commit("a")
	cp, err := w.repo().Show(t.Context(), TaskID{Job: "a", Task: "p"}, At{})
	if err != nil {
		t.Fatal(err)
	}
	x, err := w.repo().Index(t.Context(), cp, "kv")
	if err != nil {
		t.Fatal(err)
	}
	if e, ok := x.Lookup("f"); !ok || len(e.Xattrs) != 1 || string(e.Xattrs[0].Value) != "B" {
		t.Fatalf("f has attributes %v, want user.k=B", e.Xattrs)
	}
}
