package checkpoint

import "github.com/snapferry/snapferry/internal/sentinel"

// Conditions a caller or a driver branches on. A log that does not exist is
// fs.ErrNotExist, an argument that can never work is fs.ErrInvalid, a refusal by the
// store is fs.ErrPermission.
var (
	// ErrCorrupt says that an entry read back is damaged.
	ErrCorrupt = sentinel.Corrupt
	// ErrUnsupported says that the log was written by a newer program.
	ErrUnsupported = sentinel.Unsupported
	// ErrFenced says that a newer owner has taken the task over.
	ErrFenced = sentinel.Fenced
	// ErrConflict says that another writer's entry took the slot first.
	ErrConflict = sentinel.Conflict
	// ErrUnknown says that an entry may or may not have been committed.
	ErrUnknown = sentinel.Unknown
	// ErrNoEffect says that an append that failed has certainly changed nothing.
	ErrNoEffect = sentinel.NoEffect
	// ErrClosed says that the store was closed.
	ErrClosed = sentinel.Closed
)

// Error is the error of every method of Store and Log: what was tried, on which task,
// and why it did not work.
type Error struct {
	Op   string // "append", "read head", ...
	Task TaskID // zero when the operation is not about one task
	Err  error
}

// Error returns "op task: cause".
func (e *Error) Error() string {
	if e.Task == (TaskID{}) {
		return e.Op + ": " + e.Err.Error()
	}
	return e.Op + " " + e.Task.String() + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

func wrap(op string, task TaskID, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Op: op, Task: task, Err: err}
}
