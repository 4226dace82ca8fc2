package blobtest

import (
	"fmt"
	"io"
	"sync/atomic"
	"testing"

	"github.com/snapferry/snapferry/blob"
)

// Benchmark measures a driver: small and pack-sized puts and gets, appends as a log
// makes them, and a listing.
func Benchmark(b *testing.B, newDriver func(b *testing.B) blob.Driver) {
	benchmarks := []struct {
		name string
		run  func(*testing.B, *blob.Store)
	}{
		{"Put4KiB", benchmarkPut(4<<10, false)},
		{"Put4KiBParallel", benchmarkPutParallel},
		{"Put64MiB", benchmarkPut(64<<20, false)},
		{"PutIfAbsent4KiB", benchmarkPut(4<<10, true)},
		{"Get4MiB", benchmarkGet},
		{"List1000", benchmarkList},
	}
	for _, bm := range benchmarks {
		b.Run(bm.name, func(b *testing.B) {
			s := blob.New(newDriver(b), nil)
			defer s.Close()
			b.ReportAllocs()
			bm.run(b, s)
		})
	}
}

func benchmarkPut(size int64, ifAbsent bool) func(*testing.B, *blob.Store) {
	return func(b *testing.B, s *blob.Store) {
		body := blob.Bytes(random(size))
		b.SetBytes(size)
		n := 0
		for b.Loop() {
			key := fmt.Sprintf("t/job/task/b/attempt/%d", n)
			if err := s.Put(b.Context(), key, body, blob.PutOptions{IfAbsent: ifAbsent}); err != nil {
				b.Fatal(err)
			}
			n++
		}
	}
}

func benchmarkPutParallel(b *testing.B, s *blob.Store) {
	body := blob.Bytes(random(4 << 10))
	b.SetBytes(body.Size)
	b.SetParallelism(16)
	var n atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			key := fmt.Sprintf("t/job/task/b/attempt/%d", n.Add(1))
			if err := s.Put(b.Context(), key, body, blob.PutOptions{}); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// benchmarkGet reads chunks out of a pack.
func benchmarkGet(b *testing.B, s *blob.Store) {
	const chunk, chunks = 4 << 20, 16
	if err := s.Put(b.Context(), "pack", blob.Bytes(random(chunk*chunks)), blob.PutOptions{}); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, chunk)
	b.SetBytes(chunk)
	n := int64(0)
	for b.Loop() {
		r, err := s.Get(b.Context(), "pack", n%chunks*chunk, chunk)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(r, buf); err != nil {
			b.Fatal(err)
		}
		if err := r.Close(); err != nil {
			b.Fatal(err)
		}
		n++
	}
}

func benchmarkList(b *testing.B, s *blob.Store) {
	for i := range 1000 {
		if err := s.Put(b.Context(), fmt.Sprintf("l/%d/%d", i/100, i), blob.Bytes(nil), blob.PutOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		n := 0
		for _, err := range s.List(b.Context(), "l/", "") {
			if err != nil {
				b.Fatal(err)
			}
			n++
		}
		if n != 1000 {
			b.Fatalf("listed %d", n)
		}
	}
}
