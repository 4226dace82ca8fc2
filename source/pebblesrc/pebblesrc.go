// Package pebblesrc freezes a Pebble database that is open.
//
// # Contract
//
// Freeze makes a checkpoint (pebble.DB.Checkpoint with a flushed WAL) in a scratch
// directory: every write that returned before Freeze is in it, those with
// pebble.NoSync too, and of the writes beside it a prefix. If the database runs
// without a WAL its memtables are flushed first. Tables and value blobs are hard
// links and are known by the identity of the live file, so that a table which an
// earlier backup read is not read again; WAL, MANIFEST and OPTIONS are copies, cut
// where Pebble says, and read each time.
//
// Freeze takes as long as the log's next sync, the copy of the log (up to the size of the
// memtables), and some eight syncs of the checkpoint, for which a busy disk needs most of
// the time. The last are left out where the database was opened with FS.
//
// Release removes the checkpoint; until then its tables take space even when the
// database has compacted them away. A crash leaves it, and the next Freeze of the
// same database removes it.
//
// # Limits
//
// The database must lie on the operating system's file system and all its data in
// its directory. Tables in remote storage are not copied by a checkpoint: Freeze
// fails and says so, with ErrUnsupported. So it does for a database with a WALDir of
// its own: a restore would put the log where such a database does not look for it.
// With WAL failover the segments of both places are in the image, which opens without
// failover; before a restored database is opened with failover, its secondary
// directory must be emptied.
package pebblesrc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage"

	"github.com/snapferry/snapferry/source"
)

// Chunk sizes of the files that grow at their end: what was sent of them once need
// not be sent again when they are longer.
const (
	logChunk      = 256 << 10
	manifestChunk = 64 << 10
)

// fileTypeTable is Pebble's base.FileTypeTable, which lies in an internal package.
const fileTypeTable = 2

// Options adjusts New. Nil is valid.
type Options struct {
	// Scratch is the directory in which checkpoints are made. The default is the
	// directory that the database's own lies in. On another file system tables are
	// copied instead of linked, and read again by every backup.
	Scratch string
}

// New returns the source of an open database. The caller keeps the database open
// from Freeze until it returns; the image does not need it.
func New(db *pebble.DB, opts *Options) source.Source {
	if opts == nil {
		opts = &Options{}
	}
	// The path that a table would have is the only public word on where a database lies.
	live := filepath.Dir(db.ObjProvider().Path(objstorage.ObjectMetadata{FileType: fileTypeTable}))
	p := &checkpointer{db: db, live: live}
	return source.Func(p.checkpoint, &source.FuncOptions{
		Live:      live,
		Scratch:   opts.Scratch,
		Immutable: immutable,
		ChunkSize: chunkSize,
		// Tables and value blobs, the files that are immutable, are made of compressed blocks.
		Compressed: immutable,
	})
}

// A checkpointer writes checkpoints of a database.
type checkpointer struct {
	db         *pebble.DB
	live       string
	withoutWAL atomic.Bool
}

// checkpoint fills dir, which exists and is empty.
func (p *checkpointer) checkpoint(_ context.Context, dir string) error {
	setup, err := p.write(dir)
	if err != nil {
		return err
	}
	if setup.disableWAL && !p.withoutWAL.Swap(true) {
		// The first checkpoint told; it lacks what is in the memtables.
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		_, err = p.write(dir)
	}
	return err
}

func (p *checkpointer) write(dir string) (s setup, err error) {
	if p.withoutWAL.Load() {
		if err := p.db.Flush(); err != nil {
			return s, fmt.Errorf("flush: %w", err)
		}
	}
	// Pebble insists on making the directory itself.
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return s, err
	}
	if err := p.db.Checkpoint(dir, pebble.WithFlushedWAL()); err != nil {
		return s, fmt.Errorf("checkpoint: %w", err)
	}
	return p.inspect(dir)
}

// A setup is what the options of a database say about where its data is.
type setup struct {
	disableWAL bool
	walDir     string
}

// inspect refuses a checkpoint that does not hold all of the database.
func (p *checkpointer) inspect(dir string) (s setup, err error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return s, fmt.Errorf("%w: the database does not lie on the operating system's file system", source.ErrUnsupported)
	}
	if err != nil {
		return s, err
	}
	for _, f := range files {
		switch {
		case strings.HasPrefix(f.Name(), "REMOTE-OBJ-CATALOG"):
			return s, fmt.Errorf("%w: tables of the database lie in remote storage, which a checkpoint does not copy", source.ErrUnsupported)
		case strings.HasPrefix(f.Name(), "OPTIONS-"):
			if s, err = readSetup(filepath.Join(dir, f.Name())); err != nil {
				return s, err
			}
		}
	}
	if s.walDir != "" && !p.isLive(s.walDir) {
		return s, fmt.Errorf("%w: the database keeps its log apart, in %s; open it without WALDir", source.ErrUnsupported, s.walDir)
	}
	return s, nil
}

func (p *checkpointer) isLive(dir string) bool {
	a, errA := os.Stat(dir)
	b, errB := os.Stat(p.live)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// readSetup reads two keys of the [Options] section, the only one that has them
// outside of a comment.
func readSetup(file string) (s setup, err error) {
	f, err := os.Open(file)
	if err != nil {
		return s, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		key, value, _ := strings.Cut(strings.TrimSpace(lines.Text()), "=")
		switch key {
		case "disable_wal":
			s.disableWAL = value == "true"
		case "wal_dir":
			s.walDir = value
		}
	}
	return s, lines.Err()
}

// immutable names what Pebble never writes again once it is part of a version.
func immutable(path string) bool {
	return strings.HasSuffix(path, ".sst") || strings.HasSuffix(path, ".blob")
}

func chunkSize(path string) uint32 {
	switch {
	case strings.HasSuffix(path, ".log"):
		return logChunk
	case strings.HasPrefix(path, "MANIFEST-"):
		return manifestChunk
	}
	return 0
}
