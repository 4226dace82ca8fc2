package blobcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync/atomic"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/sentinel"
)

// Append implements checkpoint.Driver by steps 2 to 4 of P3; the caller repeats it
// while the outcome is unknown, which is step 5.
func (d *Driver) Append(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	if err := task.Validate(); err != nil {
		return sentinel.Harmless(err)
	}
	data, err := checkpoint.Encode(e)
	if err != nil {
		return sentinel.Harmless(err)
	}

	err = d.create(ctx, key(task, e.Slot), data)
	if errors.Is(err, fs.ErrExist) {
		err = unsettled(d.mine(ctx, task, e))
	}
	if err != nil {
		return err
	}
	return unsettled(d.checkName(ctx, task, e))
}

// create puts the entry if its name is free. The blob store may try more than once, and
// opens the body for each try: that the last one had no effect says nothing about the
// first. A put that was never tried has had none.
func (d *Driver) create(ctx context.Context, k string, data []byte) error {
	var tries atomic.Int32
	body := blob.Bytes(data)
	counted := blob.Body{Size: body.Size, Open: func() (io.ReadCloser, error) {
		tries.Add(1)
		return body.Open()
	}}

	err := d.blobs.Put(ctx, k, counted, blob.PutOptions{IfAbsent: true})
	switch n := tries.Load(); {
	case err == nil || errors.Is(err, fs.ErrExist):
		return err
	case n == 0:
		return sentinel.Harmless(err)
	case n > 1:
		return unsettled(err)
	}
	return err
}

// unsettled hides from err what would make it look like "this call changed nothing":
// a LIST that failed without effect, for one, says nothing about the PUT before it.
func unsettled(err error) error {
	if errors.Is(err, checkpoint.ErrNoEffect) {
		return errors.New(err.Error())
	}
	return err
}

// mine reads the slot that was taken: nil if e lies there, put by an earlier try whose
// answer was lost, ErrConflict if it is another entry.
func (d *Driver) mine(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	there, err := d.read(ctx, task, e.Slot)
	switch {
	case errors.Is(err, checkpoint.ErrUnsupported):
		return fmt.Errorf("%w: %w", checkpoint.ErrConflict, err) // a newer program's, so not mine
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("slot %d was there and is not any more", e.Slot) // unknown: the next try tells
	case err != nil:
		return err
	case there.Nonce != e.Nonce:
		return fmt.Errorf("%w: slot %d is taken by a %s of epoch %d", checkpoint.ErrConflict, e.Slot, there.Kind, there.Epoch)
	case there.Digest != e.Digest:
		return fmt.Errorf("%w: slot %d has this nonce and another content", checkpoint.ErrCorrupt, e.Slot)
	}
	return nil
}

// checkName is P3.4: with e in its slot, was the name fresh? It was if nothing lies
// after it, or if what follows names e as its predecessor. Otherwise the slot had
// been taken, superseded and removed before e came, and nobody will ever read e as state.
func (d *Driver) checkName(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	later, err := d.list(ctx, task, key(task, e.Slot))
	if err != nil || len(later) == 0 {
		return err
	}
	next, err := d.read(ctx, task, e.Slot+1)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil && next.Prev == e.Digest:
		return nil
	}
	return fmt.Errorf("%w: slot %d had been used and removed, the log has gone on to slot %d",
		checkpoint.ErrFenced, e.Slot, later[len(later)-1].slot)
}
