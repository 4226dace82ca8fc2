package snapstore

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// ChunkSize is how many bytes of a file one digest covers. It is what a bad transfer costs
// to repeat, what a fetcher holds in memory for each request, and 32 bytes of manifest. The
// files of a state are mostly immutable and come and go as a whole, so that finer chunks
// would find little more to reuse.
const ChunkSize = snapshot.DefaultChunkSize

// MaxManifest is how many bytes a manifest may have: enough for some terabytes, or for
// half a million small files.
const MaxManifest = 64 << 20

const (
	manifestKind    = "snapshot"
	manifestVersion = 1
	maxMeta         = 1 << 20 // bytes of the metadata in a manifest

	indexKey = "index" // what the manifest's index calls itself
	dataKey  = "data"  // what it calls the place of every chunk: the file itself

	fileMode = 0o644
	dirMode  = 0o755
)

// Manifest says what a snapshot is: its metadata, and an index of its files.
type Manifest struct {
	ID    protocol.ID
	Meta  protocol.Meta
	Index *snapshot.Index
}

// Bytes returns the sum of the sizes of all files.
func (m *Manifest) Bytes() int64 {
	var n int64
	for i := range m.Index.Entries {
		n += m.Index.Entries[i].Size
	}
	return n
}

// EncodeManifest makes the manifest of a snapshot and the id that follows from it: the
// digest in the id covers every byte of the manifest, and through it every byte of the
// files. What a state machine has no use for is not in it (owners, times, modes), lest the
// id depend on who made the files.
func EncodeManifest(meta protocol.Meta, idx *snapshot.Index) (manifest []byte, id protocol.ID, err error) {
	if err := check(meta, idx); err != nil {
		return nil, id, fmt.Errorf("encode manifest: %w", err)
	}
	head, err := json.Marshal(meta)
	if err != nil {
		return nil, id, fmt.Errorf("encode manifest: %w", err)
	}
	object, _, err := snapshot.Encode(idx, indexKey, nil)
	if err != nil {
		return nil, id, fmt.Errorf("encode manifest: %w", err)
	}
	payload := append(append(head, '\n'), object...)
	manifest = frame.Encode(manifestKind, manifestVersion, payload)
	if len(head) > maxMeta || len(manifest) > MaxManifest {
		return nil, id, fmt.Errorf("encode manifest: %d bytes with %d of metadata, at most %d and %d are allowed",
			len(manifest), len(head), MaxManifest, maxMeta)
	}
	return manifest, idOf(meta, manifest), nil
}

func idOf(meta protocol.Meta, manifest []byte) protocol.ID {
	return protocol.ID{Term: meta.Term, Index: meta.Index, Digest: snapshot.Sum(manifest)}
}

// DecodeManifest reads what EncodeManifest made, and nothing else: what it returns names
// files and directories below one directory only, is within the limits of the format, and
// took memory in proportion to the length of data, wherever the data came from.
func DecodeManifest(data []byte) (*Manifest, error) {
	m, err := decodeManifest(data)
	if err != nil {
		return nil, fmt.Errorf("decode manifest: %w", err)
	}
	return m, nil
}

func decodeManifest(data []byte) (*Manifest, error) {
	if len(data) > MaxManifest {
		return nil, corruptf("%d bytes, at most %d are allowed", len(data), MaxManifest)
	}
	payload, err := frame.Decode(manifestKind, manifestVersion, data)
	if err != nil {
		return nil, err
	}
	head, object, ok := bytes.Cut(payload, []byte("\n"))
	if !ok || len(head) > maxMeta {
		return nil, corruptf("metadata of more than %d bytes", maxMeta)
	}
	m := &Manifest{}
	if err := json.Unmarshal(head, &m.Meta); err != nil {
		return nil, corruptf("metadata: %v", err)
	}
	if m.Index, err = decodeIndex(object); err != nil {
		return nil, err
	}
	if err := check(m.Meta, m.Index); err != nil {
		return nil, err
	}
	m.ID = idOf(m.Meta, data)
	return m, nil
}

// decodeIndex reads an index object that holds all of its segments and ends with them.
func decodeIndex(object []byte) (*snapshot.Index, error) {
	root, err := snapshot.DecodeRoot(object, indexKey)
	if err != nil {
		return nil, err
	}
	segments, at := make([][]byte, len(root.Segments)), root.Size
	for i := range root.Segments {
		s := &root.Segments[i]
		end := at + int64(s.Stored)
		if s.Blob != indexKey || int64(s.Offset) != at || end > int64(len(object)) {
			return nil, corruptf("segment %d of the index is not where it belongs", i)
		}
		segments[i], at = object[at:end], end
	}
	if at != int64(len(object)) {
		return nil, corruptf("%d bytes follow the index", int64(len(object))-at)
	}
	return root.Assemble(segments)
}

// check tells whether a manifest is of the one form that this package writes, beside what
// snapshot.Validate says of the index, which the codec calls.
func check(meta protocol.Meta, idx *snapshot.Index) error {
	if meta.Term == 0 || meta.Index == 0 {
		return corruptf("a snapshot at term %d, index %d", meta.Term, meta.Index)
	}
	labels := idx.Job + idx.Task + idx.Store + idx.Checkpoint + idx.Prev
	if labels != "" || len(idx.Borrows) > 0 || !idx.Created.IsZero() {
		return corruptf("the index says more than what the files are")
	}
	for i := range idx.Entries {
		if err := checkEntry(&idx.Entries[i]); err != nil {
			return fmt.Errorf("%q: %w", idx.Entries[i].Path, err)
		}
	}
	return nil
}

func checkEntry(e *snapshot.Entry) error {
	mode := uint32(fileMode)
	if e.Type == snapshot.Dir {
		mode = dirMode
	}
	switch {
	case e.Path == "":
		return corruptf("the root is named")
	case e.Type > snapshot.Dir || e.Link != "":
		return corruptf("neither a directory nor a file of its own")
	case e.Mode != mode || e.UID|e.GID != 0 || e.User+e.Group != "" || e.MTime != snapshot.Time{} || len(e.Xattrs) > 0:
		return corruptf("has an owner, a time or a mode")
	case e.Type == snapshot.Regular && e.ChunkSize != ChunkSize:
		return corruptf("chunks of %d bytes", e.ChunkSize)
	}
	var end int64
	for i := range e.Chunks {
		c := &e.Chunks[i]
		if c.Offset != end || c.Location != location(c.Length) {
			return corruptf("chunk %d at %d has a hole before it or lies elsewhere", i, c.Offset)
		}
		end += int64(c.Length)
	}
	if end != e.Size {
		return corruptf("chunks of %d bytes for %d", end, e.Size)
	}
	return nil
}

// location is what a chunk's place says in a format that keeps bytes in the files.
func location(length uint32) snapshot.Location {
	return snapshot.Location{Blob: dataKey, Stored: length}
}

// cells yields where the chunks of a file of some size begin and how long they are.
func cells(size int64) func(yield func(int64, uint32) bool) {
	return snapshot.Cut(size, []snapshot.Run{{Length: size}}, ChunkSize)
}

func corruptf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
}
