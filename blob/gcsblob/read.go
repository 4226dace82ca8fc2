package gcsblob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/http"
	"strings"

	"cloud.google.com/go/storage"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/iterator"

	"github.com/snapferry/snapferry/blob"
)

// Get implements blob.Driver.
func (d *Driver) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	return d.open(ctx, d.object(key), offset, length)
}

// open reads a range of an object or of one generation of it.
func (d *Driver) open(ctx context.Context, obj *storage.ObjectHandle, offset, length int64) (io.ReadCloser, error) {
	if length > math.MaxInt64-offset {
		length = -1
	}
	if length == 0 {
		if _, err := obj.Attrs(ctx); err != nil {
			return nil, d.failed(ctx, err)
		}
		return http.NoBody, nil
	}
	r, err := obj.NewRangeReader(ctx, offset, length)
	if g, ok := errors.AsType[*googleapi.Error](err); ok && g.Code == http.StatusRequestedRangeNotSatisfiable {
		return http.NoBody, nil // it is there, and the range is behind its end
	}
	if err != nil {
		return nil, d.failed(ctx, err)
	}
	if offset > 0 && r.Attrs.StartOffset != offset {
		return nil, errors.Join(fmt.Errorf("%w: the store gave bytes from %d on, not from %d", blob.ErrCorrupt, r.Attrs.StartOffset, offset), r.Close())
	}
	return &reader{driver: d, ctx: ctx, r: r, left: r.Remain()}, nil
}

// reader holds a download to the length that was announced.
type reader struct {
	driver *Driver
	ctx    context.Context // of the Get
	r      *storage.Reader
	left   int64
	after  func() error // ends what was begun for this reader
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.left -= int64(n)
	switch {
	case err == nil:
		return n, nil
	case err == io.EOF && r.left > 0:
		return n, blob.Retriable(fmt.Errorf("%w: %d bytes are missing at the end", io.ErrUnexpectedEOF, r.left))
	case err == io.EOF:
		return n, err
	case strings.Contains(err.Error(), "bad CRC"): // the library has no error value for it
		return n, fmt.Errorf("%w: %w", blob.ErrCorrupt, err)
	}
	return n, r.driver.failed(r.ctx, err)
}

// Close implements io.Closer.
func (r *reader) Close() error {
	err := r.r.Close()
	if r.after != nil {
		err = errors.Join(err, r.after())
		r.after = nil
	}
	return err
}

// GetDeleted implements blob.DeletedReader: it reads the newest generation that the bucket's
// versioning keeps, or else restores the one that soft delete keeps until the reader is
// closed.
func (d *Driver) GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	old, err := d.newest(ctx, key, &storage.Query{Versions: true})
	if err == nil && old != nil {
		return d.open(ctx, d.object(key).Generation(old.Generation), offset, length)
	}
	if err != nil {
		return nil, err
	}
	old, err = d.newest(ctx, key, &storage.Query{SoftDeleted: true})
	if err != nil || old == nil {
		return nil, d.nothingKept(ctx, err)
	}
	return d.openRestored(ctx, key, old.Generation, offset, length)
}

// newest is the newest generation of a key that is not the live one, or nil.
func (d *Driver) newest(ctx context.Context, key string, q *storage.Query) (*storage.ObjectAttrs, error) {
	name := d.prefix + encodeKey(key)
	q.Prefix, q.Projection = name, storage.ProjectionNoACL
	var found *storage.ObjectAttrs
	for it := d.bucket.Objects(ctx, q); ; {
		attrs, err := it.Next()
		if errors.Is(err, iterator.Done) || err == nil && attrs.Name != name {
			return found, nil // the exact name comes first
		}
		if err != nil {
			return nil, d.failed(ctx, err)
		}
		gone := !attrs.Deleted.IsZero() || !attrs.SoftDeleteTime.IsZero()
		if gone && (found == nil || attrs.Generation > found.Generation) {
			found = attrs
		}
	}
}

// nothingKept tells a bucket that keeps nothing from one that does not keep this.
func (d *Driver) nothingKept(ctx context.Context, softErr error) error {
	attrs, err := d.bucket.Attrs(ctx)
	if err != nil {
		return d.failed(ctx, err)
	}
	soft := attrs.SoftDeletePolicy != nil && attrs.SoftDeletePolicy.RetentionDuration > 0
	switch {
	case !soft && !attrs.VersioningEnabled:
		return fmt.Errorf("%w: bucket %s has neither versioning nor soft delete", blob.ErrUnsupported, d.name)
	case soft && softErr != nil:
		return softErr
	}
	return fs.ErrNotExist
}

// openRestored makes a soft-deleted generation live again, as it cannot be read otherwise, and
// deletes it again afterwards. A crash in between leaves an object that a sweep removes.
func (d *Driver) openRestored(ctx context.Context, key string, generation, offset, length int64) (io.ReadCloser, error) {
	obj := d.object(key)
	attrs, err := obj.Generation(generation).Restore(ctx, &storage.RestoreOptions{})
	if err != nil {
		return nil, d.failed(ctx, err)
	}
	restored := obj.Generation(attrs.Generation)
	remove := func() error { return restored.Delete(context.WithoutCancel(ctx)) }
	body, err := d.open(ctx, restored, offset, length)
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
