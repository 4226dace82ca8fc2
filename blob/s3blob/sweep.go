package s3blob

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/snapferry/snapferry/blob"
)

// staleUpload is the age at which an unfinished upload in parts counts as left behind. It
// is many times what a put of one body takes. Should its writer live nevertheless, it
// finds the upload gone and sends that one body again: no checkpoint can name an object
// whose put was not answered (P5c), so none is hurt.
const staleUpload = 24 * time.Hour

// SweepTemp implements blob.TempSweeper: it aborts the uploads below the prefix that were
// begun long ago by the store's clock, and so frees the parts, which cost money and show
// in no listing of objects.
func (d *Driver) SweepTemp(ctx context.Context) (int, error) {
	return d.sweepUploads(ctx, staleUpload)
}

func (d *Driver) sweepUploads(ctx context.Context, age time.Duration) (n int, err error) {
	var now time.Time
	in := &s3.ListMultipartUploadsInput{Bucket: &d.bucket, Prefix: optional(d.prefix), EncodingType: types.EncodingTypeUrl}
	for {
		out, err := d.client.ListMultipartUploads(ctx, in)
		if err != nil {
			return n, d.explainBucket(ctx, listUploads, err)
		}
		if len(out.Uploads) > 0 && now.IsZero() {
			if now, err = d.Now(ctx); err != nil {
				return n, err
			}
		}
		for i := range out.Uploads {
			swept, err := d.sweepUpload(ctx, &out.Uploads[i], out.EncodingType, now.Add(-age))
			if err != nil {
				return n, err
			}
			if swept {
				n++
			}
		}
		if !aws.ToBool(out.IsTruncated) {
			return n, nil
		}
		if aws.ToString(out.NextKeyMarker) == "" {
			return n, blob.Retriable(errors.New("the store has more uploads to list and does not say how to go on"))
		}
		marker, err := decode(out.NextKeyMarker, out.EncodingType)
		if err != nil {
			return n, err
		}
		in.KeyMarker, in.UploadIdMarker = &marker, out.NextUploadIdMarker
	}
}

// sweepUpload aborts one upload if it was begun before limit and is one of ours.
func (d *Driver) sweepUpload(ctx context.Context, u *types.MultipartUpload, encoding types.EncodingType, limit time.Time) (bool, error) {
	name, err := decode(u.Key, encoding)
	if err != nil {
		return false, err
	}
	key, ok := strings.CutPrefix(name, d.prefix)
	if !ok || blob.ValidKey(key) != nil || !strings.HasPrefix(key, "t/") || u.Initiated == nil || u.Initiated.After(limit) {
		return false, nil
	}
	if err := d.abort(ctx, name, aws.ToString(u.UploadId)); err != nil {
		return false, fmt.Errorf("upload of %s: %w", key, err)
	}
	return true, nil
}
