package snapshot

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// testKey is where indexes of tests lie.
const testKey = "t/orders/p7/b/0000000000000002-00000001-00000000000000000000000000000001/i"

// sameIndex returns how indexes differ. Empty and nil lists are the same, and times are
// compared as instants. cmp explains well and is slow, so it is asked only about lists
// differ.
func sameIndex(got, want *Index) string {
	a, b := *got, *want
	if slices.EqualFunc(a.Entries, b.Entries, sameEntry) {
		a.Entries, b.Entries = nil, nil
	}
	return cmp.Diff(&b, &a, cmpopts.EquateEmpty(), cmpopts.EquateApproxTime(0))
}

func sameEntry(a, b Entry) bool {
	return a.Path == b.Path && kindOf(&a, &b) == Unchanged && slices.Equal(a.Chunks, b.Chunks)
}

func digestOf(n uint64) Digest { return Sum(binary.LittleEndian.AppendUint64(nil, n)) }

func pack(n int) string {
	return fmt.Sprintf("t/orders/p7/b/0000000000000001-00000001-5fd4e2a1c09b7d3311aa02b4c6d8e0f2/%08x", n)
}

// flat returns a plain tree of n small files, 100 in each directory, as a state store
// may have it.
func flat(n int) *Index {
	x := &Index{
		Job: "orders", Task: "p7", Store: "kv", Checkpoint: "20260102T030405.000006Z-1-1",
		Created: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC),
	}
	x.Entries = make([]Entry, 0, n+n/100+2)
	x.Entries = append(x.Entries, Entry{Type: Dir, Mode: 0o755, User: "root", Group: "root"})
	rng := rand.New(rand.NewPCG(1, 1))
	offset, blob := uint32(0), pack(0)
	chunks := make([]Chunk, n)
	for i := range n {
		dir := fmt.Sprintf("dir-%06d", i/100)
		if i%100 == 0 {
			x.Entries = append(x.Entries, Entry{Path: dir, Type: Dir, Mode: 0o755, User: "root", Group: "root", MTime: Time{1700000000 + int64(i), 5}})
		}
		length := uint32(1000 + rng.IntN(5000))
		if offset+length > MaxPackSize {
			offset, blob = 0, pack(i)
		}
		chunks[i] = Chunk{Length: length, Digest: digestOf(rng.Uint64()), Location: Location{Blob: blob, Offset: offset, Stored: length}}
		offset += length
		x.Entries = append(x.Entries, Entry{
			Path: fmt.Sprintf("%s/file-%08d.sst", dir, i), Mode: 0o644, UID: 1000, GID: 1000, User: "samza", Group: "samza",
			MTime: Time{1700000000 + rng.Int64N(1e6), rng.Int32N(1e9)}, Size: int64(length), ChunkSize: DefaultChunkSize,
			Chunks: chunks[i : i+1 : i+1],
		})
	}
	return x
}

// big returns a tree with one file of n whole chunks.
func big(n int, chunkSize uint32) *Index {
	x := flat(10)
	e := Entry{Path: "main.db", Mode: 0o600, Size: int64(n) * int64(chunkSize), ChunkSize: chunkSize}
	for i := range n {
		perPack := MaxPackSize / int(chunkSize)
		e.Chunks = append(e.Chunks, Chunk{
			Offset: int64(i) * int64(chunkSize), Length: chunkSize, Digest: digestOf(uint64(i)),
			Location: Location{Blob: pack(1000 + i/perPack), Offset: uint32(i%perPack) * chunkSize, Stored: chunkSize},
		})
	}
	x.Entries = append(x.Entries, e)
	return x
}

// randomTree makes trees with everything the format has.
type randomTree struct {
	*rand.Rand
	entries []Entry
	blobs   []string
}

func randomIndex(seed uint64) *Index {
	r := &randomTree{Rand: rand.New(rand.NewPCG(seed, 7))}
	for range 1 + r.IntN(8) {
		r.blobs = append(r.blobs, pack(r.IntN(100)))
	}
	if r.IntN(3) > 0 {
		r.entries = append(r.entries, r.meta(Entry{Type: Dir}))
	}
	r.fill("", 3)
	sort.Slice(r.entries, func(i, j int) bool { return r.entries[i].Path < r.entries[j].Path })
	r.link()
	x := &Index{Job: "j", Task: "t", Store: "s", Checkpoint: "c" + fmt.Sprint(seed), Prev: "some/index", Entries: r.entries}
	x.Created = time.Unix(r.Int64N(4e9)-2e9, r.Int64N(1e9)).UTC()
	for i := range r.IntN(3) {
		x.Borrows = append(x.Borrows, fmt.Sprintf("checkpoint-%d", i))
	}
	return x
}

// fill makes the entries of one directory.
func (r *randomTree) fill(dir string, depth int) {
	names := map[string]bool{}
	for range r.IntN(12) {
		names[r.name()] = true
	}
	sorted := make([]string, 0, len(names))
	for name := range names {
		sorted = append(sorted, name)
	}
	slices.Sort(sorted)
	for _, name := range sorted {
		path := strings.TrimPrefix(dir+"/"+name, "/")
		switch r.IntN(6) {
		case 0, 1:
			r.entries = append(r.entries, r.meta(Entry{Path: path, Type: Dir}))
			if depth > 0 {
				r.fill(path, depth-1)
			}
		case 2:
			r.entries = append(r.entries, r.meta(Entry{Path: path, Type: Symlink, Link: "../" + r.name()}))
		default:
			r.entries = append(r.entries, r.content(r.meta(Entry{Path: path})))
		}
	}
}

// name makes names that sort in awkward ways around the slash.
func (r *randomTree) name() string {
	const letters = "ab-.!~\xff\n\x01 "
	b := []byte{"abc"[r.IntN(3)]}
	for range r.IntN(6) {
		b = append(b, letters[r.IntN(len(letters))])
	}
	return string(b)
}

func (r *randomTree) meta(e Entry) Entry {
	owners := []string{"", "root", "samza", "a very long name of a user"}
	e.Mode = uint32(r.IntN(0o10000))
	e.UID, e.GID = r.Uint32(), r.Uint32N(1000)
	e.User, e.Group = owners[r.IntN(len(owners))], owners[r.IntN(len(owners))]
	e.MTime = Time{r.Int64() - r.Int64(), r.Int32N(1e9)}
	if r.IntN(4) == 0 {
		e.Xattrs = []Xattr{{"user.a", []byte(r.name())}, {"user.b", nil}, {"user.c" + r.name(), make([]byte, r.IntN(300))}}
	}
	return e
}

// content gives a file a size, holes and chunks.
func (r *randomTree) content(e Entry) Entry {
	e.ChunkSize = MinChunkSize << r.IntN(5)
	e.Size = r.Int64N(1 << (1 + r.IntN(22)))
	for offset, length := range Cut(e.Size, r.runs(e.Size), e.ChunkSize) {
		c := Chunk{
			Offset: offset, Length: length, Digest: digestOf(r.Uint64N(1000)),
			Location: Location{Blob: r.blobs[r.IntN(len(r.blobs))], Offset: r.Uint32N(MaxPackSize - length), Stored: length},
		}
		if length > 1 && r.IntN(3) == 0 {
			c.Stored, c.Encoding = 1+r.Uint32N(length-1), Zstd
		}
		e.Chunks = append(e.Chunks, c)
	}
	return e
}

func (r *randomTree) runs(size int64) []Run {
	if r.IntN(3) == 0 {
		return []Run{{0, size}}
	}
	var runs []Run
	for pos := int64(0); pos < size; {
		from := pos + r.Int64N(300<<10)
		length := 1 + r.Int64N(200<<10)
		runs = append(runs, Run{from, length})
		pos = from + length
	}
	return runs
}

// link turns some files into further names of earlier ones.
func (r *randomTree) link() {
	first := -1
	for i := range r.entries {
		e := &r.entries[i]
		switch {
		case e.Type != Regular:
		case first >= 0 && r.IntN(5) == 0:
			e.Link, e.Size, e.ChunkSize, e.Chunks = r.entries[first].Path, 0, 0, nil
		case r.IntN(3) == 0:
			first = i
		}
	}
}

// split cuts the segments that lie in the object out of it; what lies elsewhere comes from
// stored.
func split(root *Root, objects map[string][]byte) [][]byte {
	var segments [][]byte
	for _, s := range root.Segments {
		segments = append(segments, objects[s.Blob][s.Offset:s.Offset+s.Stored])
	}
	return segments
}

// decode decodes a whole index object that needs no other.
func decode(t testing.TB, object []byte) *Index {
	t.Helper()
	root, err := DecodeRoot(object, testKey)
	if err != nil {
		t.Fatal(err)
	}
	x, err := root.Assemble(split(root, map[string][]byte{testKey: object}))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func mustEncode(t testing.TB, x *Index, key string, prev *Root) ([]byte, *Root) {
	t.Helper()
	object, root, err := Encode(x, key, prev)
	if err != nil {
		t.Fatal(err)
	}
	return object, root
}
