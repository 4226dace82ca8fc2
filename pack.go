package snapferry

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/snapshot"
)

// packer turns chunks into packs: data blobs of bounded size, built in memory and
// sent while the next is filled. Since a pack is in memory until it is durable, a
// retry sends the very bytes whose digests stand in the index, whatever has become of
// the file meanwhile.
type packer struct {
	put   func(ctx context.Context, key string, body blob.Body) error
	key   func() string                                // a new key of the attempt
	reuse func() map[snapshot.Digest]snapshot.Location // what is known at the start
	older *history                                     // what is asked when that does not have it

	sparse map[string]bool // packs that are given up: what lies in them is stored again (P12)
	size   int
	group  *errgroup.Group
	ctx    context.Context // of group: ends when a put fails
	slabs  chan []byte     // bounds packs in memory
	press  *press          // nil: chunks are stored as they are

	mu     sync.Mutex
	known  map[snapshot.Digest]snapshot.Location // reusable, or already in a pack of this attempt; nil until asked
	cur    *pack
	stored int64
	sizes  map[string]int64       // of packs whose put was answered
	sent   []snapshot.StoredChunk // of packs whose put was answered
	blobs  []string               // keys handed out, answered or not
}

type pack struct {
	key    string
	data   []byte
	chunks []snapshot.StoredChunk
}

func newPacker(ctx context.Context, opts *Options, reuse func() map[snapshot.Digest]snapshot.Location, older *history, key func() string,
	put func(context.Context, string, blob.Body) error) *packer {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(opts.Uploads)
	p := &packer{put: put, key: key, size: opts.PackSize, group: g, ctx: gctx, reuse: reuse, older: older, slabs: make(chan []byte, opts.Uploads+1), sizes: map[string]int64{}}
	if opts.Compression == CompressAuto {
		p.press = newPress(opts.Readers)
	}
	for range opts.Uploads + 1 {
		p.slabs <- nil
	}
	return p
}

// fate is what became of a chunk that was handed to the packer.
type fate int

const (
	reused    fate = iota // its content was there
	sent                  // it is new
	rewritten             // it was there, in a pack that is given up (P12)
)

// add stores a chunk unless its content is there already, and tells where it lies. It
// blocks while all packs are on their way. squeeze allows it to be compressed, which is
// done outside of the lock and so perhaps in vain: others may be quicker.
func (p *packer) add(data []byte, digest snapshot.Digest, squeeze bool) (snapshot.Location, fate, error) {
	p.mu.Lock()
	loc, was, err := p.findLocked(digest)
	p.mu.Unlock()
	if was == reused || err != nil {
		return loc, was, err
	}
	if squeeze && p.press != nil {
		room, err := p.press.enter(p.ctx)
		if err != nil {
			return loc, was, err
		}
		defer p.press.leave(room)
		if stored := room.squeeze(data, digest); stored != nil {
			return p.store(stored, snapshot.Zstd, digest, uint32(len(data)))
		}
	}
	return p.store(data, snapshot.Raw, digest, uint32(len(data)))
}

// store copies the stored bytes of a chunk into a pack, unless somebody else has done it.
func (p *packer) store(stored []byte, enc snapshot.Encoding, digest snapshot.Digest, length uint32) (loc snapshot.Location, was fate, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if loc, was, err = p.findLocked(digest); was == reused || err != nil {
			return loc, was, err
		}
		if p.cur != nil && (len(p.cur.data) == 0 || len(p.cur.data)+len(stored) <= p.size) {
			break
		}
		if err := p.nextLocked(max(p.size, len(stored))); err != nil {
			return loc, was, err
		}
	}
	loc = snapshot.Location{Blob: p.cur.key, Offset: uint32(len(p.cur.data)), Stored: uint32(len(stored)), Encoding: enc}
	p.cur.data = append(p.cur.data, stored...)
	p.cur.chunks = append(p.cur.chunks, snapshot.StoredChunk{Digest: digest, Length: length, Location: loc})
	p.known[digest] = loc
	return loc, was, nil
}

// findLocked says what is to become of a chunk, and where it lies if it is reused.
func (p *packer) findLocked(digest snapshot.Digest) (snapshot.Location, fate, error) {
	if p.known == nil {
		p.known = p.reuse()
	}
	loc, known := p.known[digest]
	if known && !p.sparse[loc.Blob] {
		return loc, reused, nil
	}
	loc, old, err := p.older.find(p.ctx, digest, p.sparse)
	switch {
	case err != nil:
		return loc, sent, err
	case old && !p.sparse[loc.Blob]:
		return loc, reused, nil
	case old || known:
		return loc, rewritten, nil
	}
	return loc, sent, nil
}

// nextLocked sends the current pack and begins another. It gives the lock up while it
// waits for memory, so the caller must look again at what is known.
func (p *packer) nextLocked(size int) error {
	p.sendLocked()
	p.mu.Unlock()
	var slab []byte
	var err error
	select {
	case slab = <-p.slabs:
	case <-p.ctx.Done():
		err = context.Cause(p.ctx)
	}
	p.mu.Lock()
	if err != nil {
		return err
	}
	if p.cur != nil { // another reader was quicker
		p.slabs <- slab
		return nil
	}
	if cap(slab) < size {
		slab = make([]byte, 0, size) // untouched pages cost nothing
	}
	p.cur = &pack{key: p.key(), data: slab[:0]}
	p.blobs = append(p.blobs, p.cur.key)
	return nil
}

func (p *packer) sendLocked() {
	full := p.cur
	if full == nil {
		return
	}
	p.cur = nil
	p.mu.Unlock()
	defer p.mu.Lock()
	p.group.Go(func() error {
		err := p.put(p.ctx, full.key, blob.Bytes(full.data))
		p.slabs <- full.data
		if err != nil {
			return err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.stored += int64(len(full.data))
		p.sizes[full.key] = int64(len(full.data))
		p.sent = append(p.sent, full.chunks...)
		return nil
	})
}

// flush sends what is left and waits until every pack is durable.
func (p *packer) flush() error {
	p.mu.Lock()
	p.sendLocked()
	p.mu.Unlock()
	return p.group.Wait()
}

// durable returns the chunks whose packs were answered so far, and their bytes.
func (p *packer) durable() ([]snapshot.StoredChunk, int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent[:len(p.sent):len(p.sent)], p.stored
}

// checkChunk verifies a chunk read back from the blob store.
func checkChunk(data []byte, c *snapshot.Chunk) error {
	_, err := c.Unpack(data, nil)
	return err
}
