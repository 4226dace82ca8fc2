package raftlog

import (
	"math"
	"sort"

	"google.golang.org/protobuf/proto"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// list is the part of the log above a base, as a value: a copy of it stays what it was while the log goes on. What
// copies share is never written again, so they may be read without a lock.
type list struct {
	index, term uint64 // of the base, the place before the first entry
	ents        []*pb.Entry
	ends        []int64 // ends[k] is the size of ents[:k+1], plus skipped
	skipped     int64   // size of what was cut off below the base
}

// newList begins above m and holds ents.
func newList(m *pb.SnapshotMetadata, ents []*pb.Entry) list {
	l := list{index: m.GetIndex(), term: m.GetTerm()}
	return l.append(ents)
}

func (l list) last() uint64 { return l.index + uint64(len(l.ents)) }

// end gives the size of everything up to index, which must be within the list.
func (l list) end(index uint64) int64 {
	if index == l.index {
		return l.skipped
	}

	return l.ends[index-l.index-1]
}

// bytesAbove gives the size of the entries above index.
func (l list) bytesAbove(index uint64) int64 {
	index = min(max(index, l.index), l.last())
	return l.end(l.last()) - l.end(index)
}

func (l list) termOf(index uint64) (uint64, error) {
	switch {
	case index < l.index:
		return 0, raft.ErrCompacted
	case index == l.index:
		return l.term, nil
	case index > l.last():
		return 0, raft.ErrUnavailable
	}

	return l.ents[index-l.index-1].GetTerm(), nil
}

// slice gives entries of [lo, hi) of at most maxSize bytes together, but always one.
func (l list) slice(lo, hi, maxSize uint64) ([]*pb.Entry, error) {
	switch {
	case lo <= l.index:
		return nil, raft.ErrCompacted
	case lo > hi || hi > l.last()+1:
		return nil, raft.ErrUnavailable
	}
	n := int(hi - lo)
	if n == 0 {
		return nil, nil
	}
	if maxSize < math.MaxInt64 {
		start := l.end(lo - 1)
		fit := sort.Search(n, func(k int) bool { return l.end(lo+uint64(k))-start > int64(maxSize) })
		n = max(fit, 1)
	}
	from := int(lo - l.index - 1)

	// The capacity ends with the slice, so that an append of the caller copies.
	return l.ents[from : from+n : from+n], nil
}

// append puts ents, which must join the list or overlap it, in the place of what they overlap.
func (l list) append(ents []*pb.Entry) list {
	if len(ents) == 0 {
		return l
	}
	if keep := int(ents[0].GetIndex() - l.index - 1); keep < len(l.ents) {
		// The capacity ends here: what copies of the list still show is not overwritten.
		l.ents, l.ends = l.ents[:keep:keep], l.ends[:keep:keep]
	}
	end := l.end(l.last())
	for _, e := range ents {
		end += int64(proto.Size(e))
		l.ents, l.ends = append(l.ents, e), append(l.ends, end)
	}

	return l
}

// above gives the list without what lies at or below index, in memory of its own, so that the rest can be freed.
func (l list) above(index uint64) list {
	term, err := l.termOf(index)
	if err != nil || index == l.index {
		return l
	}
	k := int(index - l.index)
	n := len(l.ents) - k
	c := list{index: index, term: term, skipped: l.end(index)}
	c.ents = append(make([]*pb.Entry, 0, n+n/4+16), l.ents[k:]...)
	c.ends = append(make([]int64, 0, n+n/4+16), l.ends[k:]...)

	return c
}
