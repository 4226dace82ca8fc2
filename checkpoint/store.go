package checkpoint

import (
	"context"
	"iter"
	"time"
)

// Options tunes a Store. The zero value and nil are valid.
type Options struct {
	// FirstDelay and MaxDelay bound the jittered delay between two tries of an append
	// whose outcome is unknown or that lost a race. Defaults: 20 ms and 2 s.
	FirstDelay, MaxDelay time.Duration
}

func (o *Options) withDefaults() Options {
	var out Options
	if o != nil {
		out = *o
	}
	if out.FirstDelay <= 0 {
		out.FirstDelay = 20 * time.Millisecond
	}
	if out.MaxDelay <= 0 {
		out.MaxDelay = 2 * time.Second
	}
	out.MaxDelay = max(out.MaxDelay, out.FirstDelay)
	return out
}

// Store gives access to the logs that a driver keeps. It is safe for concurrent use.
type Store struct {
	driver Driver
	opts   Options
}

// New returns a Store over d. Close closes d.
func New(d Driver, opts *Options) *Store {
	return &Store{driver: d, opts: opts.withDefaults()}
}

// Info returns the identity of the store and its clock.
func (s *Store) Info(ctx context.Context) (Info, error) {
	info, err := s.driver.Info(ctx)
	return info, wrap("read checkpoint store", TaskID{}, err)
}

// Tasks yields every task that has a log, in no particular order. After an error it ends.
func (s *Store) Tasks(ctx context.Context) iter.Seq2[TaskID, error] {
	return func(yield func(TaskID, error) bool) {
		for t, err := range s.driver.Tasks(ctx) {
			if err != nil {
				yield(TaskID{}, wrap("list tasks", TaskID{}, err))
				return
			}
			if !yield(t, nil) {
				return
			}
		}
	}
}

// Log returns the log of a task, which need not exist yet. Each writer takes its own
// Log and keeps it: it remembers the head and an append whose outcome is unknown.
func (s *Store) Log(task TaskID) *Log {
	return &Log{driver: s.driver, opts: s.opts, task: task, turn: make(chan struct{}, 1)}
}

// Close closes the driver.
func (s *Store) Close() error { return wrap("close checkpoint store", TaskID{}, s.driver.Close()) }
