package snapshot

import "fmt"

// Chunks returns the chunks that segment i of the root names; segment holds its bytes.
// It serves those who look for content and need no tree: of an older index, say, only
// the segments that a newer one does not share.
func (r *Root) Chunks(i int, segment []byte) ([]StoredChunk, error) {
	ref := &r.Segments[i]
	if len(segment) != int(ref.Stored) || uint64(ref.Entries) > uint64(ref.Stored)*maxRatio/minRecord {
		return nil, corruptf("segment %d has %d bytes, the root says %d", i+1, len(segment), ref.Stored)
	}
	in := interner{m: map[string]string{}}
	entries := make([]Entry, ref.Entries)
	lead, err := decodeSegment(segment, ref, &in, entries)
	if err != nil {
		return nil, fmt.Errorf("segment %d of %d: %w", i+1, len(r.Segments), err)
	}
	out := stored(nil, lead.chunks)
	for k := range entries {
		out = stored(out, entries[k].Chunks)
	}
	if err := checkStored(out); err != nil {
		return nil, fmt.Errorf("segment %d of %d: %w", i+1, len(r.Segments), err)
	}
	return out, nil
}

func stored(out []StoredChunk, chunks []Chunk) []StoredChunk {
	for i := range chunks {
		out = append(out, StoredChunk{Digest: chunks[i].Digest, Length: chunks[i].Length, Location: chunks[i].Location})
	}
	return out
}
