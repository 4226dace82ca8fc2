// Package raftcp keeps the logs of tasks in a group of checkpoint servers (see snapferry
// server), which agree on every entry before it counts.
//
// It hides which server leads the group: an append goes on over dead servers and
// elections, and is in the log once however often it had to be sent (P13). The group
// compares the head and adds the entry in one step, so a name that was used and removed
// (P3.4) does not exist here. Reads go through the leader and are never stale.
//
// # Limits
//
// A group keeps the newest 64 entries of a task, and of those before, up to the newest
// 1,024, what is needed to know a repeated append. One that comes back later than that is
// ErrFenced: nobody can say what became of it. Job names must not collide between
// repositories that share a group.
package raftcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/internal/sentinel"
)

// Options tunes a Driver. The zero value and nil are valid.
type Options struct {
	// TLS is used for https addresses; nil means the system's roots.
	TLS *tls.Config
	// Patience is how long one call goes on while no server gives an answer. Default 30 s.
	Patience time.Duration
}

// Driver keeps logs in a group of servers. Its methods may be called concurrently.
type Driver struct {
	client *cpwire.Client
}

var _ checkpoint.Driver = (*Driver)(nil)

// Open returns a driver for the group that has servers at these addresses, each
// http://HOST:PORT, https://HOST:PORT, or HOST:PORT for http. It connects to none of them
// yet. Not all servers of the group need be named.
func Open(urls []string, opts *Options) (*Driver, error) {
	if opts == nil {
		opts = &Options{}
	}
	c, err := cpwire.New(urls, &cpwire.Options{TLS: opts.TLS, Patience: opts.Patience})
	if err != nil {
		return nil, err
	}
	return &Driver{client: c}, nil
}

// Info implements checkpoint.Driver: the identity is the group's.
func (d *Driver) Info(ctx context.Context) (checkpoint.Info, error) {
	s, err := d.client.Status(ctx)
	return checkpoint.Info{ID: s.Group}, err
}

// Close implements checkpoint.Driver.
func (d *Driver) Close() error { return d.client.Close() }

// Head implements checkpoint.Driver.
func (d *Driver) Head(ctx context.Context, task checkpoint.TaskID) (*checkpoint.Entry, error) {
	if err := task.Validate(); err != nil {
		return nil, err
	}
	e, err := d.client.Head(ctx, name(task))
	if err != nil {
		return nil, err
	}
	return decode(e)
}

// Get implements checkpoint.Driver.
func (d *Driver) Get(ctx context.Context, task checkpoint.TaskID, slot uint64) (*checkpoint.Entry, error) {
	if err := task.Validate(); err != nil {
		return nil, err
	}
	e, err := d.client.Get(ctx, name(task), slot)
	if err != nil {
		return nil, err
	}
	return decode(e)
}

// Append implements checkpoint.Driver in the one step of P13.
func (d *Driver) Append(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	a, err := request(task, e)
	if err != nil {
		return sentinel.Harmless(err)
	}
	r, err := d.client.Append(ctx, a)
	if err != nil {
		return err
	}
	switch {
	case r.Status == cpwire.Forgotten:
		return fmt.Errorf("%w: slot %d is too far below slot %d to tell what became of it", checkpoint.ErrFenced, e.Slot, r.Slot)
	case !r.Status.InLog():
		return fmt.Errorf("%w: slot %d: %v, the head is at slot %d", checkpoint.ErrConflict, e.Slot, r.Status, r.Slot)
	case r.Slot != e.Slot || r.Digest.String() != e.Digest:
		return fmt.Errorf("%w: slot %d has this nonce and another content", checkpoint.ErrCorrupt, e.Slot)
	}
	e.Stored = r.Stored
	return nil
}

// request encodes an entry and sets its digest.
func request(task checkpoint.TaskID, e *checkpoint.Entry) (a cpwire.Append, err error) {
	if err := task.Validate(); err != nil {
		return a, err
	}
	data, err := checkpoint.Encode(e)
	if err != nil {
		return a, err
	}
	a = cpwire.Append{Task: name(task), Slot: e.Slot, Nonce: cpwire.Nonce(e.Nonce), Body: data}
	if e.Prev != "" {
		a.Prev, err = cpwire.ParseDigest(e.Prev)
	}
	return a, err
}

// Tasks implements checkpoint.Driver. Logs that are not of tasks, such as those of
// measurements, are left out.
func (d *Driver) Tasks(ctx context.Context) iter.Seq2[checkpoint.TaskID, error] {
	return func(yield func(checkpoint.TaskID, error) bool) {
		for t, err := range d.client.Tasks(ctx) {
			task := checkpoint.TaskID{Job: t.Job, Task: t.Name}
			if err == nil && task.Validate() != nil {
				continue
			}
			if !yield(task, err) || err != nil {
				return
			}
		}
	}
}

// Trim implements checkpoint.Driver.
func (d *Driver) Trim(ctx context.Context, task checkpoint.TaskID) error {
	if err := task.Validate(); err != nil {
		return err
	}
	return d.client.Trim(ctx, name(task))
}

func name(task checkpoint.TaskID) cpwire.Task { return cpwire.Task{Job: task.Job, Name: task.Task} }

// decode reads an entry and compares it with what the group says of it.
func decode(w cpwire.Entry) (*checkpoint.Entry, error) {
	e, err := checkpoint.Decode(w.Body)
	if err == nil && (e.Slot != w.Slot || e.Digest != w.Digest.String()) {
		err = errors.New("it is another entry")
	}
	switch {
	case errors.Is(err, checkpoint.ErrUnsupported):
		return nil, fmt.Errorf("slot %d: %w", w.Slot, err)
	case err != nil:
		return nil, fmt.Errorf("slot %d: %w: %v", w.Slot, checkpoint.ErrCorrupt, err)
	}
	e.Stored = w.Stored
	return e, nil
}
