package blobcp_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/checkpoint"
)

var errNetwork = errors.New("no answer")

// lateWorld is a world in which the first owner's second PUT is on its way: its sender
// saw no answer, nor any to what it tried after that.
type lateWorld struct {
	*world
	puts  *puts
	log   *checkpoint.Log
	claim *checkpoint.Entry
	land  func() error // lets the PUT arrive
}

func newLateWorld(t *testing.T) *lateWorld {
	w := &lateWorld{world: newWorld(t)}
	w.puts = &puts{clock: w.clock}
	w.log = w.world.log(w.puts)
	w.claim = w.world.claim(w.log)
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	w.puts.on(func(n int, put func() error) error {
		switch n {
		case 0:
			w.land = put
		case 3:
			giveUp()
		}
		return errNetwork
	})
	_, err := w.log.Append(ctx, decide(checkpoint.Commit, 1))
	w.wantErr("commit without an answer", err, checkpoint.ErrUnknown, errNetwork)
	if w.land == nil {
		t.Fatal("nothing was sent")
	}
	w.puts.on(nil)
	return w
}

// P3.5, F3: the late PUT lands; Resolve says so, and then has nothing more to say.
func TestLatePutLandsThenResolve(t *testing.T) {
	w := newLateWorld(t)
	if err := w.land(); err != nil {
		t.Fatal(err)
	}
	e, err := w.log.Resolve(t.Context())
	if err != nil || e == nil {
		t.Fatalf("resolve: %v, %v", e, err)
	}
	w.wantHistory(w.claim, e)
	if e, err := w.log.Resolve(t.Context()); e != nil || err != nil {
		t.Errorf("resolve again: %v, %v", e, err)
	}
	w.wantHistory(e, w.add(w.log, 1))
}

// P3.5: nothing has landed; Resolve takes the slot itself, and the late PUT finds it taken.
func TestResolveTakesTheSlot(t *testing.T) {
	w := newLateWorld(t)
	e, err := w.log.Resolve(t.Context())
	if err != nil || e == nil {
		t.Fatalf("resolve: %v, %v", e, err)
	}
	if err := w.land(); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("late PUT: %v", err)
	}
	w.wantHistory(w.claim, e)
}

// P3.5, P4: another owner takes the slot; the outcome is then known, and stays so when
// the late PUT comes.
func TestResolveSeesTheSlotTaken(t *testing.T) {
	w := newLateWorld(t)
	claim := w.world.claim(w.world.log())
	e, err := w.log.Resolve(t.Context())
	if err != nil || e != nil {
		t.Fatalf("resolve: %v, %v", e, err)
	}
	if err := w.land(); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("late PUT: %v", err)
	}
	w.wantHistory(w.claim, claim)
	_, err = w.log.Append(t.Context(), decide(checkpoint.Commit, 1))
	w.wantErr("next commit", err, checkpoint.ErrFenced)
}

// P3.5, P4: the late PUT lands after the slot was taken, superseded and removed; nobody
// takes it for state, and the log of its sender does not claim it either.
func TestLatePutLandsOnAReusedName(t *testing.T) {
	w := newLateWorld(t)
	b := w.world.log()
	w.world.claim(b)
	head := w.add(b, 2)
	w.aDayLater()
	if err := w.land(); err != nil {
		t.Fatalf("late PUT: %v", err)
	}
	e, err := w.log.Resolve(t.Context())
	if e != nil || !errors.Is(err, checkpoint.ErrFenced) {
		t.Fatalf("resolve: %v, %v", e, err)
	}
	w.wantHistory(head, w.add(b, 2))
}

// P3.5: while the outcome is unknown no other entry is sent; the next Append settles it
// first and then decides on the head that it made.
func TestNextAppendSettlesFirst(t *testing.T) {
	w := newLateWorld(t)
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	w.puts.on(func(int, func() error) error {
		giveUp()
		return errNetwork
	})
	_, err := w.log.Append(ctx, func(*checkpoint.Entry) (checkpoint.Draft, error) {
		t.Error("decided while an outcome was unknown")
		return checkpoint.Draft{}, errNetwork
	})
	w.wantErr("append while unknown", err, checkpoint.ErrUnknown)
	_, err = w.log.Resolve(ctx)
	w.wantErr("resolve while unknown", err, checkpoint.ErrUnknown)

	w.puts.on(nil)
	var on uint64
	e, err := w.log.Append(t.Context(), func(head *checkpoint.Entry) (checkpoint.Draft, error) {
		on = head.Slot
		return decide(checkpoint.Commit, 1)(head)
	})
	if err != nil || on != 2 || e.Slot != 3 {
		t.Fatalf("decided on slot %d, appended %+v, %v", on, e, err)
	}
}

// P3.5: a claim whose answers are lost is one claim, under one epoch.
func TestClaimWithLostAnswers(t *testing.T) {
	w := newWorld(t)
	p := &puts{clock: w.clock}
	p.on(func(n int, put func() error) error {
		if err := put(); n == 0 || err == nil {
			return errNetwork
		}
		return fs.ErrExist
	})
	e := w.claim(w.log(p))
	if e.Epoch != 1 || len(w.history()) != 1 {
		t.Errorf("claim has epoch %d in a log of %d", e.Epoch, len(w.history()))
	}
}

// A refusal of the only try is an answer: nothing is in the log, nothing is unknown.
func TestRefusalIsDefinite(t *testing.T) {
	for _, refusal := range []error{blob.ErrNoEffect, fmt.Errorf("disk full: %w", blob.ErrNoEffect)} {
		t.Run(refusal.Error(), func(t *testing.T) { testRefusalIsDefinite(t, refusal) })
	}
}

func testRefusalIsDefinite(t *testing.T, refusal error) {
	w := newWorld(t)
	p := &puts{clock: w.clock}
	l := w.log(p)
	w.claim(l)
	p.on(func(int, func() error) error { return refusal })
	_, err := l.Append(t.Context(), decide(checkpoint.Commit, 1))
	w.wantErr("refused commit", err, refusal)
	if errors.Is(err, checkpoint.ErrUnknown) {
		t.Errorf("refused commit is unknown: %v", err)
	}
	if e, err := l.Resolve(t.Context()); e != nil || err != nil {
		t.Errorf("resolve: %v, %v", e, err)
	}
}

// A refusal after a try without an answer says nothing about that try: be it the blob
// store that tried twice, or the log.
func TestRefusalAfterALostAnswer(t *testing.T) {
	for name, lost := range map[string]error{"tried by the blob store": blob.Retriable(errNetwork), "tried by the log": errNetwork} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := &puts{clock: w.clock}
			l := w.log(p)
			claim := w.claim(l)
			p.on(func(n int, put func() error) error {
				if n == 0 {
					return errors.Join(lost, put())
				}
				return blob.ErrNoEffect
			})
			_, err := l.Append(t.Context(), decide(checkpoint.Commit, 1))
			w.wantErr("refused the second time", err, checkpoint.ErrUnknown)

			p.on(nil)
			e, err := l.Resolve(t.Context())
			if err != nil || e == nil {
				t.Fatalf("resolve: %v, %v", e, err)
			}
			w.wantHistory(claim, e)
		})
	}
}

// A LIST that is refused after the PUT is no refusal of the PUT: the append goes on (P3.4).
func TestRefusedCheckIsNotRefusal(t *testing.T) {
	w := newWorld(t)
	f := blobtest.NewFaults(w.clock, blobtest.On(blobtest.OpList, ""))
	l := w.log(f)
	claim := w.claim(l)
	f.FailAt(0, blob.ErrNoEffect)
	e := w.add(l, 1)
	if !f.Fired() {
		t.Error("nothing was refused")
	}
	w.wantHistory(claim, e)
}

// A context that has ended before anything was sent leaves nothing unknown.
func TestCancelledBeforeSending(t *testing.T) {
	w := newWorld(t)
	l := w.log()
	w.claim(l)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := l.Append(ctx, func(*checkpoint.Entry) (checkpoint.Draft, error) {
		cancel()
		return checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 1}, nil
	})
	w.wantErr("commit", err, context.Canceled)
	if errors.Is(err, checkpoint.ErrUnknown) || len(w.history()) != 1 {
		t.Errorf("error %v, %d entries", err, len(w.history()))
	}
}
