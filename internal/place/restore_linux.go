package place

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/snapferry/snapferry/snapshot"
)

// run is one call of Restore.
type run struct {
	opts    *Options
	yard    *yard
	targets []*target // sorted by store name
	wants   *wants
	builder *builder
	origins []origin
	void    []*staging // they hold plans that this run's plan replaces
}

// restore is Restore.
func restore(ctx context.Context, stores []Store, opts *Options) (map[string]Report, error) {
	o := Options{}
	if opts != nil {
		o = *opts
	}
	if o.Workers <= 0 {
		o.Workers = max(4, 2*runtime.GOMAXPROCS(0))
	}
	o.told = new(told)
	r := &run{opts: &o, yard: newYard(&o)}
	defer r.close()
	begun := time.Now()
	if err := r.survey(stores); err != nil {
		return nil, err
	}
	if o.DryRun {
		return r.foretell(ctx)
	}
	err := r.stage()
	if err == nil {
		begun = r.phase(Prepare, begun)
		err = r.build(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, r.abandon())
	}
	begun = r.phase(Build, begun)
	if err := r.swap(); err != nil {
		return nil, err
	}
	r.cleanUp()
	r.phase(Swap, begun)
	return r.reports(), nil
}

// phase tells that a phase is complete and returns when the next begins.
func (r *run) phase(p Phase, begun time.Time) time.Time {
	now := time.Now()
	if r.opts.OnPhase != nil {
		r.opts.OnPhase(p, now.Sub(begun))
	}
	return now
}

func (r *run) close() {
	for _, o := range r.origins {
		o.tree.close()
	}
	for _, t := range r.targets {
		t.tree.close()
	}
	r.yard.close()
}

// survey finds the targets, checks them, and lists what they want. It writes nothing.
func (r *run) survey(stores []Store) (err error) {
	points := mounts()
	for _, s := range stores {
		t := &target{store: s}
		if t.spot, err = locate(s.Target, r.opts.InPlace); err == nil {
			err = t.check(points, r.opts.InPlace)
		}
		if err != nil {
			return fmt.Errorf("restore store %s to %s: %w", s.Name, s.Target, err)
		}
		r.targets = append(r.targets, t)
	}
	slices.SortFunc(r.targets, func(a, b *target) int { return cmp.Compare(a.store.Name, b.store.Name) })
	if err := checkApart(r.targets); err != nil {
		return err
	}
	r.wants, err = newWants(r.targets)
	return err
}

// stage makes the stagings ready for the new trees.
func (r *run) stage() error {
	for _, step := range []func() error{r.enter, r.recover, r.setAside, r.checkSpace, r.prepare} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// enter makes and locks the stagings.
func (r *run) enter() (err error) {
	for _, t := range r.targets {
		if err := t.makeParents(); err != nil {
			return t.fault(err)
		}
		if t.stage, err = r.yard.get(t.dir, t.staging(), true); err != nil {
			return t.fault(err)
		}
		t.above = t.stage.dir
	}
	return nil
}

// recover completes what an earlier run began to swap (S7). Stagings of targets that are
// none of this run's have then done their work.
func (r *run) recover() error {
	for _, t := range r.targets {
		done, err := r.yard.recover(t.stage)
		if errors.Is(err, errStagingGone) {
			err = r.giveUp(t.stage, err)
		}
		if err != nil {
			return t.fault(err)
		}
		for _, s := range done {
			if slices.ContainsFunc(r.targets, func(t *target) bool { return t.stage == s }) {
				continue
			}
			if err := s.remove(); err != nil {
				return t.fault(err)
			}
			r.yard.drop(s)
		}
	}
	return nil
}

// giveUp takes note of a plan that cannot be completed, if this run brings all its stores
// to one checkpoint again. The plan stays until that of this run takes its place: as long
// as the targets are a mixture, something has to say so.
func (r *run) giveUp(s *staging, why error) error {
	p, home, err := r.yard.pending(s)
	if err != nil || p == nil {
		return errors.Join(why, err)
	}
	for _, one := range p.Stores {
		at := filepath.Join(home.dir.path, string(one.Dir), string(one.Base))
		i := slices.IndexFunc(r.targets, func(t *target) bool { return filepath.Join(t.stage.dir.path, t.base) == at })
		if i < 0 {
			return fmt.Errorf("%w; restore all of its stores, or remove %s to give it up", why, home.tree.path)
		}
		if err := keepOld(r.targets[i].stage, one.Root); err != nil {
			return err
		}
	}
	if !slices.Contains(r.void, home) {
		r.void = append(r.void, home)
	}
	return nil
}

// keepOld sets aside what lies under the name of the staged tree and is not it: it was the
// target once, so it is only read.
func keepOld(s *staging, root uint64) error {
	ino, err := s.tree.inode(treeName)
	if err == nil && ino != 0 && ino != root {
		err = s.setAside(treeName, oldPrefix)
	}
	return err
}

// setAside sets aside what an earlier run staged.
func (r *run) setAside() (err error) {
	for _, t := range r.targets {
		if err := t.stage.setAside(treeName, leftPrefix); err != nil {
			return t.fault(err)
		}
		if t.left, err = t.stage.remains(leftPrefix); err != nil {
			return t.fault(err)
		}
	}
	return nil
}

// prepare makes the new trees, with the directories and what can be resumed, and opens all
// else that may be of use.
func (r *run) prepare() error {
	r.builder = newBuilder(r.opts, r.wants, r.targets)
	for _, t := range r.targets {
		err := t.stage.tree.mkdir(treeName)
		if err == nil {
			t.tree, err = t.stage.tree.sub(treeName)
		}
		if err != nil {
			return t.fault(err)
		}
		if err := r.builder.dirs(t); err != nil {
			return err
		}
		if err := r.resume(t); err != nil {
			return t.fault(err)
		}
		if err := r.addOrigins(t, leftPrefix, oldPrefix); err != nil {
			return t.fault(err)
		}
	}
	return nil
}

// build fills the trees, durably.
func (r *run) build(ctx context.Context) error {
	b := r.builder
	inner := b.start(ctx)
	err := b.bare(inner)
	if err == nil {
		s := &scan{b: b, w: r.wants, opts: r.opts}
		err = s.local(inner, r.origins, r.opts.Workers)
	}
	if err == nil {
		err = (&fetch{b, r.wants}).all(inner, r.opts.Workers)
	}
	b.done()
	if cause := context.Cause(inner); cause != nil {
		err = cause
	}
	b.cancel(nil)
	if err != nil {
		return err
	}
	for _, t := range r.targets {
		if err := errors.Join(ctx.Err(), b.names(t)); err != nil {
			return err
		}
	}
	for _, t := range r.targets {
		if err := b.finishDirs(t); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// swap makes the staged trees the targets, under a plan (S7).
func (r *run) swap() error {
	if err := r.syncParents(); err != nil {
		return err
	}
	p, err := newPlan(r.opts.Checkpoint, r.targets)
	if err != nil {
		return fmt.Errorf("restore: plan: %w", err)
	}
	if err := p.write(r.targets); err != nil {
		return fmt.Errorf("restore: plan: %w", err)
	}
	for _, s := range r.void {
		if s == r.targets[0].stage {
			continue // written over
		}
		if err := errors.Join(absent(s.tree.unlink(planName, 0)), s.tree.sync()); err != nil {
			return fmt.Errorf("restore: plan: %w", err)
		}
	}
	w, err := r.yard.swapOf(p, r.targets[0].stage)
	if err != nil {
		return err
	}
	if err := w.run(); err != nil {
		return fmt.Errorf("restore: swap: %w", err)
	}
	return nil
}

// syncParents makes the directories above a target durable that this run made.
func (r *run) syncParents() error {
	for _, t := range r.targets {
		if err := t.syncMade(r.opts.fail); err != nil {
			return t.fault(err)
		}
	}
	return nil
}

// cleanUp removes what the targets were. They are the new trees by now, so what cannot be
// removed (a directory of another user, say) is only told.
func (r *run) cleanUp() {
	for _, t := range r.targets {
		err := t.stage.remove()
		if root := entryAt(t.store.Index, ""); err == nil && t.base == "" && root != nil {
			err = t.above.do("utimes", "", func() error { return setTime(t.above.fd, root.MTime) })
		}
		if err != nil && r.opts.Warn != nil {
			r.opts.Warn(t.store.Name, "", fmt.Errorf("it is restored, but what was there before is not removed, see %s: %w", t.stage.tree.path, err))
		}
	}
}

// abandon ends a failed run. What was staged stays for the next try; stagings that hold
// nothing of use go, and with them the directories made for them.
func (r *run) abandon() error {
	if r.builder != nil && r.builder.staged.Load() {
		return nil
	}
	var errs []error
	for _, t := range r.targets {
		if t.stage != nil && t.stage.fresh {
			t.tree.close()
			errs = append(errs, t.stage.remove())
		}
		t.unmakeParents()
	}
	return errors.Join(errs...)
}

func (r *run) reports() map[string]Report {
	m := map[string]Report{}
	for _, t := range r.targets {
		m[t.store.Name] = Report{Files: t.report.files.Load(), BytesFetched: t.report.fetched.Load(), BytesReused: t.report.reused.Load()}
	}
	return m
}

// foretell is the dry run: the scan without a builder, and a count of what it leaves.
func (r *run) foretell(ctx context.Context) (map[string]Report, error) {
	for _, t := range r.targets {
		if err := r.openExisting(t); err != nil {
			return nil, t.fault(err)
		}
		for i := range t.store.Index.Entries {
			if t.store.Index.Entries[i].Type == snapshot.Regular {
				t.report.files.Add(1)
			}
		}
	}
	s := &scan{w: r.wants, opts: r.opts}
	if err := s.local(ctx, r.origins, r.opts.Workers); err != nil {
		return nil, err
	}
	for _, lo := range r.wants.missing() {
		n := int64(r.wants.chunk(lo).Length)
		r.wants.file(lo).t.report.fetched.Add(n)
		for i, end := lo+1, r.wants.groupEnd(lo); i < end; i++ {
			if !r.wants.isClaimed(i) {
				r.wants.file(i).t.report.reused.Add(n)
			}
		}
	}
	return r.reports(), nil
}

// openExisting opens target and staging of a dry run, as far as they are there.
func (r *run) openExisting(t *target) (err error) {
	if t.gone && t.base == "" {
		return nil
	}
	if t.above, err = openTree(t.dir, nil); err != nil {
		return absent(err)
	}
	defer t.above.close()
	r.yard.peek = true
	if t.stage, err = r.yard.get(t.dir, t.staging(), false); absent(err) != nil && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return r.addOrigins(t, leftPrefix, oldPrefix, treeName)
}

// newBuilder decides how files become durable: by one syncfs when they are many.
func newBuilder(opts *Options, w *wants, targets []*target) *builder {
	b := &builder{opts: opts, wants: w, meta: map[*target]*meta{}}
	b.whole = opts.durability == syncWhole || opts.durability == automatic && len(w.files) >= manyFiles
	for _, t := range targets {
		b.meta[t] = newMeta(opts, t.store.Name)
	}
	return b
}

// syncMade flushes the directories from the staging's up to the one above the topmost made.
func (t *target) syncMade(fail func(op string) error) error {
	if t.made == "" {
		return nil
	}
	for d := t.dir; ; d = parentOf(d) {
		dir, err := openTree(d, fail)
		if err != nil {
			return err
		}
		err = dir.sync()
		dir.close()
		if err != nil || !within(d, t.made) {
			return err
		}
	}
}
