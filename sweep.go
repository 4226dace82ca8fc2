package snapferry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/internal/head"
)

// Deleting follows P8 alone: a blob may go when the newest entry shows it dead, that
// is, nothing alive names it and its attempt can commit no more. Everything here
// first reads the head and then decides; age only says when it is tried.

// cleanUpQuietly runs steps of cleaning up after the point where what the caller asked
// for is done. Trouble is told and left to the next time.
func (t *Task) cleanUpQuietly(ctx context.Context, steps ...func(context.Context) error) (warnings []string) {
	for _, step := range steps {
		if err := step(ctx); err != nil {
			text := fmt.Sprintf("clean-up left for the next time: %v", err)
			warnings = append(warnings, text)
			emit(t.opts.Observer.Warned, Warned{Task: t.id, Text: text})
		}
	}
	return warnings
}

// sweepAttempts deletes what older owners' attempts left after the last committed one;
// our epoch is new, so none of them can commit. What a recorded progress names stays.
// The listing starts where the history ends, so its cost does not grow with it (P9).
func (t *Task) sweepAttempts(ctx context.Context) error {
	start := time.Now()
	s := t.state.State
	from := ""
	if s.LastDone != "" {
		from = blobPrefix(t.id) + s.LastDone + "0" // after everything of that attempt
	}
	var dead []string
	ev := CleanedUp{Task: t.id}
	var named map[string]bool
	for info, err := range t.blobs.List(ctx, blobPrefix(t.id), from) {
		if err != nil {
			return err
		}
		if named == nil {
			if named, err = t.namedByHead(ctx, t.state); err != nil {
				return err
			}
		}
		if !named[info.Key] && t.deadAttempt(s, info.Key) {
			dead = append(dead, info.Key)
			ev.Blobs++
			ev.Bytes += info.Size
		}
	}
	slices.Reverse(dead) // within an attempt the index comes after its chunks
	if err := t.blobs.Delete(ctx, dead); err != nil {
		return err
	}
	ev.Duration = time.Since(start)
	emit(t.opts.Observer.CleanedUp, ev)
	return nil
}

// deadAttempt tells whether a blob's attempt can commit no more. What is not named
// like a blob of an attempt is not ours to delete.
func (v *view) deadAttempt(s *head.State, key string) bool {
	dir, ok := attemptOf(v.id, key)
	if !ok {
		return false
	}
	a, err := head.ParseAttempt(dir)
	return err == nil && !s.CanCommit(a)
}

// namedByHead returns the keys that the newest entry names without an index between:
// segments of the head, checkpoint blobs, and the recorded progress of an upload with
// everything in it.
func (v *view) namedByHead(ctx context.Context, l *head.Loaded) (map[string]bool, error) {
	named := map[string]bool{}
	for _, r := range l.Segments() {
		named[blobPrefix(v.id)+r.Key] = true
	}
	for _, c := range l.State.Live() {
		named[blobPrefix(v.id)+c.Blob.Key] = true
	}
	p := l.State.Partial
	if p == nil {
		return named, nil
	}
	list, err := v.partial(ctx, p)
	if err != nil {
		return nil, err
	}
	named[blobPrefix(v.id)+p.Chunks.Key] = true
	for _, b := range list.Blobs {
		named[b.Key] = true
	}
	return named, nil
}

// named returns the keys of everything alive: what namedByHead gives, and every index
// of a live checkpoint with the blobs in its table.
func (v *view) named(ctx context.Context, l *head.Loaded, tables map[string][]string) (map[string]bool, error) {
	named, err := v.namedByHead(ctx, l)
	if err != nil {
		return nil, err
	}
	lists, err := v.tablesOf(ctx, l.State.Live(), tables)
	if err != nil {
		return nil, err
	}
	for _, keys := range lists {
		for _, k := range keys {
			named[k] = true
		}
	}
	return named, nil
}

// tablesOf returns, for each checkpoint, its indexes and the blobs they name: the
// indexes first. known holds what was read before, by checkpoint.
func (v *view) tablesOf(ctx context.Context, list []head.Checkpoint, known map[string][]string) ([][]string, error) {
	out := make([][]string, len(list))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	for i, c := range list {
		if keys, ok := known[c.ID]; ok {
			out[i] = keys
			continue
		}
		g.Go(func() error {
			keys, err := v.tableOf(gctx, &c)
			if err != nil {
				return fmt.Errorf("checkpoint %s: %w", c.ID, err)
			}
			out[i] = keys
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for i, c := range list {
		if known != nil {
			known[c.ID] = out[i]
		}
	}
	return out, nil
}

func (v *view) tableOf(ctx context.Context, c *head.Checkpoint) ([]string, error) {
	b, err := v.checkpointBlob(ctx, c)
	if err != nil {
		return nil, err
	}
	var indexes, blobs []string
	for _, s := range b.Stores {
		r, err := v.root(ctx, s.Index)
		if err != nil {
			return nil, err
		}
		indexes = append(indexes, s.Index.Key)
		for _, use := range r.Blobs {
			blobs = append(blobs, use.Key)
		}
	}
	slices.Sort(indexes)
	slices.Sort(blobs)
	return append(indexes, slices.Compact(blobs)...), nil
}

// sweepDropped deletes the blobs of dropped checkpoints whose grace is over.
func (t *Task) sweepDropped(ctx context.Context) error {
	if len(t.state.State.Dropped) == 0 {
		return nil
	}
	start := time.Now()
	due, err := t.graceOver(ctx, t.state.State.Dropped, t.opts.Grace)
	if err != nil {
		return err
	}
	live := t.state.State.Live()
	due = slices.DeleteFunc(slices.Clone(due), func(d head.Dropped) bool { // dropped, and still held
		return slices.ContainsFunc(live, func(c head.Checkpoint) bool { return c.ID == d.ID })
	})
	if len(due) == 0 {
		return nil
	}
	named, err := t.named(ctx, t.state, t.tables)
	if err != nil {
		return err
	}
	if err := t.nameWaiting(ctx, t.state, due, named, t.tables); err != nil {
		return err
	}
	ev := CleanedUp{Task: t.id}
	if err := t.deleteDropped(ctx, due, named, &ev); err != nil {
		return err
	}
	for _, d := range due {
		t.cleaned = append(t.cleaned, d.ID)
		delete(t.tables, d.ID)
	}
	ev.Duration = time.Since(start)
	emit(t.opts.Observer.CleanedUp, ev)
	return nil
}

// graceOver returns the items that were dropped at least grace ago by the store's
// clock: the time when it got the entry that dropped them. Old entries are removed
// after a day; of their items the stamped time is the best there is.
func (v *view) graceOver(ctx context.Context, items []head.Dropped, grace time.Duration) ([]head.Dropped, error) {
	if len(items) == 0 || grace <= 0 {
		return items, nil
	}
	now, err := v.blobs.Now(ctx)
	if err != nil {
		return nil, err
	}
	var due []head.Dropped
	for _, d := range items {
		at, err := v.storedAt(ctx, d)
		if err != nil {
			return nil, err
		}
		if now.Sub(at) >= grace {
			due = append(due, d)
		}
	}
	return due, nil
}

// maxSlots bounds the times that are remembered.
const maxSlots = 4096

// storedAt returns when the store got the entry that dropped an item.
func (v *view) storedAt(ctx context.Context, d head.Dropped) (time.Time, error) {
	if at, ok := v.slots[d.Slot]; ok {
		return at, nil
	}
	at := d.At
	e, err := v.log.Get(ctx, d.Slot)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return at, err
	case !e.Stored.IsZero():
		at = e.Stored
	}
	if v.slots == nil {
		v.slots = map[uint64]time.Time{}
	}
	if len(v.slots) > maxSlots {
		clear(v.slots)
	}
	v.slots[d.Slot] = at
	return at, nil
}

// nameWaiting adds to named the blobs of dropped checkpoints whose grace is not over:
// they share blobs with those that are due.
func (v *view) nameWaiting(ctx context.Context, l *head.Loaded, due []head.Dropped, named map[string]bool, tables map[string][]string) error {
	for i := range l.State.Dropped {
		d := &l.State.Dropped[i]
		if slices.ContainsFunc(due, func(x head.Dropped) bool { return x.ID == d.ID && x.Slot == d.Slot }) {
			continue
		}
		lists, err := v.tablesOf(ctx, []head.Checkpoint{d.Checkpoint}, tables)
		if errors.Is(err, fs.ErrNotExist) {
			continue // cleaned up already
		}
		if err != nil {
			return err
		}
		named[blobPrefix(v.id)+d.Blob.Key] = true
		for _, k := range lists[0] {
			named[k] = true
		}
	}
	return nil
}

// deleteDropped deletes what only dropped checkpoints name: all that names other blobs
// before what it names (I3), so later checkpoints, which build on older ones, first. One
// whose checkpoint blob is gone was cleaned up before. The rest of that, and of one that
// is damaged, is found by gc.
func (t *Task) deleteDropped(ctx context.Context, due []head.Dropped, named map[string]bool, ev *CleanedUp) error {
	var indexes, packs []string
	for _, d := range slices.Backward(due) {
		lists, err := t.tablesOf(ctx, []head.Checkpoint{d.Checkpoint}, t.tables)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrCorrupt) {
			continue
		}
		if err != nil {
			return fmt.Errorf("dropped checkpoint %s: %w", d.ID, err)
		}
		indexes = append(append(indexes, blobPrefix(t.id)+d.Blob.Key), lists[0][:len(d.Stores)]...)
		packs = append(packs, lists[0][len(d.Stores):]...)
	}
	seen := map[string]bool{}
	for _, keys := range [][]string{indexes, packs} {
		dead := slices.DeleteFunc(keys, func(k string) bool {
			keep := named[k] || seen[k] || !t.deadAttempt(t.state.State, k)
			seen[k] = true
			return keep
		})
		if err := t.blobs.Delete(ctx, dead); err != nil {
			return err
		}
		ev.Blobs += int64(len(dead))
	}
	return nil
}
