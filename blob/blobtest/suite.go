package blobtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
)

// Options tune Run and Benchmark; nil means the defaults. They choose sizes, never what
// has to hold.
type Options struct {
	// Large is the size of the largest object; default 9 MiB and some bytes. A driver
	// that cuts bodies chooses more than two parts.
	Large int64
	// Many is the number of keys of the long listing, more than a page of the store; the
	// default is 1,203 in short tests, 10,000 with SNAPFERRY_LONG, and 2,203 otherwise.
	Many int
}

func (o *Options) many() int {
	switch {
	case o != nil && o.Many > 0:
		return o.Many
	case testing.Short():
		return 1203
	case os.Getenv("SNAPFERRY_LONG") != "":
		return 10_000
	}
	return 2203
}

func (o *Options) large() int64 {
	if o == nil || o.Large == 0 {
		return 9<<20 + 12345
	}
	return o.Large
}

// Run is the conformance suite. newDriver gives an empty store for each test, which
// lives as long as t; the suite closes the driver.
func Run(t *testing.T, newDriver func(t *testing.T) blob.Driver, opts *Options) {
	tests := []struct {
		name string
		run  func(*testing.T, *harness)
	}{
		{"RoundTrip", testRoundTrip},
		{"OddKeys", testOddKeys},
		{"InvalidKeys", testInvalidKeys},
		{"Large", testLarge},
		{"Sizes", testSizes},
		{"Range", testRange},
		{"Absent", testAbsent},
		{"PathPrefix", testPathPrefix},
		{"IfAbsent", testIfAbsent},
		{"IfAbsentRace", testIfAbsentRace},
		{"Replace", testReplace},
		{"BadBody", testBadBody},
		{"CancelPut", testCancelPut},
		{"CancelledContext", testCancelledContext},
		{"ListOrder", testListOrder},
		{"ListModel", testListModel},
		{"ListMany", testListMany},
		{"ListWhileChanging", testListWhileChanging},
		{"Bulk", testBulk},
		{"Delete", testDelete},
		{"DeleteRace", testDeleteRace},
		{"RemoveTTL", testRemoveTTL},
		{"GetDeleted", testGetDeleted},
		{"Now", testNow},
		{"Probe", testProbe},
		{"Close", testClose},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := &harness{driver: newDriver(t), large: opts.large(), many: opts.many()}
			h.Store = blob.New(h.driver, &blob.Options{
				Retry:   blob.Retry{Total: 20 * time.Second}, // what fails for good must not seem to hang
				OnRetry: func(op, key string, err error, _ time.Duration) { t.Logf("%s %.80q again: %v", op, key, err) },
			})
			t.Cleanup(func() {
				if err := h.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
			test.run(t, h)
		})
	}
}

// harness is a store under test, with shorthands that fail the test.
type harness struct {
	*blob.Store
	driver blob.Driver
	large  int64
	many   int
}

func (h *harness) put(t *testing.T, key, value string) {
	t.Helper()
	if err := h.Put(t.Context(), key, blob.Bytes([]byte(value)), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (h *harness) want(t *testing.T, key, value string) {
	t.Helper()
	got, err := h.ReadAll(t.Context(), key, 0, -1)
	if err != nil || string(got) != value {
		t.Fatalf("%s: got %d bytes %.40q, %v, want %d bytes %.40q", key, len(got), got, err, len(value), value)
	}
}

// wantAbsent looks in every way there is.
func (h *harness) wantAbsent(t *testing.T, key string) {
	t.Helper()
	if r, err := h.Get(t.Context(), key, 0, 0); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("get of the absent %q: %v, %v", key, r, err)
	}
	if info, err := h.Stat(t.Context(), key); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("stat of the absent %q: %v, %v", key, info, err)
	}
	if slices.Contains(h.list(t, "", ""), key) {
		t.Fatalf("the absent %q is listed", key)
	}
}

func (h *harness) list(t *testing.T, prefix, after string) []string {
	t.Helper()
	keys := []string{}
	for info, err := range h.List(t.Context(), prefix, after) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, info.Key)
	}
	return keys
}

func (h *harness) wantList(t *testing.T, prefix, after string, want ...string) {
	t.Helper()
	if want == nil {
		want = []string{}
	}
	if diff := cmp.Diff(h.list(t, prefix, after), want); diff != "" {
		t.Fatalf("list %q after %q (-got +want):\n%s", prefix, after, diff)
	}
}

// random is reproducible bytes that no store can guess.
func random(n int64) []byte {
	p := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(p)
	return p
}

// plainReader hides that a reader could write itself, and gives odd pieces.
type plainReader struct {
	r   io.Reader
	max int
}

func (r plainReader) Read(p []byte) (int, error) { return r.r.Read(p[:min(len(p), r.max)]) }
func (r plainReader) Close() error               { return nil }

func plainBody(p []byte, piece int) blob.Body {
	return blob.Body{Size: int64(len(p)), Open: func() (io.ReadCloser, error) {
		return plainReader{bytes.NewReader(p), piece}, nil
	}}
}

func testRoundTrip(t *testing.T, h *harness) {
	for _, v := range []string{"", "x", "\x00\xff", string(random(100_000))} {
		h.put(t, "a/b", v)
		h.want(t, "a/b", v)
		info, err := h.Stat(t.Context(), "a/b")
		if err != nil || info.Key != "a/b" || info.Size != int64(len(v)) || info.Modified.IsZero() {
			t.Fatalf("stat: %+v, %v, want size %d", info, err, len(v))
		}
		for listed, err := range h.List(t.Context(), "", "") {
			if err != nil || listed.Size != info.Size || !listed.Modified.Equal(info.Modified) {
				t.Fatalf("list gives %+v, %v, stat %+v", listed, err, info)
			}
		}
	}
	h.wantList(t, "", "", "a/b")
}

// A large object arrives the same from a source that writes itself, and from plain readers
// with odd pieces.
func testLarge(t *testing.T, h *harness) {
	data := random(h.large)
	bodies := map[string]blob.Body{"l/writer-to": blob.Bytes(data), "l/plain": plainBody(data, 70_001)}
	for key, body := range bodies {
		if err := h.Put(t.Context(), key, body, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		got, err := h.ReadAll(t.Context(), key, 0, h.large)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%s: got %d bytes, %v, want the %d put", key, len(got), err, len(data))
		}
		mid := h.large/2 + 3
		got, err = h.ReadAll(t.Context(), key, mid, 4<<10)
		if err != nil || !bytes.Equal(got, data[mid:min(mid+4<<10, h.large)]) {
			t.Fatalf("%s: range in the middle: %d bytes, %v", key, len(got), err)
		}
	}
}

// The portable rule of ranges: what is there is given, and absence is told by Get.
func testRange(t *testing.T, h *harness) {
	h.put(t, "r", "0123456789")
	h.put(t, "empty", "")
	tests := []struct {
		key            string
		offset, length int64
		want           string
	}{
		{"r", 0, -1, "0123456789"},
		{"r", 0, 10, "0123456789"},
		{"r", 3, 4, "3456"},
		{"r", 9, 1, "9"},
		{"r", 3, -1, "3456789"},
		{"r", 3, 0, ""},
		{"r", 8, 100, "89"},
		{"r", 8, 1 << 62, "89"},
		{"r", 10, -1, ""},
		{"r", 10, 5, ""},
		{"r", 1 << 62, 1 << 62, ""},
		{"empty", 0, -1, ""},
		{"empty", 0, 1, ""},
		{"empty", 5, -1, ""},
	}
	for _, tt := range tests {
		r, err := h.Get(t.Context(), tt.key, tt.offset, tt.length)
		if err != nil {
			t.Fatalf("get %s [%d+%d]: %v", tt.key, tt.offset, tt.length, err)
		}
		got, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil || string(got) != tt.want {
			t.Errorf("get %s [%d+%d]: got %q, %v, want %q", tt.key, tt.offset, tt.length, got, err, tt.want)
		}
	}
	if _, err := h.Get(t.Context(), "r", -1, 1); err == nil {
		t.Error("a negative offset is no error")
	}
}

func testAbsent(t *testing.T, h *harness) {
	h.wantAbsent(t, "no")
	h.wantAbsent(t, "no/such/key")
	h.put(t, "a/b/c", "1")
	for _, key := range []string{"a", "a/b", "a/b/c/d", "a/b/cc", "a/b/C"} {
		h.wantAbsent(t, key)
	}
	_, err := h.Stat(t.Context(), "a/b")
	e, ok := errors.AsType[*blob.Error](err)
	if !ok || e.Op != "stat" || e.Key != "a/b" {
		t.Errorf("error without operation and key: %v", err)
	}
}

// A key that is a path prefix of another may be refused but does no harm.
func testPathPrefix(t *testing.T, h *harness) {
	h.put(t, "p/q", "1")
	for _, key := range []string{"p", "p/q/r"} {
		err := h.Put(t.Context(), key, blob.Bytes([]byte("2")), blob.PutOptions{IfAbsent: true})
		if errors.Is(err, fs.ErrExist) {
			t.Errorf("put %s beside p/q: %v, which says that it is there", key, err)
		}
	}
	h.want(t, "p/q", "1")
}

func testProbe(t *testing.T, h *harness) {
	if err := h.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.wantList(t, "", "")
}

func testClose(t *testing.T, h *harness) {
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Stat(t.Context(), "a"); !errors.Is(err, blob.ErrClosed) {
		t.Fatalf("stat after close: %v", err)
	}
}

func testNow(t *testing.T, h *harness) {
	before, err := h.Now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	h.put(t, "n", "")
	info, err := h.Stat(t.Context(), "n")
	if err != nil {
		t.Fatal(err)
	}
	after, err := h.Now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Some stores keep whole seconds.
	const s = 1_000_000_000
	if info.Modified.Before(before.Truncate(s)) || after.Before(info.Modified.Truncate(s)) {
		t.Fatalf("put between %v and %v by the store's clock, object says %v", before, after, info.Modified)
	}
	h.wantList(t, "", "", "n")
}

// What has a cancelled context neither happens nor succeeds.
func testCancelledContext(t *testing.T, h *harness) {
	h.put(t, "a", "1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, getErr := h.driver.Get(ctx, "a", 0, -1)
	_, statErr := h.driver.Stat(ctx, "a")
	var listErr error
	for _, err := range h.driver.List(ctx, "", "") {
		listErr = err
	}
	errs := map[string]error{
		"put":        h.driver.Put(ctx, "b", blob.Bytes([]byte("2")), blob.PutOptions{}),
		"get":        getErr,
		"stat":       statErr,
		"list":       listErr,
		"delete":     h.driver.Delete(ctx, []string{"a"}),
		"remove ttl": h.driver.RemoveTTL(ctx, []string{"a"}),
	}
	for op, err := range errs {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", op, err)
		}
	}
	h.wantList(t, "", "", "a")
}
