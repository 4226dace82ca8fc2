// Package sourcetest is the conformance suite for sources: what a source promises
// about its images, as tests that any implementation can run against its own store.
//
// A harness gives the suite a store whose content is a history: writes numbered 1, 2,
// 3 and so on. The suite writes while it freezes, copies each image to another place,
// lets the store's own check look at the copy, and asks the harness which numbers are
// there. It also measures how much of a store is new after little was changed.
package sourcetest

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/source"
)

// A Harness gives the suite stores to freeze. New and Read are required.
type Harness struct {
	// New opens a fresh store in the directory dir, which it creates. The suite
	// closes it with the test. Leftovers are looked for beside dir.
	New func(t *testing.T, dir string) Store

	// Read opens a copy of an image, which lies in dir, as an application would
	// after a restore, and returns the numbers found in it in ascending order.
	Read func(t *testing.T, dir string) []uint64

	// Check fails the test if the check that comes with the store finds fault with a
	// copy of an image, which lies in dir. It runs before Read. Nil if there is none.
	Check func(t *testing.T, dir string)

	// Increment says what a backup after little was changed may cost. Nil if there is
	// nothing to say.
	Increment *Increment
}

// An Increment is a store with many records, of which 1 % are written again.
type Increment struct {
	// Records is how many numbers Fill writes.
	Records uint64
	// Fill writes the numbers from 1 to n, in any way.
	Fill func(t *testing.T, s Store, n uint64)
	// Rewrite gives these numbers other content of the same length, and makes the store
	// do what it does sooner or later with such writes.
	Rewrite func(t *testing.T, s Store, numbers []uint64)
	// MaxShare is the part of the image's bytes that may lie in chunks that the image
	// before has not.
	MaxShare float64
}

// read checks a copy and returns the numbers in it.
func (h Harness) read(t *testing.T, dir string) []uint64 {
	t.Helper()
	if h.Check != nil {
		h.Check(t, dir)
	}
	return h.Read(t, dir)
}

// A Store is an open store of a harness.
type Store interface {
	// Source returns a source that freezes the store.
	Source() source.Source
	// Write adds the number n to the history. It is not synced if the store offers a
	// choice, so that rule S1 is put to the test. It is called from one goroutine at
	// a time and runs beside Freeze.
	Write(n uint64) error
	// Close closes the store.
	Close() error
}

// rounds is how many images are taken under load.
const rounds = 5

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	t.Run("CutUnderLoadS1", func(t *testing.T) { testCutUnderLoad(t, h) })
	t.Run("EveryWriteBeforeFreezeS1", func(t *testing.T) { testWritesBefore(t, h) })
	t.Run("ImageStandsStill", func(t *testing.T) { testStandsStill(t, h) })
	t.Run("WellFormed", func(t *testing.T) { testWellFormed(t, h) })
	t.Run("ReleaseLeavesNothing", func(t *testing.T) { testRelease(t, h) })
	t.Run("ImagesAreIndependent", func(t *testing.T) { testIndependent(t, h) })
	t.Run("UntouchedIsUnchangedS2", func(t *testing.T) { testUntouched(t, h) })
	t.Run("ReadAtAnywhere", func(t *testing.T) { testReadAt(t, h) })
	t.Run("CancelledFreezeLeavesNothing", func(t *testing.T) { testCancelled(t, h) })
	t.Run("ReleaseWhileReading", func(t *testing.T) { testReleaseWhileReading(t, h) })
	t.Run("SmallIncrement", func(t *testing.T) { testIncrement(t, h) })
}

// open makes a store with the numbers 1 to n and closes it with the test.
func (h Harness) open(t *testing.T, n uint64) (s Store, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "store")
	s = h.New(t, dir)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
	})
	for i := uint64(1); i <= n; i++ {
		mustWrite(t, s, i)
	}
	return s, dir
}

func mustWrite(t *testing.T, s Store, n uint64) {
	t.Helper()
	if err := s.Write(n); err != nil {
		t.Fatalf("write %d: %v", n, err)
	}
}

// Freeze freezes src, and releases the image with the test.
func Freeze(t *testing.T, src source.Source) source.Image {
	t.Helper()
	img, err := src.Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := img.Release(); err != nil {
			t.Errorf("release: %v", err)
		}
	})
	return img
}

// load writes numbers from next on until stop is called, which returns the last.
type load struct {
	begun, done atomic.Uint64 // numbers
	stop        func()
}

func startLoad(t *testing.T, s Store, last uint64) *load {
	l := &load{}
	l.begun.Store(last)
	l.done.Store(last)
	quit, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for n := last + 1; ; n++ {
			select {
			case <-quit:
				ended <- nil
				return
			default:
			}
			l.begun.Store(n)
			if err := s.Write(n); err != nil {
				ended <- fmt.Errorf("write %d: %w", n, err)
				return
			}
			l.done.Store(n)
		}
	}()
	l.stop = func() {
		close(quit)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	return l
}

// testCutUnderLoad: an image that is taken while a writer runs holds a prefix of the
// history, with all that was acknowledged before Freeze and nothing begun after it.
func testCutUnderLoad(t *testing.T, h Harness) {
	s, _ := h.open(t, 200)
	l := startLoad(t, s, 200)
	defer l.stop()
	for range rounds {
		least := l.done.Load()
		img := Freeze(t, s.Source())
		most := l.begun.Load()
		got := prefix(t, h.read(t, Copy(t, img)))
		if got < least || got > most {
			t.Errorf("image holds writes 1..%d, want at least 1..%d and at most 1..%d", got, least, most)
		}
		// More of the history makes the store change under the image.
		for target := l.done.Load() + 100; l.done.Load() < target && !t.Failed(); {
		}
	}
}

// prefix returns n if the numbers are exactly 1..n.
func prefix(t *testing.T, numbers []uint64) uint64 {
	t.Helper()
	for i, n := range numbers {
		if n != uint64(i)+1 {
			t.Fatalf("the history in the image has %d at place %d: not a prefix", n, i+1)
		}
	}
	return uint64(len(numbers))
}

func testWritesBefore(t *testing.T, h Harness) {
	s, _ := h.open(t, 0)
	for n := uint64(1); n <= 20; n++ {
		mustWrite(t, s, n)
		img := Freeze(t, s.Source())
		if got := prefix(t, h.read(t, Copy(t, img))); got != n {
			t.Fatalf("image holds writes 1..%d, want 1..%d", got, n)
		}
		if err := img.Release(); err != nil {
			t.Fatal(err)
		}
	}
}

// testStandsStill: what the store does after Freeze, its image does not show.
func testStandsStill(t *testing.T, h Harness) {
	s, _ := h.open(t, 300)
	img := Freeze(t, s.Source())
	for n := uint64(301); n <= 900; n++ {
		mustWrite(t, s, n)
	}
	if got := prefix(t, h.read(t, Copy(t, img))); got != 300 {
		t.Errorf("image holds writes 1..%d, want 1..300", got)
	}
}

func testWellFormed(t *testing.T, h Harness) {
	s, _ := h.open(t, 50)
	img := Freeze(t, s.Source())
	entries := img.Entries()
	if len(entries) == 0 {
		t.Fatal("image without entries")
	}
	if !slices.IsSortedFunc(entries, func(a, b source.Entry) int { return bytes.Compare([]byte(a.Path), []byte(b.Path)) }) {
		t.Error("entries are not sorted by the bytes of their paths")
	}
	for i, e := range entries {
		if i > 0 && entries[i-1].Path == e.Path {
			t.Errorf("%q is there twice", e.Path)
		}
		if e.Immutable && !e.Identity.CTime.IsZero() {
			t.Errorf("%q is immutable and has a ctime in its identity", e.Path)
		}
		if e.Type == source.Regular && e.Size != e.Identity.Size {
			t.Errorf("%q has size %d and identity %+v", e.Path, e.Size, e.Identity)
		}
	}
	if img.CacheKey() != "" && !filepath.IsAbs(img.CacheKey()) {
		t.Errorf("cache key %q is not absolute", img.CacheKey())
	}
	if _, err := img.Open("no/such/file"); err == nil {
		t.Error("open of an absent file succeeded")
	}
	if _, err := img.Open(entries[0].Path); entries[0].Type == source.Directory && err == nil {
		t.Error("open of a directory succeeded")
	}
}

func testRelease(t *testing.T, h Harness) {
	s, dir := h.open(t, 50)
	before := names(t, filepath.Dir(dir))
	img := Freeze(t, s.Source())
	regular := firstRegular(t, img)
	for range 2 {
		if err := img.Release(); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(names(t, filepath.Dir(dir)), before); diff != "" {
		t.Errorf("beside the store after release (-got +want):\n%s", diff)
	}
	if f, err := img.Open(regular); err == nil {
		f.Close()
		t.Error("open after release succeeded")
	}
	mustWrite(t, s, 51)
}

func testIndependent(t *testing.T, h Harness) {
	s, _ := h.open(t, 10)
	first := Freeze(t, s.Source())
	mustWrite(t, s, 11)
	second := Freeze(t, s.Source())
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	if got := prefix(t, h.read(t, Copy(t, second))); got != 11 {
		t.Errorf("second image holds writes 1..%d after the release of the first, want 1..11", got)
	}
}

// testUntouched: while the store writes on, no file of an image is taken for changed.
func testUntouched(t *testing.T, h Harness) {
	s, _ := h.open(t, 50)
	img := Freeze(t, s.Source())
	l := startLoad(t, s, 50)
	defer l.stop()
	for _, e := range img.Entries() {
		if e.Type != source.Regular {
			continue
		}
		f, err := img.Open(e.Path)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Identity(); got != e.Identity {
			t.Errorf("%s: identity %+v when opened, %+v at Freeze", e.Path, got, e.Identity)
		}
		if err := f.Check(); err != nil {
			t.Errorf("%s: %v", e.Path, err)
		}
		f.Close()
	}
}

func firstRegular(t *testing.T, img source.Image) string {
	t.Helper()
	for _, e := range img.Entries() {
		if e.Type == source.Regular {
			return e.Path
		}
	}
	t.Fatal("image without a regular file")
	return ""
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range list {
		names = append(names, d.Name())
	}
	return names
}

// Copy copies an image to a new directory by the calls that an engine uses, and
// fails the test if a file is not what Freeze recorded.
func Copy(t *testing.T, img source.Image) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy")
	if err := os.Mkdir(to, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, e := range img.Entries() {
		if e.Path == "" {
			continue
		}
		if err := copyEntry(img, &e, filepath.Join(to, e.Path)); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func copyEntry(img source.Image, e *source.Entry, to string) error {
	switch e.Type {
	case source.Directory:
		return os.Mkdir(to, 0o700)
	case source.Symlink:
		return os.Symlink(e.Link, to)
	}
	data, err := ReadFile(img, e)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o600)
}

// ReadFile reads a regular entry of an image and checks that it is what Freeze
// recorded before and after. Holes read as zeros.
func ReadFile(img source.Image, e *source.Entry) ([]byte, error) {
	f, err := img.Open(e.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if f.Identity() != e.Identity {
		return nil, fmt.Errorf("%s: %w", e.Path, source.ErrChanged)
	}
	runs, err := f.Runs()
	if err != nil {
		return nil, err
	}
	data := make([]byte, e.Size)
	for _, r := range runs {
		if _, err := f.ReadAt(data[r.Offset:r.Offset+r.Length], r.Offset); err != nil && err != io.EOF {
			return nil, err
		}
	}
	return data, f.Check()
}
