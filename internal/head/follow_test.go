package head

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// made is an attempt of epoch 1 that is ready to become the checkpoint with this
// ordinal and sequence.
func made(ordinal uint32, sequence uint64, stores ...string) *Commit {
	a := NewAttempt(1, ordinal)
	at := time.Unix(int64(sequence), 0)
	id := at.UTC().Format("20060102T150405.000000Z")
	return &Commit{
		Attempt: a, Time: at, KeepLast: 1, Slot: sequence + 1,
		Checkpoint: Checkpoint{ID: id, Epoch: 1, Sequence: sequence, Stores: stores, Blob: Ref{Key: a.String() + "/1"}},
	}
}

func mustBe(t *testing.T) func(*State, error) *State {
	return func(s *State, err error) *State {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

// An attempt that was begun before another commit was known cannot take its sequence
// a second time: ids and sequences only grow (P1).
func TestCommitOnOlderState(t *testing.T) {
	s := mustBe(t)((&State{}).Claim().Commit(made(1, 1, "kv")))
	if _, err := s.Commit(made(2, 1, "kv")); !errors.Is(err, sentinel.Conflict) {
		t.Errorf("Commit of a sequence that is taken: %v", err)
	}
	if _, err := s.Prepare(made(2, 1, "kv")); !errors.Is(err, sentinel.Conflict) {
		t.Errorf("Prepare of a sequence that is taken: %v", err)
	}
	mustBe(t)(s.Commit(made(2, 2, "kv")))
}

// Open has confirmed what the application published, and the application's clean-up
// comes after: what was prepared before is dropped then (P6).
func TestConfirmAgainDropsOlder(t *testing.T) {
	a, b := made(1, 1, "kv"), made(2, 2, "kv")
	s := mustBe(t)((&State{}).Claim().Prepare(a))
	s = mustBe(t)(s.Prepare(b))
	s = mustBe(t)(s.Confirm(b.Checkpoint.ID, false, nil, nil, 0, 3, a.Time))
	if len(s.Prepared) != 1 {
		t.Fatalf("Open dropped what was prepared: %+v", s.Prepared)
	}
	s = mustBe(t)(s.Confirm(b.Checkpoint.ID, true, nil, nil, 0, 4, a.Time))
	if len(s.Prepared) != 0 || len(s.Dropped) != 1 || s.Dropped[0].ID != a.Checkpoint.ID || len(s.Retained) != 1 {
		t.Fatalf("after the clean-up: prepared %+v, dropped %+v, retained %+v", s.Prepared, s.Dropped, s.Retained)
	}
}

// A late confirm of an older checkpoint leaves the newest one that holds a store under
// the protection of retention (P5e).
func TestLateConfirmKeepsHolder(t *testing.T) {
	a, b := made(1, 1, "kv"), made(2, 2, "kv")
	s := mustBe(t)((&State{}).Claim().Prepare(a))
	s = mustBe(t)(s.Prepare(b))
	s = mustBe(t)(s.Confirm(b.Checkpoint.ID, false, nil, nil, 0, 3, a.Time))
	s = mustBe(t)(s.Confirm(a.Checkpoint.ID, true, nil, nil, 0, 4, a.Time))
	if got := s.Holders["kv"]; got != b.Checkpoint.ID {
		t.Fatalf("kv is held by %s, want %s", got, b.Checkpoint.ID)
	}
	s = mustBe(t)(s.Commit(made(3, 3, "other")))
	if !slices.ContainsFunc(s.Retained, func(c Checkpoint) bool { return c.ID == b.Checkpoint.ID }) {
		t.Fatalf("the newest checkpoint with kv was dropped: %+v", s.Retained)
	}
}
