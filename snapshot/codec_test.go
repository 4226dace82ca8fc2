package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Decode(Encode(x)) = x, and what Encode says of the root is what a reader finds.
func TestRoundTrip(t *testing.T) {
	trees := map[string]*Index{
		"empty": {}, "flat": flat(20_000), "big": big(5000, MinChunkSize), "sparse": sparse(),
	}
	for seed := range uint64(300) {
		trees[fmt.Sprintf("seed %d", seed)] = randomIndex(seed)
	}
	for name, x := range trees {
		object, root, err := Encode(x, testKey, nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := sameIndex(decode(t, object), x); diff != "" {
			t.Fatalf("%s: decoded index differs (-want +got):\n%s", name, diff)
		}
		decoded, err := DecodeRoot(object, testKey)
		if err != nil || cmp.Diff(root, decoded, cmpopts.EquateEmpty()) != "" {
			t.Fatalf("%s: root differs: %v\n%s", name, err, cmp.Diff(root, decoded, cmpopts.EquateEmpty()))
		}
		if size, err := RootSize(object[:RootHeaderSize]); err != nil || size != root.Size {
			t.Errorf("%s: RootSize = %d, %v, want %d", name, size, err, root.Size)
		}
		if root.Totals != x.Totals() {
			t.Errorf("%s: totals %+v, want %+v", name, root.Totals, x.Totals())
		}
	}
}

// sparse has so many holes within cells that records end by their number of chunks.
func sparse() *Index {
	x := flat(5)
	e := Entry{Path: "holes", Size: 3 * groupCells * MaxChunkSize / 4, ChunkSize: MaxChunkSize}
	for offset := int64(0); offset < e.Size; offset += 128 << 10 {
		e.Chunks = append(e.Chunks, Chunk{Offset: offset, Length: 4096, Digest: digestOf(uint64(offset)), Location: Location{Blob: pack(5), Stored: 4096}})
	}
	x.Entries = append(x.Entries, e)
	return x
}

// Records have at most 1,024 chunks, of one group of cells, and nothing is left out.
func TestRecords(t *testing.T) {
	for _, x := range []*Index{sparse(), big(5000, MinChunkSize), flat(100)} {
		records, ends := recordsOf(x.Entries)
		chunks := 0
		for _, r := range records {
			part := x.Entries[r.entry].Chunks[r.from:r.to]
			if chunks += len(part); len(part) > 1024 {
				t.Errorf("record of %d chunks", len(part))
			}
			for i := range part {
				if g := x.Entries[r.entry].groupOf(&part[i]); g != r.group {
					t.Errorf("chunk of group %d in a record of group %d", g, r.group)
				}
			}
		}
		if chunks != int(x.Totals().Chunks) || ends[len(ends)-1] != len(records) {
			t.Errorf("%d of %d chunks, %d of %d records", chunks, x.Totals().Chunks, ends[len(ends)-1], len(records))
		}
	}
}

// Names that never end a segment by their hash must not make it endless.
func TestSegmentsAreBounded(t *testing.T) {
	x := &Index{}
	for i := range 40_000 {
		e := Entry{Path: fmt.Sprintf("%06d", i), Type: Dir}
		if _, ends := recordsOf([]Entry{e, {Path: "z", Type: Dir}}); ends[0] == 2 {
			x.Entries = append(x.Entries, e)
		}
	}
	_, ends := recordsOf(x.Entries)
	if perSegment := maxWeight/(48+6) + 1; ends[0] != perSegment {
		t.Errorf("first segment has %d records, want %d", ends[0], perSegment)
	}
	object, _ := mustEncode(t, x, testKey, nil)
	if diff := sameIndex(decode(t, object), x); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// Two encodings of one index are the same bytes, or a retry of an upload would differ.
func TestEncodeIsDeterministic(t *testing.T) {
	a, _ := mustEncode(t, flat(30_000), testKey, nil)
	b, _ := mustEncode(t, flat(30_000), testKey, nil)
	if !bytes.Equal(a, b) {
		t.Fatal("the same index was encoded to different bytes")
	}
}

// What a commit writes follows the change and not the tree (S5b).
func TestWrittenBytesFollowTheChange(t *testing.T) {
	tests := []struct {
		name        string
		x           *Index
		change      func(x *Index)
		maxSegments int
		maxBytes    int
	}{
		{"nothing", flat(100_000), func(x *Index) { x.Checkpoint = "later" }, 0, 16 << 10},
		{"one file changed", flat(100_000), func(x *Index) {
			e := &x.Entries[50_000]
			e.Chunks = []Chunk{{Length: uint32(e.Size), Digest: digestOf(1), Location: Location{Blob: pack(9999), Stored: uint32(e.Size)}}}
		}, 1, 100 << 10},
		{"one file added", flat(100_000), func(x *Index) {
			x.Entries = slices.Insert(x.Entries, 30_000, x.Entries[29_999])
			x.Entries[30_000].Path += "x"
		}, 2, 200 << 10},
		{"one file removed", flat(100_000), func(x *Index) { x.Entries = slices.Delete(x.Entries, 30_000, 30_001) }, 2, 200 << 10},
		{"one cell of a long file changed", big(100_000, MinChunkSize), func(x *Index) {
			e := &x.Entries[len(x.Entries)-1]
			e.MTime.Sec++
			e.Chunks[77_777].Digest = digestOf(1 << 40)
			e.Chunks[77_777].Location = Location{Blob: pack(9999), Stored: MinChunkSize}
		}, 2, 500 << 10},
		{"a long file grew", big(100_000, MinChunkSize), func(x *Index) {
			e := &x.Entries[len(x.Entries)-1]
			*e = big(100_001, MinChunkSize).Entries[len(x.Entries)-1]
		}, 2, 300 << 10},
	}
	for _, tt := range tests {
		first, prev := mustEncode(t, tt.x, testKey, nil)
		tt.change(tt.x)
		object, root := mustEncode(t, tt.x, "second", prev)
		written := 0
		for _, s := range root.Segments {
			if s.Blob == "second" {
				written++
			}
		}
		t.Logf("%s: first index %d bytes in %d segments, second %d bytes, %d of them root", tt.name, len(first), len(prev.Segments), len(object), root.Size)
		if written > tt.maxSegments {
			t.Errorf("%s: %d of %d segments were written, want at most %d", tt.name, written, len(root.Segments), tt.maxSegments)
		}
		if len(object) > tt.maxBytes {
			t.Errorf("%s: %d bytes were written, want at most %d", tt.name, len(object), tt.maxBytes)
		}
		x, err := root.Assemble(split(root, map[string][]byte{testKey: first, "second": object}))
		if err != nil {
			t.Fatal(err)
		}
		if diff := sameIndex(x, tt.x); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
		checkTable(t, root, testKey)
	}
}

// checkTable checks that the root's table has the older index with the bytes that are
// named of it.
func checkTable(t *testing.T, root *Root, older string) {
	t.Helper()
	live := int64(0)
	for _, s := range root.Segments {
		if s.Blob == older {
			live += int64(s.Stored)
		}
	}
	i := slices.IndexFunc(root.Blobs, func(b BlobUse) bool { return b.Key == older })
	if i < 0 || root.Blobs[i].Live != live {
		t.Errorf("table has entry %d for %s, want one with %d live bytes", i, older, live)
	}
}

// I6: every truncation and every flipped bit of a root, a segment and a chunk list is
// ErrCorrupt.
func TestDamage(t *testing.T) {
	x := flat(40)
	object, root := mustEncode(t, x, testKey, nil)
	segments := split(root, map[string][]byte{testKey: object})
	list, _, err := EncodeChunks(storedChunks(x))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		good []byte
		read func(b []byte) error
	}{
		{"root", object[:root.Size], func(b []byte) error { _, err := DecodeRoot(b, testKey); return err }},
		{"root before segments", object, func(b []byte) error { return readObject(b) }},
		{"segment", segments[0], func(b []byte) error {
			_, err := root.Assemble(append([][]byte{b}, segments[1:]...))
			return err
		}},
		{"chunk list", list, func(b []byte) error { _, err := DecodeChunks(b); return err }},
	}
	for _, tt := range tests {
		if err := tt.read(tt.good); err != nil {
			t.Fatalf("%s: undamaged: %v", tt.name, err)
		}
		for i := range tt.good {
			if err := tt.read(tt.good[:i]); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s: cut at %d: %v", tt.name, i, err)
			}
		}
		for bit := range 8 * len(tt.good) {
			bad := bytes.Clone(tt.good)
			bad[bit/8] ^= 1 << (bit % 8)
			if err := tt.read(bad); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s: bit %d flipped: %v", tt.name, bit, err)
			}
		}
		if err := tt.read(append(bytes.Clone(tt.good), 0)); err == nil && tt.name != "root" && tt.name != "root before segments" {
			t.Errorf("%s: a byte more was accepted", tt.name)
		}
	}
}

// readObject reads an index object as an engine does.
func readObject(b []byte) error {
	root, err := DecodeRoot(b, testKey)
	if err != nil {
		return err
	}
	var segments [][]byte
	for _, s := range root.Segments {
		segments = append(segments, b[min(int(s.Offset), len(b)):min(int(s.Offset+s.Stored), len(b))])
	}
	_, err = root.Assemble(segments)
	return err
}

// Segments in a wrong order, or of another index, are found.
func TestWrongSegments(t *testing.T) {
	object, root := mustEncode(t, flat(20_000), testKey, nil)
	segments := split(root, map[string][]byte{testKey: object})
	if len(segments) < 3 {
		t.Fatalf("only %d segments", len(segments))
	}
	swapped := slices.Clone(segments)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	for name, given := range map[string][][]byte{"swapped": swapped, "nil": make([][]byte, len(segments))} {
		if _, err := root.Assemble(given); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := root.Assemble(segments[1:]); err == nil {
		t.Error("missing segment was accepted")
	}
}

// The root's totals and its table of blobs, which the sweep relies on (P9), must be what
// the entries give.
func TestRootMustFitEntries(t *testing.T) {
	object, root := mustEncode(t, flat(500), testKey, nil)
	segments := split(root, map[string][]byte{testKey: object})
	changes := map[string]func(r *Root){
		"total":          func(r *Root) { r.Totals.Files++ },
		"stored":         func(r *Root) { r.Totals.Stored-- },
		"live bytes":     func(r *Root) { r.Blobs[0].Live-- },
		"blob left out":  func(r *Root) { r.Blobs = r.Blobs[1:] },
		"blob too many":  func(r *Root) { r.Blobs = append(r.Blobs, BlobUse{"zzz", 1}) },
		"fewer entries":  func(r *Root) { r.Segments[0].Entries-- },
		"more entries":   func(r *Root) { r.Segments[0].Entries++ },
		"content digest": func(r *Root) { r.Segments[0].Content[0]++ },
	}
	for name, change := range changes {
		bad := *root
		bad.Blobs, bad.Segments = slices.Clone(root.Blobs), slices.Clone(root.Segments)
		change(&bad)
		if _, err := bad.Assemble(segments); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	if _, _, err := Encode(&Index{Entries: []Entry{{Path: "../x"}}}, testKey, nil); !errors.Is(err, ErrCorrupt) {
		t.Errorf("invalid index: %v", err)
	}
	if _, _, err := Encode(flat(3), "", nil); !errors.Is(err, ErrCorrupt) {
		t.Errorf("no key: %v", err)
	}
	if _, _, err := Encode(flat(3), pack(0), nil); err == nil {
		t.Error("an index at the key of a pack was accepted")
	}
}

// A retry under the key of the root it is based on must not refer to what it replaces.
func TestEncodeOverOwnKey(t *testing.T) {
	x := flat(1000)
	first, prev := mustEncode(t, x, testKey, nil)
	second, _ := mustEncode(t, x, testKey, prev)
	if !bytes.Equal(first, second) {
		t.Error("the second object relies on the first, whose key it takes")
	}
}

func storedChunks(x *Index) []StoredChunk {
	var list []StoredChunk
	for _, e := range x.Entries {
		for _, c := range e.Chunks {
			list = append(list, StoredChunk{c.Digest, c.Length, c.Location})
		}
	}
	return list
}

// Root.Chunks gives, over all segments, the chunks of the whole index, those of files that
// span segments too.
func TestRootChunks(t *testing.T) {
	x := big(20_000, MinChunkSize)
	object, root := mustEncode(t, x, testKey, nil)
	var got []StoredChunk
	for i, segment := range split(root, map[string][]byte{testKey: object}) {
		chunks, err := root.Chunks(i, segment)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, chunks...)
		if _, err := root.Chunks(i, segment[1:]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("cut segment: %v", err)
		}
	}
	if !slices.Equal(got, storedChunks(x)) {
		t.Errorf("%d chunks, want %d, or other ones", len(got), len(storedChunks(x)))
	}
}

func TestChunkListRoundTrip(t *testing.T) {
	for name, chunks := range map[string][]StoredChunk{"empty": nil, "random": storedChunks(randomIndex(3)), "big": storedChunks(big(30_000, MaxChunkSize))} {
		data, list, err := EncodeChunks(chunks)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeChunks(data)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(&ChunkList{list.Digest, blobsOf(chunks), nil}, &ChunkList{got.Digest, got.Blobs, nil}, cmpopts.EquateEmpty()); diff != "" || !slices.Equal(got.Chunks, chunks) {
			t.Errorf("%s: (-want +got)\n%s", name, diff)
		}
	}
	bad := []StoredChunk{{Length: 5, Location: Location{Blob: "b", Stored: 6}}}
	if _, _, err := EncodeChunks(bad); !errors.Is(err, ErrCorrupt) {
		t.Errorf("bad chunk: %v", err)
	}
}

// A million files go through the codec within 1 GiB (I10). All allocations of both ways
// are counted, whether or not the collector got at them in between.
func TestMillionFiles(t *testing.T) {
	x := flat(1_000_000)
	var before, encoded, decoded runtime.MemStats
	runtime.ReadMemStats(&before)
	object, _ := mustEncode(t, x, testKey, nil)
	runtime.ReadMemStats(&encoded)
	y := decode(t, object)
	runtime.ReadMemStats(&decoded)
	const mib = 1 << 20
	t.Logf("index of %d MiB; encode allocated %d MiB, decode %d MiB", len(object)/mib,
		(encoded.TotalAlloc-before.TotalAlloc)/mib, (decoded.TotalAlloc-encoded.TotalAlloc)/mib)
	if total := decoded.TotalAlloc - before.TotalAlloc; total > 1<<30 {
		t.Errorf("%d MiB were allocated", total/mib)
	}
	if len(y.Entries) != len(x.Entries) || y.Totals() != x.Totals() {
		t.Error("the decoded index differs")
	}
	names := 0
	for _, e := range y.Entries {
		names += len(e.Path) + 80*len(e.Chunks)
	}
	runtime.GC()
	x, object = nil, nil
	runtime.GC()
	var held runtime.MemStats
	runtime.ReadMemStats(&held)
	if per := (int64(held.HeapAlloc) - int64(names)) / int64(len(y.Entries)); per > 200 {
		t.Errorf("%d bytes a file beyond names and chunks, I10 allows 200", per)
	}
	runtime.KeepAlive(y)
}

func TestDigestText(t *testing.T) {
	d := Sum([]byte("x"))
	text, _ := d.MarshalText()
	var back Digest
	if err := back.UnmarshalText(text); err != nil || back != d || string(text) != d.String() || d.IsZero() {
		t.Errorf("%s -> %s, %v", d, back, err)
	}
	for _, bad := range []string{"", "00", strings.ToUpper(d.String()), strings.Repeat("g", 64), d.String() + "0"} {
		if _, err := ParseDigest(bad); !errors.Is(err, ErrCorrupt) {
			t.Errorf("ParseDigest(%q): %v", bad, err)
		}
	}
}
