package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"
)

// Log is the log of one task in the hands of one process. It hides retries, lost
// answers and races with other writers. Append, Resolve and Trim take turns when called
// at once; Head may run beside them.
type Log struct {
	driver Driver
	opts   Options
	task   TaskID

	turn chan struct{} // holds a token while a writing method runs; guards pending and sent

	// pending is the entry on its way: after ErrUnknown the one whose outcome is not
	// known. sent says that a try of it may have reached the store.
	pending *Entry
	sent    bool

	mu struct { // guards the newest entry known; nothing is read or sent under it
		sync.Mutex
		head *Entry
		read time.Time
	}
}

// headFresh is how long Append builds on the head it remembers. A far older one is
// harmless but may meet names that were trimmed meanwhile, which fences an owner that
// nobody replaced.
const headFresh = time.Hour

// Draft is what a caller wants the next entry to be.
type Draft struct {
	Kind  Kind
	Epoch uint64 // of a claim: the head's plus 1; else the writer's own
	Body  []byte // the state after the entry: one JSON value, or nil
}

// Head reads the newest entry. A task without a log is fs.ErrNotExist.
func (l *Log) Head(ctx context.Context) (*Entry, error) {
	e, err := l.readHead(ctx)
	return e, wrap("read head", l.task, err)
}

// Get reads the entry at a slot. One that is no longer kept is fs.ErrNotExist. Nothing
// below the head is state: use it for what an entry was, not for what is.
func (l *Log) Get(ctx context.Context, slot uint64) (*Entry, error) {
	e, err := l.driver.Get(ctx, l.task, slot)
	if err != nil {
		err = fmt.Errorf("slot %d: %w", slot, err)
	}
	return e, wrap("read entry", l.task, err)
}

// Append adds one entry to the log. decide builds it from the head, which is nil for an
// empty log; when another writer comes first it is asked again with the new head. An
// error of decide ends Append and is returned within an *Error.
//
// The first entry of a log is a claim, and a claim's epoch is the head's plus 1. A draft
// whose epoch is below the head's is ErrFenced. When the outcome of a try is unknown,
// Append tries on until ctx ends, then returns ErrUnknown; the next Append first finds
// out what became of that entry, and appends nothing before it knows.
func (l *Log) Append(ctx context.Context, decide func(head *Entry) (Draft, error)) (*Entry, error) {
	done, err := l.take(ctx)
	if err != nil {
		return nil, wrap("append", l.task, err)
	}
	defer done()

	if _, err := l.settle(ctx); err != nil && !errors.Is(err, ErrFenced) {
		return nil, wrap("append", l.task, err)
	}
	e, err := l.append(ctx, decide)
	return e, wrap("append", l.task, err)
}

// Resolve finds out what became of an append that ended with ErrUnknown: it returns the
// entry if it is in the log, which Resolve itself may bring about, and nil if it is
// not and never will be, or if nothing is unresolved. While it cannot tell, it returns
// ErrUnknown. ErrFenced means that the entry is not known to be in the log (P3.4):
// nothing that it names may be deleted because of that.
func (l *Log) Resolve(ctx context.Context) (*Entry, error) {
	done, err := l.take(ctx)
	if err != nil { // another call is at it
		return nil, wrap("resolve", l.task, fmt.Errorf("%w: %w", ErrUnknown, err))
	}
	defer done()

	e, err := l.settle(ctx)
	return e, wrap("resolve", l.task, err)
}

// Trim removes old entries as far as the driver sees fit (P2).
func (l *Log) Trim(ctx context.Context) error {
	return wrap("trim log", l.task, l.driver.Trim(ctx, l.task))
}

// take waits for the turn to write. A turn that is free is taken even if ctx has ended, so
// that what is said of a pending entry does not depend on chance.
func (l *Log) take(ctx context.Context) (done func(), err error) {
	done = func() { <-l.turn }
	select {
	case l.turn <- struct{}{}:
		return done, nil
	default:
	}

	select {
	case l.turn <- struct{}{}:
		return done, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// append is the loop of P3 around decide: a lost race costs a turn of it.
func (l *Log) append(ctx context.Context, decide func(head *Entry) (Draft, error)) (*Entry, error) {
	head, err := l.startingHead(ctx)
	wait := newBackoff(l.opts)

	for ; err == nil; head, err = l.headOrNil(ctx) {
		e, err := l.next(head, decide)
		if err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err // before anything was sent
		}
		l.pending, l.sent = e, false
		committed, err := l.settle(ctx)
		if committed != nil {
			return committed, nil
		}
		lostRace := err == nil || e.Kind == Claim && errors.Is(err, ErrFenced)
		if !lostRace {
			return nil, err
		}
		if err := wait.sleep(ctx); err != nil {
			return nil, err
		}
	}
	return nil, err
}

// next lets decide build the entry after head and checks what the log itself asks of it.
func (l *Log) next(head *Entry, decide func(head *Entry) (Draft, error)) (*Entry, error) {
	if head != nil && !head.Kind.Known() {
		return nil, fmt.Errorf("%w: slot %d is of kind %q, written by a newer program", ErrUnsupported, head.Slot, head.Kind)
	}
	d, err := decide(head)
	if err != nil {
		return nil, err
	}
	if err := checkDraft(head, d); err != nil {
		return nil, err
	}

	e := &Entry{Kind: d.Kind, Slot: 1, Nonce: NewNonce(), Epoch: d.Epoch, Time: time.Now().UTC(), Body: bytes.TrimSpace(d.Body)}
	if head != nil {
		e.Slot, e.Prev = head.Slot+1, head.Digest
		e.Time = later(e.Time, head.Time)
	}
	if _, err := Encode(e); err != nil {
		return nil, err
	}
	return e, nil
}

// checkDraft holds the epoch rule (P3, P4). An owner appends under its own epoch, so
// one that was replaced finds itself below the head's.
func checkDraft(head *Entry, d Draft) error {
	var epoch uint64
	if head != nil {
		epoch = head.Epoch
	}
	want := epoch
	if d.Kind == Claim {
		want++
	}

	switch {
	case !d.Kind.Known():
		return fmt.Errorf("draft of kind %.40q: %w", d.Kind, fs.ErrInvalid)
	case d.Epoch < epoch:
		return fmt.Errorf("%w: epoch %d, the head has %d", ErrFenced, d.Epoch, epoch)
	case d.Kind != Claim && head == nil:
		return fmt.Errorf("%s in an empty log, the first entry is a claim: %w", d.Kind, fs.ErrInvalid)
	case d.Kind == Claim && d.Epoch == epoch && head != nil:
		return fmt.Errorf("%w: claim of epoch %d, the head has it already", ErrFenced, d.Epoch)
	case d.Epoch != want:
		return fmt.Errorf("%s of epoch %d, must be %d: %w", d.Kind, d.Epoch, want, fs.ErrInvalid)
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// settle sends the pending entry until its fate is known (P3.5) and forgets it then.
// It returns the entry if it is in the log, nil if another took its slot, and an error
// that is ErrUnknown as long as the fate is not known.
func (l *Log) settle(ctx context.Context) (*Entry, error) {
	e := l.pending
	if e == nil {
		return nil, nil
	}
	wait := newBackoff(l.opts)
	for {
		err := l.driver.Append(ctx, l.task, e)
		switch {
		case err == nil:
			l.pending = nil
			l.remember(e)
			return e, nil
		case errors.Is(err, ErrConflict):
			l.pending = nil
			return nil, nil
		case errors.Is(err, ErrFenced):
			l.pending = nil
			return nil, fmt.Errorf("slot %d: %w", e.Slot, err)
		case !l.sent && changedNothing(err):
			l.pending = nil
			return nil, fmt.Errorf("slot %d: %w", e.Slot, err)
		}

		l.sent = true
		if lasting(err) || wait.sleep(ctx) != nil {
			return nil, fmt.Errorf("%w: %s at slot %d: %w", ErrUnknown, e.Kind, e.Slot, err)
		}
	}
}

// changedNothing reports the errors with which a driver promises that the call that
// returned them changed nothing. Earlier calls may have.
func changedNothing(err error) bool { return errors.Is(err, ErrNoEffect) }

// lasting reports errors that waiting does not cure.
func lasting(err error) bool {
	return changedNothing(err) || errors.Is(err, ErrCorrupt) || errors.Is(err, ErrUnsupported) || errors.Is(err, ErrClosed) || errors.Is(err, fs.ErrPermission)
}

// startingHead returns the head to build the first draft on: the one that is remembered
// while it is fresh, else the newest. A wrong guess costs a conflict.
func (l *Log) startingHead(ctx context.Context) (*Entry, error) {
	l.mu.Lock()
	head, read := l.mu.head, l.mu.read
	l.mu.Unlock()
	if head != nil && time.Since(read) < headFresh {
		return head, nil
	}
	return l.headOrNil(ctx)
}

// headOrNil reads the head; nil stands for an empty log.
func (l *Log) headOrNil(ctx context.Context) (*Entry, error) {
	head, err := l.readHead(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return head, err
}

// readHead reads the newest entry and remembers it. A log never gets shorter, so an
// entry older than the one remembered before the read is a store that lost data.
func (l *Log) readHead(ctx context.Context) (*Entry, error) {
	l.mu.Lock()
	known := l.mu.head
	l.mu.Unlock()

	e, err := l.driver.Head(ctx, l.task)
	switch {
	case err != nil && known != nil && errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: log is gone, slot %d was its head", ErrCorrupt, known.Slot)
	case err != nil:
		return nil, err
	case known != nil && e.Slot < known.Slot:
		return nil, fmt.Errorf("%w: log went back from slot %d to %d", ErrCorrupt, known.Slot, e.Slot)
	case known != nil && e.Slot == known.Slot && e.Digest != known.Digest:
		return nil, fmt.Errorf("%w: slot %d is not the entry it was", ErrCorrupt, e.Slot)
	}
	l.remember(e)
	return e, nil
}

// remember keeps e as the newest entry known, unless a newer one is.
func (l *Log) remember(e *Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.head == nil || e.Slot >= l.mu.head.Slot {
		l.mu.head, l.mu.read = e, time.Now()
	}
}
