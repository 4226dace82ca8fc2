package snapferry

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/snapshot"
)

// Content is reused on the word of an index. Before that, what the store lists is held
// against it: a blob that was lost or cut short would otherwise be named by every later
// checkpoint, and none of them could be restored. Damaged bytes are for Verify to find,
// and for Options.Full to replace.

// sizes returns the sizes of those blobs that are there. It lists the attempts they lie
// in, so it costs a request for each of them.
func (v *view) sizes(ctx context.Context, keys []string) (map[string]int64, error) {
	dirs := map[string]bool{}
	for _, k := range keys {
		dirs[path.Dir(k)+"/"] = true
	}
	out := make(map[string]int64, len(keys))
	var mu sync.Mutex
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	for dir := range dirs {
		g.Go(func() error {
			for info, err := range v.blobs.List(gctx, dir, "") {
				if err != nil {
					return err
				}
				mu.Lock()
				out[info.Key] = info.Size
				mu.Unlock()
			}
			return nil
		})
	}
	return out, g.Wait()
}

func blobKeys(uses []snapshot.BlobUse) []string {
	out := make([]string, len(uses))
	for i, u := range uses {
		out[i] = u.Key
	}
	return out
}

// holds tells whether a blob of this size, 0 if it is absent, has the bytes.
func holds(size int64, l snapshot.Location) bool { return int64(l.Offset)+int64(l.Stored) <= size }

// findLost notes which blobs the base names that do not hold what it says, and tells.
func (t *Task) findLost(ctx context.Context, store string, b *base) error {
	sizes, err := t.sizes(ctx, blobKeys(b.root.Blobs))
	if err != nil {
		return err
	}
	t.upkeep.learn(b.root, sizes)
	b.lost = map[string]bool{}
	for i := range b.index.Entries {
		for _, c := range b.index.Entries[i].Chunks {
			if !holds(sizes[c.Blob], c.Location) {
				b.lost[c.Blob] = true
			}
		}
	}
	if len(b.lost) == 0 {
		return nil
	}
	first := slices.Min(slices.Collect(maps.Keys(b.lost)))
	text := fmt.Sprintf("checkpoint %s cannot be restored: %d of its blobs are absent or cut short, %s for one; what they held is sent again", b.checkpoint, len(b.lost), first)
	emit(t.opts.Observer.Warned, Warned{t.id, store, text})
	return nil
}

// reusable tells whether everything of an entry is where the base says.
func (b *base) reusable(e *snapshot.Entry) bool {
	return len(b.lost) == 0 || !slices.ContainsFunc(e.Chunks, func(c snapshot.Chunk) bool { return b.lost[c.Blob] })
}
