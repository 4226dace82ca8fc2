package snapshot

import (
	"fmt"
	"testing"
)

func BenchmarkEncode(b *testing.B) {
	for _, n := range []int{1000, 50_000, 1_000_000} {
		x := flat(n)
		_, root := mustEncode(b, x, testKey, nil)
		b.Run(fmt.Sprintf("new/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				mustEncode(b, x, "next", nil)
			}
		})
		b.Run(fmt.Sprintf("unchanged/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				mustEncode(b, x, "next", root)
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, n := range []int{1000, 50_000, 1_000_000} {
		object, root := mustEncode(b, flat(n), testKey, nil)
		segments := split(root, map[string][]byte{testKey: object})
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(object)))
			for b.Loop() {
				r, err := DecodeRoot(object, testKey)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := r.Assemble(segments); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkValidate(b *testing.B) {
	x := flat(50_000)
	b.ReportAllocs()
	for b.Loop() {
		if err := x.Validate(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTotals(b *testing.B) {
	x := flat(50_000)
	b.ReportAllocs()
	for b.Loop() {
		_ = x.Totals()
	}
}

func BenchmarkCompare(b *testing.B) {
	x, y := flat(50_000), flat(50_000)
	b.ReportAllocs()
	for b.Loop() {
		for c := range Compare(x, y) {
			if c.Kind != Unchanged {
				b.Fatal(c.Path())
			}
		}
	}
}

func BenchmarkContentID(b *testing.B) {
	for _, n := range []int{1, 4, 1000} {
		x := big(n, MinChunkSize)
		e := &x.Entries[len(x.Entries)-1]
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_ = ContentID(e)
			}
		})
	}
}

func BenchmarkChunkList(b *testing.B) {
	chunks := storedChunks(flat(50_000))
	data, _, err := EncodeChunks(chunks)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _, _ = EncodeChunks(chunks)
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = DecodeChunks(data)
		}
	})
}
