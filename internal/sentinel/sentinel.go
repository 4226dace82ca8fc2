// Package sentinel holds the identities of the conditions on which callers branch.
//
// The packages under the engine do not import each other, yet a caller asks one
// question ("is this damage?") whatever layer gives the answer. Each package
// re-exports the ones it can return, so users never import this one.
package sentinel

import "errors"

var (
	// Corrupt says that bytes read back are not the bytes written.
	Corrupt = errors.New("corrupt")
	// Unsupported says that a format is newer than this program, or a feature is absent.
	Unsupported = errors.New("unsupported")
	// Fenced says that a newer owner has taken the task over.
	Fenced = errors.New("fenced by a newer owner")
	// Conflict says that another writer changed what the action was based on.
	Conflict = errors.New("conflict")
	// Unknown says that an action may or may not have been committed.
	Unknown = errors.New("outcome unknown")
	// NoEffect says that a call that failed has changed nothing, whatever the reason.
	NoEffect = errors.New("nothing was changed")
	// Busy says that the same thing is already being done.
	Busy = errors.New("busy")
	// Closed says that the handle was closed.
	Closed = errors.New("closed")
)

// Harmless marks an error with NoEffect and leaves its text as it is.
func Harmless(err error) error { return &harmless{err} }

type harmless struct{ error }

func (e *harmless) Unwrap() []error { return []error{e.error, NoEffect} }
