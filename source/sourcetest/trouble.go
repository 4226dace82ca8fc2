package sourcetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/source"
)

// testReadAt: any part of a file reads as it does in the whole, from many goroutines,
// while the store changes.
func testReadAt(t *testing.T, h Harness) {
	s, _ := h.open(t, 300)
	img := Freeze(t, s.Source())
	l := startLoad(t, s, 300)
	defer l.stop()
	for _, e := range img.Entries() {
		if e.Type != source.Regular || e.Size == 0 {
			continue
		}
		whole, err := ReadFile(img, &e)
		if err != nil {
			t.Fatal(err)
		}
		f, err := img.Open(e.Path)
		if err != nil {
			t.Fatal(err)
		}
		var readers sync.WaitGroup
		for seed := range uint64(4) {
			readers.Go(func() { readParts(t, e.Path, f, whole, seed) })
		}
		readers.Wait()
		if n, err := f.ReadAt(make([]byte, 10), e.Size); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("%s: read behind the end: %d bytes, %v", e.Path, n, err)
		}
		f.Close()
	}
}

func readParts(t *testing.T, name string, f source.File, whole []byte, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	for range 50 {
		from := rng.IntN(len(whole))
		part := whole[from:min(len(whole), from+1+rng.IntN(20_000))]
		got := make([]byte, len(part))
		if n, err := f.ReadAt(got, int64(from)); n < len(got) {
			t.Errorf("%s: read %d of %d bytes at %d: %v", name, n, len(got), from, err)
		} else if !bytes.Equal(got, part) {
			t.Errorf("%s: %d bytes at %d differ from the whole", name, len(part), from)
		}
	}
}

// testCancelled: a Freeze that is cancelled, at whatever step it looks, leaves nothing
// beside the store and no lock on it.
func testCancelled(t *testing.T, h Harness) {
	s, dir := h.open(t, 20)
	before := names(t, filepath.Dir(dir))
	for looks, n := int64(0), uint64(21); ; looks, n = looks+1, n+1 {
		ctx := newCountdown(t.Context(), looks)
		img, err := s.Source().Freeze(ctx)
		if err == nil {
			err = img.Release()
		} else if !errors.Is(err, context.Canceled) {
			t.Fatalf("freeze cancelled at look %d: %v", looks, err)
		}
		if diff := cmp.Diff(names(t, filepath.Dir(dir)), before); diff != "" {
			t.Fatalf("beside the store after a freeze cancelled at look %d (-got +want):\n%s", looks, diff)
		}
		mustWrite(t, s, n)
		if !ctx.over() {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	img := Freeze(t, s.Source())
	prefix(t, h.read(t, Copy(t, img)))
}

// A countdown is a context that is cancelled when it is looked at for the n-th time.
type countdown struct {
	context.Context
	cancel context.CancelFunc

	mu   sync.Mutex
	left int64
}

func newCountdown(parent context.Context, n int64) *countdown {
	c := &countdown{left: n}
	c.Context, c.cancel = context.WithCancel(parent)
	if n == 0 {
		c.cancel()
	}
	return c
}

func (c *countdown) look() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left--; c.left == 0 {
		c.cancel()
	}
}

func (c *countdown) over() bool { return c.Context.Err() != nil }

// Err counts.
func (c *countdown) Err() error {
	c.look()
	return c.Context.Err()
}

// Done counts.
func (c *countdown) Done() <-chan struct{} {
	c.look()
	return c.Context.Done()
}

// testReleaseWhileReading: Release waits for those who read or makes them fail; it does
// not pull the file from under them, and the store can be closed afterwards.
func testReleaseWhileReading(t *testing.T, h Harness) {
	s, _ := h.open(t, 100)
	img, err := s.Source().Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	path := firstRegular(t, img)
	whole, err := ReadFile(img, findEntry(img, path))
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan struct{}, 4)
	var readers sync.WaitGroup
	for range cap(begun) {
		readers.Go(func() { readUntilError(t, img, path, whole, begun) })
	}
	for range cap(begun) {
		<-begun
	}
	if err := img.Release(); err != nil {
		t.Error(err)
	}
	readers.Wait()
	mustWrite(t, s, 101)
}

// readUntilError opens and reads a file until the image is released.
func readUntilError(t *testing.T, img source.Image, path string, whole []byte, begun chan<- struct{}) {
	for first := true; ; first = false {
		f, err := img.Open(path)
		if first {
			begun <- struct{}{}
		}
		if err != nil {
			if !errors.Is(err, source.ErrClosed) {
				t.Errorf("open while releasing: %v", err)
			}
			return
		}
		got := make([]byte, len(whole))
		if n, _ := f.ReadAt(got, 0); n == len(whole) && !bytes.Equal(got, whole) {
			t.Error("other bytes while releasing")
		}
		f.Close()
	}
}

func findEntry(img source.Image, path string) *source.Entry {
	for i := range img.Entries() {
		if img.Entries()[i].Path == path {
			return &img.Entries()[i]
		}
	}
	return nil
}
