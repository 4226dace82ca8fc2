package place

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// durability is how staged files are made durable before the swap.
type durability int

const (
	// automatic is syncEach for few files and syncWhole for many: see BenchmarkDurability.
	automatic durability = iota
	syncEach             // fsync of every file as it is complete, then of every directory
	syncWhole            // one syncfs at the end
)

// Bounds of the work beside fetching.
const (
	finishers     = 16      // files that are flushed at once
	manyFiles     = 4096    // from here on one syncfs is no slower than so many fsyncs
	writebackUnit = 1 << 20 // writes from this size on are sent to the disk at once
)

// counters is a Report in the making.
type counters struct{ files, fetched, reused atomic.Int64 }

// builder fills the staged trees.
type builder struct {
	opts  *Options
	wants *wants
	whole bool // durable by syncfs
	meta  map[*target]*meta

	ends   chan ending    // complete files on their way to the finishers
	staged atomic.Bool    // something is worth being resumed
	pool   errgroup.Group // the finishers; build waits for them
	cancel context.CancelCauseFunc
	close  sync.Once
}

// ending is a complete file that still needs its metadata and its flush.
type ending struct {
	f  *file
	fd int
}

// start starts the finishers. They stop at done.
func (b *builder) start(ctx context.Context) context.Context {
	ctx, b.cancel = context.WithCancelCause(ctx)
	b.ends = make(chan ending, finishers)
	for range finishers {
		b.pool.Go(func() error {
			for e := range b.ends {
				err := b.finish(e)
				if err := errors.Join(err, unix.Close(e.fd)); err != nil {
					b.cancel(err)
				}
			}
			return nil
		})
	}
	return ctx
}

// done waits until every complete file is finished.
func (b *builder) done() {
	b.close.Do(func() { close(b.ends) })
	b.pool.Wait()
}

// finish sets the metadata of a complete file and flushes it.
func (b *builder) finish(e ending) error {
	t, entry := e.f.t, e.f.entry
	if err := b.meta[t].open(t.tree, e.fd, entry, e.f.resumed); err != nil {
		return t.fault(err)
	}
	if !b.whole {
		err := t.tree.do("fsync", entry.Path, func() error { return unix.Fsync(e.fd) })
		if err != nil {
			return t.fault(err)
		}
	}
	t.report.files.Add(1)
	if b.opts.OnFile != nil {
		b.opts.OnFile(t.store.Name, entry, e.f.age())
	}
	return nil
}

// dirs makes all directories, open for the owner only; their own modes come last.
func (b *builder) dirs(t *target) error {
	for i := range t.store.Index.Entries {
		if e := &t.store.Index.Entries[i]; e.Type == snapshot.Dir && e.Path != "" {
			if err := t.tree.mkdir(e.Path); err != nil {
				return t.fault(err)
			}
		}
	}
	return nil
}

// put writes verified bytes to the place of chunk i, which the caller has claimed.
func (b *builder) put(ctx context.Context, i int, p []byte) error {
	f, c := b.wants.file(i), b.wants.chunk(i)
	fd, err := f.open()
	if err != nil {
		return f.t.fault(err)
	}
	err = f.t.tree.do("write", f.entry.Path, func() error { return writeAt(fd, p, c.Offset) })
	if err != nil {
		unix.Close(fd)
		return f.t.fault(err)
	}
	b.staged.Store(true)
	if len(p) >= writebackUnit {
		// The disk begins now and not at the fsync. It is no promise, so errors wait for that.
		unix.SyncFileRange(fd, c.Offset, int64(len(p)), unix.SYNC_FILE_RANGE_WRITE)
	}
	return b.advance(ctx, f, fd)
}

// advance counts one chunk of f as in place, and ends f with the last one.
func (b *builder) advance(ctx context.Context, f *file, fd int) error {
	if f.left.Add(-1) > 0 {
		return unix.Close(fd)
	}
	select {
	case b.ends <- ending{f, fd}:
		return nil
	case <-ctx.Done():
		unix.Close(fd)
		return context.Cause(ctx)
	}
}

// writeSize is how many bytes a write call has: see blob/fsblob for why so few.
const writeSize = 32 << 10

func writeAt(fd int, p []byte, offset int64) error {
	for len(p) > 0 {
		n, err := retry(func() (int, error) { return unix.Pwrite(fd, p[:min(len(p), writeSize)], offset) })
		if err != nil {
			return err
		}
		p, offset = p[n:], offset+int64(n)
	}
	return nil
}

// age returns how long ago the first of its bytes was put in place; 0 if an earlier run
// did it all.
func (f *file) age() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.began.IsZero() {
		return 0
	}
	return time.Since(f.began)
}

// open opens the staged file for writing and creates it the first time.
func (f *file) open() (fd int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.began.IsZero() {
		f.began = time.Now()
	}
	if f.made {
		return f.t.tree.open(f.entry.Path, unix.O_RDWR, 0)
	}
	err = f.t.tree.do("create", f.entry.Path, func() error {
		fd, err = f.t.tree.open(f.entry.Path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		return -1, err
	}
	if n := len(f.entry.Chunks); n != 1 || int64(f.entry.Chunks[0].Length) != f.entry.Size {
		err = f.t.tree.do("truncate", f.entry.Path, func() error { return unix.Ftruncate(fd, f.entry.Size) })
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	f.made = true
	return fd, nil
}

// bare ends the files that have no chunk at all: empty ones and single holes.
func (b *builder) bare(ctx context.Context) error {
	for i := range b.wants.files {
		f := &b.wants.files[i]
		if len(f.entry.Chunks) > 0 {
			continue
		}
		fd, err := f.open()
		if err != nil {
			return f.t.fault(err)
		}
		if err := b.advance(ctx, f, fd); err != nil {
			return err
		}
	}
	return nil
}

// names makes symbolic links and further names of files, which are all there by now.
func (b *builder) names(t *target) error {
	for i := range t.store.Index.Entries {
		e := &t.store.Index.Entries[i]
		var err error
		switch {
		case e.Type == snapshot.Symlink:
			if err = t.tree.symlink(e.Link, e.Path); err == nil {
				err = b.meta[t].symlink(t.tree, e)
			}
		case e.IsLink():
			err = b.link(t, e)
		}
		if err != nil {
			return t.fault(err)
		}
	}
	return nil
}

// link makes a further name. Only a regular file that this restore made can be behind it.
func (b *builder) link(t *target, e *snapshot.Entry) error {
	if err := t.tree.link(e.Link, e.Path); err != nil {
		return err
	}
	t.report.files.Add(1)
	if b.opts.OnFile != nil {
		b.opts.OnFile(t.store.Name, e, 0)
	}
	return nil
}

// finishDirs sets the metadata of directories, children first, and makes all durable.
func (b *builder) finishDirs(t *target) error {
	entries := t.store.Index.Entries
	for i := len(entries) - 1; i >= 0; i-- {
		e := &entries[i]
		if e.Type != snapshot.Dir || e.Path == "" && t.base == "" {
			continue // in place the root is the target, and gets its own by the plan
		}
		if err := b.finishDir(t, e); err != nil {
			return t.fault(err)
		}
	}
	if b.whole {
		return t.tree.do("syncfs", "", func() error { return unix.Syncfs(t.tree.fd) })
	}
	return t.tree.sync()
}

func (b *builder) finishDir(t *target, e *snapshot.Entry) error {
	fd, err := t.tree.open(e.Path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := b.meta[t].open(t.tree, fd, e, false); err != nil || b.whole {
		return err
	}
	return t.tree.do("fsync", e.Path, func() error { return unix.Fsync(fd) })
}
