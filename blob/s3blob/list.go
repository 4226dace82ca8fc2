package s3blob

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/snapferry/snapferry/blob"
)

// List implements blob.Driver.
func (d *Driver) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		in := &s3.ListObjectsV2Input{Bucket: &d.bucket, Prefix: optional(d.prefix + validPart(prefix)), EncodingType: types.EncodingTypeUrl}
		if bound := lowerBound(startAfter); bound != "" {
			in.StartAfter = d.key(bound)
		}
		wanted := func(key string) bool { return key > startAfter && strings.HasPrefix(key, prefix) }
		for {
			out, err := d.client.ListObjectsV2(ctx, in)
			if err != nil {
				yield(blob.Info{}, d.explainBucket(ctx, listBucket, err))
				return
			}
			d.bucketMet.Store(true)
			if !d.page(out, wanted, yield) || !aws.ToBool(out.IsTruncated) {
				return
			}
			if aws.ToString(out.NextContinuationToken) == "" {
				yield(blob.Info{}, blob.Retriable(errors.New("the store has more to list and does not say how to go on")))
				return
			}
			in.ContinuationToken = out.NextContinuationToken
		}
	}
}

// validPart is the longest beginning of s that is UTF-8. A store may refuse a request with
// anything else, while a caller may ask for any bytes; what it did not mean is left out of
// the answer.
func validPart(s string) string {
	at := 0
	for at < len(s) {
		r, n := utf8.DecodeRuneInString(s[at:])
		if r == utf8.RuneError && n == 1 {
			break
		}
		at += n
	}
	return s[:at]
}

// lowerBound is UTF-8 that is not greater than startAfter, and as near to it as matters: a
// byte that begins no character stands behind all that do.
func lowerBound(startAfter string) string {
	valid := validPart(startAfter)
	if rest := startAfter[len(valid):]; rest != "" && rest[0] > 0xF4 {
		return valid + string(utf8.MaxRune)
	}
	return valid
}

// page yields the objects of one answer. What another program made there under a name that
// no key of ours can have is passed over.
func (d *Driver) page(out *s3.ListObjectsV2Output, wanted func(string) bool, yield func(blob.Info, error) bool) bool {
	for i := range out.Contents {
		o := &out.Contents[i]
		name, err := decode(o.Key, out.EncodingType)
		key, ok := strings.CutPrefix(name, d.prefix)
		if err == nil && !ok {
			err = fmt.Errorf("%w: the store listed %q outside of %s", blob.ErrCorrupt, name, d)
		}
		if err != nil {
			yield(blob.Info{}, err)
			return false
		}
		if blob.ValidKey(key) != nil || !wanted(key) {
			continue
		}
		if !yield(blob.Info{Key: key, Size: aws.ToInt64(o.Size), Modified: d.modified(o.LastModified)}, nil) {
			return false
		}
	}
	return true
}

// decode undoes what a store did to a key so that it fits into XML.
func decode(key *string, encoding types.EncodingType) (string, error) {
	if encoding != types.EncodingTypeUrl {
		return aws.ToString(key), nil
	}
	name, err := url.QueryUnescape(aws.ToString(key))
	if err != nil {
		return "", fmt.Errorf("%w: the store listed %q: %w", blob.ErrCorrupt, aws.ToString(key), err)
	}
	return name, nil
}
