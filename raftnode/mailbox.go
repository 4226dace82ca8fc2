package raftnode

import (
	"sync"

	pb "go.etcd.io/raft/v3/raftpb"
)

// mailbox is what the loop has to look at, in one place so that everything that came in
// while the disk was busy is done in one go: one fsync for all of it (group commit).
type mailbox struct {
	wake chan struct{} // one slot

	mu     sync.Mutex
	closed bool
	mail
	messageBytes, proposalBytes int // of what is in mail
}

// mail is what the loop takes out.
type mail struct {
	messages    []*pb.Message
	proposals   [][]byte
	keys        []proposalKey
	reads       []*read
	unreachable []uint64
	tasks       []func() // run on the loop, in order
}

// Bounds of what waits. Raft sends again what is dropped; who proposes is told.
const (
	maxMessages      = 16 << 10
	maxMessageBytes  = 256 << 20
	maxProposals     = 64 << 10
	maxProposalBytes = 64 << 20
	maxReads         = 64 << 10
)

func newMailbox() *mailbox { return &mailbox{wake: make(chan struct{}, 1)} }

// put lets add change the mail, unless the mailbox is closed.
func (b *mailbox) put(add func(*mail) bool) error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return ErrClosed
	}
	ok := add(&b.mail)
	b.mu.Unlock()
	if !ok {
		return ErrBusy
	}
	b.nudge()
	return nil
}

func (b *mailbox) nudge() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *mailbox) message(m *pb.Message) {
	size := work{entries: m.GetEntries()}.bytes()
	_ = b.put(func(in *mail) bool {
		if len(in.messages) >= maxMessages || b.messageBytes+size > maxMessageBytes {
			return false
		}
		in.messages = append(in.messages, m)
		b.messageBytes += size
		return true
	})
}

func (b *mailbox) proposal(k proposalKey, data []byte) error {
	return b.put(func(in *mail) bool {
		if len(in.proposals) >= maxProposals || b.proposalBytes+len(data) > maxProposalBytes {
			return false
		}
		in.proposals, in.keys = append(in.proposals, data), append(in.keys, k)
		b.proposalBytes += len(data)
		return true
	})
}

func (b *mailbox) read(r *read) error {
	return b.put(func(in *mail) bool {
		if len(in.reads) >= maxReads {
			return false
		}
		in.reads = append(in.reads, r)
		return true
	})
}

func (b *mailbox) task(f func()) error {
	return b.put(func(in *mail) bool { in.tasks = append(in.tasks, f); return true })
}

// take empties the mailbox.
func (b *mailbox) take() mail {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.mail
	b.mail, b.messageBytes, b.proposalBytes = mail{}, 0, 0
	return m
}

// close refuses everything from now on and returns what was left.
func (b *mailbox) close() mail {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	return b.take()
}

// pipe is the queue between the loop and the applier. It is not bounded by itself: its
// entries are in the log's memory anyway, and the loop refuses proposals while too much
// waits.
type pipe struct {
	mu     sync.Mutex
	more   sync.Cond
	queue  []work
	bytes  int // of everything that is not done
	closed bool
}

func newPipe() *pipe {
	p := &pipe{}
	p.more.L = &p.mu
	return p
}

func (p *pipe) put(w work) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.queue = append(p.queue, w)
	p.bytes += w.bytes()
	p.more.Signal()
	return true
}

// take waits for work and takes all there is; nil says that the pipe is closed.
func (p *pipe) take() []work {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) == 0 && !p.closed {
		p.more.Wait()
	}
	if p.closed {
		return nil
	}
	q := p.queue
	p.queue = nil
	return q
}

// done says that a piece of work no longer takes memory.
func (p *pipe) done(w work) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes -= w.bytes()
}

func (p *pipe) waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes
}

// close ends take, now, and returns what nobody will do.
func (p *pipe) close() []work {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.more.Broadcast()
	q := p.queue
	p.queue = nil
	return q
}
