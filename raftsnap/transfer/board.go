package transfer

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

const (
	maxBad      = 3                      // wrong chunks after which a source is given up
	maxBadPiece = 2                      // times that one source may give the same chunk wrong
	pulseEvery  = 50 * time.Millisecond  // how often idle workers look around again
	stealSlack  = 100 * time.Millisecond // what a source must be late by before its work is taken
)

// piece is a chunk that is wanted. All fields change under the board's lock.
type piece struct {
	snapstore.Piece
	done bool
	bad  map[*source]int // how often each source gave it wrong
}

// task is what one request asks for: pieces that lie one after the other, or small ones of
// several files. Fields change under the board's lock, save got.
type task struct {
	pieces []*piece // thieves shorten it
	pos    int      // pieces before it are dealt with
	by     *source
	taken  time.Time // when it was there to be asked for
	began  time.Time // when the request was sent, zero before that
	got    atomic.Int64
	twin   *task // fetches the last piece too
	stolen bool
	cancel context.CancelCauseFunc
}

// left returns the bytes from pos on.
func (k *task) left() (n int64) {
	for _, p := range k.pieces[k.pos:] {
		n += int64(p.Length)
	}
	return n
}

// errTwin ends a request whose last piece somebody else was faster with.
var errTwin = errors.New("somebody else was faster")

// board shares the work of a transfer out among its sources. Each source has as many
// workers as the window is wide; the board lets only so many of them work at a time that
// all together fill the window, so a slow source does not crowd out a quick one, and
// memory is bounded. When nothing is left to be taken, a worker takes over from a source
// that will need far longer: half of what a request has not come to yet, and in the end the
// same last piece.
type board struct {
	client *Client
	window int
	idle   time.Duration

	mu      sync.Mutex
	cond    *sync.Cond
	sources []*source          // fixed
	others  []*source          // fixed
	queue   []*task            // guarded by mu
	orphans []*piece           // guarded by mu; no source can give them
	running map[*task]struct{} // guarded by mu
	all     []*piece           // guarded by mu
	undone  int                // guarded by mu
	misses  int                // guarded by mu; pieces that none of the others has
	err     error              // guarded by mu; local, ends everything

	requests, stolen int64 // guarded by mu
}

func newBoard(c *Client, f Fetch) *board {
	b := &board{client: c, window: f.Window, idle: f.Idle, running: map[*task]struct{}{}}
	b.cond = sync.NewCond(&b.mu)
	for _, s := range f.Sources {
		b.sources = append(b.sources, newSource(s))
	}
	for _, s := range f.Others {
		b.others = append(b.others, newSource(s))
	}
	return b
}

// load puts pieces up for fetching, joined to tasks of about size bytes.
func (b *board) load(pieces []snapstore.Piece, size int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all, b.queue, b.orphans, b.undone = nil, nil, nil, len(pieces)
	var k *task
	var bytes int64
	for i := range pieces {
		p := &piece{Piece: pieces[i]}
		b.all = append(b.all, p)
		if k == nil || bytes+int64(p.Length) > size || len(k.pieces) == maxExtents {
			k, bytes = &task{}, 0
			b.queue = append(b.queue, k)
		}
		k.pieces = append(k.pieces, p)
		bytes += int64(p.Length)
	}
	b.settleLocked()
}

// next returns what a worker of s is to do, waiting for it, or nil when there will be
// nothing more for it.
func (b *board) next(ctx context.Context, s *source) *task {
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		if ctx.Err() != nil || b.overLocked() || s.out != nil {
			return nil
		}
		if s.active < b.quotaLocked(s) && !time.Now().Before(s.rest) {
			if k := b.pickLocked(s); k != nil {
				k.by, k.taken = s, time.Now()
				b.running[k] = struct{}{}
				s.active++
				return k
			}
		}
		b.cond.Wait()
	}
}

// overLocked tells whether the sources can do no more.
func (b *board) overLocked() bool {
	return b.err != nil || b.undone == 0 || len(b.queue)+len(b.running) == 0
}

// quotaLocked is how many workers of s may work at a time: one until the source has shown
// that it answers, then its share of the window. Sources that have not answered yet have
// theirs kept free: the first one to answer may turn out to be the slow one.
func (b *board) quotaLocked(s *source) int {
	if !s.leased || s.fails > 0 {
		return 1
	}
	live := 0
	for _, o := range b.sources {
		if o.out == nil {
			live++
		}
	}
	return min(max(1, b.window/live), s.allowed)
}

// pickLocked takes a task from the queue, or from a slower source.
func (b *board) pickLocked(s *source) *task {
	for i, k := range b.queue {
		if b.fitsLocked(k, s) {
			b.queue = slices.Delete(b.queue, i, i+1)
			return k
		}
	}
	return b.stealLocked(s)
}

// fitsLocked tells whether s may try a task. A piece that s gave wrong is for others, or,
// if all have, for s once more: the bytes may have suffered on the way.
func (b *board) fitsLocked(k *task, s *source) bool {
	p := k.pieces[0] // one with a mark is alone in its task
	if p.bad[s] == 0 {
		return true
	}
	if p.bad[s] >= maxBadPiece {
		return false
	}
	for _, o := range b.sources {
		if o.out == nil && p.bad[o] == 0 {
			return false
		}
	}
	return true
}

// stealLocked takes over from the request of another source that will last longest, if it
// will last much longer than s would need.
func (b *board) stealLocked(s *source) *task {
	var victim *task
	var worst time.Duration
	now := time.Now()
	for k := range b.running {
		if k.by == s || k.twin != nil || k.began.IsZero() || k.pos >= len(k.pieces) || k.pieces[len(k.pieces)-1].bad[s] > 0 {
			continue
		}
		if eta := k.eta(now); eta > worst && eta > 2*s.expect(k.left())+stealSlack {
			victim, worst = k, eta
		}
	}
	if victim == nil {
		return nil
	}
	b.stolen++
	return victim.split()
}

// eta guesses how long a request will still need.
func (k *task) eta(now time.Time) time.Duration {
	spent := now.Sub(k.began)
	got := k.got.Load()
	if got == 0 {
		return 4 * spent
	}
	var past int64
	for _, p := range k.pieces[:k.pos] {
		past += int64(p.Length)
	}
	rest := past + k.left() - got
	return time.Duration(float64(spent) * float64(max(rest, 0)) / float64(got))
}

// split takes the later half of what a request has not begun to read, or else shares the
// last piece.
func (k *task) split() *task {
	if rest := len(k.pieces) - k.pos - 1; rest > 0 {
		at := len(k.pieces) - (rest+1)/2
		thief := &task{pieces: slices.Clone(k.pieces[at:]), stolen: true}
		k.pieces = k.pieces[:at]
		return thief
	}
	thief := &task{pieces: slices.Clone(k.pieces[k.pos:]), twin: k, stolen: true}
	k.twin = thief
	return thief
}

// paid says that a task's turn in the pace has come: what its source owes is counted from
// here on. It returns whether the source has given a lease before.
func (b *board) paid(k *task) (leased bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k.taken = time.Now()
	return k.by.leased
}

// begin says that the request of a task is being sent; cancel ends it.
func (b *board) begin(k *task, cancel context.CancelCauseFunc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k.began, k.cancel = time.Now(), cancel
	b.requests++
	if k.pieces[k.pos].done {
		cancel(errTwin)
	}
}

// claim returns the piece that a task reads next, nil if there is none (any more).
func (b *board) claim(k *task) *piece {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil || k.pos == len(k.pieces) || k.pieces[k.pos].done {
		return nil
	}
	return k.pieces[k.pos]
}

// accept says that a task's piece is in the store.
func (b *board) accept(k *task, p *piece) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k.pos++
	if p.done {
		return
	}
	p.done = true
	k.by.prove()
	if b.undone--; b.undone == 0 {
		b.cond.Broadcast()
	}
	if k.twin != nil && k.twin.cancel != nil {
		k.twin.cancel(errTwin)
	}
}

// reject says that a task's piece did not fit its digest. It goes back alone, and marked.
func (b *board) reject(k *task, p *piece) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k.pos++
	if p.bad == nil {
		p.bad = map[*source]int{}
	}
	p.bad[k.by]++
	if k.by.bad++; k.by.bad >= maxBad {
		k.by.dropped(protocol.FailCorrupt, "gave %d wrong chunks, the last of %q at %d", k.by.bad, p.Path, p.Offset)
	}
	if !p.done {
		b.queue = append(b.queue, &task{pieces: []*piece{p}})
	}
	b.settleLocked()
}

// finish says that a task has ended, with nil or why; what it has not done goes back.
func (b *board) finish(ctx context.Context, k *task, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.running, k)
	k.by.active--
	k.by.measure(k)
	twin := k.twin
	if twin != nil {
		twin.twin = nil
	}
	var back []*piece
	for _, p := range k.pieces[k.pos:] {
		if !p.done && twin == nil {
			back = append(back, p)
		}
	}
	if len(back) > 0 {
		b.queue = slices.Insert(b.queue, 0, &task{pieces: back})
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, errTwin) {
		b.failLocked(k.by, k.taken, err)
	}
	b.settleLocked()
}

// failed notes an error of a source outside a task.
func (b *board) failed(s *source, began time.Time, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failLocked(s, began, err)
	b.settleLocked()
}

func (b *board) failLocked(s *source, began time.Time, err error) {
	if local, ok := errors.AsType[*localError](err); ok {
		if b.err == nil {
			b.err = local.err
			for k := range b.running {
				if k.cancel != nil {
					k.cancel(local.err)
				}
			}
		}
		return
	}
	s.failed(err, began, b)
}

// settleLocked puts aside what no source can give any more, and wakes everybody.
func (b *board) settleLocked() {
	b.queue = slices.DeleteFunc(b.queue, func(k *task) bool {
		for _, s := range b.sources {
			if s.out == nil && b.fitsLocked(k, s) {
				return false
			}
		}
		b.orphans = append(b.orphans, k.pieces...)
		return true
	})
	b.cond.Broadcast()
}

// result returns the pieces that the sources could not give, or the local error.
func (b *board) result() ([]*piece, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var left []*piece
	for _, p := range b.all {
		if !p.done {
			left = append(left, p)
		}
	}
	return left, b.err
}

// wake makes all workers look around. It tells whether there is nothing to be seen any more.
func (b *board) wake() (over bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cond.Broadcast()
	return b.overLocked()
}
