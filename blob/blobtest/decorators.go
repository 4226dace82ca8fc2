package blobtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/snapferry/snapferry/blob"
)

// ErrInjected is the default error of Faults. It is permanent.
var ErrInjected = errors.New("injected fault")

// Faults is a driver that fails on purpose. Sweep a scenario by arming the i-th operation
// for i = 0, 1, 2 ... until Fired stays false: then every operation has failed once.
type Faults struct {
	*decorated
	mu    sync.Mutex
	match Match
	count int
	at    int // -1: not armed
	lose  bool
	fired bool
	err   error
}

// NewFaults decorates a driver; nothing fails before FailAt or LoseAt. Only calls that
// match (nil: all) count and fail.
func NewFaults(d blob.Driver, match Match) *Faults {
	f := &Faults{match: match, at: -1}
	f.decorated = &decorated{inner: d, around: f.around}
	return f
}

// FailAt makes the i-th operation from now on, counted from 0, fail before it happens;
// err nil means ErrInjected. Later ones work again.
func (f *Faults) FailAt(i int, err error) { f.arm(i, false, err) }

// LoseAt makes the i-th operation from now on happen while its answer is lost, and every
// one after it fail without happening: the network went away, or the process died.
func (f *Faults) LoseAt(i int, err error) { f.arm(i, true, err) }

// Heal disarms; all works again.
func (f *Faults) Heal() { f.arm(-1, false, nil) }

func (f *Faults) arm(i int, lose bool, err error) {
	if err == nil {
		err = ErrInjected
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count, f.at, f.lose, f.fired, f.err = 0, i, lose, false, err
}

// Fired tells whether the armed fault has happened.
func (f *Faults) Fired() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fired
}

// Count is how many matching operations there were since the last arming.
func (f *Faults) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

func (f *Faults) around(_ context.Context, c Call, do func() error) error {
	if !f.match.ok(c) {
		return do()
	}
	before, after := f.next()
	if before != nil {
		return fmt.Errorf("%s: %w", c.Op, before)
	}
	err := do()
	if after != nil {
		return fmt.Errorf("%s: answer lost: %w", c.Op, after)
	}
	return err
}

// next counts an operation and gives the error in place of doing it, or that after it.
func (f *Faults) next() (before, after error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := f.count
	f.count++
	switch {
	case f.at < 0 || i < f.at || i > f.at && !f.lose:
		return nil, nil
	case i == f.at && f.lose:
		f.fired = true
		return nil, f.err
	}
	f.fired = true
	return f.err, nil
}

// Recorder is a driver that writes a transcript: a line per operation in the order of
// their ends, such as "put t/a 12 if-absent" or "get t/a: not exist".
type Recorder struct {
	*decorated
	mu    sync.Mutex
	lines []string
	calls []Call
}

// NewRecorder decorates a driver.
func NewRecorder(d blob.Driver) *Recorder {
	r := &Recorder{}
	r.decorated = &decorated{inner: d, around: r.around}
	return r
}

func (r *Recorder) around(_ context.Context, c Call, do func() error) error {
	err := do()
	line := c.String()
	if err != nil {
		line += ": " + outcome(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, line)
	r.calls = append(r.calls, c)
	return err
}

// outcome names an error in a way that does not depend on the driver.
func outcome(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "not exist"
	case errors.Is(err, fs.ErrExist):
		return "exists"
	case errors.Is(err, fs.ErrPermission):
		return "permission"
	}
	return "error"
}

// Transcript is the lines so far.
func (r *Recorder) Transcript() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}

// Calls is the operations so far, failed ones too.
func (r *Recorder) Calls() []Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

// Reset starts a new transcript.
func (r *Recorder) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines, r.calls = nil, nil
}

// Latency is a driver whose every operation takes longer.
type Latency struct{ *decorated }

// NewLatency decorates a driver: each operation waits for delay(call) before it happens,
// or until its context ends.
func NewLatency(d blob.Driver, delay func(Call) time.Duration) *Latency {
	return &Latency{&decorated{inner: d, around: func(ctx context.Context, c Call, do func() error) error {
		t := time.NewTimer(delay(c))
		defer t.Stop()
		select {
		case <-t.C:
			return do()
		case <-ctx.Done():
			return ctx.Err()
		}
	}}}
}

// Stale is a driver whose List lags: it does not show what was put by the last few
// writes, and still shows what they deleted. All else is up to date. No supported
// store is so; it shows which code stands on a consistent List.
type Stale struct {
	*decorated
	lag    int
	mu     sync.Mutex
	writes []change // the last lag ones, oldest first
}

// change is what a write did to a key; before is its Info if it was there.
type change struct {
	key    string
	before *blob.Info
}

// NewStale decorates a driver so that List lags by up to lag writes made through it.
func NewStale(d blob.Driver, lag int) *Stale {
	s := &Stale{lag: lag}
	s.decorated = &decorated{inner: d, around: s.around}
	return s
}

func (s *Stale) around(ctx context.Context, c Call, do func() error) error {
	if c.Op != OpPut && c.Op != OpDelete {
		return do()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := make([]change, 0, len(c.Keys))
	for _, k := range c.Keys {
		ch := change{key: k}
		if info, err := s.inner.Stat(ctx, k); err == nil {
			ch.before = &info
		}
		changes = append(changes, ch)
	}
	err := do()
	if err == nil {
		s.writes = append(s.writes, changes...)
		s.writes = s.writes[max(0, len(s.writes)-s.lag):]
	}
	return err
}

// List implements blob.Driver, as of some writes ago.
func (s *Stale) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		infos := map[string]blob.Info{}
		for info, err := range s.inner.List(ctx, "", "") {
			if err != nil {
				yield(blob.Info{}, err)
				return
			}
			infos[info.Key] = info
		}
		s.undo(infos)
		for _, info := range selectInfos(infos, prefix, startAfter) {
			if !yield(info, nil) {
				return
			}
		}
	}
}

func (s *Stale) undo(infos map[string]blob.Info) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ch := range slices.Backward(s.writes) {
		if ch.before != nil {
			infos[ch.key] = *ch.before
		} else {
			delete(infos, ch.key)
		}
	}
}

// CatchUp makes List show everything that was written until now.
func (s *Stale) CatchUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes = nil
}

// Hold is a driver in which chosen operations wait until they are told to go on, to
// make an interleaving happen.
type Hold struct {
	*decorated
	mu    sync.Mutex
	gates []*Gate
}

// Gate is one operation to be held. Waiters on Reached know that it has come to the
// gate; Release lets it go on. A held operation also goes on when its context ends.
type Gate struct {
	match   Match
	after   bool
	reached chan struct{}
	release chan struct{}
	once    sync.Once
}

// Reached is closed when the operation stands at the gate.
func (g *Gate) Reached() <-chan struct{} { return g.reached }

// Release lets the operation go on, now or when it comes; more calls do nothing.
func (g *Gate) Release() { g.once.Do(func() { close(g.release) }) }

// NewHold decorates a driver; nothing is held before Before or After.
func NewHold(d blob.Driver) *Hold {
	h := &Hold{}
	h.decorated = &decorated{inner: d, around: h.around}
	return h
}

// Before holds the next matching operation before it happens. When its context ends
// while it is held, it does not happen.
func (h *Hold) Before(match Match) *Gate { return h.add(match, false) }

// After holds the next matching operation when it has happened but its caller does not
// know yet. When its context ends while it is held, the answer is lost.
func (h *Hold) After(match Match) *Gate { return h.add(match, true) }

func (h *Hold) add(match Match, after bool) *Gate {
	g := &Gate{match: match, after: after, reached: make(chan struct{}), release: make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gates = append(h.gates, g)
	return g
}

// take removes the first gate for this call, which holds nobody else.
func (h *Hold) take(c Call) *Gate {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.gates, func(g *Gate) bool { return g.match.ok(c) })
	if i < 0 {
		return nil
	}
	g := h.gates[i]
	h.gates = slices.Delete(h.gates, i, i+1)
	return g
}

func (h *Hold) around(ctx context.Context, c Call, do func() error) error {
	g := h.take(c)
	if g == nil {
		return do()
	}
	var err error
	if g.after {
		err = do()
	}
	close(g.reached)
	select {
	case <-g.release:
	case <-ctx.Done():
		return ctx.Err()
	}
	if !g.after {
		err = do()
	}
	return err
}
