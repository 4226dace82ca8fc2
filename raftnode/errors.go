package raftnode

import (
	"errors"
	"fmt"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Conditions a caller branches on.
var (
	// ErrNotLeader says that this member does not lead; nothing was done. The error is a
	// *NotLeaderError.
	ErrNotLeader = errors.New("not the leader")
	// ErrUnknown says that a proposal may or may not be committed.
	ErrUnknown = sentinel.Unknown
	// ErrBusy says that too much is in flight; nothing was done.
	ErrBusy = sentinel.Busy
	// ErrClosed says that the member was closed or has stopped; nothing was done.
	ErrClosed = sentinel.Closed
	// ErrRemoved says that this member was removed from the group.
	ErrRemoved = errors.New("removed from the group")
	// ErrNoMember says that no member has the name.
	ErrNoMember = errors.New("no such member")
	// ErrConflict says that the membership already says otherwise.
	ErrConflict = sentinel.Conflict
	// ErrCorrupt says that what lies on this member's disk is damaged.
	ErrCorrupt = sentinel.Corrupt
)

// NotLeaderError is ErrNotLeader with a hint.
type NotLeaderError struct {
	Leader protocol.Member // zero while there is no leader
}

// Error names the leader if there is one.
func (e *NotLeaderError) Error() string {
	if e.Leader.ID == 0 {
		return ErrNotLeader.Error() + ", and there is none at the moment"
	}
	return fmt.Sprintf("%v: it is %s at %s", ErrNotLeader, e.Leader.Name, e.Leader.URL)
}

// Is makes errors.Is(err, ErrNotLeader) work.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// Error is the error of every method of a Node: what was tried, on what, and why it did
// not work.
type Error struct {
	Op, Subject string
	Err         error
}

// Error returns "op subject: cause".
func (e *Error) Error() string {
	if e.Subject == "" {
		return e.Op + ": " + e.Err.Error()
	}
	return e.Op + " " + e.Subject + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

func wrap(op, subject string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Op: op, Subject: subject, Err: err}
}
