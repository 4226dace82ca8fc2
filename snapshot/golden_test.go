package snapshot

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var update = flag.Bool("update", false, "write the golden files anew; released ones must never change")

// goldenIndex has one of everything.
func goldenIndex() *Index {
	x := &Index{
		Job: "orders", Task: "p7", Store: "kv", Checkpoint: "20260102T030405.000006Z-0000000000000001-00000002",
		Created: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC), Prev: "t/orders/p7/b/x/1", Borrows: []string{"earlier"},
		Entries: []Entry{
			{Type: Dir, Mode: 0o755, User: "root", Group: "root", MTime: Time{1767323045, 1}},
			{Path: "000001.sst", Mode: 0o644, UID: 1000, GID: 100, User: "app", Group: "users", MTime: Time{-1, 999999999}, Size: 5, ChunkSize: DefaultChunkSize, Chunks: []Chunk{
				{Length: 5, Digest: Sum([]byte("hello")), Location: Location{Blob: pack(1), Offset: 0, Stored: 5}},
			}},
			{Path: "CURRENT", Type: Symlink, Mode: 0o777, Link: "sub/MANIFEST"},
			{Path: "empty", Mode: 0o7600, ChunkSize: MinChunkSize},
			{Path: "sub", Type: Dir, Mode: 0o700, UID: 1<<32 - 1, Xattrs: []Xattr{{"user.empty", nil}, {"user.note", []byte("\x00\xff")}}},
			{Path: "sub/MANIFEST", Link: "000001.sst", Mode: 0o644, UID: 1000, GID: 100, User: "app", Group: "users", MTime: Time{-1, 999999999}},
		},
	}
	long := Entry{Path: "sub/long\xff.db", Mode: 0o640, Size: 1200*MinChunkSize + 100, ChunkSize: MinChunkSize, User: "app"}
	for i := range int64(1201) {
		if i >= 10 && i < 20 {
			continue // a hole
		}
		length := uint32(min(MinChunkSize, long.Size-i*MinChunkSize))
		long.Chunks = append(long.Chunks, Chunk{
			Offset: i * MinChunkSize, Length: length, Digest: digestOf(uint64(i)),
			Location: Location{Blob: pack(2 + int(i%2)), Offset: uint32(i) * MinChunkSize, Stored: length},
		})
	}
	x.Entries = append(x.Entries, long)
	return x
}

// golden returns the bytes of a file in testdata, writing it first if asked to.
func golden(t *testing.T, name string, now []byte) []byte {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, now, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What version 1 wrote is read for ever, and version 1 is still what is written. Bodies are
// compared before compression, since a release of the compressor may change what comes
// after it.
func TestGoldenIndex(t *testing.T) {
	want := goldenIndex()
	object, root := mustEncode(t, want, testKey, nil)
	old := golden(t, "index-v1.bin", object)
	if diff := sameIndex(decode(t, old), want); diff != "" {
		t.Errorf("golden index decodes to something else (-want +got)\n%s", diff)
	}
	oldRoot, err := DecodeRoot(old, testKey)
	if err != nil {
		t.Fatal(err)
	}
	ignore := cmpopts.IgnoreFields(SegmentRef{}, "Location", "Digest")
	if diff := cmp.Diff(oldRoot, root, ignore, cmpopts.IgnoreFields(Root{}, "Digest", "Size")); diff != "" {
		t.Errorf("the root, or the content of segments, is written differently (-golden +now)\n%s", diff)
	}
	a := split(oldRoot, map[string][]byte{testKey: old})
	b := split(root, map[string][]byte{testKey: object})
	for i := range min(len(a), len(b)) {
		sameEnvelope(t, segmentKind, a[i], b[i])
	}
}

// compressedIndex is goldenIndex with every third chunk compressed.
func compressedIndex() *Index {
	x := goldenIndex()
	long := x.Entries[len(x.Entries)-1].Chunks
	for i := range long {
		if i%3 == 0 {
			long[i].Stored, long[i].Encoding = long[i].Length/2+uint32(i), Zstd
		}
	}
	return x
}

// The files have what version 1 gained with v0.3.0: compressed chunks.
func TestGoldenCompressed(t *testing.T) {
	x := compressedIndex()
	object, _ := mustEncode(t, x, testKey, nil)
	old := golden(t, "index-v1-zstd.bin", object)
	if diff := sameIndex(decode(t, old), x); diff != "" {
		t.Errorf("golden index decodes to something else (-want +got)\n%s", diff)
	}
	a, b := mustRoot(t, old), mustRoot(t, object)
	for i := range min(len(a.Segments), len(b.Segments)) {
		sameEnvelope(t, segmentKind, split(a, map[string][]byte{testKey: old})[i], split(b, map[string][]byte{testKey: object})[i])
	}

	chunks := storedChunks(x)[:20]
	data, _, err := EncodeChunks(chunks)
	if err != nil {
		t.Fatal(err)
	}
	oldList := golden(t, "chunks-v1-zstd.bin", data)
	list, err := DecodeChunks(oldList)
	if err != nil || !slices.Equal(list.Chunks, chunks) {
		t.Errorf("golden list decodes to something else: %v", err)
	}
	sameEnvelope(t, chunksKind, oldList, data)
}

func mustRoot(t *testing.T, object []byte) *Root {
	t.Helper()
	root, err := DecodeRoot(object, testKey)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func TestGoldenChunkList(t *testing.T) {
	chunks := storedChunks(goldenIndex())[:20]
	data, _, err := EncodeChunks(chunks)
	if err != nil {
		t.Fatal(err)
	}
	old := golden(t, "chunks-v1.bin", data)
	list, err := DecodeChunks(old)
	if err != nil || !slices.Equal(list.Chunks, chunks) {
		t.Errorf("golden list decodes to something else: %v", err)
	}
	sameEnvelope(t, chunksKind, old, data)
}

func sameEnvelope(t *testing.T, k kind, golden, now []byte) {
	t.Helper()
	oldBody, oldTail, _, err := k.open(golden)
	if err != nil {
		t.Fatal(err)
	}
	body, tail, _, err := k.open(now)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(oldBody, body) + cmp.Diff(oldTail, tail); diff != "" {
		t.Errorf("%s is written differently (-golden +now)\n%s", k.name, diff)
	}
}

// The example in the description of the format.
func TestExample(t *testing.T) {
	x := &Index{Job: "j", Task: "t", Store: "s", Checkpoint: "c", Created: time.Unix(1, 2).UTC(), Entries: []Entry{{
		Path: "f", Mode: 0o644, UID: 1, GID: 2, User: "u", MTime: Time{3, 4}, Size: 5, ChunkSize: DefaultChunkSize,
		Chunks: []Chunk{{Length: 5, Digest: Sum([]byte("hello")), Location: Location{Blob: "p/1", Offset: 7, Stored: 5}}},
	}}}
	object, root := mustEncode(t, x, "p/2", nil)
	fields, _, _, err := rootKind.open(object[:root.Size])
	if err != nil {
		t.Fatal(err)
	}
	segment, tail, _, err := segmentKind.open(object[root.Size:])
	if err != nil {
		t.Fatal(err)
	}
	digest := Sum([]byte("hello"))
	for _, part := range []struct {
		what      string
		got       []byte
		wantInHex string
	}{
		{"fields of the root before the segments", fields[:len(fields)-8], "02016a 040174 060173 080163 0a020202 0c00 0e0100 100701000000010505 12060103702f3105"},
		{"segment", segment, "01 02 01 00 0175 03702f31 66 00 01 a403 01 02 01 00 0300000000000000 04000000 05 8008 01 00 05 02 0e 00"},
		{"tail of the segment", tail, digest.String()},
	} {
		if want := strings.ReplaceAll(part.wantInHex, " ", ""); fmt.Sprintf("%x", part.got) != want {
			t.Errorf("%s: got %x, want %s", part.what, part.got, want)
		}
	}
}
