package place

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/snapshot"
)

// compressible is a tree whose chunks get shorter, of one length and another, and some that
// do not.
func compressible() literal {
	var b strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&b, "line %d of many\n", i)
	}
	long := b.String()
	return literal{
		"d":       dir(0o755),
		"d/long":  text(long),
		"d/twice": text(long[:100_000]),
		"d/noise": noise(1, 60_000),
		"short":   text(strings.Repeat("ab", 600)),
	}
}

// Chunks that are stored compressed are restored, into a new target and beside what is there;
// bytes count as what they are in the file.
func TestCompressedChunks(t *testing.T) {
	w := newWorld(t)
	w.packs.zip = true
	src, x := w.source("src", compressible())
	rep := w.mustRestore(src, x, w.path("out"), nil)
	if total := x.Totals(); rep.BytesFetched+rep.BytesReused != total.Bytes || w.packs.served >= rep.BytesFetched {
		t.Errorf("report %+v, %d bytes were read of %+v", rep, w.packs.served, total)
	}
	must(t, os.WriteFile(w.path("out/d/long"), []byte("changed"), 0o644))
	w.mustRestore(src, x, w.path("out"), nil)
}

// I6: any bit that is flipped in what is stored, and any lie of the index about it, ends in
// ErrCorrupt with the place, and without a target.
func TestCompressedDamage(t *testing.T) {
	w := newWorld(t)
	w.packs.zip = true
	_, x := w.source("src", compressible())
	n := 0
	refused := func(what string) {
		t.Helper()
		n++ // a target of its own: what is staged already is not fetched again
		target := w.path(fmt.Sprint("out", n))
		_, err := w.restore(x, target, nil)
		if !errors.Is(err, sentinel.Corrupt) {
			t.Fatalf("%s: got %v", what, err)
		}
		if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("%s: a failed restore made its target", what)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(w.packs.blobs)) {
		blob := w.packs.blobs[key]
		for at := 0; at < len(blob); at += 1 + len(blob)/20 {
			good := bytes.Clone(blob)
			blob[at] ^= 0x04
			refused(key)
			copy(blob, good)
		}
	}
	e, _ := x.Lookup("d/long")
	c := &e.Chunks[len(e.Chunks)-1] // the only one of its content
	if c.Encoding != snapshot.Zstd {
		t.Fatal("the chunk is not compressed")
	}
	good := *c
	for _, stored := range []uint32{c.Stored - 1, c.Stored + 1, 1} {
		c.Stored = stored
		refused(fmt.Sprint("stored as ", stored, " for ", good.Stored))
	}
	*c = good
	w.packs.blobs["bomb"] = snapshot.AppendZstd(nil, make([]byte, 64<<20))
	c.Location = snapshot.Location{Blob: "bomb", Stored: uint32(len(w.packs.blobs["bomb"])), Encoding: snapshot.Zstd}
	refused("bomb")
}

// The error of a damaged chunk names the blob, the place in it, and a file that needs it.
func TestCompressedDamageIsNamed(t *testing.T) {
	w := newWorld(t)
	w.packs.zip = true
	_, x := w.source("src", compressible())
	e, _ := x.Lookup("d/long")
	c := e.Chunks[2]
	w.packs.blobs[c.Blob][c.Location.Offset+c.Stored/2] ^= 0x20
	_, err := w.restore(x, w.path("out"), nil)
	b, ok := errors.AsType[*BlobError](err)
	if !ok || b.Blob != c.Blob || b.Offset != int64(c.Location.Offset) || b.Length != int64(c.Stored) || !strings.HasPrefix(b.Path, "d/") {
		t.Fatalf("got %+v, %v; want %+v", b, err, c.Location)
	}
}
