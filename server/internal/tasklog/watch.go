package tasklog

import (
	"sync"
	"sync/atomic"
)

// watchers are those who wait for a task to change. Apply pays one atomic read while there
// are none.
type watchers struct {
	n  atomic.Int64
	mu struct {
		sync.Mutex
		waiting map[string][]chan struct{}
		closed  bool
	}
}

// add returns a channel that is closed at the next change of the task, and a function that
// forgets it.
func (w *watchers) add(key string) (changed <-chan struct{}, forget func()) {
	c := make(chan struct{})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.closed {
		close(c)
		return c, func() {}
	}
	if w.mu.waiting == nil {
		w.mu.waiting = map[string][]chan struct{}{}
	}
	w.n.Add(1)
	w.mu.waiting[key] = append(w.mu.waiting[key], c)
	return c, func() { w.forget(key, c) }
}

func (w *watchers) forget(key string, c chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	waiting := w.mu.waiting[key]
	for i, other := range waiting {
		if other == c {
			waiting[i] = waiting[len(waiting)-1]
			w.mu.waiting[key] = waiting[:len(waiting)-1]
			w.n.Add(-1)
			break
		}
	}
	if len(w.mu.waiting[key]) == 0 {
		delete(w.mu.waiting, key)
	}
}

// wake tells those who wait for a task.
func (w *watchers) wake(key []byte) {
	if w.n.Load() == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wakeLocked(string(key))
}

func (w *watchers) wakeLocked(key string) {
	for _, c := range w.mu.waiting[key] {
		close(c)
		w.n.Add(-1)
	}
	delete(w.mu.waiting, key)
}

// wakeAll tells everybody.
func (w *watchers) wakeAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key := range w.mu.waiting {
		w.wakeLocked(key)
	}
}

// close tells everybody, also those who come later.
func (w *watchers) close() {
	w.mu.Lock()
	w.mu.closed = true
	w.mu.Unlock()
	w.wakeAll()
}
