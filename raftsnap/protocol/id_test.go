package protocol

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/snapshot"
)

func TestIDText(t *testing.T) {
	id := ID{Term: 3, Index: 0xabc, Digest: snapshot.Sum([]byte("x"))}
	text := id.String()
	want := "0000000000000003-0000000000000abc-" + id.Digest.String()
	if text != want {
		t.Errorf("got %s, want %s", text, want)
	}
	if !filepath.IsLocal(text) || filepath.Base(text) != text {
		t.Errorf("%s is no name for a directory", text)
	}
	if got, err := ParseID(text); err != nil || got != id {
		t.Errorf("parsed %v, %v", got, err)
	}
	for _, bad := range []string{
		"", "-", "--", strings.ToUpper(text), text + "0", text[:len(text)-1], "+" + text[1:], " " + text[1:],
		strings.Replace(text, "-", "_", 1), strings.Replace(text, "00", "../", 1), text[:33] + text[33:96] + "zz", "0x" + text[2:],
	} {
		if _, err := ParseID(bad); !errors.Is(err, ErrID) {
			t.Errorf("%q: %v, want ErrID", bad, err)
		}
	}
}

func TestIDJSON(t *testing.T) {
	for _, id := range []ID{{}, {Term: 1, Index: 2, Digest: snapshot.Sum(nil)}} {
		data, err := json.Marshal(Answer{ID: id})
		if err != nil {
			t.Fatal(err)
		}
		var back Answer
		if err := json.Unmarshal(data, &back); err != nil || back.ID != id {
			t.Errorf("%s gives %v, %v", data, back.ID, err)
		}
	}
	if err := json.Unmarshal([]byte(`{"id":"nonsense"}`), &Answer{}); err == nil {
		t.Error("nonsense was read")
	}
}

func FuzzParseID(f *testing.F) {
	f.Add(ID{Term: 1, Index: 2}.String())
	f.Add("x")
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := ParseID(s); err == nil && id.String() != s {
			t.Errorf("%q is read as %s", s, id)
		}
	})
}

// TestContradicts: in one history the term never falls as the index grows.
func TestContradicts(t *testing.T) {
	id := func(term, index uint64) ID { return ID{Term: term, Index: index} }
	tests := []struct {
		a, b ID
		want bool
	}{
		{id(2, 1), id(1, 10), true},
		{id(1, 1), id(2, 10), false},
		{id(2, 1), id(2, 10), false},
		{id(1, 5), id(2, 5), true},
		{id(1, 5), id(1, 5), false},
		{id(1, 5), ID{}, false},
	}
	for _, tt := range tests {
		if tt.a.Contradicts(tt.b) != tt.want || tt.b.Contradicts(tt.a) != tt.want {
			t.Errorf("%s, %s: want %v both ways", tt.a.Short(), tt.b.Short(), tt.want)
		}
	}
}

// TestIDOrder: within one history Compare and the text give the same order.
func TestIDOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var ids []ID
	for i := range uint64(50) {
		ids = append(ids, ID{Term: 1 + i/14, Index: i / 2, Digest: snapshot.Digest{byte(rng.IntN(256))}})
	}
	rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	slices.SortFunc(ids, ID.Compare)
	byText := slices.SortedFunc(slices.Values(ids), func(a, b ID) int { return strings.Compare(a.String(), b.String()) })
	if diff := cmp.Diff(ids, byText); diff != "" {
		t.Errorf("(-Compare +text):\n%s", diff)
	}
}

// TestBackoff: doubling, within its bounds, and never nothing.
func TestBackoff(t *testing.T) {
	cfg := Config{BackoffBase: 100 * time.Millisecond, BackoffMax: time.Second}.withDefaults()
	rng := rand.New(rand.NewPCG(1, 1))
	for n, most := range []time.Duration{100, 100, 200, 400, 800, 1000, 1000} {
		most *= time.Millisecond
		for range 100 {
			if got := cfg.backoff(n, rng); got < most/2 || got > most {
				t.Fatalf("failure %d: %v, want %v to %v", n, got, most/2, most)
			}
		}
	}
	if got := cfg.backoff(1_000_000, rng); got > time.Second {
		t.Errorf("%v after a million failures", got)
	}
}

// TestScoresDecay: failures double the back-off, time forgives them by halves, a success
// at once.
func TestScoresDecay(t *testing.T) {
	cfg := Config{BackoffDecay: time.Minute}.withDefaults()
	s := scores{cfg: &cfg, rng: rand.New(rand.NewPCG(1, 1)), of: map[uint64]*score{}}
	for range 8 {
		s.fail(0, 2, "x")
	}
	if s.healthy(0, 2) || s.fails(0, 2) != 8 {
		t.Errorf("healthy %v, fails %d", s.healthy(0, 2), s.fails(0, 2))
	}
	if got := s.fails(2*time.Minute, 2); got != 2 {
		t.Errorf("%d failures after two periods, want 2", got)
	}
	if !s.healthy(cfg.BackoffMax, 2) {
		t.Error("never healthy again")
	}
	s.good(2)
	if s.fails(2*time.Minute, 2) != 0 {
		t.Error("not forgiven")
	}
	s.fail(0, 0, "nobody")
	if len(s.of) != 0 {
		t.Error("nobody is blamed")
	}
}
