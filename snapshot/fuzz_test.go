package snapshot

import (
	"errors"
	"testing"
)

// checkDecoder fails if reading n bytes gave another error than it may, or allocated more
// than it may.
func checkDecoder(t *testing.T, n int, decode func() error) error {
	t.Helper()
	var err error
	if got := allocated(func() { err = decode() }); got > allocationLimit(n) {
		t.Fatalf("%d bytes allocated for %d", got, n)
	}
	if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported) {
		t.Fatalf("unexpected error: %v", err)
	}
	return err
}

// fuzzSeeds are small, as mutations of long inputs rarely hit something.
func fuzzSeeds() []*Index {
	return []*Index{
		{}, flat(2), {Entries: goldenIndex().Entries[:6]},
		{Entries: []Entry{with(data(5, 0, 5), place(Location{Blob: "b", Stored: 3, Encoding: Zstd})), link("g", "f")}},
		{Entries: []Entry{data(128<<10, 0, cell, 96<<10, cell, 112<<10, cell), link("g", "f")}},
	}
}

func FuzzObject(f *testing.F) {
	for _, x := range fuzzSeeds() {
		object, _ := mustEncode(f, x, testKey, nil)
		f.Add(object)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_ = checkDecoder(t, len(data), func() error {
			_, _ = RootSize(data)
			return readObject(data)
		})
	})
}

// FuzzRootBody gets past the digest.
func FuzzRootBody(f *testing.F) {
	for _, x := range fuzzSeeds() {
		object, root := mustEncode(f, x, testKey, nil)
		body, tail, _, err := rootKind.open(object[:root.Size])
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body, tail)
	}
	f.Fuzz(func(t *testing.T, body, tail []byte) {
		data := resealed(t, rootKind, body, tail)
		var root *Root
		err := checkDecoder(t, len(data), func() (err error) {
			root, err = DecodeRoot(data, testKey)
			return err
		})
		if err != nil {
			return
		}
		for _, s := range root.Segments {
			if uint64(s.Offset)+uint64(s.Stored) > 1<<32-1 || s.Stored > MaxSegmentSize {
				t.Fatalf("segment out of bounds: %+v", s)
			}
		}
	})
}

// FuzzSegmentBody gets past both digests; what is accepted is encoded and decoded again.
func FuzzSegmentBody(f *testing.F) {
	for _, x := range fuzzSeeds()[1:] {
		object, root := mustEncode(f, x, testKey, nil)
		body, tail, _, err := segmentKind.open(split(root, map[string][]byte{testKey: object})[0])
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body, tail, len(x.Entries))
	}
	f.Fuzz(func(t *testing.T, body, tail []byte, announced int) {
		stored := len(resealed(t, segmentKind, body, tail))
		var entries []Entry
		err := checkDecoder(t, 3*stored, func() (err error) { // sealing is in it too
			entries, err = decodeBody(t, body, tail, min(max(announced, 0), 1<<20))
			return err
		})
		x := &Index{Entries: entries}
		if err != nil || x.Validate() != nil {
			return
		}
		object, _ := mustEncode(t, x, testKey, nil)
		if diff := sameIndex(decode(t, object), x); diff != "" {
			t.Fatalf("second round differs (-want +got)\n%s", diff)
		}
	})
}

func FuzzChunkList(f *testing.F) {
	for _, x := range fuzzSeeds() {
		data, _, err := EncodeChunks(storedChunks(x))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_ = checkDecoder(t, len(data), func() error { _, err := DecodeChunks(data); return err })
	})
}

// FuzzChunkListBody gets past the digest.
func FuzzChunkListBody(f *testing.F) {
	for _, x := range fuzzSeeds() {
		data, _, err := EncodeChunks(storedChunks(x))
		if err != nil {
			f.Fatal(err)
		}
		body, tail, _, err := chunksKind.open(data)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body, tail)
	}
	f.Fuzz(func(t *testing.T, body, tail []byte) {
		data := resealed(t, chunksKind, body, tail)
		var list *ChunkList
		err := checkDecoder(t, len(data), func() (err error) {
			list, err = DecodeChunks(data)
			return err
		})
		if err != nil {
			return
		}
		if _, _, err := EncodeChunks(list.Chunks); err != nil {
			t.Fatalf("accepted list does not encode: %v", err)
		}
	})
}

func FuzzParseDigest(f *testing.F) {
	f.Add(Sum(nil).String())
	f.Fuzz(func(t *testing.T, s string) {
		if d, err := ParseDigest(s); err == nil && d.String() != s {
			t.Fatalf("%q has another spelling %q", d.String(), s)
		}
	})
}
