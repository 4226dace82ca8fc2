package snapshot

import (
	"errors"
	"io"
	"slices"
	"sync"

	"github.com/zeebo/blake3"
)

// hashUnit is how much is read between two steps of hashing: the cache still has it.
const hashUnit = 128 << 10

// AppendZstd appends data, which is at most a chunk, as Zstd stores it. Whether that pays,
// and whether Unpack gives data back, is for the caller to look at.
func AppendZstd(dst, data []byte) []byte { return encoder().EncodeAll(data, dst) }

// Unpack returns the bytes of a chunk whose stored bytes are given. It has checked them
// against length and digest: what is wrong in any way is ErrCorrupt, whoever wrote it.
// Raw bytes are returned as they are; others come to lie in buf, if it is long enough.
func (c *Chunk) Unpack(stored, buf []byte) ([]byte, error) {
	if err := c.checkLengths(len(stored)); err != nil {
		return nil, err
	}
	data := stored
	if c.Encoding == Zstd {
		var err error
		// The decoder stops at the capacity, so nothing comes out longer than announced.
		data, err = decoder().DecodeAll(stored, space(buf, c.Length)[:0])
		if err != nil || len(data) != int(c.Length) {
			return nil, corruptf("chunk does not decompress to %d bytes: %v", c.Length, err)
		}
	}
	if Sum(data) != c.Digest {
		return nil, corruptf("chunk does not match its digest")
	}
	return data, nil
}

// Read is Unpack for stored bytes that are read from body, and for raw ones the quicker
// way. The result lies in buf, if that is long enough. An early end of body is ErrCorrupt,
// every other error of it is returned as it is.
func (c *Chunk) Read(body io.Reader, buf []byte) ([]byte, error) {
	if err := c.checkLengths(int(c.Stored)); err != nil {
		return nil, err
	}
	if c.Encoding == Raw {
		return c.readRaw(body, space(buf, c.Length))
	}
	from := storedBuffers.Get().(*[]byte)
	defer storedBuffers.Put(from)
	*from = slices.Grow((*from)[:0], int(c.Stored))[:c.Stored]
	if _, err := io.ReadFull(body, *from); err != nil {
		return nil, endsEarly(err)
	}
	return c.Unpack(*from, buf)
}

// storedBuffers holds the stored bytes of chunks until they are decompressed.
var storedBuffers = sync.Pool{New: func() any { return new([]byte) }}

// readRaw fills p and hashes each piece on the way.
func (c *Chunk) readRaw(body io.Reader, p []byte) ([]byte, error) {
	h := blake3.New()
	for piece := range slices.Chunk(p, hashUnit) {
		if _, err := io.ReadFull(body, piece); err != nil {
			return nil, endsEarly(err)
		}
		h.Write(piece)
	}
	var d Digest
	if h.Sum(d[:0]); d != c.Digest {
		return nil, corruptf("chunk does not match its digest")
	}
	return p, nil
}

// checkLengths checks the form of what is about to decide over an allocation.
func (c *Chunk) checkLengths(n int) error {
	switch {
	case c.Length == 0 || c.Length > MaxChunkSize:
		return corruptf("chunk of %d bytes", c.Length)
	case n != int(c.Stored):
		return corruptf("%d stored bytes of a chunk, its index says %d", n, c.Stored)
	}
	return c.Location.checkStored(c.Length)
}

// space returns n bytes, of buf if it has them, and no room behind them.
func space(buf []byte, n uint32) []byte {
	if cap(buf) < int(n) {
		buf = make([]byte, n)
	}
	return buf[:n:n]
}

// endsEarly makes the early end of a blob what it is: damage.
func endsEarly(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return corruptf("the blob ends early")
	}
	return err
}
