package cpwire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// The codec of appends. Requests, the commands that the group agrees on and the entries of
// its log hold the same bytes for the same append, so none of them is encoded twice.
const (
	codecVersion = 1
	batchHeader  = 1 + 2                   // version, how many
	itemFixed    = 1 + 1 + 8 + 32 + 16 + 4 // beside both names and the body
	maxItem      = itemFixed + 2*MaxName + MaxBody

	// ResultSize is the length of one Result as encoded.
	ResultSize = 1 + 8 + 32 + 8
	// entryFixed is the length of an Entry in a history, beside its body.
	entryFixed = 8 + 8 + 16 + 32 + 4
)

var errTruncated = errors.New("cut short")

// An Item is an Append as it lies in a request. Its slices alias the request.
type Item struct {
	Job, Task []byte
	Slot      uint64
	Prev      Digest
	Nonce     Nonce
	Body      []byte
}

// Validate returns an error that wraps fs.ErrInvalid unless the append can be encoded.
func (a *Append) Validate() error {
	if err := a.Task.Validate(); err != nil {
		return err
	}
	switch {
	case a.Slot == 0, (a.Slot == 1) != a.Prev.IsZero():
		return fmt.Errorf("slot %d after the digest %v: %w", a.Slot, a.Prev, fs.ErrInvalid)
	case a.Nonce == Nonce{}:
		return fmt.Errorf("no nonce: %w", fs.ErrInvalid)
	case len(a.Body) > MaxBody:
		return fmt.Errorf("entry has %d bytes, at most %d are allowed: %w", len(a.Body), MaxBody, fs.ErrInvalid)
	}
	return nil
}

// size is the length of the append as encoded.
func (a *Append) size() int { return itemFixed + len(a.Task.Job) + len(a.Task.Name) + len(a.Body) }

// AppendItem appends the encoded form of a, which must be valid.
func AppendItem(b []byte, a *Append) []byte {
	b = append(append(b, byte(len(a.Task.Job))), a.Task.Job...)
	b = append(append(b, byte(len(a.Task.Name))), a.Task.Name...)
	b = binary.LittleEndian.AppendUint64(b, a.Slot)
	b = append(b, a.Prev[:]...)
	b = append(b, a.Nonce[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(a.Body)))
	return append(b, a.Body...)
}

// DecodeItem reads the first item of b and checks it.
func DecodeItem(b []byte) (it Item, rest []byte, err error) {
	if it.Job, b, err = cutName(b); err != nil {
		return Item{}, nil, err
	}
	if it.Task, b, err = cutName(b); err != nil {
		return Item{}, nil, err
	}
	if len(b) < itemFixed-2 {
		return Item{}, nil, errTruncated
	}
	it.Slot = binary.LittleEndian.Uint64(b)
	copy(it.Prev[:], b[8:])
	copy(it.Nonce[:], b[40:])
	n := binary.LittleEndian.Uint32(b[56:])
	b = b[60:]
	if uint64(n) > uint64(len(b)) {
		return Item{}, nil, errTruncated
	}
	it.Body, rest = b[:n:n], b[n:]
	return it, rest, it.validate()
}

func (it *Item) validate() error {
	switch {
	case it.Task[0] == '.' || dots(it.Job):
		return fmt.Errorf("task %s/%s", it.Job, it.Task)
	case it.Slot == 0, (it.Slot == 1) != it.Prev.IsZero():
		return fmt.Errorf("slot %d after the digest %v", it.Slot, it.Prev)
	case it.Nonce == Nonce{}:
		return errors.New("no nonce")
	case len(it.Body) > MaxBody:
		return fmt.Errorf("entry of %d bytes", len(it.Body))
	}
	return nil
}

// dots reports names that mean a directory in a path.
func dots[S string | []byte](s S) bool { return string(s) == "." || string(s) == ".." }

func cutName(b []byte) (name, rest []byte, err error) {
	if len(b) == 0 || len(b) <= int(b[0]) {
		return nil, nil, errTruncated
	}
	n := int(b[0]) + 1
	if !validName(b[1:n]) {
		return nil, nil, fmt.Errorf("name %.140q", b[1:n])
	}
	return b[1:n:n], b[n:], nil
}

// AppendTask appends the encoded form of a task, which must be valid.
func AppendTask(b []byte, t Task) []byte {
	b = append(append(b, byte(len(t.Job))), t.Job...)
	return append(append(b, byte(len(t.Name))), t.Name...)
}

// DecodeTask reads what AppendTask wrote.
func DecodeTask(b []byte) (job, name, rest []byte, err error) {
	if job, b, err = cutName(b); err != nil {
		return nil, nil, nil, err
	}
	name, rest, err = cutName(b)
	return job, name, rest, err
}

// DecodeBatch checks the body of a request with appends and returns its items and how
// many there are.
func DecodeBatch(b []byte) (items []byte, n int, err error) {
	if items, n, err = cutBatch(b); err != nil {
		return nil, 0, err
	}
	if n == 0 || n > MaxBatch {
		return nil, 0, fmt.Errorf("%d appends in one request, at most %d are allowed", n, MaxBatch)
	}
	if err := CheckItems(items, n); err != nil {
		return nil, 0, err
	}
	return items, n, nil
}

// CheckItems reports whether there are n valid items in items and nothing else.
func CheckItems(items []byte, n int) (err error) {
	for i := range n {
		if _, items, err = DecodeItem(items); err != nil {
			return fmt.Errorf("append %d: %w", i, err)
		}
	}
	if len(items) != 0 {
		return fmt.Errorf("%d bytes after the last append", len(items))
	}
	return nil
}

// beginBatch appends the header of a request, or of the answer, for n appends.
func beginBatch(b []byte, n int) []byte {
	return binary.LittleEndian.AppendUint16(append(b, codecVersion), uint16(n))
}

// cutBatch splits off what beginBatch wrote.
func cutBatch(b []byte) (rest []byte, n int, err error) {
	if len(b) < batchHeader {
		return nil, 0, errTruncated
	}
	if b[0] != codecVersion {
		return nil, 0, fmt.Errorf("codec version %d, this program knows %d", b[0], codecVersion)
	}
	return b[batchHeader:], int(binary.LittleEndian.Uint16(b[1:])), nil
}

// AppendResult appends the encoded form of r.
func AppendResult(b []byte, s Status, slot uint64, d *Digest, stored int64) []byte {
	b = binary.LittleEndian.AppendUint64(append(b, byte(s)), slot)
	b = append(b, d[:]...)
	return binary.LittleEndian.AppendUint64(b, uint64(stored))
}

// AppendAnswer appends the answer to a request of which these are the results, encoded.
func AppendAnswer(b, results []byte) []byte {
	return append(beginBatch(b, len(results)/ResultSize), results...)
}

func decodeResult(b []byte) (r Result) {
	r.Status = Status(b[0])
	r.Slot = binary.LittleEndian.Uint64(b[1:])
	copy(r.Digest[:], b[9:])
	r.Stored = stamp(int64(binary.LittleEndian.Uint64(b[41:])))
	return r
}

// DecodeAnswer reads the answer to a request with n appends.
func DecodeAnswer(b []byte, n int) ([]Result, error) {
	b, got, err := cutBatch(b)
	if err != nil {
		return nil, err
	}
	if got != n || len(b) != n*ResultSize {
		return nil, fmt.Errorf("%d results in %d bytes for %d appends", got, len(b), n)
	}
	results := make([]Result, n)
	for i := range results {
		results[i] = decodeResult(b[i*ResultSize:])
		if s := results[i].Status; s < Appended || s > Forgotten {
			return nil, fmt.Errorf("result with %v", s)
		}
	}
	return results, nil
}

// AppendEntry appends an entry of a history.
func AppendEntry(b []byte, e *Entry) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Slot)
	b = binary.LittleEndian.AppendUint64(b, uint64(nanos(e.Stored)))
	b = append(b, e.Nonce[:]...)
	b = append(b, e.Digest[:]...)
	n := ^uint32(0) // no body
	if e.Body != nil {
		n = uint32(len(e.Body))
	}
	return append(binary.LittleEndian.AppendUint32(b, n), e.Body...)
}

// decodeEntry reads what AppendEntry wrote; the body aliases b.
func decodeEntry(b []byte) (e Entry, rest []byte, err error) {
	if len(b) < entryFixed {
		return Entry{}, nil, errTruncated
	}
	e.Slot = binary.LittleEndian.Uint64(b)
	e.Stored = stamp(int64(binary.LittleEndian.Uint64(b[8:])))
	copy(e.Nonce[:], b[16:])
	copy(e.Digest[:], b[32:])
	n := binary.LittleEndian.Uint32(b[64:])
	b = b[entryFixed:]
	if n == ^uint32(0) {
		return e, b, nil
	}
	if n > MaxBody || int(n) > len(b) {
		return Entry{}, nil, errTruncated
	}
	e.Body = b[:n:n]
	return e, b[n:], nil
}

// stamp turns nanoseconds since 1970 into a time; zero is no time.
func stamp(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
