package blob

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// batchSize is the number of keys of one Delete or RemoveTTL call of a driver.
const batchSize = 1000

// Store is what callers hold: a Driver behind validation, retries and limits.
type Store struct {
	driver Driver
	opts   Options
	limits *limits
	closed atomic.Bool
}

// New makes a Store over a driver, which it owns from then on.
func New(d Driver, opts *Options) *Store {
	o := opts.withDefaults()
	return &Store{driver: d, opts: o, limits: newLimits(o)}
}

// String names the store for messages.
func (s *Store) String() string {
	if s.opts.Name != "" {
		return s.opts.Name
	}
	if n, ok := s.driver.(fmt.Stringer); ok {
		return n.String()
	}
	return fmt.Sprintf("%T", s.driver)
}

// Close closes the driver. The caller has ended all other calls and closed all readers;
// later calls get ErrClosed. Closing twice does nothing.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	return wrap("close", "", s.driver.Close())
}

// Put stores an object; see Driver.Put for what it promises. A try whose answer was lost
// is repeated, so with IfAbsent fs.ErrExist can mean this very Put: who needs to know
// puts something unique into the object and reads it. The body may read from this
// Store only if it opens that reader in Body.Open.
func (s *Store) Put(ctx context.Context, key string, body Body, opts PutOptions) error {
	err := ValidKey(key)
	switch {
	case err != nil:
	case body.Size < 0 || body.Open == nil:
		err = errors.New("invalid body: negative size or no Open")
	case opts.TTL < 0:
		err = fmt.Errorf("invalid TTL %v", opts.TTL)
	default:
		err = s.retry(ctx, "put", key, func(ctx context.Context) error { return s.tryPut(ctx, key, body, opts) })
	}
	return wrap("put", key, err)
}

// tryPut opens the body before it takes part of any limit, as opening may use the Store.
func (s *Store) tryPut(ctx context.Context, key string, body Body, opts PutOptions) error {
	src, err := body.Open()
	if err != nil {
		return err
	}
	up := &upload{store: s, body: body, opened: src}
	defer up.discard()
	release, err := s.limits.reserve(ctx, body.Size)
	if err != nil {
		return err
	}
	defer release()
	return s.call(ctx, func(w *watch) error {
		up.watch = w
		return s.driver.Put(w.ctx, key, Body{Size: body.Size, Open: up.open, memory: body.memory}, opts)
	})
}

// Stat describes an object, or returns fs.ErrNotExist.
func (s *Store) Stat(ctx context.Context, key string) (Info, error) {
	var info Info
	err := ValidKey(key)
	if err == nil {
		err = s.retry(ctx, "stat", key, func(ctx context.Context) error {
			return s.call(ctx, func(w *watch) (err error) {
				info, err = s.driver.Stat(w.ctx, key)
				return err
			})
		})
	}
	return info, wrap("stat", key, err)
}

// List yields the objects whose key starts with prefix and is greater than startAfter, in
// byte order of the key. The body of the loop may use the Store. After an error, which
// comes last, the listing is incomplete.
func (s *Store) List(ctx context.Context, prefix, startAfter string) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		l := lister{store: s, list: s.driver.List, prefix: prefix, last: startAfter, yield: yield}
		l.run(ctx)
	}
}

// ListAt is List of what was there at a time; see TimeLister for how exact that is. The
// first error is ErrUnsupported when the store keeps no older versions.
func (s *Store) ListAt(ctx context.Context, prefix, startAfter string, at time.Time) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		d, ok := s.driver.(TimeLister)
		if !ok {
			yield(Info{}, wrap("list", prefix, fmt.Errorf("%w: %s keeps no older versions", ErrUnsupported, s)))
			return
		}
		list := func(ctx context.Context, prefix, startAfter string) iter.Seq2[Info, error] {
			return d.ListAt(ctx, prefix, startAfter, at)
		}
		l := lister{store: s, list: list, prefix: prefix, last: startAfter, yield: yield}
		l.run(ctx)
	}
}

// lister is one listing over any number of tries; each begins after the last key given.
type lister struct {
	store   *Store
	list    func(ctx context.Context, prefix, startAfter string) iter.Seq2[Info, error]
	prefix  string
	last    string
	yield   func(Info, error) bool
	stopped bool
}

func (l *lister) run(ctx context.Context) {
	if err := l.store.retry(ctx, "list", l.prefix, l.try); err != nil && !l.stopped {
		l.yield(Info{}, wrap("list", l.prefix, err))
	}
}

// try lists on from the last key.
func (l *lister) try(ctx context.Context) error {
	sl := slot{limits: l.store.limits}
	if err := sl.take(ctx); err != nil {
		return err
	}
	defer sl.free()
	w := l.store.watch(ctx)
	defer w.end()

	for info, err := range l.list(w.ctx, l.prefix, l.last) {
		if err != nil {
			sl.answered(err)
			return w.result(err)
		}
		if info.Key <= l.last || !strings.HasPrefix(info.Key, l.prefix) {
			return fmt.Errorf("%w: the store listed %q after %q", ErrCorrupt, info.Key, l.last)
		}
		l.last = info.Key
		if err := l.give(ctx, info, &sl, w); err != nil || l.stopped {
			return err
		}
	}
	sl.answered(nil)
	return nil
}

// give hands one object to the caller, who holds neither slot nor watch meanwhile.
func (l *lister) give(ctx context.Context, info Info, sl *slot, w *watch) error {
	w.stand()
	sl.free()
	if l.stopped = !l.yield(info, nil); l.stopped {
		return nil
	}
	w.progress()
	return sl.take(ctx)
}

// Delete removes objects in batches; absent ones are success. When single keys fail the
// others are still removed and the error holds a *DeleteError.
func (s *Store) Delete(ctx context.Context, keys []string) error {
	return s.eachBatch(ctx, "delete", keys, s.driver.Delete)
}

// RemoveTTL makes objects that were put with a TTL permanent. An absent key is an error
// that is fs.ErrNotExist and holds a *DeleteError; the others are still made permanent.
func (s *Store) RemoveTTL(ctx context.Context, keys []string) error {
	return s.eachBatch(ctx, "seal", keys, s.driver.RemoveTTL)
}

func (s *Store) eachBatch(ctx context.Context, op string, keys []string, do func(context.Context, []string) error) error {
	for _, k := range keys {
		if err := ValidKey(k); err != nil {
			return wrap(op, k, err)
		}
	}
	failed := map[string]error{}
	for batch := range slices.Chunk(keys, batchSize) {
		if err := s.batch(ctx, op, batch, do, failed); err != nil {
			return wrap(op, oneKey(batch), err)
		}
	}
	return wrap(op, "", JoinKeys(failed))
}

// batch tries again only those keys whose error is worth it. Keys that failed for good go
// into failed; the error is of what concerns the whole batch.
func (s *Store) batch(ctx context.Context, op string, keys []string, do func(context.Context, []string) error, failed map[string]error) error {
	return s.retry(ctx, op, oneKey(keys), func(ctx context.Context) error {
		err := s.call(ctx, func(w *watch) error { return do(w.ctx, keys) })
		d, ok := errors.AsType[*DeleteError](err)
		if !ok {
			return err
		}
		var again []string
		for _, k := range keys {
			switch kerr := d.Errors[k]; {
			case kerr == nil:
			case IsRetriable(kerr):
				again = append(again, k)
			default:
				failed[k] = kerr
			}
		}
		if keys = again; len(keys) == 0 {
			return nil
		}
		return Retriable(d)
	})
}

func oneKey(keys []string) string {
	if len(keys) == 1 {
		return keys[0]
	}
	return ""
}
