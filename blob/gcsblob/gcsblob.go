// Package gcsblob keeps blobs in a bucket of Google Cloud Storage.
//
// It hides the client library, its retries and its many errors, and how objects expire.
// ParseURL reads gs://BUCKET/PREFIX?NAME=VALUE, Open takes the same as Options, and a Driver
// does the rest. Credentials are Google's application default ones and never in a URL.
//
// Contract: that of blob.Driver. Each put is one request, which either stores the whole
// object or nothing, with the precondition that no generation exists where it has to be
// new. The store and the driver compare CRC32C both ways. The driver does not repeat requests,
// except that a broken download goes on once by itself: that is the Store's part.
//
// Limits: a prefix has at most 120 bytes, so that a key fits behind it. A deleted object can be
// read while the bucket's versioning or soft delete keeps it; with soft delete it is
// restored for that time, so others see it meanwhile.
package gcsblob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"cloud.google.com/go/storage"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"
	transport "google.golang.org/api/transport/http"

	"github.com/snapferry/snapferry/blob"
)

// Driver is a prefix of a bucket.
type Driver struct {
	client *storage.Client
	base   *http.Transport
	bucket *storage.BucketHandle
	name   string
	prefix string // "" or ends with a slash

	met       atomic.Bool // the store has answered
	bucketMet atomic.Bool // the bucket is known to exist
}

var (
	_ blob.Driver        = (*Driver)(nil)
	_ blob.Clock         = (*Driver)(nil)
	_ blob.DeletedReader = (*Driver)(nil)
	_ blob.Expirer       = (*Driver)(nil)
)

// Open makes a driver for a bucket, which has to exist. It reads credentials and sends nothing
// to the bucket: what is wrong with it is told by the first operation.
func Open(ctx context.Context, bucket string, opts *Options) (*Driver, error) {
	o, err := opts.withDefaults()
	if err == nil {
		err = checkBucket(bucket)
	}
	if err != nil {
		return nil, fmt.Errorf("open gs://%s: %w", bucket, err)
	}
	d := &Driver{name: bucket, base: http.DefaultTransport.(*http.Transport).Clone()}
	if o.Prefix != "" {
		d.prefix = o.Prefix + "/"
	}
	// The credentials outlive the opening.
	if err := d.connect(context.WithoutCancel(ctx), o); err != nil {
		return nil, fmt.Errorf("open gs://%s: %w", bucket, err)
	}
	return d, nil
}

// connect makes the client over a transport of this driver's own, which Close can close.
func (d *Driver) connect(ctx context.Context, o Options) error {
	d.base.MaxIdleConnsPerHost = parallel
	d.base.DisableCompression = true
	var auth []option.ClientOption
	if o.Anonymous {
		auth = append(auth, option.WithoutAuthentication())
	} else {
		auth = append(auth, option.WithScopes(storage.ScopeFullControl))
	}
	var inner http.RoundTripper = d.base
	if o.around != nil {
		inner = o.around(inner)
	}
	authed, err := transport.NewTransport(ctx, &clockTransport{inner}, auth...)
	if err != nil {
		return fmt.Errorf("no credentials (set GOOGLE_APPLICATION_CREDENTIALS, run gcloud auth application-default login, or say anonymous=true): %w", err)
	}
	clientOptions := []option.ClientOption{option.WithHTTPClient(&http.Client{Transport: authed}), storage.WithJSONReads()}
	if o.Endpoint != "" {
		clientOptions = append(clientOptions, option.WithEndpoint(o.Endpoint+"/storage/v1/"))
	}
	if d.client, err = storage.NewClient(ctx, clientOptions...); err != nil {
		return err
	}
	d.client.SetRetry(storage.WithPolicy(storage.RetryNever))
	d.bucket = d.client.Bucket(d.name)
	if o.UserProject != "" {
		d.bucket = d.bucket.UserProject(o.UserProject)
	}
	return nil
}

// String is the store's URL without parameters.
func (d *Driver) String() string {
	s := "gs://" + d.name
	if d.prefix != "" {
		s += "/" + d.prefix[:len(d.prefix)-1]
	}
	return s
}

// Close implements blob.Driver.
func (d *Driver) Close() error {
	err := d.client.Close()
	d.base.CloseIdleConnections()
	return err
}

func (d *Driver) object(key string) *storage.ObjectHandle {
	return d.bucket.Object(d.prefix + encodeKey(key))
}

// Stat implements blob.Driver.
func (d *Driver) Stat(ctx context.Context, key string) (blob.Info, error) {
	attrs, err := d.object(key).Attrs(ctx)
	if err != nil {
		return blob.Info{}, d.failed(ctx, err)
	}
	return blob.Info{Key: key, Size: attrs.Size, Modified: attrs.Created}, nil
}

// whole leaves out a last character that is cut in two, as the store takes UTF-8 only.
func whole(s string) string {
	for i, r := range s {
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(s[i:]); n <= 1 {
				return s[:i]
			}
		}
	}
	return s
}

// listed is what a listing has to tell of an object.
var listed = []string{"Name", "Size", "Created"}

// List implements blob.Driver. The store begins at a name, not behind it.
func (d *Driver) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if strings.Contains(prefix, "\x00") {
			return // no key has that, and not every store takes it
		}
		q := &storage.Query{Prefix: d.prefix + encodeKey(whole(prefix)), Projection: storage.ProjectionNoACL}
		if startAfter != "" {
			q.StartOffset = d.prefix + encodeKey(whole(startAfter))
		}
		err := q.SetAttrSelection(listed)
		for it := d.bucket.Objects(ctx, q); err == nil; {
			var attrs *storage.ObjectAttrs
			if attrs, err = it.Next(); err != nil {
				break
			}
			key, ok := decodeKey(attrs.Name[len(d.prefix):])
			if !ok || key <= startAfter || !strings.HasPrefix(key, prefix) || blob.ValidKey(key) != nil {
				continue // not asked for, or not one of ours
			}
			if !yield(blob.Info{Key: key, Size: attrs.Size, Modified: attrs.Created}, nil) {
				return
			}
		}
		if !errors.Is(err, iterator.Done) {
			yield(blob.Info{}, d.failed(ctx, err))
		}
	}
}

// parallel is how many keys of one call are worked at at a time: the store has no requests
// for many.
const parallel = 16

// Delete implements blob.Driver.
func (d *Driver) Delete(ctx context.Context, keys []string) error {
	return blob.EachKey(ctx, keys, parallel, func(key string) error {
		err := d.object(key).Delete(ctx)
		if err == nil {
			return nil
		}
		if err = d.failed(ctx, err); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// Now implements blob.Clock: it is the date of the answer to a short listing.
func (d *Driver) Now(ctx context.Context) (time.Time, error) {
	var date answerDate
	err := d.reach(context.WithValue(ctx, dateKey{}, &date))
	if err != nil {
		return time.Time{}, d.failed(ctx, err)
	}
	now := date.Load()
	if now == nil {
		return time.Time{}, fmt.Errorf("%w: the store's answers have no date", blob.ErrUnsupported)
	}
	return *now, nil
}

// reach lists at most one object.
func (d *Driver) reach(ctx context.Context) error {
	q := &storage.Query{Prefix: d.prefix, Projection: storage.ProjectionNoACL}
	it := d.bucket.Objects(ctx, q)
	it.PageInfo().MaxSize = 1
	if _, err := it.Next(); err != nil && !errors.Is(err, iterator.Done) {
		return err
	}
	return nil
}

type (
	dateKey    struct{}
	answerDate = atomic.Pointer[time.Time]
)

// clockTransport gives the date of an answer to a caller who asks for it in the context.
type clockTransport struct{ inner http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (c *clockTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.inner.RoundTrip(req)
	if date, ok := req.Context().Value(dateKey{}).(*answerDate); ok && err == nil {
		if t, terr := http.ParseTime(resp.Header.Get("Date")); terr == nil {
			date.Store(&t)
		}
	}
	return resp, err
}
