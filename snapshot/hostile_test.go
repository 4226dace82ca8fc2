package snapshot

import (
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// resealed puts bodies that Encode would not write into intact envelopes.
func resealed(t testing.TB, k kind, body, tail []byte) []byte {
	t.Helper()
	e, _, err := k.seal(body, tail)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// decodeBody decodes a segment with this body as if a root named it.
func decodeBody(t testing.TB, body, tail []byte, entries int) ([]Entry, error) {
	t.Helper()
	data, digest, err := segmentKind.seal(body, tail)
	if err != nil {
		t.Fatal(err)
	}
	root := Root{Segments: []SegmentRef{{
		Location: Location{Blob: testKey, Stored: uint32(len(data))},
		Digest:   digest, Content: contentDigest(body, tail), Entries: uint32(entries),
	}}}
	return root.decodeSegments([][]byte{data})
}

// A newer version, a field that must be known, and the encoding kept for later are not
// damage; what may be ignored is.
func TestUnknown(t *testing.T) {
	object, root := mustEncode(t, flat(3), testKey, nil)
	body, tail, _, err := rootKind.open(object[:root.Size])
	if err != nil {
		t.Fatal(err)
	}
	unknown := func(tag uint64) error {
		_, err := DecodeRoot(resealed(t, rootKind, appendField(slices.Clone(body), tag, "new"), tail), testKey)
		return err
	}
	if err := unknown(21); err != nil {
		t.Errorf("odd field: %v", err)
	}
	if err := unknown(22); !errors.Is(err, ErrUnsupported) {
		t.Errorf("even field: %v", err)
	}
	if err := unknown(20); !errors.Is(err, ErrCorrupt) {
		t.Errorf("field twice: %v", err)
	}
	if err := unknown(1); !errors.Is(err, ErrCorrupt) {
		t.Errorf("field out of order: %v", err)
	}

	newer := slices.Clone(object[:root.Size])
	binary.LittleEndian.PutUint16(newer[atVersion:], version+1)
	if _, err := DecodeRoot(newer, testKey); !errors.Is(err, ErrCorrupt) {
		t.Errorf("newer version with a wrong digest: %v", err)
	}
	d := envelopeDigest(newer)
	copy(newer[atDigest:], d[:])
	if _, err := DecodeRoot(newer, testKey); !errors.Is(err, ErrUnsupported) {
		t.Errorf("newer version: %v", err)
	}
}

// The table of blobs is sorted and does not name the index itself.
func TestRootBlobTable(t *testing.T) {
	for name, keys := range map[string][]string{
		"unsorted": {"b", "a"}, "twice": {"a", "a"}, "own": {"a", testKey}, "bad key": {"a", "b//c"},
	} {
		r := Root{}
		for _, key := range keys {
			r.Blobs = append(r.Blobs, BlobUse{key, 1})
		}
		data, _, err := r.encode(testKey)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeRoot(data, testKey); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFieldMissing(t *testing.T) {
	object, root := mustEncode(t, flat(3), testKey, nil)
	body, tail, _, err := rootKind.open(object[:root.Size])
	if err != nil {
		t.Fatal(err)
	}
	for at := range rootTags {
		var less []byte
		for i, r := 0, (reader{b: body}); i < len(rootTags); i++ {
			tag := r.uvarint()
			if content := r.bytes(r.uvarint()); i != at {
				less = appendField(less, tag, content)
			}
		}
		if _, err := DecodeRoot(resealed(t, rootKind, less, tail), testKey); !errors.Is(err, ErrCorrupt) {
			t.Errorf("without field %d: %v", rootTags[at], err)
		}
	}
}

// body makes the body of a segment.
func body(records, strings int, names, values string, rest ...byte) []byte {
	var b []byte
	for _, n := range []int{records, strings, len(names), len(values)} {
		b = binary.AppendUvarint(b, uint64(n))
	}
	// The strings come first in rest, one byte each.
	for range strings {
		b = append(b, 1, rest[0])
		rest = rest[1:]
	}
	b = append(b, names...)
	b = append(b, values...)
	return append(b, rest...)
}

// Each rule of a segment's form, broken by hand.
func TestSegmentForm(t *testing.T) {
	meta := []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} // mode, uid, gid, user, group, time
	record := func(flags byte, path byte, rest ...byte) []byte {
		return slices.Concat([]byte{flags, path}, meta, rest)
	}
	digest := make([]byte, 32)
	directory := record(byte(Dir), 1)
	chunk := []byte{0, 5, 1, 0, 0}
	withChunk := record(0, 1, slices.Concat([]byte{5, 4, 1}, chunk)...)
	tests := []struct {
		name    string
		body    []byte
		tail    []byte
		entries int
		want    error
	}{
		{"good directory", body(1, 0, "a", "", directory...), nil, 1, nil},
		{"good file", body(1, 1, "a", "", slices.Concat([]byte("b"), withChunk)...), digest, 1, nil},
		{"odd extension", body(1, 0, "a", "", slices.Concat(record(byte(Dir)|flagExtension, 1), []byte{1, 3, 2, 'x', 'y'})...), nil, 1, nil},
		{"even extension", body(1, 0, "a", "", slices.Concat(record(byte(Dir)|flagExtension, 1), []byte{1, 4, 2, 'x', 'y'})...), nil, 1, ErrUnsupported},
		{"no extension", body(1, 0, "a", "", slices.Concat(record(byte(Dir)|flagExtension, 1), []byte{0})...), nil, 1, ErrCorrupt},
		{"extension twice", body(1, 0, "a", "", slices.Concat(record(byte(Dir)|flagExtension, 1), []byte{2, 3, 0, 3, 0})...), nil, 1, ErrCorrupt},
		{"good compressed chunk", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 1, 0, 1, 4))...), digest, 1, nil},
		{"compressed to nothing", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 1, 0, 1, 0))...), digest, 1, ErrCorrupt},
		{"compressed to no less", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 1, 0, 1, 5))...), digest, 1, ErrCorrupt},
		{"stored length cut off", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 1, 0, 1))...), digest, 1, ErrCorrupt},
		{"empty compressed chunk", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 0, 1, 0, 1, 0))...), digest, 1, ErrCorrupt},
		{"chunk encoding", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 1, 0, 2, 3))...), digest, 1, ErrUnsupported},
		{"unknown flag", body(1, 0, "a", "", record(byte(Dir)|64, 1)...), nil, 1, ErrCorrupt},
		{"fewer entries", body(1, 0, "a", "", directory...), nil, 2, ErrCorrupt},
		{"more entries", body(1, 0, "a", "", directory...), nil, 0, ErrCorrupt},
		{"more records", body(2, 0, "a", "", directory...), nil, 1, ErrCorrupt},
		{"bytes left over", body(1, 0, "a", "", slices.Concat(directory, []byte{0})...), nil, 1, ErrCorrupt},
		{"names left over", body(1, 0, "ab", "", directory...), nil, 1, ErrCorrupt},
		{"names cut off", body(1, 0, "", "", directory...), nil, 1, ErrCorrupt},
		{"values left over", body(1, 0, "a", "v", directory...), nil, 1, ErrCorrupt},
		{"digest left over", body(1, 0, "a", "", directory...), digest, 1, ErrCorrupt},
		{"half a digest", body(1, 0, "a", "", directory...), digest[:16], 1, ErrCorrupt},
		{"digest missing", body(1, 1, "a", "", slices.Concat([]byte("b"), withChunk)...), nil, 1, ErrCorrupt},
		{"unknown string", body(1, 0, "a", "", withChunk...), digest, 1, ErrCorrupt},
		{"blob 0", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 0, 0, 0))...), digest, 1, ErrCorrupt},
		{"place below 0", body(1, 1, "a", "", slices.Concat([]byte("b"), record(0, 1, 5, 4, 1, 0, 5, 1, 1, 0))...), digest, 1, ErrCorrupt},
		{"empty link", body(1, 0, "a", "", record(byte(Symlink)|flagLink, 1, 0)...), nil, 1, ErrCorrupt},
		{"no xattrs", body(1, 0, "a", "", record(byte(Dir)|flagXattrs, 1, 0)...), nil, 1, ErrCorrupt},
		{"too many xattrs", body(1, 0, "a", "", record(byte(Dir)|flagXattrs, 1, 200, 1)...), nil, 1, ErrCorrupt},
		{"continuation of nothing", body(1, 1, "a", "", slices.Concat([]byte("b"), []byte{flagContinuation, 1, 1}, chunk)...), digest, 0, ErrCorrupt},
		{"continuation of a directory", body(2, 1, "aa", "", slices.Concat([]byte("b"), directory, []byte{flagContinuation, 1, 1}, chunk)...), digest, 1, ErrCorrupt},
		{"continuation of another", body(2, 1, "ac", "", slices.Concat([]byte("b"), withChunk, []byte{flagContinuation, 1, 1}, chunk)...), slices.Concat(digest, digest), 1, ErrCorrupt},
		{"empty continuation", body(2, 1, "aa", "", slices.Concat([]byte("b"), withChunk, []byte{flagContinuation, 1, 0})...), digest, 1, ErrCorrupt},
		{"continuation with a type", body(2, 1, "aa", "", slices.Concat([]byte("b"), withChunk, []byte{flagContinuation | 1, 1, 1}, chunk)...), slices.Concat(digest, digest), 1, ErrCorrupt},
	}
	for _, tt := range tests {
		if _, err := decodeBody(t, tt.body, tt.tail, tt.entries); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
}

// A continuation that opens a segment belongs to the last entry before, and to no other.
func TestContinuationOverSegments(t *testing.T) {
	digest := make([]byte, 32)
	chunk := []byte{0, 5, 1, 0, 0}
	first := body(1, 1, "a", "", slices.Concat([]byte("b"), []byte{0, 1}, make([]byte, 17), []byte{5, 4, 1}, chunk)...)
	directory := body(1, 0, "a", "", slices.Concat([]byte{byte(Dir), 1}, make([]byte, 17))...)
	more := func(path string) []byte {
		return body(1, 1, path, "", slices.Concat([]byte("b"), []byte{flagContinuation, 1, 1}, chunk)...)
	}
	two := body(2, 1, "ca", "", slices.Concat([]byte("b"), []byte{flagContinuation, 1, 1}, chunk, []byte{flagContinuation, 1, 1}, chunk)...)
	tests := []struct {
		name   string
		bodies [][]byte
		tails  [][]byte
		want   error
	}{
		{"good", [][]byte{first, more("a"), more("a")}, [][]byte{digest, digest, digest}, nil},
		{"of another", [][]byte{first, more("c")}, [][]byte{digest, digest}, ErrCorrupt},
		{"of a directory", [][]byte{directory, more("a")}, [][]byte{nil, digest}, ErrCorrupt},
		{"of two", [][]byte{first, two}, [][]byte{digest, slices.Concat(digest, digest)}, ErrCorrupt},
	}
	for _, tt := range tests {
		root, segments := rootOf(t, tt.bodies, tt.tails)
		entries, err := root.decodeSegments(segments)
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
		if err == nil && len(entries[0].Chunks) != len(tt.bodies) {
			t.Errorf("%s: %d chunks", tt.name, len(entries[0].Chunks))
		}
	}
}

// rootOf makes a root for segments of which the first has one entry and the others none.
func rootOf(t *testing.T, bodies, tails [][]byte) (*Root, [][]byte) {
	t.Helper()
	root, segments := &Root{}, make([][]byte, len(bodies))
	for i := range bodies {
		data, digest, err := segmentKind.seal(bodies[i], tails[i])
		if err != nil {
			t.Fatal(err)
		}
		segments[i] = data
		root.Segments = append(root.Segments, SegmentRef{
			Location: Location{Stored: uint32(len(data))}, Digest: digest, Content: contentDigest(bodies[i], tails[i]),
		})
	}
	root.Segments[0].Entries = 1
	return root, segments
}

// allocated returns how many bytes f allocates.
func allocated(f func()) uint64 {
	encoder()
	decoder()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// allocationLimit is what decoding n hostile bytes may allocate: a body of maxRatio times
// as much, whose shortest records become values some twenty times as long, and what the
// decompressor needs.
func allocationLimit(n int) uint64 { return 20*maxRatio*uint64(n) + 2<<20 }

// I6: announced sizes and counts cost nothing until the bytes for them are there.
func TestHostileAllocation(t *testing.T) {
	bomb := make([]byte, 16<<20)
	header := func(k kind, bodyLen, frame uint32, rest []byte) []byte {
		e := append(make([]byte, headerLen), rest...)
		copy(e, k.magic)
		binary.LittleEndian.PutUint16(e[atVersion:], version)
		binary.LittleEndian.PutUint32(e[atLength:], uint32(len(e)))
		binary.LittleEndian.PutUint32(e[atBody:], bodyLen)
		binary.LittleEndian.PutUint32(e[atFrame:], frame)
		d := envelopeDigest(e)
		copy(e[atDigest:], d[:])
		return e
	}
	frame := encoder().EncodeAll(bomb, nil)
	tests := map[string][]byte{
		"body longer than allowed for its bytes": header(rootKind, uint32(len(bomb)), uint32(len(frame)), frame),
		"frame longer than the body":             header(rootKind, 16, uint32(len(frame)), frame),
		"frame of 4 GiB":                         header(rootKind, 16, 1<<32-1, frame),
		"body of 4 GiB":                          header(rootKind, 1<<32-1, uint32(len(frame)), frame),
		"no frame":                               header(rootKind, 0, 0, nil),
	}
	for name, data := range tests {
		var err error
		got := allocated(func() { _, err = DecodeRoot(data, testKey) })
		if !errors.Is(err, ErrCorrupt) || got > allocationLimit(len(data)) {
			t.Errorf("%s: %v, %d bytes allocated for %d", name, err, got, len(data))
		}
	}
}

// The most that the records of a segment can be made to cost stays within the limit.
func TestHostileSegmentAllocation(t *testing.T) {
	const n = 100_000
	record := func(tail ...byte) []byte { return append(make([]byte, 19), tail...) }
	xattrs := body(1, 0, strings.Repeat("x", n), "", append(binary.AppendUvarint(append([]byte{flagXattrs | 1, 0}, make([]byte, 17)...), n), make([]byte, 2*n)...)...)
	tests := map[string]struct {
		body    []byte
		entries int
	}{
		"entries":     {body(n, 0, "", "", slices.Repeat(slices.Concat([]byte{1}, record()[1:]), n)...), n},
		"xattrs":      {xattrs, 1},
		"few strings": {slices.Concat([]byte{1, 0xff, 0xff, 0x7f, 0, 0}, make([]byte, n)), 1},
	}
	for name, tt := range tests {
		data, digest, err := segmentKind.seal(tt.body, nil)
		if err != nil {
			t.Fatal(err)
		}
		ref := SegmentRef{Location: Location{Blob: testKey, Stored: uint32(len(data))}, Digest: digest, Content: contentDigest(tt.body, nil), Entries: uint32(tt.entries)}
		root := Root{Segments: []SegmentRef{ref}}
		got := allocated(func() { _, _ = root.Assemble([][]byte{data}) })
		t.Logf("%s: %d bytes allocated for %d", name, got, len(data))
		if got > allocationLimit(len(data)) {
			t.Errorf("%s: %d bytes allocated for %d", name, got, len(data))
		}
	}
	root := Root{Segments: []SegmentRef{{Location: Location{Stored: 100}, Entries: 1 << 20}}}
	if got := allocated(func() { _, _ = root.Assemble([][]byte{make([]byte, 100)}) }); got > allocationLimit(100) {
		t.Errorf("announced entries: %d bytes allocated", got)
	}
}
