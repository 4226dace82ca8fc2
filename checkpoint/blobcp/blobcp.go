// Package blobcp keeps the logs of tasks in a blob store: the default driver of package
// checkpoint.
//
// It hides how create-if-absent, read-after-write GET, LIST and DELETE make a log in
// which every slot is taken once. Entry s of a task is the object t/JOB/TASK/log/S,
// where S is s in 16 lower-case hex digits. Entries are created if absent, in one PUT,
// and never replaced. The newest is never removed; older ones are, KeepSuperseded after
// the next entry was stored.
//
// A listing may lag behind by less than KeepSuperseded: the head is found by a listing
// and then by reading forward slot by slot, and an append looks after its PUT whether
// the name had been used and removed before. A store whose single GETs are stale, or
// whose listings are stale by a day, cannot keep logs.
package blobcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strconv"
	"strings"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
)

// Driver keeps logs in a blob store. It holds no state, so any number of drivers, in
// any number of processes, may work on one store.
type Driver struct {
	blobs *blob.Store
	id    string
}

var _ checkpoint.Driver = (*Driver)(nil)

// New returns a driver over blobs, which the caller closes. id is the identity of the
// repository.
func New(blobs *blob.Store, id string) *Driver {
	return &Driver{blobs: blobs, id: id}
}

// Info implements checkpoint.Driver.
func (d *Driver) Info(context.Context) (checkpoint.Info, error) {
	return checkpoint.Info{ID: d.id}, nil
}

// Close implements checkpoint.Driver; it leaves the blob store open.
func (d *Driver) Close() error { return nil }

// Get implements checkpoint.Driver.
func (d *Driver) Get(ctx context.Context, task checkpoint.TaskID, slot uint64) (*checkpoint.Entry, error) {
	if err := task.Validate(); err != nil {
		return nil, err
	}
	e, err := d.read(ctx, task, slot)
	if err != nil {
		return nil, err
	}
	info, err := d.blobs.Stat(ctx, key(task, slot))
	if err != nil {
		return nil, err
	}
	e.Stored = info.Modified
	return e, nil
}

// read returns the entry that lies at a slot. Errors name its key.
func (d *Driver) read(ctx context.Context, task checkpoint.TaskID, slot uint64) (*checkpoint.Entry, error) {
	k := key(task, slot)
	body, err := d.blobs.Get(ctx, k, 0, checkpoint.MaxEntrySize+1)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(body)
	if err = errors.Join(err, body.Close()); err != nil {
		return nil, fmt.Errorf("get %s: %w", k, err)
	}

	e, err := checkpoint.Decode(data)
	if err == nil && e.Slot != slot {
		err = fmt.Errorf("%w: it says that it is slot %d", checkpoint.ErrCorrupt, e.Slot)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", k, err)
	}
	return e, nil
}

// Tasks implements checkpoint.Driver. It skips from task to task, so that it costs two
// short listings each and not a listing of all blobs.
func (d *Driver) Tasks(ctx context.Context) iter.Seq2[checkpoint.TaskID, error] {
	return func(yield func(checkpoint.TaskID, error) bool) {
		after := ""
		for {
			task, ok, err := d.nextTask(ctx, after)
			if err != nil {
				yield(checkpoint.TaskID{}, err)
				return
			}
			if !ok {
				return
			}
			after = beyond(task)

			has, err := d.hasLog(ctx, task)
			if err != nil {
				yield(checkpoint.TaskID{}, err)
				return
			}
			if has && !yield(task, nil) {
				return
			}
		}
	}
}

// nextTask returns the first task below t/ that has a key greater than after.
func (d *Driver) nextTask(ctx context.Context, after string) (checkpoint.TaskID, bool, error) {
	for info, err := range d.blobs.List(ctx, "t/", after) {
		if err != nil {
			return checkpoint.TaskID{}, false, err
		}
		parts := strings.SplitN(info.Key, "/", 4)
		if len(parts) < 4 {
			continue
		}
		if task := (checkpoint.TaskID{Job: parts[1], Task: parts[2]}); task.Validate() == nil {
			return task, true, nil
		}
	}
	return checkpoint.TaskID{}, false, nil
}

func (d *Driver) hasLog(ctx context.Context, task checkpoint.TaskID) (bool, error) {
	for info, err := range d.blobs.List(ctx, logPrefix(task), "") {
		if err != nil {
			return false, err
		}
		if _, ok := slotOf(task, info.Key); ok {
			return true, nil
		}
	}
	return false, nil
}

// beyond is greater than every key of the task and less than every later task's key:
// '0' follows '/' in byte order.
func beyond(task checkpoint.TaskID) string { return "t/" + task.Job + "/" + task.Task + "0" }

func logPrefix(task checkpoint.TaskID) string { return "t/" + task.Job + "/" + task.Task + "/log/" }

func key(task checkpoint.TaskID, slot uint64) string {
	return fmt.Sprintf("%s%016x", logPrefix(task), slot)
}

// slotOf reads the slot from a key. Objects with other names are not entries.
func slotOf(task checkpoint.TaskID, k string) (uint64, bool) {
	name, ok := strings.CutPrefix(k, logPrefix(task))
	if !ok {
		return 0, false
	}
	slot, err := strconv.ParseUint(name, 16, 64)
	return slot, err == nil && slot > 0 && k == key(task, slot)
}
