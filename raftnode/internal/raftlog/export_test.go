package raftlog

// Segments lists the segments of a directory.
var Segments = segments

// Unneeded counts the segments that a release removes.
var Unneeded = unneeded

// SegmentSeq gives the number of a segment.
func SegmentSeq(name string) uint64 { return segmentOf(name).seq }

// SetSegmentBytes is called before the first WAL is opened.
func SetSegmentBytes(n int64) { segmentBytes = n }

// SegmentIndex gives the index a segment is named after.
func SegmentIndex(name string) uint64 { return segmentOf(name).index }
