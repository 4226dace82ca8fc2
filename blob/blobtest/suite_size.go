package blobtest

import (
	"bytes"
	"slices"
	"testing"

	"github.com/snapferry/snapferry/blob"
)

const mib = 1 << 20

// Bodies around the smallest part that stores accept, an empty one, and one of many parts
// arrive whole and can be read at every edge.
func testSizes(t *testing.T, h *harness) {
	data := random(max(h.large, 5*mib+1))
	for _, size := range []int64{0, 1, 5*mib - 1, 5 * mib, 5*mib + 1, h.large} {
		if err := h.Put(t.Context(), "sized", blob.Bytes(data[:size]), blob.PutOptions{}); err != nil {
			t.Fatalf("put %d bytes: %v", size, err)
		}
		info, err := h.Stat(t.Context(), "sized")
		if err != nil || info.Size != size {
			t.Fatalf("stat of %d bytes: %+v, %v", size, info, err)
		}
		got, err := h.ReadAll(t.Context(), "sized", 0, -1)
		if err != nil || !bytes.Equal(got, data[:size]) {
			t.Fatalf("read %d of %d bytes, %v", len(got), size, err)
		}
		for _, at := range edges(size) {
			h.wantRange(t, data[:size], at, 1)
			h.wantRange(t, data[:size], max(at-1, 0), 2)
		}
		h.wantRange(t, data[:size], max(size-2, 0), -1)
	}
}

// edges are offsets at which stores or drivers may cut a body, and its ends.
func edges(size int64) []int64 {
	all := []int64{0, 64 << 10, mib, 4 * mib, 5 * mib, 8 * mib, 16 * mib, 32 * mib, size - 1, size, size + 1}
	all = slices.DeleteFunc(all, func(at int64) bool { return at < 0 || at > size+1 })
	slices.Sort(all)
	return slices.Compact(all)
}

func (h *harness) wantRange(t *testing.T, data []byte, offset, length int64) {
	t.Helper()
	from := min(offset, int64(len(data)))
	to := int64(len(data))
	if length >= 0 {
		to = min(from+length, to)
	}
	got, err := h.ReadAll(t.Context(), "sized", offset, length)
	if err != nil || !bytes.Equal(got, data[from:to]) {
		t.Fatalf("range [%d+%d] of %d bytes: %d bytes %.8x, %v, want %d bytes", offset, length, len(data), len(got), got, err, to-from)
	}
}
