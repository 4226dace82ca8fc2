package azblob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/http"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	azblobs "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	azcontainer "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/snapferry/snapferry/blob"
)

// Get implements blob.Driver.
func (d *Driver) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	return d.open(ctx, d.blob(key), offset, length)
}

// open reads a range of a blob or of one version of it.
func (d *Driver) open(ctx context.Context, b *azblobs.Client, offset, length int64) (io.ReadCloser, error) {
	if length == 0 {
		if _, err := b.GetProperties(ctx, nil); err != nil {
			return nil, d.failed(ctx, err)
		}
		return http.NoBody, nil
	}
	if length < 0 || length > math.MaxInt64-offset {
		length = azblobs.CountToEnd
	}
	resp, err := b.DownloadStream(ctx, &azblobs.DownloadStreamOptions{Range: azblobs.HTTPRange{Offset: offset, Count: length}})
	if r, ok := errors.AsType[*azcore.ResponseError](err); ok && r.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return http.NoBody, nil // it is there, and the range is behind its end
	}
	if err != nil {
		return nil, d.failed(ctx, err)
	}
	if resp.ContentLength == nil || offset > 0 && resp.ContentRange == nil {
		return nil, errors.Join(fmt.Errorf("%w: the store answered a range without saying which", blob.ErrCorrupt), resp.Body.Close())
	}
	return &reader{driver: d, ctx: ctx, body: resp.Body, left: *resp.ContentLength}, nil
}

// reader holds a download to the length that was announced.
type reader struct {
	driver *Driver
	ctx    context.Context // of the Get
	body   io.ReadCloser
	left   int64
	after  func() error // ends what was begun for this reader
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	n, err := r.body.Read(p)
	r.left -= int64(n)
	if err == io.EOF && r.left > 0 {
		return n, blob.Retriable(fmt.Errorf("%w: %d bytes are missing at the end", io.ErrUnexpectedEOF, r.left))
	}
	if err != nil && err != io.EOF {
		err = r.driver.failed(r.ctx, err)
	}
	return n, err
}

// Close implements io.Closer.
func (r *reader) Close() error {
	err := r.body.Close()
	if r.after != nil {
		err = errors.Join(err, r.after())
		r.after = nil
	}
	return err
}

// GetDeleted implements blob.DeletedReader: it reads the newest version where the account
// keeps versions, or else undeletes what soft delete keeps until the reader is closed.
func (d *Driver) GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	version, deleted, err := d.kept(ctx, key)
	switch {
	case err != nil:
		return nil, err
	case version != "":
		b, err := d.blob(key).WithVersionID(version)
		if err != nil {
			return nil, err
		}
		return d.open(ctx, b, offset, length)
	case deleted:
		return d.openUndeleted(ctx, key, offset, length)
	}
	return nil, d.nothingKept(ctx)
}

// kept looks for versions of a blob that is gone, and for the blob under soft delete.
func (d *Driver) kept(ctx context.Context, key string) (version string, deleted bool, err error) {
	name := d.prefix + encodeKey(key)
	o := &azcontainer.ListBlobsFlatOptions{Prefix: &name, Include: azcontainer.ListBlobsInclude{Deleted: true, Versions: true}}
	for pager := d.container.NewListBlobsFlatPager(o); pager.More(); {
		page, err := pager.NextPage(ctx)
		if err != nil {
			return "", false, d.failed(ctx, err)
		}
		for _, item := range page.Segment.BlobItems {
			if item.Name == nil || *item.Name != name {
				return version, deleted, nil // the exact name comes first
			}
			gone := item.Deleted != nil && *item.Deleted
			current := item.IsCurrentVersion != nil && *item.IsCurrentVersion
			if item.VersionID != nil && !gone && !current {
				version = max(version, *item.VersionID) // they are times
			}
			deleted = deleted || gone
		}
	}
	return version, deleted, nil
}

// openUndeleted makes a blob live again, as it cannot be read otherwise, and deletes it again
// afterwards. A crash in between leaves a blob that a sweep removes.
func (d *Driver) openUndeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	b := d.blob(key)
	if _, err := b.Undelete(ctx, nil); err != nil {
		return nil, d.failed(ctx, err)
	}
	remove := func() error { return d.Delete(context.WithoutCancel(ctx), []string{key}) }
	body, err := d.open(ctx, b, offset, length)
	if err != nil {
		return nil, errors.Join(err, remove())
	}
	r, ok := body.(*reader)
	if !ok { // an empty range
		return body, remove()
	}
	r.after = remove
	return r, nil
}

// nothingKept tells an account that keeps nothing from one that does not keep this. Who may
// not ask learns the latter.
func (d *Driver) nothingKept(ctx context.Context) error {
	p, err := d.service.GetProperties(ctx, nil)
	if err != nil {
		if err = d.failed(ctx, err); errors.Is(err, fs.ErrPermission) {
			return fs.ErrNotExist
		}
		return err
	}
	if p.DeleteRetentionPolicy == nil || p.DeleteRetentionPolicy.Enabled == nil || !*p.DeleteRetentionPolicy.Enabled {
		return fmt.Errorf("%w: the storage account has no soft delete", blob.ErrUnsupported)
	}
	return fs.ErrNotExist
}
