package snapferry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/snapshot"
)

// fetchers bounds the small objects that are read at a time.
const fetchers = 16

// checkpointBlob is the write-once object that a checkpoint's entry in the head names.
type checkpointBlob struct {
	Job        string                `json:"job"`
	Task       string                `json:"task"`
	Checkpoint string                `json:"checkpoint"`
	Epoch      uint64                `json:"epoch"`
	Sequence   uint64                `json:"sequence"`
	Time       time.Time             `json:"time"`
	Offsets    []pair                `json:"offsets"`
	Labels     map[string]string     `json:"labels,omitempty"`
	Consistent bool                  `json:"consistent"`
	Stores     map[string]storeEntry `json:"stores"`
}

// pair is one offset; its bytes need not be text.
type pair struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
}

// storeEntry is what a checkpoint blob says of one store.
type storeEntry struct {
	Index marker `json:"index"`
	Files int64  `json:"files"`
	Dirs  int64  `json:"dirs"`
	Links int64  `json:"links"`
	Bytes int64  `json:"bytes"`
}

// view reads one task: its head, checkpoints and indexes. It needs no ownership.
type view struct {
	id    TaskID
	blobs *blob.Store
	log   *checkpoint.Log
	// rescue lets it take blobs that were deleted and not yet purged, where the store
	// has them: a restore may (P10).
	rescue bool

	// What is write-once needs to be read once: segments of the last head that was
	// decoded, and when the store got the entries that dropped something.
	segments map[head.Ref][]byte
	slots    map[uint64]time.Time
}

// fetch reads a small object, or a part of one.
func (v *view) fetch(ctx context.Context, key string, offset, length int64) ([]byte, error) {
	data, err := v.blobs.ReadAll(ctx, key, offset, length)
	if !v.rescue || !errors.Is(err, fs.ErrNotExist) {
		return data, err
	}
	old, derr := v.blobs.GetDeleted(ctx, key, offset, length)
	if derr != nil {
		return nil, err
	}
	data, derr = io.ReadAll(io.LimitReader(old, blob.MaxReadAll))
	if errors.Join(derr, old.Close()) != nil {
		return nil, err
	}
	return data, nil
}

// maxHeads bounds how often a reader runs after a head that moves on.
const maxHeads = 100

// head reads the newest entry and the state in it; an empty log is the zero state
// and a nil entry. A segment that vanished means that the head moved on (P2).
func (v *view) head(ctx context.Context) (*checkpoint.Entry, *head.Loaded, error) {
	var before uint64
	for try := 0; ; try++ {
		e, err := v.log.Head(ctx)
		if errors.Is(err, fs.ErrNotExist) {
			l, err := head.Load(nil, nil)
			return nil, l, err
		}
		if err != nil {
			return nil, nil, err
		}
		l, err := v.decode(ctx, e)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return e, l, err
		}
		if e.Slot == before {
			return nil, nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if try == maxHeads {
			return nil, nil, fmt.Errorf("the log goes on faster than its head can be read: %w", ErrConflict)
		}
		before = e.Slot
	}
}

func (v *view) decode(ctx context.Context, e *checkpoint.Entry) (*head.Loaded, error) {
	if e == nil {
		return head.Load(nil, nil)
	}
	segments := map[head.Ref][]byte{}
	l, err := head.Load(e.Body, func(r head.Ref) (data []byte, err error) {
		data, ok := v.segments[r]
		if !ok {
			data, err = v.fetch(ctx, blobPrefix(v.id)+r.Key, 0, -1)
		}
		segments[r] = data
		return data, err
	})
	if err == nil {
		v.segments = segments
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", errOldHead, err)
	}
	return l, err
}

// checkpointBlob reads what the head's checkpoint c names.
func (v *view) checkpointBlob(ctx context.Context, c *head.Checkpoint) (*checkpointBlob, error) {
	key := blobPrefix(v.id) + c.Blob.Key
	data, err := v.fetch(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	if frame.Digest(data) != c.Blob.Digest {
		return nil, fmt.Errorf("checkpoint blob %s: %w: does not match its digest", key, sentinel.Corrupt)
	}
	payload, err := frame.Decode("checkpoint", 1, data)
	if err != nil {
		return nil, fmt.Errorf("checkpoint blob %s: %w", key, err)
	}
	var b checkpointBlob
	if err := json.Unmarshal(payload, &b); err != nil {
		return nil, fmt.Errorf("checkpoint blob %s: %w: %v", key, sentinel.Corrupt, err)
	}
	if err := b.check(v.id, c); err != nil {
		return nil, fmt.Errorf("checkpoint blob %s: %w: %v", key, sentinel.Corrupt, err)
	}
	return &b, nil
}

// check holds a checkpoint blob against what the head says of it. Names of stores become
// names of directories, so none is believed (I6).
func (b *checkpointBlob) check(id TaskID, c *head.Checkpoint) error {
	if b.Checkpoint != c.ID || b.Job != id.Job || b.Task != id.Task {
		return fmt.Errorf("it is of checkpoint %s of %s/%s, not %s of %s", b.Checkpoint, b.Job, b.Task, c.ID, id)
	}
	names := slices.Sorted(maps.Keys(b.Stores))
	if !slices.Equal(names, c.Stores) {
		return fmt.Errorf("it has the stores %q, the head says %q", names, c.Stores)
	}
	for _, name := range names {
		if err := checkpoint.ValidName(name); err != nil {
			return fmt.Errorf("store: %v", err)
		}
	}
	return nil
}

// root reads the first part of an index: enough to know which blobs it needs.
func (v *view) root(ctx context.Context, m marker) (*snapshot.Root, error) {
	data, err := v.fetch(ctx, m.Key, 0, m.Size)
	if err != nil {
		return nil, err
	}
	r, err := snapshot.DecodeRoot(data, m.Key)
	if err != nil {
		return nil, fmt.Errorf("index %s: %w", m.Key, err)
	}
	if r.Digest.String() != m.Digest {
		return nil, fmt.Errorf("index %s: %w: does not match its digest", m.Key, sentinel.Corrupt)
	}
	return r, nil
}

// index reads a whole index.
func (v *view) index(ctx context.Context, m marker) (*snapshot.Root, *snapshot.Index, error) {
	r, err := v.root(ctx, m)
	if err != nil {
		return nil, nil, err
	}
	segments := make([][]byte, len(r.Segments))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	for from := 0; from < len(segments); {
		to := from + 1 // segments that lie one after another are one request
		for to < len(segments) && adjacent(r.Segments[to-1], r.Segments[to]) && to-from < 64 {
			to++
		}
		refs, out := r.Segments[from:to], segments[from:to]
		g.Go(func() error { return v.readSegments(gctx, refs, out) })
		from = to
	}
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	x, err := r.Assemble(segments)
	if err != nil {
		return nil, nil, fmt.Errorf("index %s: %w", m.Key, err)
	}
	return r, x, nil
}

func adjacent(a, b snapshot.SegmentRef) bool {
	return a.Blob == b.Blob && uint64(a.Offset)+uint64(a.Stored) == uint64(b.Offset)
}

func (v *view) readSegments(ctx context.Context, refs []snapshot.SegmentRef, out [][]byte) error {
	first, last := refs[0], refs[len(refs)-1]
	size := int64(last.Offset) + int64(last.Stored) - int64(first.Offset)
	data, err := v.fetch(ctx, first.Blob, int64(first.Offset), size)
	if err != nil {
		return err
	}
	if int64(len(data)) != size {
		return fmt.Errorf("index segment in %s: %w: %d bytes of %d are there", first.Blob, sentinel.Corrupt, len(data), size)
	}
	for i, ref := range refs {
		out[i] = data[ref.Offset-first.Offset:][:ref.Stored]
	}
	return nil
}

// partial reads the chunks of an unfinished upload.
func (v *view) partial(ctx context.Context, p *head.Partial) (*snapshot.ChunkList, error) {
	key := blobPrefix(v.id) + p.Chunks.Key
	data, err := v.blobs.ReadAll(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	l, err := snapshot.DecodeChunks(data)
	if err != nil {
		return nil, fmt.Errorf("unfinished upload %s: %w", key, err)
	}
	if l.Digest.String() != p.Chunks.Digest {
		return nil, fmt.Errorf("unfinished upload %s: %w: does not match its digest", key, sentinel.Corrupt)
	}
	return l, nil
}

// describe makes the public form of a checkpoint.
func (b *checkpointBlob) describe() Checkpoint {
	c := Checkpoint{
		Job: b.Job, Task: b.Task, ID: b.Checkpoint, Epoch: b.Epoch, Sequence: b.Sequence, Time: b.Time.UTC(),
		Offsets: map[string]string{}, Labels: b.Labels, Stores: map[string]StoreInfo{}, Consistent: b.Consistent,
	}
	for _, o := range b.Offsets {
		c.Offsets[string(o.Key)] = string(o.Value)
	}
	for name, s := range b.Stores {
		c.Stores[name] = StoreInfo{Marker: s.Index.String(), Files: s.Files, Dirs: s.Dirs, Links: s.Links, Bytes: s.Bytes}
		c.Bytes += s.Bytes
	}
	return c
}

func offsetPairs(offsets map[string]string) []pair {
	out := make([]pair, 0, len(offsets))
	for k, v := range offsets {
		out = append(out, pair{[]byte(k), []byte(v)})
	}
	slices.SortFunc(out, func(a, b pair) int { return strings.Compare(string(a.Key), string(b.Key)) })
	return out
}
