package memblob_test

import (
	"errors"
	"io/fs"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	blobtest.Run(t, func(*testing.T) blob.Driver { return memblob.New() }, nil)
}

func TestConformanceVersioned(t *testing.T) {
	blobtest.Run(t, func(*testing.T) blob.Driver { return memblob.NewVersioned() }, nil)
}

// Expire takes exactly what was born with a TTL and not sealed (I2, I8).
func TestExpire(t *testing.T) {
	d := memblob.New()
	s := blob.New(d, nil)
	for _, k := range []string{"plain", "sealed", "unsealed"} {
		opts := blob.PutOptions{TTL: time.Hour}
		if k == "plain" {
			opts.TTL = 0
		}
		if err := s.Put(t.Context(), k, blob.Bytes(nil), opts); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.RemoveTTL(t.Context(), []string{"sealed"}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(d.Expire(), []string{"unsealed"}); diff != "" {
		t.Fatal(diff)
	}
	if _, err := s.Stat(t.Context(), "unsealed"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if got := d.Expire(); got != nil {
		t.Fatalf("second time: %q", got)
	}
}

func TestCorrupt(t *testing.T) {
	d := memblob.New()
	s := blob.New(d, nil)
	if err := s.Put(t.Context(), "k", blob.Bytes([]byte("abc")), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	before, _ := s.ReadAll(t.Context(), "k", 0, -1)
	if err := d.Corrupt("k", func(p []byte) []byte { p[1] ^= 1; return p }); err != nil {
		t.Fatal(err)
	}
	after, err := s.ReadAll(t.Context(), "k", 0, -1)
	if err != nil || string(before) != "abc" || string(after) != "acc" {
		t.Fatalf("before %q, after %q, %v", before, after, err)
	}
	if err := d.Corrupt("no", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

func Benchmark(b *testing.B) {
	blobtest.Benchmark(b, func(*testing.B) blob.Driver { return memblob.New() })
}
