package snapshot

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type piece struct {
	Offset int64
	Length uint32
}

func cut(size int64, runs []Run, chunkSize uint32) []piece {
	var pieces []piece
	for offset, length := range Cut(size, runs, chunkSize) {
		pieces = append(pieces, piece{offset, length})
	}
	return pieces
}

func TestCut(t *testing.T) {
	const k = 1 << 10
	tests := []struct {
		name string
		size int64
		runs []Run
		want []piece
	}{
		{"empty", 0, nil, nil},
		{"small", 5, []Run{{0, 5}}, []piece{{0, 5}}},
		{"exact cell", 16 * k, []Run{{0, 16 * k}}, []piece{{0, 16 * k}}},
		{"cells", 40 * k, []Run{{0, 40 * k}}, []piece{{0, 16 * k}, {16 * k, 16 * k}, {32 * k, 8 * k}}},
		{"too small for a hole", 63 * k, nil, []piece{{0, 16 * k}, {16 * k, 16 * k}, {32 * k, 16 * k}, {48 * k, 15 * k}}},
		{"hole only", 64 * k, nil, nil},
		{"hole at the begin", 70 * k, []Run{{64 * k, 6 * k}}, []piece{{64 * k, 6 * k}}},
		{"hole at the end", 70*k + 1, []Run{{0, 1}}, []piece{{0, 4 * k}}},
		{"hole within", 100 * k, []Run{{0, 4 * k}, {70 * k, 30 * k}}, []piece{{0, 4 * k}, {68 * k, 12 * k}, {80 * k, 16 * k}, {96 * k, 4 * k}}},
		{"short hole is data", 80 * k, []Run{{0, 16 * k}, {64 * k, 16 * k}}, []piece{{0, 16 * k}, {16 * k, 16 * k}, {32 * k, 16 * k}, {48 * k, 16 * k}, {64 * k, 16 * k}}},
		{"run beyond the size", 20 * k, []Run{{0, 100 * k}}, []piece{{0, 16 * k}, {16 * k, 4 * k}}},
		{"runs beyond the size", 5, []Run{{0, 5}, {100 * k, 5}}, []piece{{0, 5}}},
		{"empty run", 100 * k, []Run{{0, 4 * k}, {50 * k, 0}}, []piece{{0, 4 * k}}},
		{"touching runs", 8 * k, []Run{{0, 4 * k}, {4 * k, 4 * k}}, []piece{{0, 8 * k}}},
	}
	for _, tt := range tests {
		if diff := cmp.Diff(tt.want, cut(tt.size, tt.runs, MinChunkSize)); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
	}
}

// Whatever the runs, the chunks are such that Validate accepts them, and no byte of data
// is left out.
func TestCutIsValid(t *testing.T) {
	for seed := range uint64(2000) {
		r := &randomTree{Rand: rand.New(rand.NewPCG(seed, 1)), blobs: []string{"b"}}
		size := r.Int64N(2 << 20)
		runs := r.runs(size)
		chunkSize := uint32(MinChunkSize + HoleAlign*r.IntN(100))
		e := Entry{Path: "f", Size: size, ChunkSize: chunkSize}
		for offset, length := range Cut(size, runs, chunkSize) {
			e.Chunks = append(e.Chunks, Chunk{Offset: offset, Length: length, Location: Location{Blob: "b", Stored: length}})
		}
		if err := (&Index{Entries: []Entry{e}}).Validate(); err != nil {
			t.Fatalf("seed %d: size %d, runs %v: %v", seed, size, runs, err)
		}
		for _, run := range runs {
			for _, at := range []int64{run.Offset, run.Offset + run.Length/2, run.Offset + run.Length - 1} {
				if at < size && !covered(e.Chunks, at) {
					t.Fatalf("seed %d: byte %d of run %v is in no chunk", seed, at, run)
				}
			}
		}
	}
}

func covered(chunks []Chunk, at int64) bool {
	for _, c := range chunks {
		if c.Offset <= at && at < c.Offset+int64(c.Length) {
			return true
		}
	}
	return false
}

// A consumer may stop at any chunk.
func TestCutStops(t *testing.T) {
	for range Cut(1<<20, []Run{{0, 100 << 10}, {512 << 10, 512 << 10}}, MinChunkSize) {
		break
	}
}
