package main

import (
	"context"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/azblob"
	"github.com/snapferry/snapferry/blob/gcsblob"
)

// openGCS makes no bucket, as openS3 does not.
func openGCS(ctx context.Context, p place) (blob.Driver, error) {
	bucket, opts, err := gcsblob.ParseURL(p.url)
	if err != nil {
		return nil, usagef("--repo: %w", err)
	}
	d, err := gcsblob.Open(ctx, bucket, opts)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// openAzure makes no container, as openS3 makes no bucket.
func openAzure(_ context.Context, p place) (blob.Driver, error) {
	container, opts, err := azblob.ParseURL(p.url)
	if err != nil {
		return nil, usagef("--repo: %w", err)
	}
	d, err := azblob.Open(container, opts)
	if err != nil {
		return nil, err
	}
	return d, nil
}
