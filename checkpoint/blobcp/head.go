package blobcp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
)

// maxRelist bounds how often Head lists again because the greatest entry of a listing
// was gone when it was read. That is rare: it was superseded, a day old, and trimmed in
// between. If it goes on, listings are staler than the bound.
const maxRelist = 5

// Head implements checkpoint.Driver by P2.
func (d *Driver) Head(ctx context.Context, task checkpoint.TaskID) (*checkpoint.Entry, error) {
	if err := task.Validate(); err != nil {
		return nil, err
	}
	for range maxRelist {
		newest, err := d.greatest(ctx, task)
		if err != nil {
			return nil, err
		}
		e, err := d.forward(ctx, task, newest)
		if err != nil || e != nil {
			return e, err
		}
	}
	return nil, fmt.Errorf("%s: the store lists entries that are long gone: %w", logPrefix(task), checkpoint.ErrUnsupported)
}

// slotInfo is a slot as a listing shows it.
type slotInfo struct {
	slot uint64
	blob.Info
}

// list returns the slots after a given one in ascending order.
func (d *Driver) list(ctx context.Context, task checkpoint.TaskID, after string) ([]slotInfo, error) {
	var out []slotInfo
	for info, err := range d.blobs.List(ctx, logPrefix(task), after) {
		if err != nil {
			return nil, err
		}
		if slot, ok := slotOf(task, info.Key); ok {
			out = append(out, slotInfo{slot, info})
		}
	}
	return out, nil
}

// greatest returns the last slot of a listing, slot 0 if it is empty: a listing may lag
// behind the first entry too.
func (d *Driver) greatest(ctx context.Context, task checkpoint.TaskID) (slotInfo, error) {
	slots, err := d.list(ctx, task, "")
	if err != nil || len(slots) == 0 {
		return slotInfo{}, err
	}
	return slots[len(slots)-1], nil
}

// forward reads the slot of a listing and those after it until one is absent, and
// returns the last that is there; damage counts only there. It returns nil when what was
// listed is gone, so that a new listing is needed.
func (d *Driver) forward(ctx context.Context, task checkpoint.TaskID, listed slotInfo) (*checkpoint.Entry, error) {
	var last *checkpoint.Entry
	var damage error
	for slot := max(listed.slot, 1); ; slot++ {
		e, err := d.read(ctx, task, slot)
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil && !isDamage(err) {
			return nil, err
		}
		last, damage = e, err
	}

	switch {
	case damage != nil:
		return nil, damage
	case last != nil:
		return last, d.stamp(ctx, task, listed, last)
	case listed.slot == 0:
		return nil, fmt.Errorf("%s: %w", logPrefix(task), fs.ErrNotExist)
	}
	return nil, nil
}

// isDamage tells errors about the bytes of an entry from those of reaching it.
func isDamage(err error) bool {
	return errors.Is(err, checkpoint.ErrCorrupt) || errors.Is(err, checkpoint.ErrUnsupported)
}

// stamp sets e.Stored, from the listing if it had the entry.
func (d *Driver) stamp(ctx context.Context, task checkpoint.TaskID, listed slotInfo, e *checkpoint.Entry) error {
	if e.Slot == listed.slot {
		e.Stored = listed.Modified
		return nil
	}
	info, err := d.blobs.Stat(ctx, key(task, e.Slot))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // superseded and trimmed meanwhile: its age is not known
	}
	e.Stored = info.Modified
	return err
}
