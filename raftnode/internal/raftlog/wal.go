package raftlog

import (
	"errors"
	"fmt"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// WAL is the durable half of a Log. It is used by one goroutine at a time. After an error from any method the
// contents of the disk are unknown and only Close may be called.
type WAL interface {
	// Save appends a group: the entries, then the hard state. With sync it returns only when the group and
	// everything before it is durable. Entries given without a hard state are closed with the last one saved.
	Save(hs *pb.HardState, ents []*pb.Entry, sync bool) error
	// SaveSnapshot appends the record of a snapshot and returns when it is durable. A record above the commit index
	// last saved counts only once a hard state that commits it has followed.
	SaveSnapshot(m *pb.SnapshotMetadata) error
	// Sync makes everything that was saved durable.
	Sync() error
	// Release removes what is needed only by records below the one at index, which must have been recorded.
	Release(index uint64) error
	// Close releases the files. Saved and unsynced groups may be lost.
	Close() error
}

// Replay is what a WAL held when it was opened.
type Replay struct {
	// Metadata is what the WAL was created with.
	Metadata []byte
	// HardState is the last one saved, nil if there never was one.
	HardState *pb.HardState
	// Base is the oldest record after which every entry is still held. It is never nil; a log that begins with
	// nothing has a base of index 0.
	Base *pb.SnapshotMetadata
	// Newest is the newest record, nil if no snapshot was ever recorded.
	Newest *pb.SnapshotMetadata
	// Records are all records from Base to Newest, by index. It is empty when Newest is nil.
	Records []*pb.SnapshotMetadata
	// Entries are all entries after Base.
	Entries []*pb.Entry
}

// Conditions a caller may want to tell apart. ErrDamaged and ErrClosed are also what the rest of the module calls
// corrupt and closed.
var (
	// ErrOld means that a snapshot is not newer than the one recorded, or that it lies below the log. It is not
	// needed and may be dropped.
	ErrOld = errors.New("snapshot is not newer than what is recorded")
	// ErrAhead means that an index lies above what this member has applied, committed or logged.
	ErrAhead = errors.New("index is ahead of this member")
	// ErrForked means that the own log has another term at the snapshot's index: the two are of different histories.
	ErrForked = errors.New("snapshot is of another history")
	// ErrDamaged means that the files of the WAL cannot be trusted. Errors that match it say which file.
	ErrDamaged = fmt.Errorf("log is damaged: %w", sentinel.Corrupt)
	// ErrOtherMember means that the WAL was created with other metadata.
	ErrOtherMember = errors.New("log belongs to another member")
	// ErrLocked means that another process uses the WAL.
	ErrLocked = errors.New("log is in use by another process")
	// ErrClosed means that the log was closed.
	ErrClosed = fmt.Errorf("log: %w", sentinel.Closed)
)

// A DamageError says where a WAL is damaged. It matches ErrDamaged.
type DamageError struct {
	// File is the segment, or the directory if no single segment is to blame.
	File string
	// Offset is the place in File up to which it could be read.
	Offset int64
	// Err says what is wrong there.
	Err error
}

// Error says what is wrong, where, and what to do.
func (e *DamageError) Error() string {
	return fmt.Sprintf("%v: %s at byte %d: %v; entries this member acknowledged may be gone, so it must not start: "+
		"remove it from the group and add it anew with an empty directory", ErrDamaged, e.File, e.Offset, e.Err)
}

// Unwrap gives ErrDamaged and the cause.
func (e *DamageError) Unwrap() []error { return []error{ErrDamaged, e.Err} }
