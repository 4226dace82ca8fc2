package snapferry

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
)

// listHook calls on ahead of each list.
type listHook struct {
	blob.Driver
	on func(prefix string)
}

func (d *listHook) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Info, error] {
	if d.on != nil {
		d.on(prefix)
	}
	return d.Driver.List(ctx, prefix, after)
}

// twin is a second process on the same repository.
func (w *world) twin(d blob.Driver) *world {
	n := &world{t: w.t, blobs: blob.New(d, nil), dir: w.dir}
	info, err := ReadInfo(w.t.Context(), n.blobs)
	check(w.t, err)
	n.cps = checkpoint.New(blobcp.New(n.blobs, info.ID), nil)
	n.opts.CacheDir = w.t.TempDir()
	return n
}

// Two owners open a task for the first time; the first one's blobs are no sign of a lost log.
func TestTwoFirstOpens(t *testing.T) {
	mem := memblob.New()
	w := newWorldOn(t, mem)
	w.write(map[string]string{"a": "alpha"})
	hook := &listHook{Driver: mem}
	b := w.twin(hook)
	done := false
	hook.on = func(p string) {
		if p == blobPrefix(kvTask) && !done {
			done = true
			w.mustCommit(w.open(), nil)
		}
	}
	_, err := Open(t.Context(), kvTask, b.blobs, b.cps, &b.opts)
	if err != nil {
		t.Errorf("second first open: %v (corrupt %v)", err, errors.Is(err, ErrCorrupt))
	}
}

// P10: a task that is begun while verify looks at it is not damaged.
func TestVerifyBesideTheFirstBackup(t *testing.T) {
	mem := memblob.New()
	w := newWorldOn(t, mem)
	w.write(map[string]string{"a": "alpha"})
	hook := &listHook{Driver: mem}
	b := w.twin(hook)
	check(t, ensureBind(t.Context(), w.blobs, kvTask, bind{b.repo().store, modeInternal}))
	done := 0
	hook.on = func(p string) {
		if p == blobPrefix(kvTask) {
			done++
			if done == 1 {
				w.mustCommit(w.open(), nil)
			}
		}
	}
	rep, err := b.repo().Verify(t.Context(), VerifyOptions{})
	check(t, err)
	if !rep.OK {
		t.Errorf("verify beside the first backup: missing %+v corrupt %+v", rep.Missing, rep.Corrupt)
	}
}

// P10: damage in content that a later checkpoint took over is told, although the checkpoint
// in which it was found has been dropped meanwhile.
func TestVerifyBesideABackup(t *testing.T) {
	mem := memblob.New()
	w := newWorldOn(t, mem)
	w.opts.KeepLast = 1
	w.opts.CacheDir = ""
	w.write(map[string]string{"a": bulk(1, 300_000), "b": bulk(2, 300_000)})
	task := w.open()
	rep0 := w.mustCommit(task, nil)
	// damage bytes of a in its pack
	c := w.chunkOf(rep0.Checkpoint, "a")
	data, err := w.blobs.ReadAll(t.Context(), c.Blob, 0, -1)
	check(t, err)
	data[c.Location.Offset+5] ^= 1
	check(t, w.blobs.Put(t.Context(), c.Blob, blob.Bytes(data), blob.PutOptions{}))
	var once atomic.Bool
	rep, err := w.repo().Verify(t.Context(), VerifyOptions{ReadData: true, OnBytes: func(int64) {
		if once.CompareAndSwap(false, true) {
			w.write(map[string]string{"new": "x"})
			w.mustCommit(task, nil)
		}
	}})
	check(t, err)
	again, err := w.repo().Verify(t.Context(), VerifyOptions{ReadData: true})
	check(t, err)
	if rep.OK && !again.OK {
		t.Error("verify beside one backup with KeepLast 1 found nothing; what is retained is damaged by the same bytes")
	}
}

// P2: a reader whose segments are replaced again and again has met no damage.
func TestReadersBesideManyCommits(t *testing.T) {
	mem := memblob.New()
	w := newWorldOn(t, mem)
	w.opts.KeepLast = 110
	w.opts.Grace = time.Nanosecond
	w.write(map[string]string{"a": "x"})
	task := w.open()
	for i := range 130 {
		w.write(map[string]string{"a": fmt.Sprint(i)})
		w.mustCommit(task, nil)
	}
	hook := &hookDriver{Driver: mem}
	b := w.twin(hook)
	n, deep := 0, false
	hook.get = func(key string) {
		if isBlob(key) && !deep {
			deep = true
			n++
			w.write(map[string]string{"a": fmt.Sprint("n", n)})
			w.mustCommit(task, nil)
			deep = false
		}
	}
	_, err := b.repo().List(t.Context(), ListFilter{})
	if errors.Is(err, ErrCorrupt) {
		t.Errorf("list after %d commits beside it: %v", n, err)
	}
}

// P6: a prepare that is found in the log carries no store to forget; the next confirm does.
func TestForgetSurvivesALostPrepare(t *testing.T) {
	mem := memblob.New()
	d := &hookDriver{Driver: mem}
	w := newWorldOn(t, d)
	w.opts.External = &External{Last: func(context.Context) (string, error) { return "", nil }}
	w.write(map[string]string{"a": "alpha"})
	task := w.open()
	m := w.upload(task)
	check(t, task.CleanUp(t.Context(), m.Checkpoint))
	check(t, task.Forget("gone"))
	lost := false
	d.after = func(key string, err error) error {
		if lost || err != nil || !strings.Contains(key, "/log/") {
			return err
		}
		lost = true
		w.follow(key)
		return blob.Retriable(errors.New("no answer"))
	}
	w.write(map[string]string{"a": "beta"})
	w.upload(task)
	if len(task.forget) != 1 {
		t.Errorf("forget is %v after the prepare; no entry has carried it", task.forget)
	}
}
