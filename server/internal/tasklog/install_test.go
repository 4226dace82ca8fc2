package tasklog

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// A snapshot holds the state of its instant, memory included, and becomes the state of
// another machine.
func TestSnapshotAndInstall(t *testing.T) {
	k := newKit(t)
	k.fill(1, 100)
	sum, index := k.sum(), k.m.AppliedIndex()
	if err := k.m.Snapshot("data/snap"); err != nil {
		t.Fatal(err)
	}
	as := k.fill(2, 10)

	other, err := Open("data/other", small(k.fs))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	}()
	o := &kit{t: t, m: other}
	o.fill(7, 300) // all of this goes
	if err := other.Install("data/snap"); err != nil {
		t.Fatal(err)
	}
	if other.AppliedIndex() != index || o.sum() != sum {
		t.Fatalf("installed index %d, want %d; same state: %v", other.AppliedIndex(), index, o.sum() == sum)
	}
	for _, a := range as { // heads in memory are those of the snapshot
		if r := o.append(2, a)[0]; r.Status != cpwire.Appended {
			t.Fatalf("append at slot %d after an install: %v", a.Slot, r.Status)
		}
	}
	if o.sum() != k.sum() {
		t.Error("the states differ after the same entries")
	}
}

// Whoever waits for a task learns what an install brought.
func TestInstallWakes(t *testing.T) {
	k := newKit(t)
	k.fill(1, 5)
	if err := k.m.Snapshot("data/snap"); err != nil {
		t.Fatal(err)
	}
	other, err := Open("data/other", small(k.fs))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- other.Await(t.Context(), orders, 4) }()
	if err := other.Install("data/snap"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
}

// I7, R8.5 on the operating system's files: what lies in a snapshot's directory stays as
// it is while the machine that made it and the one that installed it go on and compact.
func TestSnapshotFilesNeverChange(t *testing.T) {
	dir := t.TempDir()
	maker := openAt(t, filepath.Join(dir, "maker"))
	maker.fill(1, 200)
	snap := filepath.Join(dir, "snap")
	if err := maker.m.Snapshot(snap); err != nil {
		t.Fatal(err)
	}
	before := filesOf(t, snap)
	installer := openAt(t, filepath.Join(dir, "installer"))
	if err := installer.m.Install(snap); err != nil {
		t.Fatal(err)
	}

	wantLinks(t, snap, installer.m.place.path(installer.m.place.number))

	for _, k := range []*kit{maker, installer} {
		k.fill(2, 3000)
		if err := k.m.mu.db.Flush(); err != nil {
			t.Fatal(err)
		}
		if err := k.m.mu.db.Compact(t.Context(), []byte("a"), []byte("z"), false); err != nil {
			t.Fatal(err)
		}
	}
	if d := cmp.Diff(filesOf(t, snap), before); d != "" {
		t.Errorf("files of the snapshot (-now +before):\n%s", d)
	}
	if err := maker.m.Install(snap); err != nil {
		t.Fatal(err)
	}
	if got := maker.m.AppliedIndex(); got != 200 {
		t.Errorf("applied %d after going back", got)
	}
}

// wantLinks checks that tables, and nothing else, are shared with the snapshot.
func wantLinks(t *testing.T, snap, db string) {
	t.Helper()
	shared := 0
	for name := range filesOf(t, snap) {
		a, err := os.Stat(filepath.Join(snap, name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.Stat(filepath.Join(db, name))
		if err != nil {
			continue // the database needed it no more
		}
		if os.SameFile(a, b) != immutable(name) {
			t.Errorf("%s is shared: %v", name, !immutable(name))
		}
		if immutable(name) {
			shared++
		}
	}
	if shared == 0 {
		t.Error("no table is shared")
	}
}

func openAt(t *testing.T, dir string) *kit {
	t.Helper()
	m, err := Open(dir, &Options{MemTableSize: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return &kit{t: t, m: m}
}

type fileState struct {
	Size, Time int64
	Sum        [32]byte
}

func filesOf(t *testing.T, dir string) map[string]fileState {
	t.Helper()
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]fileState{}
	for _, n := range names {
		data, err := os.ReadFile(filepath.Join(dir, n.Name()))
		if err != nil {
			t.Fatal(err)
		}
		info, err := n.Info()
		if err != nil {
			t.Fatal(err)
		}
		out[n.Name()] = fileState{info.Size(), info.ModTime().UnixNano(), blake3.Sum256(data)}
	}
	return out
}

// A crash before any step of an install leaves the old state or the new one, and no debris
// after the next start.
func TestCrashInInstall(t *testing.T) {
	var seen struct{ old, new int }
	// How many steps there are differs a little from run to run.
	for step, beyond := int32(0), 0; beyond < 5; step++ {
		k := newKit(t)
		k.fill(1, 20)
		if err := k.m.Snapshot("data/snap"); err != nil {
			t.Fatal(err)
		}
		snapped, at := k.sum(), k.m.AppliedIndex()
		k.fill(1, 20)
		if err := k.m.mu.db.Flush(); err != nil {
			t.Fatal(err)
		}
		old := k.sum()
		if err := k.m.Close(); err != nil {
			t.Fatal(err)
		}

		crashed := crashAt(t, k.fs, step)
		if crashed == nil {
			beyond++
			continue
		}
		m := open(t, crashed)
		switch got := sumOf(t, m); {
		case got == old:
			seen.old++
		case got == snapped && m.AppliedIndex() == at:
			seen.new++
		default:
			t.Errorf("crash at step %d leaves index %d", step, m.AppliedIndex())
		}
		if names, err := crashed.List(stateDir); err != nil || len(names) > 3 {
			t.Errorf("after step %d the directory has %v, %v", step, names, err)
		}
	}
	if seen.old < 5 || seen.new < 1 {
		t.Errorf("crashes left %d old and %d new states", seen.old, seen.new)
	}
}

// crashAt installs the snapshot and returns what a crash before the operation with this
// number leaves; nil if the install has fewer.
func crashAt(t *testing.T, fs *crashFS, step int32) (left *crashFS) {
	t.Helper()
	var armed atomic.Bool
	var n atomic.Int32
	var once sync.Once
	watched := errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if armed.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && n.Add(1) == step+1 {
			once.Do(func() { left = fs.CrashClone(vfs.CrashCloneCfg{}) })
		}
		return nil
	}))
	m, err := Open(stateDir, small(watched))
	if err != nil {
		t.Fatal(err)
	}
	armed.Store(true)
	err = m.Install("data/snap")
	armed.Store(false)
	if err = errors.Join(err, m.Close()); err != nil {
		t.Fatal(err)
	}
	return left
}

// An install that fails leaves the old state in use.
func TestFailedInstall(t *testing.T) {
	k := newKit(t)
	k.fill(1, 20)
	sum := k.sum()
	write := func(dir, name string) {
		f, err := k.fs.Create(dir+"/"+name, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(f, "nonsense\n"); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"data/none", "data/empty", "data/nonsense"} {
		if dir != "data/none" {
			if err := k.fs.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if dir == "data/nonsense" {
			write(dir, "MANIFEST-000001")
			write(dir, "marker.manifest.000001.MANIFEST-000001")
		}
		if err := k.m.Install(dir); err == nil {
			t.Errorf("%s was installed", dir)
		}
		if k.sum() != sum {
			t.Fatalf("after %s the state is another", dir)
		}
	}
	k.fill(1, 1)
	if names, err := k.fs.List(stateDir); err != nil || len(names) != 2 {
		t.Errorf("the directory has %v, %v", names, err)
	}
}

// Readers beside installs see one state or the other, and are never left without one.
func TestReadersBesideInstall(t *testing.T) {
	k := newKit(t)
	k.fill(1, 70)
	if err := k.m.Snapshot("data/snap"); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				e, err := k.m.Head(orders, true)
				if err != nil || e.Slot < 70 || e.Digest != blake3.Sum256(e.Body) {
					t.Errorf("head %+v, %v", e, err)
					return
				}
				if _, err := k.m.History(orders, 0, true); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 10 {
		k.fill(1, 100)
		if err := k.m.Install("data/snap"); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
}

// What is damaged or of a newer program is refused and not begun anew.
func TestRefusedState(t *testing.T) {
	cases := map[string]struct {
		spoil func(t *testing.T, k *kit)
		want  error
	}{
		"newer": {func(t *testing.T, k *kit) {
			if err := k.m.mu.db.Set(keyVersion, []byte{stateVersion + 1, 0, 0, 0}, pebble.NoSync); err != nil {
				t.Fatal(err)
			}
		}, checkpoint.ErrUnsupported},
		"CURRENT names nothing": {func(t *testing.T, k *kit) {
			if err := k.m.place.choose(77); err != nil {
				t.Fatal(err)
			}
		}, nil},
		"CURRENT cut": {func(t *testing.T, k *kit) {
			if f, err := k.fs.Create(stateDir+"/CURRENT", vfs.WriteCategoryUnspecified); err != nil || f.Close() != nil {
				t.Fatal(err)
			}
		}, checkpoint.ErrCorrupt},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			k.fill(1, 3)
			c.spoil(t, k)
			if err := k.m.Close(); err != nil {
				t.Fatal(err)
			}
			m, err := Open(stateDir, small(k.fs))
			if err == nil {
				_ = m.Close()
			}
			if err == nil || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("open: %v, want %v", err, c.want)
			}
		})
	}
}

// A crash in the very first start leaves something that can be started.
func TestCrashInFirstStart(t *testing.T) {
	for step := int32(0); ; step++ {
		mem := newCrashFS()
		var n atomic.Int32
		var left *crashFS
		m, err := Open(stateDir, small(errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind.ReadOrWrite() == errorfs.OpIsWrite && n.Add(1) == step+1 {
				left = mem.CrashClone(vfs.CrashCloneCfg{})
			}
			return nil
		}))))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if left == nil {
			return
		}
		k := &kit{t: t, m: open(t, left)}
		k.fill(1, 1)
	}
}
