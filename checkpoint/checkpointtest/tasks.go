package checkpointtest

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/checkpoint"
)

// wantTasks checks that exactly these tasks have logs.
func (s *suite) wantTasks(t *testing.T, want ...checkpoint.TaskID) {
	t.Helper()
	got := []checkpoint.TaskID{}
	for task, err := range s.d.Tasks(t.Context()) {
		if err != nil {
			t.Fatalf("tasks: %v", err)
		}
		got = append(got, task)
	}
	order := func(a, b checkpoint.TaskID) int {
		return cmp.Or(cmp.Compare(a.Job, b.Job), cmp.Compare(a.Task, b.Task))
	}
	slices.SortFunc(got, order)
	slices.SortFunc(want, order)
	if d := gocmp.Diff(got, append([]checkpoint.TaskID{}, want...)); d != "" {
		t.Fatalf("tasks differ (-got +want):\n%s", d)
	}
}

// The log of one task is nothing to the others.
func testTasksApart(t *testing.T, s *suite) {
	a := checkpoint.TaskID{Job: "orders", Task: "p1"}
	b := checkpoint.TaskID{Job: "orders", Task: "p10"}
	ea := s.add(t, a, nil, 3)
	eb := s.add(t, b, nil, 1)
	s.wantHead(t, a, ea[2])
	s.wantHead(t, b, eb[0])
	_, err := s.d.Head(t.Context(), checkpoint.TaskID{Job: "orders", Task: "p"})
	wantErr(t, "head of a prefix", err, fs.ErrNotExist)
	s.wantTasks(t, a, b)
}

// Names that sort around a slash, or are prefixes of each other, are all found once.
func testTasksOddNames(t *testing.T, s *suite) {
	names := []string{"a", "a-", "a.b", "a0", "a-b", "A", "_", "b", "log", "t", "0"}
	var want []checkpoint.TaskID
	for _, job := range names {
		for _, task := range names {
			id := checkpoint.TaskID{Job: job, Task: task}
			s.add(t, id, nil, 1)
			want = append(want, id)
		}
	}
	s.wantTasks(t, want...)

	for range s.d.Tasks(t.Context()) {
		break // a caller may stop early
	}
}

// P2: nothing goes before its time, and the head never.
func testTrimKeepsHead(t *testing.T, s *suite) {
	es := s.add(t, s.task, nil, 4)
	if s.Forward != nil {
		s.Forward(t, s.d, checkpoint.KeepSuperseded-time.Minute)
	}
	for range 2 {
		if err := s.d.Trim(t.Context(), s.task); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range es {
		got, err := s.d.Get(t.Context(), s.task, e.Slot)
		if err != nil {
			t.Fatalf("slot %d after trim: %v", e.Slot, err)
		}
		same(t, got, e)
	}
	s.wantHead(t, s.task, es[3])
}

// P2: what was superseded a day ago may go; what was superseded since then stays, however
// old it is, and so does the head.
func testTrimAfterADay(t *testing.T, s *suite) {
	if s.Forward == nil {
		return
	}
	old := s.add(t, s.task, nil, 4)
	s.Forward(t, s.d, checkpoint.KeepSuperseded+time.Minute)
	young := s.add(t, s.task, old[3], 2)
	if err := s.d.Trim(t.Context(), s.task); err != nil {
		t.Fatal(err)
	}

	for _, e := range old[:3] {
		if _, err := s.d.Get(t.Context(), s.task, e.Slot); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("slot %d: %v", e.Slot, err)
		}
	}
	for _, e := range append(young, old[3]) {
		if _, err := s.d.Get(t.Context(), s.task, e.Slot); err != nil {
			t.Fatalf("slot %d, superseded just now or not at all: %v", e.Slot, err)
		}
	}

	s.Forward(t, s.d, 10*checkpoint.KeepSuperseded)
	if err := s.d.Trim(t.Context(), s.task); err != nil {
		t.Fatal(err)
	}
	s.wantHead(t, s.task, young[1])
	s.wantTasks(t, s.task)
	s.add(t, s.task, young[1], 2)
}
