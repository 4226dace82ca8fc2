package snapshot

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// mutate returns a later state of an index: entries come, go and change.
func mutate(x *Index, seed uint64) *Index {
	other := randomIndex(seed)
	y := *x
	y.Entries = nil
	for c := range Compare(x, other) {
		switch {
		case c.Kind == Added && c.New.Type == Dir:
			y.Entries = append(y.Entries, *c.New)
		case c.Kind == Removed || c.Old != nil && seed%2 == 0:
			y.Entries = append(y.Entries, *c.Old)
		case c.New != nil:
			y.Entries = append(y.Entries, *c.New)
		}
	}
	return &y
}

// Apply(Compare(a, b), a) = b, and with the unchanged entries left out too.
func TestApplyCompare(t *testing.T) {
	for seed := range uint64(300) {
		a := randomIndex(seed)
		b := mutate(a, seed+1)
		for _, old := range []*Index{nil, {}, a, b} {
			got := Apply(old, Compare(old, b))
			if !slices.EqualFunc(got.Entries, b.Entries, sameEntry) {
				t.Fatalf("seed %d: entries differ", seed)
			}
			got = Apply(old, changed(Compare(old, b)))
			for c := range Compare(got, b) {
				if c.Kind != Unchanged {
					t.Fatalf("seed %d: without unchanged entries: %q is %v", seed, c.Path(), c.Kind)
				}
			}
		}
		if got := Apply(a, Compare(a, indexOf(nil))); len(got.Entries) != 0 {
			t.Fatalf("seed %d: %d entries left after all were removed", seed, len(got.Entries))
		}
	}
}

func indexOf(entries []Entry) *Index { return &Index{Entries: entries} }

func changed(changes iter.Seq[Change]) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		for c := range changes {
			if c.Kind != Unchanged && !yield(c) {
				return
			}
		}
	}
}

// Compare of equals is Unchanged for every entry, and in order.
func TestCompareEquals(t *testing.T) {
	for seed := range uint64(100) {
		a, b := randomIndex(seed), randomIndex(seed)
		n := 0
		for c := range Compare(a, b) {
			if c.Kind != Unchanged || c.Old != &a.Entries[n] || c.New != &b.Entries[n] {
				t.Fatalf("seed %d: entry %d: %+v", seed, n, c)
			}
			n++
		}
		if n != len(a.Entries) {
			t.Fatalf("seed %d: %d of %d entries", seed, n, len(a.Entries))
		}
	}
}

func TestCompareKinds(t *testing.T) {
	base := func() Entry {
		e := data(2*cell, 0, cell, cell, cell)
		e.Xattrs = []Xattr{{"a", []byte("b")}}
		return e
	}
	tests := []struct {
		name   string
		change func(e *Entry)
		want   ChangeKind
	}{
		{"nothing", func(*Entry) {}, Unchanged},
		{"location", func(e *Entry) { e.Chunks[1].Blob, e.Chunks[1].Location.Offset = "elsewhere", 7 }, Unchanged},
		{"mode", func(e *Entry) { e.Mode = 0o600 }, MetaChanged},
		{"uid", func(e *Entry) { e.UID = 1 }, MetaChanged},
		{"gid", func(e *Entry) { e.GID = 1 }, MetaChanged},
		{"user", func(e *Entry) { e.User = "u" }, MetaChanged},
		{"group", func(e *Entry) { e.Group = "u" }, MetaChanged},
		{"seconds", func(e *Entry) { e.MTime.Sec++ }, MetaChanged},
		{"nanoseconds", func(e *Entry) { e.MTime.Nsec++ }, MetaChanged},
		{"xattr value", func(e *Entry) { e.Xattrs[0].Value = []byte("c") }, MetaChanged},
		{"xattr gone", func(e *Entry) { e.Xattrs = nil }, MetaChanged},
		{"digest", func(e *Entry) { e.Chunks[1].Digest[0]++ }, ContentChanged},
		{"digest and mode", func(e *Entry) { e.Chunks[1].Digest[0]++; e.Mode = 1 }, ContentChanged},
		{"size", func(e *Entry) { e.Size-- }, ContentChanged},
		{"chunk size", func(e *Entry) { e.ChunkSize *= 2 }, ContentChanged},
		{"hole", func(e *Entry) { e.Chunks = e.Chunks[:1] }, ContentChanged},
		{"link", func(e *Entry) { e.Link = "x" }, ContentChanged},
		{"type", func(e *Entry) { *e = Entry{Path: e.Path, Type: Dir} }, ContentChanged},
	}
	for _, tt := range tests {
		a, b := base(), base()
		tt.change(&b)
		for c := range Compare(indexOf([]Entry{a}), indexOf([]Entry{b})) {
			if c.Kind != tt.want {
				t.Errorf("%s: %v, want %v", tt.name, c.Kind, tt.want)
			}
			content := c.Kind == ContentChanged && tt.name != "link" && tt.name != "type"
			if (ContentID(&a) != ContentID(&b)) != (content || tt.name == "type") {
				t.Errorf("%s: content ids do not agree with that", tt.name)
			}
		}
	}
}

// Offset, length and digest all count, in short and long lists of chunks alike, and places
// do not.
func TestContentID(t *testing.T) {
	seen := map[Digest]string{}
	add := func(name string, e Entry) {
		if other, ok := seen[ContentID(&e)]; ok {
			t.Errorf("%s and %s have one content id", name, other)
		}
		seen[ContentID(&e)] = name
	}
	for _, n := range []int{0, 1, 4, 5, 256, 257, 1000} {
		x := big(n, MinChunkSize)
		e := x.Entries[len(x.Entries)-1]
		add(fmt.Sprint(n, " chunks"), e)
		if n == 0 {
			continue
		}
		moved := e
		moved.Chunks = slices.Clone(e.Chunks)
		moved.Chunks[n-1].Location = Location{Blob: "elsewhere", Offset: 9}
		if ContentID(&moved) != ContentID(&e) {
			t.Errorf("%d chunks: the content id depends on where a chunk is stored", n)
		}
		for name, change := range map[string]func(c *Chunk){
			"offset": func(c *Chunk) { c.Offset++ }, "length": func(c *Chunk) { c.Length-- }, "digest": func(c *Chunk) { c.Digest[31]++ },
		} {
			other := e
			other.Chunks = slices.Clone(e.Chunks)
			change(&other.Chunks[n-1])
			add(fmt.Sprint(n, " chunks, other ", name), other)
		}
	}
}

// The content id is written into identity caches, so it must not change.
func TestContentIDIsStable(t *testing.T) {
	e := data(2*cell, 0, cell, cell, cell)
	const want = "fa1e0a95edfadb733a7025d5173a48124e1f193a9a05311e7049730a3fe92057"
	if got := ContentID(&e).String(); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	x := big(1000, MinChunkSize)
	long := &x.Entries[len(x.Entries)-1]
	want1000 := Sum(appendContent([]byte("snapferry content 1\n\x00\x00\xfa\x00\x00\x00\x00\x00\x00\x40\x00\x00"), long.Chunks))
	if got := ContentID(long); got != want1000 {
		t.Errorf("1000 chunks: got %s, want %s", got, want1000)
	}
}

func TestFilter(t *testing.T) {
	x := &Index{Store: "kv", Entries: []Entry{
		dir(""), dir("a"), dir("a "), file("a /f"), with(data(5, 0, 5), func(e *Entry) { e.Path = "a/first" }), file("a/other"),
		dir("b"), dir("b/c"), link("b/c/second", "a/first"), link("b/third", "a/first"), symlink("b/x", "../a"), link("z", "a/other"),
	}}
	tests := []struct {
		keep string
		want string
	}{
		{"a/first b/third", `:  a:  a/first:5  b:  b/third:0>a/first`},
		{"b/c/second b/third", `:  b:  b/c:  b/c/second:5  b/third:0>b/c/second`},
		{"b/third", `:  b:  b/third:5`},
		{"b/c", `:  b:  b/c:`},
		{"a /f z", `:  a :  a /f:0  z:0`},
		{"", ``},
	}
	for _, tt := range tests {
		wanted := map[string]bool{}
		for _, path := range []string{"a/first", "b/third", "b/c/second", "b/c", "a /f", "z"} {
			wanted[path] = strings.Contains(" "+tt.keep+" ", " "+path+" ")
		}
		y := Filter(x, func(path string) bool { return wanted[path] })
		if err := y.Validate(); err != nil {
			t.Errorf("%q: %v", tt.keep, err)
		}
		if diff := cmp.Diff(tt.want, outline(y)); diff != "" || y.Store != "kv" {
			t.Errorf("%q: (-want +got)\n%s", tt.keep, diff)
		}
	}
	if x.Entries[9].Link != "a/first" {
		t.Error("Filter changed its argument")
	}
}

func outline(x *Index) string {
	var parts []string
	for _, e := range x.Entries {
		s := e.Path + ":"
		if e.Type == Regular {
			s += fmt.Sprint(e.Size)
		}
		if e.IsLink() {
			s += ">" + e.Link
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, "  ")
}

// Whatever is kept, the result is valid, and every kept file has the content it had.
func TestFilterRandom(t *testing.T) {
	for seed := range uint64(300) {
		x := randomIndex(seed)
		keep := func(path string) bool { d := Sum([]byte(path)); return d[0]%3 == 0 }
		y := Filter(x, keep)
		if err := y.Validate(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for i := range y.Entries {
			e := &y.Entries[i]
			old, ok := x.Lookup(e.Path)
			if !ok || ContentID(y.Resolve(e)) != ContentID(x.Resolve(old)) || !sameMeta(e, old) {
				t.Fatalf("seed %d: %q has another content", seed, e.Path)
			}
		}
		for i := range x.Entries {
			if path := x.Entries[i].Path; keep(path) {
				if _, ok := y.Lookup(path); !ok {
					t.Fatalf("seed %d: %q is lost", seed, path)
				}
			}
		}
	}
}

func TestTotals(t *testing.T) {
	shared := data(5, 0, 5)
	shared.Path = "shared"
	x := &Index{Entries: []Entry{dir(""), data(2*cell, 0, cell, cell, cell), link("g", "f"), file("h"), shared, symlink("z", "f")}}
	want := Totals{Files: 3, Dirs: 1, Symlinks: 1, Links: 1, Chunks: 3, Bytes: 2*cell + 5, Stored: cell}
	if diff := cmp.Diff(want, x.Totals()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if diff := cmp.Diff([]BlobUse{{"b", cell}}, x.Blobs()); diff != "" {
		t.Errorf("all chunks lie at one place: (-want +got)\n%s", diff)
	}
}

// live counts every byte once, however ranges overlap.
func TestLive(t *testing.T) {
	for seed := range uint64(500) {
		r := &randomTree{Rand: rand.New(rand.NewPCG(seed, 2))}
		u := newUses()
		var used [256]bool
		want := int64(0)
		for range 1 + r.IntN(20) {
			from, n := r.Uint32N(200), 1+r.Uint32N(50)
			u.add(&Location{Blob: "b", Offset: from, Stored: n})
			for i := from; i < from+n; i++ {
				if !used[i] {
					used[i] = true
					want++
				}
			}
		}
		if got := u.table()[0].Live; got != want {
			t.Fatalf("seed %d: %d, want %d", seed, got, want)
		}
	}
}
