package snapferry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
)

// Pack upkeep (P12). A pack of which less than half is live, over everything that the head
// keeps, is given up: the next commit stores what the bases still need of it again, from
// the local files, and when no index names the pack any more it dies by P8. To give up a
// pack is never wrong, it costs the bytes that are sent; so everything here may be careless
// about what changes meanwhile, and nothing that was published is touched.

const (
	// maxSurvey bounds the checkpoints whose tables are read and remembered. Who keeps
	// more than that keeps old packs in use anyway.
	maxSurvey = 64
	// One commit rewrites at most this many bytes, or that part of what is live.
	minRewrite  = 64 << 20
	partRewrite = 10
)

// upkeep is what a task remembers between commits, so that in the usual case a commit
// needs no request to know that there is nothing to do.
type upkeep struct {
	packs  map[string]int64            // sizes of the blobs that the bases name
	tables map[string]map[string]int64 // by checkpoint: live bytes by blob, of the store that has most
	dense  map[string][]string         // packs that were looked at, and which checkpoints keep them so
}

// sparsePack is a pack of which the bases use less than half.
type sparsePack struct {
	key        string
	live, size int64
}

// learn notes the sizes of the blobs that a base names.
func (u *upkeep) learn(root *snapshot.Root, sizes map[string]int64) {
	if u.packs == nil {
		u.packs = map[string]int64{}
	}
	for _, use := range root.Blobs {
		if size, ok := sizes[use.Key]; ok {
			u.packs[use.Key] = size
		}
	}
}

// adopt notes what a commit wrote, and forgets packs that no base names any more and
// checkpoints that are gone.
func (u *upkeep) adopt(a *attempt, bases map[string]*base, live []head.Checkpoint) {
	table := map[string]int64{}
	for _, b := range a.indexes {
		u.learn(b.root, a.packer.sizes)
		most(table, b.root.Blobs)
	}
	u.keepTables(live)
	if len(live) <= maxSurvey {
		u.tables[a.id] = table
	}
	named := map[string]bool{}
	for _, b := range bases {
		for _, use := range b.root.Blobs {
			named[use.Key] = true
		}
	}
	maps.DeleteFunc(u.packs, func(key string, _ int64) bool { return !named[key] })
	maps.DeleteFunc(u.dense, func(key string, _ []string) bool { return !named[key] })
}

// keepTables forgets the tables of checkpoints that are gone.
func (u *upkeep) keepTables(live []head.Checkpoint) {
	kept := map[string]map[string]int64{}
	for _, c := range live {
		if table := u.tables[c.ID]; table != nil && len(live) <= maxSurvey {
			kept[c.ID] = table
		}
	}
	u.tables = kept
}

// most takes up the live bytes of blobs, of each the most that one table has.
func most(table map[string]int64, uses []snapshot.BlobUse) {
	for _, use := range uses {
		table[use.Key] = max(table[use.Key], use.Live)
	}
}

// chooseSparse returns the packs that this commit gives up.
func (a *attempt) chooseSparse(ctx context.Context, p *Pending) (map[string]bool, error) {
	if a.task.opts.Full {
		return nil, nil
	}
	list, total := a.candidates(p)
	if len(list) == 0 || len(a.task.state.State.Live()) > maxSurvey {
		return nil, nil
	}
	list, err := a.keptByNone(ctx, list)
	if errors.Is(err, ErrCorrupt) || blobGone(err) {
		return nil, nil // what keeps a pack cannot be told, and damage keeps all of them
	}
	if err != nil {
		return nil, fmt.Errorf("look for packs that are mostly dead: %w", err)
	}
	return sparsest(list, total), nil
}

// sparsest returns the packs that one commit gives up of those that it might.
func sparsest(list []sparsePack, total int64) map[string]bool {
	slices.SortFunc(list, func(x, y sparsePack) int {
		return cmp.Or(cmp.Compare(x.live*y.size, y.live*x.size), cmp.Compare(x.key, y.key))
	})
	left := max(minRewrite, total/partRewrite)
	chosen := map[string]bool{}
	for _, s := range list {
		if left -= s.live; left < 0 {
			break
		}
		chosen[s.key] = true
	}
	return chosen
}

// candidates returns the packs of the stores at hand of which the bases, by their tables,
// use less than half, and how much all of them use. A pack that a store needs which is not
// at hand would not die, and one that is damaged has nothing to save.
func (a *attempt) candidates(p *Pending) (list []sparsePack, total int64) {
	at := p.bases()
	live, other := map[string]int64{}, map[string]bool{}
	for name, b := range a.task.bases {
		for i := range b.root.Segments {
			other[b.root.Segments[i].Blob] = true // an index, not a pack
		}
		for _, use := range b.root.Blobs {
			live[use.Key] += use.Live
			total += use.Live
			if at[name] == nil || b.lost[use.Key] {
				other[use.Key] = true
			}
		}
	}
	for key, n := range live {
		if size := a.task.upkeep.packs[key]; !other[key] && 2*n < size {
			list = append(list, sparsePack{key, n, size})
		}
	}
	return list, total
}

// keptByNone leaves out the packs that are half live or more when everything is counted
// that the head keeps. The tables of the other checkpoints decide most cases: a pack that
// one of them uses half of stays, one that none of them names goes. A recorded progress has
// nothing to say: its packs are of an attempt that no checkpoint came of.
func (a *attempt) keptByNone(ctx context.Context, list []sparsePack) ([]sparsePack, error) {
	u := &a.task.upkeep
	others := a.otherCheckpoints()
	if err := a.task.survey(ctx, others); err != nil {
		return nil, err
	}
	var sure, unsure []sparsePack
	for _, s := range list {
		var named []string
		top := int64(0)
		for _, c := range others {
			if n := u.tables[c.ID][s.key]; n > 0 {
				named = append(named, c.ID)
				top = max(top, n)
			}
		}
		switch before := u.dense[s.key]; {
		case 2*top >= s.size:
		case top == 0:
			sure = append(sure, s)
		case before != nil && !slices.ContainsFunc(before, func(id string) bool { return !slices.Contains(named, id) }):
		default:
			unsure = append(unsure, s)
		}
	}
	exact, err := a.count(ctx, unsure, others)
	return append(sure, exact...), err
}

// otherCheckpoints returns what the head keeps beside the bases.
func (a *attempt) otherCheckpoints() []head.Checkpoint {
	t := a.task
	return slices.DeleteFunc(t.state.State.Live(), func(c head.Checkpoint) bool {
		return !slices.ContainsFunc(c.Stores, func(name string) bool { return t.bases[name] == nil || t.bases[name].checkpoint != c.ID })
	})
}

// survey reads the tables of checkpoints that are not known yet.
func (t *Task) survey(ctx context.Context, list []head.Checkpoint) error {
	u := &t.upkeep
	u.keepTables(t.state.State.Live())
	h := &history{view: &t.view}
	tables := make([]map[string]int64, len(list))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	for i := range list {
		if u.tables[list[i].ID] != nil {
			continue
		}
		g.Go(func() error {
			roots, err := h.roots(gctx, &list[i])
			tables[i] = map[string]int64{}
			for _, r := range roots {
				most(tables[i], r.Blobs)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for i, table := range tables {
		if table != nil {
			u.tables[list[i].ID] = table
		}
	}
	return nil
}

// count returns those packs of which less than half is named by the bases and the other
// checkpoints together, exactly. It reads the segments of those others that name one of
// them, as far as no base shares them.
func (a *attempt) count(ctx context.Context, list []sparsePack, others []head.Checkpoint) ([]sparsePack, error) {
	if len(list) == 0 {
		return nil, nil
	}
	t, u := a.task, &a.task.upkeep
	asked := map[string]bool{}
	for _, s := range list {
		asked[s.key] = true
	}
	var union snapshot.Union
	h := &history{view: &t.view, skip: map[snapshot.Digest]bool{}}
	for _, b := range t.bases {
		for i := range b.root.Segments {
			h.skip[b.root.Segments[i].Content] = true
		}
		for i := range b.index.Entries {
			addAsked(&union, asked, b.index.Entries[i].Chunks)
		}
	}
	named := map[string][]string{}
	for i := range others {
		names := false
		for key := range asked {
			if u.tables[others[i].ID][key] > 0 {
				named[key], names = append(named[key], others[i].ID), true
			}
		}
		if !names {
			continue
		}
		if err := h.each(ctx, &others[i], func(c snapshot.StoredChunk) {
			if asked[c.Blob] {
				union.Add(c.Location)
			}
		}); err != nil {
			return nil, err
		}
	}
	return u.judge(list, union.Blobs(), named), nil
}

func addAsked(union *snapshot.Union, asked map[string]bool, chunks []snapshot.Chunk) {
	for i := range chunks {
		if asked[chunks[i].Blob] {
			union.Add(chunks[i].Location)
		}
	}
}

// judge returns the packs that are sparse by an exact count, and remembers which
// checkpoints keep the others: they need not be counted again before one of those is gone.
func (u *upkeep) judge(list []sparsePack, counted []snapshot.BlobUse, named map[string][]string) (sparse []sparsePack) {
	live := map[string]int64{}
	most(live, counted)
	if u.dense == nil {
		u.dense = map[string][]string{}
	}
	for _, s := range list {
		if 2*live[s.key] < s.size {
			sparse = append(sparse, s)
			continue
		}
		u.dense[s.key] = named[s.key]
	}
	return sparse
}
