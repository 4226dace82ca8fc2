package snapferry

import (
	"context"
	"errors"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/head"
)

// transition makes the state after an entry, which will stand at slot, of the one before.
type transition func(s *head.State, slot uint64) (*head.State, error)

// append makes the state that next returns the new head, and returns the heads before
// and after. next is asked again each time somebody else's entry came between; put
// stores segments of a long head, nil does it outside of any attempt.
func (v *view) append(ctx context.Context, kind checkpoint.Kind, next transition, put func([]byte) (head.Ref, error)) (before, after *head.Loaded, err error) {
	decide := func(e *checkpoint.Entry) (d checkpoint.Draft, err error) {
		if before, err = v.decode(ctx, e); err != nil {
			return d, err
		}
		slot := uint64(1)
		if e != nil {
			slot = e.Slot + 1
		}
		s, err := next(before.State, slot)
		if err != nil {
			return d, err
		}
		write := put
		if write == nil {
			write = v.segmentWriter(ctx, s.Epoch)
		}
		d.Kind, d.Epoch = kind, s.Epoch
		d.Body, after, err = before.Encode(s, write)
		return d, err
	}
	err = v.onHead(ctx, func() error {
		_, err := v.log.Append(ctx, decide)
		return err
	})
	return before, after, err
}

// amend appends an entry that needs no ownership: it keeps the epoch it finds.
func (v *view) amend(ctx context.Context, kind checkpoint.Kind, next transition) error {
	_, _, err := v.append(ctx, kind, func(s *head.State, slot uint64) (*head.State, error) {
		if s.Epoch == 0 {
			return nil, ErrNotFound // no log, and so nothing to amend
		}
		return next(s, slot)
	}, nil)
	return err
}

// segmentWriter stores segments of the head outside of any attempt, each under a name
// that nobody else uses: a draft that lost its slot leaves none that another may name.
func (v *view) segmentWriter(ctx context.Context, epoch uint64) func([]byte) (head.Ref, error) {
	return func(data []byte) (head.Ref, error) {
		ref := head.Ref{Key: head.NewAttempt(epoch, head.NoOwner).String() + "/1", Digest: frame.Digest(data)}
		return ref, v.blobs.Put(ctx, blobPrefix(v.id)+ref.Key, blob.Bytes(data), blob.PutOptions{})
	}
}

// errOldHead: a segment that an entry names is gone. Of the newest entry that is damage,
// of any other it says no more than that the entry is old (P2).
var errOldHead = errors.New("the head is not complete")

// onHead runs an append, again when the head that it was built on turns out to be old.
func (v *view) onHead(ctx context.Context, add func() error) error {
	for try := 0; ; try++ {
		err := add()
		if !errors.Is(err, errOldHead) || try == 4 {
			return err
		}
		if _, _, err := v.head(ctx); err != nil { // reads the newest, and tells if that is damaged
			return err
		}
	}
}
