package transfer

import (
	"context"
	"errors"
	"io/fs"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// checks sees to it that nothing is served that was not verified. The store remembers what
// it has verified, so after the first time this costs little. A verification is not tied
// to the request that asked for it: it goes on when the asker has left, and all who ask
// meanwhile share it.
type checks struct {
	ctx      context.Context
	store    *snapstore.Store
	work     *snapstore.Work
	patience time.Duration
	damaged  func(protocol.ID, error)

	mu      sync.Mutex
	running map[protocol.ID]*check // guarded by mu
	bad     int64                  // guarded by mu
	wg      sync.WaitGroup
}

// check is one verification; err is set when done is closed.
type check struct {
	done chan struct{}
	err  error
}

func newChecks(ctx context.Context, s *snapstore.Store, w *snapstore.Work, patience time.Duration, damaged func(protocol.ID, error)) *checks {
	return &checks{ctx: ctx, store: s, work: w, patience: patience, damaged: damaged,
		running: map[protocol.ID]*check{}}
}

// verified returns nil when the snapshot is known to be whole, and else why it cannot be
// served, which is Busy while that is being found out.
func (c *checks) verified(ctx context.Context, id protocol.ID) error {
	k := c.start(id)
	wait := time.NewTimer(c.patience)
	defer wait.Stop()
	select {
	case <-k.done:
		return k.err
	case <-ctx.Done():
		return refusal(protocol.Busy, "still being verified")
	case <-wait.C:
		return refusal(protocol.Busy, "still being verified")
	}
}

// start begins a verification, or returns the one that runs.
func (c *checks) start(id protocol.ID) *check {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := c.running[id]; k != nil {
		return k
	}
	k := &check{done: make(chan struct{})}
	c.running[id] = k
	c.wg.Go(func() {
		err := c.store.Verify(c.ctx, id, c.work)
		k.err = c.judge(id, err)
		c.mu.Lock()
		delete(c.running, id)
		c.mu.Unlock()
		close(k.done)
	})
	return k
}

// judge makes a refusal of what a verification found, and puts damage out of use.
func (c *checks) judge(id protocol.ID, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, snapstore.ErrCorrupt):
		return c.condemn(id, err)
	case errors.Is(err, fs.ErrNotExist):
		return refusal(protocol.Gone, "not held")
	case c.ctx.Err() != nil || errors.Is(err, snapstore.ErrClosed):
		return refusal(protocol.Closed, "closing")
	}
	return refusal(protocol.Busy, "verify: %v", err)
}

// condemn puts a damaged snapshot into quarantine and tells the owner, once.
func (c *checks) condemn(id protocol.ID, cause error) error {
	gone := refusal(protocol.Gone, "it was damaged and is in quarantine")
	err := c.store.Quarantine(id, cause.Error())
	if errors.Is(err, fs.ErrNotExist) {
		return gone // somebody else found it too
	}
	c.mu.Lock()
	c.bad++
	c.mu.Unlock()
	c.damaged(id, errors.Join(cause, err))
	return gone
}

// found returns how many snapshots were found damaged.
func (c *checks) found() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bad
}

// wait returns when no verification runs any more.
func (c *checks) wait() { c.wg.Wait() }
