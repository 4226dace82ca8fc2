package blob

import (
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// The conditions on which callers branch. An absent object is fs.ErrNotExist, one that
// is there already fs.ErrExist, and a refusal by the store fs.ErrPermission.
var (
	// ErrCorrupt says that the store returned what was never written.
	ErrCorrupt = sentinel.Corrupt
	// ErrUnsupported says that the store lacks an optional ability.
	ErrUnsupported = sentinel.Unsupported
	// ErrUnfenced says that create-if-absent keeps nobody out, so that two writers can
	// overwrite each other. It is ErrUnsupported too.
	ErrUnfenced = fmt.Errorf("%w: the store does not keep writers apart", sentinel.Unsupported)
	// ErrClosed says that the Store was closed.
	ErrClosed = sentinel.Closed
	// ErrNoEffect says that a failed Put has certainly stored nothing: the disk was full,
	// say. Without it an object may be there after an error.
	ErrNoEffect = sentinel.NoEffect
)

// Driver is what an object store has to do for a Store. Callers hold a *Store; only
// the Store, decorators and the conformance suite call a Driver.
//
// All methods may be called concurrently, also by several processes on one store.
// Keys and options come validated (ValidKey). No key is a path prefix of another: with
// "a/b" present nobody writes "a" or "a/b/c", and a driver may refuse it.
//
// Drivers do not retry and do not wrap: they return raw errors that answer errors.Is
// for fs.ErrNotExist, fs.ErrExist, fs.ErrPermission, ErrCorrupt, and mark with
// Retriable what may succeed when tried again. All else is permanent.
type Driver interface {
	// Put stores an object whole: no reader meets a part of it, also after a crash or
	// a cancelled context, and when Put returns nil the object is durable. The body is
	// read to its end exactly once per Open; an error from it, or a length other than
	// Size, fails the Put and leaves nothing visible. With IfAbsent exactly one of any
	// number of racing writers succeeds and the others get fs.ErrExist, and an object
	// that was reported as existing is durable. Without it an existing object is
	// replaced atomically. After any other error the object may be there or not, but
	// never in part; with ErrNoEffect it is not.
	Put(ctx context.Context, key string, body Body, opts PutOptions) error
	// Get opens length bytes from offset on; length < 0 means to the end. A range that
	// reaches past the end gives the bytes that there are, one that starts there gives
	// none; neither is an error. An absent object is fs.ErrNotExist from Get itself,
	// for any range. A stream that breaks must end with an error and never with io.EOF.
	// Cancelling ctx may break the stream. The caller closes it.
	Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)
	// Stat describes an object, or returns fs.ErrNotExist.
	Stat(ctx context.Context, key string) (Info, error)
	// List yields all objects whose key starts with prefix (any bytes, not only whole
	// components) and is greater than startAfter, in byte order of the whole key, so
	// that "a-b" comes before "a/b". Every object whose Put returned before List was
	// called and that nobody deletes is listed; what changes during the listing may or
	// may not be. An error is yielded last. No match is not an error.
	List(ctx context.Context, prefix, startAfter string) iter.Seq2[Info, error]
	// Delete removes objects; absent ones are success. When single keys fail the
	// others are still removed and the error is a *DeleteError.
	Delete(ctx context.Context, keys []string) error
	// RemoveTTL makes objects that were put with a TTL permanent; on permanent ones it
	// does nothing. Absent keys fail with fs.ErrNotExist in a *DeleteError.
	RemoveTTL(ctx context.Context, keys []string) error
	// Close frees what the driver holds. No call is in progress and none follows.
	Close() error
}

// Clock is implemented by drivers that can tell the store's own time cheaply. Without
// it, or when it answers ErrUnsupported, a Store writes a probe object and looks at
// its time.
type Clock interface {
	// Now is the store's present time, by the clock that stamps Info.Modified.
	Now(ctx context.Context) (time.Time, error)
}

// DeletedReader is implemented by drivers of stores that keep deleted objects for a
// while (versioned bucket, trash folder).
type DeletedReader interface {
	// GetDeleted is Get for the newest deleted version of an object. It returns
	// fs.ErrNotExist when there is none (any more) and ErrUnsupported when the store
	// keeps none.
	GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)
}

// TimeLister is implemented by drivers of stores that keep older versions of objects
// (versioned bucket).
type TimeLister interface {
	// ListAt is List of the objects that were there at a time, as exactly as the store
	// keeps times. With S3 these are whole seconds, an object put in parts has the time
	// when that began, and one that was put and removed within a second, and put again
	// later, counts as there in between. Versions that are gone since are missing. The
	// error is ErrUnsupported when the store keeps none.
	ListAt(ctx context.Context, prefix, startAfter string, at time.Time) iter.Seq2[Info, error]
}

// TempSweeper is implemented by drivers whose killed writers can leave temporary files.
type TempSweeper interface {
	// SweepTemp removes temporary files that no living writer owns and tells how many.
	SweepTemp(ctx context.Context) (int, error)
}

// Expirer is implemented by drivers of stores that can remove by themselves what was put
// with a TTL and not made permanent in time. Without it a TTL has no effect.
type Expirer interface {
	// InstallExpiry makes the store do so with objects that are put with ttl, and leaves
	// alone whatever else it is told to do. It fails with ErrUnsupported when the store
	// cannot, and with fs.ErrPermission when the caller may not have it so.
	InstallExpiry(ctx context.Context, ttl time.Duration) error
}

// PutOptions are the conditions of a Put; the zero value replaces and never expires.
type PutOptions struct {
	// IfAbsent creates only: an existing object gives fs.ErrExist.
	IfAbsent bool
	// TTL is how long the store keeps the object unless RemoveTTL is called; zero means
	// for ever. Stores that cannot expire objects ignore it.
	TTL time.Duration
}

// Info describes a stored object.
type Info struct {
	Key  string
	Size int64
	// Modified is when the object was put, by the store's clock.
	Modified time.Time
}

// DeleteError tells which keys of a Delete or RemoveTTL failed; the others succeeded.
// It unwraps to the single errors, so errors.Is finds their causes.
type DeleteError struct {
	// Errors holds an error per failed key, never empty.
	Errors map[string]error
}

// Error names the first failed key, its cause, and how many more there are.
func (e *DeleteError) Error() string {
	keys := slices.Sorted(maps.Keys(e.Errors))
	if len(keys) == 0 {
		return "no key failed"
	}
	if len(keys) == 1 {
		return fmt.Sprintf("%s: %v", keys[0], e.Errors[keys[0]])
	}
	return fmt.Sprintf("%s: %v (and %d more keys failed)", keys[0], e.Errors[keys[0]], len(keys)-1)
}

// Unwrap returns the errors in order of their keys.
func (e *DeleteError) Unwrap() []error {
	errs := make([]error, 0, len(e.Errors))
	for _, k := range slices.Sorted(maps.Keys(e.Errors)) {
		errs = append(errs, e.Errors[k])
	}
	return errs
}

// JoinKeys is for drivers that work key by key: it returns a *DeleteError of the
// failed keys, or nil when there are none.
func JoinKeys(failed map[string]error) error {
	if len(failed) == 0 {
		return nil
	}
	return &DeleteError{Errors: failed}
}

// CheckPresent is RemoveTTL for drivers of stores that expire nothing: every key must
// exist, and nothing is changed.
func CheckPresent(ctx context.Context, d Driver, keys []string) error {
	failed := map[string]error{}
	for _, k := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := d.Stat(ctx, k); err != nil {
			failed[k] = err
		}
	}
	return JoinKeys(failed)
}
