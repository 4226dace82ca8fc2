package snapstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// story is what the sweeps run through: a store is opened, a snapshot is made, one is
// received that shares files with it, one is made again, and the oldest retire. Whatever
// is there already from an earlier try is not done again.
type story struct {
	testing.TB
	from *Store // has snapshots 2 and 3 to receive
	two  Held
	all  map[uint64]tree

	mu    sync.Mutex
	acked map[uint64]bool // commits that returned and that nothing has retired since
	notes []string        // what was logged
}

func newStory(t testing.TB) *story {
	st := &story{TB: t, from: openStore(t, t.TempDir(), nil), acked: map[uint64]bool{}, all: map[uint64]tree{
		1: {"a": noise(1, 9000), "d/b": noise(2, 3000), "e": nil},
		2: {"a": noise(1, 9000), "d/b": noise(3, 3000), "d/c": noise(4, 10), "e": nil, "f/": nil},
		4: {"x": noise(6, 20)},
	}}
	st.two = makeHeld(t, st.from, 2, st.all[2])
	return st
}

// Handle, Enabled, WithAttrs and WithGroup make a log handler of the story.
func (st *story) Handle(_ context.Context, r slog.Record) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if r.Level >= slog.LevelWarn {
		st.notes = append(st.notes, r.Message)
	}
	return nil
}

// Enabled wants everything.
func (st *story) Enabled(context.Context, slog.Level) bool { return true }

// WithAttrs is not needed.
func (st *story) WithAttrs([]slog.Attr) slog.Handler { return st }

// WithGroup is not needed.
func (st *story) WithGroup(string) slog.Handler { return st }

func (st *story) ack(index uint64, is bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.acked[index] = is
}

func (st *story) acknowledged() (list []uint64) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for index, is := range st.acked {
		if is {
			list = append(list, index)
		}
	}
	return list
}

// run runs the story in a directory until something fails.
func (st *story) run(dir string, around func(op, name string, do func() error) error) error {
	s, err := Open(dir, &Options{Reserve: -1, Retain: 1, Logger: slog.New(st), around: around})
	if err != nil {
		return err
	}
	defer s.Close()
	ctx := context.Background()
	for _, step := range []func() error{
		func() error { return st.make(ctx, s, 1) },
		func() error { return st.receive(ctx, s) },
		func() error { return st.make(ctx, s, 4) },
		func() error { _, err := s.Scrub(ctx, nil); return err },
		func() error { return st.retire(s) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (st *story) has(s *Store, index uint64) bool {
	return slices.ContainsFunc(s.List(), func(h Held) bool { return h.ID.Index >= index })
}

func (st *story) make(ctx context.Context, s *Store, index uint64) error {
	if st.has(s, index) {
		return nil
	}
	d, err := s.Draft()
	if err != nil {
		return err
	}
	st.all[index].build(st, d.Dir())
	if _, err := d.Commit(ctx, metaAt(index), nil); err != nil {
		return errors.Join(err, d.Abort())
	}
	st.ack(index, true)
	return nil
}

func (st *story) receive(ctx context.Context, s *Store) (err error) {
	if st.has(s, 2) {
		return nil
	}
	r, err := s.Receive(ctx, manifestOf(st, st.from, st.two.ID))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if _, err := r.Reuse(ctx, nil); err != nil {
		return err
	}
	for _, p := range r.Missing() {
		data, err := st.from.Chunk(p.Digest)
		must(st, err)
		if err := r.Put(p, data); err != nil {
			return err
		}
	}
	if _, err := r.Commit(ctx); err != nil {
		return err
	}
	st.ack(2, true)
	return nil
}

func (st *story) retire(s *Store) error {
	st.ack(1, false)
	st.ack(2, false)
	_, err := s.Retire(nil)
	return err
}

// check opens what was left: each snapshot is whole, those that were acknowledged are
// there, none was taken for damaged, and only what belongs there lies there.
func (st *story) check(when, dir string) {
	st.Helper()
	s, err := Open(dir, &Options{Reserve: -1})
	if err != nil {
		st.Fatalf("%s: %v", when, err)
	}
	defer s.Close()
	got := indexes(s)
	for _, index := range st.acknowledged() {
		if !slices.Contains(got, index) {
			st.Fatalf("%s: snapshot %d was acknowledged; held %v", when, index, got)
		}
	}
	names := []string{"LOCK", "quarantine", "receive"}
	for _, h := range s.List() {
		names = append(names, h.ID.String())
		if damaged, err := s.Scrub(st.Context(), nil); err != nil || len(damaged) > 0 {
			st.Fatalf("%s: %v is damaged: %v", when, damaged, err)
		}
		at, err := s.Dir(h.ID)
		must(st, err)
		if diff := cmp.Diff(st.all[h.ID.Index].want(), listing(st, at)); diff != "" {
			st.Fatalf("%s: snapshot %d: %.1000s", when, h.ID.Index, diff)
		}
		only(st, filepath.Dir(at), besideData(filepath.Dir(at))...)
	}
	only(st, dir, names...)
	only(st, filepath.Join(dir, quarantineName))
}

// besideData is what may lie beside the data of a snapshot: the marks may be lost.
func besideData(dir string) []string {
	if _, err := os.Stat(filepath.Join(dir, marksName)); err != nil {
		return []string{"data", "manifest"}
	}
	return []string{"data", "manifest", "marks"}
}

// finish runs the story to its end and checks that.
func (st *story) finish(when, dir string) {
	st.Helper()
	if err := st.run(dir, nil); err != nil {
		st.Fatalf("%s, run again: %v", when, err)
	}
	st.check(when+", run again", dir)
	only(st, filepath.Join(dir, receiveName))
	list, err := os.ReadDir(dir)
	must(st, err)
	if len(list) != 4 {
		st.Fatalf("%s, run again: %v", when, list)
	}
}

// memory is a directory in memory, where that is permitted, so that sweeps take seconds.
func memory(t testing.TB) string {
	dir := t.TempDir()
	if unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755") == nil {
		t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	}
	return dir
}

// Each operation on the disk fails once, with nothing of it done, all of it, or half of a
// removal: the error is seen, nothing that was acknowledged is lost, nothing half done is
// a snapshot, and the next try succeeds (I11).
func TestFaultSweep(t *testing.T) {
	top := memory(t)
	for _, mode := range []int{atOnce, afterAll, halfWay} {
		for i := 1; ; i++ {
			st := newStory(t)
			dir := filepath.Join(top, "s")
			must(t, os.RemoveAll(dir))
			tp := &tap{dir: dir, failAt: i, err: unix.EIO, when: mode}
			err := st.run(dir, tp.around)
			if tp.failed == "" {
				must(t, err)
				if i < 100 {
					t.Errorf("only %d operations", i)
				}
				break
			}
			if mode == halfWay && !strings.HasPrefix(tp.failed, "remove ") {
				continue
			}
			when := fmt.Sprintf("%s (%d, mode %d) failed", tp.failed, i, mode)
			if err == nil && len(st.notes) == 0 && !tp.void && !strings.HasSuffix(tp.failed, marksName) {
				t.Fatalf("%s and nobody was told", when)
			}
			if err != nil && !errors.Is(err, unix.EIO) {
				t.Fatalf("%s: %v", when, err)
			}
			st.check(when, dir)
			st.finish(when, dir)
		}
	}
}

// ledger notes what is durable: of each inode the bytes at its last sync, of each directory
// the names at its last sync.
type ledger struct {
	mu    sync.Mutex
	dir   string
	n     int
	at    int // crash before this operation
	clone func()
	files map[uint64][]byte
	dirs  map[uint64]map[string]inode
}

type inode struct {
	ino uint64
	dir bool
}

func inodeOf(t testing.TB, name string) inode {
	var st unix.Stat_t
	must(t, unix.Lstat(name, &st))
	return inode{st.Ino, st.Mode&unix.S_IFMT == unix.S_IFDIR}
}

var errCrash = errors.New("crash")

func (l *ledger) around(t testing.TB) func(op, name string, do func() error) error {
	return func(op, name string, do func() error) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.n++; l.n == l.at {
			l.clone()
		}
		if l.at > 0 && l.n >= l.at {
			return errCrash
		}
		err := do()
		full := filepath.Join(l.dir, name)
		switch {
		case err != nil:
		case op == "sync":
			data, err := os.ReadFile(full)
			must(t, err)
			l.files[inodeOf(t, full).ino] = data
		case op == "syncdir":
			l.dirs[inodeOf(t, full).ino] = namesIn(t, full)
		}
		return err
	}
}

func namesIn(t testing.TB, dir string) map[string]inode {
	list, err := os.ReadDir(dir)
	must(t, err)
	names := map[string]inode{}
	for _, e := range list {
		names[e.Name()] = inodeOf(t, filepath.Join(dir, e.Name()))
	}
	return names
}

// durable builds what is certain to be there after a power failure.
func (l *ledger) durable(t testing.TB, dir inode, to string) {
	must(t, os.MkdirAll(to, 0o755))
	for name, i := range l.dirs[dir.ino] {
		if i.dir {
			l.durable(t, i, filepath.Join(to, name))
			continue
		}
		must(t, os.WriteFile(filepath.Join(to, name), l.files[i.ino], 0o644))
	}
}

// named builds what a file system leaves that writes names at once and bytes late.
func (l *ledger) named(t testing.TB, to string, synced bool) {
	must(t, filepath.WalkDir(l.dir, func(p string, d fs.DirEntry, err error) error {
		must(t, err)
		rel, err := filepath.Rel(l.dir, p)
		must(t, err)
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		}
		data, err := os.ReadFile(p)
		must(t, err)
		if was, ok := l.files[inodeOf(t, p).ino]; synced && (!ok || !bytes.Equal(was, data)) {
			data = was
		}
		return os.WriteFile(filepath.Join(to, rel), data, 0o644)
	}))
}

// A crash before each operation, by three kinds of disk: everything that was not synced is
// lost; names are kept and bytes are lost; nothing is lost (the process died). What was
// acknowledged is there, and what is there is whole (I11).
func TestCrashClones(t *testing.T) {
	top := memory(t)
	kinds := []string{"lost", "named", "kept"}
	for i := 1; ; i++ {
		st := newStory(t)
		dir := filepath.Join(top, "s")
		must(t, os.RemoveAll(dir))
		must(t, os.Mkdir(dir, 0o755))
		l := &ledger{dir: dir, at: i, files: map[uint64][]byte{}, dirs: map[uint64]map[string]inode{}}
		crashed := false
		var acked []uint64
		l.clone = func() {
			crashed, acked = true, st.acknowledged()
			for _, kind := range kinds {
				must(t, os.RemoveAll(filepath.Join(top, kind)))
			}
			l.durable(t, inodeOf(t, dir), filepath.Join(top, "lost"))
			l.named(t, filepath.Join(top, "named"), true)
			l.named(t, filepath.Join(top, "kept"), false)
		}
		err := st.run(dir, l.around(t))
		if !crashed {
			must(t, err)
			if i < 100 {
				t.Errorf("only %d operations", i)
			}
			return
		}
		for _, kind := range kinds {
			st.acked = map[uint64]bool{}
			for _, index := range acked {
				st.acked[index] = true
			}
			when := fmt.Sprintf("crash before operation %d, disk %s", i, kind)
			st.check(when, filepath.Join(top, kind))
			if i%5 == 0 {
				st.finish(when, filepath.Join(top, kind))
			}
		}
	}
}

// Where the store goes on after a failure, the same draft or receipt can be committed by the
// next try, save after a failed sync; and a transfer that could not begin leaves nothing.
func TestTryAgain(t *testing.T) {
	top := memory(t)
	for _, mode := range []int{atOnce, afterAll} {
		for i := 1; ; i++ {
			dir := filepath.Join(top, "s")
			must(t, os.RemoveAll(dir))
			must(t, os.Mkdir(dir, 0o755))
			tp := &tap{dir: dir, err: unix.EIO, when: mode}
			st := newStory(t)
			s := openStore(t, dir, &Options{Reserve: -1, around: tp.around})
			d, err := s.Draft()
			must(t, err)
			st.all[1].build(t, d.Dir())
			manifest := manifestOf(t, st.from, st.two.ID)
			tp.arm(i)
			if _, err = d.Commit(t.Context(), metaAt(1), nil); err != nil {
				_, err = d.Commit(t.Context(), metaAt(1), nil)
				if strings.HasPrefix(tp.failed, "sync") { // there is no second sync
					wantErr(t, err, unix.EIO)
					must(t, d.Abort())
					makeHeld(t, s, 1, st.all[1])
					err = nil
				}
				must(t, err)
			}
			r, err := s.Receive(t.Context(), manifest)
			if err != nil {
				wantErr(t, err, unix.EIO)
				only(t, filepath.Join(dir, receiveName))
				r, err = s.Receive(t.Context(), manifest)
				must(t, err)
			}
			st.insist(s, r, manifest)
			tp.arm(0)
			for _, h := range s.List() {
				sameTree(t, s, h.ID, st.all[h.ID.Index])
			}
			if got := indexes(s); !slices.Equal(got, []uint64{1, 2}) {
				t.Fatalf("%s failed: held %v", tp.failed, got)
			}
			must(t, s.Close())
			if tp.failed == "" {
				break
			}
		}
	}
}

// insist brings a receipt to its end, by beginning it again if it comes to that.
func (st *story) insist(s *Store, r *Receipt, manifest []byte) {
	st.Helper()
	var err error
	for range 3 {
		if _, err = r.Reuse(st.Context(), nil); err == nil {
			for _, p := range r.Missing() {
				data, chunkErr := st.from.Chunk(p.Digest)
				must(st, chunkErr)
				err = errors.Join(err, r.Put(p, data))
			}
		}
		if _, commitErr := r.Commit(st.Context()); commitErr == nil {
			return
		}
		_ = r.Close() // it says what Commit has said
		r, err = s.Receive(st.Context(), manifest)
		must(st, err)
	}
	st.Fatalf("never committed: %v", err)
}

// A snapshot that cannot be moved to quarantine is out all the same, and when it is met
// again at the next Open nothing of it is believed.
func TestQuarantineFails(t *testing.T) {
	s := openStore(t, t.TempDir(), &Options{Reserve: -1, around: func(op, name string, do func() error) error {
		if op == "rename" && strings.HasPrefix(name, quarantineName) {
			return unix.EIO
		}
		return do()
	}})
	d, err := s.Draft()
	must(t, err)
	small().build(t, d.Dir())
	age(t, d.Dir())
	held, err := d.Commit(t.Context(), metaAt(1), nil)
	must(t, err)
	victim := filepath.Join(s.dir, held.ID.String(), "data/a")
	info, err := os.Stat(victim)
	must(t, err)
	flip(t, victim, 3)
	must(t, os.Chtimes(victim, info.ModTime(), info.ModTime()))
	wantErr(t, s.Quarantine(held.ID, "rotten"), unix.EIO)
	if len(s.List()) != 0 {
		t.Error("it is still held")
	}
	must(t, s.Close())
	s = openStore(t, s.dir, nil)
	wantErr(t, s.Verify(t.Context(), held.ID, nil), ErrCorrupt)
}

// What a failed sync was for is not believed by the next receipt, though reading it, out of
// memory, gives the right bytes; and this one is not committed by trying again.
func TestFailedSyncIsNotForgotten(t *testing.T) {
	from := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, from, 1, tree{"f": noise(1, 5000), "g": noise(2, 6000)})
	s := openStore(t, t.TempDir(), &Options{Reserve: -1, around: func(op, name string, do func() error) error {
		if op == "sync" && strings.HasSuffix(name, "data/f") {
			return unix.EIO
		}
		return do()
	}})
	r, err := s.Receive(t.Context(), manifestOf(t, from, held.ID))
	must(t, err)
	for _, p := range slices.Backward(r.Missing()) { // f last: from then on nothing is taken
		data, err := from.Chunk(p.Digest)
		must(t, err)
		must(t, r.Put(p, data))
	}
	for range 2 {
		_, err = r.Commit(t.Context())
		wantErr(t, err, unix.EIO)
	}
	must(t, r.Close())
	must(t, s.Close())
	fetched, reused := transfer(t, from, openStore(t, s.dir, nil), held.ID)
	if fetched != 5000 || reused != 6000 {
		t.Errorf("fetched %d, reused %d", fetched, reused)
	}
}
