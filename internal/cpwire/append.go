package cpwire

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// call is an Append on its way.
type call struct {
	item  []byte // encoded, in a pooled buffer
	state atomic.Int32
	ride  *ride
	done  chan outcome
}

// The states of a call. One that was abandoned in the queue is never sent.
const (
	queued = iota
	sent
	abandoned
)

type outcome struct {
	result Result
	err    error
}

// ride is a request that carries several calls. When the last of them was abandoned,
// there is no use in going on.
type ride struct {
	left   atomic.Int32
	cancel context.CancelFunc
}

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// Append appends one entry. Whether it is in the log is in the result's status. An error
// that wraps sentinel.NoEffect says that this call has not put it there; one that wraps
// sentinel.Unknown that it may be there or come to be: the same Append, with its nonce,
// finds out.
func (c *Client) Append(ctx context.Context, a Append) (Result, error) {
	if err := a.Validate(); err != nil {
		return Result{}, wrap("append", a.Task, sentinel.Harmless(err))
	}
	if err := ctx.Err(); err != nil {
		return Result{}, wrap("append", a.Task, sentinel.Harmless(err))
	}
	buf := buffers.Get().(*[]byte)
	*buf = AppendItem((*buf)[:0], &a) // a copy: a ride may outlast this call
	k := &call{item: *buf, done: make(chan outcome, 1)}
	c.batcher.Add(k)

	select {
	case o := <-k.done:
		buffers.Put(buf) // the ride is over
		return o.result, wrap("append", a.Task, o.err)
	case <-ctx.Done():
		return k.abandon(ctx.Err(), a.Task)
	}
}

// abandon gives up waiting.
func (k *call) abandon(cause error, task Task) (Result, error) {
	if k.state.Swap(abandoned) == queued {
		return Result{}, wrap("append", task, sentinel.Harmless(cause))
	}
	if k.ride.left.Add(-1) == 0 {
		k.ride.cancel()
	}
	select {
	case o := <-k.done: // just in time
		return o.result, wrap("append", task, o.err)
	default:
		return Result{}, wrap("append", task, fmt.Errorf("%w: %w", sentinel.Unknown, cause))
	}
}

// send carries calls in one request and repeats it until there is an answer.
func (c *Client) send(calls []*call) {
	ctx, cancel := context.WithCancel(c.life)
	defer cancel()
	calls = board(calls, &ride{cancel: cancel})
	if len(calls) == 0 {
		return
	}
	buf := buffers.Get().(*[]byte)
	body := beginBatch((*buf)[:0], len(calls))
	for _, k := range calls {
		body = append(body, k.item...)
	}
	*buf = body

	results, tries, err := c.carry(ctx, request{http.MethodPost, PathAppend, body, c.opts.TryTimeout}, len(calls))
	if tries == 1 && err == nil {
		buffers.Put(buf) // else the transport may still read it
	}
	for i, k := range calls {
		o := outcome{err: err}
		if err == nil {
			o.result = results[i]
		}
		k.done <- o
	}
}

// board keeps the calls that nobody has given up.
func board(calls []*call, r *ride) []*call {
	r.left.Store(int32(len(calls)))
	kept := calls[:0]
	for _, k := range calls {
		k.ride = r
		if k.state.CompareAndSwap(queued, sent) {
			kept = append(kept, k)
		} else if r.left.Add(-1) == 0 {
			r.cancel()
		}
	}
	return kept
}

// carry repeats a request with n appends until there is an answer.
func (c *Client) carry(ctx context.Context, r request, n int) (results []Result, tries int, err error) {
	retry := c.newRetry()
	for {
		tries++
		a, err := c.try(ctx, r)
		if err == nil {
			results, derr := DecodeAnswer(a.body, n)
			if derr == nil {
				return results, tries, nil
			}
			err = &failure{err: fmt.Errorf("answer: %w", derr)}
		}
		if err := retry.again(ctx, err); err != nil {
			return nil, tries, retry.verdict(err)
		}
	}
}

func wrap(op string, task Task, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", op, task, err)
}
