package peer

import (
	"sync"

	"go.etcd.io/raft/v3/raftpb"
)

// queue holds what waits for one stream, bounded in messages and in bytes of entries.
type queue struct {
	maxItems int
	maxBytes int64
	wake     chan struct{} // a token when there may be something

	mu    sync.Mutex
	items []*raftpb.Message // a ring
	head  int
	count int
	bytes int64
	down  bool // nobody is going to fetch anything: take nothing
}

func newQueue(maxItems int, maxBytes int64) *queue {
	return &queue{maxItems: maxItems, maxBytes: maxBytes, wake: make(chan struct{}, 1)}
}

// push takes a message, or says that it did not.
func (q *queue) push(m *raftpb.Message) bool {
	size := payloadBytes(m)
	q.mu.Lock()
	if q.down || q.count == q.maxItems || q.count > 0 && q.bytes+size > q.maxBytes {
		q.mu.Unlock()
		return false
	}
	if q.count == len(q.items) {
		q.growLocked()
	}
	q.items[(q.head+q.count)%len(q.items)] = m
	q.count++
	q.bytes += size
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return true
}

func (q *queue) growLocked() {
	next := make([]*raftpb.Message, min(max(16, 2*len(q.items)), q.maxItems))
	n := copy(next, q.items[q.head:])
	copy(next[n:], q.items[:q.head])
	q.items, q.head = next, 0
}

// pop gives the oldest message, nil for none.
func (q *queue) pop() *raftpb.Message {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.count == 0 {
		return nil
	}
	m := q.items[q.head]
	q.items[q.head] = nil
	q.head = (q.head + 1) % len(q.items)
	q.count--
	q.bytes -= payloadBytes(m)
	return m
}

// setDown closes or opens the queue, and returns what was in it when it closes: what is
// old when a member comes back is of no use to it.
func (q *queue) setDown(down bool) (dropped []*raftpb.Message) {
	q.mu.Lock()
	q.down = down
	q.mu.Unlock()
	if down {
		for m := q.pop(); m != nil; m = q.pop() {
			dropped = append(dropped, m)
		}
	}
	return dropped
}

// payloadBytes is what makes a message large. Going through it is much cheaper than
// encoding it.
func payloadBytes(m *raftpb.Message) int64 {
	n := len(m.Context)
	for _, e := range m.Entries {
		n += len(e.Data)
	}
	if m.Snapshot != nil {
		n += len(m.Snapshot.Data)
	}
	return int64(n)
}
