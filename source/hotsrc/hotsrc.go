// Package hotsrc freezes a Pebble database that another process has open, without its
// help: a sidecar's copy.
//
// # Contract
//
// The image is what the owner would find if it had been killed at a moment of Freeze: all
// that it had synced before (pebble.Sync), of the rest a prefix, and nothing half. Writes
// with pebble.NoSync may still be in the owner's memory and are then not in the image. So
// this source keeps rule S1 for synced writes only; who can run code in the owner takes
// pebblesrc, which keeps it for all.
//
// How it is done: tables get hard links; the MANIFEST, and then the logs, are copied; and
// all this counts only if the MANIFEST and the set of logs were the same before and after.
// Then no flush, ingestion or compaction came into force in between, so the logs were
// neither removed nor recycled, and the tables are those that the MANIFEST names. Else, or
// if a file vanished, it is done again; what was linked stays. At last Pebble itself opens
// the image read-only, which reads the MANIFEST and replays the logs; what the image then
// does not need is removed. An image that does not open does not count. The owner is never
// stopped and nothing is written into its directory.
//
// Tables are known by the identity of the live file, so that a table which an earlier
// backup read is not read again.
//
// # Limits
//
// Refused with ErrUnsupported, because it cannot be made safe or be proved: a database
// without a WAL (what is not flushed lies only in the owner's memory), with a WAL directory
// or WAL failover of its own, with tables in remote storage or with separated value files;
// and RocksDB directories, which Pebble cannot open. A comparer, merger or key schema that
// Pebble does not know must be given in Options.
//
// A database that flushes or compacts more often than its logs can be copied is refused
// with ErrBusy after Options.Tries; larger memtables help. Logs are replayed into memory by
// the proof: it takes as much as the owner's memtables.
package hotsrc

import (
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/snapferry/snapferry/source"
)

// ErrBusy is matched by the error of a Freeze that never found the database unchanged for
// as long as its logs are copied.
var ErrBusy = errors.New("the database changed at every try")

// DefaultTries is how often Freeze tries if Options has no number.
const DefaultTries = 100

const (
	logChunk      = 256 << 10
	manifestChunk = 64 << 10
)

// Options adjusts Pebble. Nil is valid.
type Options struct {
	// Scratch is the directory in which images are made. The default is the directory
	// that the database's own lies in. On another file system tables are copied.
	Scratch string

	// Open is what Pebble needs to open the image: the comparer, merger and key schemas
	// of the owner. Everything else in it is ignored. Nil stands for Pebble's own.
	Open *pebble.Options

	// Tries bounds how often Freeze tries; DefaultTries if zero.
	Tries int
}

// Pebble returns the source of the database in dir, which any process may have open.
func Pebble(dir string, opts *Options) source.Source {
	c := &copier{live: dir, tries: DefaultTries}
	o := Options{}
	if opts != nil {
		o = *opts
	}
	if o.Open != nil {
		c.open = *o.Open
	}
	if o.Tries > 0 {
		c.tries = o.Tries
	}
	return source.Func(c.copy, &source.FuncOptions{
		Live:      dir,
		Scratch:   o.Scratch,
		Immutable: isTable,
		// Tables are made of compressed blocks.
		Compressed: isTable,
		ChunkSize:  chunkSize,
	})
}

func chunkSize(path string) uint32 {
	switch {
	case isLog(path):
		return logChunk
	case isManifest(path):
		return manifestChunk
	}
	return 0
}
