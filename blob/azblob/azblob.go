// Package azblob keeps blobs in a container of Azure Blob Storage.
//
// It hides the client library and its many errors, how a large body becomes blocks, and what
// Azure makes of unusual names. ParseURL reads azblob://CONTAINER/PREFIX?NAME=VALUE, Open
// takes the same as Options, and a Driver does the rest. Credentials come from the
// environment or from Azure's default chain, and never from a URL.
//
// Contract: that of blob.Driver. A small body is one request; a larger one is staged in
// blocks, several at a time, that nobody sees before one last request names them all. Both are
// conditional where the object has to be new. Every body carries its MD5. The driver does
// not repeat requests: that is the Store's part.
//
// Limits: a prefix has at most 120 bytes. A name of Azure has at most 1,024 characters, so a
// key of nearly blob.MaxKey bytes is refused if many of them are control characters or
// backslashes. Azure expires blobs only by a rule of the account's owner; see
// Options.ExpiryTags. Times are whole seconds.
package azblob

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

	azcontainer "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/service"

	azblobs "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"

	"github.com/snapferry/snapferry/blob"
)

// Driver is a prefix of a container.
type Driver struct {
	service   *service.Client
	container *azcontainer.Client
	base      *http.Transport
	name      string
	prefix    string // "" or ends with a slash
	tags      bool

	met atomic.Bool // the store has answered
}

var (
	_ blob.Driver        = (*Driver)(nil)
	_ blob.Clock         = (*Driver)(nil)
	_ blob.DeletedReader = (*Driver)(nil)
	_ blob.Expirer       = (*Driver)(nil)
)

// Open makes a driver for a container, which has to exist. It reads the environment and sends
// nothing: what is wrong with the container or the credentials is told by the first
// operation.
func Open(container string, opts *Options) (*Driver, error) {
	o, err := opts.withDefaults()
	if err == nil {
		err = checkContainer(container)
	}
	if err != nil {
		return nil, fmt.Errorf("open azblob://%s: %w", container, err)
	}
	d := &Driver{name: container, base: http.DefaultTransport.(*http.Transport).Clone(), tags: o.ExpiryTags}
	if o.Prefix != "" {
		d.prefix = o.Prefix + "/"
	}
	d.base.MaxIdleConnsPerHost = parallel
	d.base.DisableCompression = true
	if d.service, err = connect(o, d.base); err != nil {
		return nil, fmt.Errorf("open azblob://%s: %w", container, err)
	}
	d.container = d.service.NewContainerClient(container)
	return d, nil
}

// String is the store's URL without parameters.
func (d *Driver) String() string {
	return strings.TrimSuffix("azblob://"+d.name+"/"+d.prefix, "/")
}

// Close implements blob.Driver.
func (d *Driver) Close() error {
	d.base.CloseIdleConnections()
	return nil
}

func (d *Driver) blob(key string) *azblobs.Client {
	return d.container.NewBlobClient(d.prefix + encodeKey(key))
}

// Stat implements blob.Driver.
func (d *Driver) Stat(ctx context.Context, key string) (blob.Info, error) {
	p, err := d.blob(key).GetProperties(ctx, nil)
	if err != nil {
		return blob.Info{}, d.failed(ctx, err)
	}
	return info(key, p.ContentLength, p.LastModified)
}

// info refuses an answer without what every blob has.
func info(key string, size *int64, modified *time.Time) (blob.Info, error) {
	if size == nil || modified == nil {
		return blob.Info{}, fmt.Errorf("%w: the store told no size or no time of %q", blob.ErrCorrupt, key)
	}
	return blob.Info{Key: key, Size: *size, Modified: *modified}, nil
}

// List implements blob.Driver. The store begins at a name, not behind it, and an emulator may
// begin at the first one.
func (d *Driver) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if strings.Contains(prefix, "\x00") {
			return // no key has that, and the store does not take it
		}
		names := d.prefix + encodePrefix(prefix)
		o := &azcontainer.ListBlobsFlatOptions{Prefix: &names}
		if startAfter != "" {
			from := d.prefix + encodePrefix(startAfter)
			o.StartFrom = &from
		}
		for pager := d.container.NewListBlobsFlatPager(o); pager.More(); {
			page, err := pager.NextPage(ctx)
			if err != nil {
				yield(blob.Info{}, d.failed(ctx, err))
				return
			}
			blob.Moved(ctx)
			for _, item := range page.Segment.BlobItems {
				key, ok := d.key(item)
				if !ok || key <= startAfter || !strings.HasPrefix(key, prefix) {
					continue
				}
				found, err := info(key, item.Properties.ContentLength, item.Properties.LastModified)
				if !yield(found, err) || err != nil {
					return
				}
			}
		}
	}
}

// key is the key of a listed blob. It is not ok for what is not ours.
func (d *Driver) key(item *azcontainer.BlobItem) (string, bool) {
	if item.Name == nil || item.Properties == nil {
		return "", false
	}
	name, ok := strings.CutPrefix(*item.Name, d.prefix)
	if !ok {
		return "", false
	}
	key, ok := decodeKey(name)
	return key, ok && blob.ValidKey(key) == nil
}

// parallel is how many keys of one call are worked at at a time.
const parallel = 16

// Delete implements blob.Driver.
func (d *Driver) Delete(ctx context.Context, keys []string) error {
	withSnapshots := azblobs.DeleteSnapshotsOptionTypeInclude
	o := &azblobs.DeleteOptions{DeleteSnapshots: &withSnapshots}
	return blob.EachKey(ctx, keys, parallel, func(key string) error {
		_, err := d.blob(key).Delete(ctx, o)
		if err = d.failed(ctx, err); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// tagName marks what a rule of the account may remove, with the number of days.
const tagName = "snapferry-expire"

// RemoveTTL implements blob.Driver.
func (d *Driver) RemoveTTL(ctx context.Context, keys []string) error {
	return blob.EachKey(ctx, keys, parallel, func(key string) error {
		if !d.tags {
			_, err := d.Stat(ctx, key)
			return err
		}
		_, err := d.blob(key).SetTags(ctx, map[string]string{}, nil)
		return d.failed(ctx, err)
	})
}

// InstallExpiry implements blob.Expirer. The rule belongs to the account and not to the
// container, so its owner has made it before Options.ExpiryTags is given.
func (d *Driver) InstallExpiry(_ context.Context, ttl time.Duration) error {
	if !d.tags {
		return fmt.Errorf("%w: on Azure the account's owner makes the rule that expires blobs; say expiry-tags=true when it is there (docs/azure.md)", blob.ErrUnsupported)
	}
	if ttl < minTTL || ttl%day != 0 {
		return fmt.Errorf("blobs can expire after whole days, at least %d, and not after %v", minTTL/day, ttl)
	}
	return nil
}

// Now implements blob.Clock.
func (d *Driver) Now(ctx context.Context) (time.Time, error) {
	p, err := d.container.GetProperties(ctx, nil)
	if err != nil {
		return time.Time{}, d.failed(ctx, err)
	}
	if p.Date == nil {
		return time.Time{}, fmt.Errorf("%w: the store's answers have no date", blob.ErrUnsupported)
	}
	return *p.Date, nil
}
