package snapferry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// tree is the content of a store: file names and their bytes. It is the source to
// freeze and what a restored store is compared with.
type tree map[string]string

// randomBytes returns n bytes that no other call gives.
func randomBytes(r *rand.Rand, n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

func (tr tree) with(files tree) tree {
	out := maps.Clone(tr)
	maps.Copy(out, files)
	return out
}

// entries lists the tree as a walk of a directory would.
func (tr tree) entries() []source.Entry {
	out := map[string]source.Entry{"": {Type: source.Directory, Mode: 0o755}}
	for name, data := range tr {
		id := source.Identity{Ino: uint64(len(out)), Size: int64(len(data))}
		out[name] = source.Entry{Path: name, Mode: 0o644, Size: id.Size, Identity: id, Links: 1}
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			out[dir] = source.Entry{Path: dir, Type: source.Directory, Mode: 0o755}
		}
	}
	uid, gid := uint32(os.Getuid()), uint32(os.Getgid())
	list := make([]source.Entry, 0, len(out))
	for _, name := range slices.Sorted(maps.Keys(out)) {
		e := out[name]
		e.UID, e.GID = uid, gid
		list = append(list, e)
	}
	return list
}

// memSource freezes a tree. Each local operation goes through step, if there is one,
// which can fail it.
type memSource struct {
	tree tree
	step func(op string) error
}

func (s *memSource) do(op string) error {
	if s.step == nil {
		return nil
	}
	return s.step(op)
}

func (s *memSource) Freeze(context.Context) (source.Image, error) {
	if err := s.do("freeze"); err != nil {
		return nil, err
	}
	return &memImage{memSource: &memSource{maps.Clone(s.tree), s.step}, entries: s.tree.entries()}, nil
}

// memImage counts what is open, so that a test sees what was not released.
type memImage struct {
	*memSource
	entries []source.Entry
}

func (i *memImage) Entries() []source.Entry { return i.entries }
func (i *memImage) CacheKey() string        { return "" }
func (i *memImage) ProbeDir() string        { return "" }
func (i *memImage) Skipped() []string       { return nil }
func (i *memImage) Release() error          { return i.do("release") }

func (i *memImage) Xattrs(string) ([]source.Xattr, error) { return nil, i.do("xattrs") }

func (i *memImage) Open(name string) (source.File, error) {
	if err := i.do("open"); err != nil {
		return nil, err
	}
	at, _ := slices.BinarySearchFunc(i.entries, name, func(e source.Entry, s string) int { return strings.Compare(e.Path, s) })
	return &memFile{strings.NewReader(i.tree[name]), i, i.entries[at].Identity}, nil
}

type memFile struct {
	data  *strings.Reader
	image *memImage
	id    source.Identity
}

func (f *memFile) Identity() source.Identity { return f.id }
func (f *memFile) Check() error              { return f.image.do("check") }
func (f *memFile) Close() error              { return f.image.do("close") }

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.image.do("read"); err != nil {
		return 0, err
	}
	return f.data.ReadAt(p, off)
}

func (f *memFile) Runs() ([]source.Run, error) {
	if err := f.image.do("runs"); err != nil || f.id.Size == 0 {
		return nil, err
	}
	return []source.Run{{Offset: 0, Length: f.id.Size}}, nil
}

// lab is a repository in memory on which several processes work, each through its own
// decorators of the one store.
type lab struct {
	t     testing.TB
	mem   *memblob.Driver
	plain *Repo // nothing between it and the store
}

func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, mem: memblob.New()}
	value(Init(t.Context(), blob.New(l.mem, nil), nil))(t)
	return l
}

// clone copies the whole store, to run a scenario many times from one state. What was
// not sealed in it becomes permanent, so it is for states at rest.
func (l *lab) clone(t testing.TB) *lab {
	t.Helper()
	c := &lab{t: t, mem: memblob.New()}
	for key, data := range l.objects() {
		must(t, c.mem.Put(t.Context(), key, blob.Bytes(data), blob.PutOptions{}))
	}
	return c
}

func (l *lab) objects() map[string][]byte {
	l.t.Helper()
	out := map[string][]byte{}
	for _, k := range l.keys("") {
		r := value(l.mem.Get(l.t.Context(), k, 0, -1))(l.t)
		out[k] = value(io.ReadAll(r))(l.t)
	}
	return out
}

func (l *lab) keys(prefix string) []string {
	l.t.Helper()
	var out []string
	for info, err := range l.mem.List(l.t.Context(), prefix, "") {
		must(l.t, err)
		out = append(out, info.Key)
	}
	return out
}

// repo reads the repository as it is, with nothing between.
func (l *lab) repo() *Repo {
	l.t.Helper()
	if l.plain == nil {
		l.plain = l.process(l.t, nil).repo()
	}
	return l.plain
}

func (l *lab) has(key string) bool {
	_, err := l.mem.Stat(l.t.Context(), key)
	return err == nil
}

// process is one program that works on the repository.
type process struct {
	t      testing.TB
	driver blob.Driver
	blobs  *blob.Store
	cps    *checkpoint.Store
	opts   Options

	mu     sync.Mutex
	warned []string // through the observer
}

// quick are delays with which sweeps of faults run fast.
const quick = 5 * time.Microsecond

// process starts a program whose blob operations go through d, nil for none between,
// and its checkpoint operations through wrap, if given.
func (l *lab) process(t testing.TB, d blob.Driver, wrap ...func(checkpoint.Driver) checkpoint.Driver) *process {
	t.Helper()
	if d == nil {
		d = l.mem
	}
	p := &process{t: t, driver: d, blobs: blob.New(d, &blob.Options{Retry: blob.Retry{First: quick, Max: 4 * quick}})}
	info := value(ReadInfo(t.Context(), blob.New(l.mem, nil)))(t)
	var cp checkpoint.Driver = blobcp.New(p.blobs, info.ID)
	for _, f := range wrap {
		cp = f(cp)
	}
	p.cps = checkpoint.New(cp, &checkpoint.Options{FirstDelay: quick, MaxDelay: 4 * quick})
	p.opts = Options{KeepLast: 2, Grace: -1, PackSize: minPackSize, Readers: 2, Observer: &Observer{Warned: p.onWarned}}
	return p
}

func (p *process) onWarned(w Warned) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.warned = append(p.warned, w.Text)
}

func (p *process) warnings() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.warned)
}

func (p *process) open(ctx context.Context) (*Task, error) {
	return Open(ctx, kvTask, p.blobs, p.cps, &p.opts)
}

func (p *process) mustOpen() *Task {
	p.t.Helper()
	return value(p.open(p.t.Context()))(p.t)
}

func (p *process) repo() *Repo {
	p.t.Helper()
	return value(OpenRepo(p.t.Context(), p.blobs, p.cps, nil))(p.t)
}

// memStores is one store with the files of a tree.
func memStores(tr tree) map[string]source.Source {
	return map[string]source.Source{"kv": &memSource{tree: tr}}
}

// commitTree commits one store with offset n, by which it is recognised later.
func commitTree(ctx context.Context, task *Task, tr tree, n string) (*CommitReport, error) {
	return commitStores(ctx, task, memStores(tr), n)
}

func commitStores(ctx context.Context, task *Task, stores map[string]source.Source, n string) (*CommitReport, error) {
	p, err := task.Snapshot(ctx, stores, map[string]string{"n": n})
	if err != nil {
		return nil, err
	}
	return p.Commit(ctx)
}

func (p *process) mustCommit(task *Task, tr tree, n string) *CommitReport {
	p.t.Helper()
	return value(commitTree(p.t.Context(), task, tr, n))(p.t)
}

// listed returns the offsets n of the retained checkpoints, oldest first.
func (l *lab) listed() []string {
	l.t.Helper()
	var out []string
	for _, c := range l.list() {
		out = append(out, c.Offsets["n"])
	}
	return out
}

// retained returns the ids of the retained checkpoints, by the head alone.
func (l *lab) retained() []string {
	l.t.Helper()
	_, h, err := l.repo().view(kvTask).head(l.t.Context())
	must(l.t, err)
	var ids []string
	for _, c := range h.State.Retained {
		ids = append(ids, c.ID)
	}
	return ids
}

// list returns the retained checkpoints, oldest first, and checks their order (P1).
func (l *lab) list() []Checkpoint {
	l.t.Helper()
	list := value(l.repo().List(l.t.Context(), ListFilter{}))(l.t)
	slices.Reverse(list)
	for i := 1; i < len(list); i++ {
		a, b := list[i-1], list[i]
		if a.ID >= b.ID || a.Sequence >= b.Sequence || a.Epoch > b.Epoch {
			l.t.Fatalf("checkpoints are not in order: %s seq %d epoch %d, then %s seq %d epoch %d",
				a.ID, a.Sequence, a.Epoch, b.ID, b.Sequence, b.Epoch)
		}
	}
	return list
}

// read returns the content of a store of a checkpoint, every chunk checked.
func (l *lab) read(cp *Checkpoint, store string) (tree, error) {
	x, err := l.repo().Index(l.t.Context(), cp, store)
	if err != nil {
		return nil, err
	}
	out := tree{}
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.Type != snapshot.Regular {
			continue
		}
		data := make([]byte, e.Size)
		for k := range e.Chunks {
			c := &e.Chunks[k]
			got, err := l.repo().blobs.ReadAll(l.t.Context(), c.Blob, int64(c.Location.Offset), int64(c.Stored))
			if err == nil {
				got, err = c.Unpack(got, nil)
			}
			if err != nil {
				return nil, fmt.Errorf("%s at %d: %w", e.Path, c.Offset, err)
			}
			copy(data[c.Offset:], got)
		}
		out[e.Path] = string(data)
	}
	return out, nil
}

// wantTree checks the content of a store of a checkpoint.
func (l *lab) wantTree(cp *Checkpoint, store string, want tree) {
	l.t.Helper()
	got, err := l.read(cp, store)
	if err != nil {
		l.t.Fatalf("checkpoint %s store %s: %v", cp.ID, store, err)
	}
	if !maps.Equal(got, want) {
		l.t.Fatalf("checkpoint %s store %s is not what was committed:\n%s", cp.ID, store, cmp.Diff(got.short(), want.short()))
	}
}

// short is the tree for messages.
func (tr tree) short() map[string]string {
	out := map[string]string{}
	for name, data := range tr {
		out[name] = fmt.Sprintf("%d bytes %.8x", len(data), data)
	}
	return out
}

// verify checks every byte that any checkpoint names.
func (l *lab) verify() {
	l.t.Helper()
	v := value(l.repo().Verify(l.t.Context(), VerifyOptions{ReadData: true}))(l.t)
	if !v.OK {
		l.t.Fatalf("verify: missing %+v, corrupt %+v", v.Missing, v.Corrupt)
	}
}

// live finds the blobs that the head and what it keeps name, by reading the indexes
// whole and not their tables.
func (l *lab) live() map[string]bool {
	l.t.Helper()
	v := l.repo().view(kvTask)
	_, h, err := v.head(l.t.Context())
	must(l.t, err)
	keys := map[string]bool{}
	for _, s := range h.Segments() {
		keys[blobPrefix(kvTask)+s.Key] = true
	}
	if p := h.State.Partial; p != nil {
		list := value(v.partial(l.t.Context(), p))(l.t)
		keys[blobPrefix(kvTask)+p.Chunks.Key] = true
		for _, c := range list.Chunks {
			keys[c.Blob] = true
		}
	}
	for _, c := range h.State.Live() {
		keys[blobPrefix(kvTask)+c.Blob.Key] = true
		b := value(v.checkpointBlob(l.t.Context(), &c))(l.t)
		for _, s := range b.Stores {
			root, x, err := v.index(l.t.Context(), s.Index)
			must(l.t, err)
			keys[s.Index.Key] = true
			for _, ref := range root.Segments {
				keys[ref.Blob] = true
			}
			for i := range x.Entries {
				for _, c := range x.Entries[i].Chunks {
					keys[c.Blob] = true
				}
			}
		}
	}
	return keys
}

// wantOnlyLive runs gc without a grace and checks that exactly what is alive is left,
// and that a second gc finds nothing (I8). A dry run before tells the same.
func (l *lab) wantOnlyLive() {
	l.t.Helper()
	r := l.repo()
	dry := value(r.GC(l.t.Context(), GCOptions{DryRun: true}))(l.t)
	first := value(r.GC(l.t.Context(), GCOptions{}))(l.t)
	if dry.BlobsDeleted != first.BlobsDeleted || dry.BytesDeleted != first.BytesDeleted {
		l.t.Fatalf("dry run said %+v, gc did %+v", dry, first)
	}
	want := slices.Sorted(maps.Keys(l.live()))
	if d := cmp.Diff(l.keys(blobPrefix(kvTask)), want); d != "" {
		l.t.Fatalf("after gc (-there +alive):\n%s", d)
	}
	second := value(r.GC(l.t.Context(), GCOptions{}))(l.t)
	if second.BlobsDeleted != 0 {
		l.t.Fatalf("a second gc deleted %d blobs", second.BlobsDeleted)
	}
}

// readDir returns the regular files below a directory.
func readDir(t testing.TB, dir string) tree {
	t.Helper()
	out := tree{}
	must(t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		out[strings.TrimPrefix(p, dir+"/")] = string(data)
		return err
	}))
	return out
}

// writeDir adds files to a directory.
func writeDir(t testing.TB, dir string, tr tree) {
	t.Helper()
	for name, data := range tr {
		p := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		must(t, os.WriteFile(p, []byte(data), 0o644))
	}
}

// fastDir returns a scratch directory in memory where there is one: what is tested
// with it does not depend on the disk.
func fastDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "snapferry-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// mortal is a blob driver whose process can be killed: from then on nothing of what
// it asks happens.
type mortal struct {
	*blobtest.Faults
	dead atomic.Bool
}

func newMortal(d blob.Driver) *mortal {
	m := &mortal{}
	m.Faults = blobtest.NewFaults(d, func(blobtest.Call) bool { return m.dead.Load() })
	return m
}

func (m *mortal) kill() {
	m.dead.Store(true)
	m.LoseAt(0, errKilled)
	_, _ = m.Stat(context.Background(), "last-operation") // the one that LoseAt lets happen
}

var errKilled = errors.New("the process was killed")

// ghosts is a store some of whose puts get no answer and land when the test says so,
// whatever has become of their sender.
type ghosts struct {
	*memblob.Driver
	match   blobtest.Match
	reached chan struct{} // gets a token for each put held back

	mu   sync.Mutex
	late []func() error
}

func newGhosts(m *memblob.Driver, match blobtest.Match) *ghosts {
	return &ghosts{Driver: m, match: match, reached: make(chan struct{}, 64)}
}

func (g *ghosts) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	if !g.match(blobtest.Call{Op: blobtest.OpPut, Keys: []string{key}}) {
		return g.Driver.Put(ctx, key, body, opts)
	}
	var b bytes.Buffer
	if err := body.Copy(ctx, &b); err != nil {
		return err
	}
	g.mu.Lock()
	g.late = append(g.late, func() error {
		return g.Driver.Put(context.Background(), key, blob.Bytes(b.Bytes()), opts)
	})
	g.mu.Unlock()
	select {
	case g.reached <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return ctx.Err()
}

// land makes the puts that were held back happen now.
func (g *ghosts) land() (errs []error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, put := range g.late {
		errs = append(errs, put())
	}
	g.late = nil
	return errs
}

// must ends the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// value is the result of a call that must work: value(f())(t).
func value[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		must(t, err)
		return v
	}
}

func sameTree(a, b tree) bool { return maps.Equal(a, b) }

// below adds a tree under a directory.
func (tr tree) below(dir string, files tree) tree {
	out := maps.Clone(tr)
	for name, data := range files {
		out[dir+"/"+name] = data
	}
	return out
}
