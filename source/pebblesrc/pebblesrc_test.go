//go:build linux

package pebblesrc_test

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/remote"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/pebblesrc"
	"github.com/snapferry/snapferry/source/sourcetest"
)

type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}
func (quiet) Fatalf(string, ...any) { panic("pebble: fatal") }

// small makes flushes and compactions frequent.
func small() *pebble.Options {
	return &pebble.Options{MemTableSize: 64 << 10, L0CompactionThreshold: 2, Logger: quiet{}}
}

type store struct{ db *pebble.DB }

func (s store) Source() source.Source { return pebblesrc.New(s.db, nil) }
func (s store) Close() error          { return s.db.Close() }

func (s store) Write(n uint64) error {
	value := make([]byte, 300)
	binary.BigEndian.PutUint64(value, n)
	return s.db.Set(value[:8], value, pebble.NoSync)
}

func open(t *testing.T, dir string, opts *pebble.Options) *pebble.DB {
	t.Helper()
	db, err := pebble.Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	return db
}

// read opens a copy with plain options, on another path (B1.8).
func read(t *testing.T, dir string) []uint64 {
	db := open(t, dir, &pebble.Options{Logger: quiet{}})
	defer db.Close()
	it, err := db.NewIter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer it.Close()
	var numbers []uint64
	for it.First(); it.Valid(); it.Next() {
		numbers = append(numbers, binary.BigEndian.Uint64(it.Key()))
	}
	return numbers
}

func harness(opts func() *pebble.Options) sourcetest.Harness {
	return sourcetest.Harness{
		New:   func(t *testing.T, dir string) sourcetest.Store { return store{open(t, dir, opts())} },
		Read:  read,
		Check: check,
	}
}

// check is Pebble's own: the levels are in order and every block has its checksum.
func check(t *testing.T, dir string) {
	t.Helper()
	db := open(t, dir, &pebble.Options{Logger: quiet{}})
	defer db.Close()
	if err := db.CheckLevels(nil); err != nil {
		t.Fatalf("pebble check: %v", err)
	}
}

// A small change of a large store is a few small tables and a new log, which is an old
// file that Pebble writes again from its beginning: what is behind its end is copied too,
// up to the size of a memtable. Compactions rewrite more, at a time of their own, and are
// left out here.
func TestPebbleIncrement(t *testing.T) {
	h := harness(func() *pebble.Options {
		return &pebble.Options{Logger: quiet{}, DisableAutomaticCompactions: true}
	})
	h.Increment = &sourcetest.Increment{
		Records: 100_000,
		Fill: func(t *testing.T, s sourcetest.Store, n uint64) {
			var all []uint64
			for i := uint64(1); i <= n; i++ {
				all = append(all, i)
			}
			put(t, s.(store).db, all)
		},
		Rewrite:  func(t *testing.T, s sourcetest.Store, numbers []uint64) { put(t, s.(store).db, numbers) },
		MaxShare: 0.15, // of which 11 are the log of 4 MiB
	}
	sourcetest.RunIncrement(t, h)
}

// put writes values that do not compress, and flushes them.
func put(t *testing.T, db *pebble.DB, numbers []uint64) {
	t.Helper()
	random := rand.NewChaCha8([32]byte{byte(len(numbers))})
	value := make([]byte, 300)
	for _, n := range numbers {
		random.Read(value)
		if err := db.Set(binary.BigEndian.AppendUint64(nil, n), value, pebble.NoSync); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
}

func TestPebble(t *testing.T) { sourcetest.Run(t, harness(small)) }

func TestPebbleWithFS(t *testing.T) {
	sourcetest.Run(t, harness(func() *pebble.Options {
		o := small()
		o.FS = pebblesrc.FS(vfs.Default)
		return o
	}))
}

// S1 holds without a WAL: Freeze flushes what is in memory.
func TestPebbleWithoutWAL(t *testing.T) {
	sourcetest.Run(t, harness(func() *pebble.Options {
		o := small()
		o.DisableWAL = true
		return o
	}))
}

// The image of a database with WAL failover opens without it.
func TestPebbleWithFailover(t *testing.T) {
	sourcetest.Run(t, sourcetest.Harness{
		New: func(t *testing.T, dir string) sourcetest.Store {
			o := small()
			o.WALFailover = &pebble.WALFailoverOptions{Secondary: wal.Dir{FS: vfs.Default, Dirname: t.TempDir()}}
			return store{open(t, dir, o)}
		},
		Read:  read,
		Check: check,
	})
}

func filled(t *testing.T, opts *pebble.Options) (db *pebble.DB, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "db")
	db = open(t, dir, opts)
	t.Cleanup(func() { db.Close() })
	for n := uint64(1); n <= 2000; n++ {
		if err := (store{db}).Write(n); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	return db, dir
}

func tables(img source.Image) []source.Entry {
	var found []source.Entry
	for _, e := range img.Entries() {
		if strings.HasSuffix(e.Path, ".sst") {
			found = append(found, e)
		}
	}
	return found
}

// syncs notes the paths of what is synced.
type syncs struct {
	vfs.FS
	mu    sync.Mutex
	paths []string
}

func (s *syncs) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := s.FS.Create(name, c)
	return noted{f, s, name}, err
}

func (s *syncs) OpenDir(name string) (vfs.File, error) {
	f, err := s.FS.OpenDir(name)
	return noted{f, s, name}, err
}

// below returns how many files and directories under dir were synced.
func (s *syncs) below(dir string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.paths {
		if strings.HasPrefix(p, dir) {
			n++
		}
	}
	return n
}

type noted struct {
	vfs.File
	to   *syncs
	name string
}

func (n noted) note() {
	n.to.mu.Lock()
	n.to.paths = append(n.to.paths, n.name)
	n.to.mu.Unlock()
}

func (n noted) Sync() error     { n.note(); return n.File.Sync() }
func (n noted) SyncData() error { n.note(); return n.File.SyncData() }
func (n noted) SyncTo(l int64) (bool, error) {
	n.note()
	return n.File.SyncTo(l)
}

// FS takes the syncs out of images, and nowhere else.
func TestImagesAreNotSynced(t *testing.T) {
	for name, wrap := range map[string]func(vfs.FS) vfs.FS{"plain": func(fs vfs.FS) vfs.FS { return fs }, "FS": pebblesrc.FS} {
		fs := &syncs{FS: vfs.Default}
		opts := small()
		opts.FS = wrap(fs)
		db, dir := filled(t, opts)
		sourcetest.Freeze(t, pebblesrc.New(db, nil))
		images := filepath.Join(filepath.Dir(dir), ".snapferry-image-")
		if n := fs.below(images); (n == 0) != (name == "FS") {
			t.Errorf("%s: %d syncs in the image", name, n)
		}
		if fs.below(dir) == 0 {
			t.Errorf("%s: nothing was synced in the database", name)
		}
		own := filepath.Join(t.TempDir(), ".snapferry-image-of-mine")
		if err := db.Checkpoint(own); err != nil || fs.below(own) == 0 {
			t.Errorf("%s: %d syncs in a checkpoint of the application's own, %v", name, fs.below(own), err)
		}
	}
}

// Tables are the live inodes and immutable; all else is read afresh.
func TestTablesAreImmutableLinks(t *testing.T) {
	db, dir := filled(t, small())
	img := sourcetest.Freeze(t, pebblesrc.New(db, nil))
	if img.CacheKey() != dir {
		t.Errorf("cache key %q, want %q", img.CacheKey(), dir)
	}
	if len(tables(img)) == 0 {
		t.Fatal("no tables in the image")
	}
	for _, e := range img.Entries() {
		isTable := strings.HasSuffix(e.Path, ".sst")
		if e.Immutable != isTable {
			t.Errorf("%s: immutable is %v", e.Path, e.Immutable)
		}
		if e.Compressed != isTable {
			t.Errorf("%s: compressed by the store is %v", e.Path, e.Compressed)
		}
		if e.Fresh == (isTable && e.Links > 1) {
			t.Errorf("%s: fresh is %v with %d names", e.Path, e.Fresh, e.Links)
		}
	}
	live, err := os.Stat(filepath.Join(dir, tables(img)[0].Path))
	if err == nil && live.Size() != tables(img)[0].Size {
		t.Errorf("%s is not the live file", tables(img)[0].Path)
	}
}

// A table that the database compacts away during the backup is not "changed": only
// its number of names is, which moves the ctime.
func TestCompactionDuringBackup(t *testing.T) {
	db, _ := filled(t, small())
	img := sourcetest.Freeze(t, pebblesrc.New(db, nil))
	table := tables(img)[0]
	f, err := img.Open(table.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := db.Compact(t.Context(), []byte{0}, []byte{0xff}, false); err != nil {
		t.Fatal(err)
	}
	if err := f.Check(); err != nil {
		t.Error(err)
	}
	if _, err := sourcetest.ReadFile(img, &table); err != nil {
		t.Error(err)
	}
}

// The second backup finds the tables of the first in the identity cache (S3),
// although each checkpoint moves their ctime, and nothing else.
func TestCacheKnowsTables(t *testing.T) {
	db, _ := filled(t, small())
	cacheDir := t.TempDir()
	first := sourcetest.Freeze(t, pebblesrc.New(db, nil))
	sum := [32]byte{1}
	recordAll(t, cacheDir, first, sum)
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}

	second := sourcetest.Freeze(t, pebblesrc.New(db, nil))
	cache, err := source.OpenCache(cacheDir, second)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range second.Entries() {
		_, ok := cache.Lookup(&e)
		if want := strings.HasSuffix(e.Path, ".sst"); ok != want {
			t.Errorf("%s: known is %v, want %v", e.Path, ok, want)
		}
	}
}

func recordAll(t *testing.T, dir string, img source.Image, sum [32]byte) {
	t.Helper()
	cache, err := source.OpenCache(dir, img)
	if err != nil {
		t.Fatal(err)
	}
	if err := cache.Begin(); err != nil {
		t.Fatal(err)
	}
	var all []*source.Entry
	for i := range img.Entries() {
		all = append(all, &img.Entries()[i])
	}
	if err := cache.WaitSettled(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if e.Type != source.Regular {
			continue
		}
		f, err := img.Open(e.Path)
		if err != nil {
			t.Fatal(err)
		}
		cache.Record(e.Path, f.Identity(), sum)
		f.Close()
	}
	if err := cache.Save(); err != nil {
		t.Fatal(err)
	}
}

// Tables in remote storage are not in a checkpoint: refused, and nothing is left.
func TestRemoteTablesAreRefused(t *testing.T) {
	o := small()
	o.FormatMajorVersion = pebble.FormatNewest
	o.Experimental.RemoteStorage = remote.MakeSimpleFactory(map[remote.Locator]remote.Storage{"": remote.NewInMem()})
	o.Experimental.CreateOnShared = remote.CreateOnSharedAll
	dir := filepath.Join(t.TempDir(), "db")
	db := open(t, dir, o)
	defer db.Close()
	if err := db.SetCreatorID(1); err != nil {
		t.Fatal(err)
	}
	for n := uint64(1); n <= 2000; n++ {
		if err := (store{db}).Write(n); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	refused(t, db, dir, "remote storage")
}

// A log in another directory would be lost by a restore: refused.
func TestSeparateLogIsRefused(t *testing.T) {
	o := small()
	o.WALDir = t.TempDir()
	db, dir := filled(t, o)
	refused(t, db, dir, o.WALDir)
}

func refused(t *testing.T, db *pebble.DB, dir, say string) {
	t.Helper()
	img, err := pebblesrc.New(db, nil).Freeze(t.Context())
	if err == nil {
		img.Release()
		t.Fatal("freeze succeeded")
	}
	if !errors.Is(err, source.ErrUnsupported) || !strings.Contains(err.Error(), say) {
		t.Errorf("error %q, want ErrUnsupported that mentions %q", err, say)
	}
	list, err := os.ReadDir(filepath.Dir(dir))
	if err != nil || len(list) != 1 {
		t.Errorf("beside the database: %v, %v", list, err)
	}
}
