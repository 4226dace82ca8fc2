package snapferry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
)

// Repo reads and tends a repository without owning any task. It is safe for
// concurrent use.
type Repo struct {
	blobs       *blob.Store
	checkpoints *checkpoint.Store
	info        RepoInfo
	store       string // identity of the checkpoint store
	opts        RepoOptions
}

// RepoOptions adjusts a Repo. The zero value and nil are valid.
type RepoOptions struct {
	// Observer is told what happens.
	Observer *Observer
	// CacheDir is where identity caches lie: a restore makes those of its targets void.
	CacheDir string
	// Workers bounds the parallel reads of a restore; 0 means 2 x GOMAXPROCS, at least 4.
	Workers int
}

// OpenRepo opens a repository: ErrNotFound if there is none, ErrUnsupported if its
// format is newer than this program.
func OpenRepo(ctx context.Context, blobs *blob.Store, checkpoints *checkpoint.Store, opts *RepoOptions) (*Repo, error) {
	r := &Repo{blobs: blobs, checkpoints: checkpoints}
	if opts != nil {
		r.opts = *opts
	}
	if r.opts.Observer == nil {
		r.opts.Observer = &Observer{}
	}
	var err error
	if r.info, err = ReadInfo(ctx, blobs); err != nil {
		return nil, err
	}
	info, err := checkpoints.Info(ctx)
	if err != nil {
		return nil, wrap("open", blobs.String(), err)
	}
	r.store = info.ID
	return r, nil
}

// Info returns which repository this is.
func (r *Repo) Info() RepoInfo { return r.info }

func (r *Repo) view(id TaskID) *view {
	return &view{id: id, blobs: r.blobs, log: r.checkpoints.Log(id)}
}

// ListFilter selects tasks; empty fields select all.
type ListFilter struct {
	Job, Task string
}

func (f ListFilter) matches(id TaskID) bool {
	return (f.Job == "" || f.Job == id.Job) && (f.Task == "" || f.Task == id.Task)
}

// List returns the retained checkpoints, newest first. With a job or task that has
// none it is empty, not an error.
func (r *Repo) List(ctx context.Context, filter ListFilter) ([]Checkpoint, error) {
	var all []Checkpoint
	for id, err := range r.checkpoints.Tasks(ctx) {
		if err != nil {
			return nil, wrap("list", r.blobs.String(), err)
		}
		if !filter.matches(id) {
			continue
		}
		some, err := r.listTask(ctx, id)
		if err != nil {
			return nil, wrap("list", id.String(), err)
		}
		all = append(all, some...)
	}
	slices.SortFunc(all, func(a, b Checkpoint) int {
		return cmp.Or(cmp.Compare(b.ID, a.ID), cmp.Compare(a.Job, b.Job), cmp.Compare(a.Task, b.Task))
	})
	return all, nil
}

func (r *Repo) listTask(ctx context.Context, id TaskID) ([]Checkpoint, error) {
	v := r.view(id)
	return consistentRead(ctx, v, func(l *head.Loaded) ([]Checkpoint, error) {
		out := make([]Checkpoint, len(l.State.Retained))
		g, gctx := errgroup.WithContext(ctx)
		g.SetLimit(fetchers)
		for i := range out {
			g.Go(func() error {
				c := &l.State.Retained[i]
				b, err := v.checkpointBlob(gctx, c)
				if errors.Is(err, ErrCorrupt) || blobGone(err) && v.stillRetained(gctx, c.ID) {
					out[i] = damaged(id, c, err)
					return nil
				}
				if err == nil {
					out[i] = b.describe()
				}
				return err
			})
		}
		return out, g.Wait()
	})
}

// damaged describes a checkpoint by what the head has of it.
func damaged(id TaskID, c *head.Checkpoint, why error) Checkpoint {
	out := Checkpoint{Job: id.Job, Task: id.Task, ID: c.ID, Epoch: c.Epoch, Sequence: c.Sequence, Damaged: why.Error(), Stores: map[string]StoreInfo{}}
	if len(c.ID) > len(idTime) {
		out.Time, _ = time.Parse(idTime, c.ID[:len(idTime)])
	}
	for _, name := range c.Stores {
		out.Stores[name] = StoreInfo{}
	}
	return out
}

func (v *view) stillRetained(ctx context.Context, id string) bool {
	w := *v
	_, l, err := w.head(ctx)
	return err == nil && l.State.Find(id) != nil
}

// consistentRead runs a read of what the head names. Something that is absent may have
// been dropped meanwhile: then the head has moved, and the read is made again with it.
func consistentRead[T any](ctx context.Context, v *view, read func(l *head.Loaded) (T, error)) (T, error) {
	var zero T
	e, l, err := v.head(ctx)
	for err == nil {
		var out T
		if out, err = read(l); err == nil {
			return out, nil
		}
		if !errors.Is(err, fs.ErrNotExist) || e == nil {
			return zero, err
		}
		missing, slot := err, e.Slot
		if e, l, err = v.head(ctx); err == nil && e.Slot == slot {
			return zero, fmt.Errorf("%w: %w", ErrCorrupt, missing)
		}
	}
	return zero, err
}

// idTime is the form of the time that a checkpoint id begins with.
const idTime = "20060102T150405.000000Z"

// At says which checkpoint of a task is meant: the zero value is the latest.
type At struct {
	id   string
	time *time.Time
}

// ParseAt reads "" or "latest", a checkpoint id, or an RFC 3339 time, which means the
// newest checkpoint not after it.
func ParseAt(s string) (At, error) {
	if s == "" || s == "latest" {
		return At{}, nil
	}
	if at, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return At{time: &at}, nil
	}
	if len(s) > len(idTime)+1 {
		if _, err := time.Parse(idTime, s[:len(idTime)]); err == nil {
			return At{id: s}, nil
		}
	}
	return At{}, fmt.Errorf("%q is neither latest, nor a checkpoint id as `ls` prints it, nor a time such as 2006-01-02T15:04:05Z", s)
}

// String returns what ParseAt reads.
func (a At) String() string {
	switch {
	case a.id != "":
		return a.id
	case a.time != nil:
		return a.time.UTC().Format(time.RFC3339Nano)
	}
	return "latest"
}

// find picks the checkpoint that a means among the retained ones.
func (a At) find(ctx context.Context, v *view, s *head.State) (*head.Checkpoint, error) {
	switch {
	case a.id != "":
		if c := s.Find(a.id); c != nil {
			return c, nil
		}
		for i := range s.Prepared {
			if s.Prepared[i].ID == a.id {
				return &s.Prepared[i], nil
			}
		}
		return nil, fmt.Errorf("checkpoint %s: %w", a.id, ErrNotFound)
	case len(s.Retained) == 0:
		return nil, fmt.Errorf("task %s has no checkpoint: %w", v.id, ErrNotFound)
	case a.time != nil:
		return a.before(s.Retained)
	}
	return s.Latest(), nil
}

// before finds the newest checkpoint not after a time. Ids begin with their time.
func (a At) before(list []head.Checkpoint) (*head.Checkpoint, error) {
	limit := a.time.UTC().Format(idTime)
	for i := len(list) - 1; i >= 0; i-- {
		if len(list[i].ID) > len(idTime) && list[i].ID[:len(idTime)] <= limit {
			return &list[i], nil
		}
	}
	return nil, fmt.Errorf("no checkpoint at or before %s: %w", a, ErrNotFound)
}

// Show returns one checkpoint.
func (r *Repo) Show(ctx context.Context, id TaskID, at At) (*Checkpoint, error) {
	v := r.view(id)
	if err := r.known(ctx, v); err != nil {
		return nil, wrap("show", id.String(), err)
	}
	b, err := consistentRead(ctx, v, func(l *head.Loaded) (*checkpointBlob, error) {
		c, err := at.find(ctx, v, l.State)
		if err != nil {
			return nil, err
		}
		return v.checkpointBlob(ctx, c)
	})
	if err != nil {
		return nil, wrap("show", id.String(), err)
	}
	cp := b.describe()
	return &cp, nil
}

// known tells a task that is not there from one whose log is kept elsewhere.
func (r *Repo) known(ctx context.Context, v *view) error {
	if err := v.id.Validate(); err != nil {
		return err
	}
	err := checkBind(ctx, r.blobs, v.id, bind{Checkpoints: r.store})
	if errors.Is(err, fs.ErrNotExist) {
		if _, herr := v.log.Head(ctx); herr == nil {
			return nil // only the note of whose log it is was lost, and here the log is
		}
	}
	return notFound(err, "no task %s in this repository", v.id)
}

// Index reads the snapshot index of one store of a checkpoint.
func (r *Repo) Index(ctx context.Context, cp *Checkpoint, store string) (*snapshot.Index, error) {
	s, ok := cp.Stores[store]
	if !ok {
		return nil, wrap("read index", cp.ID, fmt.Errorf("store %s: %w", store, ErrNotFound))
	}
	m, err := parseMarker(s.Marker)
	if err != nil {
		return nil, wrap("read index", cp.ID, err)
	}
	_, x, err := r.view(TaskID{Job: cp.Job, Task: cp.Task}).index(ctx, m)
	return x, wrap("read index", cp.ID+" "+store, err)
}

// Close ends the use of the repository; the caller closes the stores it was given.
func (r *Repo) Close() error { return nil }
