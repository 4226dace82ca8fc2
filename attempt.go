package snapferry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// unsealedTTL is how long a store that can expire objects keeps a blob that was never
// sealed (P7). Stores that cannot leave it to the sweep.
const unsealedTTL = 3 * 24 * time.Hour

// ttl is what blobs are put with. A store that expires by a rule has one only if the
// repository was made so. Without a TTL nothing can expire, and sealing is needless.
func (t *Task) ttl() time.Duration {
	if t.blobs.Expires() && !t.info.ExpireUnsealed {
		return 0
	}
	return unsealedTTL
}

// attempt is one upload: every blob of it lies under its own prefix (P5).
type attempt struct {
	head.Attempt
	task     *Task
	id       string // of the checkpoint it may become
	time     time.Time
	sequence uint64
	began    time.Time

	packer  *packer
	runs    []*storeRun
	borrows []string        // checkpoints whose blobs it names
	sparse  map[string]bool // packs that are given up (P12)

	mu      sync.Mutex // guards what follows while packs are under way
	next    int
	unnamed []waiting // written and not sealed yet
	clock   time.Time // the store's, as last seen; zero if nothing expires
	kept    keeper
	lists   []string // chunk lists written to record progress

	done     head.Checkpoint
	stores   map[string]storeEntry
	indexes  map[string]*base // what becomes the bases
	warnings []string
}

// waiting is a blob that has to be sealed.
type waiting struct {
	key   string
	since time.Time // by the store's clock, it is no older than this
}

// newAttempt begins an attempt: its ordinal is one more than that of any before in
// this epoch, and its checkpoint id is fixed here (P1).
func (t *Task) newAttempt() *attempt {
	t.ordinal++
	a := &attempt{
		Attempt: head.NewAttempt(t.epoch, t.ordinal), task: t, began: time.Now(),
		sequence: t.state.State.Sequence + 1, stores: map[string]storeEntry{}, indexes: map[string]*base{},
	}
	a.id, a.time = t.state.State.NextID(t.opts.now(), t.ordinal)
	return a
}

// newKey names the next blob of the attempt.
func (a *attempt) newKey() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next++
	return fmt.Sprintf("%s%s/%06d", blobPrefix(a.task.id), a.Attempt, a.next)
}

// put writes one new blob of the attempt.
func (a *attempt) put(ctx context.Context, key string, body blob.Body) error {
	since, err := a.storeTime(ctx)
	if err != nil {
		return err
	}
	if err := a.task.putBlob(ctx, key, body); err != nil {
		return err
	}
	a.mu.Lock()
	a.unnamed = append(a.unnamed, waiting{key, since})
	a.mu.Unlock()
	return nil
}

// expiringSize bounds the blobs that the store may expire: what every driver can create
// only if it is absent. Larger ones are left to the sweep alone.
const expiringSize = 32 << 20

// putBlob puts a blob under a key that nobody else writes. One that can expire is created
// only: a try whose answer was lost and that arrives after the seal would bring the expiry
// back, and a published blob would go (I2).
func (t *Task) putBlob(ctx context.Context, key string, body blob.Body) error {
	if !t.info.ExpireUnsealed {
		return t.blobs.Put(ctx, key, body, blob.PutOptions{TTL: t.ttl()})
	}
	if body.Size > expiringSize {
		return t.blobs.Put(ctx, key, body, blob.PutOptions{})
	}
	err := t.blobs.Put(ctx, key, body, blob.PutOptions{TTL: unsealedTTL, IfAbsent: true})
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := t.blobs.Stat(ctx, key) // an earlier try's
	if err == nil && info.Size != body.Size {
		err = fmt.Errorf("put %s: it is there with %d bytes of %d: %w", key, info.Size, body.Size, ErrCorrupt)
	}
	return err
}

// putPack is put for data; a long upload records its progress after it.
func (a *attempt) putPack(ctx context.Context, key string, body blob.Body) error {
	if err := a.put(ctx, key, body); err != nil {
		return err
	}
	return a.keepProgress(ctx)
}

// storeTime is a time of the store's that has passed: the one it had at the last seal, or
// when the attempt began to write. It is zero if nothing expires.
func (a *attempt) storeTime(ctx context.Context) (time.Time, error) {
	if !a.task.info.ExpireUnsealed {
		return time.Time{}, nil
	}
	a.mu.Lock()
	clock := a.clock
	a.mu.Unlock()
	if !clock.IsZero() {
		return clock, nil
	}
	clock, err := a.task.blobs.Now(ctx)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && a.clock.IsZero() {
		a.clock = clock
	}
	return clock, err
}

// seal makes permanent what was written so far. Whoever names blobs in the log seals
// them first (I2). Reused blobs are sealed already.
func (a *attempt) seal(ctx context.Context) error {
	a.mu.Lock()
	sealed := slices.Clone(a.unnamed)
	a.mu.Unlock()
	keys := make([]string, len(sealed))
	for i, w := range sealed {
		keys[i] = w.key
	}
	if a.task.ttl() > 0 {
		if err := a.task.blobs.RemoveTTL(ctx, keys); err != nil {
			return fmt.Errorf("seal: %w", err)
		}
	}
	if err := a.inTime(ctx, sealed); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	a.mu.Lock()
	a.unnamed = slices.DeleteFunc(a.unnamed, func(w waiting) bool { return slices.Contains(keys, w.key) })
	a.mu.Unlock()
	return nil
}

// inTime fails when half of a blob's TTL had passed before the seal (P7): a store works
// through what has expired when it likes, and may have an object on its list although the
// seal found it.
func (a *attempt) inTime(ctx context.Context, sealed []waiting) error {
	if !a.task.info.ExpireUnsealed || len(sealed) == 0 {
		return nil
	}
	now, err := a.task.blobs.Now(ctx)
	if err != nil {
		return err
	}
	oldest := slices.MinFunc(sealed, func(x, y waiting) int { return x.since.Compare(y.since) })
	if took := now.Sub(oldest.since); took >= unsealedTTL/2 {
		return fmt.Errorf("blobs waited %s for it, and the store expires them after %s; run it again", took.Round(time.Second), unsealedTTL)
	}
	a.mu.Lock()
	a.clock = now
	a.mu.Unlock()
	return nil
}

// upload runs P5 a to d. What it reuses is remembered in the attempt; a base that was
// pruned in the meantime shows when publishing.
func (p *Pending) upload(ctx context.Context) error {
	t := p.task
	if err := t.resolve(ctx); err != nil {
		return err
	}
	a := t.newAttempt()
	p.attempt = a
	err := a.upload(ctx, p)
	if blobGone(err) {
		err = t.whyGone(ctx, a, err)
	}
	if undecided(err) {
		return err
	}
	if err != nil {
		t.abandon(ctx, a)
		return err
	}
	emit(t.opts.Observer.Uploaded, a.uploaded())
	return nil
}

func (a *attempt) upload(ctx context.Context, p *Pending) error {
	if err := a.read(ctx, p, a.putPack); err != nil {
		return err
	}
	if err := a.putIndexes(ctx); err != nil {
		return err
	}
	if err := a.putCheckpoint(ctx, p.offsets); err != nil {
		return err
	}
	return a.seal(ctx)
}

// read reads what may have changed and gives the new chunks to put, in packs. When it
// returns nil, all of them are durable.
func (a *attempt) read(ctx context.Context, p *Pending, put func(context.Context, string, blob.Body) error) error {
	if err := a.borrow(ctx, p); err != nil {
		return err
	}
	var err error
	if a.sparse, err = a.chooseSparse(ctx, p); err != nil {
		return err
	}
	var older *history
	if !a.task.opts.Full {
		older = newHistory(&a.task.view, a.task.state.State, p.bases())
	}
	a.packer = newPacker(ctx, &a.task.opts, func() map[snapshot.Digest]snapshot.Location { return a.reusable(p) }, older, a.newKey, put)
	a.packer.sparse = a.sparse
	up := newUploader(a.task.id, &a.task.opts, a.packer)
	for _, f := range p.images {
		a.runs = append(a.runs, a.newRun(f, p.sources[f.name], up))
	}
	err = errors.Join(a.readStores(ctx), a.closeCaches())
	if ferr := a.packer.flush(); ferr != nil {
		err = ferr // the cause; readers only saw that the group had ended
	}
	a.borrows = append(a.borrows, older.borrowed()...)
	slices.Sort(a.borrows)
	return err
}

// bases returns the committed snapshots of the stores at hand.
func (p *Pending) bases() map[string]*base {
	out := map[string]*base{}
	for _, f := range p.images {
		if b := p.task.bases[f.name]; b != nil {
			out[f.name] = b
		}
	}
	return out
}

// borrow notes whose content the attempt may reuse: that of the bases of its stores,
// and of an upload that was interrupted (P5b, P5g).
func (a *attempt) borrow(ctx context.Context, p *Pending) error {
	if a.task.opts.Full {
		return nil
	}
	for _, b := range p.bases() {
		if !slices.Contains(a.borrows, b.checkpoint) {
			a.borrows = append(a.borrows, b.checkpoint)
		}
	}
	partial := a.task.state.State.Partial
	if partial == nil {
		return nil
	}
	list, err := a.task.partial(ctx, partial)
	switch {
	case errors.Is(err, ErrCorrupt), blobGone(err):
		a.warn("", fmt.Sprintf("the progress of an interrupted upload is damaged and not used: %v", err))
		return nil
	case err != nil:
		return err
	}
	sizes, err := a.task.sizes(ctx, blobKeys(list.Blobs))
	if err != nil {
		return err
	}
	there := slices.DeleteFunc(list.Chunks, func(c snapshot.StoredChunk) bool { return !holds(sizes[c.Blob], c.Location) })
	a.kept = keeper{attempt: partial.Attempt, chunks: there}
	return nil
}

// reusable returns the chunks that need not be sent, and those in packs that are given up
// where there is no other place. A commit that reads nothing never asks.
func (a *attempt) reusable(p *Pending) map[snapshot.Digest]snapshot.Location {
	known := make(map[snapshot.Digest]snapshot.Location)
	if a.task.opts.Full {
		return known
	}
	note := func(d snapshot.Digest, l snapshot.Location) {
		if _, ok := known[d]; !ok || !a.sparse[l.Blob] {
			known[d] = l
		}
	}
	for _, b := range p.bases() {
		for i := range b.index.Entries {
			for _, c := range b.index.Entries[i].Chunks {
				if !b.lost[c.Blob] {
					note(c.Digest, c.Location)
				}
			}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.kept.chunks {
		note(c.Digest, c.Location)
	}
	return known
}

// newRun prepares one store for reading.
func (a *attempt) newRun(f *frozen, src source.Source, up *uploader) *storeRun {
	t := a.task
	r := &storeRun{frozen: f, src: src, up: up, read: map[string]*content{}}
	if b := t.bases[f.name]; b != nil {
		r.from, r.base = b, b.index
	}
	if t.opts.CacheDir == "" || f.img.CacheKey() == "" {
		return r
	}
	cache, err := source.OpenCache(t.opts.CacheDir, f.img)
	if err != nil {
		a.warn(f.name, fmt.Sprintf("every file is read: %v", err))
		return r
	}
	r.cache = cache
	return r
}

// readStores reads all stores at once: they share the readers' and packers' bounds.
func (a *attempt) readStores(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, r := range a.runs {
		g.Go(func() error {
			start := time.Now()
			if err := r.run(gctx); err != nil {
				return fmt.Errorf("store %s: %w", r.name, err)
			}
			emit(a.task.opts.Observer.StoreRead, StoreRead{a.task.id, r.name, time.Since(start)})
			return nil
		})
	}
	return g.Wait()
}

// putIndexes writes one index object per store. All chunks it names are durable (I2).
func (a *attempt) putIndexes(ctx context.Context) error {
	for _, r := range a.runs {
		if err := a.putIndex(ctx, r); err != nil {
			return fmt.Errorf("store %s: %w", r.name, err)
		}
	}
	return nil
}

func (a *attempt) putIndex(ctx context.Context, r *storeRun) error {
	t := a.task
	x := &snapshot.Index{
		Job: t.id.Job, Task: t.id.Task, Store: r.name, Checkpoint: a.id, Created: a.time,
		Borrows: a.borrows, Entries: r.entries,
	}
	var prev *snapshot.Root
	if b := t.bases[r.name]; b != nil {
		prev, x.Prev = b.root, b.marker.String()
	}
	if t.opts.Full {
		prev = nil
	}
	key := a.newKey()
	object, root, err := snapshot.Encode(x, key, prev)
	if err != nil {
		return err
	}
	if err := a.put(ctx, key, blob.Bytes(object)); err != nil {
		return err
	}
	m := marker{Key: key, Size: root.Size, Digest: root.Digest.String()}
	tot := root.Totals
	a.stores[r.name] = storeEntry{Index: m, Files: tot.Files, Dirs: tot.Dirs, Links: tot.Symlinks + tot.Links, Bytes: tot.Bytes}
	a.indexes[r.name] = &base{checkpoint: a.id, marker: m, root: root, index: x}
	return nil
}

// putCheckpoint writes the blob that the checkpoint's entry in the head will name.
func (a *attempt) putCheckpoint(ctx context.Context, offsets map[string]string) error {
	t := a.task
	payload, err := json.Marshal(&checkpointBlob{
		Job: t.id.Job, Task: t.id.Task, Checkpoint: a.id, Epoch: a.Epoch, Sequence: a.sequence, Time: a.time,
		Offsets: offsetPairs(offsets), Labels: t.opts.Labels, Consistent: a.consistent(), Stores: a.stores,
	})
	if err != nil {
		return err
	}
	ref, err := a.putRef(ctx, frame.Encode("checkpoint", 1, payload))
	a.done = head.Checkpoint{
		ID: a.id, Epoch: a.Epoch, Sequence: a.sequence, Stores: slices.Sorted(maps.Keys(a.stores)), Blob: ref,
	}
	return err
}

// putRef writes a small blob of the attempt and names it as the head does.
func (a *attempt) putRef(ctx context.Context, data []byte) (head.Ref, error) {
	key := a.newKey()
	ref := head.Ref{Key: key[len(blobPrefix(a.task.id)):], Digest: frame.Digest(data)}
	return ref, a.put(ctx, key, blob.Bytes(data))
}

func (a *attempt) consistent() bool {
	return !slices.ContainsFunc(a.runs, func(r *storeRun) bool { return !r.consistent })
}

// closeCaches ends the recording; what was recorded is saved once the attempt counts.
func (a *attempt) closeCaches() error {
	var errs []error
	for _, r := range a.runs {
		if r.cache != nil {
			errs = append(errs, r.cache.Close())
		}
	}
	return errors.Join(errs...)
}

// saveCaches keeps the identities of what was read. Without them the next commit
// reads more, so trouble is only told.
func (a *attempt) saveCaches() {
	for _, r := range a.runs {
		if r.cache == nil {
			continue
		}
		if err := r.cache.Save(); err != nil {
			a.warn(r.name, fmt.Sprintf("identity cache not saved, the next commit reads the files again: %v", err))
		}
	}
}

func (a *attempt) warn(store, text string) {
	a.mu.Lock()
	a.warnings = append(a.warnings, text)
	a.mu.Unlock()
	emit(a.task.opts.Observer.Warned, Warned{a.task.id, store, text})
}

func (a *attempt) uploaded() Uploaded {
	_, stored := a.packer.durable()
	return Uploaded{Task: a.task.id, Blobs: int64(a.next), Stored: stored, Duration: time.Since(a.began), Stores: a.storeReports()}
}

func (a *attempt) storeReports() map[string]StoreReport {
	reports := map[string]StoreReport{}
	for _, r := range a.runs {
		reports[r.name] = r.report
	}
	return reports
}

func (a *attempt) markers() Markers {
	m := Markers{Checkpoint: a.id, Stores: map[string]string{}}
	for name, s := range a.stores {
		m.Stores[name] = s.Index.String()
	}
	return m
}

func (a *attempt) report(began time.Time) *CommitReport {
	rep := &CommitReport{
		Checkpoint: a.id, Epoch: a.Epoch, Sequence: a.sequence, Millis: time.Since(began).Milliseconds(),
		Stores: a.storeReports(), Consistent: a.consistent(), Warnings: a.warnings,
	}
	for _, r := range a.runs {
		for _, text := range r.warnings {
			rep.Warnings = append(rep.Warnings, r.name+": left out "+text)
		}
	}
	return rep
}
