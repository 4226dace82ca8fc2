package s3blob

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
)

const (
	partTries = 4
	partPause = 200 * time.Millisecond // before the second try; it doubles
	abortTime = 20 * time.Second
)

// parts is one body on its way in parts. The body is written to it; each full part goes
// off while the next one is filled.
type parts struct {
	driver   *Driver
	key      string
	id       string // of the upload
	token    map[string]string
	size     int64
	partSize int64

	group *errgroup.Group
	ctx   context.Context // of the group
	cur   *buffer         // being filled
	taken int64           // bytes of the body that were given a part
	count int32

	mu   sync.Mutex
	done []types.CompletedPart // mu guards
}

// putParts stores a large body. Nothing is visible before the last step, and after a
// failure the parts are removed, as far as that can be done now; the sweep does the rest.
func (d *Driver) putParts(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	p := &parts{driver: d, key: key, token: newToken(), size: body.Size, partSize: partSize(d.opts.PartSize, body.Size)}
	err := d.withTag(key, opts.TTL, func(tag *string) error { return p.begin(ctx, tag) })
	if err != nil {
		return err
	}
	if err = p.upload(ctx, body); err == nil {
		err = p.complete(ctx)
	}
	if err != nil {
		p.abort(ctx)
	}
	return err
}

// partSize is the wanted size, or as much more in whole MiB as keeps to maxParts.
func partSize(want, body int64) int64 {
	const mib = 1 << 20
	least := (body + maxParts - 1) / maxParts
	return max(want, (least+mib-1)/mib*mib)
}

func (p *parts) begin(ctx context.Context, tag *string) error {
	d := p.driver
	out, err := d.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
		Bucket: &d.bucket, Key: d.key(p.key), Metadata: p.token, Tagging: tag,
		ServerSideEncryption: types.ServerSideEncryption(d.opts.SSE), SSEKMSKeyId: optional(d.opts.SSEKMSKeyID),
		StorageClass: types.StorageClass(d.opts.StorageClass), ChecksumAlgorithm: d.checksum(),
	})
	if err != nil {
		return d.explain(ctx, putAction(&s3.PutObjectInput{Tagging: tag}), err)
	}
	d.bucketMet.Store(true)
	if p.id = aws.ToString(out.UploadId); p.id == "" {
		return blob.Retriable(errors.New("the store began an upload without an id"))
	}
	return nil
}

// checksum is the algorithm of the parts' checksums; an upload has to name it beforehand.
func (d *Driver) checksum() types.ChecksumAlgorithm {
	if d.client.Options().RequestChecksumCalculation == aws.RequestChecksumCalculationWhenSupported {
		return types.ChecksumAlgorithmCrc32
	}
	return ""
}

// upload returns when all parts have been answered. What was wrong with the body counts
// before the broken requests that follow from it.
func (p *parts) upload(ctx context.Context, body blob.Body) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.group, p.ctx = errgroup.WithContext(ctx)
	p.group.SetLimit(p.driver.opts.Parallel)
	err := body.Copy(p.ctx, p)
	if err == nil {
		p.sendPart()
		return p.group.Wait()
	}
	if p.cur != nil {
		p.cur.release()
	}
	own := p.ctx.Err() == nil
	cancel()
	if perr := p.group.Wait(); perr != nil && !own {
		return perr
	}
	return err
}

// Write fills parts and sends them.
func (p *parts) Write(data []byte) (written int, err error) {
	for len(data) > 0 {
		if p.cur == nil {
			n := min(p.partSize, p.size-p.taken)
			if p.cur, err = p.driver.buffers.get(p.ctx, n); err != nil {
				return written, err
			}
			p.taken += n
		}
		n, err := p.cur.Write(data[:min(len(data), p.cur.size-len(p.cur.data))])
		written += n
		if err != nil {
			return written, err
		}
		data = data[n:]
		if p.cur.full() && p.taken < p.size { // the last one waits for the end of the body
			p.sendPart()
		}
	}
	return written, nil
}

// sendPart hands the current part to a goroutine of the group, which upload waits for.
func (p *parts) sendPart() {
	buf := p.cur
	if buf == nil {
		return
	}
	p.cur = nil
	p.count++
	number := p.count
	p.group.Go(func() error {
		defer buf.release()
		return p.part(number, buf.data)
	})
}

// part sends one part, again if that may help: otherwise one broken connection in a large
// body would cost all of it. When the store asks for less, the Store has to know.
func (p *parts) part(number int32, data []byte) error {
	pause := partPause
	for try := 1; ; try++ {
		err := p.tryPart(number, data)
		if err == nil || try == partTries || !blob.IsRetriable(err) || blob.IsThrottled(err) || errors.Is(err, errNoUpload) {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-p.ctx.Done():
			t.Stop()
			return err
		case <-t.C:
		}
		pause *= 2
	}
}

func (p *parts) tryPart(number int32, data []byte) error {
	d := p.driver
	body := newPayload(p.ctx, data)
	defer body.end()
	out, err := d.client.UploadPart(p.ctx, &s3.UploadPartInput{
		Bucket: &d.bucket, Key: d.key(p.key), UploadId: &p.id, PartNumber: &number,
		Body: body, ContentLength: aws.Int64(int64(len(data))), ChecksumAlgorithm: d.checksum(),
	})
	if err != nil {
		return d.explain(p.ctx, putObject, err)
	}
	if aws.ToString(out.ETag) == "" {
		return blob.Retriable(fmt.Errorf("the store took part %d without an ETag", number))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = append(p.done, types.CompletedPart{
		PartNumber: &number, ETag: out.ETag, ChecksumCRC32: out.ChecksumCRC32, ChecksumCRC32C: out.ChecksumCRC32C,
		ChecksumCRC64NVME: out.ChecksumCRC64NVME, ChecksumSHA1: out.ChecksumSHA1, ChecksumSHA256: out.ChecksumSHA256,
	})
	return nil
}

// complete makes the object appear. An error, also one under a status of success, can be
// of an upload that was completed nevertheless, at this try or before: then the object
// carries our token.
func (p *parts) complete(ctx context.Context) error {
	d := p.driver
	slices.SortFunc(p.done, func(a, b types.CompletedPart) int { return cmp.Compare(*a.PartNumber, *b.PartNumber) })
	out, err := d.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
		Bucket: &d.bucket, Key: d.key(p.key), UploadId: &p.id, MultipartUpload: &types.CompletedMultipartUpload{Parts: p.done},
	})
	switch {
	case err != nil:
		err = d.explain(ctx, putObject, err)
	case aws.ToString(out.ETag) == "":
		err = blob.Retriable(errors.New("the store completed an upload without an ETag"))
	}
	if ctx.Err() != nil {
		return cmp.Or(err, ctx.Err())
	}
	return p.check(ctx, err)
}

// check looks at what is there after complete answered err.
func (p *parts) check(ctx context.Context, err error) error {
	d := p.driver
	head, herr := d.head(ctx, p.key)
	switch {
	case errors.Is(herr, fs.ErrNotExist) && err == nil:
		return blob.Retriable(errors.New("the store completed an upload, and the object is not there"))
	case herr != nil && err == nil:
		return herr
	case herr != nil:
		return err
	}
	size := aws.ToInt64(head.ContentLength)
	ours := head.Metadata[tokenName] == p.token[tokenName] && size == p.size
	switch {
	case ours:
		return nil
	case err != nil:
		return err
	case size != p.size:
		return blob.Retriable(fmt.Errorf("the store made an object of %d bytes out of %d", size, p.size))
	}
	return nil // replaced since, or a store that keeps no metadata of uploads
}

// abort removes the parts. It is tried once, and also after a cancellation.
func (p *parts) abort(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTime)
	defer cancel()
	_ = p.driver.abort(ctx, p.driver.prefix+p.key, p.id) // the sweep finds it else
}

func (d *Driver) abort(ctx context.Context, objectKey, id string) error {
	_, err := d.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &d.bucket, Key: &objectKey, UploadId: &id})
	if err = d.explain(ctx, abortUpload, err); errors.Is(err, errNoUpload) {
		return nil
	}
	return err
}
