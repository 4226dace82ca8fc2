package place

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"slices"

	"golang.org/x/sync/errgroup"
)

const (
	fetchUnit = 16 << 20  // how much one Read asks for at most
	fetchGap  = 256 << 10 // what is read over rather than asked for anew
)

// fetch brings from the blob store what no local file had.
type fetch struct {
	b *builder
	w *wants
}

// part is one Read: groups that lie close to each other in one blob.
type part struct {
	groups []int // first ref of each, in the order of their offsets
	blob   string
	offset int64
	length int64
	weight int64 // size of the biggest file in it
	band   int   // which set of as many files as there are workers
	turn   int   // which part of its first file
}

// missing returns the first ref of every group that is not complete, in the order of blobs
// and offsets.
func (w *wants) missing() []int {
	var first []int
	for lo := 0; lo < len(w.refs); {
		hi := w.groupEnd(lo)
		for i := lo; i < hi; i++ {
			if !w.isClaimed(i) {
				first = append(first, i)
				break
			}
		}
		lo = hi
	}
	slices.SortFunc(first, func(i, j int) int {
		a, b := w.chunk(i), w.chunk(j)
		return cmp.Or(cmp.Compare(a.Blob, b.Blob), cmp.Compare(a.Location.Offset, b.Location.Offset))
	})
	return first
}

// parts coalesces groups into what one Read asks for.
func (w *wants) parts() []part {
	var parts []part
	for _, i := range w.missing() {
		c := w.chunk(i)
		off, end := int64(c.Location.Offset), int64(c.Location.Offset)+int64(c.Stored)
		last := len(parts) - 1
		if last < 0 || !parts[last].takes(c.Blob, off, end) {
			parts = append(parts, part{blob: c.Blob, offset: off})
			last++
		}
		p := &parts[last]
		p.groups = append(p.groups, i)
		p.length = end - p.offset
		p.weight = max(p.weight, w.file(i).entry.Size)
	}
	return parts
}

// arrange puts the parts of big files first, so that the tail is short, and deals them out
// so that workers side by side write to different files: writers of one file wait for each
// other in the kernel. Only when fewer files than workers are left do they share one.
func (w *wants) arrange(parts []part, workers int) {
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Compare(b.weight, a.weight) })
	rank, seen := map[uint32]int{}, map[uint32]int{}
	for i := range parts {
		f := w.refs[parts[i].groups[0]].file
		if _, ok := rank[f]; !ok {
			rank[f] = len(rank)
		}
		parts[i].band, parts[i].turn = rank[f]/workers, seen[f]
		seen[f]++
	}
	slices.SortStableFunc(parts, func(a, b part) int {
		return cmp.Or(cmp.Compare(a.band, b.band), cmp.Compare(a.turn, b.turn))
	})
}

func (p *part) takes(blob string, off, end int64) bool {
	last := p.offset + p.length
	return blob == p.blob && off >= last && off-last <= fetchGap && end-p.offset <= fetchUnit
}

// all fetches every missing chunk with bounded workers.
func (f *fetch) all(ctx context.Context, workers int) error {
	parts := f.w.parts()
	f.w.arrange(parts, workers)
	todo := make(chan part)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(todo)
		for _, p := range parts {
			select {
			case todo <- p:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	})
	for range min(workers, len(parts)) {
		g.Go(func() error {
			buf := make([]byte, f.w.longest)
			for p := range todo {
				if err := f.part(ctx, p, buf); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// part reads one range chunk by chunk. Where the stream ends in an error or has other
// bytes, the chunk is read once more on its own, and the rest by another stream.
func (f *fetch) part(ctx context.Context, p part, buf []byte) error {
	for len(p.groups) > 0 {
		n, err := f.stream(ctx, p, buf)
		if p.groups = p.groups[n:]; err == nil || len(p.groups) == 0 {
			return err
		}
		if final(ctx, err) {
			return f.fault(ctx, p.groups[0], err)
		}
		if err := f.alone(ctx, p.groups[0], buf); err != nil {
			return f.fault(ctx, p.groups[0], err)
		}
		p.groups = p.groups[1:]
		if len(p.groups) > 0 {
			end := p.offset + p.length
			p.offset = int64(f.w.chunk(p.groups[0]).Location.Offset)
			p.length = end - p.offset
		}
	}
	return nil
}

// placeError is an error of the local side, which no second reading mends.
type placeError struct{ error }

func (e placeError) Unwrap() error { return e.error }

func final(ctx context.Context, err error) bool {
	_, local := errors.AsType[placeError](err)
	return local || ctx.Err() != nil || errors.Is(err, fs.ErrNotExist)
}

// stream reads the groups of a part by one Read and tells how many came to their places.
func (f *fetch) stream(ctx context.Context, p part, buf []byte) (n int, err error) {
	body, err := f.b.opts.Read(ctx, p.blob, p.offset, p.length)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	at := p.offset
	for ; n < len(p.groups); n++ {
		c := f.w.chunk(p.groups[n])
		if gap := int64(c.Location.Offset) - at; gap > 0 {
			if _, err := io.CopyN(io.Discard, body, gap); err != nil {
				return n, err
			}
		}
		if err := f.take(ctx, p.groups[n], body, buf); err != nil {
			return n, err
		}
		at = int64(c.Location.Offset) + int64(c.Stored)
	}
	return n, nil
}

// alone reads one group by a Read of its own.
func (f *fetch) alone(ctx context.Context, i int, buf []byte) error {
	c := f.w.chunk(i)
	body, err := f.b.opts.Read(ctx, c.Blob, int64(c.Location.Offset), int64(c.Stored))
	if err != nil {
		return err
	}
	defer body.Close()
	return f.take(ctx, i, body, buf)
}

// take reads the chunk of a group, checks it, and only then writes it to all its places
// (I6).
func (f *fetch) take(ctx context.Context, i int, body io.Reader, buf []byte) error {
	c := f.w.chunk(i)
	p, err := c.Read(body, buf)
	if err != nil {
		return err
	}
	fetched := false
	for j, end := i, f.w.groupEnd(i); j < end; j++ {
		if !f.w.claim(j) {
			continue
		}
		t := f.w.file(j).t
		if fetched {
			t.report.reused.Add(int64(len(p)))
		} else {
			t.report.fetched.Add(int64(len(p)))
		}
		fetched = true
		if err := f.b.put(ctx, j, p); err != nil {
			return placeError{err}
		}
		f.b.opts.bytes(t, len(p))
	}
	return nil
}

// fault names blob and file in an error of the remote side.
func (f *fetch) fault(ctx context.Context, i int, err error) error {
	if local, ok := errors.AsType[placeError](err); ok {
		return local.error
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c, in := f.w.chunk(i), f.w.file(i)
	return &BlobError{Blob: c.Blob, Offset: int64(c.Location.Offset), Length: int64(c.Stored), Store: in.t.store.Name, Path: in.entry.Path, Err: err}
}
