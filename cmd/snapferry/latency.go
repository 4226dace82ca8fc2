package main

import (
	"math/bits"
	"time"
)

// latencies counts durations in buckets whose width grows with the duration, so that
// a percentile is off by less than 2 % and the memory does not grow with the count. It
// is for one goroutine; add joins what several have counted.
type latencies struct {
	counts [bucketCount]int64
	n      int64
	max    time.Duration
}

const (
	subBits     = 6 // 64 buckets from one power of two of microseconds to the next
	bucketCount = (65 - subBits) << subBits
)

// bucketOf returns the bucket of a number of microseconds: small ones have one each.
func bucketOf(us uint64) int {
	if us < 1<<subBits {
		return int(us)
	}
	shift := bits.Len64(us) - subBits - 1
	return shift<<subBits + int(us>>shift)
}

// bucketEnd returns the greatest number of microseconds in a bucket.
func bucketEnd(bucket int) uint64 {
	if bucket < 1<<(subBits+1) {
		return uint64(bucket)
	}
	shift := bucket>>subBits - 1
	return uint64(bucket&(1<<subBits-1)+1<<subBits+1)<<shift - 1
}

func (l *latencies) observe(d time.Duration) {
	l.counts[bucketOf(uint64(max(d.Microseconds(), 0)))]++
	l.n++
	l.max = max(l.max, d)
}

func (l *latencies) add(other *latencies) {
	for i, n := range other.counts {
		l.counts[i] += n
	}
	l.n += other.n
	l.max = max(l.max, other.max)
}

// percentile returns a duration that p of 100 observations do not exceed.
func (l *latencies) percentile(p float64) time.Duration {
	rank, seen := int64(float64(l.n)*p/100+0.5), int64(0)
	for bucket, n := range l.counts {
		if seen += n; n > 0 && seen >= rank {
			return min(time.Duration(bucketEnd(bucket))*time.Microsecond, l.max)
		}
	}
	return l.max
}
