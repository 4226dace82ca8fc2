package snapferry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
)

// publish makes the attempt a checkpoint (P5e).
func (p *Pending) publish(ctx context.Context) error { return p.land(ctx, (*attempt).commit) }

// prepare makes the attempt permanent before the application publishes it (P6).
func (p *Pending) prepare(ctx context.Context) error { return p.land(ctx, (*attempt).prepare) }

// land appends the entry of an attempt. Content that was pruned since it was chosen is
// uploaded again without that base, which makes another attempt.
func (p *Pending) land(ctx context.Context, enter func(*attempt, context.Context) error) error {
	for try := 0; ; try++ {
		err := enter(p.attempt, ctx)
		if errors.Is(err, head.ErrDone) { // an earlier try did it, and its answer was lost
			err = p.task.found(ctx, p.attempt)
		}
		if err == nil {
			return nil
		}
		if blobGone(err) {
			err = p.task.whyGone(ctx, p.attempt, err)
		}
		if undecided(err) {
			return err
		}
		p.task.abandon(ctx, p.attempt)
		again := errors.Is(err, ErrBaseGone) || errors.Is(err, ErrConflict) // or voided by an impatient gc
		if !again || try == 2 {
			return err
		}
		if err := p.task.reload(ctx); err != nil {
			return err
		}
		if err := p.upload(ctx); err != nil {
			return err
		}
	}
}

// found takes an attempt up that the head has, although no append was acknowledged.
func (t *Task) found(ctx context.Context, a *attempt) error {
	if err := t.reload(ctx); err != nil {
		t.stale = true
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	if t.opts.External == nil { // a prepare tells of no store to forget
		t.wasTold()
	} else {
		t.cleaned = nil
	}
	emit(t.opts.Observer.Published, Published{t.id, a.id, a.sequence, 0})
	a.saveCaches()
	return nil
}

// wasTold forgets what the entry that was appended last has told the log.
func (t *Task) wasTold() {
	t.forget, t.told, t.cleaned = t.forget[t.told:], 0, nil
}

// undecided tells whether what an entry names may be, or may yet become, part of the
// log: then nothing of the attempt is deleted (P3).
func undecided(err error) bool { return errors.Is(err, ErrUnknown) || errors.Is(err, ErrFenced) }

// entry is what the attempt asks of the head.
func (a *attempt) entry(slot uint64) *head.Commit {
	t := a.task
	t.told = len(t.forget)
	return &head.Commit{
		Attempt: a.Attempt, Checkpoint: a.done, Time: a.time, Borrows: a.borrows, Resumed: a.kept.attempt,
		Forget: t.forget, KeepLast: t.opts.KeepLast, Cleaned: t.cleaned, Slot: slot, Now: t.opts.now(),
	}
}

// writeSegment stores a segment of the head with the attempt's blobs; it is sealed at
// once, since the entry that names it comes next.
func (a *attempt) writeSegment(ctx context.Context) func([]byte) (head.Ref, error) {
	return func(data []byte) (head.Ref, error) {
		ref, err := a.putRef(ctx, data)
		if err != nil {
			return ref, err
		}
		return ref, a.seal(ctx)
	}
}

func (a *attempt) commit(ctx context.Context) error {
	t, start := a.task, time.Now()
	err := t.append(ctx, checkpoint.Commit, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Commit(a.entry(slot))
	}, a.writeSegment(ctx))
	if err != nil {
		return err
	}
	t.adopt(a)
	emit(t.opts.Observer.Published, Published{t.id, a.id, a.sequence, time.Since(start)})
	a.saveCaches()
	a.warnings = append(a.warnings, t.cleanUpQuietly(ctx, a.deleteLists, t.sweepDropped, t.log.Trim)...)
	return nil
}

// deleteLists deletes the records of the attempt's progress, which its commit has dropped.
func (a *attempt) deleteLists(ctx context.Context) error { return a.task.blobs.Delete(ctx, a.lists) }

// adopt makes a published attempt the base of the next.
func (t *Task) adopt(a *attempt) {
	for name, b := range a.indexes {
		t.bases[name] = b
	}
	for name, b := range t.bases { // forgotten, and so perhaps dropped
		if t.state.State.Find(b.checkpoint) == nil {
			delete(t.bases, name)
		}
	}
	t.upkeep.adopt(a, t.bases, t.state.State.Live())
	t.wasTold()
}

func (a *attempt) prepare(ctx context.Context) error {
	err := a.task.append(ctx, checkpoint.Prepare, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Prepare(a.entry(slot))
	}, a.writeSegment(ctx))
	if err != nil {
		return err
	}
	a.saveCaches()
	a.task.cleaned = nil
	return nil
}

// CleanUp tells that the application has published the checkpoint with this id. It
// becomes the newest one here too, what was prepared before it is dropped, and dead
// blobs are deleted (P6). It can be called again.
func (t *Task) CleanUp(ctx context.Context, id string) error {
	if err := t.enter(); err != nil {
		return wrap("clean up", t.id.String(), err)
	}
	defer t.leave()
	if t.opts.External == nil {
		return wrap("clean up", t.id.String(), errors.New("this task publishes its checkpoints with Commit, which cleans up too"))
	}
	err := t.resolve(ctx)
	if err == nil {
		err = t.confirm(ctx, id, true)
	}
	if err == nil {
		err = t.loadBases(ctx)
	}
	if err != nil {
		return wrap("clean up", id, err)
	}
	t.cleanUpQuietly(ctx, t.sweepDropped, t.log.Trim)
	return nil
}

// confirm appends that the application published id.
func (t *Task) confirm(ctx context.Context, id string, drop bool) error {
	err := t.append(ctx, checkpoint.Confirm, func(s *head.State, slot uint64) (*head.State, error) {
		if s.Epoch != t.epoch {
			return nil, fmt.Errorf("epoch %d: %w", t.epoch, ErrFenced)
		}
		t.told = len(t.forget)
		return s.Confirm(id, drop, t.forget, t.cleaned, t.opts.KeepLast, slot, t.opts.now())
	}, nil)
	if err == nil {
		t.wasTold()
	}
	return err
}

// resolve settles an append whose answer was lost, before anything else is begun (P3.5).
func (t *Task) resolve(ctx context.Context) error {
	e, err := t.log.Resolve(ctx)
	if err != nil {
		return err
	}
	if e != nil {
		t.stale = true
		if e.Kind == checkpoint.Commit || e.Kind == checkpoint.Confirm {
			t.wasTold()
		}
	}
	if !t.stale {
		return nil
	}
	return t.reload(ctx)
}

// whyGone explains that a blob is absent which this attempt wrote or builds on: it was
// swept, since a newer owner has the task or the attempt was given up for dead.
func (t *Task) whyGone(ctx context.Context, a *attempt, gone error) error {
	e, l, err := t.head(ctx)
	switch {
	case err != nil || e == nil:
		return errors.Join(gone, err)
	case e.Epoch != t.epoch:
		return fmt.Errorf("epoch %d, the task is at %d: %w (%v)", t.epoch, e.Epoch, ErrFenced, gone)
	case !l.State.CanCommit(a.Attempt):
		return fmt.Errorf("attempt %s was given up for dead: %w (%v)", a.Attempt, ErrConflict, gone)
	}
	return gone
}

// reload reads the head, whoever wrote it, and the snapshots to compare with. What a
// newer owner wrote is of no use here.
func (t *Task) reload(ctx context.Context) error {
	e, l, err := t.head(ctx)
	if err != nil {
		return err
	}
	if e != nil && e.Epoch != t.epoch {
		return fmt.Errorf("epoch %d, the task is at %d: %w", t.epoch, e.Epoch, ErrFenced)
	}
	t.state = l
	if err := t.loadBases(ctx); err != nil {
		return err
	}
	t.stale = false
	return nil
}

// abandon gives an attempt up that is known not to be, and never to become, a
// checkpoint: what no entry names of it is deleted. It runs to its end also when ctx
// was cancelled, which is how most attempts end.
func (t *Task) abandon(ctx context.Context, a *attempt) {
	if t.keepAfterAll(ctx, a) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.opts.abandonTime)
	defer cancel()
	err := t.resolve(ctx) // its progress may be on the way into the log
	if err == nil {
		err = t.deleteAttempt(ctx, a)
	}
	if err != nil {
		// The next Open or gc finds what is left: it can commit no more.
		a.warn("", fmt.Sprintf("abandoned upload not deleted yet: %v", err))
	}
}

// abandonTime bounds how long giving up may take.
const abandonTime = 15 * time.Second

// deleteAttempt deletes what an attempt wrote, unless the newest entry shows that it is in
// the log: a slot that holds another's entry is no proof that the attempt's was not
// there before (decision 0001). What its recorded progress names stays too.
func (t *Task) deleteAttempt(ctx context.Context, a *attempt) error {
	e, l, err := t.head(ctx)
	if err != nil || e == nil {
		return err
	}
	if e.Epoch != t.epoch || l.State.Names(a.Attempt) {
		return nil
	}
	named := map[string]bool{}
	if p := l.State.Partial; p != nil && p.Attempt == a.String() {
		if named, err = t.namedByHead(ctx, l); err != nil {
			return err
		}
	}
	var dead []string
	for info, err := range t.blobs.List(ctx, blobPrefix(t.id)+a.String()+"/", "") {
		if err != nil {
			return err
		}
		if !named[info.Key] {
			dead = append(dead, info.Key)
		}
	}
	slices.Reverse(dead) // index before chunks
	return t.blobs.Delete(ctx, dead)
}
