// Package source turns a store's directory into something that can be copied: a
// Source is frozen in milliseconds into an Image, which lists every file with its
// metadata and its identity, opens files for reading, and is released at the end.
//
// # Main types
//
// Dir is the source of a plain directory or a single file. Func is the source of
// anything that can write a checkpoint of itself into an empty directory. Leaf
// packages (pebblesrc and the like) build on Func, so that a database is linked
// only into programs that use it. Cache remembers the content of files by their
// Identity, so that an unchanged file costs one stat.
//
// # Contract
//
// A source may be frozen again and again; images are independent. An Image may be
// used by many goroutines at once until Release. What Freeze could not see it
// refuses: an unreadable directory, a mount inside the store or a name that keeps
// vanishing is an error that names the path, never a file left out in silence.
// Sockets, FIFOs and devices are left out and listed by Skipped. Symbolic links are
// recorded and never followed, except that the path given to Dir is resolved first.
// Nothing is ever written into the directory of a store.
//
// # Limits
//
// Linux only: identities need statx, and reading needs descriptors of directories.
// Elsewhere the package compiles and Freeze returns ErrUnsupported.
package source

import (
	"context"
	"errors"
	"io"
	"sort"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// ErrChanged is matched by the error of a file that is no longer what Freeze
// recorded: it was written, replaced or removed.
var ErrChanged = errors.New("changed since it was frozen")

// ErrClosed is matched by the error of every use of an image after Release.
var ErrClosed = sentinel.Closed

// ErrUnsupported is matched by the error of a source that cannot work here: not on
// this operating system, or not with the way the store is set up.
var ErrUnsupported = sentinel.Unsupported

// A Source is a store that can be frozen.
type Source interface {
	// Freeze returns an image of the store as it is now. Every write that the caller
	// made before is part of it, synced or not. It is quick (no file is read), and
	// what it holds is given back by Image.Release, which the caller must call.
	Freeze(ctx context.Context) (Image, error)
}

// An Image is one view of a store's files. All methods may be called from many
// goroutines at once.
type Image interface {
	// Entries returns what was found at Freeze, sorted by the bytes of Path. A store
	// that is a directory has its root first, with the empty path. The slice belongs
	// to the image and must not be changed.
	Entries() []Entry

	// Open opens a regular file by the path of its entry, writes back what is dirty
	// of it (rule S3) and stats it. A file that is gone or is no longer a regular
	// file is ErrChanged; a file that was replaced or written opens, and its Identity
	// differs from that of the entry.
	Open(path string) (File, error)

	// Xattrs returns the extended attributes of an entry that a backup keeps, sorted
	// by name: user.*, trusted.* where the process may read them, the file
	// capability and the POSIX access lists. A file system without attributes has
	// none.
	Xattrs(path string) ([]Xattr, error)

	// CacheKey returns the absolute path of the live store, under which the identity
	// cache keeps it; empty if the image must not be cached.
	CacheKey() string

	// ProbeDir returns a directory on the file system of the files, where an unnamed
	// file may be made to learn what time that file system says it is.
	ProbeDir() string

	// Skipped returns one line for each socket, FIFO and device that was left out.
	Skipped() []string

	// Release gives back what Freeze took and removes what it made. It may be called
	// more than once; calls after the first return what the first returned.
	Release() error
}

// A File is an open regular file of an image. ReadAt may be called from many
// goroutines at once.
type File interface {
	io.ReaderAt
	io.Closer

	// Identity returns what the file was after its dirty pages were written back and
	// before anything was read (rule S3).
	Identity() Identity

	// Runs returns the parts of the file that hold data, in order. Between them lie
	// holes of at least MinHole bytes that begin and end at multiples of HoleAlign,
	// or end with the file.
	Runs() ([]Run, error)

	// Check returns nil if the file still has this Identity and its name still leads
	// to it, else an error that matches ErrChanged. What was read between Open and a
	// successful Check is one state of the file.
	Check() error
}

// Type is what an entry is.
type Type uint8

// The types of entries. Everything else a directory can hold is left out.
const (
	Regular Type = iota
	Directory
	Symlink
)

// String returns the type as a word.
func (t Type) String() string {
	switch t {
	case Regular:
		return "file"
	case Directory:
		return "directory"
	case Symlink:
		return "symlink"
	}
	return "unknown"
}

// A Timespec is a time as a file system records it.
type Timespec struct {
	Sec  int64
	Nsec int32
}

// An Identity tells two states of a file apart (rule S3). It is comparable, and
// equal identities mean the same bytes only under the rules that Cache enforces.
type Identity struct {
	Dev, Ino uint64
	Size     int64
	MTime    Timespec
	// CTime is zero for an Entry that is Immutable: links that the store makes and
	// removes move it.
	CTime Timespec
	// BTime is zero where the file system keeps no time of birth.
	BTime Timespec
}

// An Entry is a name in an image and what Freeze recorded about it.
type Entry struct {
	// Path is relative to the store, slash separated, with the bytes found on disk.
	Path string
	Type Type
	// Mode holds the permission bits with setuid, setgid and sticky (07777).
	Mode     uint32
	UID, GID uint32
	// User and Group are the names of UID and GID on this host, empty if they have none.
	User, Group string
	MTime       Timespec
	// Size is the length of a regular file, else zero.
	Size int64
	// Link is the target of a symbolic link.
	Link string
	// Links is the number of names that the file system counts, in and outside of
	// the store. It is a hint for HardLinks and no property of the store.
	Links uint32

	Identity Identity
	// Immutable says that the source vouches that nobody writes to this file, ever,
	// so that its identity needs no CTime.
	Immutable bool
	// Fresh says that the file is to be read each time: it is the image's own copy,
	// or its content can change without a trace. It is never recorded in a Cache.
	Fresh bool
	// ChunkSize is the size of chunk that suits the way the file changes; zero for
	// the default.
	ChunkSize uint32
	// Compressed says that the store compresses what is in the file: to try it once more
	// is in vain.
	Compressed bool
}

// An Xattr is an extended attribute.
type Xattr struct {
	Name  string
	Value []byte
}

// A Run is a part of a file that holds data.
type Run struct {
	Offset, Length int64
}

// What counts as a hole (rule S5).
const (
	MinHole   = 64 << 10
	HoleAlign = 4 << 10
)

// HardLinks finds the names of one file among the regular entries of an image. It
// maps the index of every later name to the index of the first, by path. Names
// outside the store do not count.
func HardLinks(entries []Entry) map[int]int {
	type inode struct{ dev, ino uint64 }
	first := map[inode]int{}
	links := map[int]int{}
	for i := range entries {
		e := &entries[i]
		if e.Type != Regular || e.Links < 2 {
			continue
		}
		key := inode{e.Identity.Dev, e.Identity.Ino}
		if at, ok := first[key]; ok {
			links[i] = at
			continue
		}
		first[key] = i
	}
	return links
}

// Changed returns the paths that two walks of one store do not have in common or
// do not agree about, both sorted as Image.Entries returns them. None means that
// the store stood still from the first walk to the second (rule S2).
func Changed(before, after []Entry) []string {
	var paths []string
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(after) == 0 || len(before) > 0 && before[0].Path < after[0].Path:
			paths = append(paths, before[0].Path)
			before = before[1:]
		case len(before) == 0 || after[0].Path < before[0].Path:
			paths = append(paths, after[0].Path)
			after = after[1:]
		default:
			if before[0] != after[0] {
				paths = append(paths, after[0].Path)
			}
			before, after = before[1:], after[1:]
		}
	}
	return paths
}

// findEntry returns the entry of a path, nil if there is none.
func findEntry(sorted []Entry, path string) *Entry {
	i := sort.Search(len(sorted), func(i int) bool { return sorted[i].Path >= path })
	if i == len(sorted) || sorted[i].Path != path {
		return nil
	}
	return &sorted[i]
}

// Compare returns -1, 0 or 1 as t is before, equal to or after u.
func (t Timespec) Compare(u Timespec) int {
	switch {
	case t.Sec != u.Sec:
		return order(t.Sec, u.Sec)
	default:
		return order(int64(t.Nsec), int64(u.Nsec))
	}
}

// IsZero reports whether t is the zero Timespec.
func (t Timespec) IsZero() bool { return t == Timespec{} }

func (t Timespec) add(d time.Duration) Timespec {
	ns := int64(t.Nsec) + int64(d%time.Second)
	sec := t.Sec + int64(d/time.Second)
	switch {
	case ns >= int64(time.Second):
		ns -= int64(time.Second)
		sec++
	case ns < 0:
		ns += int64(time.Second)
		sec--
	}
	return Timespec{Sec: sec, Nsec: int32(ns)}
}

// sub returns t-u, of times that lie close together.
func (t Timespec) sub(u Timespec) time.Duration {
	return time.Duration(t.Sec-u.Sec)*time.Second + time.Duration(t.Nsec-u.Nsec)
}

func order(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
