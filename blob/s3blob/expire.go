package s3blob

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/snapferry/snapferry/blob"
)

// expireTag is the tag of objects that were put with a TTL; its value is the days.
const expireTag = "snapferry-expire"

const (
	day     = 24 * time.Hour
	minDays = 3 // P7: lifecycle rules count whole days, and run when they like
)

// daysOf is a TTL as a lifecycle rule can have it: never shorter.
func daysOf(ttl time.Duration) int { return int(max(minDays, (ttl+day-1)/day)) }

// tagFor is the tag of a TTL as a put carries it; nil for objects that stay.
func tagFor(ttl time.Duration) *string {
	if ttl <= 0 {
		return nil
	}
	return aws.String(expireTag + "=" + strconv.Itoa(daysOf(ttl)))
}

// RemoveTTL implements blob.Driver: it removes the tag by which the store's lifecycle rule
// knows the object.
func (d *Driver) RemoveTTL(ctx context.Context, keys []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return d.each(ctx, keys, map[string]error{}, d.untag)
}

func (d *Driver) untag(ctx context.Context, key string) error {
	d.mu.Lock()
	plain := d.untagged[key]
	d.mu.Unlock()
	if plain {
		_, err := d.head(ctx, key)
		return err
	}
	_, err := d.client.DeleteObjectTagging(ctx, &s3.DeleteObjectTaggingInput{Bucket: &d.bucket, Key: d.key(key)})
	err = d.explain(ctx, deleteTags, err)
	if errors.Is(err, blob.ErrUnsupported) {
		// No tags, or a delete marker in the object's place.
		_, err = d.head(ctx, key)
	}
	return err
}

// InstallExpiry implements blob.Expirer: it makes sure that tags work as RemoveTTL needs
// them, and adds a lifecycle rule to those that the bucket has.
func (d *Driver) InstallExpiry(ctx context.Context, ttl time.Duration) error {
	if err := d.probeTags(ctx, ttl); err != nil {
		return err
	}
	before, err := d.rules(ctx)
	if errors.Is(err, blob.ErrUnsupported) {
		return fmt.Errorf("this store has no lifecycle rules: %w", err)
	}
	if err != nil {
		return err
	}
	rule := d.rule(daysOf(ttl))
	after := before
	after.list = slices.DeleteFunc(slices.Clone(before.list), func(r types.LifecycleRule) bool { return aws.ToString(r.ID) == *rule.ID })
	after.list = append(after.list, rule)
	_, err = d.client.PutBucketLifecycleConfiguration(ctx, &s3.PutBucketLifecycleConfigurationInput{
		Bucket: &d.bucket, TransitionDefaultMinimumObjectSize: before.minimum,
		LifecycleConfiguration: &types.BucketLifecycleConfiguration{Rules: after.list},
	})
	if err != nil {
		return d.explainBucket(ctx, putLifecycle, err)
	}
	return d.checkRules(ctx, after.list)
}

// rule is the lifecycle rule for this prefix.
func (d *Driver) rule(days int) types.LifecycleRule {
	tag := types.Tag{Key: aws.String(expireTag), Value: aws.String(strconv.Itoa(days))}
	filter := &types.LifecycleRuleFilter{Tag: &tag}
	if d.prefix != "" {
		filter = &types.LifecycleRuleFilter{And: &types.LifecycleRuleAndOperator{Prefix: &d.prefix, Tags: []types.Tag{tag}}}
	}
	return types.LifecycleRule{
		ID:         aws.String(fmt.Sprintf("snapferry unsealed %dd %s", days, d.prefix)),
		Status:     types.ExpirationStatusEnabled,
		Filter:     filter,
		Expiration: &types.LifecycleExpiration{Days: aws.Int32(int32(days))},
	}
}

// ruleSet is a bucket's lifecycle configuration.
type ruleSet struct {
	list    []types.LifecycleRule
	minimum types.TransitionDefaultMinimumObjectSize
}

func (d *Driver) rules(ctx context.Context) (ruleSet, error) {
	out, err := d.client.GetBucketLifecycleConfiguration(ctx, &s3.GetBucketLifecycleConfigurationInput{Bucket: &d.bucket})
	if err == nil {
		return ruleSet{out.Rules, out.TransitionDefaultMinimumObjectSize}, nil
	}
	if a, ok := answerOf(err); ok && a.code == "NoSuchLifecycleConfiguration" {
		return ruleSet{}, nil
	}
	return ruleSet{}, d.explainBucket(ctx, getLifecycle, err)
}

// checkRules reads the rules back: somebody may have set others in between, and a store
// may have dropped what it does not know.
func (d *Driver) checkRules(ctx context.Context, want []types.LifecycleRule) error {
	got, err := d.rules(ctx)
	if err != nil {
		return err
	}
	for _, rule := range want {
		same := func(r types.LifecycleRule) bool { return aws.ToString(r.ID) == aws.ToString(rule.ID) }
		if rule.ID != nil && !slices.ContainsFunc(got.list, same) {
			return fmt.Errorf("%w: the lifecycle rule %q is not among those of the bucket after they were set", blob.ErrUnsupported, *rule.ID)
		}
	}
	return nil
}

// probeTags makes sure that a put can carry a tag, that it can be removed, and that this
// fails for an absent object, as sealing has to (P5d).
func (d *Driver) probeTags(ctx context.Context, ttl time.Duration) (err error) {
	key := "snapferry-probe-" + rand.Text()
	defer func() {
		err = errors.Join(err, d.Delete(context.WithoutCancel(ctx), []string{key}))
	}()
	put := &s3.PutObjectInput{Bucket: &d.bucket, Key: d.key(key), Tagging: tagFor(ttl)}
	if err := d.send(ctx, put, nil); err != nil {
		return err
	}
	for _, want := range []int{1, 0} {
		out, err := d.client.GetObjectTagging(ctx, &s3.GetObjectTaggingInput{Bucket: &d.bucket, Key: d.key(key)})
		if err != nil {
			return d.explain(ctx, getTags, err)
		}
		if len(out.TagSet) != want {
			return fmt.Errorf("%w: an object has %d tags where it should have %d", blob.ErrUnsupported, len(out.TagSet), want)
		}
		if err := d.untag(ctx, key); err != nil {
			return err
		}
	}
	if err := d.untag(ctx, key+"-absent"); !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(fmt.Errorf("%w: removing the tags of an absent object is no error", blob.ErrUnsupported), err)
	}
	return nil
}
