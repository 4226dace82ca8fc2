package snapshot

import (
	"encoding/binary"
	"sync"
)

// interner gives equal strings of several segments one copy.
type interner struct {
	mu sync.Mutex
	m  map[string]string // guarded by mu
}

func (in *interner) intern(b []byte) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	s, ok := in.m[string(b)]
	if !ok {
		s = string(b)
		in.m[s] = s
	}
	return s
}

// lead is what a segment begins with when it goes on with an entry of an earlier one.
type lead struct {
	path   string
	chunks []Chunk
}

// segmentReader decodes one segment.
type segmentReader struct {
	reader         // what is left of the records
	left    int    // how many records that is
	names   string // not used up yet, like all that follows
	values  []byte
	digests []byte
	strings []string
	slab    []Chunk // chunks decoded so far, of all entries
	place   placer
	entries []Entry // to fill, one place for each that the root announced
	filled  int
	lead    lead
}

// decodeSegment fills entries, of which there must be exactly as many as begin in the
// segment, and returns the chunks that belong to the entry before them.
func decodeSegment(data []byte, ref *SegmentRef, in *interner, entries []Entry) (lead, error) {
	body, tail, d, err := segmentKind.open(data)
	if err != nil {
		return lead{}, err
	}
	if d != ref.Digest || contentDigest(body, tail) != ref.Content {
		return lead{}, corruptf("index segment is not the one that the root names")
	}
	s := segmentReader{reader: reader{b: body}, digests: tail, entries: entries}
	if len(tail)%len(Digest{}) != 0 {
		return lead{}, corruptf("digests of index segment are cut off")
	}
	s.sections(in)
	s.slab = make([]Chunk, 0, len(tail)/len(Digest{}))
	for ; s.left > 0 && s.err == nil; s.left-- {
		s.record()
	}
	if s.err == nil && (s.filled != len(entries) || len(s.names) > 0 || len(s.values) > 0 || len(s.digests) > 0) {
		s.fail("index segment holds more or less than it announces")
	}
	return s.lead, s.end()
}

// sections reads what stands before the records.
func (s *segmentReader) sections(in *interner) {
	// What is announced is bounded by what has been paid for: a record is an entry or has
	// a chunk at least, and it uses two strings at most and one for each chunk.
	entries, chunks := len(s.entries), len(s.digests)/len(Digest{})
	s.left = int(s.atMost(uint64(entries + chunks)))
	numStrings := s.atMost(uint64(2*entries + chunks))
	namesLen, valuesLen := s.uvarint(), s.uvarint()
	s.strings = make([]string, min(numStrings, uint64(len(s.b)/2)))
	if uint64(len(s.strings)) < numStrings {
		s.fail("strings are cut off")
	}
	for i := range s.strings {
		s.strings[i] = in.intern(s.bytes(s.uvarint()))
	}
	s.names = string(s.bytes(namesLen))
	s.values = append([]byte(nil), s.bytes(valuesLen)...)
}

func (s *segmentReader) record() {
	flags := s.byte()
	if flags&^flagsKnown != 0 {
		s.fail("record has unknown flags")
	}
	path := s.name()
	if flags&flagContinuation != 0 {
		s.continuation(path, flags)
	} else if s.filled == len(s.entries) {
		s.fail("more entries than the root announces")
	} else {
		s.entry(&s.entries[s.filled], path, flags)
		s.filled++
	}
	if flags&flagExtension != 0 {
		s.extension()
	}
}

func (s *segmentReader) entry(e *Entry, path string, flags byte) {
	e.Path = path
	e.Type = Type(flags & flagType)
	s.meta(e)
	if flags&flagLink != 0 {
		if e.Link = s.name(); e.Link == "" {
			s.fail("empty link")
		}
	}
	content := e.Type == Regular && flags&flagLink == 0
	if content {
		e.Size = int64(s.atMost(MaxTotalSize))
		e.ChunkSize = uint32(s.atMost(MaxChunkSize/HoleAlign)) * HoleAlign
	}
	if flags&flagXattrs != 0 {
		s.xattrs(e)
	}
	if content {
		e.Chunks = s.chunks()
	}
}

// continuation adds chunks to the entry before it, which may lie in an earlier segment.
func (s *segmentReader) continuation(path string, flags byte) {
	if flags&^flagExtension != flagContinuation {
		s.fail("continuation with flags of an entry")
	}
	before := len(s.slab)
	chunks := s.chunks()
	switch {
	case len(chunks) == 0:
		s.fail("continuation without chunks")
	case s.filled > 0:
		e := &s.entries[s.filled-1]
		if !e.isContinuedBy(path) {
			s.fail("continuation of another entry")
			return
		}
		// The slab holds the entry's chunks right before these, so no copy is needed.
		e.Chunks = s.slab[before-len(e.Chunks) : len(s.slab) : len(s.slab)]
	case before > 0 && s.lead.path != path:
		s.fail("continuation of another entry")
	default:
		s.lead = lead{path: path, chunks: s.slab}
	}
}

// isContinuedBy reports whether a continuation with this path may follow e.
func (e *Entry) isContinuedBy(path string) bool {
	return e.Path == path && e.Type == Regular && !e.IsLink()
}

func (s *segmentReader) name() string {
	n := s.uvarint()
	if n > uint64(len(s.names)) {
		s.fail("names are cut off")
		return ""
	}
	name := s.names[:n]
	s.names = s.names[n:]
	return name
}

// text reads the number of a string; 0 is the empty one.
func (s *segmentReader) text() string {
	n := s.atMost(uint64(len(s.strings)))
	if n == 0 {
		return ""
	}
	return s.strings[n-1]
}

func (s *segmentReader) meta(e *Entry) {
	e.Mode = uint32(s.atMost(0o7777))
	e.UID = uint32(s.atMost(1<<32 - 1))
	e.GID = uint32(s.atMost(1<<32 - 1))
	e.User = s.text()
	e.Group = s.text()
	if b := s.bytes(12); len(b) == 12 {
		e.MTime.Sec = int64(binary.LittleEndian.Uint64(b))
		e.MTime.Nsec = int32(binary.LittleEndian.Uint32(b[8:]))
	}
}

func (s *segmentReader) xattrs(e *Entry) {
	n := s.count(2)
	if n == 0 || n > len(s.names) { // none has an empty name
		s.fail("number of xattrs is out of bounds")
		return
	}
	e.Xattrs = make([]Xattr, n)
	for i := range e.Xattrs {
		e.Xattrs[i].Name = s.name()
		n := s.uvarint()
		if n > uint64(len(s.values)) {
			s.fail("xattr values are cut off")
			return
		}
		e.Xattrs[i].Value = s.values[:n:n]
		s.values = s.values[n:]
	}
}

// chunks decodes the chunks of a record to the end of the slab and returns that part of it.
func (s *segmentReader) chunks() []Chunk {
	n := int(s.atMost(uint64(len(s.digests) / len(Digest{}))))
	if n == 0 {
		return nil
	}
	first, end := len(s.slab), int64(0)
	for range n {
		offset := int64(s.atMost(MaxTotalSize)) + end
		length := uint32(s.atMost(MaxChunkSize))
		location := s.place.read(&s.reader, s.strings, length)
		if offset > MaxTotalSize {
			s.fail("chunk is out of bounds")
		}
		if s.err != nil {
			return nil
		}
		end = offset + int64(length)
		s.slab = append(s.slab, Chunk{Offset: offset, Length: length, Digest: Digest(s.digests[:32]), Location: location})
		s.digests = s.digests[32:]
	}
	return s.slab[first:len(s.slab):len(s.slab)]
}

func (s *segmentReader) extension() {
	last := uint64(0)
	n := s.count(2)
	if n == 0 {
		s.fail("no extension where one is announced")
	}
	for range n {
		tag := s.uvarint()
		s.bytes(s.uvarint())
		if tag <= last {
			s.fail("extensions are not in order")
		}
		if tag%2 == 0 {
			s.unsupported("extension", tag)
		}
		last = tag
	}
}
