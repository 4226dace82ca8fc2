package blobtest

import (
	"context"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"github.com/snapferry/snapferry/blob"
)

// Op is a verb of blob.Driver, in the words of a transcript.
type Op string

// The operations that decorators tell apart. Reading on in an open Get belongs to it.
const (
	OpPut        Op = "put"
	OpGet        Op = "get"
	OpStat       Op = "stat"
	OpList       Op = "list"
	OpDelete     Op = "delete"
	OpRemoveTTL  Op = "removettl"
	OpNow        Op = "now"
	OpGetDeleted Op = "getdeleted"
)

// Call is one operation on a driver, as decorators show it to the test.
type Call struct {
	Op Op
	// Keys has one key, or the keys of a Delete or RemoveTTL, or the prefix of a List.
	Keys []string
	// Size is the length of a Put's body.
	Size int64
	// Options are those of a Put.
	Options blob.PutOptions
	// Offset and Length are the range of a Get.
	Offset, Length int64
	// StartAfter is that of a List.
	StartAfter string
}

// Key is the call's first key, or "".
func (c Call) Key() string {
	if len(c.Keys) == 0 {
		return ""
	}
	return c.Keys[0]
}

// String is a line of a transcript without the outcome.
func (c Call) String() string {
	parts := append([]string{string(c.Op)}, c.Keys...)
	switch c.Op {
	case OpPut:
		parts = append(parts, fmt.Sprint(c.Size))
		if c.Options.IfAbsent {
			parts = append(parts, "if-absent")
		}
		if c.Options.TTL != 0 {
			parts = append(parts, "ttl="+c.Options.TTL.String())
		}
	case OpGet, OpGetDeleted:
		if c.Offset != 0 || c.Length >= 0 {
			parts = append(parts, fmt.Sprintf("[%d+%d]", c.Offset, c.Length))
		}
	case OpList:
		if c.StartAfter != "" {
			parts = append(parts, "after="+c.StartAfter)
		}
	}
	return strings.Join(parts, " ")
}

// Match says which calls a decorator acts on; nil means all.
type Match func(Call) bool

func (m Match) ok(c Call) bool { return m == nil || m(c) }

// On matches calls of one operation whose first key contains part.
func On(op Op, part string) Match {
	return func(c Call) bool { return c.Op == op && strings.Contains(c.Key(), part) }
}

// around is what a decorator does: it calls do, or not, and may change its error. For a
// List, do is the whole listing.
type around func(ctx context.Context, c Call, do func() error) error

// decorated is a driver whose every operation goes through around.
type decorated struct {
	inner  blob.Driver
	around around
}

// Unwrap is the driver below.
func (d *decorated) Unwrap() blob.Driver { return d.inner }

// String names the driver below.
func (d *decorated) String() string { return fmt.Sprint(d.inner) }

// Put implements blob.Driver.
func (d *decorated) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	c := Call{Op: OpPut, Keys: []string{key}, Size: body.Size, Options: opts}
	return d.around(ctx, c, func() error { return d.inner.Put(ctx, key, body, opts) })
}

// Get implements blob.Driver.
func (d *decorated) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	c := Call{Op: OpGet, Keys: []string{key}, Offset: offset, Length: length}
	return d.read(ctx, c, d.inner.Get)
}

// GetDeleted implements blob.DeletedReader.
func (d *decorated) GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	inner, ok := d.inner.(blob.DeletedReader)
	if !ok {
		return nil, blob.ErrUnsupported
	}
	c := Call{Op: OpGetDeleted, Keys: []string{key}, Offset: offset, Length: length}
	return d.read(ctx, c, inner.GetDeleted)
}

func (d *decorated) read(ctx context.Context, c Call, get func(context.Context, string, int64, int64) (io.ReadCloser, error)) (io.ReadCloser, error) {
	var r io.ReadCloser
	err := d.around(ctx, c, func() (err error) {
		r, err = get(ctx, c.Key(), c.Offset, c.Length)
		return err
	})
	if err != nil && r != nil {
		_ = r.Close() // the answer is taken to be lost
		r = nil
	}
	return r, err
}

// Stat implements blob.Driver.
func (d *decorated) Stat(ctx context.Context, key string) (info blob.Info, err error) {
	err = d.around(ctx, Call{Op: OpStat, Keys: []string{key}}, func() (err error) {
		info, err = d.inner.Stat(ctx, key)
		return err
	})
	return info, err
}

// List implements blob.Driver.
func (d *decorated) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return d.list(ctx, d.inner.List, prefix, startAfter)
}

// ListAt implements blob.TimeLister.
func (d *decorated) ListAt(ctx context.Context, prefix, startAfter string, at time.Time) iter.Seq2[blob.Info, error] {
	list := func(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
		inner, ok := d.inner.(blob.TimeLister)
		if !ok {
			return func(yield func(blob.Info, error) bool) { yield(blob.Info{}, blob.ErrUnsupported) }
		}
		return inner.ListAt(ctx, prefix, startAfter, at)
	}
	return d.list(ctx, list, prefix, startAfter)
}

type lister func(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error]

func (d *decorated) list(ctx context.Context, list lister, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		stopped := false
		c := Call{Op: OpList, Keys: []string{prefix}, StartAfter: startAfter}
		err := d.around(ctx, c, func() error {
			for info, err := range list(ctx, prefix, startAfter) {
				if err != nil {
					return err
				}
				if stopped = !yield(info, nil); stopped {
					return nil
				}
			}
			return nil
		})
		if err != nil && !stopped {
			yield(blob.Info{}, err)
		}
	}
}

// Delete implements blob.Driver.
func (d *decorated) Delete(ctx context.Context, keys []string) error {
	return d.around(ctx, Call{Op: OpDelete, Keys: keys}, func() error { return d.inner.Delete(ctx, keys) })
}

// RemoveTTL implements blob.Driver.
func (d *decorated) RemoveTTL(ctx context.Context, keys []string) error {
	return d.around(ctx, Call{Op: OpRemoveTTL, Keys: keys}, func() error { return d.inner.RemoveTTL(ctx, keys) })
}

// Now implements blob.Clock.
func (d *decorated) Now(ctx context.Context) (now time.Time, err error) {
	c, ok := d.inner.(blob.Clock)
	if !ok {
		return now, blob.ErrUnsupported
	}
	err = d.around(ctx, Call{Op: OpNow}, func() (err error) {
		now, err = c.Now(ctx)
		return err
	})
	return now, err
}

// SweepTemp implements blob.TempSweeper; decorators do not act on it.
func (d *decorated) SweepTemp(ctx context.Context) (int, error) {
	if t, ok := d.inner.(blob.TempSweeper); ok {
		return t.SweepTemp(ctx)
	}
	return 0, nil
}

// Close implements blob.Driver; decorators do not act on it.
func (d *decorated) Close() error { return d.inner.Close() }
