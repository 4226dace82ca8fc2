package snapshot

import (
	"encoding/binary"
	"fmt"
)

// reader takes values off the front of bytes. The first failure sticks: what it returns
// after that is zero, and the caller looks at err when it is convenient.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(what string) {
	if r.err == nil {
		r.err = corruptf("%s", what)
	}
	r.b = nil
}

func (r *reader) unsupported(what string, n uint64) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s %d is not known here; use a newer program", ErrUnsupported, what, n)
	}
	r.b = nil
}

func (r *reader) uvarint() uint64 {
	if len(r.b) > 0 && r.b[0] < 0x80 { // the usual case, which is worth a short cut
		v := r.b[0]
		r.b = r.b[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail("number is cut off or too long")
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) varint() int64 {
	v := r.uvarint()
	return int64(v>>1) ^ -int64(v&1)
}

// atMost reads a number that must not exceed limit.
func (r *reader) atMost(limit uint64) uint64 {
	v := r.uvarint()
	if v > limit {
		r.fail("number is out of bounds")
		return 0
	}
	return v
}

// count reads how many items follow, each of which takes at least size bytes.
func (r *reader) count(size int) int {
	return int(r.atMost(uint64(len(r.b) / size)))
}

func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.fail("bytes are cut off")
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) string() string { return string(r.bytes(r.uvarint())) }

func (r *reader) byte() byte {
	if b := r.bytes(1); len(b) == 1 {
		return b[0]
	}
	return 0
}

// end fails if something is left.
func (r *reader) end() error {
	if r.err == nil && len(r.b) > 0 {
		r.fail("bytes are left over")
	}
	return r.err
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendField[T string | []byte](b []byte, tag uint64, content T) []byte {
	b = binary.AppendUvarint(b, tag)
	b = binary.AppendUvarint(b, uint64(len(content)))
	return append(b, content...)
}

// fields reads tagged values up to the end and hands those with a tag from tags, which must
// all be there, to read. It applies the rule for unknown ones: odd tags are skipped, even
// ones are for newer programs only.
func (r *reader) fields(tags []uint64, read func(tag uint64, content *reader)) error {
	last := uint64(0)
	for len(r.b) > 0 && r.err == nil {
		tag := r.uvarint()
		content := reader{b: r.bytes(r.uvarint())}
		switch {
		case r.err != nil:
		case tag <= last:
			r.fail("fields are not in order")
		case len(tags) > 0 && tag == tags[0]:
			tags = tags[1:]
			read(tag, &content)
			r.err = content.end()
		case len(tags) > 0 && tag > tags[0]:
			r.fail(fmt.Sprintf("field %d is missing", tags[0]))
		case tag%2 == 0:
			r.unsupported("field", tag)
		}
		last = tag
	}
	if r.err == nil && len(tags) > 0 {
		r.fail(fmt.Sprintf("field %d is missing", tags[0]))
	}
	return r.err
}
