//go:build linux

package grouptest

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// times is how often a test does what it does, or for how long.
func times(ordinary, long int) int {
	switch {
	case os.Getenv("SNAPFERRY_LONG") != "":
		return long
	case testing.Short():
		return 1
	}
	return ordinary
}

// newSeed returns the seed of a test, and says how to have it again.
func newSeed(t testing.TB) uint64 {
	seed := uint64(1)
	if os.Getenv("SNAPFERRY_CHAOS") != "" {
		seed = uint64(time.Now().UnixNano())
	}
	if s := os.Getenv("SNAPFERRY_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("again with SNAPFERRY_SEED=%d", seed)
		}
	})
	return seed
}

// long marks a test that is not among the few which short runs have, under the race
// detector for instance.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("not in short runs")
	}
}
