package s3blob

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/snapferry/snapferry/blob"
)

// GetDeleted implements blob.DeletedReader: it reads the newest version that a delete or a
// replacement has hidden.
func (d *Driver) GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	version, err := d.hiddenVersion(ctx, key)
	if err != nil {
		return nil, err
	}
	if version != nil {
		return d.get(ctx, key, version, offset, length)
	}
	if err := d.needVersions(ctx); err != nil {
		return nil, err
	}
	return nil, fs.ErrNotExist
}

// needVersions is nil if the bucket keeps versions, or has kept some.
func (d *Driver) needVersions(ctx context.Context) error {
	out, err := d.client.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: &d.bucket})
	if err != nil {
		return d.explainBucket(ctx, getVersioning, err)
	}
	if out.Status == "" {
		return fmt.Errorf("%w: the bucket is not versioned", blob.ErrUnsupported)
	}
	return nil
}

// hiddenVersion finds the newest version of key that is not the present one.
func (d *Driver) hiddenVersion(ctx context.Context, key string) (id *string, err error) {
	full := *d.key(key)
	for v, verr := range d.versions(ctx, full, "") {
		if verr != nil || v.name != full {
			return nil, verr
		}
		if !v.marker && !v.latest {
			return v.id, nil
		}
	}
	return nil, nil
}

// ListAt implements blob.TimeLister.
func (d *Driver) ListAt(ctx context.Context, prefix, startAfter string, at time.Time) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if err := d.needVersions(ctx); err != nil {
			yield(blob.Info{}, err)
			return
		}
		done := "" // the key whose version of that time was found
		for v, err := range d.versions(ctx, d.prefix+validPart(prefix), lowerBound(startAfter)) {
			if err != nil {
				yield(blob.Info{}, err)
				return
			}
			if v.name == done || v.modified.After(at) {
				continue
			}
			done = v.name
			key := strings.TrimPrefix(v.name, d.prefix)
			if v.marker || key <= startAfter || !strings.HasPrefix(key, prefix) || blob.ValidKey(key) != nil {
				continue
			}
			if !yield(blob.Info{Key: key, Size: v.size, Modified: d.modified(&v.modified)}, nil) {
				return
			}
		}
	}
}

// version is a version of an object, or a mark that it was deleted.
type version struct {
	name     string // with the driver's prefix
	id       *string
	modified time.Time
	size     int64
	latest   bool
	marker   bool
}

// versions yields the versions of the objects whose names begin with prefix and whose keys
// are above from: names in order, and of each the present one first, then the newest.
func (d *Driver) versions(ctx context.Context, prefix, from string) iter.Seq2[version, error] {
	return func(yield func(version, error) bool) {
		in := &s3.ListObjectVersionsInput{Bucket: &d.bucket, Prefix: optional(prefix), EncodingType: types.EncodingTypeUrl}
		if from != "" {
			in.KeyMarker = d.key(from)
		}
		var held []version // of the last name of a page, which the next one may go on with
		for {
			out, err := d.client.ListObjectVersions(ctx, in)
			if err != nil {
				yield(version{}, d.explainBucket(ctx, listVersions, err))
				return
			}
			d.bucketMet.Store(true)
			page, err := d.versionPage(out)
			if err != nil {
				yield(version{}, err)
				return
			}
			held = append(held, page...)
			more := aws.ToBool(out.IsTruncated)
			if held, err = give(held, more, yield); err != nil || !more {
				return
			}
			if in.KeyMarker, err = nextMarker(out); err != nil {
				yield(version{}, err)
				return
			}
			in.VersionIdMarker = out.NextVersionIdMarker
		}
	}
}

// errEnough is what give returns when nobody wants more.
var errEnough = errors.New("enough")

// give yields versions in order, without those of the last name if more of it may come.
func give(vs []version, more bool, yield func(version, error) bool) (held []version, err error) {
	slices.SortStableFunc(vs, func(a, b version) int { return cmp.Compare(a.name, b.name) })
	for len(vs) > 0 {
		n := 1
		for n < len(vs) && vs[n].name == vs[0].name {
			n++
		}
		if n == len(vs) && more {
			break
		}
		for _, v := range newestFirst(vs[:n]) {
			if !yield(v, nil) {
				return nil, errEnough
			}
		}
		vs = vs[n:]
	}
	return slices.Clone(vs), nil
}

// newestFirst joins the versions of an object and the marks of its deletion, each of which
// the store lists newest first, and apart from each other.
func newestFirst(vs []version) []version {
	var objects, markers, out []version
	for _, v := range vs {
		if v.marker {
			markers = append(markers, v)
		} else {
			objects = append(objects, v)
		}
	}
	for len(objects) > 0 && len(markers) > 0 {
		if markers[0].before(objects[0]) {
			out, markers = append(out, markers[0]), markers[1:]
		} else {
			out, objects = append(out, objects[0]), objects[1:]
		}
	}
	return append(append(out, objects...), markers...)
}

// before tells whether a mark of deletion is newer than a version of the object. Times are
// held against each other by the second, since a store may know one of them no better; the
// present one is the newest whatever its time is.
func (m version) before(object version) bool {
	switch {
	case m.latest || object.latest:
		return m.latest
	}
	return m.modified.Truncate(time.Second).After(object.modified.Truncate(time.Second))
}

func (d *Driver) versionPage(out *s3.ListObjectVersionsOutput) (vs []version, err error) {
	add := func(key *string, v version) {
		name, derr := decode(key, out.EncodingType)
		if derr == nil && !strings.HasPrefix(name, d.prefix) {
			derr = fmt.Errorf("%w: the store listed %q outside of %s", blob.ErrCorrupt, name, d)
		}
		v.name = name
		vs, err = append(vs, v), cmp.Or(err, derr)
	}
	for i := range out.Versions {
		v := &out.Versions[i]
		add(v.Key, version{id: v.VersionId, modified: aws.ToTime(v.LastModified), size: aws.ToInt64(v.Size), latest: aws.ToBool(v.IsLatest)})
	}
	for i := range out.DeleteMarkers {
		m := &out.DeleteMarkers[i]
		add(m.Key, version{id: m.VersionId, modified: aws.ToTime(m.LastModified), latest: aws.ToBool(m.IsLatest), marker: true})
	}
	return vs, err
}

// nextMarker is the key that the next page begins at.
func nextMarker(out *s3.ListObjectVersionsOutput) (*string, error) {
	if aws.ToString(out.NextKeyMarker) == "" {
		return nil, blob.Retriable(errors.New("the store has more versions to list and does not say how to go on"))
	}
	marker, err := decode(out.NextKeyMarker, out.EncodingType)
	return &marker, err
}
