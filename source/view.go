package source

import (
	"io"
	"io/fs"
)

// A View is a store of one file as it was at one moment, though its owner writes to the
// file meanwhile: a database that keeps old pages for its readers. It is what the leaf
// packages of such databases give to OpenView.
type View struct {
	// Path is the absolute path of the live file, without symbolic links. Its base name
	// is the path of the only entry, whose metadata are those of the live file.
	Path string

	// File is what Stat says of the file that is read. Another one at Path is ErrChanged.
	File fs.FileInfo

	// Size is the length of the content, and Content reads it, from many goroutines at
	// once, until Release.
	Size    int64
	Content io.ReaderAt

	// ChunkSize is Entry.ChunkSize.
	ChunkSize uint32

	// Check, unless nil, says whether what was read so far is the content. It is asked
	// by File.Check, after the check that Path still leads to the file.
	Check func() error

	// Locked are files on which the process holds POSIX locks for as long as the image
	// lives. No other image of the process opens them meanwhile: whoever closes a
	// descriptor of such a file takes the locks away.
	Locked []fs.FileInfo

	// Release gives back what holds the moment. It is called once, when nothing reads.
	Release func() error
}
