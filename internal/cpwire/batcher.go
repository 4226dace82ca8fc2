package cpwire

import "sync"

// Batcher gathers what comes while a few runs are on their way, and hands it to the next
// one together. Alone, an item runs at once; under load runs become large by themselves.
// The zero value is ready once Run is set.
type Batcher[T any] struct {
	// Run does the work of some items. It is called by up to Workers goroutines at once;
	// items keep the order in which they came.
	Run func(items []T)
	// Workers is how many runs there are at once; default 1.
	Workers int
	// MaxItems and MaxSize bound one run; Size tells the size of an item. An item that is
	// larger alone runs alone. 0 means no bound.
	MaxItems, MaxSize int
	Size              func(T) int

	mu struct { // guards what waits; nothing runs under it
		sync.Mutex
		queue   []T
		workers int
	}
	wg sync.WaitGroup
}

// Add gives one item to a run. It does not wait.
func (b *Batcher[T]) Add(item T) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.queue = append(b.mu.queue, item)
	if b.mu.workers < max(b.Workers, 1) {
		b.mu.workers++
		b.wg.Go(b.work)
	}
}

// Wait returns when everything that was added has run.
func (b *Batcher[T]) Wait() { b.wg.Wait() }

// Waiting is how many items no run has taken yet.
func (b *Batcher[T]) Waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.queue)
}

func (b *Batcher[T]) work() {
	for {
		items := b.take()
		if items == nil {
			return
		}
		b.Run(items)
	}
}

// take returns the items of the next run, or nil after which the worker must end.
func (b *Batcher[T]) take() []T {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, size := 0, 0
	for ; n < len(b.mu.queue) && (b.MaxItems == 0 || n < b.MaxItems); n++ {
		if b.MaxSize == 0 {
			continue
		}
		if size += b.Size(b.mu.queue[n]); size > b.MaxSize && n > 0 {
			break
		}
	}
	if n == 0 {
		b.mu.workers--
		return nil
	}
	items := b.mu.queue[:n:n]
	b.mu.queue = b.mu.queue[n:]
	if len(b.mu.queue) == 0 {
		b.mu.queue = nil // items belong to the run now
	}
	return items
}
