package raftnode

import "context"

// Entry is one committed entry of the log.
type Entry struct {
	Index, Term uint64
	Data        []byte // empty for an entry of Raft itself, which only moves the index on
}

// StateMachine is the replicated state, kept in a directory. Except for AppliedIndex, its
// methods are called by one goroutine at a time.
type StateMachine interface {
	// Apply applies entries in the order of their indexes, which have no gaps, and
	// returns one result for each. What is in Data decides alone: no clock, no random
	// number, nothing local, or members would come to differ. An error stops the member.
	// The results of entries with empty Data are not used.
	Apply(entries []Entry) (results [][]byte, err error)

	// AppliedIndex is the index of the last entry in the state. After opening it tells what
	// survived; entries above it are applied again.
	AppliedIndex() uint64

	// Snapshot makes dir, which does not exist, a copy of the state at this instant. It
	// is quick: it links files that are never written again and copies what little else
	// there is. Nothing in dir is ever written after it has returned.
	Snapshot(dir string) error

	// Install makes the state what dir holds; afterwards AppliedIndex is what it was
	// when dir was made. dir and its files are left as they are: what the state machine
	// will write in place is copied (R8.5). A crash leaves the old state or the new one.
	Install(dir string) error

	// Close frees what the state machine holds. Nothing is called afterwards.
	Close() error
}

// Verifier is what a StateMachine may have besides. Others take a snapshot over on the
// word of its maker that its files hold the state, so a file that the disk has damaged
// must be found before.
type Verifier interface {
	// VerifySnapshot checks the files that Snapshot has put into dir. It is called after
	// each Snapshot, by one goroutine at a time, beside all else. An error that wraps
	// ErrCorrupt says that the state itself is damaged: the member stops.
	VerifySnapshot(ctx context.Context, dir string) error
}
