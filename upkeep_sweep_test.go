package snapferry

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
)

// The space that a store takes which changes all over is bounded by what it holds, however
// long it goes on: 50 commits that each replace a tenth of it at random.
func TestP12Space(t *testing.T) {
	const files, size = 60, 4 << 10
	g := newGarden(t, files, size)
	p := g.process(t, nil)
	task := p.mustOpen()
	var worst float64
	var moved int64
	for i := range 50 {
		for range files / 10 {
			n := g.r.IntN(files)
			g.change(n, n+1, size)
		}
		moved += g.commit(p, task).Stores["kv"].BytesRewritten
		worst = max(worst, float64(g.packBytes())/(files*size))
		if i%10 == 9 {
			g.sound()
		}
	}
	t.Logf("at most %.2f x the size of the store, %.1f x of it moved in all", worst, float64(moved)/(files*size))
	if worst > 2.2 || moved == 0 {
		t.Errorf("it took %.2f x the size of the store; %d bytes were moved", worst, moved)
	}
	g.wantOnlyLive()
	g.sound()
}

// packBytes sums the sizes of all packs that are there.
func (g *garden) packBytes() (n int64) {
	g.t.Helper()
	other := map[string]bool{}
	v := g.repo().view(kvTask)
	_, h, err := v.head(g.t.Context())
	must(g.t, err)
	for _, c := range h.State.Live() {
		other[blobPrefix(kvTask)+c.Blob.Key] = true
		for _, s := range value(v.checkpointBlob(g.t.Context(), &c))(g.t).Stores {
			other[s.Index.Key] = true
			for _, ref := range value(v.root(g.t.Context(), s.Index))(g.t).Segments {
				other[ref.Blob] = true
			}
		}
	}
	for _, key := range slices.DeleteFunc(g.keys(blobPrefix(kvTask)), func(key string) bool { return other[key] }) {
		n += value(g.mem.Stat(g.t.Context(), key))(g.t).Size
	}
	return n
}

// newSparseLife is a life in which commit "4" moves what is left of a pack.
func newSparseLife(t *testing.T) *life {
	g := newGarden(t, 6, leaf)
	lf := &life{base: g.lab, trees: map[string]tree{}}
	for i := range 6 {
		lf.trees[fmt.Sprint(i)] = g.now.with(tree{"n": fmt.Sprint(i)})
		if i < 2 {
			g.change(2*i, 2*i+2, leaf)
		}
	}
	p := lf.base.process(t, nil)
	p.opts.Grace = 0
	task := p.mustOpen()
	for _, n := range []string{"0", "1", "2"} {
		p.mustCommit(task, lf.trees[n], n)
	}
	q := lf.base.clone(t).process(t, nil)
	task = q.mustOpen()
	q.mustCommit(task, lf.trees["3"], "3")
	if s := q.mustCommit(task, lf.trees["4"], "4").Stores["kv"]; s.BytesRewritten != 2*leaf {
		t.Fatalf("commit 4 of this life reports %+v", s)
	}
	lf.killUpload(t)
	return lf
}

// A fault at any operation of a commit that moves chunks leaves the old state or the new,
// and all that is kept restores (I1, I8, I9).
func TestP12FaultSweep(t *testing.T) {
	lf := newSparseLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) { fired = lf.failBlob(t, i) })
	}
}

// So does a crash.
func TestP12CrashSweep(t *testing.T) {
	lf := newSparseLife(t)
	for i, fired := 0, true; fired && !t.Failed(); i++ {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			l, dir := lf.base.clone(t), fastDir(t)
			writeDir(t, filepath.Join(dir, "kv"), lf.trees["0"])
			ctx, f := armed(t, l.mem, i, true)
			o := lf.run(ctx, l.process(t, f), dir)
			fired = f.Fired()
			lf.afterCrash(l, o, dir, fired)
		})
	}
}

// The histories of the model, over a store whose first packs wither: what is kept is what was
// committed, whoever moves, crashes, trims and sweeps (I1, I3, I4, I8, P12).
func TestP12Model(t *testing.T) {
	var moved int64
	var with int
	for seed := uint64(1); seed <= 150 && !t.Failed(); seed++ {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			h := newRandomLife(t, seed)
			for i := range 24 {
				h.now["kv"][fmt.Sprintf("k/%02d", i)] = bulk(uint64(i), 2<<10)
			}
			h.also = func() {
				for range 4 {
					delete(h.now["kv"], fmt.Sprintf("k/%02d", h.r.IntN(24)))
				}
			}
			h.run()
			if moved += h.moved; h.moved > 0 {
				with++
			}
		})
	}
	t.Logf("%d histories move %d bytes", with, moved)
	if with < 5 {
		t.Errorf("only %d histories have anything for upkeep to do", with)
	}
}
