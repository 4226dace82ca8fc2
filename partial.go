package snapferry

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
)

// keepWorth is how much must have been sent for the progress of an upload that is
// given up to be worth keeping.
const keepWorth = 64 << 20

// keeper is the recorded progress of an upload (P5g): by which attempt, and which
// chunks it names. It begins with what an interrupted upload left.
type keeper struct {
	attempt string
	chunks  []snapshot.StoredChunk
	bytes   int64     // stored bytes of this attempt at the last record
	at      time.Time // of the last record
	running bool
}

// keepProgress records the progress of an upload that has run long enough since it
// began or was last recorded. One record is made at a time.
func (a *attempt) keepProgress(ctx context.Context) error {
	_, stored := a.packer.durable()
	o := &a.task.opts
	a.mu.Lock()
	since := a.kept.at
	if since.IsZero() {
		since = a.began
	}
	due := !a.kept.running && (stored-a.kept.bytes >= o.PartialBytes || time.Since(since) >= o.PartialAfter)
	if due {
		a.kept.running = true
	}
	a.mu.Unlock()
	if !due {
		return nil
	}
	err := a.record(ctx)
	a.mu.Lock()
	a.kept.running = false
	a.kept.at = time.Now()
	a.mu.Unlock()
	if err == nil || undecided(err) || ctx.Err() != nil {
		return err
	}
	// The upload needs no record of itself; it is tried again later.
	a.warn("", fmt.Sprintf("progress not recorded, an interruption now would start over: %v", err))
	return nil
}

// record makes permanent what was sent, names it in a list, and the list in the log.
// Whoever uploads next may borrow from it; the next commit drops it.
func (a *attempt) record(ctx context.Context) error {
	t := a.task
	sent, stored := a.packer.durable()
	chunks := slices.Concat(a.resumed(), sent)
	data, list, err := snapshot.EncodeChunks(chunks)
	if err != nil {
		return err
	}
	ref, err := a.putRef(ctx, data)
	if err != nil {
		return err
	}
	ref.Digest = list.Digest.String()
	a.mu.Lock()
	a.lists = append(a.lists, blobPrefix(t.id)+ref.Key)
	a.mu.Unlock()
	if err := a.seal(ctx); err != nil {
		return err
	}
	p := head.Partial{Attempt: a.String(), Chunks: ref, Bytes: stored}
	err = t.append(ctx, checkpoint.Partial, func(s *head.State, _ uint64) (*head.State, error) {
		return s.KeepPartial(a.Attempt, p, a.kept.attempt)
	}, nil)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.kept = keeper{attempt: p.Attempt, chunks: chunks, bytes: stored, at: time.Now(), running: a.kept.running}
	return nil
}

// resumed returns the chunks of an earlier attempt that are in use here.
func (a *attempt) resumed() []snapshot.StoredChunk {
	a.mu.Lock()
	defer a.mu.Unlock()
	own := blobPrefix(a.task.id) + a.String() + "/"
	return slices.DeleteFunc(slices.Clone(a.kept.chunks), func(c snapshot.StoredChunk) bool {
		return len(c.Blob) > len(own) && c.Blob[:len(own)] == own
	})
}

// keepAfterAll records the progress of an upload that was interrupted from outside, so
// that the next one goes on where it was. It reports whether that worked.
func (t *Task) keepAfterAll(ctx context.Context, a *attempt) bool {
	if ctx.Err() == nil || a.packer == nil {
		return false
	}
	_, stored := a.packer.durable()
	if stored-a.kept.bytes < t.opts.keepWorth {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.opts.abandonTime)
	defer cancel()
	if err := a.record(ctx); err != nil {
		return false
	}
	a.warn("", "what was uploaded so far is kept; the next backup goes on from there")
	return true
}
