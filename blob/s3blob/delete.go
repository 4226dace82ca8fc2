package s3blob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/blob"
)

const (
	deleteBatch = 1000 // by S3
	eachAtOnce  = 16   // requests of a call that has to go key by key
)

// Delete implements blob.Driver: by batches where the store takes them.
func (d *Driver) Delete(ctx context.Context, keys []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var batch, single []string
	for _, k := range keys {
		if d.oneByOne.Load() || !fitsXML(d.prefix+k) {
			single = append(single, k)
		} else {
			batch = append(batch, k)
		}
	}
	failed := map[string]error{}
	for len(batch) > 0 {
		n := min(len(batch), deleteBatch)
		err := d.deleteBatch(ctx, batch[:n], failed)
		if errors.Is(err, errNoBatch) {
			d.oneByOne.Store(true)
			break
		}
		if err != nil {
			return err
		}
		batch = batch[n:]
	}
	return d.each(ctx, append(single, batch...), failed, d.deleteOne)
}

// deleteBatch notes the keys that failed. Its error is of the whole batch.
func (d *Driver) deleteBatch(ctx context.Context, keys []string, failed map[string]error) error {
	objects := make([]types.ObjectIdentifier, len(keys))
	for i, k := range keys {
		objects[i].Key = d.key(k)
	}
	out, err := d.client.DeleteObjects(ctx, &s3.DeleteObjectsInput{Bucket: &d.bucket, Delete: &types.Delete{Objects: objects, Quiet: aws.Bool(true)}})
	if err != nil {
		return d.explain(ctx, deleteObjects, err)
	}
	d.bucketMet.Store(true)
	byName := map[string]error{}
	for _, e := range out.Errors {
		err := d.classify(deleteObject, answer{code: aws.ToString(e.Code), message: aws.ToString(e.Message)})
		if !errors.Is(err, fs.ErrNotExist) {
			byName[aws.ToString(e.Key)] = err
		}
	}
	for _, k := range keys {
		if err := byName[d.prefix+k]; err != nil {
			failed[k] = err
			delete(byName, d.prefix+k)
		}
	}
	for name, err := range byName { // of a key that was not asked for: which one failed?
		return blob.Retriable(fmt.Errorf("the store could not delete %q, which nobody asked for: %w", name, err))
	}
	return nil
}

func (d *Driver) deleteOne(ctx context.Context, key string) error {
	_, err := d.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &d.bucket, Key: d.key(key)})
	if err = d.explain(ctx, deleteObject, err); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// each calls do for every key, several at a time, and adds to failed. A cancellation
// concerns the whole call.
func (d *Driver) each(ctx context.Context, keys []string, failed map[string]error, do func(context.Context, string) error) error {
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(eachAtOnce)
	for _, k := range keys {
		g.Go(func() error {
			if err := do(ctx, k); err != nil {
				mu.Lock()
				failed[k] = err
				mu.Unlock()
			}
			blob.Moved(ctx)
			return nil
		})
	}
	_ = g.Wait() // the errors are in failed
	if err := ctx.Err(); err != nil {
		return err
	}
	return blob.JoinKeys(failed)
}

// fitsXML tells whether XML 1.0 can hold a key, in which it has no characters for most of
// the control codes.
func fitsXML(s string) bool {
	for _, r := range s {
		if r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0xFFFE || r == 0xFFFF {
			return false
		}
	}
	return true
}
