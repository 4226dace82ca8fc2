package snapferry

import (
	"context"
	"errors"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
)

// history finds content in older retained checkpoints: what comes back, as after a
// roll back, is not sent again. It is asked only once something seems to be new, and
// reads only the segments of older indexes that newer ones do not share.
type history struct {
	view    *view
	list    []head.Checkpoint // newest first, without those that the bases are all of
	skip    map[snapshot.Digest]bool
	found   map[snapshot.Digest]oldChunk
	borrows map[string]bool
}

type oldChunk struct {
	snapshot.Location
	checkpoint string
}

// historyDepth bounds how many older checkpoints are asked.
const historyDepth = 16

// newHistory has what the bases of the stores at hand have not.
func newHistory(v *view, s *head.State, bases map[string]*base) *history {
	h := &history{view: v, skip: map[snapshot.Digest]bool{}, borrows: map[string]bool{}}
	for _, b := range bases {
		for i := range b.root.Segments {
			h.skip[b.root.Segments[i].Content] = true
		}
	}
	for _, c := range slices.Backward(s.Retained) {
		known := !slices.ContainsFunc(c.Stores, func(name string) bool { return bases[name] == nil || bases[name].checkpoint != c.ID })
		if !known && len(h.list) < historyDepth {
			h.list = append(h.list, c)
		}
	}
	return h
}

// find returns where a chunk lies that the bases do not have; in one of the packs to avoid,
// it is not borrowed. It is called under the packer's lock, so one at a time.
func (h *history) find(ctx context.Context, d snapshot.Digest, avoid map[string]bool) (snapshot.Location, bool, error) {
	if h == nil {
		return snapshot.Location{}, false, nil
	}
	if h.found == nil {
		if err := h.load(ctx); err != nil {
			return snapshot.Location{}, false, err
		}
	}
	c, ok := h.found[d]
	if ok && !avoid[c.Blob] {
		h.borrows[c.checkpoint] = true
	}
	return c.Location, ok, nil
}

// borrowed returns the checkpoints whose content was found.
func (h *history) borrowed() []string {
	if h == nil {
		return nil
	}
	return slices.Collect(maps.Keys(h.borrows))
}

// load reads what the list has. A checkpoint that is damaged, or was pruned meanwhile, is
// no place to borrow from, and no reason not to back up.
func (h *history) load(ctx context.Context) error {
	h.found = map[snapshot.Digest]oldChunk{}
	roots := make([][]*snapshot.Root, len(h.list))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	for i := range h.list {
		g.Go(func() (err error) {
			roots[i], err = h.roots(gctx, &h.list[i])
			return unlessLost(err)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	var keys []string
	for _, r := range slices.Concat(roots...) {
		keys = append(keys, blobKeys(r.Blobs)...)
	}
	sizes, err := h.view.sizes(ctx, keys)
	if err != nil {
		return err
	}
	for i := range roots {
		for _, r := range roots[i] {
			if err := unlessLost(h.add(ctx, r, h.list[i].ID, sizes)); err != nil {
				return err
			}
		}
	}
	return nil
}

func unlessLost(err error) error {
	if errors.Is(err, ErrCorrupt) || blobGone(err) {
		return nil
	}
	return err
}

// roots reads the first part of the indexes of a checkpoint.
func (h *history) roots(ctx context.Context, c *head.Checkpoint) ([]*snapshot.Root, error) {
	b, err := h.view.checkpointBlob(ctx, c)
	if err != nil {
		return nil, err
	}
	var roots []*snapshot.Root
	for _, s := range b.Stores {
		r, err := h.view.root(ctx, s.Index)
		if err != nil {
			return roots, err
		}
		roots = append(roots, r)
	}
	return roots, nil
}

// add takes up the chunks of the segments of one index that were not seen yet, as far as
// the blobs are there.
func (h *history) add(ctx context.Context, r *snapshot.Root, id string, sizes map[string]int64) error {
	return h.unseen(ctx, r, func(c snapshot.StoredChunk) {
		if _, ok := h.found[c.Digest]; !ok && holds(sizes[c.Blob], c.Location) {
			h.found[c.Digest] = oldChunk{c.Location, id}
		}
	})
}

// each calls f with the chunks of a checkpoint that lie in segments not seen yet.
func (h *history) each(ctx context.Context, c *head.Checkpoint, f func(snapshot.StoredChunk)) error {
	roots, err := h.roots(ctx, c)
	for _, r := range roots {
		if err == nil {
			err = h.unseen(ctx, r, f)
		}
	}
	return err
}

// unseen calls f with the chunks of the segments of one index that were not seen yet.
func (h *history) unseen(ctx context.Context, r *snapshot.Root, f func(snapshot.StoredChunk)) error {
	for i := range r.Segments {
		ref := &r.Segments[i]
		if h.skip[ref.Content] {
			continue
		}
		h.skip[ref.Content] = true
		segment := make([][]byte, 1)
		if err := h.view.readSegments(ctx, r.Segments[i:i+1], segment); err != nil {
			return err
		}
		chunks, err := r.Chunks(i, segment[0])
		if err != nil {
			return err
		}
		for _, c := range chunks {
			f(c)
		}
	}
	return nil
}
