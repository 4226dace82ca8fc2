package snapferry

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/source"
)

// Conditions to branch on with errors.Is.
var (
	// ErrNotFound: the repository, job, task, checkpoint or store is not there.
	ErrNotFound = errors.New("not found")
	// ErrFenced: a newer owner has taken the task; this one can publish nothing more.
	ErrFenced = sentinel.Fenced
	// ErrConflict: something else has changed what the action relied on.
	ErrConflict = sentinel.Conflict
	// ErrCorrupt: bytes of the repository are damaged or missing.
	ErrCorrupt = sentinel.Corrupt
	// ErrUnknown: the checkpoint may or may not have been committed. Nothing was
	// deleted; the next Open or Commit finds out.
	ErrUnknown = sentinel.Unknown
	// ErrBusy: a commit of this task is under way.
	ErrBusy = sentinel.Busy
	// ErrUnsupported: a format is newer than this program.
	ErrUnsupported = sentinel.Unsupported
	// ErrClosed: the task or repository was closed.
	ErrClosed = sentinel.Closed
	// ErrBaseGone: content that the attempt reuses was pruned meanwhile.
	ErrBaseGone = head.ErrBaseGone
	// ErrChanged: a file changed while it was frozen or read.
	ErrChanged = source.ErrChanged
	// ErrRunning: IfRunning is Fail and another owner wrote a short while ago.
	ErrRunning = fmt.Errorf("another owner is active: %w", ErrConflict)
	// ErrForeign: the task's log is kept in another checkpoint store.
	ErrForeign = fmt.Errorf("bound to another checkpoint store: %w", ErrConflict)
)

// Error says what was being done to what. Every error of this package is one.
type Error struct {
	Op      string // open, commit, restore, ...
	Subject string // task, checkpoint, store or path
	Err     error
}

// Error gives "op subject: cause".
func (e *Error) Error() string {
	if e.Subject == "" {
		return e.Op + ": " + e.Err.Error()
	}
	return e.Op + " " + e.Subject + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// wrap adds op and subject once, at the boundary of the package.
func wrap(op, subject string, err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) && e.Op == op {
		return err
	}
	return &Error{Op: op, Subject: subject, Err: err}
}

// notFound turns the absence of a file or blob into the absence of what it stands for.
func notFound(err error, format string, args ...any) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf(format+": %w", append(args, ErrNotFound)...)
	}
	return err
}
