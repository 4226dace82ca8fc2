package blobcp_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/checkpoint"
)

type result struct {
	e   *checkpoint.Entry
	err error
}

// start runs an append beside the test.
func start(ctx context.Context, l *checkpoint.Log, decide func(*checkpoint.Entry) (checkpoint.Draft, error)) <-chan result {
	c := make(chan result, 1)
	go func() {
		e, err := l.Append(ctx, decide)
		c <- result{e, err}
	}()
	return c
}

// P4, I4: an owner that was paused before its PUT wakes after another has claimed. The
// slot is taken, and the head says who took over.
func TestPausedOwnerIsFenced(t *testing.T) {
	w := newWorld(t)
	hold := blobtest.NewHold(w.clock)
	a, b := w.log(hold), w.log()
	w.claim(a)
	gate := hold.Before(blobtest.On(blobtest.OpPut, slotKey(2)))
	late := start(t.Context(), a, decide(checkpoint.Commit, 1))
	<-gate.Reached()

	claim := w.claim(b)
	commit := w.add(b, 2)
	gate.Release()
	w.wantErr("commit of the old owner", (<-late).err, checkpoint.ErrFenced)
	w.wantHistory(claim, commit)
	_, err := a.Append(t.Context(), decide(checkpoint.Commit, 1))
	w.wantErr("its next commit", err, checkpoint.ErrFenced)
}

// P3.4, F2 (slatedb RFC-0026): the paused owner wakes after its slot's name was used and
// removed, so that its PUT succeeds. n says how far the log has gone on: the next
// slot may be there still, or be gone too.
func TestNameReuseCommit(t *testing.T) {
	for n := range 4 {
		t.Run(fmt.Sprintf("%d commits later", n), func(t *testing.T) {
			w := newWorld(t)
			hold := blobtest.NewHold(w.clock)
			a, b := w.log(hold), w.log()
			w.claim(a)
			gate := hold.Before(blobtest.On(blobtest.OpPut, slotKey(2)))
			late := start(t.Context(), a, decide(checkpoint.Commit, 1))
			<-gate.Reached()

			w.claim(b)
			head := w.add(b, 2)
			for range n {
				head = w.add(b, 2)
			}
			w.aDayLater()
			if _, err := w.mem.Stat(t.Context(), slotKey(2)); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("slot 2 was not removed: %v", err)
			}
			gate.Release()

			w.wantErr("late commit", (<-late).err, checkpoint.ErrFenced)
			if _, err := w.mem.Stat(t.Context(), slotKey(2)); err != nil {
				t.Fatalf("the late PUT did not land: %v", err)
			}
			w.wantHistory(head)
			w.wantHistory(head, w.add(b, 2))
		})
	}
}

// P3.4 holds for claims too: the search finds two owners of one epoch without it. The
// claim starts over and wins above the others.
func TestNameReuseClaim(t *testing.T) {
	w := newWorld(t)
	hold := blobtest.NewHold(w.clock)
	a, b := w.log(hold), w.log()
	gate := hold.Before(blobtest.On(blobtest.OpPut, slotKey(1)))
	late := start(t.Context(), a, decideClaim)
	<-gate.Reached()

	w.claim(b)
	head := w.add(b, 1)
	w.aDayLater()
	gate.Release()

	r := <-late
	if r.err != nil {
		t.Fatal(r.err)
	}
	if r.e.Epoch != 2 || r.e.Slot != 3 {
		t.Errorf("claim got epoch %d at slot %d, want 2 at 3", r.e.Epoch, r.e.Slot)
	}
	w.wantHistory(head, r.e)
	_, err := b.Append(t.Context(), decide(checkpoint.Commit, 1))
	w.wantErr("owner of epoch 1", err, checkpoint.ErrFenced)
}

// P3.3: what collides with an entry of the same epoch is decided again on the new head.
func TestCollisionDecidesAgain(t *testing.T) {
	w := newWorld(t)
	a, other := w.log(), w.log()
	w.claim(a)
	trim, err := other.Append(t.Context(), decide(checkpoint.Trim, 1))
	if err != nil {
		t.Fatal(err)
	}
	var heads []uint64
	e, err := a.Append(t.Context(), func(head *checkpoint.Entry) (checkpoint.Draft, error) {
		heads = append(heads, head.Slot)
		return decide(checkpoint.Commit, 1)(head)
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(heads) != 2 || heads[0] != 1 || heads[1] != 2 {
		t.Errorf("decided on heads %v, want 1 and 2", heads)
	}
	w.wantHistory(trim, e)
}

// P3.3: after a collision the head is read again; what lies at the slot may be a
// leftover and is never taken for state.
func TestCollisionWithLeftover(t *testing.T) {
	w := newWorld(t)
	hold := blobtest.NewHold(w.clock)
	a, b, c := w.log(hold), w.log(), w.log(hold)
	w.claim(a)
	if _, err := c.Head(t.Context()); err != nil {
		t.Fatal(err)
	}
	gates := []*blobtest.Gate{
		hold.Before(blobtest.On(blobtest.OpPut, slotKey(2))),
		hold.Before(blobtest.On(blobtest.OpPut, slotKey(2))),
	}
	commit := start(t.Context(), a, decide(checkpoint.Commit, 1))
	<-gates[0].Reached()
	claim := start(t.Context(), c, decideClaim)
	<-gates[1].Reached()

	w.claim(b)
	head := w.add(b, 2)
	w.aDayLater()
	gates[0].Release() // a's commit becomes a leftover at slot 2
	w.wantErr("late commit", (<-commit).err, checkpoint.ErrFenced)
	gates[1].Release() // and c finds it there
	r := <-claim
	if r.err != nil {
		t.Fatal(r.err)
	}
	if r.e.Epoch != 3 {
		t.Errorf("claim got epoch %d, want 3", r.e.Epoch)
	}
	w.wantHistory(head, r.e)
}

// P3.4: an entry whose answer was lost, and which another owner has built on, is in the
// log. Its owner is told so, and fenced with its next append.
func TestBuiltOnBeforeTheAnswer(t *testing.T) {
	w := newWorld(t)
	hold := blobtest.NewHold(w.clock)
	a, b := w.log(hold), w.log()
	w.claim(a)
	gate := hold.After(blobtest.On(blobtest.OpPut, slotKey(2)))
	late := start(t.Context(), a, decide(checkpoint.Commit, 1))
	<-gate.Reached()
	claim := w.claim(b)
	gate.Release()

	r := <-late
	if r.err != nil {
		t.Fatal(r.err)
	}
	w.wantHistory(r.e, claim)
	_, err := a.Append(t.Context(), decide(checkpoint.Commit, 1))
	w.wantErr("next commit", err, checkpoint.ErrFenced)
}

// P2, F17: listings that lag behind the writes are healed by reading forward.
func TestStaleListing(t *testing.T) {
	w := newWorld(t)
	stale := blobtest.NewStale(w.clock, 6)
	a, b := w.log(stale), w.log(stale)
	claim := w.claim(a)
	want := []*checkpoint.Entry{claim}
	for range 3 {
		want = append(want, w.add(a, 1))
	}
	want = append(want, w.claim(b))
	_, err := a.Append(t.Context(), decide(checkpoint.Commit, 1))
	w.wantErr("commit of the old owner", err, checkpoint.ErrFenced)
	want = append(want, w.add(b, 2))

	head, err := w.log(stale).Head(t.Context())
	if err != nil || head.Digest != want[len(want)-1].Digest {
		t.Errorf("head through a stale listing: %+v, %v", head, err)
	}
	w.wantHistory(want...)
}

// P2: a head that is listed, superseded and removed before it is read is not the end of
// the log.
func TestHeadRemovedWhileRead(t *testing.T) {
	w := newWorld(t)
	a := w.log()
	w.claim(a)
	hold := blobtest.NewHold(w.clock)
	gate := hold.Before(blobtest.On(blobtest.OpGet, slotKey(1)))
	c := make(chan result, 1)
	reader := w.log(hold)
	go func() {
		e, err := reader.Head(t.Context())
		c <- result{e, err}
	}()
	<-gate.Reached()
	var head *checkpoint.Entry
	for range 3 {
		head = w.add(a, 1)
	}
	w.aDayLater()
	gate.Release()
	if r := <-c; r.err != nil || r.e.Digest != head.Digest {
		t.Errorf("got %+v, %v", r.e, r.err)
	}
}
