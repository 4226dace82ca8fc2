package blob

import (
	"context"

	"golang.org/x/sync/errgroup"
)

// EachKey is Delete or RemoveTTL for drivers of stores that take one key a request: it does
// several at a time, tells of the progress, and collects the keys that failed. It fails as a
// whole only when ctx ends.
func EachKey(ctx context.Context, keys []string, parallel int, do func(key string) error) error {
	errs := make([]error, len(keys))
	var g errgroup.Group
	g.SetLimit(parallel)
	for i, key := range keys {
		g.Go(func() error {
			if errs[i] = ctx.Err(); errs[i] == nil {
				errs[i] = do(key)
				Moved(ctx)
			}
			return nil
		})
	}
	_ = g.Wait() // the errors are in errs
	if err := ctx.Err(); err != nil {
		return err
	}
	failed := map[string]error{}
	for i, err := range errs {
		if err != nil {
			failed[keys[i]] = err
		}
	}
	return JoinKeys(failed)
}
