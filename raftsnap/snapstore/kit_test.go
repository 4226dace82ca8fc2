package snapstore

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tree is a directory: names that end in a slash are empty directories.
type tree map[string][]byte

// noise is random bytes that depend on the seed only.
func noise(seed uint64, n int) []byte {
	p := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), 1})
	_, _ = src.Read(p)
	return p
}

// build makes the directory.
func (tr tree) build(t testing.TB, dir string) {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o755))
	for name, data := range tr {
		full := filepath.Join(dir, name)
		if name[len(name)-1] == '/' {
			must(t, os.MkdirAll(full, 0o755))
			continue
		}
		must(t, os.MkdirAll(filepath.Dir(full), 0o755))
		must(t, os.WriteFile(full, data, 0o644))
	}
}

// small has one of each kind, and a chunk that occurs twice.
func small() tree {
	return tree{"a": noise(1, 300_000), "b": nil, "d/e/f": []byte("deep"), "d/g": noise(2, 70_000), "empty/": nil, "z": noise(1, 300_000), "d-h": []byte("x")}
}

// listing reads a directory as a tree; directories end in a slash.
func listing(t testing.TB, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if d.IsDir() {
			got[rel+"/"] = ""
			return nil
		}
		data, err := os.ReadFile(p)
		got[rel] = string(data)
		return err
	}))
	return got
}

// want is what listing returns for a tree.
func (tr tree) want() map[string]string {
	want := map[string]string{}
	for name, data := range tr {
		if name[len(name)-1] != '/' {
			want[name] = string(data)
		} else {
			want[name] = ""
		}
		for dir := filepath.Dir(filepath.Clean(name)); dir != "."; dir = filepath.Dir(dir) {
			want[dir+"/"] = ""
		}
	}
	return want
}

func metaAt(index uint64) protocol.Meta {
	return protocol.Meta{
		Group: "g", Term: 3, Index: index, Conf: protocol.Conf{Voters: []uint64{1, 2}, Learners: []uint64{3}},
		Members: []protocol.Member{{ID: 1, Name: "n1", URL: "http://n1", Incarnation: "i1"}},
		Lineage: protocol.Lineage{Maker: 1, Incarnation: "i1"},
	}
}

// openStore opens a store whose resources end with the test.
func openStore(t testing.TB, dir string, opts *Options) *Store {
	t.Helper()
	if opts == nil {
		opts = &Options{Reserve: -1}
	}
	s, err := Open(dir, opts)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// makeHeld makes a snapshot of a tree.
func makeHeld(t testing.TB, s *Store, index uint64, tr tree) Held {
	t.Helper()
	d, err := s.Draft()
	must(t, err)
	tr.build(t, d.Dir())
	held, err := d.Commit(t.Context(), metaAt(index), nil)
	must(t, err)
	return held
}

// sameTree compares a snapshot's directory with a tree.
func sameTree(t testing.TB, s *Store, id protocol.ID, tr tree) {
	t.Helper()
	dir, err := s.Dir(id)
	must(t, err)
	if diff := cmp.Diff(tr.want(), listing(t, dir)); diff != "" {
		t.Fatalf("snapshot %d (-want +got):\n%.2000s", id.Index, diff)
	}
	must(t, s.Verify(t.Context(), id, nil))
}

// manifestOf returns the manifest of a held snapshot.
func manifestOf(t testing.TB, s *Store, id protocol.ID) []byte {
	t.Helper()
	p, err := s.Pin(id, "test")
	must(t, err)
	defer p.Close()
	return p.Manifest()
}

// pull puts missing pieces of a receipt until limit bytes came, or all for a limit below 0.
// It returns how many came.
func pull(t testing.TB, from *Store, r *Receipt, limit int64) (n int64) {
	t.Helper()
	for _, p := range r.Missing() {
		if limit >= 0 && n >= limit {
			return n
		}
		data, err := from.Chunk(p.Digest)
		must(t, err)
		must(t, r.Put(p, data))
		n += int64(len(data))
	}
	return n
}

// transfer moves a snapshot from one store to another and tells what was fetched and reused.
func transfer(t testing.TB, from, to *Store, id protocol.ID, extra ...string) (fetched, reused int64) {
	t.Helper()
	r, err := to.Receive(t.Context(), manifestOf(t, from, id))
	must(t, err)
	reused, err = r.Reuse(t.Context(), nil, extra...)
	must(t, err)
	fetched = pull(t, from, r, -1)
	held, err := r.Commit(t.Context())
	must(t, err)
	if held.ID != id {
		t.Fatalf("committed %v, want %v", held.ID, id)
	}
	return fetched, reused
}

// indexes returns the indexes of the held snapshots.
func indexes(s *Store) []uint64 {
	var list []uint64
	for _, h := range s.List() {
		list = append(list, h.ID.Index)
	}
	return list
}

// only checks what lies in a directory.
func only(t testing.TB, dir string, want ...string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, e := range list {
		got = append(got, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Fatalf("%s has %q, want %q", filepath.Base(dir), got, want)
	}
}

// When an operation fails: before anything of it was done, after all of it, or amid it.
const (
	atOnce = iota
	afterAll
	halfWay
)

// tap counts operations of a store, and fails one.
type tap struct {
	mu     sync.Mutex
	n      int
	dir    string // of the store
	failAt int    // 0: none
	when   int
	err    error
	failed string
	void   bool // the operation failed by itself
}

// arm makes the i-th operation from now on fail.
func (tp *tap) arm(i int) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	tp.n, tp.failAt = 0, i
}

func (tp *tap) around(op, name string, do func() error) error {
	tp.mu.Lock()
	tp.n++
	hit := tp.n == tp.failAt
	if hit {
		tp.failed = op + " " + name
	}
	tp.mu.Unlock()
	if hit && tp.when == halfWay && op == "remove" {
		behead(filepath.Join(tp.dir, name))
	}
	if hit && tp.when != afterAll {
		return tp.err
	}
	err := do()
	if hit {
		tp.void = err != nil
		if err == nil {
			err = tp.err
		}
	}
	return err
}

// behead removes one file below a directory, as a removal has that is interrupted.
func behead(dir string) {
	_ = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return errors.Join(os.Remove(p), fs.SkipAll)
	})
}

// meter counts the bytes that a Work was asked for.
type meter struct {
	mu sync.Mutex
	n  int64
}

func (m *meter) work() *Work {
	return &Work{Wait: func(_ context.Context, bytes int) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.n += int64(bytes)
		return nil
	}}
}

func (m *meter) take() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.n
	m.n = 0
	return n
}

// wantErr checks the identity of an error.
func wantErr(t testing.TB, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("got error %v, want %v", got, want)
	}
}

// age makes all files of a directory old enough to be known by their times.
func age(t testing.TB, dir string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		must(t, err)
		old := info.ModTime().Add(-racy * 50)
		return os.Chtimes(p, old, old)
	}))
}

// flip changes one byte of a file.
func flip(t testing.TB, name string, at int64) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	p := make([]byte, 1)
	_, err = f.ReadAt(p, at)
	must(t, err)
	p[0] ^= 0x40
	_, err = f.WriteAt(p, at)
	must(t, errors.Join(err, f.Close()))
}
