package snapferry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
)

// VerifyOptions adjusts Verify.
type VerifyOptions struct {
	// Job and Task select; empty means all.
	Job, Task string
	// ReadData reads every chunk and checks its digest. Without it only presence and
	// size of blobs are checked, and every byte of the indexes.
	ReadData bool
	// OnBytes is told how much was read.
	OnBytes func(n int64)
}

// maxDamage bounds the places a report lists of each kind.
const maxDamage = 10_000

// Verify checks that every retained checkpoint can be restored. Damage is in the
// report, not an error; an error says that it could not be found out. Tasks whose log is
// kept in another checkpoint store are not checked but listed as skipped: OK says nothing
// of them.
func (r *Repo) Verify(ctx context.Context, opts VerifyOptions) (*VerifyReport, error) {
	rep := &VerifyReport{Missing: []Damage{}, Corrupt: []Damage{}}
	tasks, err := r.survey(ctx, ListFilter{opts.Job, opts.Task})
	if err != nil {
		return nil, wrap("verify", r.blobs.String(), err)
	}
	for _, id := range tasks.here {
		if err := r.verifyTask(ctx, id, opts, rep); err != nil {
			return nil, wrap("verify", id.String(), err)
		}
	}
	for _, id := range tasks.unreadable {
		rep.Corrupt = append(rep.Corrupt, Damage{Blob: bindKey(id)})
	}
	rep.Skipped = tasks.skipped
	rep.OK = len(rep.Missing) == 0 && len(rep.Corrupt) == 0
	return rep, nil
}

// Skipped returns the tasks that a list leaves out since their log is kept in another
// checkpoint store, each with the reason. A Repo on that store shows them.
func (r *Repo) Skipped(ctx context.Context, filter ListFilter) ([]string, error) {
	tasks, err := r.survey(ctx, filter)
	if err != nil {
		return nil, wrap("list", r.blobs.String(), err)
	}
	return tasks.skipped, nil
}

// surveyed are the tasks of a repository by what this checkpoint store knows of them.
type surveyed struct {
	here       []TaskID // with a log here, or bound to this store
	skipped    []string // bound to another store, or to none, and why that is so
	unreadable []TaskID // with a bind object that is damaged, and no log here
}

// survey looks for tasks in the checkpoint store and in the blob store.
func (r *Repo) survey(ctx context.Context, filter ListFilter) (*surveyed, error) {
	known := map[TaskID]bool{}
	for id, err := range r.checkpoints.Tasks(ctx) {
		if err != nil {
			return nil, err
		}
		known[id] = filter.matches(id)
	}
	found, err := r.tasksWithBlobs(ctx)
	if err != nil {
		return nil, err
	}
	s := &surveyed{}
	for _, id := range found {
		if known[id] || !filter.matches(id) {
			continue
		}
		err := r.bound(ctx, id)
		switch {
		case err == nil:
			known[id] = true
		case errors.Is(err, ErrForeign), errors.Is(err, errUnbound):
			s.skipped = append(s.skipped, skipped(id, err))
		case errors.Is(err, ErrCorrupt):
			s.unreadable = append(s.unreadable, id)
		default:
			return nil, err
		}
	}
	maps.DeleteFunc(known, func(_ TaskID, matches bool) bool { return !matches })
	s.here = slices.SortedFunc(maps.Keys(known), func(a, b TaskID) int { return cmp.Or(cmp.Compare(a.Job, b.Job), cmp.Compare(a.Task, b.Task)) })
	return s, nil
}

// verifier checks one task.
type verifier struct {
	*view
	opts  VerifyOptions
	sizes map[string]int64 // blobs that were listed
	seen  map[string]bool  // indexes checked before, by digest: most differ little, some not at all
	read  map[snapshot.Location]bool

	forgave bool // something was found of a checkpoint that has been dropped since

	mu  sync.Mutex
	rep VerifyReport
}

// verifyRuns is how often a task is checked whose damaged checkpoints are dropped meanwhile.
const verifyRuns = 3

// verifyTask checks a task. What looks damaged in a checkpoint that was dropped
// meanwhile is no damage (P10), so findings are held against the head as it is then.
func (r *Repo) verifyTask(ctx context.Context, id TaskID, opts VerifyOptions, total *VerifyReport) error {
	var v *verifier
	for range verifyRuns {
		v = &verifier{view: r.view(id), opts: opts, seen: map[string]bool{}, read: map[snapshot.Location]bool{}}
		if err := v.run(ctx); err != nil {
			return err
		}
		if !v.forgave {
			break // else what was told of the dropped may be in what came after, too
		}
	}
	total.Checkpoints += v.rep.Checkpoints
	total.Blobs += v.rep.Blobs
	total.Bytes += v.rep.Bytes
	total.Missing = append(total.Missing, v.rep.Missing...)
	total.Corrupt = append(total.Corrupt, v.rep.Corrupt...)
	return nil
}

func (v *verifier) run(ctx context.Context) error {
	e, l, err := v.head(ctx)
	if errors.Is(err, ErrCorrupt) {
		return v.damaged(err, Damage{Blob: taskPrefix(v.id) + "log", Path: err.Error()})
	}
	if err != nil {
		return err
	}
	if _, err := readBind(ctx, v.blobs, v.id); err != nil {
		if err := v.damaged(err, Damage{Blob: bindKey(v.id)}); err != nil {
			return err
		}
	}
	if err := v.list(ctx); err != nil {
		return err
	}
	if e == nil {
		if len(v.sizes) > 0 {
			if e, _, err := v.head(ctx); err != nil || e != nil {
				return err // begun meanwhile
			}
			return v.damaged(fs.ErrNotExist, Damage{Blob: taskPrefix(v.id) + "log"})
		}
		return nil
	}
	live := l.State.Live()
	slices.SortFunc(live, func(a, b head.Checkpoint) int { return cmp.Compare(b.Sequence, a.Sequence) })
	for i := range live { // the newest first: what several share is told of the one that stays longest
		if err := v.checkpoint(ctx, &live[i]); err != nil {
			return err
		}
	}
	v.rep.Checkpoints = int64(len(l.State.Retained))
	return v.forgive(ctx)
}

// forgive drops what was found of checkpoints that are not kept any more.
func (v *verifier) forgive(ctx context.Context) error {
	if len(v.rep.Missing)+len(v.rep.Corrupt) == 0 {
		return nil
	}
	_, l, err := v.head(ctx)
	if err != nil {
		return err
	}
	kept := map[string]bool{"": true}
	for _, c := range l.State.Live() {
		kept[c.ID] = true
	}
	gone := func(d Damage) bool {
		v.forgave = v.forgave || !kept[d.Checkpoint]
		return !kept[d.Checkpoint]
	}
	v.rep.Missing = slices.DeleteFunc(v.rep.Missing, gone)
	v.rep.Corrupt = slices.DeleteFunc(v.rep.Corrupt, gone)
	return nil
}

func (v *verifier) list(ctx context.Context) error {
	v.sizes = map[string]int64{}
	for info, err := range v.blobs.List(ctx, blobPrefix(v.id), "") {
		if err != nil {
			return err
		}
		v.sizes[info.Key] = info.Size
		v.rep.Blobs++
		v.rep.Bytes += info.Size
	}
	return nil
}

func (v *verifier) checkpoint(ctx context.Context, c *head.Checkpoint) error {
	b, err := v.checkpointBlob(ctx, c)
	if err != nil {
		return v.damaged(err, Damage{Blob: blobPrefix(v.id) + c.Blob.Key, Checkpoint: c.ID})
	}
	for name, s := range b.Stores {
		if v.seen[s.Index.Digest] {
			continue
		}
		v.seen[s.Index.Digest] = true
		d := Damage{Blob: s.Index.Key, Checkpoint: c.ID, Store: name, Length: s.Index.Size}
		_, x, err := v.index(ctx, s.Index)
		if err != nil {
			if err := v.damaged(err, d); err != nil {
				return err
			}
			continue
		}
		if err := v.chunks(ctx, x, d); err != nil {
			return err
		}
	}
	return nil
}

// damaged notes what an error says about the repository; other errors it returns.
func (v *verifier) damaged(err error, d Damage) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if len(v.rep.Missing) < maxDamage {
			v.rep.Missing = append(v.rep.Missing, d)
		}
	case errors.Is(err, ErrCorrupt):
		if len(v.rep.Corrupt) < maxDamage {
			v.rep.Corrupt = append(v.rep.Corrupt, d)
		}
	default:
		return err
	}
	return nil
}

// chunks checks what the files of an index are made of, each chunk once in a task.
func (v *verifier) chunks(ctx context.Context, x *snapshot.Index, d Damage) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers / 4)
	for i := range x.Entries {
		for k := range x.Entries[i].Chunks {
			c := &x.Entries[i].Chunks[k]
			if v.read[c.Location] {
				continue
			}
			v.read[c.Location] = true
			at := d
			at.Blob, at.Path, at.Offset, at.Length = c.Blob, x.Entries[i].Path, int64(c.Offset), int64(c.Length)
			if err := v.present(c); err != nil {
				if err := v.damaged(err, at); err != nil {
					return err
				}
				continue
			}
			if v.opts.ReadData {
				g.Go(func() error { return v.readChunk(gctx, c, at) })
			}
		}
	}
	return g.Wait()
}

func (v *verifier) present(c *snapshot.Chunk) error {
	size, ok := v.sizes[c.Blob]
	if !ok {
		return fs.ErrNotExist
	}
	if int64(c.Location.Offset)+int64(c.Stored) > size {
		return fmt.Errorf("%w: blob ends before the chunk", ErrCorrupt)
	}
	return nil
}

func (v *verifier) readChunk(ctx context.Context, c *snapshot.Chunk, d Damage) error {
	data, err := v.blobs.ReadAll(ctx, c.Blob, int64(c.Location.Offset), int64(c.Stored))
	if err == nil {
		err = checkChunk(data, c)
	}
	if err != nil {
		return v.damaged(err, d)
	}
	if v.opts.OnBytes != nil {
		v.opts.OnBytes(int64(len(data)))
	}
	return nil
}
