package blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
)

// MaxReadAll is the size above which ReadAll refuses to read an object to its end.
const MaxReadAll = 1 << 30

type opener func(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)

// Get opens length bytes of an object from offset on; length < 0 means to the end. A
// range that reaches past the end gives the bytes that there are, possibly none: who
// knows the length compares it. A stream that breaks is opened again where it broke, which
// is right because objects are written once. Close the reader.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	return s.get(ctx, "get", key, offset, length, s.driver.Get)
}

// GetDeleted is Get for the newest deleted version of an object. It is fs.ErrNotExist when
// there is none, and ErrUnsupported when the store keeps none at all.
func (s *Store) GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	d, ok := s.driver.(DeletedReader)
	if !ok {
		return nil, wrap("get deleted", key, fmt.Errorf("%w: %s keeps no deleted versions", ErrUnsupported, s))
	}
	return s.get(ctx, "get deleted", key, offset, length, d.GetDeleted)
}

func (s *Store) get(ctx context.Context, op, key string, offset, length int64, open opener) (io.ReadCloser, error) {
	err := ValidKey(key)
	if err == nil && offset < 0 {
		err = fmt.Errorf("invalid offset %d", offset)
	}
	if err != nil {
		return nil, wrap(op, key, err)
	}
	if length < 0 {
		length = -1
	}
	r := &reader{store: s, ctx: ctx, op: op, key: key, offset: offset, left: length, opener: open}
	if err := s.retry(ctx, op, key, r.open); err != nil {
		return nil, wrap(op, key, err)
	}
	return r, nil
}

// ReadAll reads what Get opens into memory. With length < 0 an object of more than
// MaxReadAll bytes is refused.
func (s *Store) ReadAll(ctx context.Context, key string, offset, length int64) ([]byte, error) {
	release, err := s.limits.reserve(ctx, length)
	if err != nil {
		return nil, wrap("get", key, err)
	}
	defer release()
	r, err := s.Get(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	p, err := readAll(r, length)
	if err = errors.Join(err, r.Close()); err != nil {
		return nil, wrap("get", key, err)
	}
	return p, nil
}

// readAll allocates a known length at once, but no more than a pack's on a claim alone.
func readAll(r io.Reader, length int64) ([]byte, error) {
	if length >= 0 && length <= 64<<20 {
		p := make([]byte, length)
		n, err := io.ReadFull(r, p)
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = nil
		}
		return p[:n], err
	}
	var b bytes.Buffer
	n, err := b.ReadFrom(io.LimitReader(r, MaxReadAll+1))
	if err == nil && n > MaxReadAll {
		err = fmt.Errorf("object has more than %d bytes; read it in ranges", MaxReadAll)
	}
	return b.Bytes(), err
}

// reader is an open Get. It holds no slot of the limit on requests, since a caller may
// keep many readers; each read is watched and paid for.
type reader struct {
	store   *Store
	ctx     context.Context // of the Get; it ends the stream
	op, key string
	opener  opener

	offset int64 // of the next byte
	left   int64 // -1: unknown
	body   io.ReadCloser
	watch  *watch
	closed bool
}

// open opens the stream at offset, for the first time or again.
func (r *reader) open(ctx context.Context) error {
	sl := slot{limits: r.store.limits}
	if err := sl.take(ctx); err != nil {
		return err
	}
	defer sl.free()
	w := r.store.watch(ctx)
	body, err := r.opener(w.ctx, r.key, r.offset, r.left)
	sl.answered(err)
	if err != nil {
		err = w.result(err)
		w.end()
		return err
	}
	w.stand()
	r.body, r.watch = body, w
	return nil
}

// Read reads on and, when the stream breaks, opens it again behind what was read.
func (r *reader) Read(p []byte) (n int, err error) {
	if m := r.store.limits.piece(); m > 0 {
		p = p[:min(len(p), m)]
	}
	if r.left >= 0 {
		p = p[:min(int64(len(p)), r.left)]
	}
	if r.left == 0 {
		return 0, io.EOF
	}
	err = r.store.retry(r.ctx, r.op, r.key, func(ctx context.Context) (err error) {
		n, err = r.try(ctx, p)
		return err
	})
	if perr := r.store.limits.pay(r.ctx, n); perr != nil {
		err = perr
	}
	if err == io.EOF {
		return n, err
	}
	return n, wrap(r.op, r.key, err)
}

// try does one read, of a stream opened anew if the last one broke. A break behind some
// bytes is left for the next read to mend.
func (r *reader) try(ctx context.Context, p []byte) (int, error) {
	if r.closed {
		return 0, ErrClosed
	}
	if r.body == nil {
		if err := r.open(ctx); err != nil {
			return 0, err
		}
	}
	r.watch.progress()
	n, err := r.body.Read(p)
	r.watch.stand()
	err = r.watch.result(err)
	r.offset += int64(n)
	if r.left >= 0 {
		r.left -= int64(n)
	}
	if IsRetriable(err) {
		_ = r.shut() // broken: its Close has nothing to add
		if n > 0 {
			err = nil
		}
	}
	return n, err
}

func (r *reader) shut() error {
	if r.body == nil {
		return nil
	}
	err := r.body.Close()
	r.watch.end()
	r.body = nil
	return err
}

// Close frees the stream. A second Close does nothing.
func (r *reader) Close() error {
	r.closed = true
	return wrap(r.op, r.key, r.shut())
}
