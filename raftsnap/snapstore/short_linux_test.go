package snapstore

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is here of a transfer that does not fit stays as long as the reserve is there; then
// others need the space more.
func TestStagingGivesWay(t *testing.T) {
	dir := mount(t, "size=32m,mode=0755")
	from := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, from, 10, tree{"x": noise(1, 20<<20)})
	s := openStore(t, dir, &Options{Reserve: 4 << 20})
	r, err := s.Receive(t.Context(), manifestOf(t, from, held.ID))
	must(t, err)
	piece := r.Missing()[0]
	data, err := from.Chunk(piece.Digest)
	must(t, err)
	must(t, r.Put(piece, data))
	must(t, r.Close())

	staging, filler := filepath.Join(dir, "receive", held.ID.String()), filepath.Join(dir, "filler")
	for _, c := range []struct {
		filled int
		stays  bool
	}{{18 << 20, true}, {25 << 20, false}} {
		must(t, os.WriteFile(filler, make([]byte, c.filled), 0o644))
		_, err := s.Receive(t.Context(), manifestOf(t, from, held.ID))
		wantErr(t, err, ErrNoSpace)
		if _, err := os.Stat(staging); (err == nil) != c.stays {
			t.Errorf("with %d bytes taken by others: %v, want that it stays: %v", c.filled, err, c.stays)
		}
	}
	must(t, os.Remove(filler))
	fetched, reused := transfer(t, from, s, held.ID)
	if fetched != held.Bytes || reused != 0 {
		t.Errorf("fetched %d, reused %d", fetched, reused)
	}
}

// A receipt tells of what waits for the disk, also in Commit, and of each end.
func TestSyncing(t *testing.T) {
	from := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, from, 1, small())
	var r *Receipt
	var silent []string
	last := int64(-1)
	s := openStore(t, t.TempDir(), &Options{Reserve: -1, around: func(op, name string, do func() error) error {
		if r != nil && strings.HasPrefix(op, "sync") {
			if done, busy := r.Syncing(); !busy || done < last {
				silent = append(silent, op+" "+name)
			} else {
				last = done
			}
		}
		return do()
	}})
	started, err := s.Receive(t.Context(), manifestOf(t, from, held.ID))
	must(t, err)
	for _, p := range started.Missing() {
		data, err := from.Chunk(p.Digest)
		must(t, err)
		must(t, started.Put(p, data))
	}
	_ = started.flush.Wait() // the hook is for one goroutine
	r = started
	_, err = r.Commit(t.Context())
	must(t, err)
	if done, busy := r.Syncing(); len(silent) > 0 || busy || done == 0 || last <= 0 {
		t.Errorf("silent in %q; at the end %d, %v, last seen %d", silent, done, busy, last)
	}
}
