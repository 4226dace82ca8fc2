package sourcetest

import (
	"math/rand/v2"
	"testing"

	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// RunIncrement runs only the measurement of Harness.Increment, which Run includes.
func RunIncrement(t *testing.T, h Harness) { testIncrement(t, h) }

// testIncrement: after 1 % of the records were written again at random places, most
// chunks of an image are those of the image before.
func testIncrement(t *testing.T, h Harness) {
	inc := h.Increment
	if inc == nil {
		t.Log("the harness does not measure increments")
		return
	}
	s, _ := h.open(t, 0)
	inc.Fill(t, s, inc.Records)
	first := Freeze(t, s.Source())
	known := map[snapshot.Digest]bool{}
	added(t, first, known)
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}

	rng := rand.New(rand.NewPCG(7, 7))
	var again []uint64
	for range inc.Records / 100 {
		again = append(again, 1+rng.Uint64N(inc.Records))
	}
	inc.Rewrite(t, s, again)
	second := Freeze(t, s.Source())
	fresh, total := added(t, second, known)
	share := float64(fresh) / float64(total)
	t.Logf("%d of %d bytes lie in new chunks after %d of %d records were rewritten: %.1f %%", fresh, total, len(again), inc.Records, 100*share)
	if share > inc.MaxShare {
		t.Errorf("%.1f %% of the bytes are new, at most %.1f %% are allowed", 100*share, 100*inc.MaxShare)
	}
	if fresh == 0 {
		t.Error("nothing is new: the rewrite is not in the image")
	}
	if got := prefix(t, h.read(t, Copy(t, second))); got != inc.Records {
		t.Errorf("the image holds 1..%d, want 1..%d", got, inc.Records)
	}
}

// added cuts the files of an image into chunks as the engine does and returns how many
// bytes lie in chunks that are not known yet, which they are from then on.
func added(t *testing.T, img source.Image, known map[snapshot.Digest]bool) (fresh, total int64) {
	t.Helper()
	for i := range img.Entries() {
		e := &img.Entries()[i]
		if e.Type != source.Regular {
			continue
		}
		data, err := ReadFile(img, e)
		if err != nil {
			t.Fatal(err)
		}
		size := e.ChunkSize
		if size == 0 {
			size = snapshot.DefaultChunkSize
		}
		for off, n := range snapshot.Cut(e.Size, []snapshot.Run{{Length: e.Size}}, size) {
			total += int64(n)
			if sum := snapshot.Sum(data[off : off+int64(n)]); !known[sum] {
				known[sum] = true
				fresh += int64(n)
			}
		}
	}
	return fresh, total
}
