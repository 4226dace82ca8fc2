package snapferry

import (
	"bytes"
	"errors"
	"io/fs"
	"testing"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
)

// lossy is a repository with two checkpoints, whose first pack both need.
func lossy(t *testing.T) (*world, *memblob.Driver, string) {
	t.Helper()
	mem := memblob.New()
	w := newWorldOn(t, mem)
	w.write(map[string]string{"a": bulk(1, 300_000), "b": bulk(2, 1000)})
	task := w.open()
	w.mustCommit(task, nil)
	w.write(map[string]string{"b": bulk(3, 1000)})
	w.mustCommit(task, nil)
	check(t, task.Close())
	return w, mem, w.chunkOf(w.state().Latest().ID, "a").Blob
}

// I1: what the store has lost is sent again, so the next checkpoint restores; with or
// without an identity cache, and also when the blob is there and too short.
func TestLostPackIsSentAgain(t *testing.T) {
	for name, harm := range map[string]func(*memblob.Driver, string) error{
		"absent": func(m *memblob.Driver, key string) error { return m.Delete(t.Context(), []string{key}) },
		"cut short": func(m *memblob.Driver, key string) error {
			return m.Corrupt(key, func(b []byte) []byte { return b[:100] })
		},
	} {
		for _, cache := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				w, mem, pack := lossy(t)
				if !cache {
					w.opts.CacheDir = ""
				}
				check(t, harm(mem, pack))
				warned := 0
				w.opts.Observer = &Observer{Warned: func(Warned) { warned++ }}
				rep := w.mustCommit(w.open(), nil)
				if s := rep.Stores["kv"]; s.BytesUploaded != 300_000 || warned == 0 {
					t.Errorf("%+v, %d warnings", s, warned)
				}
				wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
				next := w.mustCommit(w.open(), nil)
				if s := next.Stores["kv"]; s.BytesUploaded != 0 {
					t.Errorf("sent once more: %+v", s)
				}
			})
		}
	}
}

// Damaged bytes keep their length, so only Verify finds them; Full replaces them.
func TestFullReusesNothing(t *testing.T) {
	w, mem, pack := lossy(t)
	check(t, mem.Corrupt(pack, func(b []byte) []byte { return bytes.ToUpper(flip(b)) }))
	w.opts.Full = true
	rep := w.mustCommit(w.open(), nil)
	if s := rep.Stores["kv"]; s.BytesUploaded != 301_000 {
		t.Errorf("%+v", s)
	}
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
}

// A repository whose identity was lost is damage, not an empty place; and a place with
// other things in it is not made a repository.
func TestEnsureRefuses(t *testing.T) {
	w, mem, _ := lossy(t)
	check(t, mem.Delete(t.Context(), []string{repoKey}))
	before := w.keys("")
	if _, _, err := Ensure(t.Context(), w.blobs); !errors.Is(err, ErrCorrupt) {
		t.Errorf("identity lost: %v", err)
	}
	if after := w.keys(""); len(after) != len(before) {
		t.Errorf("%d objects, then %d", len(before), len(after))
	}

	other := blob.New(memblob.New(), nil)
	check(t, other.Put(t.Context(), "holiday.jpg", blob.Bytes(nil), blob.PutOptions{}))
	if _, _, err := Ensure(t.Context(), other); err == nil || errors.Is(err, fs.ErrExist) {
		t.Errorf("among other things: %v", err)
	}
	if _, err := other.Stat(t.Context(), repoKey); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a repository was made: %v", err)
	}
}
