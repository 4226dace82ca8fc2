package snapferry

import (
	"fmt"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob/blobtest"
)

// cost is what a commit asked of the store.
type cost struct{ puts, all int }

// A commit of many small files to a store that is far away is a few requests, the first one
// as well as those that follow: small files share packs (S5), and what is not new costs
// nothing.
func TestSmallCommitsAreFewRequests(t *testing.T) {
	const files, size, changed = 20_000, 2 << 10, 100
	l := newLab(t)
	far := blobtest.NewLatency(l.mem, func(blobtest.Call) time.Duration { return 50 * time.Millisecond })
	rec := blobtest.NewRecorder(far)
	p := l.process(t, rec)
	p.opts.PackSize = 0 // the default
	task := p.mustOpen()
	tr := tree{}
	name := func(n int) string { return fmt.Sprintf("dir%02d/file%05d", n%50, n) }
	for i := range files {
		tr[name(i)] = bulk(uint64(i), size)
	}
	commit := func(n string, want cost) {
		t.Helper()
		rec.Reset()
		p.mustCommit(task, tr, n)
		c := cost{all: len(rec.Calls())}
		for _, call := range rec.Calls() {
			if call.Op == blobtest.OpPut {
				c.puts++
			}
		}
		t.Logf("%s: %+v", n, c)
		if c.puts > want.puts || c.all > want.all {
			t.Errorf("%s: %+v, want at most %+v", n, c, want)
			t.Logf("%.200q", rec.Transcript())
		}
	}
	commit("all files", cost{puts: 8, all: 14})
	for round := range 2 {
		for i := range changed {
			n := i*199 + round
			tr[name(n)] = bulk(uint64(files*(round+1)+n), size)
		}
		commit(fmt.Sprint("some files ", round), cost{puts: 8, all: 50})
	}
	commit("no files", cost{puts: 5, all: 16})
}
