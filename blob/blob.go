// Package blob stores write-once objects under keys in any object store.
//
// It hides what stores have in common trouble with: lost answers and their retries, limits
// on requests, memory and bandwidth, batches, invalid keys, bodies that are not as long as
// they said. Callers hold a *Store; a Driver (fsblob, memblob, and the cloud ones) does the
// rest and nothing more.
//
// Contract: a Store is safe for concurrent use. When Put has returned nil the object
// is durable and every later Get, Stat and List, from any process, sees it whole. Put with
// IfAbsent is atomic among all writers of the store. Errors are *Error; branch on
// fs.ErrNotExist, fs.ErrExist, fs.ErrPermission, ErrCorrupt, ErrUnsupported and ErrClosed
// with errors.Is. Operations take ctx as their deadline and are tried again until
// then, or until Options.Retry gives up, as long as the driver says that it may help.
//
//	d, err := fsblob.Open("/backup", nil)
//	s := blob.New(d, nil)
//	err = s.Put(ctx, "a/b", blob.Bytes(p), blob.PutOptions{IfAbsent: true})
//	p, err = s.ReadAll(ctx, "a/b", 0, -1)
//
// blobtest holds the conformance suite that every driver passes, and decorators for tests.
package blob

import (
	"cmp"
	"time"
)

// Options tune a Store; nil or zero values mean the defaults.
type Options struct {
	// Name is how messages call the store, without secrets; default: the driver's String.
	Name string
	// Retry is the schedule of repeated tries.
	Retry Retry
	// TryTimeout is how long one try may make no progress (no answer, no byte) before it
	// is broken off and tried again; default 2 minutes, negative: no limit. Waiting for a
	// limit below, or for the caller to read on, does not count.
	TryTimeout time.Duration
	// MaxRequests bounds the driver calls in progress; default 64.
	MaxRequests int
	// MaxBytes bounds the bytes of Put bodies and ReadAll buffers in flight; default
	// 256 MiB. A larger single one goes alone.
	MaxBytes int64
	// BytesPerSecond limits all bytes sent and received together; zero: no limit.
	BytesPerSecond int64
	// OnRetry is told of each failed try before the pause; it must not block.
	OnRetry func(op, key string, err error, delay time.Duration)
}

// Retry is exponential backoff with jitter: the n-th pause is between half and the whole
// of min(First * 2^n, Max).
type Retry struct {
	// First is the longest first pause; default 100 ms.
	First time.Duration
	// Max is the longest pause; default 10 s.
	Max time.Duration
	// Total is the time from the first failure after which no new try begins; default
	// 5 minutes, negative: only the caller's context ends it.
	Total time.Duration
}

func (o *Options) withDefaults() Options {
	var v Options
	if o != nil {
		v = *o
	}
	v.Retry.First = cmp.Or(max(v.Retry.First, 0), 100*time.Millisecond)
	v.Retry.Max = max(cmp.Or(max(v.Retry.Max, 0), 10*time.Second), v.Retry.First)
	v.Retry.Total = cmp.Or(v.Retry.Total, 5*time.Minute)
	v.TryTimeout = cmp.Or(v.TryTimeout, 2*time.Minute)
	v.MaxRequests = cmp.Or(max(v.MaxRequests, 0), 64)
	v.MaxBytes = cmp.Or(max(v.MaxBytes, 0), 256<<20)
	v.BytesPerSecond = max(v.BytesPerSecond, 0)
	return v
}
