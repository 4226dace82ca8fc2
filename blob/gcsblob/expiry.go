package gcsblob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"cloud.google.com/go/storage"

	"github.com/snapferry/snapferry/blob"
)

// An object that is to expire is put with a custom time of long ago, and sealing moves that
// time to the end of all days: it can be moved forward and never be removed. The
// lifecycle rule takes what is old enough by the store's own clock and whose custom time
// has passed (P7), so objects without one never expire.
var (
	unsealed = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	sealed   = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
)

const (
	day    = 24 * time.Hour
	minTTL = 3 * day
)

// RemoveTTL implements blob.Driver.
func (d *Driver) RemoveTTL(ctx context.Context, keys []string) error {
	return blob.EachKey(ctx, keys, parallel, func(key string) error {
		attrs, err := d.object(key).Attrs(ctx)
		if err != nil || attrs.CustomTime.IsZero() || !attrs.CustomTime.Before(sealed) {
			return d.failed(ctx, err)
		}
		_, err = d.object(key).Update(ctx, storage.ObjectAttrsToUpdate{CustomTime: sealed})
		return d.failed(ctx, err)
	})
}

// InstallExpiry implements blob.Expirer: it adds a lifecycle rule for this prefix beside the
// bucket's others.
func (d *Driver) InstallExpiry(ctx context.Context, ttl time.Duration) error {
	if ttl < minTTL || ttl%day != 0 {
		return fmt.Errorf("objects can expire after whole days, at least %d, and not after %v", minTTL/day, ttl)
	}
	attrs, err := d.bucket.Attrs(ctx)
	if err != nil {
		return d.failed(ctx, err)
	}
	rules := slices.DeleteFunc(slices.Clone(attrs.Lifecycle.Rules), d.isOurs)
	rules = append(rules, d.rule(ttl))
	unchanged := d.bucket.If(storage.BucketConditions{MetagenerationMatch: attrs.MetaGeneration})
	_, err = unchanged.Update(ctx, storage.BucketAttrsToUpdate{Lifecycle: &storage.Lifecycle{Rules: rules}})
	if err = d.failed(ctx, err); errors.Is(err, fs.ErrExist) {
		return blob.Retriable(errors.New("somebody else changed the bucket's rules meanwhile"))
	}
	return err
}

func (d *Driver) rule(ttl time.Duration) storage.LifecycleRule {
	rule := storage.LifecycleRule{
		Action:    storage.LifecycleAction{Type: storage.DeleteAction},
		Condition: storage.LifecycleCondition{AgeInDays: int64(ttl / day), DaysSinceCustomTime: 1, Liveness: storage.Live},
	}
	if d.prefix != "" {
		rule.Condition.MatchesPrefix = []string{d.prefix}
	}
	return rule
}

// isOurs finds the rule of an earlier time.
func (d *Driver) isOurs(r storage.LifecycleRule) bool {
	ours := d.rule(minTTL)
	c := r.Condition
	return r.Action.Type == ours.Action.Type && c.DaysSinceCustomTime == 1 && c.AgeInDays > 0 &&
		slices.Equal(c.MatchesPrefix, ours.Condition.MatchesPrefix)
}
