//go:build linux

package hotsrc_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/hotsrc"
	"github.com/snapferry/snapferry/source/sourcetest"
)

// read opens a copy as an application would after a restore, and returns how long the
// history in it is.
func read(t *testing.T, dir string) uint64 {
	t.Helper()
	db, err := pebble.Open(dir, small())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.CheckLevels(nil); err != nil {
		t.Error(err)
	}
	numbers, err := numbersIn(db)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range numbers {
		if n != uint64(i)+1 {
			t.Fatalf("the image has %d at place %d: not a prefix", n, i+1)
		}
	}
	return uint64(len(numbers))
}

func rounds() int {
	switch {
	case os.Getenv("SNAPFERRY_LONG") != "":
		return 300
	case testing.Short():
		return 10
	}
	return 30
}

// historyLimit is where a round begins a new database, so that reading stays quick.
const historyLimit = 20000

// Images of a database whose owner writes, is stopped in the middle of anything, is
// killed and comes back: each opens and holds a prefix of the history with all that the
// owner had synced before Freeze. A try that finds no quiet moment may fail; it may not
// lie.
func TestRandomOwnerS1(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "db")
	o := startOwner(t, dir)
	busy := 0
	for round := range rounds() {
		if o.synced.Load() > historyLimit {
			o.kill()
			dir = filepath.Join(t.TempDir(), "db")
			o = startOwner(t, dir)
		}
		killed := false
		switch rand.IntN(4) {
		case 0:
			o.signal(t, syscall.SIGSTOP)
		case 1:
			o.kill()
			killed = true
		}
		synced := o.synced.Load()
		img, err := hotsrc.Pebble(dir, nil).Freeze(t.Context())
		switch {
		case errors.Is(err, hotsrc.ErrBusy):
			t.Logf("round %d: %v", round, err)
			busy++
		case err != nil:
			t.Fatal(err)
		default:
			if got := read(t, sourcetest.Copy(t, img)); got < synced {
				t.Errorf("round %d: image holds %d writes, %d were synced before", round, got, synced)
			}
			if err := img.Release(); err != nil {
				t.Error(err)
			}
		}
		if killed {
			o = startOwner(t, dir)
			continue
		}
		o.signal(t, syscall.SIGCONT)
	}
	if busy > rounds()/3 {
		t.Errorf("%d of %d rounds found no quiet moment", busy, rounds())
	}
}

func filled(t *testing.T, opts *pebble.Options, writes uint64) (db *pebble.DB, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "db")
	db, err := pebble.Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	for n := uint64(1); n <= writes; n++ {
		if err := db.Set(key(n), value(n), pebble.NoSync); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.LogData(nil, pebble.Sync); err != nil && !opts.DisableWAL {
		t.Fatal(err)
	}
	return db, dir
}

// Tables are the live inodes, nothing of the proof is left, and the next image has the
// same tables (I5).
func TestTablesAreLinks(t *testing.T) {
	still := small()
	still.DisableAutomaticCompactions = true
	still.L0StopWritesThreshold = 1000
	db, dir := filled(t, still, 3000)
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	first := sourcetest.Freeze(t, hotsrc.Pebble(dir, nil))
	second := sourcetest.Freeze(t, hotsrc.Pebble(dir, nil))
	known := map[source.Identity]bool{}
	for _, e := range first.Entries() {
		known[e.Identity] = true
		if e.Path == "LOCK" {
			t.Error("the image has a LOCK")
		}
	}
	tables := 0
	for _, e := range second.Entries() {
		if !strings.HasSuffix(e.Path, ".sst") {
			continue
		}
		tables++
		if !e.Immutable || e.Fresh || !known[e.Identity] {
			t.Errorf("%s: immutable %v, fresh %v, known %v", e.Path, e.Immutable, e.Fresh, known[e.Identity])
		}
	}
	if tables == 0 {
		t.Error("no tables")
	}
	if got := read(t, sourcetest.Copy(t, second)); got != 3000 {
		t.Errorf("image holds %d writes, want 3000", got)
	}
}

// What the image does not need is not in it: a table that is half written, or that a
// compaction replaced.
func TestForeignTablesAreLeftOut(t *testing.T) {
	_, dir := filled(t, small(), 1000)
	if err := os.WriteFile(filepath.Join(dir, "999999.sst"), []byte("half a table"), 0o600); err != nil {
		t.Fatal(err)
	}
	img := sourcetest.Freeze(t, hotsrc.Pebble(dir, nil))
	for _, e := range img.Entries() {
		if e.Path == "999999.sst" {
			t.Error("a table that no version names is in the image")
		}
	}
}

// A table of the version that is missing or short is found by the proof.
func TestDamageIsRefused(t *testing.T) {
	for name, damage := range map[string]func(string) error{
		"missing": os.Remove,
		"short":   func(path string) error { return os.Truncate(path, 100) },
	} {
		db, dir := filled(t, small(), 3000)
		if err := db.Flush(); err != nil {
			t.Fatal(err)
		}
		tables, err := filepath.Glob(filepath.Join(dir, "*.sst"))
		if err != nil || len(tables) == 0 {
			t.Fatal(tables, err)
		}
		for _, table := range tables {
			if err := damage(table); err != nil {
				t.Fatal(err)
			}
		}
		img, err := hotsrc.Pebble(dir, &hotsrc.Options{Tries: 3}).Freeze(t.Context())
		if err == nil {
			img.Release()
			t.Errorf("%s: an image", name)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), ".snapferry*")); len(left) != 0 {
			t.Errorf("%s: left behind: %v", name, left)
		}
	}
}

func TestRefused(t *testing.T) {
	without := small()
	without.DisableWAL = true
	apart := small()
	apart.WALDir = t.TempDir()
	failover := small()
	failover.WALFailover = &pebble.WALFailoverOptions{Secondary: wal.Dir{FS: vfs.Default, Dirname: t.TempDir()}}
	for name, opts := range map[string]*pebble.Options{"without WAL": without, "WAL apart": apart, "failover": failover} {
		_, dir := filled(t, opts, 10)
		refused(t, name, dir)
	}
	rocks := filepath.Join(t.TempDir(), "rocks")
	if err := os.Mkdir(rocks, 0o700); err != nil {
		t.Fatal(err)
	}
	refused(t, "empty", rocks)
	for _, name := range []string{"CURRENT", "MANIFEST-000001", "OPTIONS-000002"} {
		if err := os.WriteFile(filepath.Join(rocks, name), []byte("MANIFEST-000001\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, "rocksdb", rocks)
}

func refused(t *testing.T, name, dir string) {
	t.Helper()
	img, err := hotsrc.Pebble(dir, nil).Freeze(t.Context())
	if err == nil {
		img.Release()
	}
	if !errors.Is(err, source.ErrUnsupported) {
		t.Errorf("%s: error %v, want ErrUnsupported", name, err)
	}
}

// An owner with another comparer is refused unless the comparer is given.
func TestComparer(t *testing.T) {
	other := *pebble.DefaultComparer
	other.Name = "test.other"
	opts := small()
	opts.Comparer = &other
	_, dir := filled(t, opts, 10)
	if img, err := hotsrc.Pebble(dir, &hotsrc.Options{Tries: 2}).Freeze(t.Context()); err == nil {
		img.Release()
		t.Error("an image that was opened with another comparer")
	}
	sourcetest.Freeze(t, hotsrc.Pebble(dir, &hotsrc.Options{Open: &pebble.Options{Comparer: &other}}))
}
