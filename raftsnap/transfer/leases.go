package transfer

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// maxLeases bounds the leases of one server, whose names come from outside.
const maxLeases = 256

// LeaseEnd tells of a transfer from this member that has ended, well or not.
type LeaseEnd struct {
	ID       protocol.ID
	Transfer protocol.TransferID
	Peer     uint64 // who it was, 0 if ServerOptions.Peer did not tell
	Bytes    int64  // sent
	Duration time.Duration
	Why      string // released, expired, displaced, quarantined or closed
}

// leaseKey names a lease: one transfer reading one snapshot.
type leaseKey struct {
	id     protocol.ID
	holder protocol.TransferID
}

// lease keeps a snapshot from being removed while somebody reads it. Only bytes that move
// renew it (R9): who asks and does not read loses it, however often he asks. Fields below
// mu of the book change under its lock.
type lease struct {
	key   leaseKey
	peer  uint64
	pin   *snapstore.Pin
	sizes []int64 // of the files by number, -1 for what is no file with content
	bytes int64   // of the snapshot
	taken time.Time

	renewed time.Time
	moved   int64
	ended   bool
}

// leases is the book of all leases of a server.
type leases struct {
	life   time.Duration
	max    int64 // bytes of pinned snapshots, 0 for four times the one to be pinned
	finish func(LeaseEnd)

	mu     sync.Mutex
	byKey  map[leaseKey]*lease // guarded by mu
	lost   int64               // guarded by mu
	closed bool                // guarded by mu
}

func newLeases(life time.Duration, limit int64, finish func(LeaseEnd)) *leases {
	return &leases{life: life, max: limit, finish: finish, byKey: map[leaseKey]*lease{}}
}

// find returns a lease that is alive, or a refusal.
func (b *leases) find(k leaseKey) (*lease, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, refusal(protocol.Closed, "closing")
	}
	l := b.byKey[k]
	if l == nil {
		return nil, refusal(protocol.Gone, "transfer %s holds no lease of it", k.holder)
	}
	return l, nil
}

// add enters a new lease, or returns the one that is there already under its key; that one
// is not renewed. When the pinned bytes would go over the cap, the snapshots that their
// readers have read least of lose their leases, save that each lease is safe for its first
// life: so two readers cannot keep taking the place from each other.
func (b *leases) add(l *lease) (*lease, error) {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil, refusal(protocol.Closed, "closing")
	}
	if old := b.byKey[l.key]; old != nil {
		b.mu.Unlock()
		return old, nil
	}
	out, ok := b.displacedLocked(l)
	if !ok || len(b.byKey)-len(out) >= maxLeases {
		b.mu.Unlock()
		return nil, refusal(protocol.Busy, "too much is being read already")
	}
	for _, old := range out {
		b.dropLocked(old)
		b.lost++
	}
	l.taken = time.Now()
	l.renewed = l.taken
	b.byKey[l.key] = l
	b.mu.Unlock()
	b.close(out, "displaced")
	return l, nil
}

// reading is a snapshot with its readers.
type reading struct {
	bytes    int64
	advance  float64 // of the reader that has come farthest
	youngest time.Time
	leases   []*lease
}

// displacedLocked returns the leases that must end so that l has room under the cap, and
// whether there can be room.
func (b *leases) displacedLocked(l *lease) ([]*lease, bool) {
	all, pinned := b.readingsLocked()
	limit := b.max
	if limit == 0 {
		limit = 4 * l.bytes
	}
	over := pinned + l.bytes - limit
	if all[l.key.id] != nil || len(all) == 0 || over <= 0 {
		return nil, true
	}

	order := make([]*reading, 0, len(all))
	for _, r := range all {
		order = append(order, r)
	}
	slices.SortFunc(order, func(x, y *reading) int { return cmp.Compare(x.advance, y.advance) })
	var out []*lease
	for _, r := range order {
		if over <= 0 {
			break
		}
		if time.Since(r.youngest) >= b.life {
			out = append(out, r.leases...)
			over -= r.bytes
		}
	}
	// A single snapshot is let in whatever its size.
	return out, over <= 0 || len(out) == len(b.byKey)
}

func (b *leases) readingsLocked() (map[protocol.ID]*reading, int64) {
	all := map[protocol.ID]*reading{}
	var pinned int64
	for _, l := range b.byKey {
		r := all[l.key.id]
		if r == nil {
			r = &reading{bytes: l.bytes}
			all[l.key.id] = r
			pinned += l.bytes
		}
		r.leases = append(r.leases, l)
		r.advance = max(r.advance, float64(l.moved)/float64(max(l.bytes, 1)))
		if l.taken.After(r.youngest) {
			r.youngest = l.taken
		}
	}
	return all, pinned
}

// move tells that bytes have been sent under l.
func (b *leases) move(l *lease, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l.moved += n
	l.renewed = time.Now()
}

// end ends the lease of a key, if there is one.
func (b *leases) end(k leaseKey, why string) {
	b.drop(why, func(l *lease) bool { return l.key == k })
}

// endAll ends every lease of a snapshot.
func (b *leases) endAll(id protocol.ID, why string) {
	b.drop(why, func(l *lease) bool { return l.key.id == id })
}

// expire ends the leases under which nothing has moved for a life.
func (b *leases) expire() {
	n := b.drop("expired", func(l *lease) bool { return time.Since(l.renewed) >= b.life })
	b.mu.Lock()
	b.lost += int64(n)
	b.mu.Unlock()
}

// shut ends all leases and lets no new one in.
func (b *leases) shut() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.drop("closed", func(*lease) bool { return true })
}

func (b *leases) drop(why string, which func(*lease) bool) int {
	var out []*lease
	b.mu.Lock()
	for _, l := range b.byKey {
		if which(l) {
			out = append(out, l)
		}
	}
	for _, l := range out {
		b.dropLocked(l)
	}
	b.mu.Unlock()
	b.close(out, why)
	return len(out)
}

func (b *leases) dropLocked(l *lease) {
	l.ended = true
	delete(b.byKey, l.key)
}

// close lets the pins go. Files that are open stay readable.
func (b *leases) close(out []*lease, why string) {
	for _, l := range out {
		_ = l.pin.Close() // there is nobody to tell, and nothing to be done
		b.mu.Lock()
		end := LeaseEnd{ID: l.key.id, Transfer: l.key.holder, Peer: l.peer, Bytes: l.moved,
			Duration: time.Since(l.taken), Why: why}
		b.mu.Unlock()
		b.finish(end)
	}
}

// totals tells how many leases there are, what they pin, and how many were lost.
func (b *leases) totals() (n int, pinned, lost int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, pinned = b.readingsLocked()
	return len(b.byKey), pinned, b.lost
}
