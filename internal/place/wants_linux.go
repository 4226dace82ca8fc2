package place

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/snapshot"
)

// file is a regular file with content of its own that has to come about.
type file struct {
	t     *target
	entry *snapshot.Entry
	left  atomic.Int32 // chunks that are not in place yet

	mu      sync.Mutex // guards made, and with it the creation
	made    bool       // it is there, under its name in the tree
	began   time.Time  // when this run first touched it
	resumed bool       // an earlier run made it
}

// ref names a chunk by the positions of its file and of itself.
type ref struct{ file, chunk uint32 }

// wants is every chunk of all files, sorted by digest, so that chunks with equal bytes are
// neighbours: a group. A chunk is claimed by whoever is the first to have its bytes.
type wants struct {
	files   []file
	refs    []ref
	claimed []atomic.Uint32 // bit set
	lengths map[uint32]*atomic.Int64
	cells   []uint32 // the chunk sizes that occur
	longest uint32
}

// newWants collects the chunks and refuses those that no file can have, whatever was
// checked before: their lengths decide what is allocated and where is written (I6).
func newWants(targets []*target) (*wants, error) {
	w := &wants{lengths: map[uint32]*atomic.Int64{}}
	var files, chunks int
	for _, t := range targets {
		for i := range t.store.Index.Entries {
			if e := &t.store.Index.Entries[i]; hasContent(e) {
				files, chunks = files+1, chunks+len(e.Chunks)
			}
		}
	}
	w.files = make([]file, files)
	w.refs = make([]ref, 0, chunks)
	n := uint32(0)
	for _, t := range targets {
		for i := range t.store.Index.Entries {
			e := &t.store.Index.Entries[i]
			if !hasContent(e) {
				continue
			}
			w.files[n].t, w.files[n].entry = t, e
			if err := w.add(n, e); err != nil {
				return nil, t.fault(fmt.Errorf("%s: %w", e.Path, err))
			}
			n++
		}
	}
	w.claimed = make([]atomic.Uint32, (len(w.refs)+31)/32)
	slices.SortFunc(w.refs, w.compare)
	return w, nil
}

func hasContent(e *snapshot.Entry) bool { return e.Type == snapshot.Regular && !e.IsLink() }

func (w *wants) add(n uint32, e *snapshot.Entry) error {
	end := int64(0)
	for i := range e.Chunks {
		c := &e.Chunks[i]
		switch {
		case c.Encoding > snapshot.Zstd:
			return fmt.Errorf("%w: chunk encoding %d", sentinel.Unsupported, c.Encoding)
		case c.Stored == 0 || c.Stored > c.Length || (c.Stored == c.Length) != (c.Encoding == snapshot.Raw):
			return fmt.Errorf("%w: chunk %d of %d bytes is stored as %d", sentinel.Corrupt, i, c.Length, c.Stored)
		case c.Length == 0 || c.Length > snapshot.MaxChunkSize || c.Offset < end || c.Offset > e.Size-int64(c.Length):
			return fmt.Errorf("%w: chunk %d at %d+%d of %d bytes", sentinel.Corrupt, i, c.Offset, c.Length, e.Size)
		}
		end = c.Offset + int64(c.Length)
		w.refs = append(w.refs, ref{n, uint32(i)})
		if w.lengths[c.Length] == nil {
			w.lengths[c.Length] = new(atomic.Int64)
		}
		w.lengths[c.Length].Add(1)
		w.longest = max(w.longest, c.Length)
	}
	if size := cellSize(e); len(e.Chunks) > 0 && !slices.Contains(w.cells, size) {
		w.cells = append(w.cells, size)
	}
	w.files[n].left.Store(int32(len(e.Chunks)))
	return nil
}

func cellSize(e *snapshot.Entry) uint32 {
	if e.ChunkSize < snapshot.HoleAlign || e.ChunkSize > snapshot.MaxChunkSize {
		return snapshot.DefaultChunkSize
	}
	return e.ChunkSize
}

func (w *wants) compare(a, b ref) int {
	x, y := w.at(a), w.at(b)
	if c := bytes.Compare(x.Digest[:], y.Digest[:]); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(x.Length, y.Length), cmp.Compare(a.file, b.file), cmp.Compare(a.chunk, b.chunk))
}

func (w *wants) at(r ref) *snapshot.Chunk { return &w.files[r.file].entry.Chunks[r.chunk] }

func (w *wants) chunk(i int) *snapshot.Chunk { return w.at(w.refs[i]) }

func (w *wants) file(i int) *file { return &w.files[w.refs[i].file] }

// group returns the range of refs with this digest and length. Bytes have one length, so a
// second length under a digest is a lie of the index, and a group of its own.
func (w *wants) group(d snapshot.Digest, length uint32) (lo, hi int) {
	lo = sort.Search(len(w.refs), func(i int) bool {
		c := w.chunk(i)
		return cmp.Or(bytes.Compare(c.Digest[:], d[:]), cmp.Compare(c.Length, length)) >= 0
	})
	if lo == len(w.refs) || w.chunk(lo).Digest != d || w.chunk(lo).Length != length {
		return lo, lo
	}
	return lo, w.groupEnd(lo)
}

// groupEnd returns the end of the group that ref i is in.
func (w *wants) groupEnd(i int) int {
	first := w.chunk(i)
	for i++; i < len(w.refs) && w.chunk(i).Digest == first.Digest && w.chunk(i).Length == first.Length; {
		i++
	}
	return i
}

// claim reports whether the caller is the one to put chunk i in place.
func (w *wants) claim(i int) bool {
	bit := uint32(1) << (i % 32)
	if w.claimed[i/32].Or(bit)&bit != 0 {
		return false
	}
	w.lengths[w.chunk(i).Length].Add(-1)
	return true
}

func (w *wants) isClaimed(i int) bool { return w.claimed[i/32].Load()&(1<<(i%32)) != 0 }

// wanted reports whether any chunk of this length is still not in place.
func (w *wants) wanted(length int64) bool {
	if length <= 0 || length > snapshot.MaxChunkSize {
		return false
	}
	n := w.lengths[uint32(length)]
	return n != nil && n.Load() > 0
}

// holes calls f with what the chunks of e leave out.
func holes(e *snapshot.Entry, f func(offset, length int64) error) error {
	end := int64(0)
	for i := range e.Chunks {
		c := &e.Chunks[i]
		if c.Offset > end {
			if err := f(end, c.Offset-end); err != nil {
				return err
			}
		}
		end = c.Offset + int64(c.Length)
	}
	if end < e.Size {
		return f(end, e.Size-end)
	}
	return nil
}
