package snapferry

import (
	"context"
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
	list    []head.Checkpoint // newest first, the bases left out
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

func newHistory(v *view, s *head.State, bases map[string]*base) *history {
	h := &history{view: v, skip: map[snapshot.Digest]bool{}, borrows: map[string]bool{}}
	known := map[string]bool{}
	for _, b := range bases {
		known[b.checkpoint] = true
		for i := range b.root.Segments {
			h.skip[b.root.Segments[i].Content] = true
		}
	}
	for _, c := range slices.Backward(s.Retained) {
		if !known[c.ID] && len(h.list) < historyDepth {
			h.list = append(h.list, c)
		}
	}
	return h
}

// find returns where a chunk lies that the bases do not have. It is called under the
// packer's lock, so one at a time.
func (h *history) find(ctx context.Context, d snapshot.Digest) (snapshot.Location, bool, error) {
	if h == nil {
		return snapshot.Location{}, false, nil
	}
	if h.found == nil {
		// Pruned meanwhile: then it is no place to borrow from.
		if err := h.load(ctx); err != nil && !blobGone(err) {
			return snapshot.Location{}, false, err
		}
	}
	c, ok := h.found[d]
	if ok {
		h.borrows[c.checkpoint] = true
	}
	return c.Location, ok, nil
}

func (h *history) load(ctx context.Context) error {
	h.found = map[snapshot.Digest]oldChunk{}
	roots, ids, err := h.roots(ctx)
	if err != nil {
		return err
	}
	for i, r := range roots {
		if err := h.add(ctx, r, ids[i]); err != nil {
			return err
		}
	}
	return nil
}

// roots reads the first part of all indexes of the list.
func (h *history) roots(ctx context.Context) (roots []*snapshot.Root, ids []string, err error) {
	blobs, err := h.view.checkpointBlobs(ctx, h.list)
	if err != nil {
		return nil, nil, err
	}
	var markers []marker
	for _, b := range blobs {
		for _, s := range b.Stores {
			markers = append(markers, s.Index)
			ids = append(ids, b.Checkpoint)
		}
	}
	roots = make([]*snapshot.Root, len(markers))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	for i, m := range markers {
		g.Go(func() (err error) {
			roots[i], err = h.view.root(gctx, m)
			return err
		})
	}
	return roots, ids, g.Wait()
}

// add takes up the chunks of the segments of one index that were not seen yet.
func (h *history) add(ctx context.Context, r *snapshot.Root, id string) error {
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
			if _, ok := h.found[c.Digest]; !ok {
				h.found[c.Digest] = oldChunk{c.Location, id}
			}
		}
	}
	return nil
}
