package badgersrc

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// The logs of memtables and the files of the value log have one format: a header with the
// number of the key that encrypts them, then records of a header, key, value and checksum.
// They are created at their full size and written in place; behind the last record are
// zeros.
const (
	logHeader  = 20
	recordHead = 22 // at most
	recordSum  = 4
	maxKey     = 1 << 16

	metaPointer = 1 << 1 // the value is a place in the value log
	metaTxn     = 1 << 6 // part of a transaction
	metaFinTxn  = 1 << 7 // the end of a transaction
)

// A recordHeader is what stands before key and value.
type recordHeader struct {
	meta      byte
	key, size int64 // lengths of the key, and of key and value
	length    int64 // of the header itself
}

// errTorn says that a record is being written, or damaged.
var errTorn = errors.New("torn record")

// parseHeader reads a header. None, where the zeros begin or the file ends, is io.EOF.
func parseHeader(b []byte) (h recordHeader, err error) {
	if len(b) < 2 {
		return h, io.EOF
	}
	h.meta = b[0]
	at := 2
	var fields [3]uint64 // lengths of key and value, expiry
	for i := range fields {
		v, n := binary.Uvarint(b[at:])
		if n <= 0 {
			return h, errTorn
		}
		fields[i] = v
		at += n
	}
	if fields[0] == 0 {
		for _, c := range b {
			if c != 0 {
				return h, errTorn
			}
		}
		return h, io.EOF
	}
	if fields[0] > maxKey || fields[1] > 1<<32 {
		return h, errTorn
	}
	h.key, h.size, h.length = int64(fields[0]), int64(fields[0]+fields[1]), int64(at)
	return h, nil
}

// A place is where a value lies in the value log: just behind it, since what is looked for
// is an end.
type place struct {
	file uint32
	end  int64
}

func (p place) behind(q place) bool {
	return p.file > q.file || p.file == q.file && p.end > q.end
}

// A logScan is what the log of a memtable holds.
type logScan struct {
	end  int64 // behind the last whole transaction
	last place // of the last value that the log points at; zero if it cannot be read
	torn bool  // something that is no whole record follows
}

// scanLog reads a memtable's log from its beginning and checks every record.
func scanLog(r io.ReaderAt, size int64) (s logScan, err error) {
	s.end = min(logHeader, size)
	var head [logHeader]byte
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return s, shortIsMoved(err)
	}
	plain := binary.BigEndian.Uint64(head[:]) == 0
	in := bufio.NewReaderSize(io.NewSectionReader(r, logHeader, size-logHeader), 1<<20)
	var open place // the last pointer, maybe of a transaction that has no end yet
	inTxn := false
	for at := int64(logHeader); ; {
		rec, err := nextRecord(in)
		if err == io.EOF || err == errTorn {
			s.torn = err == errTorn
			return s, nil
		}
		if err != nil {
			return s, err
		}
		at += rec.total
		if p, ok := rec.pointer(); ok && plain && p.behind(open) {
			open = p
		}
		switch {
		case rec.meta&metaTxn != 0:
			inTxn = true
			continue
		case rec.meta&metaFinTxn != 0:
			inTxn = false
		case inTxn:
			return s, nil
		}
		s.end, s.last = at, open
	}
}

// shortIsMoved turns the end of a file, which Badger empties before it removes it, into
// errMoved.
func shortIsMoved(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return errMoved
	}
	return err
}

// A record is one that was checked.
type record struct {
	recordHeader
	total int64
	tail  []byte // the end of the value, at most a pointer long
}

// pointerSize is the length of a place in the value log: file, length and offset.
const pointerSize = 12

// pointer returns the place in the value log that the record names.
func (r *record) pointer() (place, bool) {
	if len(r.tail) != pointerSize || r.size-r.key != pointerSize {
		return place{}, false
	}
	length := binary.NativeEndian.Uint32(r.tail[4:])
	offset := binary.NativeEndian.Uint32(r.tail[8:])
	return place{file: binary.NativeEndian.Uint32(r.tail), end: int64(offset) + int64(length)}, true
}

// nextRecord reads a record. io.EOF is the end, errTorn a record without its checksum.
func nextRecord(in *bufio.Reader) (rec record, err error) {
	head, err := in.Peek(recordHead)
	if err != nil && err != io.EOF {
		return rec, err
	}
	if rec.recordHeader, err = parseHeader(head); err != nil {
		return rec, err
	}
	sum := crc32.Update(0, castagnoli, head[:rec.length])
	if _, err := in.Discard(int(rec.length)); err != nil {
		return rec, err
	}
	for left := rec.size; left > 0; {
		part, err := in.Peek(int(min(left, int64(in.Size()))))
		if err == io.EOF {
			return rec, errTorn
		}
		if err != nil {
			return rec, err
		}
		sum = crc32.Update(sum, castagnoli, part)
		left -= int64(len(part))
		if rec.meta&metaPointer != 0 && left == 0 && len(part) >= pointerSize {
			rec.tail = append(rec.tail, part[len(part)-pointerSize:]...)
		}
		if _, err := in.Discard(len(part)); err != nil {
			return rec, err
		}
	}
	var stored [recordSum]byte
	if _, err := io.ReadFull(in, stored[:]); err != nil {
		return rec, errTorn
	}
	if binary.BigEndian.Uint32(stored[:]) != sum {
		return rec, errTorn
	}
	rec.total = rec.length + rec.size + recordSum
	return rec, nil
}

// endOfValues returns the offset behind the last whole record of a file of the value log.
// It goes from header to header, beginning at from, where a record ends, and checks the
// last one. A record that is being written, or damaged, is errTorn.
func endOfValues(r io.ReaderAt, size, from int64) (int64, error) {
	at, last := from, int64(-1)
	var head [recordHead]byte
	for {
		n, err := r.ReadAt(head[:max(0, min(recordHead, size-at))], at)
		if err != nil && err != io.EOF {
			return 0, err
		}
		h, err := parseHeader(head[:n])
		if err == io.EOF {
			break
		}
		next := at + h.length + h.size + recordSum
		if err == nil && next > size {
			err = errTorn
		}
		if err != nil {
			return 0, fmt.Errorf("%w at byte %d", err, at)
		}
		at, last = next, at
	}
	if last < 0 {
		return at, nil
	}
	in := bufio.NewReaderSize(io.NewSectionReader(r, last, at-last), 64<<10)
	if _, err := nextRecord(in); err != nil {
		return 0, fmt.Errorf("%w at byte %d", errTorn, last)
	}
	return at, nil
}
