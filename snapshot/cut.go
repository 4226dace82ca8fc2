package snapshot

import "iter"

// Cut cuts a file's data runs into chunks: it yields offset and length of each, in order.
//
// Runs are in order, as a walk with SEEK_DATA and SEEK_HOLE finds them. What they leave
// out becomes a hole as far as the format allows one: holes begin and end at multiples of
// HoleAlign and are at least MinHoleSize long, and everything else counts as data. Data is
// cut at multiples of chunkSize, which must not be zero.
func Cut(size int64, runs []Run, chunkSize uint32) iter.Seq2[int64, uint32] {
	return func(yield func(int64, uint32) bool) {
		for from, to := range joined(size, runs) {
			for from < to {
				end := min(to, from-from%int64(chunkSize)+int64(chunkSize))
				if !yield(from, uint32(end-from)) {
					return
				}
				from = end
			}
		}
	}
}

// joined yields begin and end of the runs of data that remain when only the holes that
// the format allows are kept.
func joined(size int64, runs []Run) iter.Seq2[int64, int64] {
	return func(yield func(int64, int64) bool) {
		var from, to int64 // data not yet yielded; everything before from is settled
		for _, r := range runs {
			begin := max(r.Offset, 0) / HoleAlign * HoleAlign
			end := alignUp(min(r.Offset+r.Length, size), size)
			if r.Length <= 0 || begin >= size || end <= to {
				continue
			}
			if begin-to >= MinHoleSize {
				if from < to && !yield(from, to) {
					return
				}
				from = begin
			}
			to = end
		}
		if size-to < MinHoleSize {
			to = size
		}
		if from < to {
			yield(from, to)
		}
	}
}

// alignUp rounds n up to where a hole may begin; a hole may not begin beyond the size.
func alignUp(n, size int64) int64 {
	if n > size-HoleAlign {
		return size
	}
	return (n + HoleAlign - 1) / HoleAlign * HoleAlign
}
