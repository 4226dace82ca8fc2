package snapshot

import (
	"encoding/binary"
)

// How records are formed and where segments end; docs/format.md, "Where segments are cut",
// gives the reasons.
const (
	groupCells  = 1024    // cells whose chunks share records
	groupChunks = 1024    // chunks of a record at most
	cutShift    = 64 - 17 // a hash's upper 17 bits are compared with the weight: 128 KiB in the mean
	maxWeight   = 1 << 20 // of a segment, up to its last record
)

// Flags of a record. The two lowest bits hold the type.
const (
	flagType         = 0b11
	flagLink         = 1 << 2
	flagXattrs       = 1 << 3
	flagContinuation = 1 << 4
	flagExtension    = 1 << 5
	flagsKnown       = flagType | flagLink | flagXattrs | flagContinuation | flagExtension

	// minRecord is the least a record of an entry takes: flags, 6 numbers and the time.
	minRecord = 1 + 6 + 12
)

// record is an entry with its first chunks, or a continuation with more of them.
type record struct {
	entry       int32
	from, to    int32 // chunks of the entry
	group, part uint32
}

func (r record) isContinuation() bool { return r.group > 0 || r.part > 0 }

// recordsOf returns the records of all entries and, for each segment, the number of
// records up to its end.
func recordsOf(entries []Entry) (records []record, ends []int) {
	records = make([]record, 0, len(entries))
	weight := uint64(0)
	for i := range entries {
		e := &entries[i]
		r := record{entry: int32(i)}
		for more := true; more; {
			r.to = r.from + int32(e.groupLen(r.group, int(r.from)))
			records = append(records, r)
			w := e.weight(r)
			if weight += w; weight >= maxWeight || e.hash(r)>>cutShift < w {
				ends = append(ends, len(records))
				weight = 0
			}
			r, more = e.next(r)
		}
	}
	if weight > 0 {
		ends = append(ends, len(records))
	}
	return records, ends
}

// groupLen returns how many chunks from the given one on go into one record of a group.
func (e *Entry) groupLen(group uint32, from int) int {
	chunks := e.Chunks[from:min(len(e.Chunks), from+groupChunks)]
	if n := len(chunks); n == 0 || e.groupOf(&chunks[n-1]) == group {
		return n
	}
	n := 0
	for e.groupOf(&chunks[n]) == group {
		n++
	}
	return n
}

func (e *Entry) groupOf(c *Chunk) uint32 {
	return uint32(c.Offset / (int64(e.ChunkSize) * groupCells))
}

// next returns the record that follows r in the same entry, if one does.
func (e *Entry) next(r record) (record, bool) {
	if int(r.to) == len(e.Chunks) {
		return r, false
	}
	group := e.groupOf(&e.Chunks[r.to])
	part := uint32(0)
	if group == r.group {
		part = r.part + 1
	}
	return record{entry: r.entry, from: r.to, group: group, part: part}, true
}

func (e *Entry) weight(r record) uint64 {
	w := 48 + len(e.Path) + 44*int(r.to-r.from)
	if !r.isContinuation() {
		w += len(e.Link)
		for _, a := range e.Xattrs {
			w += len(a.Name) + len(a.Value) + 8
		}
	}
	return uint64(w)
}

func (e *Entry) hash(r record) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211
	h := uint64(offset)
	for i := range len(e.Path) {
		h = (h ^ uint64(e.Path[i])) * prime
	}
	for _, v := range [2]uint32{r.group, r.part} {
		for range 4 {
			h = (h ^ uint64(v&0xff)) * prime
			v >>= 8
		}
	}
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// segmentWriter builds the body and the tail of one segment after the other. The zero
// value is ready.
type segmentWriter struct {
	strings                                stringTable
	names, values, records, tail, assembly []byte
	place                                  placer
	count                                  int
}

// encode returns body and tail of a segment. Both are valid until the next call.
func (w *segmentWriter) encode(entries []Entry, records []record) (body, tail []byte) {
	w.reset()
	for _, r := range records {
		w.add(&entries[r.entry], r)
	}
	b := w.assembly[:0]
	b = binary.AppendUvarint(b, uint64(w.count))
	b = binary.AppendUvarint(b, uint64(len(w.strings.number)))
	b = binary.AppendUvarint(b, uint64(len(w.names)))
	b = binary.AppendUvarint(b, uint64(len(w.values)))
	b = append(b, w.strings.encoded...)
	b = append(b, w.names...)
	b = append(b, w.values...)
	w.assembly = append(b, w.records...)
	return w.assembly, w.tail
}

func (w *segmentWriter) reset() {
	w.strings.reset()
	w.names, w.values, w.records, w.tail = w.names[:0], w.values[:0], w.records[:0], w.tail[:0]
	w.place = placer{}
	w.count = 0
}

func (w *segmentWriter) add(e *Entry, r record) {
	w.count++
	if r.isContinuation() {
		w.records = append(w.records, flagContinuation)
		w.name(e.Path)
		w.chunks(e.Chunks[r.from:r.to])
		return
	}
	w.records = append(w.records, e.flags())
	w.name(e.Path)
	w.meta(e)
	if e.Link != "" {
		w.name(e.Link)
	}
	content := e.Type == Regular && e.Link == ""
	if content {
		w.records = binary.AppendUvarint(w.records, uint64(e.Size))
		w.records = binary.AppendUvarint(w.records, uint64(e.ChunkSize/HoleAlign))
	}
	if len(e.Xattrs) > 0 {
		w.xattrs(e.Xattrs)
	}
	if content {
		w.chunks(e.Chunks[r.from:r.to])
	}
}

func (e *Entry) flags() byte {
	f := byte(e.Type)
	if e.Link != "" {
		f |= flagLink
	}
	if len(e.Xattrs) > 0 {
		f |= flagXattrs
	}
	return f
}

func (w *segmentWriter) name(s string) {
	w.records = binary.AppendUvarint(w.records, uint64(len(s)))
	w.names = append(w.names, s...)
}

func (w *segmentWriter) meta(e *Entry) {
	b := binary.AppendUvarint(w.records, uint64(e.Mode))
	b = binary.AppendUvarint(b, uint64(e.UID))
	b = binary.AppendUvarint(b, uint64(e.GID))
	b = binary.AppendUvarint(b, w.strings.numberOf(e.User))
	b = binary.AppendUvarint(b, w.strings.numberOf(e.Group))
	b = binary.LittleEndian.AppendUint64(b, uint64(e.MTime.Sec))
	w.records = binary.LittleEndian.AppendUint32(b, uint32(e.MTime.Nsec))
}

func (w *segmentWriter) xattrs(xattrs []Xattr) {
	w.records = binary.AppendUvarint(w.records, uint64(len(xattrs)))
	for _, a := range xattrs {
		w.name(a.Name)
		w.records = binary.AppendUvarint(w.records, uint64(len(a.Value)))
		w.values = append(w.values, a.Value...)
	}
}

func (w *segmentWriter) chunks(chunks []Chunk) {
	b := binary.AppendUvarint(w.records, uint64(len(chunks)))
	end := int64(0)
	for i := range chunks {
		c := &chunks[i]
		b = binary.AppendUvarint(b, uint64(c.Offset-end))
		end = c.Offset + int64(c.Length)
		b = binary.AppendUvarint(b, uint64(c.Length))
		b = w.place.append(b, &c.Location, w.strings.numberOf(c.Blob))
		w.tail = append(w.tail, c.Digest[:]...)
	}
	w.records = b
}

// placer encodes where chunks are stored. Chunks stored side by side cost a zero each.
type placer struct {
	blob uint64 // number of the blob of the chunk before
	end  uint32 // where that chunk ends
}

func (p *placer) append(b []byte, l *Location, blob uint64) []byte {
	if blob != p.blob {
		*p = placer{blob: blob}
	}
	b = binary.AppendUvarint(b, blob)
	b = binary.AppendVarint(b, int64(l.Offset)-int64(p.end))
	p.end = l.Offset + l.Stored
	b = append(b, byte(l.Encoding))
	if l.Encoding != Raw {
		b = binary.AppendUvarint(b, uint64(l.Stored))
	}
	return b
}

// read is the inverse of append; blobs are numbered from 1. length is the chunk's length.
func (p *placer) read(r *reader, blobs []string, length uint32) (l Location) {
	blob := r.atMost(uint64(len(blobs)))
	if blob != p.blob {
		*p = placer{blob: blob}
	}
	offset := r.varint() + int64(p.end)
	encoding := Encoding(r.byte())
	stored := length
	switch {
	case r.err != nil || encoding == Raw:
	case encoding != Zstd:
		r.unsupported("chunk encoding", uint64(encoding))
	default:
		if stored = uint32(r.atMost(MaxChunkSize)); stored == 0 || stored >= length {
			r.fail("stored length of a chunk is out of bounds")
		}
	}
	if blob == 0 || offset < 0 || offset > MaxPackSize {
		r.fail("place of a chunk is out of bounds")
	}
	if r.err != nil {
		return Location{}
	}
	p.end = uint32(offset) + stored
	return Location{Blob: blobs[blob-1], Offset: uint32(offset), Stored: stored, Encoding: encoding}
}

// stringTable numbers strings from 1 in the order of their first use; "" is 0.
type stringTable struct {
	number  map[string]uint64
	encoded []byte
	recent  [4]struct { // strings come again soon, and comparing is cheaper than hashing
		s string
		n uint64
	}
	turn int
}

func (t *stringTable) reset() {
	if t.number == nil {
		t.number = map[string]uint64{}
	}
	clear(t.number)
	clear(t.recent[:])
	t.encoded = t.encoded[:0]
}

func (t *stringTable) numberOf(s string) uint64 {
	for i := range t.recent {
		if t.recent[i].s == s {
			return t.recent[i].n // an unused place holds "" and 0, which is right too
		}
	}
	if s == "" {
		return 0
	}
	n, ok := t.number[s]
	if !ok {
		n = uint64(len(t.number) + 1)
		t.number[s] = n
		t.encoded = appendString(t.encoded, s)
	}
	t.recent[t.turn].s, t.recent[t.turn].n = s, n
	t.turn = (t.turn + 1) % len(t.recent)
	return n
}
