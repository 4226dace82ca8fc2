package snapferry

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
)

// P10: readers that lose what they read.

// race is a world whose owner commits and cleans up, without grace and keeping one
// checkpoint, just when a reader is about to read a certain blob of the newest.
type race struct {
	*world
	hook  *hookDriver
	mem   *memblob.Driver
	task  *Task
	last  *CommitReport
	part  func() string // the blob that is lost
	lost  int           // how often the race was lost
	most  int           // how often it shall be
	inner bool
}

func newRace(t *testing.T, most int) *race {
	r := &race{mem: memblob.New(), most: most}
	r.hook = &hookDriver{Driver: r.mem}
	r.world = newWorldOn(t, r.hook)
	r.opts.KeepLast, r.opts.Grace, r.opts.PackSize = 1, -1, minPackSize
	r.write(map[string]string{"kept": bulk(1, 300_000), "moves": bulk(2, 50_000)})
	r.task = r.open()
	r.last = r.mustCommit(r.task, nil)
	r.part = func() string { return r.chunkOf(r.last.Checkpoint, "moves").Blob }
	return r
}

// begin arms the race; to be called once the reader is at hand.
func (r *race) begin() {
	doomed := r.part()
	r.hook.get = func(key string) {
		if r.inner || key != doomed || r.lost >= r.most {
			return
		}
		r.inner = true
		r.advance()
		doomed = r.part()
		r.inner = false
	}
}

// advance commits a newer checkpoint and deletes the older one.
func (r *race) advance() {
	r.t.Helper()
	r.lost++
	r.write(map[string]string{"moves": bulk(uint64(100+r.lost), 50_000)})
	r.last = r.mustCommit(r.task, nil)
	r.gc(GCOptions{})
}

// one makes blob reads come one after the other.
func (r *race) one() *Repo {
	r.t.Helper()
	repo, err := OpenRepo(r.t.Context(), r.blobs, r.cps, &RepoOptions{Workers: 1})
	check(r.t, err)
	return repo
}

// A restore of the latest that loses it plans again with the newest and fetches nothing
// twice.
func TestReplanLatest(t *testing.T) {
	for most := 1; most <= replans; most++ {
		r := newRace(t, most)
		repo, out := r.one(), filepath.Join(t.TempDir(), "kv")
		r.begin()
		rep, err := repo.Restore(t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
		if check(t, err); rep.Checkpoint != r.last.Checkpoint || r.lost != most {
			t.Fatalf("restored %s, newest is %s; lost %d times", rep.Checkpoint, r.last.Checkpoint, r.lost)
		}
		if s := rep.Stores["kv"]; s.BytesFetched != 50_000 || s.BytesReused != 300_000 {
			t.Errorf("lost %d times: %+v", most, s)
		}
		wantSameTree(t, out, r.dir)
		for _, k := range r.kindsInLog() {
			if k == "hold" {
				t.Error("a hold after few re-plans")
			}
		}
		left, err := os.ReadDir(filepath.Dir(out))
		if check(t, err); len(left) != 1 {
			t.Errorf("staging stays: %v", left)
		}
	}
}

func (w *world) kindsInLog() (kinds []string) {
	w.t.Helper()
	log := w.cps.Log(kvTask)
	for slot := uint64(1); ; slot++ {
		e, err := log.Get(w.t.Context(), slot)
		if errors.Is(err, fs.ErrNotExist) {
			return kinds
		}
		check(w.t, err)
		kinds = append(kinds, string(e.Kind))
	}
}

// A restore that was beaten twice holds on to what it reads, and lets go at the end.
func TestReplanHold(t *testing.T) {
	r := newRace(t, replans+2)
	repo, out := r.one(), filepath.Join(t.TempDir(), "kv")
	r.begin()
	rep, err := repo.Restore(t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
	check(t, err)
	if r.lost != replans+2 || rep.Checkpoint == r.last.Checkpoint {
		t.Fatalf("lost %d times, restored %s", r.lost, rep.Checkpoint)
	}
	got := strings.Join(r.kindsInLog(), " ")
	if strings.Count(got, "hold") != 1 || !strings.HasSuffix(got, "hold commit release") {
		t.Fatalf("log: %s", got)
	}
	data, err := os.ReadFile(filepath.Join(out, "moves"))
	if check(t, err); string(data) != bulk(uint64(100+replans+1), 50_000) {
		t.Fatal("not the checkpoint that was held")
	}
	if s := r.state(); len(s.Holds) != 0 || len(s.Live()) != 1 {
		t.Fatalf("holds %v, live %v", s.Holds, ids(s.Live()))
	}
	r.wantOnlyNamed()
	r.wantSound()
}

// A failed restore lets go too.
func TestReplanHoldIsReleasedOnFailure(t *testing.T) {
	r := newRace(t, replans+2)
	repo := r.one()
	target := filepath.Join(t.TempDir(), "kv")
	r.begin()
	inner, broken := r.hook.get, false
	r.hook.get = func(key string) {
		inner(key)
		if r.inner || r.lost < replans+2 || broken {
			return
		}
		r.inner = true
		if key == r.heldPart() {
			check(t, r.mem.Corrupt(key, flip))
			broken = true
		}
		r.inner = false
	}
	_, err := repo.Restore(t.Context(), kvTask, At{}, map[string]string{"kv": target}, nil)
	if !errors.Is(err, ErrCorrupt) {
		t.Fatalf("restore = %v", err)
	}
	if len(r.state().Holds) != 0 {
		t.Fatalf("holds %v", r.state().Holds)
	}
}

// heldPart is the blob of the file that moves in the checkpoint that is held.
func (r *race) heldPart() string {
	if h := r.state().Holds; len(h) > 0 {
		v := &view{id: kvTask, blobs: blob.New(r.mem, nil)}
		b, err := v.checkpointBlob(r.t.Context(), &h[0].Checkpoint)
		check(r.t, err)
		_, x, err := v.index(r.t.Context(), b.Stores["kv"].Index)
		check(r.t, err)
		e, _ := x.Lookup("moves")
		return e.Chunks[0].Blob
	}
	return ""
}

// A checkpoint that was asked for by name is not silently another one.
func TestReplanAt(t *testing.T) {
	r := newRace(t, 1)
	out := filepath.Join(t.TempDir(), "kv")
	id := r.last.Checkpoint
	r.begin()
	_, err := r.one().Restore(t.Context(), kvTask, at(t, id), map[string]string{"kv": out}, nil)
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "pruned meanwhile") || !strings.Contains(err.Error(), id) {
		t.Fatalf("restore = %v", err)
	}
	if _, err := os.Lstat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal("a target was made")
	}
	_, err = r.one().Restore(t.Context(), kvTask, at(t, id), map[string]string{"kv": out}, nil)
	if !errors.Is(err, ErrNotFound) {
		t.Fatalf("restore of what is gone = %v", err)
	}
}

// The index and the checkpoint blob may be what is lost.
func TestReplanEveryPart(t *testing.T) {
	for name, part := range map[string]func(r *race) string{
		"index": func(r *race) string {
			m, err := parseMarker(r.task.bases["kv"].marker.String())
			check(r.t, err)
			return m.Key
		},
		"checkpoint": func(r *race) string { return blobPrefix(kvTask) + r.state().Latest().Blob.Key },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRace(t, replans+2)
			r.part = func() string { return part(r) }
			out := filepath.Join(t.TempDir(), "kv")
			r.begin()
			_, err := r.one().Restore(t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
			check(t, err)
			if r.lost < replans+1 {
				t.Fatalf("lost %d times", r.lost)
			}
			r.wantOnlyNamed()
		})
	}
}

// A blob that is absent though its checkpoint is retained is damage: blob and file are
// named, at every try.
func TestReplanDamaged(t *testing.T) {
	r := newRace(t, 0)
	key := r.part()
	check(t, r.mem.Delete(t.Context(), []string{key}))
	out := filepath.Join(t.TempDir(), "kv")
	for _, a := range []At{{}, at(t, r.last.Checkpoint)} {
		_, err := r.one().Restore(t.Context(), kvTask, a, map[string]string{"kv": out}, nil)
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), "moves") {
			t.Fatalf("restore = %v, want ErrCorrupt that names %s", err, key)
		}
	}
	rep, err := r.one().Verify(t.Context(), VerifyOptions{})
	check(t, err)
	if len(rep.Missing) != 1 || rep.Missing[0].Blob != key || rep.Missing[0].Path != "moves" {
		t.Fatalf("verify = %+v", rep)
	}
}

// A store that keeps deleted versions is asked for them before anything is called damaged.
func TestReplanDeletedVersions(t *testing.T) {
	for _, part := range []string{"pack", "index", "checkpoint"} {
		t.Run(part, func(t *testing.T) {
			d := memblob.NewVersioned()
			w := newWorldOn(t, d)
			w.write(map[string]string{"f": bulk(1, 10_000)})
			task := w.open()
			rep := w.mustCommit(task, nil)
			key := map[string]string{
				"pack":       w.chunkOf(rep.Checkpoint, "f").Blob,
				"index":      task.bases["kv"].marker.Key,
				"checkpoint": blobPrefix(kvTask) + w.state().Latest().Blob.Key,
			}[part]
			check(t, d.Delete(t.Context(), []string{key}))
			wantSameTree(t, w.restore(""), w.dir)
		})
	}
}

// verify and list beside an owner that commits and deletes see no damage that is none.
func TestReplanReaders(t *testing.T) {
	for name, read := range map[string]func(r *Repo, t *testing.T) error{
		"verify": func(r *Repo, t *testing.T) error {
			rep, err := r.Verify(t.Context(), VerifyOptions{ReadData: true})
			if err == nil && !rep.OK {
				err = fmt.Errorf("%+v", rep)
			}
			return err
		},
		"list": func(r *Repo, t *testing.T) error { _, err := r.List(t.Context(), ListFilter{}); return err },
		"show": func(r *Repo, t *testing.T) error { _, err := r.Show(t.Context(), kvTask, At{}); return err },
		"gc": func(r *Repo, t *testing.T) error {
			_, err := r.GC(t.Context(), GCOptions{OlderThan: time.Hour})
			return err
		},
		"open": func(r *Repo, t *testing.T) error {
			_, err := DryRun(t.Context(), kvTask, r.blobs, r.checkpoints, newWorld(t).sources(), nil)
			return err
		},
	} {
		for _, part := range []string{"checkpoint", "index"} {
			t.Run(name+" "+part, func(t *testing.T) {
				r := newRace(t, 2)
				r.part = func() string {
					if part == "index" {
						return r.task.bases["kv"].marker.Key
					}
					return blobPrefix(kvTask) + r.state().Latest().Blob.Key
				}
				r.begin()
				if err := read(r.one(), t); err != nil {
					t.Errorf("after %d lost races: %v", r.lost, err)
				}
				r.wantSound()
			})
		}
	}
}
