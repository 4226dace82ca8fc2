package snapferry

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/snapshot"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// kinds is a store in memory that notes what each object put into it is.
type kinds struct {
	*memblob.Driver
	mu sync.Mutex
	of map[string]string // by key
}

func (k *kinds) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	r, err := body.Open()
	if err != nil {
		return err
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	k.mu.Lock()
	k.of[key] = kindOf(key, data)
	k.mu.Unlock()
	return k.Driver.Put(ctx, key, blob.Bytes(data), opts)
}

func kindOf(key string, data []byte) string {
	if !strings.Contains(key, "/b/") {
		return ""
	}
	if _, err := frame.Decode("checkpoint", 1, data); err == nil {
		return "checkpoint"
	}
	if _, err := snapshot.DecodeRoot(data, key); err == nil {
		return "index"
	}
	return "pack"
}

// scribe records what a process does to the blob store, in words that are the same in
// each run.
type scribe struct {
	t        *testing.T
	kinds    *kinds
	rec      *blobtest.Recorder
	attempts map[string]string // short names, in order of appearance
}

func newScribe(t *testing.T) *scribe {
	k := &kinds{Driver: memblob.New(), of: map[string]string{}}
	return &scribe{t, k, blobtest.NewRecorder(k), map[string]string{}}
}

var (
	attemptPattern = regexp.MustCompile(`[0-9a-f]{16}-[0-9a-f]{8}-[0-9a-f]{16}`)
	probePattern   = regexp.MustCompile(`snapferry-probe-\w+`)
	rangePattern   = regexp.MustCompile(`\[\d+\+\d+\]`)
	sizePattern    = regexp.MustCompile(`^(put \S+) \d+`)
	keyPattern     = regexp.MustCompile(`t/\S+/b/\S+/\d{6}`)
)

// line is one operation: attempts are numbered, keys of blobs say what they are, and
// sizes, which times in the blobs change, are left out.
func (s *scribe) line(text string) string {
	text = sizePattern.ReplaceAllString(text, "$1")
	text = rangePattern.ReplaceAllString(text, "[part]")
	text = strings.ReplaceAll(text, "\xff", `\xff`)
	text = probePattern.ReplaceAllString(text, "snapferry-probe-*")
	s.kinds.mu.Lock()
	text = keyPattern.ReplaceAllStringFunc(text, func(key string) string { return key + "(" + s.kinds.of[key] + ")" })
	s.kinds.mu.Unlock()
	return attemptPattern.ReplaceAllStringFunc(text, func(a string) string {
		if s.attempts[a] == "" {
			s.attempts[a] = fmt.Sprintf("<%d>", len(s.attempts)+1)
		}
		return s.attempts[a]
	})
}

// golden runs an action, compares its operations with the golden file of that name,
// checks the order in which it wrote and deleted, and returns the calls.
func (s *scribe) golden(name string, action func()) []blobtest.Call {
	s.t.Helper()
	s.rec.Reset()
	action()
	var lines []string
	for _, text := range s.rec.Transcript() {
		lines = append(lines, s.line(text))
	}
	sortReads(lines)
	got := strings.Join(lines, "\n") + "\n"
	file := filepath.Join("testdata", "transcripts", name+".txt")
	if *update {
		must(s.t, os.MkdirAll(filepath.Dir(file), 0o755))
		must(s.t, os.WriteFile(file, []byte(got), 0o644))
	}
	want := string(value(os.ReadFile(file))(s.t))
	if d := cmp.Diff(got, want); d != "" {
		s.t.Errorf("%s differs (-got +want):\n%s", file, d)
	}
	calls := s.rec.Calls()
	s.wantWriteOrder(name, calls)
	s.wantDeleteOrder(name, calls)
	return calls
}

// sortReads gives reads that follow each other, which are made in parallel, one order.
func sortReads(lines []string) {
	read := func(s string) bool {
		return strings.HasPrefix(s, "get ") || strings.HasPrefix(s, "list ") && strings.HasSuffix(s, ">/")
	}
	for i := 0; i < len(lines); i++ {
		k := i
		for k < len(lines) && read(lines[k]) {
			k++
		}
		slices.Sort(lines[i:k])
		i = max(i, k)
	}
}

// wantWriteOrder is I2: packs, then indexes, then the checkpoint blob, then the seal of
// exactly what was put, then the entry of the log.
func (s *scribe) wantWriteOrder(name string, calls []blobtest.Call) {
	s.t.Helper()
	rank := map[string]int{"pack": 1, "index": 2, "checkpoint": 3}
	at := 0
	open := map[string]bool{} // put and not sealed
	for _, c := range calls {
		kind := s.kinds.of[c.Key()]
		switch {
		case c.Op == blobtest.OpPut && rank[kind] > 0:
			if rank[kind] < at {
				s.t.Errorf("%s: %s %s was put too late", name, kind, c.Key())
			}
			if c.Options.TTL == 0 {
				s.t.Errorf("%s: %s was put without a TTL", name, c.Key())
			}
			at, open[c.Key()] = rank[kind], true
		case c.Op == blobtest.OpRemoveTTL:
			for _, k := range c.Keys {
				if !open[k] {
					s.t.Errorf("%s: %s was sealed but not put before", name, k)
				}
				delete(open, k)
			}
		case c.Op == blobtest.OpPut && strings.Contains(c.Key(), "/log/"):
			if len(open) > 0 {
				s.t.Errorf("%s: an entry was put while %d blobs could expire", name, len(open))
			}
			at = 0
		}
	}
}

// wantDeleteOrder is I3: what names a blob goes before it. A pack may be named by
// any index of the action, so all of these go before any pack.
func (s *scribe) wantDeleteOrder(name string, calls []blobtest.Call) {
	s.t.Helper()
	rank := map[string]int{"checkpoint": 1, "index": 2, "pack": 3}
	at := map[string]int{} // by attempt
	packs := false
	for _, c := range calls {
		if c.Op != blobtest.OpDelete {
			continue
		}
		for _, k := range c.Keys {
			dir, _ := attemptOf(kvTask, k)
			r := rank[s.kinds.of[k]]
			packs = packs || r == rank["pack"]
			if r < at[dir] || packs && r < rank["pack"] {
				s.t.Errorf("%s: %s %s was deleted too late", name, s.kinds.of[k], k)
			}
			at[dir] = r
		}
	}
}

// process starts a program on the recorded store, made so that its operations come in
// one order.
func (s *scribe) process() *process {
	p := (&lab{t: s.t, mem: s.kinds.Driver}).process(s.t, s.rec)
	p.opts.Readers, p.opts.Uploads, p.opts.Grace = 1, 1, time.Hour
	return p
}

// The operations of each action of the engine on the blob store, so that a change of
// the protocol shows as a change of text (I2, I3, P1-P9).
func TestTranscript(t *testing.T) {
	s := newScribe(t)
	ctx := t.Context()
	r := rand.New(rand.NewPCG(7, 8))
	tr := tree{"a": "alpha", "d/b": randomBytes(r, 40<<10), "d/c": randomBytes(r, 40<<10)}

	s.golden("init", func() {
		_, _, err := Ensure(ctx, blob.New(s.rec, nil))
		must(t, err)
	})
	p := s.process()
	var task *Task
	s.golden("open-first", func() { task = p.mustOpen() })
	s.golden("first-backup", func() { p.mustCommit(task, tr, "1") })
	s.golden("unchanged", func() { p.mustCommit(task, tr, "2") })
	tr = tr.with(tree{"a": "ALPHA", "d/c": randomBytes(r, 40<<10)})
	s.golden("incremental-with-retention", func() { p.mustCommit(task, tr, "3") })
	tr = tr.with(tree{"d/b": randomBytes(r, 40<<10)})
	p.mustCommit(task, tr, "4")
	s.golden("restore", func() {
		value(task.Restore(ctx, map[string]string{"kv": filepath.Join(t.TempDir(), "kv")}, nil))(t)
	})
	s.golden("abort", func() {
		pending := value(task.Snapshot(ctx, memStores(tr.with(tree{"a": "given up"})), nil))(t)
		value(pending.Upload(ctx))(t)
		must(t, pending.Abort(ctx))
	})

	p = s.process()
	p.opts.Grace = 1 // it is over by now
	s.golden("open-after-grace", func() { task = p.mustOpen() })
	s.golden("commit-after-grace", func() { p.mustCommit(task, tr.with(tree{"a": "new"}), "5") })

	dead := value(task.Snapshot(ctx, memStores(tr.with(tree{"a": "dead"})), nil))(t)
	value(dead.Upload(ctx))(t)
	repo := p.repo()
	s.golden("gc-too-young", func() { value(repo.GC(ctx, GCOptions{OlderThan: time.Hour}))(t) })
	s.golden("gc-dead-attempt", func() { value(repo.GC(ctx, GCOptions{}))(t) })
	s.golden("gc-again", func() { value(repo.GC(ctx, GCOptions{}))(t) })
	s.golden("publish-after-void", func() { value(dead.Publish(ctx))(t) })
	s.golden("verify", func() { value(repo.Verify(ctx, VerifyOptions{}))(t) })
}

// The same of a task that publishes its checkpoints itself (P6).
func TestTranscriptExternal(t *testing.T) {
	s := newScribe(t)
	ctx := t.Context()
	value(Init(ctx, blob.New(s.rec, nil), nil))(t)
	p := s.process()
	last := ""
	p.opts.External = &External{Last: func(context.Context) (string, error) { return last, nil }}
	task := p.mustOpen()
	upload := func(n string) (m Markers) {
		pending := value(task.Snapshot(ctx, memStores(tree{"a": "alpha" + n}), nil))(t)
		return value(pending.Upload(ctx))(t)
	}
	calls := s.golden("external-upload", func() { last = upload("1").Checkpoint })
	if gone := s.kinds.Expire(); len(gone) > 0 {
		t.Errorf("markers were given out of what can expire: %v", gone)
	}
	if at := slices.IndexFunc(calls, func(c blobtest.Call) bool { return strings.Contains(c.Key(), "/log/") }); at < 0 {
		t.Error("markers were given out without an entry")
	}
	upload("2")
	s.golden("external-open", func() { task = p.mustOpen() })
	last = upload("3").Checkpoint
	p.opts.Grace, task.opts.Grace = -1, -1
	s.golden("external-clean-up", func() { must(t, task.CleanUp(ctx, last)) })
}
