package raftlog

import (
	"encoding/binary"
	"hash/crc32"

	"google.golang.org/protobuf/proto"

	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
)

// provesMore judges the bytes from an unreadable record on, at the end of the last segment. A crash can leave a hole
// there with readable records behind it, but only of the one write that was not synced yet. If more than one group
// is behind it, the first of them had been synced, and so had the record: it is damage, and to cut it off would
// silently lose what was acknowledged.
//
// Damage to the last group but one cannot be told from a hole in a large last one when its end is gone as well.
func provesMore(data []byte) bool {
	var p prover
	for at := 8; at < len(data); { // records begin at multiples of 8 bytes
		n := p.follow(data[at:])
		if p.proven {
			return true
		}
		at += max(n, 8)
	}

	return false
}

// prover looks for a record after the end of a synced group.
type prover struct {
	entry  bool // the group has entries
	closed bool // a group that was synced has ended
	proven bool
}

// follow reads records from the start of data as far as they are whole and in sequence, and gives their length.
func (p *prover) follow(data []byte) int {
	rec, n := frame(data)
	if n == 0 {
		return 0
	}
	second, m := frame(data[n:])
	if m == 0 || !follows(rec, second) {
		return 0 // one record alone may be anything, two with fitting checksums are no chance
	}
	p.entry = false
	for m != 0 && follows(rec, second) {
		p.see(rec)
		rec = second
		n += m
		second, m = frame(data[n:])
	}
	p.see(rec)

	return n
}

func (p *prover) see(rec *walpb.Record) {
	p.proven = p.proven || p.closed
	switch rec.GetType() {
	case wal.EntryType:
		p.entry = true
	case wal.StateType:
		p.closed = p.closed || p.entry
	case wal.SnapshotType:
		p.closed = true
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// follows reports whether the running checksum leads from a to b.
func follows(a, b *walpb.Record) bool {
	if b.GetType() == wal.CrcType {
		return b.GetCrc() == a.GetCrc()
	}

	return b.GetCrc() == crc32.Update(a.GetCrc(), castagnoli, b.GetData())
}

// frame reads the record that data begins with, as the library writes it: eight bytes, of which the lower seven are
// the length and the highest the padding, if any, with its top bit set. It gives the whole length, 0 for no record.
func frame(data []byte) (*walpb.Record, int) {
	const prefix = 8
	if len(data) < prefix+2 || data[prefix] != 0x08 { // the tag of the type
		return nil, 0
	}
	field := binary.LittleEndian.Uint64(data)
	length, pad := field&(1<<56-1), field>>56
	if pad != 0 {
		if pad < 0x81 || pad > 0x87 {
			return nil, 0
		}
		pad &= 7
	}
	if length == 0 || (length+pad)%8 != 0 || length > uint64(len(data)-prefix) {
		return nil, 0
	}
	rec := &walpb.Record{}
	if proto.Unmarshal(data[prefix:prefix+length], rec) != nil || rec.GetType() < wal.MetadataType || rec.GetType() > wal.SnapshotType {
		return nil, 0
	}

	return rec, min(prefix+int(length+pad), len(data))
}
