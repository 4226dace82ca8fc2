package blob

import (
	"errors"
	"fmt"
)

// Error is what a Store returns: the operation, the key, and the cause, wrapped once.
type Error struct {
	// Op is the verb: put, get, stat, list, delete, seal, now, probe, sweep.
	Op string
	// Key is the object, or the prefix of a list; empty when several are concerned.
	Key string
	// Err is the driver's error.
	Err error
}

// Error reads "op key: cause".
func (e *Error) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("%s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("%s %s: %v", e.Op, e.Key, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// wrap adds op and key, once.
func wrap(op, key string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Op == op && e.Key == key {
		return err
	}
	return &Error{Op: op, Key: key, Err: err}
}

type retriable struct{ err error }

func (r *retriable) Error() string { return r.err.Error() }
func (r *retriable) Unwrap() error { return r.err }

// Retriable marks an error as one that may not come back when the operation is tried
// again: a lost connection, a busy server. Errors are permanent by default.
func Retriable(err error) error {
	if err == nil || IsRetriable(err) {
		return err
	}
	return &retriable{err}
}

// IsRetriable tells whether Retriable marked err or one that it wraps.
func IsRetriable(err error) bool {
	_, ok := errors.AsType[*retriable](err)
	return ok
}
