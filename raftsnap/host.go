package raftsnap

import (
	"context"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Host is the Raft member that a Manager serves. All methods may be called from several
// goroutines at once, also while one of the others runs.
type Host interface {
	// View tells what the member knows of itself. It is asked for at every event, so it
	// must be cheap. Held is left empty: the Manager fills it.
	View() protocol.View

	// Freeze creates dir with the state as it is between two entries, and returns what R1
	// wants to be known of that instant, the member's own lineage included. It is quick:
	// files that never change are linked, the rest is copied. Files put into dir are never
	// written again by anybody.
	Freeze(ctx context.Context, dir string) (protocol.Meta, error)

	// Record makes a durable, verified snapshot of the store the one that Raft knows, and
	// cuts the log up to it (R4). It returns a *protocol.Refusal if the snapshot must not be
	// recorded: NotNeeded, Ahead or Forked.
	Record(ctx context.Context, id protocol.ID, m protocol.Meta) error

	// Install hands the snapshot in dir to Raft as the answer to an envelope, and returns
	// when it is decided what became of it (R8). An error says that it could not be decided
	// or done; the snapshot is kept.
	Install(ctx context.Context, e protocol.Envelope, id protocol.ID, m protocol.Meta, dir string) (protocol.Outcome, error)

	// Outcome brings, at the leader, what became of an install at another member, progress
	// included (R7). It returns a *protocol.Refusal of kind NotLeader where this member does
	// not lead (any more).
	Outcome(o protocol.Outcome) error
}
