package snapshot

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/zeebo/blake3"
)

// Encode makes the index object of x: its root and the segments that prev, the root of an
// earlier index of the store, does not have. prev may be nil. key is the key that the
// object will be stored under, and root is what DecodeRoot will make of it.
//
// The object depends on nothing but the arguments. A blob that prev names and Encode names
// again stays in use, so the checkpoint of prev belongs into x.Borrows.
func Encode(x *Index, key string, prev *Root) (object []byte, root *Root, err error) {
	object, root, err = encode(x, key, prev)
	if err != nil {
		return nil, nil, fmt.Errorf("encode index %s: %w", key, err)
	}
	return object, root, nil
}

func encode(x *Index, key string, prev *Root) ([]byte, *Root, error) {
	if err := checkKey(key); err != nil {
		return nil, nil, err
	}
	if err := x.Validate(); err != nil {
		return nil, nil, err
	}
	refs, segments, err := encodeSegments(x.Entries, key, prev)
	if err != nil {
		return nil, nil, err
	}
	used := x.uses()
	root := &Root{
		Job: x.Job, Task: x.Task, Store: x.Store, Checkpoint: x.Checkpoint,
		Created: x.Created.Round(0).UTC(), Prev: x.Prev, Borrows: slices.Clone(x.Borrows),
		Totals: x.totals(used.table()), Segments: refs,
	}
	used.addSegments(refs, key)
	root.Blobs = used.table()
	if own := used.byKey[key]; own != nil {
		return nil, nil, corruptf("a chunk lies in the index itself")
	}
	return assembleObject(root, key, segments)
}

// assembleObject puts root and new segments together and completes the root.
func assembleObject(root *Root, key string, segments [][]byte) ([]byte, *Root, error) {
	offset := uint64(0)
	for i, s := range segments {
		if s != nil {
			root.Segments[i].Offset = uint32(offset)
			offset += uint64(len(s))
		}
	}
	if offset > 1<<32-1-MaxRootSize {
		return nil, nil, fmt.Errorf("new segments have %d bytes, which is too much for one object", offset)
	}
	object, digest, err := root.encode(key)
	if err != nil {
		return nil, nil, err
	}
	root.Digest, root.Size = digest, int64(len(object))
	object = slices.Grow(object, int(offset))
	for i, s := range segments {
		if s != nil {
			root.Segments[i].Offset += uint32(root.Size)
			object = append(object, s...)
		}
	}
	return object, root, nil
}

// encodeSegments returns the segments of the entries, and the bytes of those that prev
// does not have; the others are nil. Offsets of the new ones are left to the caller.
func encodeSegments(entries []Entry, key string, prev *Root) ([]SegmentRef, [][]byte, error) {
	records, ends := recordsOf(entries)
	known := knownSegments(prev, key)
	refs := make([]SegmentRef, len(ends))
	segments := make([][]byte, len(ends))
	err := parallel(len(ends), func() func(int) error {
		var w segmentWriter
		return func(i int) error {
			from := 0
			if i > 0 {
				from = ends[i-1]
			}
			body, tail := w.encode(entries, records[from:ends[i]])
			content := contentDigest(body, tail)
			if ref := known[content]; ref != nil {
				refs[i] = *ref
				return nil
			}
			data, digest, err := segmentKind.seal(body, tail)
			segments[i] = data
			refs[i] = SegmentRef{
				Location: Location{Blob: key, Stored: uint32(len(data))},
				Digest:   digest, Content: content, Entries: beginning(records[from:ends[i]]),
			}
			return err
		}
	})
	return refs, segments, err
}

// knownSegments finds segments by their content.
func knownSegments(prev *Root, key string) map[Digest]*SegmentRef {
	if prev == nil {
		return nil
	}
	known := make(map[Digest]*SegmentRef, len(prev.Segments))
	for i := range prev.Segments {
		if s := &prev.Segments[i]; s.Blob != key { // what lies under this key is written anew
			known[s.Content] = s
		}
	}
	return known
}

// contentDigest names what is in a segment, however it is compressed.
func contentDigest(body, tail []byte) Digest {
	var head [6]byte
	binary.LittleEndian.PutUint16(head[:], version)
	binary.LittleEndian.PutUint32(head[2:], uint32(len(body)))
	h := blake3.New()
	h.Write(head[:])
	h.Write(body)
	h.Write(tail)
	var d Digest
	h.Sum(d[:0])
	return d
}

func beginning(records []record) uint32 {
	n := uint32(0)
	for _, r := range records {
		if !r.isContinuation() {
			n++
		}
	}
	return n
}

// Assemble decodes the whole index. segments holds the bytes of r.Segments, in that order;
// they are checked against their digests, and what comes out against all that the root
// says and by Validate.
func (r *Root) Assemble(segments [][]byte) (*Index, error) {
	x, err := r.assemble(segments)
	if err != nil {
		return nil, fmt.Errorf("decode index of checkpoint %q, store %q: %w", r.Checkpoint, r.Store, err)
	}
	return x, nil
}

func (r *Root) assemble(segments [][]byte) (*Index, error) {
	entries, err := r.decodeSegments(segments)
	if err != nil {
		return nil, err
	}
	x := &Index{
		Job: r.Job, Task: r.Task, Store: r.Store, Checkpoint: r.Checkpoint, Created: r.Created,
		Prev: r.Prev, Borrows: slices.Clone(r.Borrows), Entries: entries,
	}
	if err := x.Validate(); err != nil {
		return nil, err
	}
	if err := r.checkTables(x); err != nil {
		return nil, err
	}
	return x, nil
}

// checkTables compares what the root tells without the segments with what they hold. The
// sweep relies on the root alone, so a root that is wrong must not be believed anywhere.
func (r *Root) checkTables(x *Index) error {
	used := x.uses()
	if got := x.totals(used.table()); got != r.Totals {
		return corruptf("totals are %+v, the root says %+v", got, r.Totals)
	}
	used.addSegments(r.Segments, r.ownKey())
	if !slices.Equal(used.table(), r.Blobs) {
		return corruptf("table of blobs does not fit the entries")
	}
	return nil
}

// ownKey returns the key that segments in the root's own object have, which is the one
// that is not in the table, or "".
func (r *Root) ownKey() string {
	for i := range r.Segments {
		key := r.Segments[i].Blob
		_, ok := slices.BinarySearchFunc(r.Blobs, key, func(b BlobUse, key string) int { return strings.Compare(b.Key, key) })
		if !ok {
			return key
		}
	}
	return ""
}

// decodeSegments decodes all segments in parallel into one list.
func (r *Root) decodeSegments(segments [][]byte) ([]Entry, error) {
	starts, err := r.starts(segments)
	if err != nil {
		return nil, err
	}
	entries := make([]Entry, starts[len(segments)])
	leads := make([]lead, len(segments))
	in := interner{m: map[string]string{}}
	err = parallel(len(segments), func() func(int) error {
		return func(i int) (err error) {
			leads[i], err = decodeSegment(segments[i], &r.Segments[i], &in, entries[starts[i]:starts[i+1]])
			if err != nil {
				return fmt.Errorf("segment %d of %d: %w", i+1, len(segments), err)
			}
			return nil
		}
	})
	if err != nil {
		return nil, err
	}
	return entries, joinLeads(entries, starts, leads)
}

// starts returns for each segment the number of entries before it, and that of all at the
// end. It checks the numbers against the lengths of the segments, so that the caller may
// allocate for them.
func (r *Root) starts(segments [][]byte) ([]int, error) {
	if len(segments) != len(r.Segments) {
		return nil, fmt.Errorf("%d segments are given, the root has %d", len(segments), len(r.Segments))
	}
	starts := make([]int, len(segments)+1)
	for i := range segments {
		s := &r.Segments[i]
		if len(segments[i]) != int(s.Stored) || uint64(s.Entries) > uint64(s.Stored)*maxRatio/minRecord {
			return nil, corruptf("segment %d has %d bytes, the root says %d", i+1, len(segments[i]), s.Stored)
		}
		starts[i+1] = starts[i] + int(s.Entries)
	}
	if starts[len(segments)] > MaxEntries {
		return nil, corruptf("%d entries, at most %d are allowed", starts[len(segments)], MaxEntries)
	}
	return starts, nil
}

// joinLeads gives the chunks that segments begin with to the entries they belong to.
func joinLeads(entries []Entry, starts []int, leads []lead) error {
	for i := range leads {
		if len(leads[i].chunks) == 0 {
			continue
		}
		if starts[i] == 0 || !entries[starts[i]-1].isContinuedBy(leads[i].path) {
			return corruptf("segment %d goes on with %q, which is not the entry before", i+1, leads[i].path)
		}
		e := &entries[starts[i]-1]
		e.Chunks = append(e.Chunks, leads[i].chunks...)
	}
	return nil
}

// parallel calls work(0) to work(n-1) on as many goroutines as there are processors and
// returns the error of the least number that failed. Each goroutine makes its own work
// function, which may keep state between calls.
func parallel(n int, start func() func(i int) error) error {
	var next atomic.Int64
	errs := make([]error, n)
	var group sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		group.Go(func() {
			work := start()
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				errs[i] = work(i)
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
