package blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Body is what a Put stores. It can be opened again for each try; the reader that Open
// gives is closed by whoever opened it. A reader that is an io.WriterTo (other than an
// *os.File) is written from without a copy in between.
type Body struct {
	// Size is the exact length: a reader with fewer or more bytes fails the Put.
	Size int64
	// Open starts the body from its beginning.
	Open func() (io.ReadCloser, error)

	memory []byte // the whole body, if it is in memory anyway
}

// Bytes is a Body of the bytes of p, which must not change until the Put has returned.
func Bytes(p []byte) Body {
	return Body{Size: int64(len(p)), memory: p, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(p)), nil
	}}
}

// Memory gives the bytes of a body that Bytes made, once they have been counted as Copy
// would count them; nil means that the body is empty, or must be copied. A driver that can
// tell when nobody reads them any more, before its Put returns, need not copy them.
func (b Body) Memory(ctx context.Context) ([]byte, error) {
	if len(b.memory) == 0 {
		return nil, nil
	}
	s := sameBytes{rest: b.memory, same: true}
	if err := b.Copy(ctx, &s); err != nil {
		return nil, err
	}
	if !s.same {
		return nil, nil // somebody has put another Open in the place of Bytes' own
	}
	return b.memory, nil
}

// sameBytes watches whether what is written to it is, place by place, what it expects.
type sameBytes struct {
	rest []byte
	same bool
}

func (s *sameBytes) Write(p []byte) (int, error) {
	if len(p) > 0 {
		s.same = s.same && len(p) <= len(s.rest) && &p[0] == &s.rest[0]
		s.rest = s.rest[min(len(p), len(s.rest)):]
	}
	return len(p), nil
}

// Copy opens the body, writes it to w and closes it. It fails unless there are exactly
// Size bytes, and looks at ctx between pieces. Drivers use it.
func (b Body) Copy(ctx context.Context, w io.Writer) (err error) {
	src, err := b.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	m := &meter{src: src, size: b.Size, piece: func(int) error { return ctx.Err() }}
	_, err = m.WriteTo(w)
	return err
}

// pieceSize is the length of one read: large enough that calls cost nothing beside the
// bytes.
const pieceSize = 1 << 20

var buffers = sync.Pool{New: func() any { return new([pieceSize]byte) }}

// meter is a body on its way to a driver: it holds the length to what was declared and
// tells of each piece that passes (limits, cancellation, progress), with or without
// io.WriterTo on either side.
type meter struct {
	src   io.ReadCloser
	size  int64
	done  int64
	max   int             // the longest piece to pass at once; 0 means any
	piece func(int) error // called after each piece
	ended bool            // the source was seen to end where it should
}

func (m *meter) Close() error { return m.src.Close() }

// Read gives the next piece. The last one is only given once it is known that nothing
// follows, since a driver that knows the size stops reading there.
func (m *meter) Read(p []byte) (int, error) {
	if m.done == m.size {
		return 0, m.end()
	}
	if m.max > 0 {
		p = p[:min(len(p), m.max)]
	}
	n, err := m.src.Read(p[:min(int64(len(p)), m.size-m.done)])
	m.done += int64(n)
	if err == io.EOF && m.done < m.size {
		return n, m.short()
	}
	if n > 0 {
		if perr := m.piece(n); perr != nil {
			return 0, perr
		}
	}
	if m.done == m.size {
		if err := m.end(); err != io.EOF {
			return 0, err
		}
		err = nil
	}
	return n, err
}

// end is io.EOF when the source ends here too.
func (m *meter) end() error {
	if m.ended {
		return io.EOF
	}
	var one [1]byte
	for range 100 {
		n, err := m.src.Read(one[:])
		if n > 0 {
			return m.long()
		}
		if err != nil {
			m.ended = err == io.EOF
			return err
		}
	}
	return io.ErrNoProgress
}

func (m *meter) short() error {
	return fmt.Errorf("body ended after %d of %d bytes: %w", m.done, m.size, io.ErrUnexpectedEOF)
}

func (m *meter) long() error {
	return fmt.Errorf("body is longer than its %d bytes", m.size)
}

// WriteTo sends the whole body to w.
func (m *meter) WriteTo(w io.Writer) (int64, error) {
	var err error
	if wt, ok := m.src.(io.WriterTo); ok && !isFile(m.src) {
		if _, err = wt.WriteTo(&meteredWriter{m: m, w: w}); err == nil && m.done < m.size {
			err = m.short()
		}
		return m.done, err
	}
	if m.size <= 64<<10 {
		return io.CopyBuffer(writeOnly{w}, readOnly{m}, make([]byte, m.size+1))
	}
	buf := buffers.Get().(*[pieceSize]byte)
	defer buffers.Put(buf)
	return io.CopyBuffer(writeOnly{w}, readOnly{m}, buf[:])
}

// isFile tells an *os.File, whose WriteTo falls back to small pieces.
func isFile(r io.Reader) bool {
	_, ok := r.(interface{ Fd() uintptr })
	return ok
}

// readOnly and writeOnly hide WriterTo and ReaderFrom, which would choose their own
// piece size.
type (
	readOnly  struct{ io.Reader }
	writeOnly struct{ io.Writer }
)

// meteredWriter stands between a source that writes itself and the driver.
type meteredWriter struct {
	m *meter
	w io.Writer
}

func (mw *meteredWriter) Write(p []byte) (done int, err error) {
	m := mw.m
	if int64(len(p)) > m.size-m.done {
		return 0, m.long()
	}
	for len(p) > 0 {
		part := p
		if m.max > 0 {
			part = p[:min(len(p), m.max)]
		}
		n, err := mw.w.Write(part)
		done += n
		m.done += int64(n)
		if err != nil {
			return done, err
		}
		if err := m.piece(n); err != nil {
			return done, err
		}
		p = p[n:]
	}
	return done, nil
}
