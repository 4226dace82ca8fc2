package snapferry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// walks is how often a directory that changes under a backup is looked at again
// before the commit fails (Options.Reread, S2).
const walks = 5

// content is what was found of a file: how it is cut, its chunks, its attributes.
type content struct {
	identity  source.Identity
	chunkSize uint32
	chunks    []snapshot.Chunk
	xattrs    []snapshot.Xattr
	proven    bool // it is what the base has; only chunks that had to move were read
	moved
}

// moved counts what of a file was stored: bytes of it that are new, what was written to
// the store for them, and what was written for those that pack upkeep moved (P12).
type moved struct{ sent, stored, rewritten int64 }

// tally is moved while the chunks of the file are under way.
type tally struct{ sent, stored, rewritten atomic.Int64 }

func (t *tally) add(was fate, length uint32, loc *snapshot.Location) {
	switch was {
	case sent:
		t.sent.Add(int64(length))
		t.stored.Add(int64(loc.Stored))
	case rewritten:
		t.rewritten.Add(int64(loc.Stored))
	}
}

func (t *tally) sum() moved { return moved{t.sent.Load(), t.stored.Load(), t.rewritten.Load()} }

// proof is what an identity cache records of a file: all that an unchanged ctime
// vouches for and that an index holds, so that an entry with the same proof can be
// taken over from any index. Mode, owner and times come from the walk.
func proof(e *snapshot.Entry) snapshot.Digest {
	id := snapshot.ContentID(e)
	if len(e.Xattrs) == 0 {
		return id
	}
	b := id[:]
	for _, x := range e.Xattrs {
		b = fmt.Appendf(b, "%d %d %s%s", len(x.Name), len(x.Value), x.Name, x.Value)
	}
	return snapshot.Sum(b)
}

// storeRun is one store on its way into a snapshot: it is compared with the base, what
// may have changed is read once, and out comes the list of entries.
type storeRun struct {
	*frozen
	src   source.Source
	from  *base           // nil: nothing to compare with
	base  *snapshot.Index // of from
	cache *source.Cache   // nil: every file is read
	up    *uploader

	read       map[string]*content // read in this attempt, by path
	retained   map[string]*snapshot.Entry
	moving     map[string]*snapshot.Entry // unchanged, but with chunks in packs that are given up
	entries    []snapshot.Entry
	report     StoreReport
	consistent bool
	warnings   []string
}

// uploader is what the stores of one attempt share.
type uploader struct {
	id      TaskID
	opts    *Options
	packer  *packer
	buffers chan []byte
}

func newUploader(id TaskID, opts *Options, p *packer) *uploader {
	u := &uploader{id: id, opts: opts, packer: p, buffers: make(chan []byte, opts.Readers)}
	for range opts.Readers {
		u.buffers <- nil
	}
	return u
}

// run brings the store into its final list of entries. Without Reread a file that
// changed fails the commit. With it the directory is walked again until two walks agree:
// then the first of them was one cut. A directory that never stands still is taken as
// the last walk found it, each file whole, and the report says so (S2).
func (r *storeRun) run(ctx context.Context) error {
	whole := false // a look has read every file of its walk; r.entries is the last such
	for walk := 1; ; walk++ {
		differs, err := r.look(ctx)
		whole = whole || err == nil
		if !r.up.opts.Reread {
			r.consistent = err == nil
			return err
		}
		if err == nil && !differs {
			r.consistent = true // all is as the base has it
			return nil
		}
		if err != nil && !errors.Is(err, source.ErrChanged) {
			return err
		}
		before := r.img.Entries()
		if walk == walks {
			if whole {
				return nil
			}
			return fmt.Errorf("%w, also after %d looks; stop its writer, or back it up through its own checkpoint", err, walks)
		}
		if ferr := r.freezeAgain(ctx); ferr != nil {
			return ferr
		}
		if err == nil && len(source.Changed(before, r.img.Entries())) == 0 {
			r.consistent = true
			return nil
		}
	}
}

// look compares the present walk with the base, reads what has to be read, and builds the
// entries. It tells whether the walk differs from the base in any way.
func (r *storeRun) look(ctx context.Context) (differs bool, err error) {
	todo, differs := r.compare()
	if err := r.readAll(ctx, todo); err != nil {
		return true, err
	}
	return differs, r.build()
}

func (r *storeRun) freezeAgain(ctx context.Context) error {
	img, err := r.src.Freeze(ctx)
	if err != nil {
		return err
	}
	err = r.img.Release()
	r.img = img
	return err
}

// compare says which files have to be read: all but those whose content is proven,
// by the cache and the base together, to be what the base has (I5). differs tells
// whether anything else is not as in the base either.
func (r *storeRun) compare() (todo []*source.Entry, differs bool) {
	start := time.Now()
	entries := r.img.Entries()
	links := source.HardLinks(entries)
	r.retained, r.moving = make(map[string]*snapshot.Entry), make(map[string]*snapshot.Entry)
	ev := Compared{Task: r.up.id, Store: r.name}
	base := walker{index: r.base}
	for i := range entries {
		e := &entries[i]
		b := base.find(e.Path)
		differs = differs || b == nil || metadata(e).Type != b.Type || e.Type == source.Symlink && e.Link != b.Link
		if e.Type == source.Directory {
			ev.countDir(b)
		}
		if _, link := links[i]; link || e.Type != source.Regular {
			continue
		}
		if c := r.read[e.Path]; c != nil && c.identity == e.Identity {
			continue
		}
		b = r.unchanged(e, b)
		if b != nil && r.hasSparse(b) {
			r.moving[e.Path] = b
		} else if b != nil {
			r.retained[e.Path] = b
			ev.RetainedFiles++
			ev.RetainedBytes += e.Size
			continue
		}
		todo = append(todo, e)
		ev.ToReadFiles++
		ev.ToReadBytes += e.Size
	}
	r.countRemoved(entries, &ev)
	ev.Duration = time.Since(start)
	emit(r.up.opts.Observer.Compared, ev)
	return todo, differs || len(todo) > 0 || ev.RemovedFiles+ev.RemovedDirs > 0
}

func (ev *Compared) countDir(b *snapshot.Entry) {
	if b != nil && b.Type == snapshot.Dir {
		ev.RetainedDirs++
	} else {
		ev.AddedDirs++
	}
}

// unchanged returns the base's entry if e is proven to have its content.
func (r *storeRun) unchanged(e *source.Entry, b *snapshot.Entry) *snapshot.Entry {
	if r.cache == nil || r.up.opts.Full || b == nil || b.Type != snapshot.Regular || b.IsLink() || b.Size != e.Size {
		return nil
	}
	id, ok := r.cache.Lookup(e)
	if !ok || proof(b) != snapshot.Digest(id) || !r.from.reusable(b) {
		return nil
	}
	return b
}

// hasSparse tells whether a chunk of an entry lies in a pack that is given up.
func (r *storeRun) hasSparse(b *snapshot.Entry) bool {
	sparse := r.up.packer.sparse
	return len(sparse) > 0 && slices.ContainsFunc(b.Chunks, func(c snapshot.Chunk) bool { return sparse[c.Blob] })
}

// countRemoved counts what the base has and the store has not.
func (r *storeRun) countRemoved(entries []source.Entry, ev *Compared) {
	r.report.FilesRemoved, r.report.BytesRemoved = 0, 0
	if r.base == nil {
		return
	}
	i := 0
	for k := range r.base.Entries {
		b := &r.base.Entries[k]
		for i < len(entries) && entries[i].Path < b.Path {
			i++
		}
		if i < len(entries) && entries[i].Path == b.Path {
			continue
		}
		if b.Type == snapshot.Dir {
			ev.RemovedDirs++
			continue
		}
		r.report.FilesRemoved++
		r.report.BytesRemoved += b.Size
	}
	ev.RemovedFiles, ev.RemovedBytes = r.report.FilesRemoved, r.report.BytesRemoved
}

// readAll reads files, big ones first, and those too young to be recorded in the
// cache last, when they have come of age (S4).
func (r *storeRun) readAll(ctx context.Context, todo []*source.Entry) error {
	if len(todo) == 0 {
		return nil
	}
	slices.SortStableFunc(todo, func(a, b *source.Entry) int { return cmp.Compare(b.Size, a.Size) })
	var young []*source.Entry
	if r.cache != nil {
		if err := r.cache.Begin(); err != nil {
			return err
		}
		todo, young = partition(todo, r.cache.Settled)
	}
	if err := r.readGroup(ctx, todo); err != nil || len(young) == 0 {
		return err
	}
	if err := r.cache.WaitSettled(ctx, young); err != nil {
		return err
	}
	if err := r.cache.Begin(); err != nil {
		return err
	}
	return r.readGroup(ctx, young)
}

func partition(in []*source.Entry, ok func(*source.Entry) bool) (yes, no []*source.Entry) {
	for _, e := range in {
		if ok(e) {
			yes = append(yes, e)
		} else {
			no = append(no, e)
		}
	}
	return yes, no
}

// readGroup reads files in parallel. A file that changed does not stop the others
// when a new walk will come; it is what is returned at the end.
func (r *storeRun) readGroup(ctx context.Context, todo []*source.Entry) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(r.up.opts.Readers)
	var mu sync.Mutex
	var changed error
	for _, e := range todo {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error {
			start := time.Now()
			c, err := r.readFile(gctx, e)
			mu.Lock()
			defer mu.Unlock()
			if errors.Is(err, source.ErrChanged) && r.up.opts.Reread {
				changed = err
				return nil
			}
			if err != nil {
				return err
			}
			r.read[e.Path] = c
			emit(r.up.opts.Observer.FileUploaded, FileDone{r.up.id, r.name, e.Size, time.Since(start)})
			emit(r.up.opts.Observer.Progress, Progress{Task: r.up.id, Store: r.name, Files: 1})
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	return changed
}

// readFile reads one file once. What is stored is what was hashed; that it is one
// state of the file, the identities before and after show.
func (r *storeRun) readFile(ctx context.Context, e *source.Entry) (c *content, err error) {
	f, err := r.img.Open(e.Path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if f.Identity() != e.Identity {
		return nil, fmt.Errorf("%s: %w", e.Path, source.ErrChanged)
	}
	if c, err = r.readContent(ctx, f, e); err != nil {
		return nil, err
	}
	if c.xattrs, err = r.xattrs(e); err != nil {
		return nil, err
	}
	if err := f.Check(); err != nil {
		return nil, err
	}
	if r.cache != nil && !e.Fresh && !c.proven {
		r.cache.Record(e.Path, f.Identity(), proof(&snapshot.Entry{Size: e.Size, ChunkSize: c.chunkSize, Chunks: c.chunks, Xattrs: c.xattrs}))
	}
	return c, nil
}

// readContent reads what has to be read of a file: all, or of one that is unchanged the
// chunks whose packs are given up. Those count only with the digests that they had; else
// the file is not unchanged, whatever its identity says, and all of it is read (I5).
func (r *storeRun) readContent(ctx context.Context, f source.File, e *source.Entry) (*content, error) {
	if b := r.moving[e.Path]; b != nil {
		c := &content{identity: e.Identity, chunkSize: b.ChunkSize, chunks: slices.Clone(b.Chunks), proven: true}
		for i := range c.chunks {
			if r.up.packer.sparse[c.chunks[i].Blob] {
				c.chunks[i].Location = snapshot.Location{}
			}
		}
		if err := r.readChunks(ctx, f, e, c); !errors.Is(err, errOtherBytes) {
			return c, err
		}
		text := fmt.Sprintf("%s has other bytes than were backed up, although it looks unchanged; it is read again", e.Path)
		emit(r.up.opts.Observer.Warned, Warned{r.up.id, r.name, text})
	}
	runs, err := f.Runs()
	if err != nil {
		return nil, err
	}
	c := &content{identity: e.Identity, chunkSize: chunkSize(e)}
	for off, n := range snapshot.Cut(e.Size, snapshotRuns(runs), c.chunkSize) {
		c.chunks = append(c.chunks, snapshot.Chunk{Offset: off, Length: n})
	}
	return c, r.readChunks(ctx, f, e, c)
}

// errOtherBytes: a chunk does not have the digest that it must have.
var errOtherBytes = errors.New("other bytes than were backed up")

// readChunks reads the chunks of c that have no place yet.
func (r *storeRun) readChunks(ctx context.Context, f source.File, e *source.Entry, c *content) error {
	var t tally
	defer func() { c.moved = t.sum() }()
	if len(c.chunks) == 1 {
		return r.readChunk(ctx, f, e, &c.chunks[0], &t)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(r.up.opts.Readers)
	for i := range c.chunks {
		if gctx.Err() != nil {
			break
		}
		if c.chunks[i].Blob != "" {
			continue
		}
		g.Go(func() error { return r.readChunk(gctx, f, e, &c.chunks[i], &t) })
	}
	return g.Wait()
}

func (r *storeRun) readChunk(ctx context.Context, f source.File, e *source.Entry, c *snapshot.Chunk, t *tally) error {
	var buf []byte
	select {
	case buf = <-r.up.buffers:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { r.up.buffers <- buf }()
	if cap(buf) < int(c.Length) {
		buf = make([]byte, max(64<<10, 1<<bits.Len32(c.Length-1))) // grown by doubling
	}
	data := buf[:c.Length]
	if n, err := f.ReadAt(data, c.Offset); n < len(data) {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("%s: %w: it became shorter", e.Path, source.ErrChanged)
		}
		return fmt.Errorf("read %s at %d: %w", e.Path, c.Offset, err)
	}
	digest := snapshot.Sum(data)
	if !c.Digest.IsZero() && c.Digest != digest {
		return errOtherBytes
	}
	c.Digest = digest
	loc, was, err := r.up.packer.add(data, c.Digest, !compressedAlready(e))
	if err != nil {
		return err
	}
	c.Location = loc
	t.add(was, c.Length, &loc)
	p := Progress{Task: r.up.id, Store: r.name, Bytes: int64(c.Length)}
	if was == sent {
		p.Moved = p.Bytes
	}
	emit(r.up.opts.Observer.Progress, p)
	return nil
}

func chunkSize(e *source.Entry) uint32 {
	if e.ChunkSize == 0 {
		return snapshot.DefaultChunkSize
	}
	return min(max(e.ChunkSize, snapshot.MinChunkSize), snapshot.MaxChunkSize)
}

func snapshotRuns(in []source.Run) []snapshot.Run {
	out := make([]snapshot.Run, len(in))
	for i, r := range in {
		out[i] = snapshot.Run(r)
	}
	return out
}

// walker finds paths of a sorted index, asked for in order, in one pass.
type walker struct {
	index *snapshot.Index
	at    int
}

func (w *walker) find(path string) *snapshot.Entry {
	if w.index == nil {
		return nil
	}
	for w.at < len(w.index.Entries) && w.index.Entries[w.at].Path < path {
		w.at++
	}
	if w.at < len(w.index.Entries) && w.index.Entries[w.at].Path == path {
		return &w.index.Entries[w.at]
	}
	return nil
}
