package blob

import (
	"errors"
	"testing"
)

// Refusals of requests that were under way together are one wish, not many.
func TestGateCutsOncePerRound(t *testing.T) {
	g := newGate((&Options{MaxRequests: 64}).withDefaults())
	var stamps []int
	for range 10 {
		stamp, err := g.enter(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		stamps = append(stamps, stamp)
	}
	for _, stamp := range stamps {
		g.outcome(stamp, Throttled(errors.New("slow down")))
		g.leave()
	}
	if g.limit != 32 || g.inUse != 0 {
		t.Errorf("limit %v, %d in use, want 32 and none", g.limit, g.inUse)
	}
}
