package snapshot

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"
)

// The envelope around roots, segments and chunk lists: header, compressed body, tail of
// digests. Its layout stands in docs/format.md, "Index"; the offsets stand here once.
const (
	atVersion = 8
	atLength  = 12
	atBody    = 16
	atFrame   = 20
	atDigest  = 24
	headerLen = 56

	version = 1

	// maxRatio bounds how much longer a body may be than what it is decompressed from.
	// It is what keeps a few hostile bytes from costing much memory.
	maxRatio = 16
)

// kind is what an envelope holds.
type kind struct {
	magic  string
	name   string
	maxLen int // of the envelope, and of the body before compression
}

var (
	rootKind    = kind{"SFINDEX\n", "index root", MaxRootSize}
	segmentKind = kind{"SFSEGMT\n", "index segment", MaxSegmentSize}
	chunksKind  = kind{"SFCHUNK\n", "chunk list", MaxChunkList}
)

// seal makes an envelope and returns it with its digest.
func (k kind) seal(body, tail []byte) ([]byte, Digest, error) {
	if len(body) > k.maxLen || headerLen+len(body)+len(tail) > k.maxLen {
		return nil, Digest{}, fmt.Errorf("encode %s: %d bytes, at most %d are allowed", k.name, headerLen+len(body)+len(tail), k.maxLen)
	}
	e := make([]byte, headerLen, headerLen+len(body)/2+len(tail)+64)
	e = encoder().EncodeAll(body, e)
	frame := len(e) - headerLen
	e = append(e, make([]byte, max(0, (len(body)+maxRatio-1)/maxRatio-frame))...)
	e = append(e, tail...)

	copy(e, k.magic)
	binary.LittleEndian.PutUint16(e[atVersion:], version)
	binary.LittleEndian.PutUint32(e[atLength:], uint32(len(e)))
	binary.LittleEndian.PutUint32(e[atBody:], uint32(len(body)))
	binary.LittleEndian.PutUint32(e[atFrame:], uint32(frame))
	d := envelopeDigest(e)
	copy(e[atDigest:], d[:])
	return e, d, nil
}

func envelopeDigest(e []byte) Digest {
	h := blake3.New()
	h.Write(e[:atDigest])
	h.Write(e[headerLen:])
	var d Digest
	h.Sum(d[:0])
	return d
}

// length reads from a header how long the envelope is.
func (k kind) length(head []byte) (int, error) {
	if len(head) < headerLen || string(head[:len(k.magic)]) != k.magic {
		return 0, corruptf("not an %s", k.name)
	}
	n := binary.LittleEndian.Uint32(head[atLength:])
	if n < headerLen || int64(n) > int64(k.maxLen) {
		return 0, corruptf("%s with a length of %d", k.name, n)
	}
	return int(n), nil
}

// open checks the envelope that e is, whole, and returns what is inside; tail aliases e.
func (k kind) open(e []byte) (body, tail []byte, d Digest, err error) {
	n, err := k.length(e)
	if err != nil {
		return nil, nil, d, err
	}
	if n != len(e) {
		return nil, nil, d, corruptf("%s has %d bytes, its header says %d", k.name, len(e), n)
	}
	d = envelopeDigest(e)
	if !bytes.Equal(d[:], e[atDigest:headerLen]) {
		return nil, nil, d, corruptf("%s does not match its digest", k.name)
	}
	if v := binary.LittleEndian.Uint16(e[atVersion:]); v > version {
		return nil, nil, d, fmt.Errorf("%w: %s has format version %d, this program reads up to %d; use a newer one", ErrUnsupported, k.name, v, version)
	}
	body, tail, err = k.unpack(e)
	return body, tail, d, err
}

// unpack decompresses the body of an envelope that is intact.
func (k kind) unpack(e []byte) (body, tail []byte, err error) {
	bodyLen := int64(binary.LittleEndian.Uint32(e[atBody:]))
	frame := int64(binary.LittleEndian.Uint32(e[atFrame:]))
	stored := max(frame, (bodyLen+maxRatio-1)/maxRatio)
	if binary.LittleEndian.Uint32(e[atVersion:]) != version || bodyLen > int64(k.maxLen) || stored > int64(len(e)-headerLen) {
		return nil, nil, corruptf("header of %s", k.name)
	}
	tail = e[headerLen+stored:]
	for _, b := range e[headerLen+frame : headerLen+stored] {
		if b != 0 {
			return nil, nil, corruptf("padding of %s", k.name)
		}
	}
	// The decoder stops at the capacity, so the declared length is also the limit.
	body, err = decoder().DecodeAll(e[headerLen:headerLen+frame], make([]byte, 0, bodyLen))
	if err != nil || int64(len(body)) != bodyLen {
		return nil, nil, corruptf("body of %s does not decompress to %d bytes: %v", k.name, bodyLen, err)
	}
	return body, tail, nil
}

// encoder and decoder are shared: both are safe for concurrent use and start no goroutines
// for whole-buffer work.
var encoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)),
		zstd.WithWindowSize(1<<20),
		zstd.WithSingleSegment(true),
		zstd.WithEncoderCRC(false),
		zstd.WithZeroFrames(true))
	if err != nil {
		panic(err) // the options are constants
	}
	return e
})

var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)),
		zstd.WithDecoderMaxMemory(MaxChunkList),
		zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic(err) // the options are constants
	}
	return d
})
