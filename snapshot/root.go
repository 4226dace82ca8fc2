package snapshot

import (
	"encoding/binary"
	"fmt"
	"time"
)

// Tags of the fields of a root. All are even: a reader must know them.
const (
	tagJob        = 2
	tagTask       = 4
	tagStore      = 6
	tagCheckpoint = 8
	tagCreated    = 10
	tagPrev       = 12
	tagBorrows    = 14
	tagTotals     = 16
	tagBlobs      = 18
	tagSegments   = 20
)

var rootTags = []uint64{
	tagJob, tagTask, tagStore, tagCheckpoint, tagCreated, tagPrev, tagBorrows, tagTotals, tagBlobs, tagSegments,
}

// RootHeaderSize is how many bytes of an index object RootSize needs.
const RootHeaderSize = headerLen

// RootSize tells from the first RootHeaderSize bytes of an index object how long its root
// is, so that a reader can fetch just that.
func RootSize(head []byte) (int64, error) {
	n, err := rootKind.length(head)
	if err != nil {
		return 0, fmt.Errorf("read root header: %w", err)
	}
	return int64(n), nil
}

// encode seals the root. Segments whose Blob is key lie in the object that the root begins;
// their offsets count from the end of the root, and are left so.
func (r *Root) encode(key string) ([]byte, Digest, error) {
	number := make(map[string]uint64, len(r.Blobs))
	for i, b := range r.Blobs {
		number[b.Key] = uint64(i + 1)
	}
	b := appendField(nil, tagJob, r.Job)
	b = appendField(b, tagTask, r.Task)
	b = appendField(b, tagStore, r.Store)
	b = appendField(b, tagCheckpoint, r.Checkpoint)
	b = appendField(b, tagCreated, appendTime(nil, r.Created))
	b = appendField(b, tagPrev, r.Prev)
	b = appendField(b, tagBorrows, appendBorrows(nil, r.Borrows))
	b = appendField(b, tagTotals, r.Totals.append(nil))
	b = appendField(b, tagBlobs, appendBlobs(nil, r.Blobs))
	b = appendField(b, tagSegments, appendSegments(nil, r.Segments, number))

	tail := make([]byte, 0, len(r.Segments)*2*len(Digest{}))
	for i := range r.Segments {
		tail = append(tail, r.Segments[i].Digest[:]...)
		tail = append(tail, r.Segments[i].Content[:]...)
	}
	return rootKind.seal(b, tail)
}

func appendTime(b []byte, t time.Time) []byte {
	b = binary.AppendVarint(b, t.Unix())
	return binary.AppendUvarint(b, uint64(t.Nanosecond()))
}

func appendBorrows(b []byte, borrows []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(borrows)))
	for _, id := range borrows {
		b = appendString(b, id)
	}
	return b
}

// fields returns the totals in the order in which they are encoded.
func (t *Totals) fields() [7]*int64 {
	return [...]*int64{&t.Files, &t.Dirs, &t.Symlinks, &t.Links, &t.Chunks, &t.Bytes, &t.Stored}
}

func (t *Totals) append(b []byte) []byte {
	for _, v := range t.fields() {
		b = binary.AppendUvarint(b, uint64(*v))
	}
	return b
}

func appendBlobs(b []byte, blobs []BlobUse) []byte {
	b = binary.AppendUvarint(b, uint64(len(blobs)))
	for _, u := range blobs {
		b = appendString(b, u.Key)
		b = binary.AppendUvarint(b, uint64(u.Live))
	}
	return b
}

func appendSegments(b []byte, segments []SegmentRef, number map[string]uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(segments)))
	for i := range segments {
		s := &segments[i]
		b = binary.AppendUvarint(b, number[s.Blob]) // 0 for the root's own object
		b = binary.AppendUvarint(b, uint64(s.Offset))
		b = binary.AppendUvarint(b, uint64(s.Stored))
		b = binary.AppendUvarint(b, uint64(s.Entries))
	}
	return b
}

// DecodeRoot decodes the root that data begins with; what follows it does not matter. key
// is the key of the object that data was read from. What the root says of its blobs is
// checked in itself; whether the segments bear it out only Assemble can tell.
func DecodeRoot(data []byte, key string) (*Root, error) {
	r, err := decodeRoot(data, key)
	if err != nil {
		return nil, fmt.Errorf("decode index %s: %w", key, err)
	}
	return r, nil
}

func decodeRoot(data []byte, key string) (*Root, error) {
	size, err := rootKind.length(data)
	if err != nil {
		return nil, err
	}
	if size > len(data) {
		return nil, corruptf("index root has %d bytes, its header says %d", len(data), size)
	}
	body, tail, digest, err := rootKind.open(data[:size])
	if err != nil {
		return nil, err
	}
	r := &Root{Digest: digest, Size: int64(size)}
	fields := reader{b: body}
	err = fields.fields(rootTags, func(tag uint64, content *reader) { r.readField(tag, content, tail, key) })
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Root) readField(tag uint64, in *reader, tail []byte, key string) {
	switch tag {
	case tagJob:
		r.Job = in.label()
	case tagTask:
		r.Task = in.label()
	case tagStore:
		r.Store = in.label()
	case tagCheckpoint:
		r.Checkpoint = in.label()
	case tagCreated:
		sec := in.varint()
		r.Created = time.Unix(sec, int64(in.atMost(1e9-1))).UTC()
	case tagPrev:
		r.Prev = string(in.bytes(uint64(min(len(in.b), MaxBlobKey))))
	case tagBorrows:
		r.Borrows = readBorrows(in)
	case tagTotals:
		for _, v := range r.Totals.fields() {
			*v = int64(in.atMost(MaxTotalSize))
		}
	case tagBlobs:
		r.Blobs = readBlobs(in, key)
	case tagSegments:
		r.Segments = r.readSegments(in, tail, key)
	}
}

// label reads a name that is the whole of a field.
func (r *reader) label() string {
	return string(r.bytes(uint64(min(len(r.b), MaxLabel)))) // a longer one leaves bytes over
}

func readBorrows(in *reader) []string {
	n := in.count(2)
	if n > MaxBorrows {
		in.fail("too many checkpoints that are borrowed from")
	}
	if n == 0 || in.err != nil {
		return nil
	}
	borrows := make([]string, n)
	for i := range borrows {
		borrows[i] = in.string()
	}
	return borrows
}

// readBlobs reads a table of blobs, among which own must not be.
func readBlobs(in *reader, own string) []BlobUse {
	n := in.count(3)
	all := string(in.b) // one copy, which the keys are parts of
	blobs := make([]BlobUse, n)
	for i := range blobs {
		size := uint64(len(in.bytes(in.uvarint())))
		at := uint64(len(all)-len(in.b)) - size
		if in.err != nil {
			return nil
		}
		blobs[i] = BlobUse{Key: all[at : at+size], Live: int64(in.atMost(1<<32 - 1))}
		if err := checkKey(blobs[i].Key); err != nil && in.err == nil {
			in.err = err
		}
		if blobs[i].Key == own || i > 0 && blobs[i-1].Key >= blobs[i].Key {
			in.fail("table of blobs is not in order or names the index itself")
		}
	}
	return blobs
}

func (r *Root) readSegments(in *reader, tail []byte, key string) []SegmentRef {
	const perSegment = 2 * len(Digest{})
	n := in.count(4)
	if n*perSegment != len(tail) {
		in.fail("root has more or fewer segments than digests")
		return nil
	}
	segments := make([]SegmentRef, n)
	for i := range segments {
		s := &segments[i]
		blob := in.atMost(uint64(len(r.Blobs)))
		offset := in.atMost(1<<32 - 1)
		s.Stored = uint32(in.atMost(MaxSegmentSize))
		s.Entries = uint32(in.atMost(uint64(s.Stored) * maxRatio / minRecord))
		if s.Blob = key; blob > 0 {
			s.Blob = r.Blobs[blob-1].Key
		} else {
			offset += uint64(r.Size)
		}
		if s.Stored < headerLen || offset+uint64(s.Stored) > 1<<32-1 {
			in.fail("segment is out of bounds")
		}
		if in.err != nil {
			return nil
		}
		s.Offset = uint32(offset)
		copy(s.Digest[:], tail[i*perSegment:])
		copy(s.Content[:], tail[i*perSegment+len(Digest{}):])
	}
	return segments
}
