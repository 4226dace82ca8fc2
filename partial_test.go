package snapferry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
)

// P5g: the progress of a long upload is recorded, held, borrowed from, and dropped.

const (
	slice      = 256 << 10 // size of a file, a chunk and a pack in these tests
	sliceCount = 24
)

// newLong is a world whose first backup is long: of sliceCount files that are a pack each.
func newLong(t *testing.T, d blob.Driver) *world {
	w := newWorldOn(t, d)
	w.longOptions()
	for i := range sliceCount {
		w.write(map[string]string{fmt.Sprintf("%02d", i): bulk(uint64(i), slice)})
	}
	return w
}

// longOptions records progress with every third pack, one pack after the other.
func (w *world) longOptions() {
	w.opts.PackSize, w.opts.Uploads, w.opts.Readers = slice, 1, 1
	w.opts.PartialBytes, w.opts.keepWorth = 3*slice, slice
	w.opts.Grace = -1
}

// breakAt is a hook that fails the n-th pack (from 0) of every attempt.
func breakAt(n int, err error) func(string, int64) error {
	var packs atomic.Int64
	return func(_ string, size int64) error {
		if size == slice && packs.Add(1) > int64(n) {
			return err
		}
		return nil
	}
}

func (w *world) progress() int64 {
	w.t.Helper()
	if p := w.state().Partial; p != nil {
		return p.Bytes
	}
	return 0
}

// Progress is recorded by bytes, and the next attempt sends only the rest; once it has
// committed, the record is gone and nothing is left over.
func TestPartialByBytes(t *testing.T) {
	d := memblob.New()
	hook := &hookDriver{Driver: d}
	w := newLong(t, hook)
	down := errors.New("the link is down")
	hook.before = breakAt(14, down)
	task := w.open()
	if _, err := w.commit(t.Context(), task, nil); !errors.Is(err, down) {
		t.Fatalf("commit = %v", err)
	}
	kept := w.progress()
	if kept < 9*slice || kept > 14*slice || kept%slice != 0 {
		t.Fatalf("%d bytes of progress are recorded", kept)
	}
	d.Expire() // what is named is sealed (I2)
	hook.before = nil
	rep := w.mustCommit(task, nil)
	if s := rep.Stores["kv"]; s.BytesUploaded != sliceCount*slice-kept || s.BytesStored != s.BytesUploaded {
		t.Fatalf("%d bytes were kept, and then %+v", kept, s)
	}
	if w.state().Partial != nil {
		t.Fatal("the commit left the progress recorded")
	}
	d.Expire()
	w.wantSound()
	wantSameTree(t, w.restore(""), w.dir)
	w.wantOnlyNamed()
}

// Progress is recorded by time.
func TestPartialByTime(t *testing.T) {
	hook := &hookDriver{Driver: memblob.New()}
	w := newLong(t, hook)
	w.opts.PartialBytes, w.opts.PartialAfter = 1<<40, time.Nanosecond
	hook.before = breakAt(10, errors.New("down"))
	task := w.open()
	if _, err := w.commit(t.Context(), task, nil); err == nil {
		t.Fatal("no error")
	}
	if kept := w.progress(); kept < 8*slice {
		t.Fatalf("%d bytes of progress are recorded", kept)
	}
	kept := w.progress()
	hook.before = nil
	if s := w.mustCommit(w.open(), nil).Stores["kv"]; s.BytesUploaded != sliceCount*slice-kept {
		t.Fatalf("%d bytes were kept, and then %+v", kept, s)
	}
	w.wantOnlyNamed()
	w.wantSound()
}

// An upload that breaks again and again, in one process or another, never sends the same
// bytes more than once save for what came after the last record.
func TestPartialGoesOnAndOn(t *testing.T) {
	d := memblob.New()
	rec := blobtest.NewRecorder(d)
	hook := &hookDriver{Driver: rec}
	w := newLong(t, hook)
	task := w.open()
	tries := 0
	for ; ; tries++ {
		hook.before = breakAt(6, errors.New("down"))
		if _, err := w.commit(t.Context(), task, nil); err == nil {
			break
		}
		if tries > sliceCount {
			t.Fatal("no end")
		}
		if tries%2 == 1 {
			task = w.open() // another owner goes on with it
		}
		w.batter(d)
	}
	var sent int64
	for _, c := range rec.Calls() {
		if c.Op == blobtest.OpPut && c.Size == slice {
			sent += c.Size
		}
	}
	if most := int64(sliceCount+3*tries) * slice; sent > most || tries < 3 {
		t.Fatalf("%d bytes sent in %d tries for %d", sent, tries, sliceCount*slice)
	}
	w.wantSound()
	wantSameTree(t, w.restore(""), w.dir)
	w.wantOnlyNamed()
}

// A cancelled upload keeps what is worth it, and deletes what is not.
func TestPartialCancelled(t *testing.T) {
	for _, worth := range []bool{true, false} {
		t.Run(fmt.Sprint("worth=", worth), func(t *testing.T) {
			hook := &hookDriver{Driver: memblob.New()}
			w := newLong(t, hook)
			w.opts.PartialBytes = 1 << 40
			if !worth {
				w.opts.keepWorth = 1 << 30
			}
			ctx, cancel := context.WithCancel(t.Context())
			hook.before = func(_ string, n int64) error {
				if n == slice && len(w.keys("b/")) == 9 {
					cancel()
				}
				return nil
			}
			task := w.open()
			if _, err := w.commit(ctx, task, nil); !errors.Is(err, context.Canceled) {
				t.Fatalf("commit = %v", err)
			}
			kept := w.progress()
			if worth != (kept >= 8*slice) || !worth && len(w.keys("b/")) != 0 {
				t.Fatalf("%d bytes kept, blobs %v", kept, w.keys("b/"))
			}
			hook.before = nil
			if s := w.mustCommit(task, nil).Stores["kv"]; s.BytesUploaded != sliceCount*slice-kept {
				t.Fatalf("%d bytes were kept, and then %+v", kept, s)
			}
			w.wantSound()
			w.wantOnlyNamed()
		})
	}
}

// When the answer to recording the progress of a cancelled upload is lost, its blobs stay:
// the record may have been made (P3.5).
func TestPartialCancelledAnswerLost(t *testing.T) {
	f := blobtest.NewFaults(memblob.New(), nil)
	hook := &hookDriver{Driver: f}
	w := newLong(t, hook)
	w.opts.PartialBytes, w.opts.abandonTime = 1<<40, 200*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	hook.before = func(key string, n int64) error {
		switch {
		case n == slice && len(w.keys("b/")) == 9:
			cancel()
		case strings.Contains(key, "/log/") && ctx.Err() != nil:
			f.LoseAt(0, nil)
		}
		return nil
	}
	task := w.open()
	if _, err := w.commit(ctx, task, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("commit = %v", err)
	}
	f.Heal()
	hook.before = nil
	kept := w.progress()
	if kept < 8*slice {
		t.Fatalf("%d bytes kept", kept)
	}
	if s := w.mustCommit(w.open(), nil).Stores["kv"]; s.BytesUploaded != sliceCount*slice-kept {
		t.Fatalf("%d bytes were kept, and then %+v", kept, s)
	}
	w.wantSound()
	w.wantOnlyNamed()
}

// interrupted is a world with recorded progress of an upload that was cut off.
func interrupted(t *testing.T) (*world, *memblob.Driver) {
	d := memblob.New()
	hook := &hookDriver{Driver: d}
	w := newLong(t, hook)
	hook.before = breakAt(14, errors.New("down"))
	if _, err := w.commit(t.Context(), w.open(), nil); err == nil || w.progress() < 9*slice {
		t.Fatalf("commit = %v, %d bytes kept", err, w.progress())
	}
	hook.before = nil
	return w, d
}

// What a recorded progress names outlives expiry, gc without grace and any number of
// Opens; a later epoch borrows from it.
func TestPartialIsHeld(t *testing.T) {
	w, d := interrupted(t)
	kept := w.progress()
	for range 3 {
		w.batter(d)
		w.open()
	}
	if s := w.mustCommit(w.open(), nil).Stores["kv"]; s.BytesUploaded != sliceCount*slice-kept {
		t.Fatalf("%d bytes were kept, and then %+v", kept, s)
	}
	w.wantSound()
	w.wantOnlyNamed()
}

// The next commit drops the progress whether it needs it or not, and what nothing needs
// then is collected.
func TestPartialUnused(t *testing.T) {
	w, _ := interrupted(t)
	check(t, os.RemoveAll(w.dir))
	w.write(map[string]string{"other": "other"})
	w.mustCommit(w.open(), nil)
	if w.state().Partial != nil {
		t.Fatal("the commit left the progress recorded")
	}
	w.wantOnlyNamed()
	if n := w.stored(); n > slice {
		t.Fatalf("%d bytes are stored for nothing", n)
	}
	w.wantSound()
}

// Progress that is damaged or gone is not built on, and does not stop the backups.
func TestPartialDamaged(t *testing.T) {
	for _, gone := range []bool{false, true} {
		t.Run(fmt.Sprint("gone=", gone), func(t *testing.T) {
			w, d := interrupted(t)
			key := blobPrefix(kvTask) + w.state().Partial.Chunks.Key
			if gone {
				check(t, d.Delete(t.Context(), []string{key}))
			} else {
				check(t, d.Corrupt(key, flip))
			}
			rep := w.mustCommit(w.open(), nil)
			if s := rep.Stores["kv"]; s.BytesUploaded != sliceCount*slice {
				t.Fatalf("commit: %+v", s)
			}
			w.wantSound()
			wantSameTree(t, w.restore(""), w.dir)
			w.wantOnlyNamed()
		})
	}
}

// onDisk is the world of a child process: its repository is in e.Repo.
func onDisk(t *testing.T, e errandSpec, wrap func(blob.Driver) blob.Driver) *world {
	d, err := fsblob.Open(e.Repo, &fsblob.Options{Create: true})
	check(t, err)
	w := &world{t: t, blobs: blob.New(wrap(d), nil), dir: e.Dir}
	info, _, err := Ensure(t.Context(), w.blobs)
	check(t, err)
	w.cps = checkpoint.New(blobcp.New(w.blobs, info.ID), nil)
	w.opts.CacheDir = e.Cache
	return w
}

func plain(d blob.Driver) blob.Driver { return d }

// childUpload backs up and is killed before the KillAt-th pack.
func childUpload(t *testing.T, e errandSpec) {
	hook := &hookDriver{}
	w := onDisk(t, e, func(d blob.Driver) blob.Driver { hook.Driver = d; return hook })
	w.longOptions()
	var packs atomic.Int64
	hook.before = func(_ string, n int64) error {
		if n == slice && packs.Add(1) == e.KillAt {
			die()
		}
		return nil
	}
	w.mustCommit(w.open(), nil)
}

// A process that is killed in mid-upload, twice, goes on where it was.
func TestPartialKilled(t *testing.T) {
	e := errandSpec{Name: "upload", Repo: t.TempDir(), Dir: t.TempDir(), KillAt: 11}
	w := &world{t: t, dir: e.Dir}
	for i := range sliceCount {
		w.write(map[string]string{fmt.Sprintf("%02d", i): bulk(uint64(i), slice)})
	}
	var kept int64
	for range 2 {
		if out, killed, _ := sendErrand(t, e); !killed {
			t.Fatalf("nobody killed it\n%s", out)
		}
		w = onDisk(t, e, plain)
		if w.progress() == 0 {
			t.Fatal("no progress is recorded")
		}
		v := view{id: kvTask, blobs: w.blobs}
		list, err := v.partial(t.Context(), w.state().Partial)
		check(t, err)
		var n int64
		for _, c := range list.Chunks {
			n += int64(c.Length)
		}
		if n <= kept {
			t.Fatalf("the progress names %d bytes, before it were %d", n, kept)
		}
		kept = n
	}
	w.longOptions()
	if s := w.mustCommit(w.open(), nil).Stores["kv"]; s.BytesUploaded != sliceCount*slice-kept {
		t.Fatalf("%d bytes were kept, and then %+v", kept, s)
	}
	w.wantSound()
	wantSameTree(t, w.restore(""), w.dir)
	w.wantOnlyNamed()
}

// The same at full size, by the command itself: a first backup of 3 GiB is killed and goes
// on where it was.
func TestPartialKilledThreeGiB(t *testing.T) {
	if os.Getenv("SNAPFERRY_LONG") == "" {
		t.Skip("takes a minute and 10 GiB of disk; set SNAPFERRY_LONG=1")
	}
	var fs unix.Statfs_t
	check(t, unix.Statfs(t.TempDir(), &fs))
	if free := int64(fs.Bavail) * fs.Bsize; free < 12<<30 {
		t.Skipf("needs 12 GiB of free disk, there are %d MiB", free>>20)
	}
	dir, repo, bin := t.TempDir(), filepath.Join(t.TempDir(), "repo"), filepath.Join(t.TempDir(), "snapferry")
	if out, err := exec.Command("go", "build", "-o", bin, "./cmd/snapferry").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i := range 12 {
		check(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte(bulk(uint64(i), 256<<20)), 0o600))
	}
	args := []string{"backup", "--repo", repo, "--job", kvTask.Job, "--task", kvTask.Task, "--json", "kv=" + dir}
	first := exec.Command(bin, args...)
	check(t, first.Start())
	w := &world{t: t}
	ended := make(chan error, 1)
	go func() { ended <- first.Wait() }()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for w.progressOf(repo) == 0 {
		select {
		case <-look.C:
		case err := <-ended:
			t.Fatalf("it was done before it could be killed: %v", err)
		}
	}
	check(t, first.Process.Kill())
	<-ended
	kept := w.progressOf(repo)
	out, err := exec.Command(bin, args...).Output()
	check(t, err)
	var rep CommitReport
	check(t, json.Unmarshal(out, &rep))
	if s := rep.Stores["kv"]; kept < 1<<30 || s.BytesUploaded != 3<<30-kept {
		t.Fatalf("%d bytes were kept, and then %+v", kept, s)
	}
	back := filepath.Join(t.TempDir(), "back")
	if out, err := exec.Command(bin, "restore", "--repo", repo, "--job", kvTask.Job, "--task", kvTask.Task, "--to", back).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	wantSameTree(t, filepath.Join(back, "kv"), dir)
}

// progressOf reads how far the upload into a repository that is being made has come.
func (w *world) progressOf(repo string) int64 {
	d, err := fsblob.Open(repo, nil)
	if err != nil {
		return 0 // not there yet
	}
	blobs := blob.New(d, nil)
	info, err := ReadInfo(w.t.Context(), blobs)
	if err != nil {
		return 0
	}
	v := &view{id: kvTask, blobs: blobs, log: checkpoint.New(blobcp.New(blobs, info.ID), nil).Log(kvTask)}
	_, l, err := v.head(w.t.Context())
	if err != nil || l.State.Partial == nil {
		return 0
	}
	return l.State.Partial.Bytes
}
