package snapferry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
)

// I8: what records the progress of an upload goes with the commit.
func TestProgressListsGo(t *testing.T) {
	w := newLong(t, memblob.New())
	w.opts.KeepLast = 1
	task := w.open()
	for i := range 6 {
		for k := range sliceCount {
			w.write(map[string]string{fmt.Sprintf("%02d", k): bulk(uint64(1000*i+k), slice)})
		}
		w.mustCommit(task, nil)
	}
	w.open()
	w.open()
	if rep := w.gc(GCOptions{DryRun: true}); rep.BlobsDeleted > 0 {
		t.Errorf("I8: nobody but gc deletes %d dead blobs", rep.BlobsDeleted)
	}
}

// I8: segments of the head that a commit replaces go with it, but for the few that were
// replaced before they were ever named.
func TestReplacedSegmentsGo(t *testing.T) {
	w := newWorld(t)
	w.opts.KeepLast, w.opts.CacheDir, w.opts.Grace = 150, "", -1
	task := w.open()
	for i := range 250 {
		w.write(map[string]string{"f": fmt.Sprint(i)})
		w.mustCommit(task, nil)
	}
	w.open()
	if rep := w.gc(GCOptions{DryRun: true}); rep.BlobsDeleted > 8 {
		t.Errorf("I8: %d dead blobs of %d bytes after 250 commits; %d blobs in all", rep.BlobsDeleted, rep.BytesDeleted, len(w.keys("b/")))
	}
}

// I8: a dropped checkpoint that is damaged is left to gc; the others are cleaned up.
func TestDamagedDroppedStopsNoOther(t *testing.T) {
	d := memblob.New()
	w := newWorldOn(t, d)
	w.opts.CacheDir, w.opts.KeepLast = "", 1
	task := w.open()
	w.mustCommit(task, nil)
	w.write(map[string]string{"f": "1"})
	w.mustCommit(task, nil)
	check(t, d.Corrupt(blobPrefix(kvTask)+w.state().Dropped[0].Blob.Key, flip))
	task.opts.Grace = -1
	for i := range 20 {
		w.write(map[string]string{"f": bulk(uint64(i), 100_000)})
		w.mustCommit(task, nil)
	}
	if n := len(w.state().Dropped); n > 2 {
		t.Errorf("%d dropped checkpoints wait behind a damaged one; %d blobs", n, len(w.keys("b/")))
	}
}

// I8: a dropped checkpoint that is held is not taken for cleaned up.
func TestHoldEndsAfterTheSweep(t *testing.T) {
	w := newWorld(t)
	w.opts.CacheDir, w.opts.KeepLast, w.opts.Grace = "", 1, -1
	task := w.open()
	w.write(map[string]string{"f": bulk(1, 50_000)})
	first := w.mustCommit(task, nil)
	re := &restorer{view: *w.repo().view(kvTask), observer: &Observer{}}
	if !re.hold(t.Context(), first.Checkpoint, "me") {
		t.Fatal("not held")
	}
	w.write(map[string]string{"f": bulk(2, 50_000)})
	w.mustCommit(task, nil) // drops the first, which is held
	re.release(t.Context(), "me")
	for i := range 3 {
		w.write(map[string]string{"f": bulk(uint64(3+i), 50_000)})
		w.mustCommit(task, nil)
	}
	w.open()
	if rep := w.gc(GCOptions{DryRun: true}); rep.BlobsDeleted > 0 {
		t.Errorf("I8: %d blobs (%d bytes) of a released checkpoint stay", rep.BlobsDeleted, rep.BytesDeleted)
	}
}

type cpHook struct {
	checkpoint.Driver
	after func(e *checkpoint.Entry) error
}

func (d *cpHook) Append(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	err := d.Driver.Append(ctx, task, e)
	if err == nil && d.after != nil {
		err = d.after(e)
	}
	return err
}

// A store that is forgotten while a commit is unknown is forgotten by the next.
func TestForgetWhileUnknown(t *testing.T) {
	w := newWorld(t)
	w.opts.CacheDir, w.opts.KeepLast = "", 1
	info, err := ReadInfo(t.Context(), w.blobs)
	check(t, err)
	cp := &cpHook{Driver: blobcp.New(w.blobs, info.ID)}
	w.cps = checkpoint.New(cp, nil)
	task := w.open()
	kv := func() source.Source { return source.Dir(w.dir, nil) }
	if _, err := w.commitFrom(task, map[string]source.Source{"old": kv(), "kv": kv()}); err != nil {
		t.Fatal(err)
	}
	cp.after = func(*checkpoint.Entry) error { return errors.New("lost") }
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := w.commit(ctx, task, nil); !errors.Is(err, ErrUnknown) {
		t.Fatalf("got %v", err)
	}
	cp.after = nil
	check(t, task.Forget("old"))
	w.mustCommit(task, nil)
	if h, ok := w.state().Holders["old"]; ok {
		t.Errorf("Forget takes effect with the next commit, but %s still holds the store", h)
	}
}

// P3.5: a put that is refused after it has landed is no definite failure.
func TestRefusedAfterLanding(t *testing.T) {
	d := &lateRefusal{Driver: memblob.New()}
	w := newWorldOn(t, d)
	w.opts.CacheDir = ""
	w.write(map[string]string{"a": bulk(1, 1000)})
	task := w.open()
	w.mustCommit(task, nil)
	w.write(map[string]string{"a": bulk(2, 1000)})
	d.armed.Store(true)
	_, err := w.commit(t.Context(), task, nil)
	t.Logf("commit = %v (unknown: %t)", err, errors.Is(err, ErrUnknown))
	w.wantSound()
	t.Logf("retained: %d", len(w.state().Retained))
	w.write(map[string]string{"a": bulk(3, 1000)})
	if _, err := w.commit(t.Context(), task, nil); err != nil {
		t.Logf("next: %v", err)
	}
	w.wantSound()
	if !errors.Is(err, ErrUnknown) && err != nil && len(w.state().Retained) == 3 {
		t.Errorf("a definite error, and the checkpoint is committed")
	}
}

type lateRefusal struct {
	*memblob.Driver
	armed atomic.Bool
}

func (d *lateRefusal) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	err := d.Driver.Put(ctx, key, body, opts)
	if err == nil && !isBlob(key) && d.armed.CompareAndSwap(true, false) {
		// as fsblob does when the fsync of the directory is refused
		return fmt.Errorf("stored, but perhaps not durably: %w", fs.ErrPermission)
	}
	return err
}

// P10: an owner commits faster than verify reads. What was dropped meanwhile is no damage.
func TestVerifyLosesEveryRace(t *testing.T) {
	hook := &hookDriver{Driver: memblob.New()}
	w := newWorldOn(t, hook)
	w.opts.CacheDir, w.opts.KeepLast, w.opts.Grace = "", 1, -1
	w.write(map[string]string{"f": bulk(1, 100_000)})
	task := w.open()
	w.mustCommit(task, nil)
	n, inside := 0, false
	hook.get = func(key string) {
		if inside || !strings.Contains(key, "/b/") {
			return
		}
		inside = true
		defer func() { inside = false }()
		n++
		w.write(map[string]string{"f": bulk(uint64(100+n), 100_000)})
		w.mustCommit(task, map[string]string{"n": fmt.Sprint(n)})
	}
	rep, err := w.repo().Verify(t.Context(), VerifyOptions{ReadData: true})
	check(t, err)
	hook.get = nil
	w.wantSound()
	if !rep.OK {
		t.Errorf("a sound repository is reported damaged after %d commits: %+v", n, rep.Missing)
	}
}
