package snapshot

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// Tags of the fields of a chunk list.
const (
	tagListBlobs  = 2
	tagListChunks = 4
)

// EncodeChunks encodes a list of stored chunks: the partial index of an unfinished upload
// (P5g). The order is kept; a chunk may occur more than once.
func EncodeChunks(chunks []StoredChunk) (data []byte, list *ChunkList, err error) {
	data, list, err = encodeChunks(chunks)
	if err != nil {
		return nil, nil, fmt.Errorf("encode chunk list: %w", err)
	}
	return data, list, nil
}

func encodeChunks(chunks []StoredChunk) ([]byte, *ChunkList, error) {
	if err := checkStored(chunks); err != nil {
		return nil, nil, err
	}
	list := &ChunkList{Blobs: blobsOf(chunks), Chunks: chunks}
	number := make(map[string]uint64, len(list.Blobs))
	for i, b := range list.Blobs {
		number[b.Key] = uint64(i + 1)
	}
	var place placer
	places := binary.AppendUvarint(nil, uint64(len(chunks)))
	tail := make([]byte, 0, len(chunks)*len(Digest{}))
	for i := range chunks {
		c := &chunks[i]
		places = binary.AppendUvarint(places, uint64(c.Length))
		places = place.append(places, &c.Location, number[c.Blob])
		tail = append(tail, c.Digest[:]...)
	}
	body := appendField(nil, tagListBlobs, appendBlobs(nil, list.Blobs))
	body = appendField(body, tagListChunks, places)
	data, digest, err := chunksKind.seal(body, tail)
	list.Digest = digest
	return data, list, err
}

func checkStored(chunks []StoredChunk) error {
	if len(chunks) > MaxChunks {
		return corruptf("%d chunks, at most %d are allowed", len(chunks), MaxChunks)
	}
	var v validator
	for i := range chunks {
		c := &chunks[i]
		err := v.checkLocation(&c.Location, c.Length)
		if err == nil && (c.Length == 0 || c.Length > MaxChunkSize) {
			err = corruptf("%d bytes long", c.Length)
		}
		if err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
	}
	return nil
}

func blobsOf(chunks []StoredChunk) []BlobUse {
	u := newUses()
	for i := range chunks {
		u.add(&chunks[i].Location)
	}
	return u.table()
}

// DecodeChunks decodes what EncodeChunks made; data is exactly that.
func DecodeChunks(data []byte) (*ChunkList, error) {
	list, err := decodeChunks(data)
	if err != nil {
		return nil, fmt.Errorf("decode chunk list: %w", err)
	}
	return list, nil
}

func decodeChunks(data []byte) (*ChunkList, error) {
	body, tail, digest, err := chunksKind.open(data)
	if err != nil {
		return nil, err
	}
	list := &ChunkList{Digest: digest}
	fields := reader{b: body}
	err = fields.fields([]uint64{tagListBlobs, tagListChunks}, func(tag uint64, content *reader) {
		if tag == tagListBlobs {
			list.Blobs = readBlobs(content, "")
		} else {
			list.Chunks = list.readChunks(content, tail)
		}
	})
	if err != nil {
		return nil, err
	}
	if err := checkStored(list.Chunks); err != nil {
		return nil, err
	}
	if !slices.Equal(blobsOf(list.Chunks), list.Blobs) {
		return nil, corruptf("table of blobs does not fit the chunks")
	}
	return list, nil
}

func (l *ChunkList) readChunks(in *reader, tail []byte) []StoredChunk {
	n := in.count(4)
	if n*len(Digest{}) != len(tail) {
		in.fail("more or fewer chunks than digests")
		return nil
	}
	keys := make([]string, len(l.Blobs))
	for i, b := range l.Blobs {
		keys[i] = b.Key
	}
	var place placer
	chunks := make([]StoredChunk, n)
	for i := range chunks {
		c := &chunks[i]
		c.Length = uint32(in.atMost(MaxChunkSize))
		c.Location = place.read(in, keys, c.Length)
		if in.err != nil {
			return nil
		}
		copy(c.Digest[:], tail[i*len(Digest{}):])
	}
	return chunks
}
