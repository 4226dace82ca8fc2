package snapstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// A snapshot that was made is there with its metadata (R1), also after a restart, and so is
// one that was received: the same files, the same id.
func TestMakeAndReceive(t *testing.T) {
	dir := t.TempDir()
	a, b := openStore(t, filepath.Join(dir, "a"), nil), openStore(t, filepath.Join(dir, "b"), nil)
	held := makeHeld(t, a, 10, small())
	sameTree(t, a, held.ID, small())
	if held.Bytes != 670_005 || held.ID.Term != 3 || held.ID.Index != 10 {
		t.Errorf("made %+v", held)
	}
	if diff := cmp.Diff(metaAt(10), held.Meta); diff != "" {
		t.Error(diff)
	}
	fetched, reused := transfer(t, a, b, held.ID)
	if fetched != 370_005 || reused != 0 { // the chunk of a and z came once
		t.Errorf("fetched %d, reused %d", fetched, reused)
	}
	sameTree(t, b, held.ID, small())
	for _, s := range []*Store{a, b} {
		if diff := cmp.Diff([]Held{held}, s.List()); diff != "" {
			t.Error(diff)
		}
		must(t, s.Close())
		again := openStore(t, s.dir, nil)
		if diff := cmp.Diff([]Held{held}, again.List()); diff != "" {
			t.Error(diff)
		}
		sameTree(t, again, held.ID, small())
		only(t, s.dir, "LOCK", "quarantine", "receive", held.ID.String())
		only(t, filepath.Join(s.dir, held.ID.String()), "data", "manifest", "marks")
	}
}

// The id depends on the bytes, names and metadata only: who made the files, when, and with
// which rights does not count (R10).
func TestSameStateSameID(t *testing.T) {
	a, b := openStore(t, t.TempDir(), nil), openStore(t, t.TempDir(), nil)
	first := makeHeld(t, a, 10, small())
	d, err := b.Draft()
	must(t, err)
	small().build(t, d.Dir())
	age(t, d.Dir())
	must(t, os.Chmod(filepath.Join(d.Dir(), "a"), 0o600))
	second, err := d.Commit(t.Context(), metaAt(10), nil)
	must(t, err)
	if first.ID != second.ID {
		t.Errorf("%v, %v", first.ID, second.ID)
	}
	changed := small()
	changed["b"] = []byte{0}
	if third := makeHeld(t, b, 10, changed); third.ID == first.ID {
		t.Error("other bytes have the same id")
	}
	// The same snapshot made twice is one.
	if again := makeHeld(t, a, 10, small()); again.ID != first.ID || len(a.List()) != 1 {
		t.Errorf("made again: %+v of %+v", again, a.List())
	}
	only(t, a.dir, "LOCK", "quarantine", "receive", first.ID.String())
}

// Sizes around the borders of chunks, and many small files.
func TestSizes(t *testing.T) {
	tr := tree{}
	for _, n := range []int{0, 1, ChunkSize - 1, ChunkSize, ChunkSize + 1, 2*ChunkSize + 7} {
		tr[fmt.Sprintf("size/%d", n)] = noise(uint64(n), n)
	}
	for i := range 1000 {
		tr[fmt.Sprintf("many/%03d/%d", i%50, i)] = noise(uint64(i), i*3)
	}
	dir := t.TempDir()
	a, b := openStore(t, filepath.Join(dir, "a"), nil), openStore(t, filepath.Join(dir, "b"), nil)
	held := makeHeld(t, a, 1, tr)
	transfer(t, a, b, held.ID)
	sameTree(t, b, held.ID, tr)
	m, err := DecodeManifest(manifestOf(t, b, held.ID))
	must(t, err)
	e, _ := m.Index.Lookup(fmt.Sprintf("size/%d", ChunkSize+1))
	if len(e.Chunks) != 2 || e.Chunks[1].Length != 1 {
		t.Errorf("%+v", e.Chunks)
	}
}

// What a draft links from an earlier snapshot is not read again; a new file is.
func TestDraftReadsNoLinks(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	state := filepath.Join(t.TempDir(), "state")
	tree{"sst1": noise(1, 1<<20), "sst2": noise(2, 1<<20)}.build(t, state)
	age(t, state)
	commit := func(index uint64) (Held, int64) {
		t.Helper()
		d, err := s.Draft()
		must(t, err)
		must(t, os.Mkdir(d.Dir(), 0o755))
		list, err := os.ReadDir(state)
		must(t, err)
		for _, e := range list {
			must(t, os.Link(filepath.Join(state, e.Name()), filepath.Join(d.Dir(), e.Name())))
		}
		m := &meter{}
		held, err := d.Commit(t.Context(), metaAt(index), m.work())
		must(t, err)
		return held, m.take()
	}
	if _, read := commit(1); read != 2<<20 {
		t.Errorf("the first reads %d bytes", read)
	}
	must(t, os.Remove(filepath.Join(state, "sst1")))
	tree{"sst3": noise(3, 1000)}.build(t, state)
	second, read := commit(2)
	if read != 1000 {
		t.Errorf("the second reads %d bytes", read)
	}
	sameTree(t, s, second.ID, tree{"sst2": noise(2, 1<<20), "sst3": noise(3, 1000)})

	// After a restart too.
	must(t, s.Close())
	s = openStore(t, s.dir, nil)
	if _, read := commit(3); read > 1000 { // sst3 was young when it was read
		t.Errorf("the third reads %d bytes", read)
	}
}

// F41: a linked file that is written to in place spoils the snapshot. The draft that comes
// next has the new bytes, and Verify and Scrub find the old one damaged.
func TestWriteInPlaceIsNoticed(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	state := filepath.Join(t.TempDir(), "log")
	must(t, os.WriteFile(state, noise(1, 50_000), 0o644))
	age(t, filepath.Dir(state))
	commit := func(index uint64) Held {
		d, err := s.Draft()
		must(t, err)
		must(t, os.Mkdir(d.Dir(), 0o755))
		must(t, os.Link(state, filepath.Join(d.Dir(), "log")))
		held, err := d.Commit(t.Context(), metaAt(index), nil)
		must(t, err)
		return held
	}
	first := commit(1)
	must(t, s.Verify(t.Context(), first.ID, nil))
	flip(t, state, 7)
	second := commit(2)
	want := noise(1, 50_000)
	want[7] ^= 0x40
	sameTree(t, s, second.ID, tree{"log": want})
	wantErr(t, s.Verify(t.Context(), first.ID, nil), ErrCorrupt)
	damaged, err := s.Scrub(t.Context(), nil)
	must(t, err)
	if !slices.Equal(damaged, []protocol.ID{first.ID}) {
		t.Errorf("scrub found %v", damaged)
	}
}

// A file that was young when it was read is read again by the next draft: a write within
// the same tick of the clock might not show.
func TestYoungFilesAreReadAgain(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	first := makeHeld(t, s, 1, tree{"f": []byte("before")})
	dir, err := s.Dir(first.ID)
	must(t, err)
	f := filepath.Join(dir, "f")
	info, err := os.Stat(f)
	must(t, err)
	d, err := s.Draft()
	must(t, err)
	must(t, os.Mkdir(d.Dir(), 0o755))
	must(t, os.Link(f, filepath.Join(d.Dir(), "f")))
	must(t, os.WriteFile(f, []byte("behind"), 0o644))
	must(t, os.Chtimes(f, info.ModTime(), info.ModTime()))
	second, err := d.Commit(t.Context(), metaAt(2), nil)
	must(t, err)
	sameTree(t, s, second.ID, tree{"f": []byte("behind")})
	wantErr(t, s.Verify(t.Context(), first.ID, nil), ErrCorrupt)
}

// A draft holds files and directories; everything else is refused by name, and nothing of
// it becomes a snapshot.
func TestDraftRefuses(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	for what, make := range map[string]func(name string) error{
		"symbolic link": func(name string) error { return os.Symlink("x", name) },
		"named pipe":    func(name string) error { return syscall.Mkfifo(name, 0o644) },
		"directory":     nil, // there is none at all
	} {
		d, err := s.Draft()
		must(t, err)
		if make != nil {
			must(t, os.Mkdir(d.Dir(), 0o755))
			must(t, make(filepath.Join(d.Dir(), "odd")))
		}
		if _, err = d.Commit(t.Context(), metaAt(1), nil); err == nil {
			t.Errorf("%s: no error", what)
		}
		must(t, d.Abort())
		must(t, d.Abort())
	}
	if len(s.List()) > 0 {
		t.Errorf("%+v", s.List())
	}
	only(t, s.dir, "LOCK", "quarantine", "receive")
}

// A file that changes while it is read makes the commit fail; the draft stays usable.
func TestDraftChanges(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	for what, change := range map[string]func(name string) error{
		"shorter": func(name string) error { return os.Truncate(name, 10) },
		"longer":  func(name string) error { return os.Truncate(name, 1<<20) },
	} {
		d, err := s.Draft()
		must(t, err)
		tree{"f": noise(1, 3*readSize)}.build(t, d.Dir())
		n := 0
		w := &Work{Wait: func(context.Context, int) error {
			if n++; n == 2 {
				return change(filepath.Join(d.Dir(), "f"))
			}
			return nil
		}}
		if _, err := d.Commit(t.Context(), metaAt(1), w); !errors.Is(err, errChanged) {
			t.Errorf("%s: %v", what, err)
		}
		_, err = d.Commit(t.Context(), metaAt(1), nil)
		must(t, err)
		if _, err = d.Commit(t.Context(), metaAt(1), nil); !errors.Is(err, ErrClosed) {
			t.Errorf("second commit: %v", err)
		}
		must(t, d.Abort()) // no longer its business
	}
	if len(s.List()) != 2 {
		t.Errorf("%+v", s.List())
	}
}

// The lock: a second Open is refused until the first one closes.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, nil)
	_, err := Open(dir, nil)
	wantErr(t, err, ErrBusy)
	must(t, s.Close())
	must(t, openStore(t, dir, nil).Close())
	_, err = s.Draft()
	wantErr(t, err, ErrClosed)
	_, err = s.Get(protocol.ID{})
	wantErr(t, err, ErrClosed)
	_, err = s.Retire(nil)
	wantErr(t, err, ErrClosed)
	if _, err = Open(dir, &Options{Retain: -1}); err == nil {
		t.Error("a negative retention is taken")
	}
}

// What is not held is fs.ErrNotExist, whoever asks.
func TestUnknown(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	id := protocol.ID{Term: 1, Index: 1}
	_, err := s.Get(id)
	wantErr(t, err, fs.ErrNotExist)
	_, err = s.Dir(id)
	wantErr(t, err, fs.ErrNotExist)
	_, err = s.Pin(id, "test")
	wantErr(t, err, fs.ErrNotExist)
	_, err = s.Chunk(snapshot.Digest{1})
	wantErr(t, err, fs.ErrNotExist)
	wantErr(t, s.Verify(t.Context(), id, nil), fs.ErrNotExist)
	wantErr(t, s.Quarantine(id, "x"), fs.ErrNotExist)
}

// Open sweeps what died, keeps what can be gone on with, and leaves alone what is not ours.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, nil)
	held := makeHeld(t, s, 5, small())
	must(t, s.Close())
	name := held.ID.String()
	tree{
		"draft-x/data/f": []byte("f"), "drop-y/data/f": nil, "foreign/f": []byte("mine"), "note.txt": []byte("mine"),
		"receive/nonsense/f": nil, "receive/" + (protocol.ID{Term: 1, Index: 1}).String() + "/manifest": []byte("no"),
		(protocol.ID{Term: 2, Index: 2}).String() + "/data/f": []byte("no manifest"), name + "/journal": []byte("x"),
	}.build(t, dir)
	s = openStore(t, dir, nil)
	only(t, dir, "LOCK", "quarantine", "receive", name, "foreign", "note.txt")
	only(t, filepath.Join(dir, "receive"))
	only(t, filepath.Join(dir, "quarantine"), (protocol.ID{Term: 2, Index: 2}).String())
	only(t, filepath.Join(dir, name), "data", "manifest", "marks")
	sameTree(t, s, held.ID, small())
	why, err := os.ReadFile(filepath.Join(dir, "quarantine", (protocol.ID{Term: 2, Index: 2}).String(), "why"))
	if err != nil || len(why) < 10 {
		t.Errorf("%q, %v", why, err)
	}
}

// At Open each damaged snapshot is set aside for itself, and the others are there.
func TestOpenIsolatesDamage(t *testing.T) {
	for what, damage := range map[string]func(dir string) error{
		"manifest flipped":   func(dir string) error { flip(t, filepath.Join(dir, "manifest"), 300); return nil },
		"manifest cut":       func(dir string) error { return os.Truncate(filepath.Join(dir, "manifest"), 100) },
		"manifest missing":   func(dir string) error { return os.Remove(filepath.Join(dir, "manifest")) },
		"file missing":       func(dir string) error { return os.Remove(filepath.Join(dir, "data/a")) },
		"file cut":           func(dir string) error { return os.Truncate(filepath.Join(dir, "data/a"), 1) },
		"file too many":      func(dir string) error { return os.WriteFile(filepath.Join(dir, "data/a2"), nil, 0o644) },
		"last file too many": func(dir string) error { return os.WriteFile(filepath.Join(dir, "data/zz"), nil, 0o644) },
		"link too many":      func(dir string) error { return os.Symlink("a", filepath.Join(dir, "data/a2")) },
		"directory for file": func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "data/b")), os.Mkdir(filepath.Join(dir, "data/b"), 0o755))
		},
		"all data missing": func(dir string) error { return os.RemoveAll(filepath.Join(dir, "data")) },
	} {
		t.Run(what, func(t *testing.T) {
			s := openStore(t, t.TempDir(), nil)
			first, second := makeHeld(t, s, 5, small()), makeHeld(t, s, 6, small())
			must(t, s.Close())
			must(t, damage(filepath.Join(s.dir, first.ID.String())))
			s = openStore(t, s.dir, nil)
			if got := indexes(s); !slices.Equal(got, []uint64{6}) {
				t.Fatalf("held %v", got)
			}
			sameTree(t, s, second.ID, small())
			only(t, filepath.Join(s.dir, "quarantine"), first.ID.String())
		})
	}
}

// A flipped bit in any file or in the manifest is found by Verify, and by whoever reads the
// chunk or the manifest; the other copy of the chunk is then given.
func TestBitFlips(t *testing.T) {
	files := []string{"data/a", "data/d/e/f", "data/d/g", "manifest"}
	for _, file := range files {
		s := openStore(t, t.TempDir(), nil)
		held := makeHeld(t, s, 5, small())
		name := filepath.Join(s.dir, held.ID.String(), file)
		flip(t, name, 2)
		wantErr(t, s.Verify(t.Context(), held.ID, nil), ErrCorrupt)
		flip(t, name, 2)
		must(t, s.Verify(t.Context(), held.ID, nil))
	}
	s := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, s, 5, small())
	dir := filepath.Join(s.dir, held.ID.String())
	d := snapshot.Sum(small()["a"])
	flip(t, filepath.Join(dir, "data/a"), 2)
	if p, err := s.Chunk(d); err != nil || snapshot.Sum(p) != d { // z has it as well
		t.Errorf("chunk: %v", err)
	}
	flip(t, filepath.Join(dir, "data/z"), 2)
	_, err := s.Chunk(d)
	wantErr(t, err, ErrCorrupt)
	flip(t, filepath.Join(dir, "manifest"), 100)
	_, err = s.Pin(held.ID, "test")
	wantErr(t, err, ErrCorrupt)
}

// Names that do not belong there are damage, though every digest is right.
func TestVerifyComparesNames(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, s, 5, small())
	dir, err := s.Dir(held.ID)
	must(t, err)
	for _, make := range []func(name string) error{
		func(name string) error { return os.WriteFile(name, nil, 0o644) },
		func(name string) error { return os.Mkdir(name, 0o755) },
		func(name string) error { return os.Symlink("a", name) },
	} {
		name := filepath.Join(dir, "d/extra")
		must(t, make(name))
		wantErr(t, s.Verify(t.Context(), held.ID, nil), ErrCorrupt)
		must(t, os.Remove(name))
	}
	must(t, os.Remove(filepath.Join(dir, "b")))
	wantErr(t, s.Verify(t.Context(), held.ID, nil), ErrCorrupt)
}

// Verify reads a file once, Scrub reads it always, and a damage that leaves size and times
// alone is Scrub's to find.
func TestVerifyAndScrub(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	d, err := s.Draft()
	must(t, err)
	small().build(t, d.Dir())
	age(t, d.Dir())
	held, err := d.Commit(t.Context(), metaAt(4), nil)
	must(t, err)
	m := &meter{}
	verify := func(want int64) {
		t.Helper()
		must(t, s.Verify(t.Context(), held.ID, m.work()))
		if got := m.take(); got != want {
			t.Errorf("verify read %d bytes, want %d", got, want)
		}
	}
	verify(0) // Commit has read them
	must(t, os.Remove(filepath.Join(s.dir, held.ID.String(), marksName)))
	must(t, s.Close())
	s = openStore(t, s.dir, nil)
	verify(670_005)
	verify(0)
	must(t, s.Close())
	s = openStore(t, s.dir, nil)
	verify(0) // written down

	victim := filepath.Join(s.dir, held.ID.String(), "data/a")
	info, err := os.Stat(victim)
	must(t, err)
	flip(t, victim, 1000)
	must(t, os.Chtimes(victim, info.ModTime(), info.ModTime()))
	verify(0)
	damaged, err := s.Scrub(t.Context(), m.work())
	if err != nil || !slices.Equal(damaged, []protocol.ID{held.ID}) {
		t.Fatalf("scrub: %v, %v", damaged, err)
	}
	wantErr(t, s.Verify(t.Context(), held.ID, nil), ErrCorrupt) // now it is known
	must(t, s.Quarantine(held.ID, "scrub"))
	if damaged, err := s.Scrub(t.Context(), nil); damaged != nil || err != nil {
		t.Errorf("scrub of nothing: %v, %v", damaged, err)
	}
}

// Scrub reads what snapshots share once, and ends with its context.
func TestScrubShares(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	first := makeHeld(t, s, 1, small())
	from, err := s.Dir(first.ID)
	must(t, err)
	d, err := s.Draft()
	must(t, err)
	must(t, os.Mkdir(d.Dir(), 0o755))
	must(t, os.Link(filepath.Join(from, "a"), filepath.Join(d.Dir(), "renamed")))
	_, err = d.Commit(t.Context(), metaAt(2), nil)
	must(t, err)
	m := &meter{}
	if damaged, err := s.Scrub(t.Context(), m.work()); len(damaged) > 0 || err != nil {
		t.Fatal(damaged, err)
	}
	if got := m.take(); got != 670_005 {
		t.Errorf("read %d bytes", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w := &Work{Wait: func(context.Context, int) error { cancel(); return nil }}
	_, err = s.Scrub(ctx, w)
	wantErr(t, err, context.Canceled)
}

// A pin gives the manifest and the files, and nothing that is none.
func TestPin(t *testing.T) {
	s := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, s, 5, small())
	p, err := s.Pin(held.ID, "n2")
	must(t, err)
	m, err := DecodeManifest(p.Manifest())
	must(t, err)
	if m.ID != held.ID || p.ID() != held.ID || p.Holder() != "n2" {
		t.Errorf("%v, %v, %s", m.ID, p.ID(), p.Holder())
	}
	for i := range m.Index.Entries {
		f, size, err := p.Open(i)
		if e := &m.Index.Entries[i]; e.Type == snapshot.Dir {
			wantErr(t, err, fs.ErrNotExist)
			continue
		}
		must(t, err)
		data, err := io.ReadAll(f)
		must(t, errors.Join(err, f.Close()))
		if want := small()[m.Index.Entries[i].Path]; string(data) != string(want) || size != int64(len(want)) {
			t.Errorf("%s differs", m.Index.Entries[i].Path)
		}
	}
	for _, n := range []int{-1, len(m.Index.Entries)} {
		_, _, err := p.Open(n)
		wantErr(t, err, fs.ErrNotExist)
	}
	must(t, os.Truncate(filepath.Join(s.dir, held.ID.String(), "data/a"), 3))
	_, _, err = p.Open(0)
	wantErr(t, err, ErrCorrupt)
	must(t, p.Close())
	must(t, p.Close())
	_, _, err = p.Open(0)
	wantErr(t, err, ErrClosed)
}
