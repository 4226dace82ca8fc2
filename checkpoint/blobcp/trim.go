package blobcp

import (
	"context"

	"github.com/snapferry/snapferry/checkpoint"
)

// Trim implements checkpoint.Driver. An entry goes KeepSuperseded after the next one
// was stored, so a listing that is stale by less still shows an entry above it. The
// greatest listed never goes.
func (d *Driver) Trim(ctx context.Context, task checkpoint.TaskID) error {
	if err := task.Validate(); err != nil {
		return err
	}
	slots, err := d.list(ctx, task, "")
	if err != nil || len(slots) < 2 {
		return err
	}
	now, err := d.blobs.Now(ctx)
	if err != nil {
		return err
	}

	var old []string
	for i, next := range slots[1:] {
		if now.Sub(next.Modified) < checkpoint.KeepSuperseded {
			break // what follows is younger, or waits for a later trim
		}
		old = append(old, slots[i].Key)
	}
	if len(old) == 0 {
		return nil
	}
	return d.blobs.Delete(ctx, old)
}
