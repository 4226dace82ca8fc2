package s3blob

import (
	"context"
	"errors"
	"io"
	"math/bits"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/snapferry/snapferry/blob"
)

// buffers lends memory for bodies on their way: all puts share one budget, and what was
// given back is used again.
type buffers struct {
	budget *semaphore.Weighted
	max    int64
	free   [64]sync.Pool // of []byte, by the binary logarithm of their capacity
}

// buffer is a body, or a part of one, on its way.
type buffer struct {
	data   []byte
	size   int // how much is wanted in data
	from   *buffers
	weight int64
	mem    []byte
}

func newBuffers(max int64) *buffers {
	return &buffers{budget: semaphore.NewWeighted(max), max: max}
}

// get waits for n bytes of the budget, or for all of it if n is more than that.
func (b *buffers) get(ctx context.Context, n int64) (*buffer, error) {
	weight := min(n, b.max)
	if err := b.budget.Acquire(ctx, weight); err != nil {
		return nil, err
	}
	return &buffer{size: int(n), from: b, weight: weight}, nil
}

// Write adds p, which has to fit. The memory is taken when the first byte comes, so that
// an empty body needs none.
func (b *buffer) Write(p []byte) (int, error) {
	if len(p) > b.size-len(b.data) {
		return 0, io.ErrShortWrite
	}
	if b.mem == nil && len(p) > 0 {
		b.mem = b.from.memory(b.size)
		b.data = b.mem[:0]
	}
	b.data = append(b.data, p...)
	return len(p), nil
}

// full tells whether all that is wanted is there.
func (b *buffer) full() bool { return len(b.data) == b.size }

// release gives the memory back. Nobody reads it any more, see payload.
func (b *buffer) release() {
	if mem := b.mem; mem != nil {
		b.from.free[class(cap(mem))].Put(&mem)
	}
	b.data, b.mem = nil, nil
	b.from.budget.Release(b.weight)
}

// class is the smallest power of two that holds n bytes.
func class(n int) int { return bits.Len(uint(max(n, 1) - 1)) }

func (b *buffers) memory(n int) []byte {
	if mem, ok := b.free[class(n)].Get().(*[]byte); ok {
		return *mem
	}
	return make([]byte, 0, 1<<class(n))
}

// payload reads a buffer for one request. An HTTP client may go on reading a request's
// body after it has returned; end makes sure that it reads no byte of what the memory is
// used for next.
type payload struct {
	ctx  context.Context
	mu   sync.Mutex
	data []byte // mu guards; nil: ended
	at   int64  // mu guards
	done bool   // mu guards
}

func newPayload(ctx context.Context, data []byte) *payload {
	return &payload{ctx: ctx, data: data}
}

var errEnded = errors.New("the request has ended")

// Read gives the next bytes, and counts as progress of the put.
func (p *payload) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return 0, errEnded
	}
	if p.at >= int64(len(p.data)) {
		return 0, io.EOF
	}
	n := copy(b, p.data[p.at:])
	p.at += int64(n)
	blob.Moved(p.ctx)
	return n, nil
}

// Seek moves to any place, as signing reads the body beforehand.
func (p *payload) Seek(offset int64, whence int) (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch whence {
	case io.SeekCurrent:
		offset += p.at
	case io.SeekEnd:
		offset += int64(len(p.data))
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	p.at = offset
	return offset, nil
}

func (p *payload) end() {
	p.mu.Lock()
	p.data, p.done = nil, true
	p.mu.Unlock()
}
