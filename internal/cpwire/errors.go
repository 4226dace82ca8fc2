package cpwire

import (
	"fmt"
	"io/fs"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// Code is the machine's word for what went wrong.
type Code string

// The codes.
const (
	CodeInvalid     Code = "invalid"     // the request can never work
	CodeNotFound    Code = "not_found"   // no such log, entry or member
	CodeNotLeader   Code = "not_leader"  // another member leads; nothing was done
	CodeUnavailable Code = "unavailable" // come again; nothing was done
	CodeUnknown     Code = "unknown"     // it may or may not have been done
	CodeConflict    Code = "conflict"    // the group is in a state that forbids it
	CodeOtherGroup  Code = "other_group" // this member belongs to another group
	CodeUnsupported Code = "unsupported" // a newer program is needed
	CodeCorrupt     Code = "corrupt"     // what the member holds is damaged
	CodeInternal    Code = "internal"    // a fault of the member
)

// Error is an error as the service tells it.
type Error struct {
	Code    Code   `json:"code"`
	Op      string `json:"op"`
	Subject string `json:"subject"`
	Message string `json:"message"`
}

// Error returns "op subject: message".
func (e *Error) Error() string {
	if e.Subject == "" {
		return fmt.Sprintf("%s: %s", e.Op, e.Message)
	}
	return fmt.Sprintf("%s %s: %s", e.Op, e.Subject, e.Message)
}

// Unwrap returns the condition that callers branch on, if the code has one.
func (e *Error) Unwrap() error {
	switch e.Code {
	case CodeInvalid:
		return fs.ErrInvalid
	case CodeNotFound:
		return fs.ErrNotExist
	case CodeUnknown:
		return sentinel.Unknown
	case CodeConflict:
		return sentinel.Conflict
	case CodeCorrupt:
		return sentinel.Corrupt
	case CodeUnsupported:
		return sentinel.Unsupported
	}
	return nil
}

// Failure is the JSON of an answer that is no success. Leader is set with CodeNotLeader,
// and empty there while no leader is known.
type Failure struct {
	Error  *Error  `json:"error"`
	Leader *Member `json:"leader,omitempty"`
}
