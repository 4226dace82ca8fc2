package snapferry

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/source"
)

// P12: a pack of which less than half is live is stored again by the owner, and dies when
// nothing names it any more.

// garden is a store in memory that changes file by file.
type garden struct {
	*lab
	r     *rand.Rand
	now   tree
	trees map[string]tree // committed, by offset n
	n     int
}

func newGarden(t *testing.T, files, size int) *garden {
	g := &garden{lab: newLab(t), r: rand.New(rand.NewPCG(4, 2)), now: tree{}, trees: map[string]tree{}}
	for i := range files {
		g.now[fmt.Sprintf("f%02d", i)] = randomBytes(g.r, size)
	}
	return g
}

// change gives other bytes to files.
func (g *garden) change(from, to, size int) {
	for i := from; i < to; i++ {
		g.now[fmt.Sprintf("f%02d", i)] = randomBytes(g.r, size)
	}
}

func (g *garden) commit(p *process, task *Task) *CommitReport {
	g.t.Helper()
	n := fmt.Sprint(g.n)
	g.n++
	g.trees[n] = g.now.with(nil)
	return p.mustCommit(task, g.now, n)
}

// sound checks that every checkpoint that is kept is what was committed, byte for byte (I1).
func (g *garden) sound() {
	g.t.Helper()
	for _, c := range g.list() {
		g.wantTree(&c, "kv", g.trees[c.Offsets["n"]])
	}
}

// rewritten returns what upkeep stored again for a commit, which must have sent uploaded bytes.
func (g *garden) rewritten(rep *CommitReport, uploaded int64) int64 {
	g.t.Helper()
	s := rep.Stores["kv"]
	if s.BytesUploaded != uploaded || s.BytesStored != uploaded {
		g.t.Fatalf("report %+v, want %d bytes uploaded", s, uploaded)
	}
	return s.BytesRewritten
}

const leaf = 10 << 10 // files of a garden; six of them are in a pack

// A pack loses most of its content over a history of commits. As long as a checkpoint
// that is retained uses half of it, it stays; then what is left moves, and the pack dies.
func TestP12SparsePackIsRewritten(t *testing.T) {
	g := newGarden(t, 6, leaf)
	p := g.process(t, nil)
	task := p.mustOpen()
	g.commit(p, task)
	old := g.packs()
	if len(old) != 1 {
		t.Fatalf("packs %v", old)
	}
	g.change(0, 2, leaf)
	g.rewritten(g.commit(p, task), 2*leaf) // 4 of 6 live
	g.change(2, 4, leaf)
	if n := g.rewritten(g.commit(p, task), 2*leaf); n != 0 { // 2 of 6 live; the one before has 4
		t.Fatalf("%d bytes rewritten of a pack that is live by half", n)
	}
	g.sound()
	if n := g.rewritten(g.commit(p, task), 0); n != 0 { // retention of 2 has now only those with 2 of 6
		t.Fatalf("%d bytes rewritten of a pack that is live by half when the commit begins", n)
	}
	g.sound()
	dry := value(DryRun(t.Context(), kvTask, p.blobs, p.cps, memStores(g.now), &p.opts))(t)
	if n := g.rewritten(dry, 0); n != 2*leaf {
		t.Fatalf("a dry run says %d bytes", n)
	}
	if n := g.rewritten(g.commit(p, task), 0); n != 2*leaf {
		t.Fatalf("%d bytes rewritten, want %d", n, 2*leaf)
	}
	g.sound()
	if !g.has(old[0]) {
		t.Fatal("the pack is gone, and a retained checkpoint needs it")
	}
	for range 2 {
		if n := g.rewritten(g.commit(p, task), 0); n != 0 {
			t.Fatalf("%d bytes rewritten again", n)
		}
		g.sound()
	}
	if g.has(old[0]) {
		t.Error("the pack is there, and nothing names it")
	}
	g.wantOnlyLive()
	g.sound()
	g.verify()
}

// packs returns the blobs that chunks of the newest checkpoint lie in.
func (g *garden) packs() (out []string) {
	g.t.Helper()
	list := g.list()
	x := value(g.repo().Index(g.t.Context(), &list[len(list)-1], "kv"))(g.t)
	for i := range x.Entries {
		for _, c := range x.Entries[i].Chunks {
			if !slices.Contains(out, c.Blob) {
				out = append(out, c.Blob)
			}
		}
	}
	return out
}

// amend appends an entry that needs no owner.
func (g *garden) amend(kind checkpoint.Kind, f func(s *head.State, slot uint64) (*head.State, error)) {
	g.t.Helper()
	must(g.t, g.repo().view(kvTask).amend(g.t.Context(), kind, f))
}

// Everything that the head keeps counts, whoever keeps it: a hold holds the pack together too.
func TestP12HeldPackStays(t *testing.T) {
	g := newGarden(t, 6, leaf)
	p := g.process(t, nil)
	p.opts.KeepLast = 1
	task := p.mustOpen()
	first := g.commit(p, task)
	g.amend(checkpoint.Hold, func(s *head.State, slot uint64) (*head.State, error) {
		return s.AddHold(first.Checkpoint, "reader", slot, time.Now())
	})
	g.change(0, 4, leaf)
	g.commit(p, task)
	for range 3 {
		if n := g.rewritten(g.commit(p, task), 0); n != 0 {
			t.Fatalf("%d bytes of a held pack rewritten", n)
		}
	}
	g.amend(checkpoint.Release, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Release([]string{"reader"}, slot, time.Now()), nil
	})
	g.commit(p, task) // its owner learns that the head has gone on
	if n := g.rewritten(g.commit(p, task), 0); n != 2*leaf {
		t.Fatalf("%d bytes rewritten after the release, want %d", n, 2*leaf)
	}
	g.sound()
	g.wantOnlyLive()
	g.sound()
}

// What the application has not confirmed yet counts too.
func TestP12PreparedPackStays(t *testing.T) {
	w, ledger, _ := newExternal(t)
	w.opts.KeepLast, w.opts.Grace, w.opts.PackSize = 1, -1, minPackSize
	var rewritten int64
	w.opts.Observer = &Observer{Uploaded: func(u Uploaded) { rewritten = u.Stores["kv"].BytesRewritten }}
	write := func(seed, files int) {
		for i := range files {
			w.write(map[string]string{fmt.Sprint("f", i): bulk(uint64(seed+i), leaf)})
		}
	}
	confirm := func(task *Task, m Markers) {
		ledger.publish(m)
		check(t, task.CleanUp(t.Context(), m.Checkpoint))
	}
	task := w.open()
	write(0, 6)
	confirm(task, w.upload(task))
	write(10, 4)
	few := w.upload(task)
	write(0, 4)
	all := w.upload(task) // prepared, and stays so
	write(10, 4)
	confirm(task, few)
	again := w.upload(task)
	if rewritten != 0 {
		t.Fatalf("%d bytes rewritten of a pack that %s is all of", rewritten, all.Checkpoint)
	}
	confirm(task, again)
	last := w.upload(task)
	if rewritten != 2*leaf {
		t.Fatalf("%d bytes rewritten, want %d", rewritten, 2*leaf)
	}
	confirm(task, last)
	wantSameTree(t, w.restore(last.Checkpoint), w.dir)
	w.wantOnlyNamed()
	w.wantSound()
}

// Two checkpoints that each use less than half of a pack can use more than half together.
func TestP12UnionCounts(t *testing.T) {
	g := newGarden(t, 6, leaf)
	p := g.process(t, nil)
	p.opts.KeepLast = KeepAll
	task := p.mustOpen()
	g.commit(p, task)
	whole := g.now
	half := func(from, to int) tree {
		tr := tree{}
		for i := from; i < to; i++ {
			name := fmt.Sprintf("f%02d", i)
			tr[name] = whole[name]
		}
		return tr
	}
	g.now = half(0, 2)
	g.commit(p, task)
	g.now = half(2, 4)
	g.commit(p, task)
	g.amend(checkpoint.Trim, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Trim(2, nil, slot, time.Now()), nil
	})
	rec := blobtest.NewRecorder(g.mem)
	p = g.process(t, rec)
	p.opts.KeepLast = KeepAll
	task = p.mustOpen() // knows no tables: it reads them
	for range 2 {
		if n := g.rewritten(g.commit(p, task), 0); n != 0 {
			t.Fatalf("%d bytes rewritten; 4 of 6 files are live", n)
		}
	}
	rec.Reset()
	if n := g.rewritten(g.commit(p, task), 0); n != 0 {
		t.Fatalf("%d bytes rewritten; 4 of 6 files are live", n)
	}
	for _, c := range rec.Calls() {
		if c.Op == blobtest.OpGet && isBlob(c.Key()) {
			t.Errorf("what was found out is read again: %s", c.Key())
		}
	}
	g.amend(checkpoint.Trim, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Trim(1, nil, slot, time.Now()), nil
	})
	g.commit(p, task) // learns of it
	if n := g.rewritten(g.commit(p, task), 0); n != 2*leaf {
		t.Fatalf("%d bytes rewritten, want %d", n, 2*leaf)
	}
	g.sound()
}

// Whoever has packs of two stores leaves alone what a store needs that is not at hand.
func TestP12AbsentStore(t *testing.T) {
	g := newGarden(t, 6, leaf)
	p := g.process(t, nil)
	p.opts.KeepLast = 1
	task := p.mustOpen()
	stores := memStores(g.now)
	stores["other"] = &memSource{tree: tree{"one": g.now["f00"]}}
	value(commitStores(t.Context(), task, stores, "both"))(t)
	g.change(0, 4, leaf)
	g.commit(p, task)
	for range 2 {
		if n := g.rewritten(g.commit(p, task), 0); n != 0 {
			t.Fatalf("%d bytes rewritten of a pack that stays", n)
		}
	}
}

// One commit moves a bounded part, the sparsest packs first.
func TestP12BoundOfOneCommit(t *testing.T) {
	list := []sparsePack{{"a", 30 << 20, 64 << 20}, {"b", 10 << 20, 64 << 20}, {"c", 5 << 20, 11 << 20}, {"d", 30 << 20, 64 << 20}}
	for _, tt := range []struct {
		total int64
		want  []string
	}{{100 << 20, []string{"a", "b", "c"}}, {1 << 30, []string{"a", "b", "c", "d"}}} {
		got := slices.Sorted(maps.Keys(sparsest(slices.Clone(list), tt.total)))
		if !slices.Equal(got, tt.want) {
			t.Errorf("of %d bytes: %v, want %v", tt.total, got, tt.want)
		}
	}
}

// newSparseWorld makes a world whose next commit has 2 of 6 files to move out of a pack. Their identities
// are known.
func newSparseWorld(t *testing.T) (*world, *Task) {
	w := newWorld(t)
	w.opts.KeepLast, w.opts.Grace, w.opts.PackSize = 1, -1, minPackSize
	for i := range 6 {
		w.write(map[string]string{fmt.Sprint("f", i): bulk(uint64(i), leaf)})
	}
	task := w.open()
	w.mustCommit(task, nil)
	for i := range 4 {
		w.write(map[string]string{fmt.Sprint("f", i): bulk(uint64(10+i), leaf)})
	}
	w.mustCommit(task, nil)
	return w, task
}

// Two ways in which the files whose chunks have to move may be at hand: known to be unchanged,
// or read anyway.
func TestP12MovesFromFiles(t *testing.T) {
	for _, cached := range []bool{true, false} {
		w, task := newSparseWorld(t)
		if !cached {
			w.opts.CacheDir = ""
			task = w.open()
		}
		rep := w.mustCommit(task, nil)
		if s := rep.Stores["kv"]; s.BytesRewritten != 2*leaf || s.BytesUploaded != 0 || s.FilesRetained != 6 || s.BytesRetained != 6*leaf {
			t.Fatalf("cached %v: report %+v", cached, s)
		}
		wantSameTree(t, w.restore(rep.Checkpoint), w.dir)
		w.wantOnlyNamed()
		w.wantSound()
		if s := w.mustCommit(task, nil).Stores["kv"]; s.BytesRewritten != 0 || s.BytesUploaded != 0 {
			t.Fatalf("cached %v: next report %+v", cached, s)
		}
	}
}

// rotten is a source whose disk gives other bytes of one file than were written, without a
// sign of it.
type rotten struct {
	source.Source
	path string
}

func (s rotten) Freeze(ctx context.Context) (source.Image, error) {
	img, err := s.Source.Freeze(ctx)
	return rottenImage{img, s.path}, err
}

type rottenImage struct {
	source.Image
	path string
}

func (m rottenImage) Open(path string) (source.File, error) {
	f, err := m.Image.Open(path)
	if err != nil || path != m.path {
		return f, err
	}
	return rottenFile{f}, nil
}

type rottenFile struct{ source.File }

func (f rottenFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	if n > 0 {
		p[0] ^= 1
	}
	return n, err
}

// Bytes that are not what was backed up, of a file that looks unchanged, are no content to
// move. They are uploaded as what they are, and told (I5).
func TestP12OtherBytesAreUploaded(t *testing.T) {
	w, task := newSparseWorld(t)
	if !ext4(t, w.dir) {
		t.Skip("identities are cached on ext4")
	}
	var warned []string
	task.opts.Observer = &Observer{Warned: func(e Warned) { warned = append(warned, e.Text) }}
	rep, err := w.commitFrom(task, map[string]source.Source{"kv": rotten{source.Dir(w.dir, nil), "f5"}})
	check(t, err)
	if s := rep.Stores["kv"]; s.BytesRewritten != leaf || s.BytesUploaded != leaf || s.FilesUploaded != 1 || s.FilesRetained != 5 {
		t.Errorf("report %+v", s)
	}
	if len(warned) != 1 || !strings.Contains(warned[0], "f5") {
		t.Errorf("warned of %q", warned)
	}
	want := []byte(bulk(5, leaf))
	want[0] ^= 1
	got, err := os.ReadFile(filepath.Join(w.restore(rep.Checkpoint), "f5"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("f5 restores to something else: %v", err)
	}
	w.wantOnlyNamed()
	w.wantSound()
}
