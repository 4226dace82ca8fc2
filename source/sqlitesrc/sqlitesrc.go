// Package sqlitesrc freezes an SQLite database by its path, whether or not the program
// that owns it runs, and whether it is this program or another.
//
// # Contract
//
// Freeze begins a read transaction, and the image is the database as that transaction
// sees it: every transaction that was committed before, and nothing of later ones. It is
// one file with the name of the original, complete in itself. It holds what a checkpoint
// would have moved out of the write-ahead log, and no -wal, -shm or -journal goes with
// it. Pages are read from the database and its log while the upload goes on; nothing is
// copied first.
//
// In WAL mode nobody waits: writers go on, and the log grows until Release, because what
// the image needs cannot be moved out of it. In the rollback modes (DELETE, TRUNCATE,
// PERSIST) a writer cannot commit while somebody reads, so the image watches for one: as
// soon as a writer has reserved the database, what the image needs is copied into an
// unnamed file and the transaction ends. A writer waits as long as that copy takes, about
// a second for a gigabyte, and needs a busy timeout of that kind. Where files can be
// cloned (XFS, Btrfs) Freeze does so at once, and nobody waits.
//
// The database is only read. What SQLite itself does for any reader, it does here: in WAL
// mode it makes a -shm where there is none. A -journal that a crash left behind is not
// rolled back: Freeze refuses, and says so.
//
// # Several copies of SQLite in one process
//
// SQLite locks a file with POSIX record locks, and a process loses all of those that it
// has on a file when it closes any descriptor of the file. Within one copy of SQLite the
// library sees to that; modernc.org/sqlite is what this package uses, so a program that
// opens its database with modernc.org/sqlite can freeze it by path. A program that opens
// it with another copy (mattn/go-sqlite3, ncruces/go-sqlite3) must not, nor open and close
// the file in any other way while an image is held: one of the two would lose its locks,
// and what it reads or writes would be torn. Such a program gives source.Func a function
// that runs "VACUUM INTO" on its own connection, or leaves the backup to the command,
// which is another process.
//
// # Limits
//
// Linux only. A database that another connection holds in exclusive mode cannot be read
// and is an error after Options.BusyTimeout. An encrypted database is no database to
// this package. Whether the content is sound is not checked: PRAGMA integrity_check does
// that, best on a restored copy. Databases that were attached are stores of their own.
//
// The whole file is read by each backup, and the chunks that changed are sent.
package sqlitesrc

import (
	"errors"
	"time"

	"github.com/snapferry/snapferry/source"
)

// The defaults of Options.
const (
	// DefaultChunkSize is the size of chunk if Options has none.
	DefaultChunkSize = 32 << 10
	// DefaultBusyTimeout is how long Freeze waits if Options does not say.
	DefaultBusyTimeout = 5 * time.Second
)

var (
	// ErrLocked is matched by the error of Freeze when another connection kept the
	// database locked for longer than Options.BusyTimeout.
	ErrLocked = errors.New("database is locked")
	// ErrNotDatabase is matched by the error of Freeze for a file that is no SQLite
	// database, or an encrypted one, or one too damaged to be read.
	ErrNotDatabase = errors.New("not an SQLite database, or encrypted, or damaged")
	// ErrHotJournal is matched by the error of Freeze when a crash left a transaction
	// half written, which its -journal can undo.
	ErrHotJournal = errors.New("a transaction was cut short by a crash and is not rolled back yet")
)

// Options adjusts New. Nil is valid.
type Options struct {
	// ChunkSize is the size of the pieces of which those that changed are sent, between
	// 16 KiB and 4 MiB, best a multiple of the page size. The default is
	// DefaultChunkSize. Once a database was backed up, another size sends all of it.
	ChunkSize uint32

	// BusyTimeout is how long Freeze waits for a lock of somebody else. Zero is
	// DefaultBusyTimeout, and less than zero not to wait.
	BusyTimeout time.Duration

	// Scratch is the directory for the copy that is made when a writer waits. The
	// default is the directory of the database.
	Scratch string
}

// New returns the source of the database at path.
func New(path string, opts *Options) source.Source {
	s := &sqlite{path: path}
	if opts != nil {
		s.opts = *opts
	}
	if s.opts.ChunkSize == 0 {
		s.opts.ChunkSize = DefaultChunkSize
	}
	if s.opts.BusyTimeout == 0 {
		s.opts.BusyTimeout = DefaultBusyTimeout
	}
	return s
}

type sqlite struct {
	path string
	opts Options
}
