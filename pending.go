package snapferry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/snapferry/snapferry/source"
)

// frozen is the image of one store; a new walk replaces the image.
type frozen struct {
	name string
	img  source.Image
}

// Pending is a snapshot that was taken and not yet published. Commit does all that is
// left. Its methods must not be called at the same time.
type Pending struct {
	task    *Task
	sources map[string]source.Source
	images  []*frozen // by store name
	offsets map[string]string
	began   time.Time
	frozen  time.Duration
	attempt *attempt // after Upload
	ended   bool
}

// Frozen returns how long the caller had to stand still.
func (p *Pending) Frozen() time.Duration { return p.frozen }

// Commit uploads what changed, publishes the checkpoint and cleans up. When it
// returns nil the checkpoint is committed and will restore, whatever happens.
//
// ErrFenced: a newer owner has the task. ErrUnknown: the answer to the publishing
// step was lost and ctx ended; nothing was deleted, and the next Commit or Open finds
// out. After every other error the checkpoint was not published, and the task can
// commit the next. Trouble with cleaning up is a warning in the report.
func (p *Pending) Commit(ctx context.Context) (*CommitReport, error) {
	t := p.task
	if t.opts.External != nil {
		return nil, wrap("commit", t.id.String(), errors.New("this task publishes its checkpoints by itself: use Upload and CleanUp"))
	}
	if err := p.open(); err != nil {
		return nil, wrap("commit", t.id.String(), err)
	}
	err := p.upload(ctx)
	if err == nil {
		err = p.publish(ctx)
	}
	if err = p.finish(err); err != nil {
		emit(t.opts.Observer.Failed, Failed{t.id, "commit", err})
		return nil, wrap("commit", t.id.String(), err)
	}
	return p.attempt.report(p.began), nil
}

// Upload uploads what changed and makes it permanent. In a task that publishes by
// itself the markers are durable from here (P6): the application writes them into
// its own checkpoint and then calls Task.CleanUp. Otherwise Publish follows.
func (p *Pending) Upload(ctx context.Context) (Markers, error) {
	t := p.task
	if err := p.open(); err != nil {
		return Markers{}, wrap("upload", t.id.String(), err)
	}
	if p.attempt != nil {
		return Markers{}, wrap("upload", t.id.String(), errors.New("it is uploaded already: call Publish"))
	}
	err := p.upload(ctx)
	if err == nil && t.opts.External != nil {
		err = p.prepare(ctx)
	}
	if err != nil || t.opts.External != nil {
		err = p.finish(err)
	}
	if err != nil {
		emit(t.opts.Observer.Failed, Failed{t.id, "upload", err})
		return Markers{}, wrap("upload", t.id.String(), err)
	}
	return p.attempt.markers(), nil
}

// Publish makes what Upload brought up the newest checkpoint, and cleans up. Its
// errors are those of Commit.
func (p *Pending) Publish(ctx context.Context) (*CommitReport, error) {
	t := p.task
	if err := p.open(); err != nil {
		return nil, wrap("publish", t.id.String(), err)
	}
	if p.attempt == nil {
		return nil, wrap("publish", t.id.String(), errors.New("nothing was uploaded yet: call Upload first"))
	}
	if err := p.finish(p.publish(ctx)); err != nil {
		emit(t.opts.Observer.Failed, Failed{t.id, "publish", err})
		return nil, wrap("publish", t.id.String(), err)
	}
	return p.attempt.report(p.began), nil
}

// Abort gives the snapshot up, deletes what was uploaded for it unless that is kept
// as progress (P5g), and releases the stores. After Commit or Publish it does nothing.
func (p *Pending) Abort(ctx context.Context) error {
	if p.ended {
		return nil
	}
	if p.attempt != nil {
		p.task.abandon(ctx, p.attempt)
	}
	return wrap("abort", p.task.id.String(), p.end())
}

func (p *Pending) open() error {
	if p.ended {
		return fmt.Errorf("this snapshot has ended: %w", ErrClosed)
	}
	return nil
}

// finish ends the snapshot after a step with this outcome. What is published stays so:
// a store that cannot be released afterwards is a warning.
func (p *Pending) finish(err error) error {
	rerr := p.end()
	if err == nil && rerr != nil {
		p.attempt.warn("", rerr.Error())
		return nil
	}
	return errors.Join(err, rerr)
}

// end releases the stores and the task. It is safe to call again.
func (p *Pending) end() error {
	if p.ended {
		return nil
	}
	p.ended = true
	var errs []error
	for _, f := range p.images {
		if err := f.img.Release(); err != nil {
			errs = append(errs, fmt.Errorf("release store %s: %w", f.name, err))
		}
	}
	p.task.leave()
	return errors.Join(errs...)
}
