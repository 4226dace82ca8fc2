package snapferry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/internal/place"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// RestoreOptions adjusts a restore. The zero value and nil are valid.
type RestoreOptions struct {
	// Dir, when no targets are given, is where each store goes as Dir/NAME.
	Dir string
	// Include keeps only what matches one of these globs, with what lies below it and
	// the directories above. As in source.DirOptions.Exclude, path.Match decides on the
	// base name and on the whole path; one match is enough. A store in which nothing
	// matches is left as it is, and if there is no other, Restore ends with ErrNotFound.
	// Another target that exists is brought to exactly that part.
	Include []string
	// StrictOwner makes an owner that cannot be set an error instead of a warning.
	StrictOwner bool
	// InPlace keeps the target directory itself and replaces what is in it, for
	// targets that are mount points. It is not atomic (S8).
	InPlace bool
	// DryRun reports what would be fetched and changes nothing.
	DryRun bool
}

// Restore brings directories to the last committed checkpoint of the task: targets
// maps stores to directories. Call it before the stores are opened. The next commit
// from there uploads only what really changed.
func (t *Task) Restore(ctx context.Context, targets map[string]string, opts *RestoreOptions) (*RestoreReport, error) {
	if err := t.enter(); err != nil {
		return nil, wrap("restore", t.id.String(), err)
	}
	defer t.leave()
	r := &restorer{view: t.view, observer: t.opts.Observer, cacheDir: t.opts.CacheDir, targets: targets}
	return r.restore(ctx, opts)
}

// Restore brings directories to a checkpoint: targets maps stores to directories; nil
// means every store of the checkpoint, below opts.Dir. A target is the whole old or
// the whole new tree at every instant (I7), and when Restore fails it is the old one.
func (r *Repo) Restore(ctx context.Context, id TaskID, at At, targets map[string]string, opts *RestoreOptions) (*RestoreReport, error) {
	v := r.view(id)
	if err := r.known(ctx, v); err != nil {
		return nil, wrap("restore", id.String(), err)
	}
	re := &restorer{view: *v, observer: r.opts.Observer, cacheDir: r.opts.CacheDir, workers: r.opts.Workers, at: at, targets: targets}
	return re.restore(ctx, opts)
}

// restorer is one restore under way.
type restorer struct {
	view
	observer *Observer
	cacheDir string
	workers  int
	at       At
	targets  map[string]string
	opts     RestoreOptions

	phases   [3]time.Duration // of the last try, by place.Phase
	mu       sync.Mutex
	warnings []string
}

// replans is how often a restore of the latest checkpoint that lost it to a newer one
// begins again before it holds on to what it reads (P10).
const replans = 2

// maxReplans ends a restore that may not hold and loses every time.
const maxReplans = 20

func (r *restorer) restore(ctx context.Context, opts *RestoreOptions) (*RestoreReport, error) {
	start := time.Now()
	r.rescue = true
	if opts != nil {
		r.opts = *opts
	}
	rep, err := r.run(ctx)
	if err != nil {
		emit(r.observer.Failed, Failed{r.id, "restore", err})
		return nil, wrap("restore", r.id.String(), err)
	}
	rep.Millis = time.Since(start).Milliseconds()
	rep.Warnings = r.warnings
	if !r.opts.DryRun {
		emit(r.observer.Restored, Restored{r.id, rep.Checkpoint, time.Since(start), r.phases[place.Prepare], r.phases[place.Build], r.phases[place.Swap]})
	}
	return rep, nil
}

// check refuses arguments by which something would be restored that nobody means.
func (r *restorer) check() error {
	if r.targets != nil && len(r.targets) == 0 {
		return errors.New("no stores given")
	}
	for name, dir := range r.targets {
		if dir == "" {
			return fmt.Errorf("store %s: its target is empty", name)
		}
	}
	for _, glob := range r.opts.Include {
		if _, err := path.Match(glob, ""); err != nil {
			return fmt.Errorf("include %q: %w", glob, err)
		}
	}
	return nil
}

func (r *restorer) run(ctx context.Context) (rep *RestoreReport, err error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	owner := randomHex(8)
	held := false
	defer func() {
		if held {
			r.release(ctx, owner)
		}
	}()
	for try := 0; ; try++ {
		var c *head.Checkpoint
		if c, err = r.pick(ctx); err != nil {
			return nil, err
		}
		if try > replans && !held {
			held = r.hold(ctx, c.ID, owner)
		}
		rep, err = r.attempt(ctx, c)
		if !blobGone(err) {
			return rep, err
		}
		if try == maxReplans {
			return nil, fmt.Errorf("every checkpoint was pruned while it was read, %d in all: retain more of them: %w", try+1, ErrConflict)
		}
		if err := r.afterMissing(ctx, c, err); err != nil {
			return nil, err
		}
	}
}

// blobGone tells an absent blob from an absent file.
func blobGone(err error) bool {
	var b *blob.Error
	return errors.As(err, &b) && errors.Is(b, fs.ErrNotExist)
}

func (r *restorer) pick(ctx context.Context) (*head.Checkpoint, error) {
	_, l, err := r.head(ctx)
	if err != nil {
		return nil, err
	}
	return r.at.find(ctx, &r.view, l.State)
}

// afterMissing decides what an absent blob means (P10): damage, if the checkpoint is
// still there; else the restore begins again with the newest, or ends if a certain
// checkpoint was asked for. The staging stays, so nothing is fetched twice.
func (r *restorer) afterMissing(ctx context.Context, c *head.Checkpoint, missing error) error {
	_, l, err := r.head(ctx)
	if err != nil {
		return err
	}
	alive := slices.ContainsFunc(l.State.Live(), func(x head.Checkpoint) bool { return x.ID == c.ID })
	if alive {
		return fmt.Errorf("checkpoint %s: %w: %w", c.ID, ErrCorrupt, missing)
	}
	if r.at != (At{}) {
		return fmt.Errorf("checkpoint %s was pruned meanwhile: %w", c.ID, ErrNotFound)
	}
	return nil
}

// attempt restores one checkpoint.
func (r *restorer) attempt(ctx context.Context, c *head.Checkpoint) (*RestoreReport, error) {
	b, err := r.checkpointBlob(ctx, c)
	if err != nil {
		return nil, err
	}
	targets, err := r.choose(b)
	if err != nil {
		return nil, err
	}
	var stores []place.Store
	for _, name := range slices.Sorted(maps.Keys(targets)) {
		start := time.Now()
		_, x, err := r.index(ctx, b.Stores[name].Index)
		if err != nil {
			return nil, fmt.Errorf("store %s: %w", name, err)
		}
		if len(r.opts.Include) > 0 {
			if x = snapshot.Filter(x, r.included); len(x.Entries) == 0 {
				continue
			}
		}
		stores = append(stores, place.Store{Name: name, Target: targets[name], Index: x})
		t := x.Totals()
		emit(r.observer.RestorePlanned, RestorePlanned{r.id, name, t.Files, t.Bytes, time.Since(start)})
	}
	if len(stores) == 0 && len(r.opts.Include) > 0 {
		return nil, fmt.Errorf("nothing in checkpoint %s matches %q: %w", c.ID, r.opts.Include, ErrNotFound)
	}
	return r.place(ctx, c.ID, stores)
}

// choose returns the target of each store that is to be restored.
func (r *restorer) choose(b *checkpointBlob) (map[string]string, error) {
	if r.targets == nil {
		if r.opts.Dir == "" {
			return nil, errors.New("neither targets nor a directory given")
		}
		all := map[string]string{}
		for name := range b.Stores {
			all[name] = filepath.Join(r.opts.Dir, name)
		}
		return all, nil
	}
	for name := range r.targets {
		if _, ok := b.Stores[name]; !ok {
			return nil, fmt.Errorf("checkpoint %s has no store %s, only %s: %w", b.Checkpoint, name, slices.Sorted(maps.Keys(b.Stores)), ErrNotFound)
		}
	}
	return r.targets, nil
}

func (r *restorer) included(p string) bool {
	for ; p != "." && p != ""; p = path.Dir(p) {
		for _, glob := range r.opts.Include {
			if matches(glob, p) || matches(glob, path.Base(p)) {
				return true
			}
		}
	}
	return false
}

// matches is path.Match for a glob that is known to be valid.
func matches(glob, name string) bool {
	ok, err := path.Match(glob, name)
	return ok && err == nil
}

func (r *restorer) place(ctx context.Context, id string, stores []place.Store) (*RestoreReport, error) {
	got, err := place.Restore(ctx, stores, &place.Options{
		Checkpoint: id, Read: r.read, Workers: r.workers,
		StrictOwner: r.opts.StrictOwner, InPlace: r.opts.InPlace, DryRun: r.opts.DryRun,
		OnPhase: func(p place.Phase, took time.Duration) { r.phases[p] = took },
		Warn:    r.warn, OnBytes: r.onBytes, OnFile: r.onFile,
	})
	if err != nil {
		return nil, err
	}
	rep := &RestoreReport{Checkpoint: id, Stores: map[string]RestoreStore{}}
	for _, s := range stores {
		g := got[s.Name]
		rep.Stores[s.Name] = RestoreStore{FilesRestored: g.Files, BytesFetched: g.BytesFetched, BytesReused: g.BytesReused}
		if !r.opts.DryRun {
			emit(r.observer.RestoredStore, RestoredStore{r.id, s.Name, rep.Stores[s.Name]})
			r.forget(s.Name, s.Target)
		}
	}
	return rep, nil
}

// forget makes what an identity cache knew of the target void: it is a new incarnation.
func (r *restorer) forget(store, target string) {
	if r.cacheDir == "" {
		return
	}
	key, err := filepath.Abs(target)
	if err == nil {
		if real, rerr := filepath.EvalSymlinks(key); rerr == nil {
			key = real
		}
		err = source.Forget(r.cacheDir, key)
	}
	if err != nil {
		r.warn(store, "", fmt.Errorf("identity cache not reset: %w", err))
	}
}

// read gets bytes of a blob. One that was deleted and that the store still has, as
// versioned buckets do, is read from there.
func (r *restorer) read(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	rc, err := r.blobs.Get(ctx, key, offset, length)
	if !errors.Is(err, fs.ErrNotExist) {
		return rc, err
	}
	if old, derr := r.blobs.GetDeleted(ctx, key, offset, length); derr == nil {
		return old, nil
	}
	return nil, err
}

func (r *restorer) warn(store, path string, err error) {
	text := err.Error()
	if path != "" {
		text = path + ": " + text
	}
	r.mu.Lock()
	r.warnings = append(r.warnings, store+": "+text)
	r.mu.Unlock()
	emit(r.observer.Warned, Warned{r.id, store, text})
}

func (r *restorer) onBytes(store string, n int64) {
	emit(r.observer.Progress, Progress{Task: r.id, Store: store, Bytes: n})
}

func (r *restorer) onFile(store string, e *snapshot.Entry, took time.Duration) {
	emit(r.observer.FileRestored, FileDone{r.id, store, e.Size, took})
	emit(r.observer.Progress, Progress{Task: r.id, Store: store, Files: 1})
}

// hold pins a checkpoint against owners that commit faster than this restore reads. A
// repository that cannot be written is restored without.
func (r *restorer) hold(ctx context.Context, id, owner string) bool {
	err := r.amend(ctx, checkpoint.Hold, func(s *head.State, slot uint64) (*head.State, error) {
		return s.AddHold(id, owner, slot, time.Now())
	})
	if err != nil && !errors.Is(err, ErrBaseGone) {
		r.warn("", "", fmt.Errorf("checkpoint not held, the restore may lose it again: %w", err))
	}
	return err == nil
}

func (r *restorer) release(ctx context.Context, owner string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonTime)
	defer cancel()
	err := r.amend(ctx, checkpoint.Release, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Release([]string{owner}, slot, time.Now()), nil
	})
	if err != nil {
		r.warn("", "", fmt.Errorf("hold not released, it ends by itself: %w", err))
	}
}
