package snapferry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/source"
)

// A history is a random life of a repository: owners that commit, crash, replace each
// other and come back, and others that read, trim and sweep. The model beside it is a
// map from checkpoints to the bytes of their stores. After each step what is listed
// is what the model says, to the byte (I1, I3, I4, I8, P1-P12).

// regressions are seeds that once failed, and on what.
var regressions = []struct {
	seed uint64
	why  string
}{
	{298, "a head that could not be read after an unknown outcome was resolved"},
}

const (
	histories     = 500
	longHistories = 4_000 // with SNAPFERRY_LONG=1
)

func TestModel(t *testing.T) {
	first, n := uint64(1), uint64(histories)
	if os.Getenv("SNAPFERRY_LONG") != "" {
		n = longHistories
	}
	if os.Getenv("SNAPFERRY_CHAOS") != "" { // other histories each time
		first = uint64(time.Now().UnixNano())
	}
	if s := os.Getenv("SNAPFERRY_SEED"); s != "" {
		first, n = value(strconv.ParseUint(s, 10, 64))(t), 1
	}
	for _, r := range regressions {
		t.Run(fmt.Sprintf("seed=%d", r.seed), func(t *testing.T) { runHistory(t, r.seed) })
	}
	for seed := first; seed < first+n && !t.Failed(); seed++ {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { runHistory(t, seed) })
	}
}

func runHistory(t *testing.T, seed uint64) { newRandomLife(t, seed).run() }

func (h *randomLife) run() {
	t, seed := h.t, h.seed
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("again with SNAPFERRY_SEED=%d; steps:\n%s", seed, strings.Join(h.steps, "\n"))
		}
	})
	for range 5 + h.r.IntN(12) {
		h.step()
		h.observe(false)
	}
	h.end()
}

// try is one commit that was asked for.
type try struct {
	stores map[string]tree
	keep   int // KeepLast of its owner then
}

// randomLife is a history with its model.
type randomLife struct {
	t     *testing.T
	r     *rand.Rand
	l     *lab
	seed  uint64
	steps []string
	moved int64  // by pack upkeep
	also  func() // changes the stores too, if it is there

	now      map[string]tree // the stores as they are
	tries    map[string]try  // by offset n
	open     map[string]bool // tries that may show up: acknowledged or unknown
	failed   map[string]bool // tries that never may
	retained []string        // what must be listed, oldest first

	owner   *owner
	zombies []*owner
	ghosts  []*ghosts
}

func newRandomLife(t *testing.T, seed uint64) *randomLife {
	return &randomLife{
		t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 0)), l: newLab(t),
		now: map[string]tree{"kv": {}, "meta": {"m": "0"}}, tries: map[string]try{}, open: map[string]bool{}, failed: map[string]bool{},
	}
}

// owner is a process that has opened the task, with its own view of the store.
type owner struct {
	*process
	task   *Task
	rec    *blobtest.Recorder
	faults *blobtest.Faults
	ghosts *ghosts
	haunt  atomic.Bool // puts become ghosts
	what   string      // which puts do
	left   atomic.Int64
	cancel context.CancelFunc // when the process has lost its connection
}

func (h *randomLife) newOwner() *owner {
	o := &owner{cancel: func() {}}
	o.left.Store(1 << 40)
	o.ghosts = newGhosts(h.l.mem, func(c blobtest.Call) bool { return o.haunt.Load() && strings.Contains(c.Key(), o.what) })
	o.faults = blobtest.NewFaults(o.ghosts, func(blobtest.Call) bool {
		if o.left.Add(-1) < -1 {
			o.cancel()
		}
		return true
	})
	o.rec = blobtest.NewRecorder(o.faults)
	o.process = h.l.process(h.t, o.rec)
	o.opts.KeepLast = 1 + h.r.IntN(4)
	if h.r.IntN(3) == 0 {
		o.opts.Grace = time.Hour
	}
	if h.r.IntN(4) == 0 {
		o.opts.PartialBytes = 1
	}
	return o
}

// crashAt lets the i-th operation from now be the last one of the process.
func (o *owner) crashAt(i int, cancel context.CancelFunc) {
	o.cancel = cancel
	o.left.Store(int64(i))
	o.faults.LoseAt(i, nil)
}

func (h *randomLife) say(format string, args ...any) {
	h.steps = append(h.steps, fmt.Sprintf(format, args...))
}

func (h *randomLife) step() {
	if h.owner == nil {
		h.replace()
		return
	}
	steps := []struct {
		weight int
		do     func()
	}{
		{4, h.commit}, {3, h.commitAndCrash}, {2, h.commitWithFault}, {2, h.commitGhost},
		{2, h.replace}, {2, h.zombieCommits}, {2, h.gc}, {1, h.trim}, {1, h.restore}, {1, h.land}, {1, h.expire},
	}
	n := 0
	for _, s := range steps {
		n += s.weight
	}
	pick := h.r.IntN(n)
	for _, s := range steps {
		if pick -= s.weight; pick < 0 {
			s.do()
			return
		}
	}
}

// change writes, deletes, renames and truncates files.
func (h *randomLife) change() {
	kv := h.now["kv"]
	for range h.r.IntN(4) {
		name := fmt.Sprintf("%c/%d", 'a'+rune(h.r.IntN(2)), h.r.IntN(5))
		names := slices.Sorted(maps.Keys(kv))
		old := ""
		if len(names) > 0 {
			old = names[h.r.IntN(len(names))]
		}
		switch h.r.IntN(5) {
		case 0:
			delete(kv, old)
		case 1:
			if data, ok := kv[old]; ok {
				delete(kv, old)
				kv[name] = data
			}
		case 2:
			if data, ok := kv[old]; ok {
				kv[old] = data[:h.r.IntN(len(data)+1)]
			}
		case 3:
			kv[name] = randomBytes(h.r, 10<<10+h.r.IntN(40<<10))
		default:
			kv[name] = randomBytes(h.r, h.r.IntN(100))
		}
	}
	if h.r.IntN(3) == 0 {
		h.now["meta"]["m"] = fmt.Sprint(h.r.IntN(3))
	}
}

// attempt changes the stores and commits them through o, and notes in the model what
// may come of it.
func (h *randomLife) attempt(ctx context.Context, o *owner) (string, error) {
	h.change()
	if h.also != nil {
		h.also()
	}
	n := fmt.Sprint(len(h.tries))
	tr := try{map[string]tree{"kv": maps.Clone(h.now["kv"])}, o.opts.KeepLast}
	switch h.r.IntN(6) {
	case 0, 1:
		tr.stores["meta"] = maps.Clone(h.now["meta"])
	case 2:
		tr.stores = map[string]tree{"meta": maps.Clone(h.now["meta"])}
	}
	h.tries[n] = tr
	sources := map[string]source.Source{}
	for name, files := range tr.stores {
		sources[name] = &memSource{tree: files}
	}
	rep, err := commitStores(ctx, o.task, sources, n)
	if err == nil {
		for _, s := range rep.Stores {
			h.moved += s.BytesRewritten
		}
	}
	if err == nil || errors.Is(err, ErrUnknown) {
		h.open[n] = true
	} else {
		h.failed[n] = true
	}
	if err == nil {
		h.expect(n)
	}
	return n, err
}

// expect takes up that n is published: it is listed, after what retention leaves.
func (h *randomLife) expect(n string) {
	for _, c := range h.l.list() { // one of unknown outcome may have come before it
		if got := c.Offsets["n"]; got != n && h.open[got] {
			h.publish(got)
		}
	}
	h.publish(n)
}

func (h *randomLife) publish(n string) {
	delete(h.open, n)
	h.retained = append(h.retained, n)
	h.keepLast(h.tries[n].keep)
}

// keepLast is the retention of P5e.
func (h *randomLife) keepLast(k int) {
	if len(h.retained) <= k {
		return
	}
	holds := map[string]string{}
	for _, n := range h.retained {
		for store := range h.tries[n].stores {
			holds[store] = n
		}
	}
	old, recent := h.retained[:len(h.retained)-k], h.retained[len(h.retained)-k:]
	h.retained = slices.Concat(slices.DeleteFunc(slices.Clone(old), func(n string) bool {
		return holds["kv"] != n && holds["meta"] != n
	}), recent)
}

func (h *randomLife) commit() {
	n, err := h.attempt(h.t.Context(), h.owner)
	h.say("commit %s: %v", n, err)
	if err != nil {
		h.t.Fatalf("commit %s: %v", n, err)
	}
}

func (h *randomLife) commitAndCrash() {
	ctx, cancel := context.WithCancel(h.t.Context())
	defer cancel()
	i := h.r.IntN(30)
	h.owner.crashAt(i, cancel)
	n, err := h.attempt(ctx, h.owner)
	h.say("commit %s, crash at operation %d: fired %v: %v", n, i, h.owner.faults.Fired(), err)
	if h.owner.faults.Fired() {
		h.owner = nil
		return
	}
	h.owner.faults.Heal()
	h.owner.left.Store(1 << 40)
	if err != nil {
		h.t.Fatalf("commit %s: %v", n, err)
	}
}

func (h *randomLife) commitWithFault() {
	i := h.r.IntN(30)
	h.owner.faults.FailAt(i, nil)
	n, err := h.attempt(h.t.Context(), h.owner)
	h.owner.faults.Heal()
	h.say("commit %s, operation %d fails: %v", n, i, err)
	if err != nil && (!errors.Is(err, blobtest.ErrInjected) || errors.Is(err, ErrUnknown)) {
		h.t.Fatalf("commit %s: %v", n, err)
	}
}

// commitGhost lets a put get no answer and its sender give up; it lands later or never.
func (h *randomLife) commitGhost() {
	o := h.owner
	ctx, cancel := context.WithCancel(h.t.Context())
	defer cancel()
	o.what = []string{"/log/", "/b/"}[h.r.IntN(2)]
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-o.ghosts.reached:
			cancel()
		case <-ctx.Done():
		}
	}()
	o.haunt.Store(true)
	n, err := h.attempt(ctx, o)
	o.haunt.Store(false)
	cancel()
	<-done
	h.ghosts = append(h.ghosts, o.ghosts)
	h.say("commit %s, puts of %s unanswered: %v", n, o.what, err)
	if err == nil {
		h.t.Fatalf("commit %s without an answer", n)
	}
	if h.r.IntN(2) == 0 {
		h.owner = nil
	}
}

// land lets puts happen whose senders have gone long ago. One that had the name
// before stays.
func (h *randomLife) land() {
	for _, g := range h.ghosts {
		h.say("%d ghosts land: %v", len(g.late), g.land())
	}
	h.ghosts = nil
}

// replace opens the task anew; the owner until now goes on without knowing it.
func (h *randomLife) replace() {
	if h.owner != nil {
		h.zombies = append(h.zombies, h.owner)
	}
	o := h.newOwner()
	ctx, cancel := context.WithCancel(h.t.Context())
	defer cancel()
	if h.r.IntN(4) == 0 {
		o.crashAt(h.r.IntN(30), cancel)
	}
	task, err := o.open(ctx)
	h.say("open: fired %v: %v", o.faults.Fired(), err)
	h.owner = nil
	switch {
	case err != nil && !o.faults.Fired():
		h.t.Fatalf("open: %v", err)
	case !o.faults.Fired():
		o.faults.Heal()
		o.left.Store(1 << 40)
		o.task, h.owner = task, o
	}
}

// zombieCommits: an owner that was replaced learns it, and deletes nothing (I4).
func (h *randomLife) zombieCommits() {
	if len(h.zombies) == 0 {
		return
	}
	z := h.zombies[h.r.IntN(len(h.zombies))]
	z.rec.Reset()
	n, err := h.attempt(h.t.Context(), z)
	h.say("replaced owner of epoch %d commits %s: %v", z.task.Epoch(), n, err)
	if !errors.Is(err, ErrFenced) {
		h.t.Fatalf("replaced owner: %v", err)
	}
	for _, c := range z.rec.Calls() {
		if c.Op == blobtest.OpDelete && len(c.Keys) > 0 {
			h.t.Fatalf("replaced owner deleted %v", c.Keys)
		}
	}
}

func (h *randomLife) gc() {
	opts := GCOptions{OlderThan: []time.Duration{0, time.Hour}[h.r.IntN(2)], DryRun: h.r.IntN(4) == 0}
	rep, err := h.l.repo().GC(h.t.Context(), opts)
	h.say("gc %+v: %+v", opts, rep)
	must(h.t, err)
}

// trim drops checkpoints without being the owner (P12).
func (h *randomLife) trim() {
	if len(h.retained) == 0 {
		return
	}
	k := 1 + h.r.IntN(3)
	h.say("trim to %d", k)
	h.expectUnknown(h.l.list())
	err := h.l.repo().view(kvTask).amend(h.t.Context(), checkpoint.Trim, func(s *head.State, slot uint64) (*head.State, error) {
		return s.Trim(k, nil, slot, time.Now()), nil
	})
	must(h.t, err)
	h.keepLast(k)
}

// expectUnknown takes up commits of unknown outcome that turn out to be there.
func (h *randomLife) expectUnknown(list []Checkpoint) {
	for _, c := range list {
		if n := c.Offsets["n"]; h.open[n] {
			h.publish(n)
		}
	}
}

// restore brings a directory to a checkpoint: an absent one, or one with other files.
func (h *randomLife) restore() {
	list := h.l.list()
	if len(list) == 0 {
		return
	}
	dir := fastDir(h.t)
	at, cp := At{}, list[len(list)-1]
	if h.r.IntN(2) == 0 {
		cp = list[h.r.IntN(len(list))]
		at = value(ParseAt(cp.ID))(h.t)
	}
	if h.r.IntN(2) == 0 {
		writeDir(h.t, filepath.Join(dir, "kv"), tree{"a/0": "dirt", "a/9": "dirt", "z": "dirt"})
		writeDir(h.t, filepath.Join(dir, "kv"), h.now["kv"])
	}
	h.say("restore %s", at)
	value(h.l.repo().Restore(h.t.Context(), kvTask, at, nil, &RestoreOptions{Dir: dir}))(h.t)
	for name, want := range h.tries[cp.Offsets["n"]].stores {
		if got := readDir(h.t, filepath.Join(dir, name)); !sameTree(got, want) {
			h.t.Fatalf("restored %s of %s: %v, want %v", name, cp.ID, got.short(), want.short())
		}
	}
}

func (h *randomLife) expire() { h.say("expired: %d", len(h.l.mem.Expire())) }

// observe compares what is there with the model: every byte, or a sample.
func (h *randomLife) observe(all bool) {
	h.t.Helper()
	list := h.l.list()
	h.expectUnknown(list)
	var got []string
	for _, c := range list {
		n := c.Offsets["n"]
		got = append(got, n)
		if h.failed[n] {
			h.t.Fatalf("commit %s failed and is listed", n)
		}
	}
	if !slices.Equal(got, h.retained) {
		h.t.Fatalf("listed %v, want %v", got, h.retained)
	}
	for i := range list {
		if i != len(list)-1 && !all && h.r.IntN(4) > 0 {
			continue
		}
		for name, want := range h.tries[got[i]].stores {
			h.l.wantTree(&list[i], name, want)
		}
	}
}

// end is a quiet moment: ghosts land, a new owner goes on, what is dead is swept.
func (h *randomLife) end() {
	h.land()
	h.expire()
	h.l.wantOnlyLive()
	h.observe(true)
	h.owner = nil
	o := h.newOwner()
	o.task = o.mustOpen()
	h.owner = o
	h.commit()
	h.expire()
	h.l.wantOnlyLive()
	h.observe(true)
	if h.r.IntN(8) == 0 {
		h.l.verify()
		h.restore()
	}
}
