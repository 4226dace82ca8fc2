package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/checkpoint"
)

// publishTime is how long an entry of the log whose outcome is unknown is tried again (P3.5).
const publishTime = 2 * time.Minute

// errNoAnswer ends an append that got no answer in time.
var errNoAnswer = fmt.Errorf("no answer from the repository in %s", publishTime)

// patience is a checkpoint driver that bounds how long one entry is tried. The engine
// tries as long as its context lives, so it is the context that patience ends, and only
// for this reason: the rest of a backup takes the time that it takes.
type patience struct {
	checkpoint.Driver
	giveUp context.CancelCauseFunc
	warn   func(format string, args ...any)

	mu    sync.Mutex // guards what follows
	nonce checkpoint.Nonce
	timer *time.Timer // nil: nothing under way
	told  bool        // that it is tried again
}

func newPatience(d checkpoint.Driver, giveUp context.CancelCauseFunc, warn func(string, ...any)) *patience {
	return &patience{Driver: d, giveUp: giveUp, warn: warn}
}

// Append starts the time at the first try of an entry and stops it when its outcome is known.
func (p *patience) Append(ctx context.Context, task checkpoint.TaskID, e *checkpoint.Entry) error {
	p.begin(e.Nonce)
	err := p.Driver.Append(ctx, task, e)
	switch {
	case known(err):
		p.end()
	case ctx.Err() == nil:
		p.tell(err)
	}
	return err
}

func (p *patience) tell(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.told {
		p.told = true
		p.warn("the repository does not confirm: %v; trying for up to %s", err, publishTime)
	}
}

func (p *patience) begin(nonce checkpoint.Nonce) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer != nil && p.nonce == nonce {
		return
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	p.told = false
	p.nonce, p.timer = nonce, time.AfterFunc(publishTime, func() { p.giveUp(errNoAnswer) })
}

func (p *patience) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
}

// known tells whether an append's error is an answer; see checkpoint.Driver.
func known(err error) bool {
	if err == nil {
		return true
	}
	for _, answer := range []error{snapferry.ErrConflict, snapferry.ErrFenced, snapferry.ErrClosed, fs.ErrInvalid, fs.ErrPermission} {
		if errors.Is(err, answer) {
			return true
		}
	}
	return false
}
