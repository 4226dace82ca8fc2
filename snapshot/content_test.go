package snapshot

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"
)

// text returns n bytes that compress well, other ones for each seed.
func text(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 3))
	words := strings.Fields("order shipped customer pending amount paid open closed returned")
	var b []byte
	for len(b) < n {
		b = append(append(b, words[r.IntN(len(words))]...), byte('0'+r.IntN(10)))
	}
	return b[:n]
}

// compressed returns data as a chunk that is stored compressed.
func compressed(data []byte) (*Chunk, []byte) {
	stored := AppendZstd(nil, data)
	c := &Chunk{Length: uint32(len(data)), Digest: Sum(data)}
	c.Location = Location{Blob: "b", Stored: uint32(len(stored)), Encoding: Zstd}
	return c, stored
}

// What is stored compressed, or raw, comes back, and from short reads too.
func TestChunkComesBack(t *testing.T) {
	for _, n := range []int{100, 4096, hashUnit + 1, MaxChunkSize} {
		data := text(1, n)
		c, stored := compressed(data)
		raw := &Chunk{Length: c.Length, Digest: c.Digest, Location: Location{Stored: c.Length}}
		for _, buf := range [][]byte{nil, make([]byte, n), make([]byte, MaxChunkSize)} {
			for _, tt := range []struct {
				c      *Chunk
				stored []byte
			}{{c, stored}, {raw, data}} {
				got, err := tt.c.Unpack(tt.stored, buf)
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d bytes, encoding %d: %d come back, %v", n, tt.c.Encoding, len(got), err)
				}
				body := iotest.HalfReader(io.MultiReader(bytes.NewReader(tt.stored), strings.NewReader("what follows")))
				if got, err = tt.c.Read(body, buf); err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d bytes, encoding %d: %d are read, %v", n, tt.c.Encoding, len(got), err)
				}
			}
		}
	}
}

// I6: whatever is stored instead of a chunk is damage, and costs no more memory than one.
func TestHostileContent(t *testing.T) {
	data := text(1, 100_000)
	good, stored := compressed(data)
	bomb := AppendZstd(nil, make([]byte, 16<<20))
	window := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 0x01, 0x00, 0x00} // a window of 2 TiB
	with := func(change func(c *Chunk)) Chunk {
		c := *good
		change(&c)
		return c
	}
	sized := func(p []byte) Chunk { return with(func(c *Chunk) { c.Stored = uint32(len(p)) }) }
	tests := map[string]struct {
		c      Chunk
		stored []byte
		want   error
	}{
		"longer than announced":   {with(func(c *Chunk) { c.Length-- }), stored, ErrCorrupt},
		"shorter than announced":  {with(func(c *Chunk) { c.Length++ }), stored, ErrCorrupt},
		"other bytes":             {with(func(c *Chunk) { c.Digest[3] ^= 1 }), stored, ErrCorrupt},
		"stored length is a lie":  {with(func(c *Chunk) { c.Stored-- }), stored, ErrCorrupt},
		"cut off":                 {sized(stored[1:]), stored[:len(stored)-1], ErrCorrupt},
		"no frame":                {sized(data[:100]), data[:100], ErrCorrupt},
		"bomb":                    {sized(bomb), bomb, ErrCorrupt},
		"window without end":      {sized(window), window, ErrCorrupt},
		"two frames":              {sized(slices.Concat(stored, stored)), slices.Concat(stored, stored), ErrCorrupt},
		"nothing":                 {with(func(c *Chunk) { c.Stored = 0 }), nil, ErrCorrupt},
		"no chunk":                {with(func(c *Chunk) { c.Length = 0 }), stored, ErrCorrupt},
		"longer than chunks are":  {with(func(c *Chunk) { c.Length = MaxChunkSize + 1 }), stored, ErrCorrupt},
		"length of 4 GiB":         {with(func(c *Chunk) { c.Length = 1<<32 - 1 }), stored, ErrCorrupt},
		"not shorter":             {with(func(c *Chunk) { c.Length = c.Stored }), stored, ErrCorrupt},
		"raw of another length":   {with(func(c *Chunk) { c.Encoding = Raw }), stored, ErrCorrupt},
		"raw of other bytes":      {with(func(c *Chunk) { c.Encoding, c.Length = Raw, c.Stored }), stored, ErrCorrupt},
		"encoding of times ahead": {with(func(c *Chunk) { c.Encoding = 2 }), stored, ErrUnsupported},
	}
	for name, tt := range tests {
		var got []byte
		var err error
		n := allocated(func() { got, err = tt.c.Unpack(tt.stored, nil) })
		if got != nil || !errors.Is(err, tt.want) || n > MaxChunkSize {
			t.Errorf("%s: unpacked to %d bytes, %v, %d bytes allocated", name, len(got), err, n)
		}
		if got, err = tt.c.Read(bytes.NewReader(tt.stored), nil); got != nil || !errors.Is(err, tt.want) {
			t.Errorf("%s: read as %d bytes, %v", name, len(got), err)
		}
	}
}

// Every single flipped bit of the stored bytes is found.
func TestFlippedBits(t *testing.T) {
	c, stored := compressed(text(1, 3000))
	for bit := range 8 * len(stored) {
		stored[bit/8] ^= 1 << (bit % 8)
		if got, err := c.Unpack(stored, nil); err == nil && !bytes.Equal(got, text(1, 3000)) || err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatalf("bit %d: %v", bit, err)
		}
		stored[bit/8] ^= 1 << (bit % 8)
	}
}

// An error of the store stays what it is; an early end is damage.
func TestReadErrors(t *testing.T) {
	c, stored := compressed(text(1, 3000))
	raw := &Chunk{Length: c.Length, Digest: c.Digest, Location: Location{Stored: c.Length}}
	broken := errors.New("broken")
	for _, c := range []*Chunk{c, raw} {
		body := io.MultiReader(bytes.NewReader(stored[:10]), iotest.ErrReader(broken))
		if _, err := c.Read(body, nil); !errors.Is(err, broken) {
			t.Errorf("encoding %d: got %v, want the store's error", c.Encoding, err)
		}
		if _, err := c.Read(bytes.NewReader(stored[:10]), nil); !errors.Is(err, ErrCorrupt) {
			t.Errorf("encoding %d: early end: %v", c.Encoding, err)
		}
	}
}

// Chunks are unpacked by many at once, each into its own buffer.
func TestUnpackConcurrently(t *testing.T) {
	var group sync.WaitGroup
	for i := range uint64(8) {
		group.Go(func() {
			data, buf := text(i, 200_000), make([]byte, 200_000)
			c, stored := compressed(data)
			for range 20 {
				got, err := c.Read(bytes.NewReader(stored), buf)
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("%v", err)
				}
			}
		})
	}
	group.Wait()
}

// What a release has stored is read for ever: a frame of this compressor, and one with what
// the format allows and it does not write (a checksum, no content size).
func TestGoldenContent(t *testing.T) {
	data := text(7, 20_000)
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, zstd.WithEncoderCRC(true), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for part := range slices.Chunk(data, 3000) {
		if _, err := w.Write(part); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, now := range map[string][]byte{"chunk-zstd.bin": AppendZstd(nil, data), "chunk-zstd-stream.bin": b.Bytes()} {
		stored := golden(t, name, now)
		c := Chunk{Length: uint32(len(data)), Digest: Sum(data), Location: Location{Stored: uint32(len(stored)), Encoding: Zstd}}
		if got, err := c.Unpack(stored, nil); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzUnpack stores anything in place of a chunk that is all that it decompresses to, or not.
func FuzzUnpack(f *testing.F) {
	data := text(1, 2000)
	_, stored := compressed(data)
	f.Add(stored, uint32(len(data)), uint8(Zstd), data)
	f.Add(data, uint32(len(data)), uint8(Raw), data)
	f.Add(AppendZstd(nil, make([]byte, 1<<20)), uint32(1<<20), uint8(Zstd), []byte{})
	f.Add(slices.Concat(AppendZstd(nil, nil), []byte{0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 9}, stored), uint32(len(data)), uint8(Zstd), data)
	f.Fuzz(func(t *testing.T, stored []byte, length uint32, enc uint8, want []byte) {
		c := Chunk{Length: length, Digest: Sum(want), Location: Location{Stored: uint32(len(stored)), Encoding: Encoding(enc)}}
		var got []byte
		var err error
		if n := allocated(func() { got, err = c.Unpack(stored, nil) }); n > uint64(min(length, MaxChunkSize))+2<<20 {
			t.Fatalf("%d bytes allocated for a chunk of %d", n, length)
		}
		switch {
		case err == nil && !bytes.Equal(got, want):
			t.Fatal("other bytes have the digest")
		case err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported):
			t.Fatalf("unexpected error: %v", err)
		}
		read, rerr := c.Read(bytes.NewReader(stored), make([]byte, 100))
		if (rerr == nil) != (err == nil) || !bytes.Equal(read, got) {
			t.Fatalf("read: %v, unpacked: %v", rerr, err)
		}
	})
}
