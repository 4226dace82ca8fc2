package protocolsearch

import (
	"os"
	"testing"
)

// small bounds are searched completely in a few seconds.
var small = map[string]Bounds{
	"two owners, sweeper, late put": {Slots: 5, Attempts: 2, Claims: 2, Ghosts: 1, Sweeper: true},
	"two owners, sweeper, pruner":   {Slots: 5, Attempts: 2, Claims: 2, Sweeper: true, Pruner: true},
	"two owners, sweeper, restorer": {Slots: 5, Attempts: 2, Claims: 2, Sweeper: true, Restorer: true},
	"one owner, everything":         {Slots: 4, Attempts: 2, Claims: 1, Ghosts: 1, Sweeper: true, Pruner: true, Restorer: true, Expiry: true},
	"one owner, three attempts":     {Slots: 5, Attempts: 3, Claims: 1, Pruner: true, Restorer: true},
}

// large bounds take minutes and a gigabyte; those with States are not complete.
var large = map[string]Bounds{
	"everything, short log":           {Slots: 3, Attempts: 2, Claims: 2, Ghosts: 1, Sweeper: true, Pruner: true, Restorer: true, Expiry: true},
	"everything":                      {Slots: 6, Attempts: 3, Claims: 2, Ghosts: 1, Sweeper: true, Pruner: true, Restorer: true, Expiry: true, States: 4e6},
	"all but restorer and expiry":     {Slots: 5, Attempts: 2, Claims: 2, Ghosts: 1, Sweeper: true, Pruner: true},
	"two owners, three attempts":      {Slots: 6, Attempts: 3, Claims: 2, Sweeper: true, Pruner: true, States: 4e6},
	"three claims":                    {Slots: 6, Attempts: 2, Claims: 3, Sweeper: true, Ghosts: 1, States: 4e6},
	"two owners, pruner and restorer": {Slots: 6, Attempts: 3, Claims: 2, Pruner: true, Restorer: true},
	"one owner, everything, longer":   {Slots: 6, Attempts: 3, Claims: 1, Ghosts: 1, Sweeper: true, Pruner: true, Restorer: true, Expiry: true, States: 4e6},
}

// The protocol keeps its promises (I1, I3, I4) in every interleaving of P2 to P5, P8 to
// P10 and P12, and the search is not blind: every event of the model happens.
func TestNoViolation(t *testing.T) {
	seen := map[Event]int{}
	for name, b := range small {
		r := Search(b, Nothing)
		t.Logf("%s: %v", name, r)
		if r.Violation != "" || !r.Complete {
			t.Errorf("%s: %v", name, r)
		}
		for e, n := range r.Events {
			seen[e] += n
		}
	}
	for _, e := range everyEvent() {
		if seen[e] == 0 {
			t.Errorf("%q never happens", e)
		}
	}
}

// SNAPFERRY_SEARCH=large makes the search go further.
func TestNoViolationLarge(t *testing.T) {
	if os.Getenv("SNAPFERRY_SEARCH") != "large" {
		return
	}
	for name, b := range large {
		r := Search(b, Nothing)
		t.Logf("%s: %v", name, r)
		if r.Violation != "" || !r.Complete && b.States == 0 {
			t.Errorf("%s: %v", name, r)
		}
	}
}

// Each rule is needed: without it the search finds how a promise is broken.
func TestBreaksAreFound(t *testing.T) {
	owners := Bounds{Slots: 6, Attempts: 2, Claims: 2, Ghosts: 1, Sweeper: true, Pruner: true, States: 1e5}
	single := Bounds{Slots: 5, Attempts: 1, Claims: 2, Sweeper: true, States: 1e5}
	expiry := Bounds{Slots: 4, Attempts: 2, Claims: 1, Expiry: true, States: 1e5}
	pruned := Bounds{Slots: 5, Attempts: 3, Claims: 1, Pruner: true, States: 1e5}
	restore := Bounds{Slots: 5, Attempts: 3, Claims: 1, Pruner: true, Restorer: true, States: 1e5}
	const (
		lostBlob = "a retained checkpoint has lost a blob"
		falseAck = "acknowledged an entry whose slot in history is another's"
	)

	for _, c := range []struct {
		name   string
		broken Break
		bounds Bounds
		want   string
	}{
		{"P3.4 left out", NoNameCheck, owners, falseAck},
		{"P3.4 left out for claims", NoNameCheckOfClaim, owners, falseAck},
		{"P3.5 abort deletes while unknown", AbortDeletes, owners, lostBlob},
		{"0001 lost slot taken for a failed commit", TrustLostSlot, single, lostBlob},
		{"P9 sweep by age alone", SweepByAge, owners, lostBlob},
		{"P2 head name deleted", HeadDeleted, owners, falseAck},
		{"P5d publish before seal", PublishFirst, expiry, lostBlob},
		{"P5e base not re-checked after a collision", BaseNotRechecked, pruned, lostBlob},
		{"P10 head not read again after a missing blob", NoReread, restore, "a restorer misses a blob of a retained checkpoint"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if r := Search(c.bounds, Nothing); r.Violation != "" {
				t.Fatalf("nothing left out: %v", r)
			}
			r := Search(c.bounds, c.broken)
			t.Log(r)
			if r.Violation != c.want {
				t.Errorf("got %q, want %q", r.Violation, c.want)
			}
		})
	}
}

// The path to the false acknowledgement is F2, the interleaving of slatedb's RFC-0026:
// a claim lands on a name that was used and removed.
func TestNameReusePath(t *testing.T) {
	r := Search(Bounds{Slots: 6, Attempts: 2, Claims: 2, Ghosts: 1}, NoNameCheckOfClaim)
	removed := false
	for _, e := range r.Path {
		if e == (Event{"store", "oldest name removed"}) {
			removed = true
		}
	}
	if last := r.Path[len(r.Path)-1]; !removed || last != (Event{"claim", "acknowledged"}) {
		t.Errorf("not the path that was expected: %v", r)
	}
}

// everyEvent lists what the unbroken model can do.
func everyEvent() []Event {
	claims := []string{ // an owner that loses the race for a claim is as one that crashed, not a state of its own
		"put", "put, answer lost", "put times out and is still in flight", "put: name exists", "something follows", "acknowledged",
	}
	appends := append(claims, "slot holds another entry")
	own := map[string][]string{
		"owner": {
			"reads the head and claims", "uploads", "uploads, borrowing", "seals", "seals: blob is gone",
			"gives an upload up and deletes it", "reads the head and decides again", "deletes a dead blob", "crashes",
		},
		"claim":    claims,
		"commit":   appends,
		"sweeper":  append([]string{"finds dead blobs", "voids an attempt", "deletes a dead blob", "the name had been used before"}, appends...),
		"pruner":   append([]string{"drops a checkpoint", "deletes a dead blob"}, appends...),
		"restorer": {"lists", "takes a checkpoint", "reads a blob", "reads the last blob", "misses a blob"},
		"store":    {"late put lands", "oldest name removed", "unsealed blob expires"},
	}
	var out []Event
	for actor, acts := range own {
		for _, act := range acts {
			out = append(out, Event{actor, act})
		}
	}
	return out
}
