package snapferry

import (
	"errors"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
)

// Decision 0001: a commit lands, its answer is lost, somebody else's entry follows, the
// commit's name is removed and a leftover takes it. The owner then finds its slot taken
// by another, and yet its commit is in the log: it must say so, and delete nothing. The
// search found this.
func TestCommitLandedUnderALostName(t *testing.T) {
	mem := memblob.New()
	d := &hookDriver{Driver: mem}
	w := newWorldOn(t, d)
	w.write(map[string]string{"a": "alpha"})
	task := w.open()
	w.mustCommit(task, nil)
	w.write(map[string]string{"a": "ALPHA"})

	lost := false
	d.after = func(key string, err error) error {
		if lost || err != nil || !strings.Contains(key, "/log/") {
			return err
		}
		lost = true
		w.follow(key)
		return blob.Retriable(errors.New("no answer"))
	}
	rep := w.mustCommit(task, nil)
	if !lost {
		t.Fatal("no commit was lost")
	}
	if c := w.state().Latest(); c == nil || c.ID != rep.Checkpoint {
		t.Fatalf("latest is %+v, committed %s", c, rep.Checkpoint)
	}
	w.wantSound()
	w.write(map[string]string{"a": "gamma"})
	if next := w.mustCommit(task, nil); next.Sequence != rep.Sequence+1 {
		t.Fatalf("sequence %d after %d", next.Sequence, rep.Sequence)
	}
}

// follow appends an entry after the one at key, and puts another one in its place.
func (w *world) follow(key string) {
	ctx := w.t.Context()
	v := &view{id: kvTask, blobs: w.blobs, log: w.cps.Log(kvTask)}
	err := v.amend(ctx, checkpoint.Void, func(s *head.State, _ uint64) (*head.State, error) { return s, nil })
	check(w.t, err)
	check(w.t, w.blobs.Delete(ctx, []string{key}))
	e, err := v.log.Head(ctx)
	check(w.t, err)
	left := &checkpoint.Entry{Kind: checkpoint.Void, Slot: e.Slot - 1, Prev: e.Digest, Nonce: checkpoint.NewNonce(), Epoch: e.Epoch, Time: e.Time, Body: []byte("{}")}
	data, err := checkpoint.Encode(left)
	check(w.t, err)
	check(w.t, w.blobs.Put(ctx, key, blob.Bytes(data), blob.PutOptions{}))
}
