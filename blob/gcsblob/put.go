package gcsblob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"cloud.google.com/go/storage"

	"github.com/snapferry/snapferry/blob"
)

const (
	// inMemory is the largest body that is read before it is sent, so that the store gets
	// its checksum in time to refuse it.
	inMemory = 8 << 20
	// pieceSize is how much is sent between two signs of progress.
	pieceSize = 256 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Put implements blob.Driver.
func (d *Driver) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	obj := d.object(key)
	if opts.IfAbsent {
		obj = obj.If(storage.Conditions{DoesNotExist: true})
	}
	u := &upload{driver: d, obj: obj}
	if opts.TTL > 0 {
		u.custom = unsealed
	}
	if body.Size > inMemory {
		return u.stream(ctx, body)
	}
	var data bytes.Buffer
	data.Grow(int(body.Size) + bytes.MinRead)
	if err := body.Copy(ctx, &data); err != nil {
		return err
	}
	sum := crc32.Checksum(data.Bytes(), castagnoli)
	return u.send(ctx, blob.Bytes(data.Bytes()), &sum)
}

// upload is one put.
type upload struct {
	driver *Driver
	obj    *storage.ObjectHandle
	custom time.Time // see expiry.go
}

// stream sends a large body as it is read, and checks afterwards what has arrived.
func (u *upload) stream(ctx context.Context, body blob.Body) error {
	return u.send(ctx, body, nil)
}

// send is one request for the whole body: with its checksum where that is known, else with
// a look at what the store has computed.
func (u *upload) send(ctx context.Context, body blob.Body, sum *uint32) error {
	request, cancel := context.WithCancel(ctx)
	defer cancel()
	w := u.obj.NewWriter(request)
	w.ChunkSize = 0
	w.ContentType = "application/octet-stream"
	w.CustomTime = u.custom
	w.DisableAutoChecksum = true
	if sum != nil {
		w.CRC32C, w.SendCRC32C = *sum, true
	}
	out := &sender{ctx: ctx, w: w}
	if err := body.Copy(ctx, out); err != nil {
		// A request that ends before its body stores nothing. Close waits for its end.
		cancel()
		if out.begun {
			_ = w.Close()
		}
		if out.err != nil {
			err = u.driver.failed(ctx, out.err)
		}
		return err
	}
	if err := w.Close(); err != nil {
		return u.driver.failed(ctx, err)
	}
	u.driver.bucketMet.Store(true)
	return u.check(ctx, w.Attrs(), body.Size, out.sum)
}

// check removes what has arrived damaged.
func (u *upload) check(ctx context.Context, attrs *storage.ObjectAttrs, size int64, sum uint32) error {
	if attrs.Size == size && attrs.CRC32C == sum {
		return nil
	}
	err := blob.Retriable(fmt.Errorf("%w: the store has %d bytes with checksum %08x, sent were %d with %08x",
		blob.ErrCorrupt, attrs.Size, attrs.CRC32C, size, sum))
	gone := u.driver.bucket.Object(attrs.Name).Generation(attrs.Generation).Delete(ctx)
	return errors.Join(err, u.driver.failed(ctx, gone))
}

// sender writes to the request, piece by piece, and remembers whether it was the request
// that failed.
type sender struct {
	ctx   context.Context // of the put
	w     *storage.Writer
	begun bool
	sum   uint32
	err   error
}

// Write implements io.Writer.
func (s *sender) Write(p []byte) (done int, err error) {
	for len(p) > 0 {
		s.begun = true
		piece := p[:min(len(p), pieceSize)]
		n, err := s.w.Write(piece)
		s.sum = crc32.Update(s.sum, castagnoli, piece[:n])
		done += n
		if err != nil {
			s.err = err
			return done, err
		}
		blob.Moved(s.ctx)
		p = p[n:]
	}
	return done, nil
}
