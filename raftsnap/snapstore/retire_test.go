package snapstore

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

func simple(i uint64) tree { return tree{"f": []byte(fmt.Sprint("state at ", i))} }

// R9: the newest ones stay, what is pinned stays, what keep wants stays.
func TestRetire(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	var held []Held
	for i := range uint64(6) {
		held = append(held, makeHeld(t, s, i+1, simple(i)))
	}
	p1, err := s.Pin(held[1].ID, "a")
	must(t, err)
	p2, err := s.Pin(held[1].ID, "b")
	must(t, err)
	keep := func(id protocol.ID) bool { _, err := s.Get(id); return err == nil && id.Index == 3 }
	gone, err := s.Retire(keep)
	must(t, err)
	if want := []protocol.ID{held[0].ID, held[3].ID}; !slices.Equal(gone, want) {
		t.Errorf("removed %v, want %v", gone, want)
	}
	if got := indexes(s); !slices.Equal(got, []uint64{2, 3, 5, 6}) {
		t.Errorf("held %v", got)
	}
	only(t, s.dir, "LOCK", "quarantine", "receive", held[1].ID.String(), held[2].ID.String(), held[4].ID.String(), held[5].ID.String())
	must(t, p1.Close())
	if gone, err := s.Retire(nil); err != nil || !slices.Equal(gone, []protocol.ID{held[2].ID}) {
		t.Errorf("removed %v, %v", gone, err)
	}
	must(t, p2.Close())
	if gone, err := s.Retire(nil); err != nil || !slices.Equal(gone, []protocol.ID{held[1].ID}) {
		t.Errorf("removed %v, %v", gone, err)
	}
	sameTree(t, s, held[5].ID, simple(5))
}

// F42: a descriptor that was opened stays valid when the snapshot is removed, and a name is
// never used for other bytes.
func TestDescriptorOutlivesSnapshot(t *testing.T) {
	s := openStore(t, t.TempDir(), &Options{Retain: 1, Reserve: -1})
	held := makeHeld(t, s, 1, simple(1))
	p, err := s.Pin(held.ID, "n2")
	must(t, err)
	f, _, err := p.Open(0)
	must(t, err)
	must(t, p.Close())
	makeHeld(t, s, 2, simple(2))
	if gone, err := s.Retire(nil); err != nil || len(gone) != 1 {
		t.Fatal(gone, err)
	}
	data, err := io.ReadAll(f)
	if must(t, errors.Join(err, f.Close())); string(data) != "state at 1" {
		t.Errorf("read %q", data)
	}
}

// Pins and retention at the same time: a pin that was granted can read.
func TestRetireRace(t *testing.T) {
	s := openStore(t, t.TempDir(), &Options{Retain: 1, Reserve: -1})
	makeHeld(t, s, 1, simple(1))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				list := s.List()
				p, err := s.Pin(list[0].ID, "x")
				if err != nil {
					continue // retired
				}
				f, _, err := p.Open(0)
				if err != nil {
					t.Error(err)
				} else if data, err := io.ReadAll(f); err != nil || string(data) != fmt.Sprint("state at ", p.ID().Index) {
					t.Errorf("%q, %v", data, err)
				}
				if err := errors.Join(f.Close(), p.Close()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range uint64(40) {
		makeHeld(t, s, i+2, simple(i+2))
		if _, err := s.Retire(nil); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	_, err := s.Retire(nil)
	must(t, err)
	if got := indexes(s); !slices.Equal(got, []uint64{41}) {
		t.Errorf("held %v", got)
	}
}

// Quarantine takes a snapshot out at once, keeps a few with the reason, and leaves a pin
// what it has. The same snapshot can be had again.
func TestQuarantine(t *testing.T) {
	s, other := openStore(t, t.TempDir(), nil), openStore(t, t.TempDir(), nil)
	var held []Held
	for i := range uint64(4) {
		held = append(held, makeHeld(t, s, i+1, simple(i)))
	}
	p, err := s.Pin(held[0].ID, "n2")
	must(t, err)
	for i, h := range held {
		must(t, s.Quarantine(h.ID, fmt.Sprint("reason ", i)))
		f, _, err := p.Open(0)
		if i >= maxQuarantined { // removed, with everything in it
			wantErr(t, err, ErrCorrupt)
			continue
		}
		must(t, err)
		must(t, f.Close())
	}
	must(t, p.Close())
	if len(s.List()) != 0 {
		t.Errorf("%+v", s.List())
	}
	dir := filepath.Join(s.dir, "quarantine")
	only(t, dir, held[2].ID.String(), held[3].ID.String())
	why, err := os.ReadFile(filepath.Join(dir, held[3].ID.String(), "why"))
	if err != nil || string(why) != "reason 3\n" {
		t.Errorf("%q, %v", why, err)
	}
	if h := makeHeld(t, other, 4, simple(3)); h.ID != held[3].ID {
		t.Fatal("another id")
	}
	transfer(t, other, s, held[3].ID)
	sameTree(t, s, held[3].ID, simple(3))
	must(t, s.Quarantine(held[3].ID, "again"))
	only(t, dir, held[2].ID.String(), held[3].ID.String())
}

// Receipts that nobody works on do not pile up, in a run or over restarts.
func TestIdleReceiptsAreBounded(t *testing.T) {
	s, from := openStore(t, t.TempDir(), nil), openStore(t, t.TempDir(), &Options{Retain: 99})
	var busy *Receipt
	for i := range uint64(maxIdle + 3) {
		held := makeHeld(t, from, i+1, simple(i))
		r, err := s.Receive(t.Context(), manifestOf(t, from, held.ID))
		must(t, err)
		if busy == nil {
			busy = r
			continue
		}
		must(t, r.Close())
	}
	_, err := s.Retire(nil)
	must(t, err)
	list, err := os.ReadDir(filepath.Join(s.dir, "receive"))
	must(t, err)
	if len(list) != maxIdle+1 || list[0].Name() != busy.Held().ID.String() {
		t.Errorf("%d receipts, first %s", len(list), list[0].Name())
	}
	must(t, busy.Close())
	must(t, s.Close())
	s = openStore(t, s.dir, nil)
	list, err = os.ReadDir(filepath.Join(s.dir, "receive"))
	if err != nil || len(list) != maxIdle {
		t.Errorf("%d receipts, %v", len(list), err)
	}
}
