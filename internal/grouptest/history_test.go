//go:build linux

package grouptest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/internal/sentinel"
)

// history is what clients did to a group and were told.
type history struct {
	g     *group
	seed  uint64
	job   string
	start time.Time
	stop  chan struct{}
	owned sync.WaitGroup
	acked atomic.Int64
	// recent is a task that something was appended to.
	recent atomic.Pointer[cpwire.Task]

	mu     sync.Mutex // guards the rest
	ops    []porcupine.Operation
	open   []porcupine.Operation // whose outcome is not known
	acks   map[cpwire.Task]map[uint64]call
	denied map[cpwire.Nonce]string // what certainly is in no log, and why
}

// load says what clients do; zero is valid.
type load struct {
	clients int           // default 4
	tasks   int           // at once, default 3, so that clients meet
	body    int           // bytes of an entry, default 100
	every   time.Duration // between two operations of a client, default 5 ms
}

// maxSlots is where a task is left for a new one: its whole log must fit into what the
// group tells of it.
const maxSlots = cpwire.KeptRecords * 3 / 4

var jobs atomic.Int32

// begin lets clients work until end.
func (g *group) begin(seed uint64, l load) *history {
	g.t.Helper()
	def := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	def(&l.clients, 4)
	def(&l.tasks, 3)
	def(&l.body, 100)
	if l.every == 0 {
		l.every = 5 * time.Millisecond
	}
	h := &history{
		g: g, seed: seed, job: fmt.Sprint("job", jobs.Add(1)), start: time.Now(), stop: make(chan struct{}),
		acks: map[cpwire.Task]map[uint64]call{}, denied: map[cpwire.Nonce]string{},
	}
	for i := range l.clients {
		w := &writer{h: h, i: i, load: l, rng: rand.New(rand.NewPCG(seed, uint64(i))), heads: map[cpwire.Task]head{}}
		w.try = time.Second
		switch i % 4 {
		case 2: // one that often gives up before the answer comes
			w.try = 100 * time.Millisecond
		case 3: // one that gets answers which were long on their way
			w.try = 8 * time.Second
		}
		w.c = g.client(&cpwire.Options{Patience: 2 * w.try, TryTimeout: w.try})
		h.owned.Go(w.run)
	}
	for _, m := range g.members {
		h.owned.Go(func() { h.spy(m, l.clients+m.i) })
	}
	return h
}

// progress waits until the group has acknowledged n appends more.
func (h *history) progress(n int64) {
	h.g.t.Helper()
	want := h.acked.Load() + n
	late := time.NewTimer(patience)
	defer late.Stop()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for h.acked.Load() < want {
		select {
		case <-again.C:
		case <-late.C:
			h.g.t.Fatalf("only %d of %d appends acknowledged in %v", n-want+h.acked.Load(), n, patience)
		}
	}
}

// now is the time of the history.
func (h *history) now() int64 { return int64(time.Since(h.start)) }

// writer is one client.
type writer struct {
	h     *history
	i     int
	load  load
	rng   *rand.Rand
	c     *cpwire.Client
	try   time.Duration
	turns int
	heads map[cpwire.Task]head // as known to this client, and stale at times
	round int                  // of tasks
}

func (w *writer) run() {
	defer w.c.Close()
	for {
		select {
		case <-w.h.stop:
			return
		default:
		}
		task := cpwire.Task{Job: w.h.job, Name: fmt.Sprintf("t%d-%d", w.round, w.rng.IntN(w.load.tasks))}
		if w.rng.IntN(4) == 0 {
			w.read(task)
		} else {
			w.append(task)
		}
		if w.heads[task].slot >= maxSlots {
			w.round++
		}
		pause(w.load.every, w.h.stop)
	}
}

func (w *writer) read(task cpwire.Task) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*w.try)
	defer cancel()
	began := w.h.now()
	e, err := w.c.HeadRecord(ctx, task)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	at := head{e.Slot, e.Digest}
	w.heads[task] = at
	w.h.add(porcupine.Operation{ClientId: w.i, Input: call{task: task}, Call: began, Output: answer{head: at}, Return: w.h.now()})
}

// append appends after the head as this client knows it. It repeats what it does not know
// the outcome of once, with the same nonce, as a client that wants to know must.
func (w *writer) append(task cpwire.Task) {
	body := make([]byte, w.load.body)
	for i := range body {
		body[i] = byte(w.rng.Uint32())
	}
	c := call{task: task, append: true, after: w.heads[task], digest: blake3.Sum256(body)}
	copy(c.nonce[:], fmt.Sprintf("%d %d %d", w.i, w.turns, w.h.seed))
	w.turns++
	a := cpwire.Append{Task: task, Slot: c.after.slot + 1, Prev: c.after.digest, Nonce: c.nonce, Body: body}
	op := porcupine.Operation{ClientId: w.i, Input: c, Call: w.h.now()}
	var r cpwire.Result
	var err error
	unknown := false
	for range 2 {
		ctx, cancel := context.WithTimeout(context.Background(), 2*w.try)
		r, err = w.c.Append(ctx, a)
		cancel()
		unknown = unknown || errors.Is(err, sentinel.Unknown)
		if !errors.Is(err, sentinel.Unknown) {
			break
		}
	}
	op.Return = w.h.now()
	w.learn(op, c, r, err, unknown)
}

// learn notes what became of an append.
func (w *writer) learn(op porcupine.Operation, c call, r cpwire.Result, err error, unknown bool) {
	h := w.h
	at := head{r.Slot, r.Digest}
	switch {
	case err != nil && unknown:
		h.leaveOpen(op)
		delete(w.heads, c.task)
	case err != nil:
		if !errors.Is(err, sentinel.NoEffect) {
			h.g.base.Errorf("append says neither that it may have worked nor that it has not: %v", err)
		}
		h.deny(c.nonce, err.Error())
	case r.Status.InLog():
		w.heads[c.task] = at
		h.recent.Store(&c.task)
		op.Output = answer{true, at}
		h.add(op)
		h.ack(c, at)
	case r.Status == cpwire.Conflict, r.Status == cpwire.NotOnHead:
		w.heads[c.task] = at
		op.Output = answer{false, at}
		h.add(op)
		h.deny(c.nonce, r.Status.String())
	default:
		h.g.base.Errorf("append to slot %d is %v, the head is at %d", c.after.slot+1, r.Status, r.Slot)
	}
}

func (h *history) add(op porcupine.Operation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops = append(h.ops, op)
}

func (h *history) leaveOpen(op porcupine.Operation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	op.Return = forever
	h.open = append(h.open, op)
}

func (h *history) deny(n cpwire.Nonce, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.denied[n] = why
}

func (h *history) ack(c call, at head) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.acks[c.task] == nil {
		h.acks[c.task] = map[uint64]call{}
	}
	if other, ok := h.acks[c.task][at.slot]; ok {
		h.g.base.Errorf("%s: slot %d was acknowledged to %v and %v", c.task, at.slot, other.nonce, c.nonce)
	}
	h.acks[c.task][at.slot] = c
	h.acked.Add(1)
}

// end stops the clients, waits until the group is level, and checks what they were told
// against what the group has.
func (h *history) end() {
	h.g.t.Helper()
	close(h.stop)
	h.owned.Wait()
	h.g.eventually("all members level", level)
	logs := h.g.contents(h.job)
	h.checkAcks(logs)
	h.g.leader()
	h.g.checkStatus()
	h.g.t.Logf("seed %d: %d operations, %d acknowledged, %d never known, %d certainly not done; terms with a leader: %d",
		h.seed, len(h.ops), h.acked.Load(), len(h.open), len(h.denied), h.g.eyes.terms())
	if err := checkLinear(h.settle(logs)); err != nil {
		h.g.t.Errorf("seed %d: %v", h.seed, err)
	}
}

// settle returns the history with what clients never learned: an entry that is in the log
// came there at some time after it was sent, and one that is not has changed nothing.
func (h *history) settle(logs contents) []porcupine.Operation {
	all := h.ops
	for _, op := range h.open {
		c := op.Input.(call)
		for _, e := range logs[c.task] {
			if e.Nonce == c.nonce {
				op.Output = answer{true, head{e.Slot, e.Digest}}
				all = append(all, op)
			}
		}
	}
	return all
}

// checkAcks looks for every acknowledged entry, and for those that must not be there.
func (h *history) checkAcks(logs contents) {
	t := h.g.t
	t.Helper()
	if h.acked.Load() == 0 {
		t.Error("nothing was acknowledged")
	}
	for task, acks := range h.acks {
		log := logs[task]
		for slot, c := range acks {
			if slot > uint64(len(log)) || log[slot-1].Digest != c.digest || log[slot-1].Nonce != c.nonce {
				t.Errorf("seed %d: %s: the entry acknowledged at slot %d is not there", h.seed, task, slot)
			}
		}
	}
	for task, log := range logs {
		for i, e := range log {
			if e.Slot != uint64(i+1) {
				t.Fatalf("%s: slot %d at place %d", task, e.Slot, i+1)
			}
			if why := h.denied[e.Nonce]; why != "" {
				t.Errorf("seed %d: %s: slot %d has an entry that was refused: %s", h.seed, task, e.Slot, why)
			}
			if e.Body != nil && cpwire.Digest(blake3.Sum256(e.Body)) != e.Digest {
				t.Errorf("%s: slot %d has a body that does not fit its digest", task, e.Slot)
			}
		}
	}
}

// contents are the logs of a job: whole, as long as no task is beyond maxSlots by much.
type contents map[cpwire.Task][]cpwire.Entry

// contents reads the logs of a job from each voting member as the leader, and wants them
// to be the same.
func (g *group) contents(job string) (all contents) {
	g.t.Helper()
	from := ""
	for _, m := range g.members {
		if m.process() == nil || g.role(m) == "learner" || g.role(m) == "" {
			continue
		}
		mine := g.contentsOf(m, job)
		if all != nil && !mine.equal(all) {
			g.t.Errorf("%s and %s hold different logs", from, m.id)
		}
		all, from = mine, m.id
	}
	return all
}

func (g *group) role(m *member) string {
	s, err := g.look()
	if err != nil {
		g.t.Fatal(err)
	}
	return s.member(m.id).Role
}

func (c contents) equal(other contents) bool {
	if len(c) != len(other) {
		return false
	}
	for task, log := range c {
		if len(log) != len(other[task]) {
			return false
		}
		for i, e := range log {
			o := other[task][i]
			if e.Slot != o.Slot || e.Digest != o.Digest || e.Nonce != o.Nonce || !e.Stored.Equal(o.Stored) || string(e.Body) != string(o.Body) {
				return false
			}
		}
	}
	return true
}

// contentsOf makes a member the leader, which all reads go through, and reads its logs.
func (g *group) contentsOf(m *member, job string) contents {
	g.t.Helper()
	c := g.client(&cpwire.Options{Patience: patience})
	for range 20 {
		if err := c.TransferLeader(g.t.Context(), m.id); err != nil {
			g.t.Logf("transfer leadership to %s: %v", m.id, err)
			continue
		}
		before, err := c.Status(g.t.Context())
		if err != nil {
			g.t.Fatal(err)
		}
		logs := readLogs(g, c, job)
		after, err := c.Status(g.t.Context())
		if err != nil {
			g.t.Fatal(err)
		}
		if before.Leader == m.id && after.Leader == m.id && before.Term == after.Term {
			return logs
		}
	}
	g.t.Fatalf("%s does not stay the leader", m.id)
	return nil
}

func readLogs(g *group, c *cpwire.Client, job string) contents {
	g.t.Helper()
	logs := contents{}
	for task, err := range c.Tasks(g.t.Context()) {
		if err != nil {
			g.t.Fatal(err)
		}
		if task.Job != job {
			continue
		}
		if logs[task], err = c.History(g.t.Context(), task, 0, true); err != nil {
			g.t.Fatal(err)
		}
	}
	return logs
}

// fillTasks gives some tasks of a job n entries of the greatest size each.
func (g *group) fillTasks(job string, tasks, n int) {
	g.t.Helper()
	c := g.client(nil)
	var all sync.WaitGroup
	for i := range tasks {
		all.Go(func() {
			task := cpwire.Task{Job: job, Name: fmt.Sprint("t", i)}
			rng := rand.NewChaCha8([32]byte{byte(i)})
			var at head
			for range n {
				body := make([]byte, cpwire.MaxBody)
				_, _ = rng.Read(body) // never fails
				a := cpwire.Append{Task: task, Slot: at.slot + 1, Prev: at.digest, Body: body}
				copy(a.Nonce[:], fmt.Sprint("fill ", at.slot))
				r, err := c.Append(g.t.Context(), a)
				if err != nil || !r.Status.InLog() {
					g.t.Errorf("fill %s: %v, %v", task, r.Status, err)
					return
				}
				at = head{r.Slot, r.Digest}
			}
		})
	}
	all.Wait()
}
