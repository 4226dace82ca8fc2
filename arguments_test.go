package snapferry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/source"
)

// I6: a store name in a checkpoint blob becomes the name of a directory; one that leads
// out of the target is damage.
func TestI6StoreNameFromTheRepository(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha"})
	w.mustCommit(w.open(), nil)
	v := &view{id: kvTask, blobs: w.blobs, log: w.cps.Log(kvTask)}
	check(t, v.amend(t.Context(), checkpoint.Trim, func(s *head.State, _ uint64) (*head.State, error) {
		c := &s.Retained[len(s.Retained)-1]
		b, err := v.checkpointBlob(t.Context(), c)
		if err != nil {
			return nil, err
		}
		b.Stores["../../victim"] = b.Stores["kv"]
		delete(b.Stores, "kv")
		payload, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		data := frame.Encode("checkpoint", 1, payload)
		c.Blob = head.Ref{Key: head.NewAttempt(s.Epoch, head.NoOwner).String() + "/1", Digest: frame.Digest(data)}
		return s, w.blobs.Put(t.Context(), blobPrefix(kvTask)+c.Blob.Key, blob.Bytes(data), blob.PutOptions{})
	}))
	top := t.TempDir()
	victim := filepath.Join(top, "victim")
	check(t, os.MkdirAll(victim, 0o755))
	check(t, os.WriteFile(filepath.Join(victim, "precious"), []byte("x"), 0o600))
	_, err := w.repo().Restore(t.Context(), kvTask, At{}, nil, &RestoreOptions{Dir: filepath.Join(top, "x", "to")})
	if _, serr := os.Stat(filepath.Join(victim, "precious")); serr != nil {
		t.Errorf("I6: a restore to %s/x/to (%v) replaced %s", top, err, victim)
	}
}

// An empty map of targets is an error.
func TestRestoreOfNoTargets(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha"})
	task := w.open()
	w.mustCommit(task, nil)
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("panic: %v", p)
		}
	}()
	_, _ = task.Restore(t.Context(), map[string]string{}, nil)
}

// An empty target must not mean the working directory.
func TestRestoreToNowhere(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha"})
	task := w.open()
	w.mustCommit(task, nil)
	cwd := filepath.Join(t.TempDir(), "cwd")
	check(t, os.MkdirAll(cwd, 0o755))
	check(t, os.WriteFile(filepath.Join(cwd, "precious"), []byte("x"), 0o600))
	t.Chdir(cwd)
	_, err := task.Restore(t.Context(), map[string]string{"kv": ""}, nil)
	if _, serr := os.Stat(filepath.Join(cwd, "precious")); serr != nil {
		t.Errorf("an empty target (%v) replaced the working directory: %v", err, serr)
	}
}

// A malformed glob matches nothing; it must not empty the target.
func TestRestoreBadGlob(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha"})
	task := w.open()
	w.mustCommit(task, nil)
	out := filepath.Join(t.TempDir(), "out")
	check(t, os.MkdirAll(out, 0o755))
	check(t, os.WriteFile(filepath.Join(out, "precious"), []byte("x"), 0o600))
	_, err := task.Restore(t.Context(), map[string]string{"kv": out}, &RestoreOptions{Include: []string{"[a"}})
	if _, serr := os.Stat(filepath.Join(out, "precious")); serr != nil {
		t.Errorf("a malformed glob (%v) emptied the target", err)
	}
}

// A task whose log is gone is damaged, and not opened: a new log would show its blobs dead.
func TestTaskWithoutItsLog(t *testing.T) {
	d := memblob.New()
	w := newWorldOn(t, d)
	w.write(map[string]string{"a": "alpha"})
	w.mustCommit(w.open(), nil)
	check(t, d.Delete(t.Context(), w.keys("log/")))
	rep, err := w.repo().Verify(t.Context(), VerifyOptions{})
	if err == nil && rep.OK {
		t.Errorf("verify: ok, %d checkpoints, though %d blobs of a bound task have no log", rep.Checkpoints, len(w.keys("b/")))
	}
	before := len(w.keys("b/"))
	for range 2 {
		if _, err := Open(t.Context(), kvTask, w.blobs, w.cps, &w.opts); !errors.Is(err, ErrCorrupt) {
			t.Errorf("open: %v", err)
		}
	}
	if after := len(w.keys("b/")); after != before {
		t.Errorf("%d blobs, then %d", before, after)
	}
}

// P5a: one attempt at a time.
func TestUploadTwice(t *testing.T) {
	w := newWorld(t)
	w.opts.CacheDir = ""
	w.write(map[string]string{"a": bulk(1, 1000)})
	task := w.open()
	p, err := task.Snapshot(t.Context(), w.sources(), nil)
	check(t, err)
	_, err = p.Upload(t.Context())
	check(t, err)
	if _, err = p.Upload(t.Context()); err != nil {
		return
	}
	_, err = p.Publish(t.Context())
	check(t, err)
	w.open()
	if rep := w.gc(GCOptions{DryRun: true}); rep.BlobsDeleted > 0 {
		t.Errorf("P5a: %d blobs of the first of two attempts stay", rep.BlobsDeleted)
	}
}

type eofSource struct{ source.Source }

type eofImage struct{ source.Image }
type eofFile struct {
	source.File
	size int64
}

func (s eofSource) Freeze(ctx context.Context) (source.Image, error) {
	i, err := s.Source.Freeze(ctx)
	return eofImage{i}, err
}

func (i eofImage) Open(p string) (source.File, error) {
	f, err := i.Image.Open(p)
	if err != nil {
		return nil, err
	}
	return eofFile{f, f.Identity().Size}, nil
}

func (f eofFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	if err == nil && off+int64(n) == f.size {
		err = io.EOF
	}
	return n, err
}

// An io.ReaderAt may say io.EOF along with the last bytes.
func TestReaderThatEndsWithEOF(t *testing.T) {
	w := newWorld(t)
	w.write(map[string]string{"a": "alpha"})
	_, err := w.commitFrom(w.open(), map[string]source.Source{"kv": eofSource{source.Dir(w.dir, nil)}})
	if errors.Is(err, ErrChanged) {
		t.Errorf("a legal io.ReaderAt: %v", err)
	}
}

// P1: a head holds what a task of hundreds of stores needs, also after the first drop.
func TestManyStores(t *testing.T) {
	for _, n := range []int{300, 320, 340, 360, 400} {
		w := newWorld(t)
		w.opts.CacheDir, w.opts.KeepLast = "", 2
		task := w.open()
		src := map[string]source.Source{}
		for i := range n {
			src[fmt.Sprintf("partition-%010d", i)] = &memSource{tree: tree{"a": "x"}}
		}
		for i := range 5 {
			src[fmt.Sprintf("partition-%010d", 0)] = &memSource{tree: tree{"a": fmt.Sprint(i)}}
			if _, err := w.commitFrom(task, src); err != nil {
				t.Errorf("%d stores: commit %d: %v", n, i+1, err)
				break
			}
		}
	}
}
