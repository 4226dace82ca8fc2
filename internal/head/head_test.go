package head

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/sentinel"
)

var t0 = time.Date(2030, 1, 2, 3, 4, 5, 6000, time.UTC)

func empty(t *testing.T) *State {
	t.Helper()
	l, err := Load(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l.State
}

// next returns a commit of the given stores that s will admit.
func next(s *State, keep int, stores ...string) *Commit {
	a := NewAttempt(s.Epoch, s.Ordinal+1)
	id, at := s.NextID(t0, a.Ordinal)
	cp := Checkpoint{ID: id, Epoch: s.Epoch, Sequence: s.Sequence + 1, Stores: stores, Blob: Ref{a.String() + "/1", "d"}}
	return &Commit{Attempt: a, Checkpoint: cp, Time: at, KeepLast: keep, Slot: 7, Now: t0}
}

func must(t *testing.T) func(*State, error) *State {
	return func(s *State, err error) *State {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func ids(list []Checkpoint) (out []uint64) {
	for _, c := range list {
		out = append(out, c.Sequence)
	}
	return out
}

// P1: checkpoint ids and sequences grow although the clock stands still or goes back.
func TestIDsGrow(t *testing.T) {
	s := empty(t).Claim()
	last := ""
	for i := range 20 {
		if i == 10 {
			s = s.Claim()
		}
		c := next(s, 0, "kv")
		c.Checkpoint.ID, c.Time = s.NextID(t0.Add(-time.Duration(i)*time.Hour), s.Ordinal+1)
		if c.Checkpoint.ID <= last {
			t.Fatalf("%s after %s", c.Checkpoint.ID, last)
		}
		last = c.Checkpoint.ID
		s = must(t)(s.Commit(c))
		if s.Sequence != uint64(i+1) {
			t.Fatalf("sequence %d after %d commits", s.Sequence, i+1)
		}
	}
}

// I4, P5e: what a commit is refused for.
func TestCommitRefused(t *testing.T) {
	s := empty(t).Claim()
	first := next(s, 0, "kv")
	s = must(t)(s.Commit(first))
	for name, tc := range map[string]struct {
		change func(*State, *Commit) *State
		want   error
	}{
		"older epoch":         {func(s *State, _ *Commit) *State { return s.Claim() }, sentinel.Fenced},
		"voided":              {func(s *State, c *Commit) *State { return s.Void([]string{c.Attempt.String()}) }, sentinel.Conflict},
		"same attempt twice":  {func(s *State, c *Commit) *State { c.Attempt = first.Attempt; return s }, ErrDone},
		"borrows the dropped": {func(s *State, c *Commit) *State { c.Borrows = []string{"gone"}; return s }, ErrBaseGone},
		"resumes the dropped": {func(s *State, c *Commit) *State { c.Resumed = "gone"; return s }, ErrBaseGone},
		"base trimmed": {func(s *State, c *Commit) *State {
			c.Borrows = []string{first.Checkpoint.ID}
			s = must(t)(s.Commit(next(s, 0, "kv")))
			c.Attempt.Ordinal = 9
			return s.Trim(1, nil, 3, t0)
		}, ErrBaseGone},
	} {
		t.Run(name, func(t *testing.T) {
			c := next(s, 0, "kv")
			before := tc.change(s, c)
			if _, err := before.Commit(c); !errors.Is(err, tc.want) {
				t.Fatalf("Commit = %v, want %v", err, tc.want)
			}
			if _, err := before.Prepare(c); !errors.Is(err, tc.want) {
				t.Fatalf("Prepare = %v, want %v", err, tc.want)
			}
		})
	}
}

// A transition never changes the state it starts from: P3 asks again with another.
func TestTransitionsDoNotShare(t *testing.T) {
	s := empty(t).Claim()
	for range 3 {
		s = must(t)(s.Commit(next(s, 0, "kv")))
	}
	s = must(t)(s.AddHold(s.Retained[0].ID, "me", 4, t0))
	before := fmt.Sprintf("%+v", *s)
	must(t)(s.Commit(next(s, 1, "other")))
	s.Trim(1, []string{"kv"}, 9, t0)
	s.Release([]string{"me"}, 9, t0)
	s.Void([]string{"x"})
	s.Claim()
	if got := fmt.Sprintf("%+v", *s); got != before {
		t.Fatalf("state changed:\n%s\n%s", before, got)
	}
}

// Retention keeps the newest N and, until it is forgotten, the newest of each store.
func TestRetention(t *testing.T) {
	s := empty(t).Claim()
	s = must(t)(s.Commit(next(s, 2, "kv", "meta")))
	for range 4 {
		s = must(t)(s.Commit(next(s, 2, "kv")))
	}
	if got, want := ids(s.Retained), []uint64{1, 4, 5}; !slices.Equal(got, want) {
		t.Fatalf("retained %v, want %v", got, want)
	}
	c := next(s, 2, "kv")
	c.Forget = []string{"meta"}
	s = must(t)(s.Commit(c))
	if got, want := ids(s.Retained), []uint64{5, 6}; !slices.Equal(got, want) {
		t.Fatalf("after forget: retained %v, want %v", got, want)
	}
	if got := s.Trim(1, nil, 8, t0); len(got.Retained) != 1 {
		t.Fatalf("trim kept %v", ids(got.Retained))
	}
	if len(s.Dropped) != 4 || s.Dropped[0].Slot != 7 {
		t.Fatalf("dropped %+v", s.Dropped)
	}
	c = next(s, 2, "kv")
	c.Cleaned = []string{s.Dropped[0].ID, s.Dropped[1].ID}
	if s = must(t)(s.Commit(c)); len(s.Dropped) != 3 {
		t.Fatalf("cleaned items stay: %+v", s.Dropped)
	}
}

// P6: preparing keeps all until CleanUp; confirming at Open drops nothing.
func TestExternalPublishing(t *testing.T) {
	s := empty(t).Claim()
	var all []string
	for range 3 {
		c := next(s, 10, "kv")
		all = append(all, c.Checkpoint.ID)
		s = must(t)(s.Prepare(c))
	}
	if len(s.Live()) != 3 || s.Latest() != nil {
		t.Fatalf("live %v, latest %v", s.Live(), s.Latest())
	}
	s = must(t)(s.Confirm(all[1], false, nil, nil, 10, 9, t0))
	if len(s.Prepared) != 2 || len(s.Dropped) != 0 {
		t.Fatalf("confirm at Open: prepared %v dropped %v", ids(s.Prepared), s.Dropped)
	}
	late := must(t)(s.Confirm(all[0], false, nil, nil, 10, 9, t0))
	if got := ids(late.Retained); !slices.Equal(got, []uint64{1, 2}) {
		t.Fatalf("late confirm: retained %v", got)
	}
	s = must(t)(s.Confirm(all[2], true, nil, nil, 10, 9, t0))
	if len(s.Prepared) != 0 || len(s.Dropped) != 1 || s.Latest().ID != all[2] {
		t.Fatalf("clean up: prepared %v dropped %v", ids(s.Prepared), s.Dropped)
	}
	if again := must(t)(s.Confirm(all[2], true, nil, nil, 10, 9, t0)); !slices.Equal(ids(again.Retained), ids(s.Retained)) {
		t.Fatal("confirming again changed what is retained")
	}
	if _, err := s.Confirm("never", true, nil, nil, 10, 9, t0); !errors.Is(err, sentinel.Conflict) {
		t.Fatalf("confirm of the unknown: %v", err)
	}
}

// P8: which attempts can commit no more.
func TestCanCommit(t *testing.T) {
	s := empty(t).Claim().Claim()
	s = must(t)(s.Commit(next(s, 0, "kv")))
	open := Attempt{2, 2, "0011223344556677"}
	s = s.Void([]string{Attempt{2, 3, "0011223344556677"}.String()})
	for a, want := range map[Attempt]bool{
		{1, 9, "0011223344556677"}: false, // epoch passed
		{2, 1, "0011223344556677"}: false, // not above the last committed
		{2, 3, "0011223344556677"}: false, // voided
		open:                       true,
		{3, 1, "0011223344556677"}: true, // of an owner this head does not know yet
	} {
		if got := s.CanCommit(a); got != want {
			t.Errorf("CanCommit(%s) = %v", a, got)
		}
	}
}

// P10: a held checkpoint lives on when retention drops it, and is dropped when the last
// hold goes.
func TestHold(t *testing.T) {
	s := empty(t).Claim()
	s = must(t)(s.Commit(next(s, 1, "kv")))
	first := s.Latest().ID
	s = must(t)(s.AddHold(first, "a", 2, t0))
	s = must(t)(s.AddHold(first, "b", 3, t0))
	s = must(t)(s.Commit(next(s, 1, "kv")))
	alive := func() bool { return slices.ContainsFunc(s.Live(), func(c Checkpoint) bool { return c.ID == first }) }
	s = s.Release([]string{"a"}, 5, t0)
	if !alive() {
		t.Fatal("dropped while held")
	}
	s = s.Release([]string{"b"}, 6, t0)
	if alive() {
		t.Fatal("alive after the last hold")
	}
	if _, err := s.AddHold(first, "c", 7, t0); !errors.Is(err, ErrBaseGone) {
		t.Fatalf("hold of the dropped: %v", err)
	}
}

// segments is a blob store for segments of a head.
type segments map[string][]byte

func (m segments) put(data []byte) (Ref, error) {
	r := Ref{fmt.Sprintf("a/%d", len(m)), frame.Digest(data)}
	m[r.Key] = data
	return r, nil
}

func (m segments) get(r Ref) ([]byte, error) {
	if d, ok := m[r.Key]; ok {
		return d, nil
	}
	return nil, fs.ErrNotExist
}

// P1: a head stays small with thousands of checkpoints, is written in segments of
// which few change, and reads back as it was.
func TestLongHead(t *testing.T) {
	store := segments{}
	l := &Loaded{State: empty(t).Claim()}
	rnd := rand.New(rand.NewPCG(1, 2))
	writes := 0
	for i := range 3000 {
		var s *State
		switch {
		case i%500 == 499:
			s = l.State.Trim(len(l.State.Retained)-rnd.IntN(150), nil, uint64(i), t0)
		default:
			c := next(l.State, 0, "kv", "meta")
			for _, d := range l.State.Dropped {
				if rnd.IntN(3) == 0 {
					c.Cleaned = append(c.Cleaned, d.ID)
				}
			}
			s = must(t)(l.State.Commit(c))
		}
		before := len(store)
		body, n, err := l.Encode(s, store.put)
		if err != nil {
			t.Fatal(err)
		}
		writes += len(store) - before
		if len(body) > MaxBody {
			t.Fatalf("head has %d bytes", len(body))
		}
		if i%250 == 249 {
			got, err := Load(body, store.get)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(s, got.State, cmpopts.EquateEmpty()); d != "" {
				t.Fatalf("after %d entries: %s", i, d)
			}
			if !slices.Equal(got.Segments(), n.Segments()) {
				t.Fatalf("segments %v, want %v", got.Segments(), n.Segments())
			}
			n = got
		}
		l = n
	}
	if len(l.State.Retained) < 2000 || writes > 300 {
		t.Fatalf("%d retained, %d segment writes", len(l.State.Retained), writes)
	}
}

func TestLoadDamage(t *testing.T) {
	store := segments{}
	s := empty(t).Claim()
	for range 200 {
		s = must(t)(s.Commit(next(s, 0, "kv")))
	}
	body, _, err := (&Loaded{State: empty(t)}).Encode(s, store.put)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Load(body[:len(body)-1], store.get); !errors.Is(err, sentinel.Corrupt) {
		t.Errorf("cut body: %v", err)
	}
	for k, data := range store {
		store[k] = append(data[:len(data)-1:len(data)-1], 'x')
	}
	if _, err := Load(body, store.get); !errors.Is(err, sentinel.Corrupt) {
		t.Errorf("damaged segment: %v", err)
	}
	clear(store)
	if _, err := Load(body, store.get); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent segment: %v", err)
	}
}

func TestAttempt(t *testing.T) {
	a := NewAttempt(10, 3)
	if got, err := ParseAttempt(a.String()); err != nil || got != a {
		t.Fatalf("ParseAttempt(%s) = %v, %v", a, got, err)
	}
	for _, s := range []string{"", "1-2-3", a.String() + "0", "g" + a.String()[1:], a.String()[:40]} {
		if _, err := ParseAttempt(s); !errors.Is(err, sentinel.Corrupt) {
			t.Errorf("ParseAttempt(%q) = %v", s, err)
		}
	}
	if a.String() >= NewAttempt(10, 4).String() || a.String() >= NewAttempt(11, 1).String() {
		t.Error("attempts do not sort by age")
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"epoch":1,"retained":[{"id":"a"}],"retained_segments":[{"key":"a/0","digest":"x"}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		_, _ = Load(body, segments{}.get) // must not panic
	})
}
