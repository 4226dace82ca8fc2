package snapferry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
)

// GCOptions adjusts GC.
type GCOptions struct {
	// OlderThan is the grace: for what was dropped, and for unsealed attempts of the
	// current epoch, by the store's clock. Attempts that can commit no more go at
	// once. 0 means none, which may cost a live owner its attempt, never a checkpoint.
	OlderThan time.Duration
	// DryRun deletes nothing and reports what the same call would delete.
	DryRun bool
}

// GC deletes everything in the repository that its logs show dead (P8, P9). It takes
// no epoch and may run beside owners. Tasks whose log is kept in another checkpoint
// store are left alone and listed as skipped; the error is then ErrForeign, with a
// complete report.
func (r *Repo) GC(ctx context.Context, opts GCOptions) (*GCReport, error) {
	rep := &GCReport{Skipped: []string{}}
	ids, err := r.tasksWithBlobs(ctx)
	if err != nil {
		return nil, wrap("gc", r.blobs.String(), err)
	}
	var failed, foreign error
	for _, id := range ids {
		err := r.gcTask(ctx, id, opts, rep)
		switch {
		case errors.Is(err, ErrForeign), errors.Is(err, errUnbound):
			rep.Skipped = append(rep.Skipped, skipped(id, err))
			foreign = err
		case err != nil:
			failed = errors.Join(failed, wrap("gc", id.String(), err))
		}
		if ctx.Err() != nil {
			return nil, wrap("gc", r.blobs.String(), context.Cause(ctx))
		}
	}
	if !opts.DryRun {
		failed = errors.Join(failed, wrap("gc", r.blobs.String(), r.sweepDebris(ctx)))
	}
	return rep, errors.Join(failed, wrap("gc", r.blobs.String(), foreign))
}

// probeTime is after which time a probe of the store that is still there was left by a
// process that died.
const probeTime = time.Hour

// sweepDebris removes what is no blob of any task: temporary files of killed writers
// and forgotten probes.
func (r *Repo) sweepDebris(ctx context.Context) error {
	if _, err := r.blobs.SweepTemp(ctx); err != nil && !errors.Is(err, ErrUnsupported) {
		return err
	}
	var old []string
	var now time.Time
	for info, err := range r.blobs.List(ctx, probePrefix, "") {
		if err != nil {
			return err
		}
		if now.IsZero() {
			if now, err = r.blobs.Now(ctx); err != nil {
				return err
			}
		}
		if now.Sub(info.Modified) >= probeTime {
			old = append(old, info.Key)
		}
	}
	return r.blobs.Delete(ctx, old)
}

// errUnbound: blobs of which no bind object says whose they are.
var errUnbound = fmt.Errorf("no bind object says which log they belong to, so they are left alone: %w", ErrConflict)

// bound returns nil if the log of a task belongs in this checkpoint store, else whose it is.
func (r *Repo) bound(ctx context.Context, id TaskID) error {
	err := checkBind(ctx, r.blobs, id, bind{Checkpoints: r.store})
	if errors.Is(err, fs.ErrNotExist) {
		return errUnbound
	}
	return err
}

// skipped is how reports name a task that was left alone.
func skipped(id TaskID, why error) string { return id.String() + ": " + why.Error() }

// tasksWithBlobs finds the tasks by what lies in the blob store: a task that another
// checkpoint store holds is seen too. It skips from task to task.
func (r *Repo) tasksWithBlobs(ctx context.Context) ([]TaskID, error) {
	var ids []TaskID
	after := ""
	for {
		key, err := r.firstKey(ctx, after)
		if err != nil || key == "" {
			return ids, err
		}
		f := strings.SplitN(key, "/", 4)
		if len(f) < 4 {
			after = key
			continue
		}
		id := TaskID{Job: f[1], Task: f[2]}
		if id.Validate() == nil {
			ids = append(ids, id)
		}
		after = strings.Join(f[:3], "/") + "/\xff"
	}
}

func (r *Repo) firstKey(ctx context.Context, after string) (string, error) {
	for info, err := range r.blobs.List(ctx, tasksPrefix, after) {
		return info.Key, err
	}
	return "", nil
}

// collector is one task being swept.
type collector struct {
	*view
	opts GCOptions
	rep  *GCReport
	l    *head.Loaded
	keep map[string]bool
}

func (r *Repo) gcTask(ctx context.Context, id TaskID, opts GCOptions, rep *GCReport) error {
	if err := r.bound(ctx, id); err != nil {
		return err
	}
	c := &collector{view: r.view(id), opts: opts, rep: rep}
	// The listing comes before the head: what is committed in between is named by the
	// head, so it is not taken for dead.
	found, err := c.list(ctx)
	if err != nil || len(found) == 0 {
		return err
	}
	if !opts.DryRun {
		if err := c.releaseOldHolds(ctx); err != nil {
			return err
		}
	}
	if err := c.look(ctx); err != nil || c.l.State.Epoch == 0 {
		return err // no log yet: an owner is about to claim
	}
	if err := c.sweep(ctx, found); err != nil {
		return err
	}
	if opts.DryRun {
		return nil
	}
	return c.log.Trim(ctx)
}

func (c *collector) list(ctx context.Context) ([]blob.Info, error) {
	var found []blob.Info
	for info, err := range c.blobs.List(ctx, blobPrefix(c.id), "") {
		if err != nil {
			return nil, err
		}
		found = append(found, info)
	}
	return found, nil
}

// look reads the head and what must stay by it. What is absent may have been dropped and
// deleted meanwhile; then the head has moved.
func (c *collector) look(ctx context.Context) error {
	_, err := consistentRead(ctx, c.view, func(l *head.Loaded) (*head.Loaded, error) {
		c.l = l
		return l, c.findKept(ctx)
	})
	return err
}

// findKept collects what must stay: everything alive, and what was dropped too short
// a while ago.
func (c *collector) findKept(ctx context.Context) error {
	var err error
	if c.keep, err = c.named(ctx, c.l, nil); err != nil {
		return err
	}
	due, err := c.graceOver(ctx, c.l.State.Dropped, c.opts.OlderThan)
	if err != nil {
		return err
	}
	return c.nameWaiting(ctx, c.l, due, c.keep, nil)
}

// sweep deletes the dead among what was found. An attempt that could still commit but
// has not written for long is made unable to by an entry first (P9).
func (c *collector) sweep(ctx context.Context, found []blob.Info) error {
	byAttempt, order := c.group(found)
	stale, err := c.stale(ctx, byAttempt)
	if err != nil {
		return err
	}
	if len(stale) > 0 && !c.opts.DryRun {
		if stale, err = c.void(ctx, stale); err != nil {
			return err
		}
	}
	for _, dir := range slices.Backward(order) { // indexes build on what older attempts wrote (I3)
		a, err := head.ParseAttempt(dir)
		if err != nil || c.l.State.CanCommit(a) && !slices.Contains(stale, dir) {
			continue
		}
		if err := c.remove(ctx, byAttempt[dir]); err != nil {
			return err
		}
	}
	return nil
}

func (c *collector) group(found []blob.Info) (map[string][]blob.Info, []string) {
	by := map[string][]blob.Info{}
	var order []string
	for _, info := range found {
		dir, ok := attemptOf(c.id, info.Key)
		if !ok {
			continue
		}
		if by[dir] == nil {
			order = append(order, dir)
		}
		by[dir] = append(by[dir], info)
	}
	return by, order
}

// stale returns attempts that could commit and have not written for the grace.
func (c *collector) stale(ctx context.Context, by map[string][]blob.Info) ([]string, error) {
	var out []string
	var now time.Time
	for dir, infos := range by {
		a, err := head.ParseAttempt(dir)
		if err != nil || !c.l.State.CanCommit(a) || c.allKept(infos) {
			continue
		}
		if now.IsZero() && c.opts.OlderThan > 0 { // a full disk has no clock, and needs gc most
			if now, err = c.blobs.Now(ctx); err != nil {
				return nil, err
			}
		}
		newest := slices.MaxFunc(infos, func(a, b blob.Info) int { return a.Modified.Compare(b.Modified) })
		if c.opts.OlderThan <= 0 || now.Sub(newest.Modified) >= c.opts.OlderThan {
			out = append(out, dir)
		}
	}
	slices.Sort(out)
	return out, nil
}

func (c *collector) allKept(infos []blob.Info) bool {
	return !slices.ContainsFunc(infos, func(i blob.Info) bool { return !c.keep[i.Key] })
}

// void appends that these attempts can commit no more, and takes up the state in which
// that is so. One that was committed in the meantime, or whose epoch has passed, is
// judged by that state.
func (c *collector) void(ctx context.Context, stale []string) ([]string, error) {
	err := c.amend(ctx, checkpoint.Void, func(s *head.State, _ uint64) (*head.State, error) {
		return s.Void(slices.DeleteFunc(slices.Clone(stale), func(dir string) bool {
			a, err := head.ParseAttempt(dir)
			return err != nil || !s.CanCommit(a)
		})), nil
	})
	if err != nil {
		return nil, err
	}
	return stale, c.look(ctx)
}

// remove deletes the blobs of one attempt that nothing needs: those written last
// first, so that an index goes before its chunks (I3).
func (c *collector) remove(ctx context.Context, infos []blob.Info) error {
	var dead []string
	for _, info := range slices.Backward(infos) {
		if c.keep[info.Key] {
			continue
		}
		dead = append(dead, info.Key)
		c.rep.BytesDeleted += info.Size
	}
	c.rep.BlobsDeleted += int64(len(dead))
	if c.opts.DryRun {
		return nil
	}
	return c.blobs.Delete(ctx, dead)
}

// holdTime is how long the hold of a reader lasts (P10).
const holdTime = 24 * time.Hour

// releaseOldHolds ends the holds of readers that never came back.
func (c *collector) releaseOldHolds(ctx context.Context) error {
	_, l, err := c.head(ctx)
	if err != nil || len(l.State.Holds) == 0 {
		return err
	}
	var items []head.Dropped
	for _, h := range l.State.Holds {
		items = append(items, head.Dropped{Checkpoint: head.Checkpoint{ID: h.Owner}, Slot: h.Slot, At: h.At})
	}
	due, err := c.graceOver(ctx, items, holdTime)
	if err != nil || len(due) == 0 {
		return err
	}
	owners := make([]string, len(due))
	for i, d := range due {
		owners[i] = d.ID
	}
	return c.amend(ctx, checkpoint.Release, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Release(owners, slot, time.Now()), nil
	})
}
