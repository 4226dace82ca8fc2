package transfer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"syscall"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/snapshot"
)

// Source is a member that may have bytes.
type Source struct {
	ID  uint64 // Raft id: the one to blame
	URL string // what the paths of the HTTP interface are appended to
}

// Fetch describes one transfer. Store and ID must be there, and a Source of either kind.
type Fetch struct {
	// Store is where the snapshot is to lie. Its staging also has what an earlier transfer
	// of the same id, cut off, had brought.
	Store *snapstore.Store
	// ID is the snapshot that is wanted.
	ID protocol.ID
	// Manifest is the manifest of ID if it is at hand; else a source is asked for it.
	Manifest []byte
	// Transfer is the name under which sources keep the lease. Empty means a random one.
	Transfer protocol.TransferID
	// Sources hold the snapshot ID.
	Sources []Source
	// Others may hold single chunks of it; they are asked when Sources cannot give them.
	Others []Source

	// Window is how many requests run at a time over all sources: 16 by default. Each has
	// a chunk in memory.
	Window int
	// RangeSize is about how many bytes one request asks for: 4 MiB by default.
	RangeSize int64
	// Idle is how long a source may send nothing before it is given up: 15 s by default.
	// There is no total deadline.
	Idle time.Duration
	// Sync is how long the disk may take to make one file or directory durable until
	// Progress hears nothing of it any more: 5 min by default. Nothing is given up then.
	Sync time.Duration
	// Work paces the transfer. Nil means no limit.
	Work *snapstore.Work
	// Extra names directories to look for bytes in besides the store, such as the member's
	// own state.
	Extra []string
	// Progress is told the bytes so far, which never fall. It is also called without news
	// as a sign of life: while local bytes are looked through, and while the disk makes
	// durable what has come. Calls do not overlap, and it must not block.
	Progress func(fetched, reused int64)
}

func (f Fetch) withDefaults() Fetch {
	if f.Transfer == "" {
		f.Transfer = protocol.TransferID(rand.Text())
	}
	f.Window = orDefault(f.Window, 16)
	f.RangeSize = min(orDefault(f.RangeSize, 4<<20), maxPieces/2)
	f.Idle = orDefault(f.Idle, 15*time.Second)
	f.Sync = orDefault(f.Sync, 5*time.Minute)
	if f.Work == nil || f.Work.Wait == nil {
		f.Work = &snapstore.Work{Wait: func(ctx context.Context, _ int) error { return ctx.Err() }}
	}
	if f.Progress == nil {
		f.Progress = func(int64, int64) {}
	}
	return f
}

// Stats tells what a transfer did, also one that failed.
type Stats struct {
	Fetched  int64 // bytes of chunks that came over the network, those for nothing included
	Reused   int64 // bytes that were here, from other snapshots or an earlier transfer
	Manifest int64 // bytes of the manifest if it was fetched
	Requests int64 // for data
	Stolen   int64 // of those: taken over from a slower source
	Sources  []SourceStats
	Others   []SourceStats
}

// SourceStats tells what one source did for a transfer.
type SourceStats struct {
	ID     uint64
	Bytes  int64             // received
	Chunks int64             // accepted
	Bad    int64             // chunks that did not fit their digest
	Failed *protocol.Failure // why it was given up, nil if it was not
}

// Fetch brings a snapshot into the store and returns it when it is durable and verified.
// The error is always a *protocol.Failure. Whatever has arrived stays in the store's
// staging, and the next Fetch of the same id fetches only the rest, save after FailNoSpace
// with a full disk, which then needs the space. When ctx ends, Fetch returns soon, with
// FailCancelled.
func (c *Client) Fetch(ctx context.Context, f Fetch) (snapstore.Held, Stats, error) {
	f = f.withDefaults()
	t := &fetcher{Fetch: f, client: c, meter: newMeter(f.Progress), turn: make(chan struct{}, 1)}
	t.board = newBoard(c, f)
	held, err := t.run(ctx)
	t.release(ctx)
	t.meter.report(true)
	stats := t.board.stats()
	stats.Fetched, stats.Reused = t.meter.totals()
	stats.Manifest = t.manifestBytes
	if err != nil {
		return snapstore.Held{}, stats, failure(ctx, err)
	}
	return held, stats, nil
}

// fetcher is one transfer that runs.
type fetcher struct {
	Fetch
	client        *Client
	board         *board
	meter         *meter
	turn          chan struct{} // held by the task that waits for the pace
	receipt       *snapstore.Receipt
	manifestBytes int64
}

// run goes through the transfer: manifest, what is here already, what is not, commit.
func (t *fetcher) run(ctx context.Context) (snapstore.Held, error) {
	if held, err := t.Store.Get(t.ID); err == nil {
		return held, nil
	}
	manifest, err := t.getManifest(ctx)
	if err != nil {
		return snapstore.Held{}, err
	}
	t.receipt, err = t.Store.Receive(ctx, manifest)
	if errors.Is(err, fs.ErrExist) {
		return t.Store.Get(t.ID)
	}
	if err != nil {
		return snapstore.Held{}, err
	}
	defer t.meter.watchSyncs(t.receipt.Syncing, t.Sync)()
	held, err := t.receive(ctx)
	if err != nil {
		return held, errors.Join(err, t.leave(err))
	}
	return held, nil
}

// leave keeps what has come for the next transfer, unless the disk is full. Then the log on
// it needs the space, and more than anything; and the next transfer begins with a look
// whether all of it would fit, so nothing is fetched over and over.
func (t *fetcher) leave(err error) error {
	if errors.Is(err, snapstore.ErrNoSpace) {
		return t.receipt.Drop()
	}
	return t.receipt.Close()
}

// maxRounds bounds how often a commit may find that bytes which had been written are not
// there any more.
const maxRounds = 3

func (t *fetcher) receive(ctx context.Context) (snapstore.Held, error) {
	if id := t.receipt.Held().ID; id != t.ID {
		return snapstore.Held{}, fmt.Errorf("manifest is of %s, not of %s", id, t.ID)
	}
	if _, err := t.receipt.Reuse(ctx, t.meter.watching(t.Work), t.Extra...); err != nil {
		return snapstore.Held{}, fmt.Errorf("reuse: %w", err)
	}
	missing := t.receipt.Missing()
	t.meter.reuse(t.receipt.Held().Bytes - sum(missing))
	for round := 1; ; round++ {
		if err := t.move(ctx, missing); err != nil {
			return snapstore.Held{}, err
		}
		held, err := t.receipt.Commit(ctx)
		if !errors.Is(err, snapstore.ErrIncomplete) || round == maxRounds {
			return held, err
		}
		missing = t.receipt.Missing()
	}
}

func sum(pieces []snapstore.Piece) (n int64) {
	for i := range pieces {
		n += int64(pieces[i].Length)
	}
	return n
}

// getManifest returns the manifest that the id names. Its digest is in the id, so nobody
// can give another one.
func (t *fetcher) getManifest(ctx context.Context) ([]byte, error) {
	if t.Manifest != nil {
		if snapshot.Sum(t.Manifest) != t.ID.Digest {
			return nil, fmt.Errorf("the manifest given is not of %s", t.ID)
		}
		return t.Manifest, nil
	}
	for {
		s, wait := t.board.ready()
		if s == nil && wait == 0 {
			return nil, t.board.why()
		}
		if s == nil {
			if err := sleep(ctx, wait); err != nil {
				return nil, err
			}
			continue
		}
		began := time.Now()
		data, err := t.askManifest(ctx, s)
		if err == nil {
			t.manifestBytes = int64(len(data))
			t.board.leased(s)
			return data, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		t.board.failed(s, began, err)
	}
}

// sleep waits unless ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// move brings what is missing, first from the sources, then from whoever has single chunks.
func (t *fetcher) move(ctx context.Context, missing []snapstore.Piece) error {
	if len(missing) == 0 {
		return nil
	}
	t.board.load(missing, t.RangeSize)
	t.drive(ctx)
	return t.rest(ctx)
}

// pulse looks after what nothing that happens would set off: workers whose rest has ended or
// that may take over what has become late, and the last bytes before a silence.
// It ends those who wait for their turn in the pace though there is nothing to do any more.
func (t *fetcher) pulse(ctx context.Context, end context.CancelFunc) {
	tick := time.NewTicker(pulseEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			t.meter.catchUp()
			if t.board.wake() {
				end()
			}
		case <-ctx.Done():
			return
		}
	}
}

// drive runs the workers until there is nothing more that they can do.
func (t *fetcher) drive(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(ctx, func() { t.board.wake() })()
	var clock, workers sync.WaitGroup
	clock.Go(func() { t.pulse(ctx, cancel) })
	for _, s := range t.board.sources {
		for range t.Window {
			workers.Go(func() { t.work(ctx, s) })
		}
	}
	workers.Wait()
	cancel()
	clock.Wait()
}

// rest tells how the sources' part of a move ended, and turns to the others if there are
// chunks that no source could give.
func (t *fetcher) rest(ctx context.Context) error {
	left, err := t.board.result()
	if err = errors.Join(ctx.Err(), err); err != nil || len(left) == 0 {
		return err
	}
	why := t.board.why()
	if len(t.Others) == 0 {
		return why
	}
	return t.askOthers(ctx, left, why)
}

// work is one of a source's workers: it takes what is to be fetched and fetches it.
func (t *fetcher) work(ctx context.Context, s *source) {
	for {
		k := t.board.next(ctx, s)
		if k == nil {
			return
		}
		err := t.perform(ctx, s, k)
		t.board.finish(ctx, k, err)
	}
}

// release gives the leases back, so that sources need not wait for them to expire. A
// transfer that was cancelled does not wait for the answer.
func (t *fetcher) release(ctx context.Context) {
	patience := 500 * time.Millisecond
	if ctx.Err() != nil {
		patience = 100 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	var wg sync.WaitGroup
	for _, s := range t.board.holding() {
		wg.Go(func() { _ = t.dropLease(ctx, s) }) // it expires otherwise
	}
	wg.Wait()
}

// failure types an error of a transfer.
func failure(ctx context.Context, err error) *protocol.Failure {
	if ctx.Err() != nil {
		why := context.Cause(ctx)
		text := why.Error()
		if f, ok := errors.AsType[*protocol.Failure](why); ok && f.Kind == protocol.FailCancelled {
			text = f.Text
		}
		return &protocol.Failure{Kind: protocol.FailCancelled, Text: text}
	}
	if f, ok := errors.AsType[*protocol.Failure](err); ok {
		return f
	}
	kind := protocol.FailLocal
	switch {
	case errors.Is(err, snapstore.ErrNoSpace), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		kind = protocol.FailNoSpace
	case errors.Is(err, snapstore.ErrCorrupt), errors.Is(err, snapstore.ErrIncomplete):
		kind = protocol.FailCorrupt
	}
	return &protocol.Failure{Kind: kind, Text: err.Error()}
}
