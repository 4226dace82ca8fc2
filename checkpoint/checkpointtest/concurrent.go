package checkpointtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
)

// quick are options whose delays suit a test.
var quick = &checkpoint.Options{FirstDelay: time.Millisecond, MaxDelay: 20 * time.Millisecond}

// acks collects the entries that writers were told to be in the log.
type acks struct {
	mu  sync.Mutex
	all []*checkpoint.Entry
}

func (a *acks) add(e *checkpoint.Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, e)
}

// draft appends to whatever the head is, under its epoch.
func draft(head *checkpoint.Entry) (checkpoint.Draft, error) {
	return checkpoint.Draft{Kind: checkpoint.Trim, Epoch: head.Epoch, Body: fmt.Appendf(nil, "%d", names.Add(1))}, nil
}

func claim(head *checkpoint.Entry) (checkpoint.Draft, error) {
	d := checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1, Body: []byte("{}")}
	if head != nil {
		d.Epoch = head.Epoch + 1
	}
	return d, nil
}

// P3: writers without an epoch of their own all get all their entries in, each at one
// slot.
func testConcurrentWriters(t *testing.T, s *suite) {
	store := checkpoint.New(s.d, quick)
	if _, err := store.Log(s.task).Append(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	var acked acks
	var wg sync.WaitGroup
	for range s.Writers {
		wg.Go(func() {
			log := store.Log(s.task)
			for range s.Appends {
				e, err := log.Append(t.Context(), draft)
				if err != nil {
					t.Error(err)
					return
				}
				acked.add(e)
			}
		})
	}
	wg.Wait()

	head := s.checkHistory(t, acked.all)
	if want := uint64(s.Writers*s.Appends + 1); head.Slot != want {
		t.Errorf("head is at slot %d, want %d", head.Slot, want)
	}
}

// P4, I4: each owner claims, commits until it is fenced, and claims again.
func testConcurrentOwners(t *testing.T, s *suite) {
	store := checkpoint.New(s.d, quick)
	var acked acks
	var wg sync.WaitGroup
	for range s.Writers {
		wg.Go(func() {
			for range 3 {
				if err := own(t.Context(), store.Log(s.task), s.Appends/3+1, &acked); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s.checkHistory(t, acked.all)
}

// own is the life of an owner with up to n commits.
func own(ctx context.Context, log *checkpoint.Log, n int, acked *acks) error {
	e, err := log.Append(ctx, claim)
	if err != nil {
		return err
	}
	acked.add(e)
	epoch := e.Epoch
	for range n {
		e, err := log.Append(ctx, func(*checkpoint.Entry) (checkpoint.Draft, error) {
			return checkpoint.Draft{Kind: checkpoint.Commit, Epoch: epoch}, nil
		})
		if errors.Is(err, checkpoint.ErrFenced) {
			return nil
		}
		if err != nil {
			return err
		}
		acked.add(e)
	}
	return nil
}

// checkHistory reads the log and checks that its entries follow each other, that epochs
// grow by claims only, and that every acknowledged entry stands where it was said to.
func (s *suite) checkHistory(t *testing.T, acked []*checkpoint.Entry) *checkpoint.Entry {
	t.Helper()
	head, err := s.d.Head(t.Context(), s.task)
	if err != nil {
		t.Fatal(err)
	}
	first := uint64(1)
	if n := uint64(s.KeepsBodies); n > 0 && head.Slot > n {
		first = head.Slot - n + 1
	}

	log := map[uint64]*checkpoint.Entry{}
	for slot := first; slot <= head.Slot; slot++ {
		e, err := s.d.Get(t.Context(), s.task, slot)
		if err != nil {
			t.Fatalf("slot %d: %v", slot, err)
		}
		if before := log[slot-1]; before != nil {
			checkFollows(t, before, e)
		}
		log[slot] = e
	}
	for _, e := range acked {
		if got := log[e.Slot]; e.Slot > head.Slot || e.Slot >= first && got.Digest != e.Digest {
			t.Errorf("%s acknowledged at slot %d is not there", e.Kind, e.Slot)
		}
	}
	return head
}

func checkFollows(t *testing.T, before, e *checkpoint.Entry) {
	t.Helper()
	want := before.Epoch
	if e.Kind == checkpoint.Claim {
		want++
	}
	if e.Prev != before.Digest || e.Epoch != want || e.Time.Before(before.Time) {
		t.Errorf("slot %d (%s, epoch %d, %v) does not follow slot %d (%s, epoch %d, %v)",
			e.Slot, e.Kind, e.Epoch, e.Time, before.Slot, before.Kind, before.Epoch, before.Time)
	}
}

// P2: readers beside a writer never see the log get shorter, nor behind what was
// acknowledged before they began to read.
func testHeadNeverGoesBack(t *testing.T, s *suite) {
	log := checkpoint.New(s.d, quick).Log(s.task)
	var acked atomic.Uint64
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			for last := uint64(0); ; {
				select {
				case <-done:
					return
				default:
				}
				at := max(last, acked.Load())
				e, err := s.d.Head(t.Context(), s.task)
				if errors.Is(err, fs.ErrNotExist) && at == 0 {
					continue
				}
				if err != nil || e.Slot < at {
					t.Errorf("head after slot %d: %+v, %v", at, e, err)
					return
				}
				last = e.Slot
			}
		})
	}

	decide := claim
	for range s.Writers * s.Appends {
		e, err := log.Append(t.Context(), decide)
		if err != nil {
			t.Error(err)
			break
		}
		acked.Store(e.Slot)
		decide = draft
	}
	close(done)
	wg.Wait()
}
