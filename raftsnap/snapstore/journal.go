package snapstore

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/snapferry/snapferry/snapshot"
)

// The journal of a receipt says which chunks were written to its files. It has a header and
// records of 8 bytes:
//
//	"SFRECPT1" digest of the manifest (32)
//	number of the chunk (4), CRC-32C of digest and number (4)   ... little endian
//
// Chunks are numbered through the whole index. A record is written after the bytes, and
// neither is synced: a record is a hint where bytes may be found, and a chunk counts only
// when they were read and have its digest. So a record that does not check, at the end or
// amid others after a power failure, is passed over.
const (
	journalMagic  = "SFRECPT1"
	journalHeader = len(journalMagic) + len(snapshot.Digest{})
	recordLen     = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func newJournal(manifest snapshot.Digest) []byte {
	return append([]byte(journalMagic), manifest[:]...)
}

func appendRecord(b []byte, manifest snapshot.Digest, chunk uint32) []byte {
	b = binary.LittleEndian.AppendUint32(b, chunk)
	return binary.LittleEndian.AppendUint32(b, recordSum(manifest, b[len(b)-4:]))
}

func recordSum(manifest snapshot.Digest, number []byte) uint32 {
	return crc32.Update(crc32.Checksum(manifest[:], castagnoli), castagnoli, number)
}

// readJournal calls claim with every chunk below n that a journal names, and returns how
// many of its bytes are to be kept: the rest is torn, or everything is of another manifest.
func readJournal(data []byte, manifest snapshot.Digest, n int, claim func(chunk uint32)) (keep int64) {
	if len(data) < journalHeader || string(data[:journalHeader]) != string(newJournal(manifest)) {
		return 0
	}
	at := journalHeader
	for ; len(data)-at >= recordLen; at += recordLen {
		number := binary.LittleEndian.Uint32(data[at:])
		if int64(number) < int64(n) && binary.LittleEndian.Uint32(data[at+4:]) == recordSum(manifest, data[at:at+4]) {
			claim(number)
		}
	}
	return int64(at)
}
