package raftsnap

import (
	"slices"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// loop is what belongs to the one goroutine that runs the Machine.
type loop struct {
	machine   *protocol.Machine
	stopping  bool // Close was stepped: no effect starts anything any more
	fetches   map[protocol.TransferID]*fetching
	calls     calls
	questions []*question // of other members, kept open
	wishes    []*wish     // of callers of Snapshot
	recorded  recorded
	recording int           // Records under way
	success   time.Duration // when a snapshot was last recorded or installed
	alarms    []string
}

func newLoop(machine *protocol.Machine) loop {
	return loop{machine: machine, fetches: map[protocol.TransferID]*fetching{}, calls: newCalls()}
}

// entry is one thing for the loop: an event for the Machine, something to do after it,
// or both.
type entry struct {
	event protocol.Event
	then  func(l *loop)
}

// wish is a caller of Snapshot that waits.
type wish struct {
	min     uint64
	granted chan protocol.ID // one slot
}

func (l *loop) forget(w *wish) {
	l.wishes = slices.DeleteFunc(l.wishes, func(o *wish) bool { return o == w })
}

// post queues what comes from outside, and tells whether the Manager takes it. Ticks that
// nobody has looked at yet are one.
func (m *Manager) post(e entry) bool {
	m.mu.Lock()
	taken := m.mu.state == running
	if taken {
		m.queueLocked(e)
	}
	m.mu.Unlock()
	if taken {
		m.nudge()
	}
	return taken
}

// report queues the end of a piece of work, also while closing.
func (m *Manager) report(e protocol.Event) { m.reportThen(entry{event: e}) }

func (m *Manager) reportThen(e entry) {
	m.mu.Lock()
	if m.mu.state < closed {
		m.queueLocked(e)
	}
	m.mu.Unlock()
	m.nudge()
}

func (m *Manager) queueLocked(e entry) {
	if _, tick := e.event.(protocol.Tick); tick && e.then == nil {
		if m.mu.ticked {
			return
		}
		m.mu.ticked = true
	}
	m.mu.queue = append(m.mu.queue, e)
}

// taking tells whether the Manager takes anything in.
func (m *Manager) taking() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.state == running
}

func (m *Manager) nudge() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// take empties the queue.
func (m *Manager) take() []entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	batch := m.mu.queue
	m.mu.queue, m.mu.ticked = nil, false
	return batch
}

// run is the loop. It ends when Close was stepped and all work is through.
func (m *Manager) run(forgetParent func() bool) {
	defer close(m.done)
	defer forgetParent()
	ticker := time.NewTicker(m.opts.Tick)
	defer ticker.Stop()

	for idle := false; !idle; {
		select {
		case <-m.wake:
		case <-ticker.C:
			m.Poll()
		case <-m.idle:
			idle = true
		}
		m.drain()
	}
	m.finish()
}

// drain handles all that is queued, and then those who wait for a state.
func (m *Manager) drain() {
	handled := false
	for batch := m.take(); len(batch) > 0; batch = m.take() {
		handled = true
		m.moved()
		for _, e := range batch {
			m.handle(e)
		}
	}
	if handled {
		m.settle()
	}
}

func (m *Manager) handle(e entry) {
	if e.event != nil {
		m.step(e.event)
	}
	if e.then != nil {
		e.then(&m.loop)
	}
	if _, last := e.event.(protocol.Close); last {
		m.stop()
	}
}

// step gives the Machine one event and carries out what comes of it.
func (m *Manager) step(e protocol.Event) {
	v := m.view()
	for _, f := range m.loop.machine.Step(m.now(), &v, e) {
		m.do(f, &v)
	}
}

// view is the member's with the store's snapshots in it.
func (m *Manager) view() protocol.View {
	v := m.host.View()
	v.Held = m.store.List()
	return v
}

func (m *Manager) now() time.Duration { return time.Since(m.began) }

// stop cancels all work once the Machine has seen Close. What it has to say in the end
// still comes in; idle tells when nothing more can come.
func (m *Manager) stop() {
	m.loop.stopping = true
	m.refuseAll()
	m.cancel()
	go func() {
		m.works.Wait()
		close(m.idle)
	}()
}

// finish leaves nothing behind, after the last event.
func (m *Manager) finish() {
	m.server.Close()
	m.client.Close()
	m.mu.Lock()
	m.mu.state = closed
	m.mu.queue = nil
	m.mu.Unlock()
}
