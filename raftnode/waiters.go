package raftnode

import (
	"sync"
)

// answer is what a proposal comes to.
type answer struct {
	result []byte
	err    error
}

// waiters are the proposals of this run that nobody has answered yet.
type waiters struct {
	mu   sync.Mutex
	next uint64
	m    map[uint64]chan answer
}

func newWaiters() *waiters { return &waiters{m: map[uint64]chan answer{}} }

func (w *waiters) add() (seq uint64, c chan answer) {
	c = make(chan answer, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next++
	w.m[w.next] = c
	return w.next, c
}

func (w *waiters) answer(seq uint64, a answer) {
	w.mu.Lock()
	c := w.m[seq]
	delete(w.m, seq)
	w.mu.Unlock()
	if c != nil {
		c <- a
	}
}

func (w *waiters) drop(seq uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.m, seq)
}

// answerAll answers everything that waits.
func (w *waiters) answerAll(a answer) {
	w.mu.Lock()
	all := w.m
	w.m = map[uint64]chan answer{}
	w.mu.Unlock()
	for _, c := range all {
		c <- a
	}
}

// read is a linearizable read that waits for its index.
type read struct {
	index uint64
	done  chan error // one slot
}

// readers are the reads under way: those that wait for Raft to name their index, by the
// number of their round, and those that wait for the state machine to reach it.
type readers struct {
	mu     sync.Mutex
	number uint64
	asked  map[uint64][]*read
	ready  []*read
}

func newReaders() *readers { return &readers{asked: map[uint64][]*read{}} }

// ask books reads as one round.
func (r *readers) ask(reads []*read) (number uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.number++
	r.asked[r.number] = reads
	return r.number
}

// named says that a round may be answered at index.
func (r *readers) named(number, index, applied uint64) {
	r.mu.Lock()
	reads := r.asked[number]
	delete(r.asked, number)
	for _, one := range reads {
		one.index = index
		r.ready = append(r.ready, one)
	}
	r.mu.Unlock()
	r.reached(applied)
}

// reached answers what the state machine has reached.
func (r *readers) reached(applied uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rest := r.ready[:0]
	for _, one := range r.ready {
		if one.index <= applied {
			one.done <- nil
		} else {
			rest = append(rest, one)
		}
	}
	clear(r.ready[len(rest):])
	r.ready = rest
}

// fail ends every round that Raft has not named yet; with all, those that have one too.
func (r *readers) fail(err error, all bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for number, reads := range r.asked {
		for _, one := range reads {
			one.done <- err
		}
		delete(r.asked, number)
	}
	if all {
		for _, one := range r.ready {
			one.done <- err
		}
		r.ready = nil
	}
}
