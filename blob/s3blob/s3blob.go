// Package s3blob keeps blobs in a bucket of Amazon S3 or of a store that speaks its
// protocol.
//
// It hides the SDK, its middleware and its many errors; how a large body becomes parts
// and what is done when an answer is lost; how objects expire by tags and lifecycle
// rules; and where stores differ from S3. ParseURL reads s3://BUCKET/PREFIX?NAME=VALUE,
// Open takes the same as Options, and a Driver does the rest. Credentials come from
// where every AWS program looks for them and never from a URL.
//
// Contract: that of blob.Driver. The store needs strong consistency, listings in byte
// order and conditional puts (If-None-Match: *), which S3 and its better relatives have;
// blob.Store.Probe finds those that have not. A body of up to Options.SinglePut bytes is
// one request; a larger one goes in parts, several at a time, and cannot be conditional.
// Bodies are buffered, so that a part can be sent again, save those that lie in memory and
// go in one request; Options.Buffers bounds the memory of all puts together. The driver does not repeat requests, except for a single part:
// the Store above could only send the whole body again.
//
// Limits: directory buckets (S3 Express) list in no order and are refused, and so are the
// storage classes that have to be thawed. Times are whole seconds.
package s3blob

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/snapferry/snapferry/blob"
)

// Driver is a prefix of a bucket.
type Driver struct {
	client  *s3.Client
	bucket  string
	prefix  string // "" or ends with a slash
	opts    Options
	buffers *buffers

	closeIdle func()

	met       atomic.Bool  // the store has answered
	bucketMet atomic.Bool  // the bucket is known to exist
	oneByOne  atomic.Bool  // the store does not take batches of deletes
	newest    atomic.Int64 // the latest time seen on an object, in Unix seconds

	mu       sync.Mutex
	untagged map[string]bool // mu guards; put without the tag that was asked for
	warned   map[string]bool // mu guards
}

var (
	_ blob.Driver        = (*Driver)(nil)
	_ blob.Clock         = (*Driver)(nil)
	_ blob.DeletedReader = (*Driver)(nil)
	_ blob.TempSweeper   = (*Driver)(nil)
	_ blob.Expirer       = (*Driver)(nil)
)

// Open makes a driver for a bucket, which has to exist. It reads configuration files and
// the environment and sends nothing: what is wrong with the bucket or the credentials is
// told by the first operation.
func Open(ctx context.Context, bucket string, opts *Options) (*Driver, error) {
	o, err := opts.withDefaults()
	if err == nil {
		err = checkBucket(bucket)
	}
	if err != nil {
		return nil, fmt.Errorf("open s3://%s: %w", bucket, err)
	}
	client, closeIdle, err := newClient(ctx, &o)
	if err != nil {
		return nil, fmt.Errorf("open s3://%s: %w", bucket, err)
	}
	d := &Driver{client: client, bucket: bucket, opts: o, buffers: newBuffers(o.Buffers), closeIdle: closeIdle}
	if o.Prefix != "" {
		d.prefix = o.Prefix + "/"
	}
	return d, nil
}

// String is the store's URL without parameters.
func (d *Driver) String() string {
	if d.opts.Prefix == "" {
		return "s3://" + d.bucket
	}
	return "s3://" + d.bucket + "/" + d.opts.Prefix
}

// key is the name of an object in the bucket.
func (d *Driver) key(key string) *string { return aws.String(d.prefix + key) }

// warn tells of a restriction once.
func (d *Driver) warn(text string) {
	d.mu.Lock()
	first := !d.warned[text]
	if d.warned == nil {
		d.warned = map[string]bool{}
	}
	d.warned[text] = true
	d.mu.Unlock()
	if first && d.opts.Warn != nil {
		d.opts.Warn(text)
	}
}

// Now implements blob.Clock by the Date of an answer about the bucket. A refusal has one
// too. Some servers compute it once a second, so that it can lie before the time of an
// object that is there already; Now never does.
func (d *Driver) Now(ctx context.Context) (time.Time, error) {
	now, err := d.date(ctx)
	if err == nil && now.Unix() < d.newest.Load() {
		now = time.Unix(d.newest.Load(), 0).UTC()
	}
	return now, err
}

func (d *Driver) date(ctx context.Context) (time.Time, error) {
	out, err := d.client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &d.bucket})
	if err != nil {
		if now, ok := refusalDate(err); ok && ctx.Err() == nil {
			return now, nil
		}
		return time.Time{}, d.explainBucket(ctx, listBucket, err)
	}
	d.bucketMet.Store(true)
	if now, ok := serverTime(out.ResultMetadata); ok {
		return now, nil
	}
	return time.Time{}, fmt.Errorf("%w: answers have no Date", blob.ErrUnsupported)
}

// modified is the time of an object in the unit that all answers have: HEAD knows whole
// seconds only.
func (d *Driver) modified(t *time.Time) time.Time {
	at := aws.ToTime(t).Truncate(time.Second)
	for seen := d.newest.Load(); at.Unix() > seen && !d.newest.CompareAndSwap(seen, at.Unix()); seen = d.newest.Load() {
	}
	return at
}

// Close implements blob.Driver.
func (d *Driver) Close() error {
	d.closeIdle()
	return nil
}
