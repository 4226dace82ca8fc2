package s3blob

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/snapferry/snapferry/blob"
)

// Put implements blob.Driver.
func (d *Driver) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	single := d.opts.SinglePut
	if opts.IfAbsent {
		single = max(single, defaultSinglePut) // not all stores keep a condition on more than one request
	}
	if body.Size <= single {
		return d.putSingle(ctx, key, body, opts)
	}
	if opts.IfAbsent {
		return fmt.Errorf("%w: a conditional put of %d bytes: one request takes at most %d here, and not all stores keep a condition on more than one", blob.ErrUnsupported, body.Size, single)
	}
	return d.putParts(ctx, key, body, opts)
}

// putSingle reads the whole body first, so what is wrong with it never reaches the store.
func (d *Driver) putSingle(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	data, release, err := d.load(ctx, body)
	if err != nil {
		return err
	}
	defer release()
	in := &s3.PutObjectInput{Bucket: &d.bucket, Key: d.key(key), Metadata: newToken()}
	if opts.IfAbsent {
		in.IfNoneMatch = aws.String("*")
	}
	d.opts.decorate(in, opts.IfAbsent)
	return d.withTag(key, opts.TTL, func(tag *string) error {
		in.Tagging = tag
		return d.send(ctx, in, data)
	})
}

// load brings a body into memory, unless that is where it is.
func (d *Driver) load(ctx context.Context, body blob.Body) (data []byte, release func(), err error) {
	if data, err = body.Memory(ctx); data != nil || err != nil {
		return data, func() {}, err
	}
	buf, err := d.buffers.get(ctx, body.Size)
	if err != nil {
		return nil, nil, err
	}
	err = body.Copy(ctx, buf)
	if err == nil && !buf.full() {
		err = fmt.Errorf("%d of %d bytes of the body arrived", len(buf.data), body.Size)
	}
	if err != nil {
		buf.release()
		return nil, nil, err
	}
	return buf.data, buf.release, nil
}

// send puts the object. Nothing reads data any more when it has returned.
func (d *Driver) send(ctx context.Context, in *s3.PutObjectInput, data []byte) error {
	p := newPayload(ctx, data)
	defer p.end()
	in.Body, in.ContentLength = p, aws.Int64(int64(len(data)))
	_, err := d.client.PutObject(ctx, in)
	if err != nil {
		return d.clash(ctx, *in.Key, d.explain(ctx, putAction(in), err))
	}
	d.bucketMet.Store(true)
	return nil
}

// clash looks closer at why an object could not be put. Stores that keep objects as files
// say that it exists, or that a directory is in its place, when there are objects below it;
// it may also have been removed since, or another request is about to remove the directory.
func (d *Driver) clash(ctx context.Context, objectKey string, err error) error {
	a, answered := errors.AsType[*answer](err)
	exists := errors.Is(err, fs.ErrExist)
	if !exists && !(answered && a.code == "ExistingObjectIsDirectory") {
		return err
	}
	if exists {
		_, herr := d.head(ctx, strings.TrimPrefix(objectKey, d.prefix))
		if !errors.Is(herr, fs.ErrNotExist) {
			return err
		}
		err = errors.New("the store says that it exists, and it does not")
	}
	out, lerr := d.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &d.bucket, Prefix: aws.String(objectKey + "/"), MaxKeys: aws.Int32(1)})
	if lerr == nil && len(out.Contents) > 0 {
		return fmt.Errorf("there are objects below it: %w", err)
	}
	return blob.Retriable(err)
}

func putAction(in *s3.PutObjectInput) action {
	if in.Tagging != nil {
		return putTagged
	}
	return putObject
}

// withTag puts with the tag for ttl. Who may put but not tag puts without: the object does
// not expire then, and the sweep removes it when it has to go (P9).
func (d *Driver) withTag(key string, ttl time.Duration, put func(tag *string) error) error {
	tag := tagFor(ttl)
	err := put(tag)
	if tag == nil || !errors.Is(err, fs.ErrPermission) {
		return err
	}
	refused := err
	if err = put(nil); err != nil {
		return err
	}
	d.mu.Lock()
	if d.untagged == nil {
		d.untagged = map[string]bool{}
	}
	d.untagged[key] = true
	d.mu.Unlock()
	d.warn(fmt.Sprintf("objects are put without an expiry, which the sweep makes up for: %v", refused))
	return nil
}

// tokenName is the metadata by which a writer knows its own object.
const tokenName = "snapferry-put"

func newToken() map[string]string { return map[string]string{tokenName: rand.Text()} }
