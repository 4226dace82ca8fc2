package azblob

import (
	"bytes"
	"context"
	"crypto/md5"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	azblobs "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blockblob"
	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
)

const (
	// blockSize is that of staged blocks, and the largest body that goes in one request.
	blockSize = 8 << 20
	// maxBlocks is what one blob may have.
	maxBlocks = 50_000
	// stages is how many blocks of one body are under way.
	stages = 4

	day    = 24 * time.Hour
	minTTL = 3 * day
)

// Put implements blob.Driver.
func (d *Driver) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	u := &upload{driver: d, client: d.container.NewBlockBlobClient(d.prefix + encodeKey(key))}
	if opts.IfAbsent {
		none := azcore.ETagAny
		u.conditions = &azblobs.AccessConditions{ModifiedAccessConditions: &azblobs.ModifiedAccessConditions{IfNoneMatch: &none}}
	}
	if opts.TTL > 0 && d.tags {
		days := max((opts.TTL+day-1)/day, minTTL/day)
		u.tags = map[string]string{tagName: fmt.Sprint(int64(days))}
	}
	if body.Size > blockSize {
		return u.inBlocks(ctx, body)
	}
	return u.whole(ctx, body)
}

// upload is one put.
type upload struct {
	driver     *Driver
	client     *blockblob.Client
	conditions *azblobs.AccessConditions
	tags       map[string]string
}

// whole sends a body in one request. It is read to its end before, so that nothing is sent of
// a body that breaks.
func (u *upload) whole(ctx context.Context, body blob.Body) error {
	var data bytes.Buffer
	data.Grow(int(body.Size) + bytes.MinRead)
	if err := body.Copy(ctx, &data); err != nil {
		return err
	}
	_, err := u.client.Upload(ctx, sending(ctx, data.Bytes()), &blockblob.UploadOptions{
		AccessConditions:        u.conditions,
		Tags:                    u.tags,
		TransactionalValidation: digest(data.Bytes()),
	})
	return u.driver.failed(ctx, err)
}

// digest lets the store refuse what arrives damaged.
func digest(p []byte) azblobs.TransferValidationType {
	sum := md5.Sum(p)
	return azblobs.TransferValidationTypeMD5(sum[:])
}

// inBlocks stages a body in blocks and then names them. The names of the blocks are this
// put's own, so no other writer of the key can mix its blocks with them.
func (u *upload) inBlocks(ctx context.Context, body blob.Body) error {
	stage, cancel := context.WithCancel(ctx)
	defer cancel()
	b := &blocks{upload: u, size: max(blockSize, int((body.Size+maxBlocks-1)/maxBlocks)), free: make(chan []byte, stages+1)}
	b.group, b.ctx = errgroup.WithContext(stage)
	b.group.SetLimit(stages)
	_, _ = rand.Read(b.token[:]) // never fails

	err := body.Copy(ctx, b)
	if err == nil {
		err = b.flush()
	}
	if err != nil && b.failed == nil { // the body's own error
		cancel()
	}
	if serr := b.group.Wait(); serr != nil && (err == nil || b.failed != nil) {
		err = serr
	}
	if err != nil {
		if cerr := ctx.Err(); cerr != nil {
			return cerr
		}
		return err
	}
	_, err = u.client.CommitBlockList(ctx, b.ids, &blockblob.CommitBlockListOptions{AccessConditions: u.conditions, Tags: u.tags})
	return u.driver.failed(ctx, err)
}

// blocks cuts what is written to it and stages each full block beside the writing.
type blocks struct {
	upload *upload
	size   int
	token  [16]byte
	ids    []string
	buf    []byte
	free   chan []byte // buffers that were sent

	group  *errgroup.Group
	ctx    context.Context // ends when a block fails
	failed error           // why Write refused
}

// Write implements io.Writer.
func (b *blocks) Write(p []byte) (done int, err error) {
	for len(p) > 0 {
		if b.failed = context.Cause(b.ctx); b.failed != nil {
			return done, b.failed
		}
		if b.buf == nil {
			b.buf = b.buffer()
		}
		n := min(len(p), b.size-len(b.buf))
		b.buf = append(b.buf, p[:n]...)
		done += n
		p = p[n:]
		if len(b.buf) == b.size {
			if err := b.flush(); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

// buffer is one that was sent, or a new one: there are never more than are under way and one.
func (b *blocks) buffer() []byte {
	select {
	case buf := <-b.free:
		return buf[:0]
	default:
		return make([]byte, 0, b.size)
	}
}

// flush stages what is in the buffer, when there is room for one more under way.
func (b *blocks) flush() error {
	if len(b.buf) == 0 {
		return nil
	}
	id := b.id(len(b.ids))
	b.ids = append(b.ids, id)
	data := b.buf
	b.buf = nil
	b.group.Go(func() error {
		_, err := b.upload.client.StageBlock(b.ctx, id, sending(b.ctx, data), &blockblob.StageBlockOptions{TransactionalValidation: digest(data)})
		b.free <- data
		return b.upload.driver.failed(b.ctx, err)
	})
	b.failed = context.Cause(b.ctx)
	return b.failed
}

// id names a block; all those of a blob are of one length.
func (b *blocks) id(n int) string {
	raw := binary.BigEndian.AppendUint32(b.token[:], uint32(n))
	return base64.StdEncoding.EncodeToString(raw)
}

// progress is a body in memory that tells of its sending.
type progress struct {
	*bytes.Reader
	ctx context.Context
}

// pieceSize is how much is sent between two signs of progress.
const pieceSize = 256 << 10

func sending(ctx context.Context, p []byte) io.ReadSeekCloser {
	return &progress{bytes.NewReader(p), ctx}
}

// Read implements io.Reader.
func (p *progress) Read(b []byte) (int, error) {
	n, err := p.Reader.Read(b[:min(len(b), pieceSize)])
	blob.Moved(p.ctx)
	return n, err
}

// WriteTo gives pieces too, where a connection would take all at once.
func (p *progress) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(struct{ io.Writer }{w}, struct{ io.Reader }{p})
}

// Close implements io.Closer.
func (p *progress) Close() error { return nil }
