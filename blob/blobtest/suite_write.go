package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
)

const racers = 16

func testIfAbsent(t *testing.T, h *harness) {
	create := func(value string) error {
		return h.Put(t.Context(), "d/log/1", blob.Bytes([]byte(value)), blob.PutOptions{IfAbsent: true})
	}
	if err := create("first"); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"second", "first", ""} {
		if err := create(v); !errors.Is(err, fs.ErrExist) {
			t.Fatalf("second create: %v", err)
		}
		h.want(t, "d/log/1", "first")
	}
	if err := h.Delete(t.Context(), []string{"d/log/1"}); err != nil {
		t.Fatal(err)
	}
	if err := create("again"); err != nil {
		t.Fatal(err)
	}
	h.want(t, "d/log/1", "again")
}

// Of any number of creators exactly one succeeds, and its bytes are there (I4, P3).
func testIfAbsentRace(t *testing.T, h *harness) {
	for round := range 20 {
		key := fmt.Sprintf("race/%d/slot", round)
		var won atomic.Int64
		var wg sync.WaitGroup
		for i := range racers {
			wg.Go(func() {
				value := bytes.Repeat([]byte{byte(i + 1)}, 1000+i)
				err := h.driver.Put(t.Context(), key, blob.Bytes(value), blob.PutOptions{IfAbsent: true})
				for blob.IsRetriable(err) { // some stores say so while others write
					err = h.driver.Put(t.Context(), key, blob.Bytes(value), blob.PutOptions{IfAbsent: true})
				}
				switch {
				case err == nil:
					won.Add(int64(i + 1))
				case !errors.Is(err, fs.ErrExist):
					t.Errorf("create %s: %v", key, err)
				}
			})
		}
		wg.Wait()
		n := won.Load()
		if n < 1 || n > racers {
			t.Fatalf("%s: the winners' numbers add up to %d, so not one won", key, n)
		}
		h.want(t, key, string(bytes.Repeat([]byte{byte(n)}, 999+int(n))))
	}
}

// A replaced object is at every instant the old or the new one, whole.
func testReplace(t *testing.T, h *harness) {
	value := func(i int) string { return string(bytes.Repeat([]byte{byte('a' + i)}, 1<<16+i)) }
	h.put(t, "v", value(0))
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for open := true; open; {
				select {
				case <-done:
					open = false
				default:
				}
				got, err := h.ReadAll(t.Context(), "v", 0, -1)
				if err != nil || len(got) == 0 || string(got) != value(int(got[0]-'a')) {
					t.Errorf("read while it is replaced: %d bytes, %v", len(got), err)
					return
				}
			}
		})
	}
	for i := range 20 {
		h.put(t, "v", value(i))
	}
	close(done)
	wg.Wait()
	h.want(t, "v", value(19))
	h.wantList(t, "", "", "v")
}

var errBody = errors.New("the body broke")

// failing gives n bytes and then an error.
func failing(n int) io.ReadCloser {
	return plainReader{io.MultiReader(bytes.NewReader(make([]byte, n)), errReader{}), 1 << 20}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errBody }

// A body that is not what it said fails the put and nothing of it is visible (I2), in
// the driver alone as in the Store.
func testBadBody(t *testing.T, h *harness) {
	const size = 3 << 20
	opened := func(r func() io.ReadCloser) blob.Body {
		return blob.Body{Size: size, Open: func() (io.ReadCloser, error) { return r(), nil }}
	}
	reader := func(n int) func() io.ReadCloser {
		return func() io.ReadCloser { return plainReader{bytes.NewReader(make([]byte, n)), 1 << 20} }
	}
	writer := func(n int) func() io.ReadCloser {
		return func() io.ReadCloser { return io.NopCloser(bytes.NewReader(make([]byte, n))) }
	}
	bodies := map[string]blob.Body{
		"short":        opened(reader(size - 1)),
		"empty":        opened(reader(0)),
		"long":         opened(reader(size + 1)),
		"short writer": opened(writer(size - 1)),
		"long writer":  opened(writer(size + 1)),
		"breaks":       opened(func() io.ReadCloser { return failing(size / 2) }),
		"breaks late":  opened(func() io.ReadCloser { return failing(size) }),
		"no open":      {Size: size, Open: func() (io.ReadCloser, error) { return nil, errBody }},
	}
	h.put(t, "old", "1")
	for name, body := range bodies {
		for _, key := range []string{"bad/new", "old"} {
			if err := h.driver.Put(t.Context(), key, body, blob.PutOptions{}); err == nil {
				t.Errorf("%s: the driver put %s", name, key)
			}
			if err := h.Put(t.Context(), key, body, blob.PutOptions{}); err == nil {
				t.Errorf("%s: the store put %s", name, key)
			}
		}
	}
	h.want(t, "old", "1")
	h.wantList(t, "", "", "old")
	err := h.Put(t.Context(), "bad/new", bodies["breaks"], blob.PutOptions{})
	if !errors.Is(err, errBody) {
		t.Errorf("the error of the body is lost: %v", err)
	}
}

// cancelling cancels the put's own context in the middle of the body.
type cancelling struct {
	io.Reader
	cancel context.CancelFunc
	left   int64 // bytes before it does
}

func (c *cancelling) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p[:min(len(p), 64<<10)])
	if c.left -= int64(n); c.left <= 0 {
		c.cancel()
	}
	return n, err
}

func (c *cancelling) Close() error { return nil }

// A put that is cancelled in the middle leaves nothing visible, be it small or of many
// parts, and what was there stays.
func testCancelPut(t *testing.T, h *harness) {
	data := random(max(h.large, 2<<20))
	h.put(t, "c/old", "1")
	for _, size := range []int64{2 << 20, int64(len(data))} {
		for _, put := range []func(context.Context, string, blob.Body, blob.PutOptions) error{h.driver.Put, h.Put} {
			for _, key := range []string{"c/x", "c/old"} {
				ctx, cancel := context.WithCancel(t.Context())
				body := blob.Body{Size: size, Open: func() (io.ReadCloser, error) {
					return &cancelling{bytes.NewReader(data[:size]), cancel, size * 2 / 3}, nil
				}}
				if err := put(ctx, key, body, blob.PutOptions{}); !errors.Is(err, context.Canceled) {
					t.Errorf("cancelled put of %d bytes: %v", size, err)
				}
				cancel()
			}
			h.wantAbsent(t, "c/x")
			h.want(t, "c/old", "1")
		}
	}
	h.put(t, "c/x", "1")
	h.want(t, "c/x", "1")
}

func testDelete(t *testing.T, h *harness) {
	var keys []string
	for i := range 30 {
		keys = append(keys, fmt.Sprintf("d/%d/%d/k", i%3, i))
		h.put(t, keys[i], "v")
	}
	h.put(t, "d/0/keep", "v")
	if err := h.Delete(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	batch := append([]string{"d", "d/0", "no/such", "d/0/0/k", "d/0/0/k/below"}, keys...)
	for range 2 { // absent is success, the second time too (I9)
		if err := h.Delete(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		h.wantList(t, "", "", "d/0/keep")
	}
	for _, k := range keys {
		h.wantAbsent(t, k)
		h.put(t, k, "again")
	}
	h.want(t, keys[7], "again")
}

// Deleting what is beside an object never takes it, nor the way to it.
func testDeleteRace(t *testing.T, h *harness) {
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 25 {
				key := fmt.Sprintf("x/y/z%d/%d", i%2, i)
				h.put(t, key, fmt.Sprint(n))
				h.want(t, key, fmt.Sprint(n))
				if err := h.Delete(t.Context(), []string{key}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	h.wantList(t, "", "")
}

// Sealing an absent object is an error and the others are sealed (P5d).
func testRemoveTTL(t *testing.T, h *harness) {
	for _, k := range []string{"t/a", "t/b"} {
		if err := h.Put(t.Context(), k, blob.Bytes([]byte(k)), blob.PutOptions{TTL: 72 * time.Hour}); err != nil {
			t.Fatal(err)
		}
		h.want(t, k, k)
	}
	h.put(t, "t/plain", "p")
	for range 2 {
		if err := h.RemoveTTL(t.Context(), []string{"t/a", "t/plain"}); err != nil {
			t.Fatal(err)
		}
	}
	err := h.RemoveTTL(t.Context(), []string{"t/a", "t/no", "t/b"})
	d, ok := errors.AsType[*blob.DeleteError](err)
	if !ok || !errors.Is(err, fs.ErrNotExist) || len(d.Errors) != 1 || d.Errors["t/no"] == nil {
		t.Fatalf("sealing an absent object: %v", err)
	}
	h.want(t, "t/a", "t/a")
	h.want(t, "t/b", "t/b")
}

// A store keeps deleted versions or says that it does not.
func testGetDeleted(t *testing.T, h *harness) {
	h.put(t, "g/x", "0123")
	if err := h.Delete(t.Context(), []string{"g/x"}); err != nil {
		t.Fatal(err)
	}
	r, err := h.GetDeleted(t.Context(), "g/x", 1, 2)
	if errors.Is(err, blob.ErrUnsupported) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil || string(got) != "12" {
		t.Fatalf("deleted version: %q, %v", got, err)
	}
	if _, err := h.GetDeleted(t.Context(), "g/never", 0, -1); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("deleted version of what never was: %v", err)
	}
}
