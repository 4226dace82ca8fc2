package snapferry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
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

// Task is an owned task: the one place from which its checkpoints are published. It
// holds the epoch it claimed at Open; when somebody else claims a newer one, every
// method that publishes gives ErrFenced from then on.
type Task struct {
	view
	opts Options
	info RepoInfo

	mu struct {
		sync.Mutex
		busy, closed bool
	}

	// What follows belongs to whoever set busy.
	epoch   uint64
	ordinal uint32 // last attempt of this epoch
	state   *head.Loaded
	stale   bool             // the log has gone on: reload before anything is begun
	bases   map[string]*base // by store
	forget  []string
	told    int                 // how many of forget the entry that was sent last carries
	cleaned []string            // dropped checkpoints whose blobs are gone
	tables  map[string][]string // blobs of an index, by marker: what clean-up asks each time
	upkeep  upkeep
}

// base is a committed snapshot of a store that the next one is compared with.
type base struct {
	checkpoint string
	marker     marker
	root       *snapshot.Root
	index      *snapshot.Index
	lost       map[string]bool // blobs it names that do not hold what it says
}

// Open takes the task over: it claims the next epoch, which fences every older owner,
// loads the last committed snapshot, and deletes what is dead. Nothing is waited for.
// The repository must exist (Ensure). The caller keeps blobs and checkpoints and
// closes them after the task.
func Open(ctx context.Context, id TaskID, blobs *blob.Store, checkpoints *checkpoint.Store, opts *Options) (*Task, error) {
	start := time.Now()
	t, err := newTask(id, blobs, checkpoints, opts)
	if err != nil {
		return nil, wrap("open", id.String(), err)
	}
	if err := t.open(ctx, checkpoints); err != nil {
		emit(t.opts.Observer.Failed, Failed{id, "open", err})
		return nil, wrap("open", id.String(), err)
	}
	emit(t.opts.Observer.Opened, Opened{id, t.epoch, time.Since(start)})
	return t, nil
}

func newTask(id TaskID, blobs *blob.Store, checkpoints *checkpoint.Store, opts *Options) (*Task, error) {
	if err := id.Validate(); err != nil {
		return nil, err
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	t := &Task{view: view{id: id, blobs: blobs, log: checkpoints.Log(id)}, opts: o, bases: map[string]*base{}, tables: map[string][]string{}}
	return t, nil
}

func (t *Task) open(ctx context.Context, checkpoints *checkpoint.Store) error {
	var err error
	if t.info, err = ReadInfo(ctx, t.blobs); err != nil {
		return err
	}
	info, err := checkpoints.Info(ctx)
	if err != nil {
		return err
	}
	if err := t.bind(ctx, info.ID); err != nil {
		return err
	}
	if t.opts.IfRunning == Fail {
		if err := t.checkIdle(ctx); err != nil {
			return err
		}
	}
	if err := t.checkLog(ctx); err != nil {
		return err
	}
	if err := t.claim(ctx); err != nil {
		return err
	}
	if t.opts.External != nil {
		if err := t.confirmLast(ctx); err != nil {
			return err
		}
	}
	if err := t.loadBases(ctx); err != nil {
		return err
	}
	t.cleanUpQuietly(ctx, t.sweepAttempts, t.sweepDropped, t.log.Trim)
	return nil
}

// bind ties the task to its checkpoint store; a task that was not bound yet may be
// the first use of this blob store, which is probed once more.
func (t *Task) bind(ctx context.Context, store string) error {
	want := bind{Checkpoints: store, Mode: modeInternal}
	if t.opts.External != nil {
		want.Mode = modeExternal
	}
	err := checkBind(ctx, t.blobs, t.id, want)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := t.blobs.Probe(ctx); err != nil && !(t.info.NoFencing && errors.Is(err, blob.ErrUnfenced)) {
		return err
	}
	return ensureBind(ctx, t.blobs, t.id, want)
}

// checkIdle fails if the current epoch wrote within RunningWindow, by the store's clock.
func (t *Task) checkIdle(ctx context.Context) error {
	e, l, err := t.head(ctx)
	if err != nil || e == nil {
		return err
	}
	now, err := t.blobs.Now(ctx)
	if err != nil {
		return err
	}
	newest := e.Stored
	for info, err := range t.blobs.List(ctx, fmt.Sprintf("%s%016x-", blobPrefix(t.id), l.State.Epoch), blobPrefix(t.id)+l.State.LastDone) {
		if err != nil {
			return err
		}
		if info.Modified.After(newest) {
			newest = info.Modified
		}
	}
	if age := now.Sub(newest); age < RunningWindow {
		return fmt.Errorf("an owner (epoch %d) wrote %s ago: %w", l.State.Epoch, age.Round(time.Second), ErrRunning)
	}
	return nil
}

// checkLog refuses a task whose log is gone: a new one would show all its blobs dead.
func (t *Task) checkLog(ctx context.Context) error {
	e, err := t.log.Head(ctx)
	if e != nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for info, err := range t.blobs.List(ctx, blobPrefix(t.id), "") {
		if err != nil {
			return err
		}
		if e, err := t.log.Head(ctx); e != nil || !errors.Is(err, fs.ErrNotExist) {
			return err // somebody has claimed it since
		}
		return fmt.Errorf("%w: the log is gone, but the data of checkpoints is there (%s); put %slog/ back from a copy, or use another task", ErrCorrupt, info.Key, taskPrefix(t.id))
	}
	return nil
}

// claim takes the next epoch (P4).
func (t *Task) claim(ctx context.Context) error {
	return t.append(ctx, checkpoint.Claim, func(s *head.State, _ uint64) (*head.State, error) {
		n := s.Claim()
		t.epoch, t.ordinal = n.Epoch, 0
		return n, nil
	}, nil)
}

// append is view.append for the owner, who goes on from the new head.
func (t *Task) append(ctx context.Context, kind checkpoint.Kind, next transition, put func([]byte) (head.Ref, error)) error {
	before, after, err := t.view.append(ctx, kind, next, put)
	if err != nil {
		return err
	}
	t.state = after
	t.cleanUpQuietly(ctx, func(ctx context.Context) error { return t.deleteSegments(ctx, before, after) })
	return nil
}

// deleteSegments deletes the segments that the new head has replaced, as far as P8 lets it.
func (t *Task) deleteSegments(ctx context.Context, before, after *head.Loaded) error {
	var dead []string
	for _, r := range before.Segments() {
		key := blobPrefix(t.id) + r.Key
		if !slices.Contains(after.Segments(), r) && t.deadAttempt(after.State, key) {
			dead = append(dead, key)
		}
	}
	return t.blobs.Delete(ctx, dead)
}

// confirmLast tells the log what the application published last (P6).
func (t *Task) confirmLast(ctx context.Context) error {
	id, err := t.opts.External.Last(ctx)
	if err != nil || id == "" {
		return err
	}
	if t.state.State.Find(id) != nil {
		return nil
	}
	return t.confirm(ctx, id, false)
}

// loadBases loads, for each store, the newest snapshot there is. One that is damaged
// is told and not built upon: what it would have saved is uploaded again.
func (t *Task) loadBases(ctx context.Context) error {
	byID := map[string][]string{}
	for store, id := range t.state.State.Holders {
		byID[id] = append(byID[id], store)
	}
	clear(t.bases)
	clear(t.upkeep.packs)
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		err := t.loadCheckpoint(ctx, id, byID[id])
		switch {
		case errors.Is(err, ErrCorrupt), blobGone(err):
			text := fmt.Sprintf("checkpoint %s is damaged, its content is uploaded again; run verify: %v", id, err)
			emit(t.opts.Observer.Warned, Warned{Task: t.id, Text: text})
		case err != nil:
			return fmt.Errorf("checkpoint %s: %w", id, err)
		}
	}
	return nil
}

func (t *Task) loadCheckpoint(ctx context.Context, id string, stores []string) error {
	c := t.state.State.Find(id)
	if c == nil {
		return nil
	}
	b, err := t.checkpointBlob(ctx, c)
	if err != nil {
		return err
	}
	for _, store := range stores {
		if err := t.loadBase(ctx, store, id, b.Stores[store].Index); err != nil {
			return fmt.Errorf("store %s: %w", store, err)
		}
	}
	return nil
}

func (t *Task) loadBase(ctx context.Context, store, id string, m marker) error {
	root, x, err := t.index(ctx, m)
	if err != nil {
		return err
	}
	b := &base{checkpoint: id, marker: m, root: root, index: x}
	t.bases[store] = b
	return t.findLost(ctx, store, b)
}

// Epoch returns the epoch this owner claimed.
func (t *Task) Epoch() uint64 { return t.epoch }

// Forget ends the protection that retention gives to the newest checkpoint of a store
// which later ones lack (P5e). It takes effect with the next commit.
func (t *Task) Forget(stores ...string) error {
	if err := t.enter(); err != nil {
		return wrap("forget", t.id.String(), err)
	}
	defer t.leave()
	t.forget = append(t.forget, stores...)
	return nil
}

// Stores returns the names of the stores that the last committed checkpoint has.
func (t *Task) Stores() ([]string, error) {
	if err := t.enter(); err != nil {
		return nil, wrap("read", t.id.String(), err)
	}
	defer t.leave()
	if c := t.state.State.Latest(); c != nil {
		return slices.Clone(c.Stores), nil
	}
	return nil, nil
}

// Snapshot freezes all sources in a row. Between its first line and its return the
// caller must apply nothing to any of the stores, and offsets must have been read in
// that window: that makes the stores and the offsets one cut (S1). The result must be
// ended by Commit, Publish or Abort; until then the task is busy.
func (t *Task) Snapshot(ctx context.Context, sources map[string]source.Source, offsets map[string]string) (*Pending, error) {
	start := time.Now()
	if err := checkSources(sources); err != nil {
		return nil, wrap("snapshot", t.id.String(), err)
	}
	if err := t.enter(); err != nil {
		return nil, wrap("snapshot", t.id.String(), err)
	}
	p := &Pending{task: t, offsets: maps.Clone(offsets), sources: maps.Clone(sources), began: start}
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		if err := p.freeze(ctx, name, sources[name]); err != nil {
			return nil, wrap("snapshot", t.id.String(), errors.Join(err, p.end()))
		}
	}
	p.frozen = time.Since(start)
	emit(t.opts.Observer.Frozen, Frozen{t.id, len(p.images), p.frozen})
	return p, nil
}

func (p *Pending) freeze(ctx context.Context, name string, src source.Source) error {
	img, err := src.Freeze(ctx)
	if err == nil {
		p.images = append(p.images, &frozen{name, img})
		err = restoredWhole(img)
	}
	if err != nil {
		return fmt.Errorf("store %s: %w", name, err)
	}
	return nil
}

// restoredWhole refuses a store that an interrupted restore of several has left in a
// state that never was (S7).
func restoredWhole(img source.Image) error {
	single := len(img.Entries()) > 0 && img.Entries()[0].Path != ""
	if single || img.CacheKey() == "" {
		return nil
	}
	return place.Unfinished(img.CacheKey())
}

func checkSources(sources map[string]source.Source) error {
	if len(sources) == 0 {
		return errors.New("no stores given")
	}
	for name := range sources {
		if err := checkpoint.ValidName(name); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	return nil
}

// Close ends the use of the task. Its epoch stays with it until somebody claims the
// next; there is no lease to give back. A commit that is under way keeps the task
// until it ends.
func (t *Task) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.busy {
		return wrap("close", t.id.String(), ErrBusy)
	}
	t.mu.closed = true
	return nil
}

func (t *Task) enter() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return ErrClosed
	}
	if t.mu.busy {
		return ErrBusy
	}
	t.mu.busy = true
	return nil
}

func (t *Task) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.busy = false
}
