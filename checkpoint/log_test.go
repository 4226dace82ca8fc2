package checkpoint_test

import (
	"context"
	"errors"
	"io/fs"
	"testing"
	"testing/synctest"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
)

var task = checkpoint.TaskID{Job: "orders", Task: "p7"}

func newStore() (*checkpoint.Store, checkpoint.Driver) {
	d := blobcp.New(blob.New(memblob.New(), nil), "repo-1")
	return checkpoint.New(d, &checkpoint.Options{FirstDelay: time.Millisecond}), d
}

// draft decides on what it is, whatever the head is.
func draft(kind checkpoint.Kind, epoch uint64) func(*checkpoint.Entry) (checkpoint.Draft, error) {
	return func(*checkpoint.Entry) (checkpoint.Draft, error) {
		return checkpoint.Draft{Kind: kind, Epoch: epoch, Body: []byte(" {} \n")}, nil
	}
}

// appendAll appends drafts that must work and returns the last entry.
func appendAll(t *testing.T, l *checkpoint.Log, drafts ...checkpoint.Draft) *checkpoint.Entry {
	t.Helper()
	var last *checkpoint.Entry
	for _, d := range drafts {
		e, err := l.Append(t.Context(), draft(d.Kind, d.Epoch))
		if err != nil {
			t.Fatal(err)
		}
		last = e
	}
	return last
}

// P1: entries are numbered from 1, name the one before, and carry the body as given.
func TestAppend(t *testing.T) {
	s, d := newStore()
	l := s.Log(task)
	if _, err := l.Head(t.Context()); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("head of an empty log: %v", err)
	}
	first := appendAll(t, l, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1})
	second := appendAll(t, l, checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 1})
	if first.Slot != 1 || first.Prev != "" || second.Slot != 2 || second.Prev != first.Digest {
		t.Errorf("entries %+v and %+v do not follow", first, second)
	}

	got, err := d.Get(t.Context(), task, 2)
	if err != nil || got.Nonce != second.Nonce || string(got.Body) != "{}" || got.Kind != checkpoint.Commit || got.Epoch != 1 {
		t.Errorf("stored %+v, %v", got, err)
	}
	if got, err := l.Get(t.Context(), 1); err != nil || got.Digest != first.Digest {
		t.Errorf("slot 1: %+v, %v", got, err)
	}
	if _, err := l.Get(t.Context(), 3); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("slot 3: %v", err)
	}
}

// P3, P4: what epoch a draft may have. Nothing that is refused reaches the log.
func TestEpochRule(t *testing.T) {
	for _, c := range []struct {
		name  string
		empty bool // else the head is of epoch 2
		draft checkpoint.Draft
		want  error
	}{
		{"commit of the head's epoch", false, checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 2}, nil},
		{"commit of an older owner", false, checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 1}, checkpoint.ErrFenced},
		{"trim of an older epoch", false, checkpoint.Draft{Kind: checkpoint.Trim, Epoch: 1}, checkpoint.ErrFenced},
		{"commit of an unclaimed epoch", false, checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 3}, fs.ErrInvalid},
		{"next claim", false, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 3}, nil},
		{"claim of the head's epoch", false, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 2}, checkpoint.ErrFenced},
		{"claim of an older epoch", false, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1}, checkpoint.ErrFenced},
		{"claim that leaves one out", false, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 4}, fs.ErrInvalid},
		{"unknown kind", false, checkpoint.Draft{Kind: "merge", Epoch: 2}, fs.ErrInvalid},
		{"first claim", true, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1}, nil},
		{"first claim with epoch 0", true, checkpoint.Draft{Kind: checkpoint.Claim}, fs.ErrInvalid},
		{"commit without a claim", true, checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 1}, fs.ErrInvalid},
		{"commit without a claim or epoch", true, checkpoint.Draft{Kind: checkpoint.Commit}, fs.ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, d := newStore()
			slots := uint64(0)
			if !c.empty {
				slots = appendAll(t, s.Log(task), checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1}, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 2}).Slot
			}
			_, err := s.Log(task).Append(t.Context(), draft(c.draft.Kind, c.draft.Epoch))
			if !errors.Is(err, c.want) {
				t.Fatalf("got error %v, want %v", err, c.want)
			}
			if err == nil {
				slots++
			}
			if _, err := d.Get(t.Context(), task, slots+1); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("slot %d: %v", slots+1, err)
			}
		})
	}
}

// The error of decide comes back, with the operation and the task, and nothing is sent.
func TestDecideFails(t *testing.T) {
	s, _ := newStore()
	l := s.Log(task)
	mine := errors.New("base is gone")
	_, err := l.Append(t.Context(), func(head *checkpoint.Entry) (checkpoint.Draft, error) {
		if head != nil {
			t.Errorf("head of an empty log is %+v", head)
		}
		return checkpoint.Draft{}, mine
	})
	if !errors.Is(err, mine) || err.Error() != "append orders/p7: base is gone" {
		t.Errorf("got %v", err)
	}
	if _, err := l.Head(t.Context()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("head: %v", err)
	}
}

// P1: a head of an unknown kind can be read, but nothing is appended to it.
func TestUnknownKind(t *testing.T) {
	s, d := newStore()
	head := appendAll(t, s.Log(task), checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1})
	newer := &checkpoint.Entry{Kind: "merge", Slot: 2, Prev: head.Digest, Nonce: checkpoint.NewNonce(), Epoch: 1, Time: head.Time}
	if err := d.Append(t.Context(), task, newer); err != nil {
		t.Fatal(err)
	}
	if e, err := s.Log(task).Head(t.Context()); err != nil || e.Kind != "merge" {
		t.Errorf("head %+v, %v", e, err)
	}
	for _, kind := range []checkpoint.Kind{checkpoint.Claim, checkpoint.Commit, checkpoint.Drop} {
		if _, err := s.Log(task).Append(t.Context(), draft(kind, 2)); !errors.Is(err, checkpoint.ErrUnsupported) {
			t.Errorf("%s: got error %v", kind, err)
		}
	}
}

// The stamped time never falls, whatever the clock of the writer says (P1).
func TestTimeNeverFalls(t *testing.T) {
	s, d := newStore()
	ahead := &checkpoint.Entry{Kind: checkpoint.Claim, Slot: 1, Nonce: checkpoint.NewNonce(), Epoch: 1, Time: time.Now().Add(24 * time.Hour).UTC()}
	if err := d.Append(t.Context(), task, ahead); err != nil {
		t.Fatal(err)
	}
	e := appendAll(t, s.Log(task), checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 1})
	if !e.Time.Equal(ahead.Time) {
		t.Errorf("stamped %v after %v", e.Time, ahead.Time)
	}
}

// An owner that was idle for long looks at the head before it appends: an entry of its own
// epoch that came and went meanwhile does not fence it.
func TestIdleOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d := newStore()
		owner := s.Log(task)
		appendAll(t, owner, checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1})
		appendAll(t, s.Log(task), checkpoint.Draft{Kind: checkpoint.Trim, Epoch: 1}, checkpoint.Draft{Kind: checkpoint.Trim, Epoch: 1})
		<-time.After(checkpoint.KeepSuperseded + time.Minute) // the bubble's clock
		if err := d.Trim(t.Context(), task); err != nil {
			t.Fatal(err)
		}
		if e := appendAll(t, owner, checkpoint.Draft{Kind: checkpoint.Commit, Epoch: 1}); e.Slot != 4 {
			t.Errorf("committed at slot %d", e.Slot)
		}
	})
}

// Appends of one Log take turns, and one that waits gives up with its context.
func TestAppendsTakeTurns(t *testing.T) {
	s, _ := newStore()
	l := s.Log(task)
	inside, release := make(chan struct{}), make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := l.Append(t.Context(), func(head *checkpoint.Entry) (checkpoint.Draft, error) {
			close(inside)
			<-release
			return draft(checkpoint.Claim, 1)(head)
		})
		done <- err
	}()
	<-inside
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Append(ctx, draft(checkpoint.Commit, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("second append: %v", err)
	}
	if _, err := l.Resolve(ctx); !errors.Is(err, context.Canceled) || !errors.Is(err, checkpoint.ErrUnknown) {
		t.Errorf("resolve: %v", err)
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestStore(t *testing.T) {
	s, _ := newStore()
	appendAll(t, s.Log(task), checkpoint.Draft{Kind: checkpoint.Claim, Epoch: 1})
	for got, err := range s.Tasks(t.Context()) {
		if err != nil || got != task {
			t.Errorf("task %v, %v", got, err)
		}
	}
	info, err := s.Info(t.Context())
	if err != nil || info.ID != "repo-1" {
		t.Errorf("info %+v, %v", info, err)
	}
	bad := s.Log(checkpoint.TaskID{Job: "..", Task: "x"})
	if _, err := bad.Head(t.Context()); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("head of an invalid task: %v", err)
	}
	if _, err := bad.Append(t.Context(), draft(checkpoint.Claim, 1)); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("append to an invalid task: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
