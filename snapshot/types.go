// Package snapshot knows what a snapshot of a store is: an immutable tree of files
// described by an Index, each file being made of chunks whose digests and places in
// the blob store are written down.
//
// The package hides how an index is cut, compared and encoded. It is pure: bytes and
// values in, bytes and values out, no file, no network, no clock. The main types are
// Index (the whole tree), Root (the first part of an encoded index, enough to know
// which blobs it lives on) and ChunkList (what an unfinished upload has stored).
//
// An index that Validate accepts cannot name anything outside the directory it is
// restored to, and everything that Root.Assemble and DecodeChunks return has been
// validated, whatever bytes came in: damaged or hostile input ends in ErrCorrupt (or
// ErrUnsupported for a newer format), and never in an allocation that is not bounded by
// the length of the input. What is stored of a chunk becomes its bytes through Chunk.Unpack
// and Chunk.Read alone, which check them; they allocate a chunk at most. Values are not safe for concurrent change; all functions may
// be called concurrently on values that nobody changes.
//
// The encoding is described in docs/format.md, section "Index".
package snapshot

import (
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

var (
	// ErrCorrupt says that an index breaks a rule or that its bytes were damaged.
	ErrCorrupt = sentinel.Corrupt
	// ErrUnsupported says that an index needs a newer program than this one.
	ErrUnsupported = sentinel.Unsupported
)

// Sizes of chunks and packs.
const (
	MinChunkSize     = 16 << 10 // the smallest chunk size that a file may have
	MaxChunkSize     = 4 << 20  // the largest chunk size that a file may have
	DefaultChunkSize = 4 << 20  // the chunk size of a file whose source has no opinion
	MaxPackSize      = 64 << 20 // where every chunk of a pack ends at the latest
	MinHoleSize      = 64 << 10 // the shortest hole that is kept as a hole
	HoleAlign        = 4 << 10  // what begin and end of a hole, and chunk sizes, are multiples of
)

// Limits of an index. Validate and the decoders refuse what goes beyond them.
const (
	MaxEntries     = 1 << 26  // entries of an index
	MaxChunks      = 1 << 28  // chunks of an index, and of a chunk list
	MaxTotalSize   = 1 << 62  // sum of the sizes of all files
	MaxPath        = 4095     // bytes of a path or of a symbolic link's target
	MaxName        = 255      // bytes of one component of a path, and of an xattr's name
	MaxOwnerName   = 255      // bytes of a user's or group's name
	MaxXattrValue  = 64 << 10 // bytes of one extended attribute
	MaxXattrBytes  = 1 << 20  // bytes of names and values of all xattrs of an entry
	MaxBlobKey     = 900      // bytes of a blob's key
	MaxLabel       = 128      // bytes of job, task, store and checkpoint id
	MaxBorrows     = 1 << 16  // checkpoints that an index borrows from
	MaxRootSize    = 64 << 20 // bytes of an encoded root
	MaxSegmentSize = 32 << 20 // bytes of an encoded segment
	MaxChunkList   = 1 << 30  // bytes of an encoded chunk list
)

// Type is the kind of a file.
type Type uint8

// The types of files that a snapshot holds.
const (
	Regular Type = iota
	Dir
	Symlink
)

// String returns the word for the type.
func (t Type) String() string {
	switch t {
	case Regular:
		return "file"
	case Dir:
		return "directory"
	case Symlink:
		return "symlink"
	}
	return "unknown type"
}

// Time is a file's time as the file system tells it: seconds since 1970 UTC, which may
// be negative, and nanoseconds from 0 to 999,999,999.
type Time struct {
	Sec  int64
	Nsec int32
}

// Xattr is one extended attribute. The name carries its namespace ("user.note").
type Xattr struct {
	Name  string
	Value []byte
}

// Encoding tells how the bytes of a chunk are stored.
type Encoding uint8

// The encodings of chunks.
const (
	Raw  Encoding = 0 // the stored bytes are the chunk's bytes
	Zstd Encoding = 1 // they are one zstd frame of them, and fewer
)

// Location is a range of bytes in a blob store.
type Location struct {
	Blob     string // key of the blob
	Offset   uint32 // where the stored bytes begin
	Stored   uint32 // how many there are
	Encoding Encoding
}

// Chunk is a run of a file's bytes. It lies within one cell of the file, a cell being
// ChunkSize bytes at a multiple of ChunkSize.
type Chunk struct {
	Offset int64 // in the file
	Length uint32
	Digest Digest // of the chunk's bytes, not of the stored ones
	Location
}

// Entry is one name in the tree.
type Entry struct {
	// Path is relative to the store's root, slash separated, with the bytes that the
	// file system has, which need not be text. The root itself is "" and may be left out.
	Path string
	Type Type
	Mode uint32 // permission, setuid, setgid and sticky bits: 07777 at most

	UID, GID    uint32
	User, Group string // names of the ids where they are known

	MTime Time
	Size  int64 // of a regular file, else 0

	// ChunkSize is the size of the file's cells, a multiple of 4 KiB; 0 for everything
	// that is not a regular file with content of its own.
	ChunkSize uint32
	// Chunks are in order of their offsets. What they leave out are holes, each at least
	// MinHoleSize long, beginning and ending (save at the end of the file) at multiples
	// of HoleAlign.
	Chunks []Chunk

	// Link is the target of a symbolic link. On a regular file it makes the entry
	// another name of a file: the path of the first name of that hard-link group, which
	// is the least one and holds the content.
	Link   string
	Xattrs []Xattr // sorted by name
}

// IsLink reports whether e is a further name of a hard-link group.
func (e *Entry) IsLink() bool { return e.Type == Regular && e.Link != "" }

// Index is a snapshot of one store: what the tree is and where its bytes are.
type Index struct {
	Job, Task, Store string
	Checkpoint       string    // id of the checkpoint that the index is made for
	Created          time.Time // kept to the nanosecond, in UTC
	Prev             string    // marker of the index before this one, or ""
	Borrows          []string  // ids of the checkpoints whose blobs this index names
	Entries          []Entry   // sorted by the bytes of Path
}

// Totals are sums over an index.
type Totals struct {
	Files    int64 // regular files with content of their own, even if empty
	Dirs     int64
	Symlinks int64
	Links    int64 // further names of hard-link groups
	Chunks   int64
	Bytes    int64 // sum of file sizes, holes included, each hard-link group once
	Stored   int64 // bytes in the blob store that chunks name, each once
}

// BlobUse tells how much of a blob is used.
type BlobUse struct {
	Key  string
	Live int64 // stored bytes of the blob that are named, each counted once
}

// Root is the first part of an encoded index: enough to know which blobs the index needs
// and where its segments are.
type Root struct {
	Digest Digest // binds the root and through it all segments
	Size   int64  // encoded length

	Job, Task, Store string
	Checkpoint       string
	Created          time.Time
	Prev             string
	Borrows          []string
	Totals           Totals

	// Blobs is every blob that the index names, packs and older indexes alike, sorted by
	// key. The object that holds the root is not among them.
	Blobs    []BlobUse
	Segments []SegmentRef // in order of the entries
}

// SegmentRef names a segment, which is a run of encoded entries. Blob is the key of the
// root's own object when the segment was written with it.
type SegmentRef struct {
	Location
	Digest  Digest // binds the stored bytes
	Content Digest // of the content before compression, by which a later index finds it
	Entries uint32 // entries that begin in the segment
}

// StoredChunk is a chunk that lies in the blob store, without the file it came from.
type StoredChunk struct {
	Digest Digest
	Length uint32
	Location
}

// ChunkList is the index of an unfinished upload (P5g): what it has stored so far.
type ChunkList struct {
	Digest Digest    // binds the encoded list
	Blobs  []BlobUse // every blob that the list names, sorted by key
	Chunks []StoredChunk
}

// Run is a run of data in a file, as opposed to a hole.
type Run struct {
	Offset, Length int64
}

// ChangeKind tells what happened to a path between two indexes.
type ChangeKind uint8

// The kinds of changes. ContentChanged says that type, link, size or bytes differ, and
// perhaps the metadata too; MetaChanged that only mode, owner, time or xattrs do.
const (
	Unchanged ChangeKind = iota
	Added
	Removed
	ContentChanged
	MetaChanged
)

// String returns the word for the kind.
func (k ChangeKind) String() string {
	switch k {
	case Unchanged:
		return "unchanged"
	case Added:
		return "added"
	case Removed:
		return "removed"
	case ContentChanged:
		return "content changed"
	case MetaChanged:
		return "metadata changed"
	}
	return "unknown change"
}

// Change is what happened to one path. Old is nil for what was added, New for what was
// removed; they point into the indexes that were compared. Where a chunk is stored is not
// part of a comparison, so the locations of Old and New may differ when nothing else does.
type Change struct {
	Kind     ChangeKind
	Old, New *Entry
}

// Path returns the path that the change is about.
func (c Change) Path() string {
	if c.New != nil {
		return c.New.Path
	}
	return c.Old.Path
}
