package s3blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/snapferry/snapferry/blob"
)

// Stat implements blob.Driver.
func (d *Driver) Stat(ctx context.Context, key string) (blob.Info, error) {
	out, err := d.head(ctx, key)
	if err != nil {
		return blob.Info{}, err
	}
	return blob.Info{Key: key, Size: aws.ToInt64(out.ContentLength), Modified: d.modified(out.LastModified)}, nil
}

// head is HEAD of an object. Its answers have no body, so the absence of the bucket looks
// like that of the object: it is asked for once.
func (d *Driver) head(ctx context.Context, key string) (*s3.HeadObjectOutput, error) {
	out, err := d.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &d.bucket, Key: d.key(key)})
	if err == nil {
		d.bucketMet.Store(true)
		return out, nil
	}
	err = d.explain(ctx, getObject, err)
	if errors.Is(err, fs.ErrNotExist) && !d.bucketMet.Load() {
		if berr := d.needBucket(ctx); berr != nil {
			return nil, berr
		}
	}
	return nil, err
}

// needBucket is nil unless the bucket is known not to be there.
func (d *Driver) needBucket(ctx context.Context) error {
	_, err := d.client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &d.bucket})
	if err == nil {
		d.bucketMet.Store(true)
		return nil
	}
	if err = d.explainBucket(ctx, listBucket, err); errors.Is(err, fs.ErrPermission) {
		return nil // who may read but not list has a bucket
	}
	return err
}

// Get implements blob.Driver.
func (d *Driver) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	return d.get(ctx, key, nil, offset, length)
}

func (d *Driver) get(ctx context.Context, key string, version *string, offset, length int64) (io.ReadCloser, error) {
	in := &s3.GetObjectInput{Bucket: &d.bucket, Key: d.key(key), VersionId: version}
	want := span{offset: offset, length: length}
	if length == 0 {
		want.length = 1 // no range is empty
	}
	in.Range = want.header()
	out, err := d.client.GetObject(ctx, in)
	if err != nil {
		err = d.explain(ctx, getObject, err)
		if errors.Is(err, errPastEnd) {
			return d.pastEnd(ctx, key, version, offset)
		}
		return nil, err
	}
	d.bucketMet.Store(true)
	left, err := want.check(out)
	if err != nil || length == 0 {
		_ = out.Body.Close() // nothing of it is used
		return empty(), err
	}
	return &stream{ctx: ctx, driver: d, body: out.Body, left: left}, nil
}

func empty() io.ReadCloser { return io.NopCloser(bytes.NewReader(nil)) }

// pastEnd is for a range that the store refused: nothing if the object is there and really
// ends before it.
func (d *Driver) pastEnd(ctx context.Context, key string, version *string, offset int64) (io.ReadCloser, error) {
	if version != nil {
		return empty(), nil
	}
	out, err := d.head(ctx, key)
	if err != nil {
		return nil, err
	}
	if size := aws.ToInt64(out.ContentLength); size > offset {
		return nil, blob.Retriable(fmt.Errorf("the store refused a range at %d of an object of %d bytes", offset, size))
	}
	return empty(), nil
}

// span is a range of an object; length < 0 means to the end.
type span struct{ offset, length int64 }

// header is the value of Range, nil for a whole object.
func (s span) header() *string {
	switch {
	case s.offset == 0 && s.length < 0:
		return nil
	case s.length < 0 || s.offset > math.MaxInt64-s.length:
		return aws.String(fmt.Sprintf("bytes=%d-", s.offset))
	}
	return aws.String(fmt.Sprintf("bytes=%d-%d", s.offset, s.offset+s.length-1))
}

// check holds the head of an answer against what was asked, and returns the bytes to come.
func (s span) check(out *s3.GetObjectOutput) (left int64, err error) {
	if out.ContentLength == nil || *out.ContentLength < 0 {
		return 0, fmt.Errorf("%w: the store sends an object without its length", blob.ErrUnsupported)
	}
	length := *out.ContentLength
	if s.header() == nil {
		return length, nil
	}
	first, last, total := int64(0), length-1, length
	if r := aws.ToString(out.ContentRange); r != "" {
		if _, err := fmt.Sscanf(r, "bytes %d-%d/%d", &first, &last, &total); err != nil {
			return 0, fmt.Errorf("%w: the store answered a range with %q", blob.ErrUnsupported, r)
		}
	}
	end := total
	if s.length >= 0 && s.length < total-s.offset {
		end = s.offset + s.length
	}
	if first != s.offset || last != end-1 || length != last-first+1 {
		return 0, blob.Retriable(fmt.Errorf("asked for %s, the store sends %d bytes of %d-%d/%d", *s.header(), length, first, last, total))
	}
	return length, nil
}

// stream is the body of an answer, which has to have all bytes that its head promised.
type stream struct {
	ctx    context.Context // of the Get
	driver *Driver
	body   io.ReadCloser
	left   int64
}

func (s *stream) Read(p []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	n, err := s.body.Read(p[:min(int64(len(p)), s.left)])
	s.left -= int64(n)
	switch {
	case s.left == 0:
		return n, nil
	case err == nil:
		return n, nil
	case s.ctx.Err() != nil:
		return n, s.ctx.Err()
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	}
	return n, blob.Retriable(fmt.Errorf("the answer broke %d bytes before its end: %w", s.left, err))
}

func (s *stream) Close() error {
	if s.left > 0 {
		_ = s.body.Close() // cut off on purpose
		return nil
	}
	return s.body.Close()
}
