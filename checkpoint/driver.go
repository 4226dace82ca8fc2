package checkpoint

import (
	"context"
	"iter"
	"time"
)

// Info describes the place where a driver keeps logs.
type Info struct {
	// ID is the identity that a task's bind object records, so that nobody deletes
	// by the log of the wrong store.
	ID string
}

// Driver keeps the logs of many tasks. Its methods may be called concurrently, also by
// several processes on one store. They block until done or ctx ends. Errors are
// returned raw: the Store adds what was tried.
type Driver interface {
	// Info returns the store's identity. It needs nothing of the store but to be readable.
	Info(ctx context.Context) (Info, error)

	// Head returns the newest entry. A task without a log is fs.ErrNotExist; a newest
	// entry that is damaged is ErrCorrupt, and no older entry is ever given in its
	// place. Whoever has seen an entry as the head, or an Append return nil, never
	// gets an older one afterwards.
	Head(ctx context.Context, task TaskID) (*Entry, error)

	// Get returns the entry at a slot. One that never was, or is no longer kept, is
	// fs.ErrNotExist. What lies below the head is history: it may be a leftover that
	// was never committed, and nobody takes it for state.
	Get(ctx context.Context, task TaskID, slot uint64) (*Entry, error)

	// Append makes e the entry at e.Slot if the head is at e.Slot-1 with digest
	// e.Prev. The caller built e from a head that this driver returned. Append sets
	// e.Digest; a store that stamps entries itself sets e.Time, the same for every
	// try with this nonce.
	//
	// nil says that e is in the log, be it by an earlier try with the same nonce.
	// ErrConflict says that the slot belongs to another entry, so this one is not
	// in the log and never will be. ErrFenced says that the slot's name had been used and
	// removed before, so that e is not in the log although its name was free; nothing
	// may be deleted on the strength of it. An error that wraps ErrNoEffect
	// says that this call changed nothing. After any other error the outcome is unknown; calling Append again with the same entry finds out.
	Append(ctx context.Context, task TaskID, e *Entry) error

	// Tasks yields every task that has a log, each one once, in an order of its own.
	Tasks(ctx context.Context) iter.Seq2[TaskID, error]

	// Trim removes entries that are no longer needed: never the newest, and none that
	// was superseded less than KeepSuperseded ago by the store's clock. It may do
	// nothing.
	Trim(ctx context.Context, task TaskID) error

	// Close frees what the driver itself holds.
	Close() error
}

// KeepSuperseded is how long an entry below the newest is kept, by the store's clock
// (P2). It bounds how stale a listing may be without harm.
const KeepSuperseded = 24 * time.Hour
