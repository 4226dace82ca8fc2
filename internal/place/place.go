// Package place brings target directories exactly to given snapshot indexes.
//
// It hides everything between "these indexes belong there" and "there they are": the
// staging directory beside each target, the reuse of bytes that lie on the local disk,
// fetching and verifying the rest, metadata, and the swap of one or several targets under
// a journal. The only entry points are Restore and Unfinished.
//
// What holds at every instant, power loss and SIGKILL included:
//
//   - I7: a target is the whole old tree or the whole new one, never absent and never a
//     mixture. Several targets are old or new one by one, and a journal brings all of them
//     to the new state when the next restore of any of them begins (S7). Options.InPlace
//     gives this up for targets that are mount points (S8).
//   - I6: no byte is written before its digest was checked, and no operation on an index's
//     path leaves the staging tree: paths are resolved by the kernel below a directory
//     descriptor, with no symbolic link followed, whatever the index says.
//   - What lies in the old target is only ever read. It is removed after the swap.
//   - A failure leaves the target as it was. The staging stays and the next restore goes on
//     with it; a restore that staged nothing leaves nothing.
//
// Memory is bounded by Options.Workers times the chunk size, beside 8 bytes for each chunk
// of the indexes and about 100 for each file.
package place

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/snapferry/snapferry/snapshot"
)

// ErrUnfinished says that a restore of several stores (or one in place) was cut short after
// the first change, so that the stores do not belong together until it is completed.
var ErrUnfinished = errors.New("restore unfinished")

// Store is one store to restore.
type Store struct {
	Name   string          // of the store, unique within a call
	Target string          // the directory that will be the store's tree; it may be absent
	Index  *snapshot.Index // what the tree is to be
}

// Options tune Restore. Only Read is needed. The functions may be called concurrently.
type Options struct {
	// Checkpoint is the id of what is restored. It stands in the journal and in messages.
	Checkpoint string
	// Read opens a range of a blob. A blob that is not there is fs.ErrNotExist.
	Read func(ctx context.Context, blob string, offset, length int64) (io.ReadCloser, error)
	// Workers is how many ranges are read at once, and how many local chunks are hashed at
	// once. 0 is twice the number of processors, at least 4.
	Workers int
	// StrictOwner makes an owner that cannot be set an error. Otherwise it is a warning.
	StrictOwner bool
	// OwnerNames looks up users and groups by the names in the index first and takes the
	// numbers only when the name is not known here.
	OwnerNames bool
	// InPlace stages within the target and replaces its entries one by one. It is for
	// targets that are mount points, and it is not atomic: killed between two entries it
	// leaves a mixture, which the next restore completes before anything else. A directory
	// lost+found of root's at the top of a mount point belongs to the file system and
	// stays, unless the store has an entry of that name.
	InPlace bool
	// DryRun reports what would be fetched and reused, and writes nothing.
	DryRun bool
	// Warn is told what went wrong without making the restore fail.
	Warn func(store, path string, err error)
	// OnFile is told of every regular file whose bytes and metadata are in place, and how
	// long that took from the first of its bytes.
	OnFile func(store string, e *snapshot.Entry, took time.Duration)
	// OnPhase is told how long each phase took that was completed.
	OnPhase func(p Phase, took time.Duration)
	// OnBytes is told of file bytes as they are put in place or found there.
	OnBytes func(store string, n int64)

	fail       func(op string) error // tests: called before each change, may return its error
	told       *told                 // warnings given already, of this run
	durability durability            // tests and benchmarks: how staged files are made durable
}

// Phase is a part of a restore.
type Phase int

// The phases of a restore, in order.
const (
	Prepare Phase = iota // checks, locks, recovery, making the staged tree
	Build                // finding local content, fetching, metadata, making it durable
	Swap                 // exchanging the trees and removing what was there
)

// Report tells what a restore did for one store.
type Report struct {
	Files        int64 // names of regular files in the tree
	BytesFetched int64 // file bytes read from the blob store, a chunk that occurs often once
	BytesReused  int64 // file bytes that came from the local disk or were fetched already
}

// BlobError says that a blob does not hold what an index says. Err is fs.ErrNotExist when
// the blob is absent and sentinel.Corrupt when its bytes are wrong in two tries.
type BlobError struct {
	Blob           string
	Offset, Length int64  // of the chunk in the blob
	Store, Path    string // one file that needs it
	Err            error
}

// Error returns the message.
func (e *BlobError) Error() string {
	return fmt.Sprintf("read blob %s: bytes %d+%d, needed by %s of store %s: %v", e.Blob, e.Offset, e.Length, e.Path, e.Store, e.Err)
}

// Unwrap returns Err.
func (e *BlobError) Unwrap() error { return e.Err }

// Restore makes the target of each store exactly what its index says and reports by store
// name. Several stores are brought to the checkpoint together (S7). The indexes must have
// been validated, but are not trusted. A restore of a target that another process restores
// just now is sentinel.Busy and sentinel.Conflict.
//
// A restore that fails can be run again: what it has staged is used. A canceled context
// stops it until the swap begins, which is short and then completes.
func Restore(ctx context.Context, stores []Store, opts *Options) (map[string]Report, error) {
	return restore(ctx, stores, opts)
}

// Unfinished reports whether a restore into dir was interrupted after it had changed some
// of what it restores, and how to go on. Such a directory must not be opened or backed up.
// The error is ErrUnfinished; an error of another kind means that it could not be found out.
func Unfinished(dir string) error { return unfinished(dir) }
