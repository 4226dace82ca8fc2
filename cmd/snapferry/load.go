package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// errNoLog is what a group says of a task that has no log yet.
var errNoLog = fs.ErrNotExist

const (
	// giveUpAfter is how many commits in a row a client loses before it stops: each of
	// them has taken as long as the client library goes on without an answer.
	giveUpAfter = 3
	// maxRaces is how often one commit may lose its slot to somebody else.
	maxRaces = 100
	// readBackAt is how far back a commit may lie before it is read back. The group knows
	// the newest cpwire.KeptRecords of a task. The others are read back at the end, when
	// what may go wrong has gone wrong.
	readBackAt    = cpwire.KeptRecords * 7 / 8
	progressEvery = 5 * time.Second
)

// benchLog is what a bench needs of a group.
type benchLog interface {
	head(ctx context.Context, task cpwire.Task) (position, error) // zero for no log
	append(ctx context.Context, a cpwire.Append) (cpwire.Result, error)
	history(ctx context.Context, task cpwire.Task, after uint64) ([]cpwire.Entry, error)
}

// position is where a log stands.
type position struct {
	slot   uint64
	digest cpwire.Digest
}

// bench is one run: clients that commit to logs, each to its own.
type bench struct {
	log                            benchLog
	tasks, commits, bytes, clients int
	verify                         bool
	note                           func(format string, args ...any)

	seed uint64       // of all values
	done atomic.Int64 // commits that were tried to the end
}

// run commits, then reads back. The report counts time until the last commit only.
func (b *bench) run(ctx context.Context) (*benchReport, error) {
	b.seed = rand.Uint64()
	clients := make([]*benchClient, min(b.clients, b.tasks))
	for k := range clients {
		clients[k] = b.newClient(k, len(clients))
	}
	stop := b.tell()
	start := time.Now()
	each(clients, func(c *benchClient) { c.commitAll(ctx) })
	took := time.Since(start)
	stop()
	if b.verify && ctx.Err() == nil {
		each(clients, func(c *benchClient) { c.readBackAll(ctx) })
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return b.report(clients, took)
}

// each runs f for all clients at once.
func each(clients []*benchClient, f func(*benchClient)) {
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() { f(c) })
	}
	wg.Wait()
}

// tell notes from time to time how far it is; the function it returns ends that.
func (b *bench) tell() (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				b.note("%d of %d commits", b.done.Load(), b.commits)
			case <-end:
				return
			}
		}
	})
	return func() { close(end); wg.Wait() }
}

func (b *bench) report(clients []*benchClient, took time.Duration) (*benchReport, error) {
	var all latencies
	r := &benchReport{Seconds: took.Seconds()}
	for _, c := range clients {
		if c.unread != nil {
			return nil, fmt.Errorf("read back: %w", c.unread)
		}
		all.add(&c.took)
		r.Errors += c.errors
		r.lost += c.lost
		if c.cause != nil {
			r.cause = c.cause
		}
	}
	r.Commits = all.n
	r.PerSecond = float64(all.n) / max(took.Seconds(), 1e-9)
	r.P50, r.P99, r.Max = inMillis(all.percentile(50)), inMillis(all.percentile(99)), inMillis(all.max)
	if b.verify {
		r.Lost = &r.lost
	}
	return r, nil
}

// benchTask is a log that one client writes.
type benchTask struct {
	id    cpwire.Task
	at    position // of the head, if known
	known bool
	left  int    // commits still to make
	made  uint64 // commits tried, which number the values
	acks  []ack  // not read back yet, in slot order
}

// ack is what the group acknowledged.
type ack struct {
	position
	nonce  cpwire.Nonce
	number uint64
}

// benchClient is one client with its tasks.
type benchClient struct {
	b     *bench
	tasks []*benchTask

	took   latencies // of acknowledged commits
	errors int64     // commits never acknowledged
	inRow  int       // of errors, up to now
	cause  error     // of the last error
	lost   int64     // acknowledged, and not there
	unread error     // why reading back did not work
}

// newClient gives client k every n-th task. Commits are spread over the tasks evenly.
func (b *bench) newClient(k, n int) *benchClient {
	c := &benchClient{b: b}
	for t := k; t < b.tasks; t += n {
		left := b.commits / b.tasks
		if t < b.commits%b.tasks {
			left++
		}
		c.tasks = append(c.tasks, &benchTask{id: cpwire.Task{Job: cpwire.BenchJob, Name: fmt.Sprintf("t%d", t)}, left: left})
	}
	return c
}

// commitAll makes the client's commits, one after the other, turning from task to task.
func (c *benchClient) commitAll(ctx context.Context) {
	for more := true; more; {
		more = false
		for _, t := range c.tasks {
			if t.left == 0 {
				continue
			}
			more = true
			if ctx.Err() != nil || c.unread != nil {
				return
			}
			if c.inRow == giveUpAfter {
				c.giveUp()
				return
			}
			c.commit(ctx, t)
		}
	}
}

// giveUp counts what is left as errors.
func (c *benchClient) giveUp() {
	for _, t := range c.tasks {
		c.errors += int64(t.left)
		t.left = 0
	}
}

// commit makes one commit and waits for its acknowledgement.
func (c *benchClient) commit(ctx context.Context, t *benchTask) {
	t.left--
	t.made++
	start := time.Now()
	a, err := c.append(ctx, t)
	c.b.done.Add(1)
	if err != nil {
		// What became of it is unknown, and so is where the log stands.
		c.errors++
		c.inRow++
		c.cause, t.known = err, false
		return
	}
	c.took.observe(time.Since(start))
	c.inRow = 0
	if c.b.verify {
		t.acks = append(t.acks, a)
		if a.slot-t.acks[0].slot >= readBackAt {
			c.readBack(ctx, t, (len(t.acks)+1)/2)
		}
	}
}

// append appends the value at the head, wherever that is by now.
func (c *benchClient) append(ctx context.Context, t *benchTask) (ack, error) {
	body := c.b.value(t, t.made)
	for range maxRaces {
		if err := c.findHead(ctx, t); err != nil {
			return ack{}, err
		}
		a := cpwire.Append{Task: t.id, Slot: t.at.slot + 1, Prev: t.at.digest, Nonce: cpwire.Nonce(checkpoint.NewNonce()), Body: body}
		r, err := c.b.log.append(ctx, a)
		switch {
		case err != nil:
			return ack{}, err
		case r.Status.InLog():
			t.at = position{r.Slot, r.Digest}
			return ack{t.at, a.Nonce, t.made}, nil
		case r.Status == cpwire.Conflict || r.Status == cpwire.NotOnHead:
			t.at = position{r.Slot, r.Digest} // somebody else appends to this log
		default:
			return ack{}, fmt.Errorf("append %s slot %d: %s", t.id, a.Slot, r.Status)
		}
	}
	return ack{}, fmt.Errorf("append %s: lost its slot to another writer %d times", t.id, maxRaces)
}

func (c *benchClient) findHead(ctx context.Context, t *benchTask) (err error) {
	if !t.known {
		t.at, err = c.b.log.head(ctx, t.id)
		t.known = err == nil
	}
	return err
}

func (c *benchClient) readBackAll(ctx context.Context) {
	for _, t := range c.tasks {
		if ctx.Err() == nil && c.unread == nil {
			c.readBack(ctx, t, len(t.acks))
		}
	}
}

// readBack compares what a log has with the first n acknowledgements, and forgets these.
func (c *benchClient) readBack(ctx context.Context, t *benchTask, n int) {
	if n == 0 {
		return
	}
	entries, err := c.b.log.history(ctx, t.id, t.acks[0].slot-1)
	if err != nil && !errors.Is(err, errNoLog) {
		c.unread = err
		return
	}
	found := map[uint64]*cpwire.Entry{}
	for i := range entries {
		found[entries[i].Slot] = &entries[i]
	}
	for _, a := range t.acks[:n] {
		if !c.b.same(t, a, found[a.slot]) {
			c.lost++
		}
	}
	t.acks = slices.Delete(t.acks, 0, n)
}

// same tells whether an entry is what was acknowledged.
func (b *bench) same(t *benchTask, a ack, e *cpwire.Entry) bool {
	if e == nil || e.Digest != a.digest || e.Nonce != a.nonce {
		return false
	}
	return e.Body == nil || string(e.Body) == string(b.value(t, a.number))
}

// value is the content of one commit. It can be made again to compare.
func (b *bench) value(t *benchTask, number uint64) []byte {
	name := fnv.New64a()
	_, _ = name.Write([]byte(t.id.Name)) // never fails
	r := rand.NewPCG(b.seed^name.Sum64(), number)
	body := make([]byte, 0, b.bytes+8)
	for len(body) < b.bytes {
		body = binary.LittleEndian.AppendUint64(body, r.Uint64())
	}
	return body[:b.bytes]
}
