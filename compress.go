package snapferry

import (
	"context"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// Compression by chunk. It has to pay: a probe of a few samples decides whether a chunk is
// compressed at all, and the result is kept if it saves an eighth and gives the chunk back.
// Decision 0014 has the measurements.
const (
	minSqueeze  = 512     // shorter chunks are stored as they are
	keepSaving  = 8       // a part of the chunk that has to be saved: an eighth
	probeSaving = 16      // and of the samples, in which repetitions are seen worse
	samples     = 4       // taken at even distances
	sampleSize  = 4 << 10 // of each
)

// compressedNames are the extensions of files whose bytes are compressed or encrypted.
var compressedNames = []string{
	".7z", ".avi", ".avif", ".br", ".bz2", ".docx", ".flac", ".gif", ".gpg", ".gz", ".heic", ".jar", ".jpeg", ".jpg",
	".ldb", ".lz4", ".lzma", ".m4a", ".mkv", ".mov", ".mp3", ".mp4", ".odt", ".ogg", ".opus", ".png", ".rar", ".sst",
	".sz", ".tgz", ".txz", ".webm", ".webp", ".whl", ".xlsx", ".xz", ".zip", ".zst",
}

// compressedAlready tells whether what is in a file was compressed by whoever wrote it.
func compressedAlready(e *source.Entry) bool {
	if e.Compressed {
		return true
	}
	_, found := slices.BinarySearch(compressedNames, strings.ToLower(path.Ext(e.Path)))
	return found
}

// press bounds the chunks that are compressed at a time.
type press struct{ rooms chan *room }

// room is the space in which one chunk is compressed and checked.
type room struct{ samples, stored, check []byte }

func newPress(readers int) *press {
	n := min(readers, runtime.GOMAXPROCS(0))
	p := &press{rooms: make(chan *room, n)}
	for range n {
		p.rooms <- &room{}
	}
	return p
}

// enter waits for a room, which the caller gives back by leave.
func (p *press) enter(ctx context.Context) (*room, error) {
	select {
	case r := <-p.rooms:
		return r, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (p *press) leave(r *room) { p.rooms <- r }

// squeeze returns the stored bytes of a chunk that compression pays for, else nil. They
// have been decompressed and checked, and are valid until the room is left.
func (r *room) squeeze(data []byte, digest snapshot.Digest) []byte {
	if len(data) < minSqueeze || !r.promising(data) {
		return nil
	}
	r.stored = snapshot.AppendZstd(slices.Grow(r.stored[:0], len(data)), data)
	if len(r.stored) > len(data)-len(data)/keepSaving {
		return nil
	}
	c := snapshot.Chunk{Length: uint32(len(data)), Digest: digest, Location: snapshot.Location{Stored: uint32(len(r.stored)), Encoding: snapshot.Zstd}}
	r.check = slices.Grow(r.check[:0], len(data))
	if _, err := c.Unpack(r.stored, r.check); err != nil {
		return nil // a fault of the compressor costs space, not the chunk
	}
	return r.stored
}

// promising tells by samples whether a chunk gets shorter.
func (r *room) promising(data []byte) bool {
	if len(data) <= samples*sampleSize {
		return true
	}
	r.samples = r.samples[:0]
	for i := range samples {
		at := (len(data) - sampleSize) / (samples - 1) * i
		r.samples = append(r.samples, data[at:at+sampleSize]...)
	}
	r.stored = snapshot.AppendZstd(r.stored[:0], r.samples)
	return len(r.stored) <= len(r.samples)-len(r.samples)/probeSaving
}
