package snapshot

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sort"
	"strings"

	"github.com/zeebo/blake3"
)

// Totals sums x up.
func (x *Index) Totals() Totals {
	return x.totals(x.Blobs())
}

func (x *Index) totals(blobs []BlobUse) Totals {
	var t Totals
	for i := range x.Entries {
		t.add(&x.Entries[i])
	}
	for _, b := range blobs {
		t.Stored += b.Live
	}
	return t
}

func (t *Totals) add(e *Entry) {
	switch {
	case e.Type == Dir:
		t.Dirs++
	case e.Type == Symlink:
		t.Symlinks++
	case e.IsLink():
		t.Links++
	default:
		t.Files++
	}
	t.Bytes += e.Size
	t.Chunks += int64(len(e.Chunks))
}

// Blobs returns every blob that the chunks of x name, sorted by key.
func (x *Index) Blobs() []BlobUse {
	return x.uses().table()
}

func (x *Index) uses() *uses {
	u := newUses()
	for i := range x.Entries {
		for j := range x.Entries[i].Chunks {
			u.add(&x.Entries[i].Chunks[j].Location)
		}
	}
	return u
}

// Lookup finds the entry of a path.
func (x *Index) Lookup(path string) (*Entry, bool) {
	i, ok := sort.Find(len(x.Entries), func(i int) int { return strings.Compare(path, x.Entries[i].Path) })
	if !ok {
		return nil, false
	}
	return &x.Entries[i], true
}

// Resolve returns the entry that holds the content of e: the first name of its hard-link
// group when e is a further name, else e itself. In an index that is not valid it may
// be nil.
func (x *Index) Resolve(e *Entry) *Entry {
	if !e.IsLink() {
		return e
	}
	first, _ := x.Lookup(e.Link)
	return first
}

// contentContext starts what ContentID hashes, so that it is no digest of anything else.
const contentContext = "snapferry content 1\n"

// ContentID returns a digest over the size, the chunk size and the offset, length and
// digest of each chunk. Two regular files have the same one exactly if they have the same
// bytes cut in the same way, wherever the chunks are stored.
func ContentID(e *Entry) Digest {
	const chunkLen = 8 + 4 + 32
	var space [len(contentContext) + 12 + 4*chunkLen]byte // enough for most files, on the stack
	b := append(space[:0], contentContext...)
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Size))
	b = binary.LittleEndian.AppendUint32(b, e.ChunkSize)
	if len(e.Chunks) <= 4 {
		return Sum(appendContent(b, e.Chunks))
	}

	h := blake3.New()
	for part := range slices.Chunk(e.Chunks, 256) {
		b = appendContent(b, part)
		h.Write(b)
		b = b[:0]
	}
	var d Digest
	h.Sum(d[:0])
	return d
}

func appendContent(b []byte, chunks []Chunk) []byte {
	for i := range chunks {
		c := &chunks[i]
		b = binary.LittleEndian.AppendUint64(b, uint64(c.Offset))
		b = binary.LittleEndian.AppendUint32(b, c.Length)
		b = append(b, c.Digest[:]...)
	}
	return b
}

// uses collects which bytes of which blobs are named. Locations mostly come in runs of one
// blob with rising offsets, which is what it is quick with.
type uses struct {
	byKey map[string]*ranges
	last  *ranges
}

// ranges are stored ranges of one blob: offset in the upper half, length in the lower.
type ranges struct {
	key string
	all []uint64
}

func newUses() *uses {
	return &uses{byKey: map[string]*ranges{}, last: &ranges{}}
}

func (u *uses) add(l *Location) {
	if l.Blob != u.last.key || u.last.key == "" {
		u.last = u.ranges(l.Blob)
	}
	u.last.all = append(u.last.all, uint64(l.Offset)<<32|uint64(l.Stored))
}

// addSegments adds the segments that do not lie in the object with the key own.
func (u *uses) addSegments(refs []SegmentRef, own string) {
	for i := range refs {
		if refs[i].Blob != own {
			u.add(&refs[i].Location)
		}
	}
}

func (u *uses) ranges(key string) *ranges {
	r := u.byKey[key]
	if r == nil {
		r = &ranges{key: key}
		u.byKey[key] = r
	}
	return r
}

// table returns the blobs in the order of their keys.
func (u *uses) table() []BlobUse {
	table := make([]BlobUse, 0, len(u.byKey))
	for key, r := range u.byKey {
		table = append(table, BlobUse{Key: key, Live: r.live()})
	}
	slices.SortFunc(table, func(a, b BlobUse) int { return cmp.Compare(a.Key, b.Key) })
	return table
}

// live counts the bytes that lie in at least one of the ranges.
func (r *ranges) live() int64 {
	if !slices.IsSorted(r.all) {
		slices.Sort(r.all)
	}
	var live, end uint64
	for _, v := range r.all {
		from, to := v>>32, v>>32+v&0xffffffff
		if to > end {
			live += to - max(from, end)
			end = to
		}
	}
	return int64(live)
}

// Union collects which bytes of blobs are named, by however many indexes. The zero value
// is empty.
type Union struct{ uses *uses }

// Add takes up the bytes that a chunk is stored in.
func (u *Union) Add(l Location) {
	if u.uses == nil {
		u.uses = newUses()
	}
	u.uses.add(&l)
}

// Blobs returns the blobs that were named, sorted by key, with the bytes of each that were
// named once or more.
func (u *Union) Blobs() []BlobUse {
	if u.uses == nil {
		return nil
	}
	return u.uses.table()
}
