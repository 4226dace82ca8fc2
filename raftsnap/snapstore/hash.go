package snapstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sync/atomic"

	"github.com/zeebo/blake3"
	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/snapshot"
)

// hashers is how many files are hashed at once. Two keep a disk busy while one of them
// computes; more would take the processors from the log.
const hashers = 2

// Work paces what a store does beside the work of its member. A nil Work does not wait.
type Work struct {
	// Wait is called before bytes are read or written, at most 256 KiB at a time, and
	// returns when that may begin. An error of it ends the work.
	Wait func(ctx context.Context, bytes int) error
}

func (w *Work) wait(ctx context.Context, bytes int) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if w == nil || w.Wait == nil {
		return nil
	}
	return w.Wait(ctx, bytes)
}

// waitAll waits for more bytes than Wait is given at a time.
func (w *Work) waitAll(ctx context.Context, bytes int) error {
	for ; bytes > 0; bytes -= readSize {
		if err := w.wait(ctx, min(bytes, readSize)); err != nil {
			return err
		}
	}
	return nil
}

// each calls do for every number below n in at most as many goroutines as there are
// hashers, until one fails. Each goroutine has a buffer of its own.
func each(ctx context.Context, n int, do func(ctx context.Context, i int, buf []byte) error) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(hashers, n) {
		g.Go(func() error {
			buf := make([]byte, readSize)
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := do(ctx, i, buf); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// hasher reads files in small pieces, each hashed while the cache still has it.
type hasher struct {
	disk *disk
	work *Work
	buf  []byte
	sum  *blake3.Hasher
}

func (d *disk) hasher(w *Work, buf []byte) *hasher {
	return &hasher{disk: d, work: w, buf: buf, sum: blake3.New()}
}

// chunk returns the digest of a range of a file. A file that ends early is ErrCorrupt.
func (h *hasher) chunk(ctx context.Context, f *os.File, name string, offset int64, length uint32) (d snapshot.Digest, err error) {
	h.sum.Reset()
	for end := offset + int64(length); offset < end; {
		p := h.buf[:min(int64(len(h.buf)), end-offset)]
		if err := h.work.wait(ctx, len(p)); err != nil {
			return d, err
		}
		if err := h.disk.readAt(f, name, p, offset); err != nil {
			return d, short(name, err)
		}
		h.sum.Write(p)
		offset += int64(len(p))
	}
	h.sum.Sum(d[:0])
	return d, nil
}

func short(name string, err error) error {
	if errors.Is(err, io.EOF) {
		return corruptf("%s ends early", name)
	}
	return err
}

// file returns the chunks of an open file.
func (h *hasher) file(ctx context.Context, f *os.File, name string, size int64) ([]snapshot.Chunk, error) {
	var chunks []snapshot.Chunk
	for offset, length := range cells(size) {
		d, err := h.chunk(ctx, f, name, offset, length)
		if err != nil {
			return nil, err
		}
		chunks = append(chunks, snapshot.Chunk{Offset: offset, Length: length, Digest: d, Location: location(length)})
	}
	return chunks, nil
}

// verify compares a file with its entry. It returns the mark of what it read.
func (h *hasher) verify(ctx context.Context, dir string, e *snapshot.Entry) (m mark, err error) {
	name := path.Join(dir, e.Path)
	f, err := h.disk.open(name)
	if err != nil {
		return m, absent(e.Path, err)
	}
	defer closeQuietly(f)
	info, err := f.Stat()
	if err != nil {
		return m, err
	}
	if m, _ = identify(info); !info.Mode().IsRegular() || info.Size() != e.Size {
		return m, corruptf("%s has %d bytes, %d are right", e.Path, info.Size(), e.Size)
	}
	for i := range e.Chunks {
		c := &e.Chunks[i]
		d, err := h.chunk(ctx, f, name, c.Offset, c.Length)
		if err != nil {
			return m, err
		}
		if d != c.Digest {
			return m, corruptf("%s differs from its digest within the %d bytes at %d", e.Path, c.Length, c.Offset)
		}
	}
	return m, nil
}

// absent makes the absence of a file that must be there what it is: damage.
func absent(name string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return corruptf("%s is missing", name)
	}
	return fmt.Errorf("%s: %w", name, err)
}
