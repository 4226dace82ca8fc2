package snapferry

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/internal/place"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// prose returns n bytes of the lines of a log, other ones for each seed. They get to less
// than half.
func prose(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 9))
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "order=%d customer=%x state=shipped amount=%d\n", r.IntN(1e9), r.Uint32(), r.IntN(1e4))
	}
	return b.String()[:n]
}

// encodingsOf returns how the chunks of a file of a checkpoint are stored.
func (w *world) encodingsOf(id, path string) (out []snapshot.Encoding) {
	w.t.Helper()
	cp, err := w.repo().Show(w.t.Context(), kvTask, at(w.t, id))
	check(w.t, err)
	x, err := w.repo().Index(w.t.Context(), cp, "kv")
	check(w.t, err)
	e, _ := x.Lookup(path)
	for _, c := range e.Chunks {
		if !slices.Contains(out, c.Encoding) {
			out = append(out, c.Encoding)
		}
	}
	return out
}

// mixture is what compression is to be tried on, with how it must end.
var mixture = map[string]struct {
	data string
	want snapshot.Encoding
}{
	"log":        {prose(1, 9<<20), snapshot.Zstd},
	"short.log":  {prose(2, 3000), snapshot.Zstd},
	"tiny":       {prose(3, 100), snapshot.Raw},
	"noise":      {bulk(1, 5<<20), snapshot.Raw},
	"t.sst":      {prose(4, 100_000), snapshot.Raw},
	"Photo.JPG":  {prose(5, 100_000), snapshot.Raw},
	"d/a.tar.gz": {prose(6, 100_000), snapshot.Raw},
	"zeroes":     {strings.Repeat("\x00", 60<<10), snapshot.Zstd},
}

// What gets shorter is stored compressed, and comes back; a dry run says how much it is.
func TestCompression(t *testing.T) {
	w := newWorld(t)
	var logical int64
	for name, m := range mixture {
		w.write(map[string]string{name: m.data})
		logical += int64(len(m.data))
	}
	dry, err := DryRun(t.Context(), kvTask, w.blobs, w.cps, w.sources(), &w.opts)
	check(t, err)
	task := w.open()
	rep := w.mustCommit(task, nil)
	s := rep.Stores["kv"]
	if s.BytesUploaded != logical || s.BytesStored >= logical-4<<20 || s.BytesStored < 5<<20 {
		t.Errorf("%d bytes: report %+v", logical, s)
	}
	if dry.Stores["kv"] != s {
		t.Errorf("dry run said %+v, the commit %+v", dry.Stores["kv"], s)
	}
	var packs int64
	for _, key := range w.packsOf(rep.Checkpoint) {
		info, err := w.blobs.Stat(t.Context(), key)
		check(t, err)
		packs += info.Size
	}
	if packs != s.BytesStored {
		t.Errorf("packs have %d bytes, the report says %d", packs, s.BytesStored)
	}
	for name, m := range mixture {
		if got := w.encodingsOf(rep.Checkpoint, name); !slices.Equal(got, []snapshot.Encoding{m.want}) {
			t.Errorf("%s: encodings %d, want %d", name, got, m.want)
		}
	}
	w.wantSound()
	wantSameTree(t, w.restore(rep.Checkpoint), w.dir)

	out := filepath.Join(t.TempDir(), "kv")
	got, err := task.Restore(t.Context(), map[string]string{"kv": out}, nil)
	check(t, err)
	if r := got.Stores["kv"]; r.BytesFetched != logical {
		t.Errorf("restore counts %+v, want %d bytes fetched", r, logical)
	}
}

// Content is reused however it is stored, and what the option says counts for new content.
func TestCompressionOff(t *testing.T) {
	w := newWorld(t)
	w.opts.CacheDir = ""
	w.opts.Compression = CompressOff
	w.write(map[string]string{"a": prose(1, 100_000)})
	first := w.mustCommit(w.open(), nil)
	if s := first.Stores["kv"]; s.BytesStored != 100_000 {
		t.Errorf("off: %+v", s)
	}
	w.opts.Compression = CompressAuto
	w.write(map[string]string{"a-again": prose(1, 100_000), "b": prose(2, 100_000)})
	second := w.mustCommit(w.open(), nil)
	if s := second.Stores["kv"]; s.BytesUploaded != 100_000 || s.BytesStored > 60_000 {
		t.Errorf("on: %+v", s)
	}
	w.opts.Compression = CompressOff
	w.write(map[string]string{"b-again": prose(2, 100_000)})
	third := w.mustCommit(w.open(), nil)
	if s := third.Stores["kv"]; s.BytesUploaded != 0 || s.BytesStored != 0 {
		t.Errorf("off again: %+v", s)
	}
	wantSameTree(t, w.restore(third.Checkpoint), w.dir)
	w.wantSound()
	w.opts.Compression = 7
	if _, err := Open(t.Context(), kvTask, w.blobs, w.cps, &w.opts); err == nil {
		t.Error("an unknown compression is accepted")
	}
}

// I6: a flipped bit in a compressed chunk ends a restore with the place, and verify tells
// which file it is.
func TestI6CompressedChunk(t *testing.T) {
	p := newPatient(t, 1)
	p.write(map[string]string{"log": prose(1, 300_000), "other": prose(2, 300_000)})
	p.latest = p.mustCommit(p.open(), nil)
	c := p.chunkOf(p.latest.Checkpoint, "log")
	if c.Encoding != snapshot.Zstd {
		t.Fatalf("stored as %+v", c)
	}
	defer p.damage(c.Blob, func(b []byte) []byte { b[c.Location.Offset+c.Stored/2] ^= 4; return b })()
	rep, err := p.opened.Verify(t.Context(), VerifyOptions{ReadData: true})
	check(t, err)
	if rep.OK || len(rep.Missing) != 0 || len(rep.Corrupt) != 1 || rep.Corrupt[0].Blob != c.Blob || rep.Corrupt[0].Path != "log" || rep.Corrupt[0].Length != 300_000 {
		t.Errorf("verify = %+v", rep)
	}
	err = p.tryRestore()
	b, ok := errors.AsType[*place.BlobError](err)
	if !errors.Is(err, ErrCorrupt) || !ok || b.Blob != c.Blob || b.Offset != int64(c.Location.Offset) || b.Path != "log" {
		t.Errorf("restore = %v", err)
	}
}

// A store's own word on its files counts as their names do.
func TestCompressedAlready(t *testing.T) {
	if !slices.IsSorted(compressedNames) {
		t.Error("the names are not sorted, so they are not found")
	}
	for e, want := range map[source.Entry]bool{
		{Path: "a/000012.sst"}: true, {Path: "a.GZ"}: true, {Path: "gz"}: false, {Path: "a.gz/b"}: false, {Path: "a"}: false,
		{Path: "000012.blob", Compressed: true}: true, {Path: "000012.log"}: false, {Path: "x.zst"}: true, {Path: ".7z"}: true,
	} {
		if got := compressedAlready(&e); got != want {
			t.Errorf("%s: %v", e.Path, got)
		}
	}
}

// A chunk of which only a part gets shorter is judged by all of it, and an eighth is the least.
func TestSqueezeHasToPay(t *testing.T) {
	p := newPress(1)
	room, err := p.enter(t.Context())
	check(t, err)
	defer p.leave(room)
	for _, tt := range []struct {
		soft, hard int
		want       bool
	}{{100_000, 0, true}, {2 << 20, 2 << 20, true}, {300_000, 3_700_000, false}, {0, 4 << 20, false}, {0, 5000, false}, {511, 0, false}} {
		data := []byte(prose(1, tt.soft) + bulk(1, tt.hard))
		stored := room.squeeze(data, snapshot.Sum(data))
		if (stored != nil) != tt.want || len(stored) > len(data)-len(data)/keepSaving {
			t.Errorf("%d soft and %d hard bytes are stored as %d", tt.soft, tt.hard, len(stored))
		}
	}
	data := []byte(prose(1, 100_000))
	if room.squeeze(data, snapshot.Sum(nil)) != nil { // as if the frame gave other bytes back
		t.Error("what does not decompress to the chunk is stored")
	}
}

// What a first backup costs for each byte: of noise nothing but the probe.
func BenchmarkPackerAdd(b *testing.B) {
	for _, kind := range []string{"noise", "prose"} {
		data := []byte(bulk(1, 4<<20))
		if kind == "prose" {
			data = []byte(prose(1, 4<<20))
		}
		for _, c := range []Compression{CompressAuto, CompressOff} {
			b.Run(fmt.Sprintf("%s/%s", kind, []string{"auto", "off"}[c]), func(b *testing.B) {
				p := newPress(1)
				room, err := p.enter(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(data)))
				for b.Loop() {
					d := snapshot.Sum(data)
					if c == CompressAuto {
						room.squeeze(data, d)
					}
				}
			})
		}
	}
}
