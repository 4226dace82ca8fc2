package source

import (
	"context"
	"encoding/hex"
	"path/filepath"
	"strings"
)

// The name of a directory for an image.
const (
	scratchPrefix = ".snapferry-image-"
	scratchRandom = 16 // hex digits at the end of the name
)

// FuncOptions adjusts Func. Nil is valid.
type FuncOptions struct {
	// Live is the directory of the live store, if it has one on the same file
	// system. The image takes the mode, the owner and the times of its root from it,
	// and the identity cache is kept under its path.
	Live string

	// Scratch is the directory in which images are made. The default is the
	// directory that Live lies in, else os.TempDir. For hard links it must be on the
	// file system of the live store.
	Scratch string

	// Immutable reports whether the file at this path of the image is a hard link of
	// a file that the store never writes again under any name. Such a file is read
	// once and then known by its identity, without its ctime. Every other file is
	// read in full each time.
	Immutable func(path string) bool

	// ChunkSize returns the chunk size that suits a file; zero for the default. Small
	// chunks, down to 16 KiB, are for files that change in small places.
	ChunkSize func(path string) uint32

	// Compressed reports whether the store itself compresses what is in a file.
	Compressed func(path string) bool
}

// Func returns a source whose images the application writes, for stores that can
// make a consistent copy of themselves (RocksDB's checkpoint, LMDB's copy). Freeze
// calls make with an empty directory; make fills it and returns when the copy is
// complete. A make that needs to create the directory itself may remove it first.
// Nobody may write to the directory after make returned.
//
// An image lies in a directory .snapferry-image-NAME-RANDOM of the scratch directory,
// locked while it is in use. Release removes it; one that a crash left behind is
// removed by the next Freeze.
func Func(make func(ctx context.Context, dir string) error, opts *FuncOptions) Source {
	f := &fromFunc{make: make}
	if opts != nil {
		f.opts = *opts
	}
	return f
}

type fromFunc struct {
	make func(ctx context.Context, dir string) error
	opts FuncOptions
}

// InScratch tells whether a path lies in a directory that Func made for an image. Nothing
// in there is of use after a crash, so whoever writes it need not sync it.
func InScratch(path string) bool {
	for part := range strings.SplitSeq(filepath.Clean(path), string(filepath.Separator)) {
		if isScratch(part) {
			return true
		}
	}
	return false
}

func isScratch(name string) bool {
	at := len(name) - scratchRandom
	if !strings.HasPrefix(name, scratchPrefix) || at < len(scratchPrefix) {
		return false
	}
	return isRandom(name[at:])
}

// isRandom tells whether this is the end of such a name.
func isRandom(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == scratchRandom
}
