//go:build linux

package source

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
)

// known returns the paths of regular files that a new image of dir finds in the cache.
func known(t *testing.T, cacheDir, dir string) []string {
	t.Helper()
	img := freeze(t, dir, nil)
	c, err := OpenCache(cacheDir, img)
	must(t, err)
	found := []string{}
	for i := range img.Entries() {
		e := &img.Entries()[i]
		content, ok := c.Lookup(e)
		if !ok {
			continue
		}
		found = append(found, e.Path)
		if content != sumOf(e.Path) {
			t.Errorf("%s: content of another file", e.Path)
		}
	}
	return found
}

func sumOf(path string) (sum [32]byte) {
	copy(sum[:], "content of "+path)
	return sum
}

// begin opens the cache of an image as a backup that has something to read does.
func begin(t *testing.T, cacheDir string, img Image) *Cache {
	t.Helper()
	c, err := OpenCache(cacheDir, img)
	must(t, err)
	must(t, c.Begin())
	return c
}

func readAndRecord(t *testing.T, c *Cache, path string) {
	t.Helper()
	f := openFile(t, c.img, path)
	must(t, f.Check())
	c.Record(path, f.Identity(), sumOf(path))
}

func settle(t *testing.T, c *Cache) {
	t.Helper()
	var all []*Entry
	for i := range c.img.Entries() {
		all = append(all, &c.img.Entries()[i])
	}
	must(t, c.WaitSettled(t.Context(), all))
}

// remember records every file of dir, as a whole backup does.
func remember(t *testing.T, cacheDir, dir string) {
	t.Helper()
	img := freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	settle(t, c)
	for _, e := range img.Entries() {
		if e.Type == Regular {
			readAndRecord(t, c, e.Path)
		}
	}
	must(t, c.Save())
}

func threeFiles(t *testing.T) string {
	return layout{"a": {data: "AAAA"}, "d/b": {data: "BBBB"}, "d/c": {}}.build(t)
}

func TestUnchangedFilesAreKnownS3(t *testing.T) {
	dir, cacheDir := threeFiles(t), t.TempDir()
	same(t, known(t, cacheDir, dir), []string{})
	remember(t, cacheDir, dir)
	same(t, known(t, cacheDir, dir), []string{"a", "d/b", "d/c"})
}

// I5, S3: every change of a file moves its identity (Samza 1 and 3).
func TestChangedFilesAreNotKnownS3(t *testing.T) {
	for _, tt := range changes {
		t.Run(tt.name, func(t *testing.T) {
			dir, cacheDir := threeFiles(t), t.TempDir()
			remember(t, cacheDir, dir)
			tt.change(t, join(dir, "a"))
			same(t, known(t, cacheDir, dir), []string{"d/b", "d/c"})
		})
	}
}

// A cache that was written by another boot, for another path, another file system
// or another root directory, or that is damaged, is empty (S4).
func TestForeignOrDamagedCacheIsEmptyS4(t *testing.T) {
	rewrite := func(change func(data []byte) []byte) func(*testing.T, string, string) string {
		return func(t *testing.T, cacheDir, dir string) string {
			file := cacheFile(cacheDir, dir)
			data, err := os.ReadFile(file)
			must(t, err)
			must(t, os.WriteFile(file, change(data), 0o600))
			return dir
		}
	}
	scoped := func(change func(*volume)) func(*testing.T, string, string) string {
		return func(t *testing.T, cacheDir, dir string) string {
			v, ok := volumeOf(dir)
			if !ok {
				t.Fatal("this file system is not safe")
			}
			change(&v)
			scope, err := v.scope(dir)
			must(t, err)
			return rewrite(func(data []byte) []byte {
				table, _ := parseTable(data)
				return encodeTable(scope, table.generation, contents(table))
			})(t, cacheDir, dir)
		}
	}
	tests := map[string]struct {
		spoil func(t *testing.T, cacheDir, dir string) (newDir string)
		want  []string
	}{
		"same":           {scoped(func(*volume) {}), []string{"a", "d/b", "d/c"}},
		"boot":           {scoped(func(v *volume) { v.boot = "another" }), []string{}},
		"file system":    {scoped(func(v *volume) { v.id[0]++ }), []string{}},
		"device":         {scoped(func(v *volume) { v.device++ }), []string{}},
		"truncated":      {rewrite(func(b []byte) []byte { return b[:len(b)-1] }), []string{}},
		"empty":          {rewrite(func(b []byte) []byte { return nil }), []string{}},
		"longer":         {rewrite(func(b []byte) []byte { return append(b, 0) }), []string{}},
		"another format": {rewrite(func(b []byte) []byte { b[7]++; return b }), []string{}},
		"a bit":          {rewrite(func(b []byte) []byte { b[len(b)-60] ^= 1; return b }), []string{}},
		"path": {func(t *testing.T, cacheDir, dir string) string {
			must(t, os.Rename(dir, dir+"2"))
			must(t, os.Rename(cacheFile(cacheDir, dir), cacheFile(cacheDir, dir+"2")))
			return dir + "2"
		}, []string{}},
		"root replaced": {func(t *testing.T, cacheDir, dir string) string {
			must(t, os.Rename(dir, dir+"2"))
			must(t, os.Mkdir(dir, 0o755))
			must(t, os.Rename(dir+"2/d", dir+"/d")) // which leaves what is in d alone
			return dir
		}, []string{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir, cacheDir := threeFiles(t), t.TempDir()
			remember(t, cacheDir, dir)
			same(t, known(t, cacheDir, tt.spoil(t, cacheDir, dir)), tt.want)
		})
	}
}

func contents(t table) []named {
	var list []named
	for i := range t.len() {
		list = append(list, named{string(t.path(i)), t.record(i)})
	}
	return list
}

// S4: a file not older than the probe by the guard is not recorded, until it was
// waited for; one whose time was set far ahead is never waited for.
func TestYoungFilesS4(t *testing.T) {
	dir, cacheDir := threeFiles(t), t.TempDir()
	img := freeze(t, dir, nil)
	settle(t, begin(t, cacheDir, img)) // so that all are old
	young := func(path string, age time.Duration) {
		must(t, os.Chtimes(join(dir, path), time.Time{}, time.Now().Add(age)))
	}
	young("a", 300*time.Millisecond)
	young("d/b", time.Hour)

	img = freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	a, b := findEntry(img.Entries(), "a"), findEntry(img.Entries(), "d/b")
	if c.Settled(a) || !c.Settled(b) {
		t.Errorf("settled: a %v, b %v", c.Settled(a), c.Settled(b))
	}
	readAndRecord(t, c, "a")
	readAndRecord(t, c, "d/b")
	readAndRecord(t, c, "d/c")
	must(t, c.Save())
	same(t, known(t, cacheDir, dir), []string{"d/c"})

	c = begin(t, cacheDir, freeze(t, dir, nil))
	settle(t, c)
	readAndRecord(t, c, "a")
	readAndRecord(t, c, "d/b")
	must(t, c.Save())
	same(t, known(t, cacheDir, dir), []string{"a", "d/c"})
}

// The probe comes before the flush (S3): what was opened before WaitSettled took a
// later probe is judged by the earlier one.
func TestProbeComesBeforeOpenS3(t *testing.T) {
	dir, cacheDir := threeFiles(t), t.TempDir()
	now := time.Now()
	must(t, os.Chtimes(join(dir, "a"), time.Time{}, now.Add(200*time.Millisecond)))
	must(t, os.Chtimes(join(dir, "d/b"), time.Time{}, now.Add(250*time.Millisecond)))
	img := freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	f := openFile(t, img, "a")
	must(t, c.WaitSettled(t.Context(), []*Entry{findEntry(img.Entries(), "d/b")}))
	must(t, f.Check())
	c.Record("a", f.Identity(), sumOf("a"))
	readAndRecord(t, c, "d/b")
	must(t, c.Save())
	same(t, known(t, cacheDir, dir), []string{"d/b"})
}

func TestRecordNeedsBeginS3(t *testing.T) {
	dir, cacheDir := threeFiles(t), t.TempDir()
	c, err := OpenCache(cacheDir, freeze(t, dir, nil))
	must(t, err)
	readAndRecord(t, c, "a")
	must(t, c.Save())
	same(t, known(t, cacheDir, dir), []string{})
}

// S4: entries that are not older than the probe at load are not trusted, whatever
// the file says.
func TestEntriesFromTheFutureAreNotTrustedS4(t *testing.T) {
	dir, cacheDir := threeFiles(t), t.TempDir()
	must(t, os.Chtimes(join(dir, "a"), time.Time{}, time.Now().Add(time.Hour)))
	remember(t, cacheDir, dir)
	img := freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	for _, path := range []string{"a", "d/b"} {
		c.fresh[path] = recordOf(findEntry(img.Entries(), path))
	}
	must(t, c.Save())
	same(t, known(t, cacheDir, dir), []string{"d/b", "d/c"})
}

func recordOf(e *Entry) (r record) {
	return record{id: e.Identity, immutable: e.Immutable, content: sumOf(e.Path)}
}

func TestGuardArithmeticS4(t *testing.T) {
	at := func(ns int64) Timespec { return Timespec{Sec: 100 + ns/1e9, Nsec: int32(ns % 1e9)} }
	const guard = 20 * time.Millisecond
	tests := []struct {
		m, c, p int64
		want    bool
	}{
		{0, 0, 20e6, false}, {0, 0, 20e6 + 1, true}, {5e6, 0, 20e6 + 1, false}, {0, 5e6, 20e6 + 1, false},
		{990e6, 0, 1010e6, false}, {990e6, 0, 1010e6 + 1, true}, {2e9, 0, 1e9, false},
	}
	for _, tt := range tests {
		if got := old(Identity{MTime: at(tt.m), CTime: at(tt.c)}, at(tt.p), guard); got != tt.want {
			t.Errorf("mtime %d ctime %d probe %d: %v", tt.m, tt.c, tt.p, got)
		}
	}
}

// The guard is twice the step that was measured, and never below twice the floor.
func TestGuardIsMeasuredS4(t *testing.T) {
	c := begin(t, t.TempDir(), freeze(t, threeFiles(t), nil))
	if c.guard < 2*minGranularity || c.guard > 2*coarsest {
		t.Errorf("guard %v", c.guard)
	}
	before, err := c.probe.now()
	must(t, err)
	step, err := c.probe.granularity()
	must(t, err)
	after, err := c.probe.now()
	must(t, err)
	if step <= 0 || after.Compare(before) <= 0 && step != coarsest {
		t.Errorf("step %v from %v to %v", step, before, after)
	}
}

// An immutable file is known without its ctime, which links move, but only under
// its name, with its time of birth, and in its incarnation (S3, F24).
func TestImmutableEntriesS3(t *testing.T) {
	dir, cacheDir := threeFiles(t), t.TempDir()
	declare := func() Image {
		img := freeze(t, dir, nil)
		for i := range img.Entries() {
			e := &img.Entries()[i]
			if e.Type == Regular && e.Path != "d/c" {
				e.Immutable, e.Identity.CTime = true, Timespec{}
			}
		}
		return img
	}
	found := func(img Image) (list []string) {
		c, err := OpenCache(cacheDir, img)
		must(t, err)
		for i := range img.Entries() {
			if _, ok := c.Lookup(&img.Entries()[i]); ok {
				list = append(list, img.Entries()[i].Path)
			}
		}
		return list
	}
	img := declare()
	c := begin(t, cacheDir, img)
	settle(t, c)
	for _, path := range []string{"a", "d/b", "d/c"} {
		readAndRecord(t, c, path)
	}
	must(t, c.Save())

	must(t, os.Link(join(dir, "a"), join(dir, "a.link")))
	must(t, os.Link(join(dir, "d/c"), join(dir, "c.link")))
	must(t, os.Rename(join(dir, "d/b"), join(dir, "d/b2")))
	same(t, found(declare()), []string{"a"})

	withoutBirth := declare()
	a := findEntry(withoutBirth.Entries(), "a")
	a.Identity.BTime = Timespec{}
	c = begin(t, cacheDir, withoutBirth)
	settle(t, c)
	c.Record("a", a.Identity, sumOf("a"))
	must(t, c.Save())
	same(t, found(withoutBirth), []string(nil))
	c = begin(t, cacheDir, declare())
	settle(t, c)
	readAndRecord(t, c, "a")
	must(t, c.Save())
	same(t, found(declare()), []string{"a"})

	must(t, Forget(cacheDir, dir))
	same(t, found(declare()), []string(nil))
}

// Forget begins a new incarnation: a backup that runs meanwhile does not bring the
// old one back, whether or not there was a file before.
func TestForgetWinsOverRunningBackupS3(t *testing.T) {
	for _, before := range []bool{false, true} {
		dir, cacheDir := threeFiles(t), t.TempDir()
		if before {
			remember(t, cacheDir, dir)
			keepTimes(t, join(dir, "a"), func() { writeAt(t, join(dir, "a"), "B") })
		}
		c := begin(t, cacheDir, freeze(t, dir, nil))
		settle(t, c)
		readAndRecord(t, c, "a")
		must(t, Forget(cacheDir, dir))
		must(t, c.Save())
		same(t, known(t, cacheDir, dir), []string{})
		remember(t, cacheDir, dir)
		same(t, known(t, cacheDir, dir), []string{"a", "d/b", "d/c"})
	}
}

func TestSaveReplacesAndKeepsPrivate(t *testing.T) {
	dir, cacheDir := threeFiles(t), filepath.Join(t.TempDir(), "made", "for", "it")
	remember(t, cacheDir, dir)
	list, err := os.ReadDir(cacheDir)
	must(t, err)
	if len(list) != 1 {
		t.Errorf("in the cache directory: %v", list)
	}
	file := cacheFile(cacheDir, dir)
	first, err := os.Stat(file)
	must(t, err)
	if first.Mode() != 0o600 {
		t.Errorf("mode %v", first.Mode())
	}

	// A backup of an unchanged tree writes nothing.
	img := freeze(t, dir, nil)
	c, err := OpenCache(cacheDir, img)
	must(t, err)
	for i := range img.Entries() {
		c.Lookup(&img.Entries()[i])
	}
	must(t, c.Save())
	if again, err := os.Stat(file); err != nil || !os.SameFile(first, again) {
		t.Errorf("an unchanged cache was written again: %v", err)
	}

	// What is gone from the store goes from the cache.
	must(t, os.RemoveAll(join(dir, "d")))
	must(t, os.WriteFile(join(dir, "new"), nil, 0o600))
	remember(t, cacheDir, dir)
	data, err := os.ReadFile(file)
	must(t, err)
	table, ok := parseTable(data)
	if !ok || table.len() != 2 {
		t.Errorf("%d records, valid %v", table.len(), ok)
	}
}

func TestNothingIsCachedWhere(t *testing.T) {
	t.Run("no directory is given", func(t *testing.T) {
		dir := threeFiles(t)
		remember(t, "", dir)
		same(t, known(t, "", dir), []string{})
	})
	t.Run("the file system is not safe", func(t *testing.T) {
		dir, err := os.MkdirTemp("/dev/shm", "source-test-")
		must(t, err)
		defer os.RemoveAll(dir)
		must(t, os.WriteFile(join(dir, "f"), []byte("x"), 0o600))
		cacheDir := t.TempDir()
		remember(t, cacheDir, dir)
		same(t, known(t, cacheDir, dir), []string{})
	})
	t.Run("the entry is fresh", func(t *testing.T) {
		dir, cacheDir := threeFiles(t), t.TempDir()
		img := freeze(t, dir, nil)
		for i := range img.Entries() {
			img.Entries()[i].Fresh = true
		}
		c := begin(t, cacheDir, img)
		if !c.Settled(findEntry(img.Entries(), "a")) {
			t.Error("a fresh file is waited for")
		}
		settle(t, c)
		readAndRecord(t, c, "a")
		must(t, c.Save())
		same(t, known(t, cacheDir, dir), []string{})
	})
}

// Where the root cannot be written, the directory of the cache on the same file
// system tells the time.
func TestProbeOfReadOnlyStore(t *testing.T) {
	var work string
	if !asPlainUser(t, &work) {
		return
	}
	dir, cacheDir := threeFiles(t), t.TempDir()
	must(t, os.Chmod(dir, 0o500))
	defer os.Chmod(dir, 0o700)
	remember(t, cacheDir, dir)
	same(t, known(t, cacheDir, dir), []string{"a", "d/b", "d/c"})
}

func TestWaitSettledIsCancelled(t *testing.T) {
	dir := threeFiles(t)
	must(t, os.Chtimes(join(dir, "a"), time.Time{}, time.Now().Add(900*time.Millisecond)))
	img := freeze(t, dir, nil)
	c := begin(t, t.TempDir(), img)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.WaitSettled(ctx, []*Entry{findEntry(img.Entries(), "a")}); err == nil {
		t.Error("waited in spite of the cancelled context")
	}
}

func TestCacheIsSafeForManyGoroutines(t *testing.T) {
	l := layout{}
	for i := range 500 {
		l[fmt.Sprintf("f%03d", i)] = node{data: "x"}
	}
	dir, cacheDir := l.build(t), t.TempDir()
	remember(t, cacheDir, dir)
	must(t, os.Chtimes(join(dir, "f007"), time.Time{}, time.Unix(1, 0)))
	img := freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	var hits [4]int
	var wg sync.WaitGroup
	for w := range hits {
		wg.Go(func() {
			for i := w; i < len(img.Entries()); i += len(hits) {
				e := &img.Entries()[i]
				if _, ok := c.Lookup(e); ok {
					hits[w]++
				}
				c.Settled(e)
				c.Record(e.Path, e.Identity, sumOf(e.Path))
			}
		})
	}
	wg.Wait()
	if n := hits[0] + hits[1] + hits[2] + hits[3]; n != 499 {
		t.Errorf("%d hits, want 499", n)
	}
}

func someRecord(path string) record {
	n := int64(len(path))
	return record{
		id: Identity{
			Dev: 1, Ino: uint64(n) << 40, Size: n << 33,
			MTime: Timespec{-n, 999999999}, CTime: Timespec{n << 34, 1}, BTime: Timespec{n, int32(n)},
		},
		immutable: n%2 == 0,
		content:   sumOf(path),
	}
}

// Damage anywhere gives an empty table, never a panic and never another content.
func FuzzParseTable(f *testing.F) {
	list := []named{{"a", someRecord("a")}, {"b/c", someRecord("b/c")}}
	good := encodeTable([32]byte{1}, generation{2}, list)
	f.Add(good)
	f.Add(good[:recordsAt])
	f.Fuzz(func(t *testing.T, data []byte) {
		table, ok := parseTable(data)
		if !ok {
			return
		}
		for i := range table.len() {
			table.find(string(table.path(i)))
		}
	})
}

func TestTableRoundTrip(t *testing.T) {
	var list []named
	for i := range 1000 {
		path := fmt.Sprintf("dir%d/\xff%d", i%7, i)
		list = append(list, named{path, someRecord(path)})
	}
	slices.SortFunc(list, func(a, b named) int {
		if a.path < b.path {
			return -1
		}
		return 1
	})
	table, ok := parseTable(encodeTable([32]byte{1}, generation{2}, list))
	if !ok || table.scope != [32]byte{1} || table.generation != (generation{2}) || table.len() != len(list) {
		t.Fatalf("valid %v, %d records", ok, table.len())
	}
	for _, at := range []int{0, 1, 999, 500, 501, 502, 7, 998} {
		if r, ok := table.find(list[at].path); !ok || r != list[at].record {
			t.Errorf("%q: %+v, %v", list[at].path, r, ok)
		}
	}
	for _, path := range []string{"", "dir3", "dir3/\xff3x", "zzz"} {
		if _, ok := table.find(path); ok {
			t.Errorf("found %q", path)
		}
	}
}
