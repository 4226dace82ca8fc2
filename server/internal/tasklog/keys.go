package tasklog

import (
	"encoding/binary"
	"fmt"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// The state is these keys. TASK is "job/task", which has no zero byte in it. Rings are
// written over, never deleted from, so that the state of a task stays as small as it is.
//
//	a                           applied index, its term (8 bytes each)
//	b TASK 0 slot%64 (1)        slot (8), body
//	h TASK                      head
//	r TASK 0 slot%1024 (2)      record
//	v                           version of the state (4)
//
// Numbers in keys are big endian, in values little endian.
const (
	prefixBody   = 'b'
	prefixHead   = 'h'
	prefixRecord = 'r'

	stateVersion = 1
)

var (
	keyApplied = []byte("a")
	keyVersion = []byte("v")
)

func appendKey(b []byte, prefix byte, task []byte) []byte {
	return append(append(b, prefix), task...)
}

func appendBodyKey(b, task []byte, slot uint64) []byte {
	return append(appendKey(b, prefixBody, task), 0, byte(slot%cpwire.KeptBodies))
}

func appendRecordKey(b, task []byte, slot uint64) []byte {
	return binary.BigEndian.AppendUint16(append(appendKey(b, prefixRecord, task), 0), uint16(slot%cpwire.KeptRecords))
}

// A head is where a log ends. The zero head is that of an empty log.
type head struct {
	slot   uint64
	first  uint64 // bodies below this slot were trimmed
	stored int64
	digest cpwire.Digest
}

const headSize = 8 + 8 + 8 + 32

func (h *head) encode(b []byte) {
	binary.LittleEndian.PutUint64(b, h.slot)
	binary.LittleEndian.PutUint64(b[8:], h.first)
	binary.LittleEndian.PutUint64(b[16:], uint64(h.stored))
	copy(b[24:], h.digest[:])
}

func decodeHead(b []byte) (h head, err error) {
	if len(b) != headSize {
		return head{}, fmt.Errorf("%w: head of %d bytes", checkpoint.ErrCorrupt, len(b))
	}
	h.slot = binary.LittleEndian.Uint64(b)
	h.first = binary.LittleEndian.Uint64(b[8:])
	h.stored = int64(binary.LittleEndian.Uint64(b[16:]))
	copy(h.digest[:], b[24:])
	return h, nil
}

// oldest is the lowest slot whose body is kept.
func (h *head) oldest() uint64 {
	if h.slot > cpwire.KeptBodies {
		return max(h.first, h.slot-cpwire.KeptBodies+1)
	}
	return max(h.first, 1)
}

// A record is what is known of an entry beside its body.
type record struct {
	slot   uint64
	stored int64
	nonce  cpwire.Nonce
	digest cpwire.Digest
}

const recordSize = 8 + 8 + 16 + 32

func (r *record) encode(b []byte) {
	binary.LittleEndian.PutUint64(b, r.slot)
	binary.LittleEndian.PutUint64(b[8:], uint64(r.stored))
	copy(b[16:], r.nonce[:])
	copy(b[32:], r.digest[:])
}

func decodeRecord(b []byte) (r record, err error) {
	if len(b) != recordSize {
		return record{}, fmt.Errorf("%w: record of %d bytes", checkpoint.ErrCorrupt, len(b))
	}
	r.slot = binary.LittleEndian.Uint64(b)
	r.stored = int64(binary.LittleEndian.Uint64(b[8:]))
	copy(r.nonce[:], b[16:])
	copy(r.digest[:], b[32:])
	return r, nil
}
