// Package memblob is a blob.Driver in memory, for tests and for trying things out.
//
// It keeps the whole contract, expiry too: an object put with a TTL goes when Expire is
// called and it was not made permanent before, whatever the clock says, so that a test
// shows what a store with lifecycle rules could have removed. NewVersioned also keeps
// what was deleted.
package memblob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/snapferry/snapferry/blob"
)

// Driver is a store in memory. Its bytes live as long as it does; Close keeps them, so a
// test opens the same store again by making another blob.Store over it.
type Driver struct {
	mu      sync.RWMutex
	objects map[string]*object // mu guards
	keys    []string           // mu guards; sorted
	deleted map[string]*object // mu guards; nil: not kept
	last    time.Time          // mu guards; the last time given out
}

// object is written once: to replace it is to put another one in its place.
type object struct {
	data      []byte
	modified  time.Time
	expirable bool // guarded by Driver.mu
}

var (
	_ blob.Driver        = (*Driver)(nil)
	_ blob.Clock         = (*Driver)(nil)
	_ blob.DeletedReader = (*Versioned)(nil)
)

// New returns an empty store.
func New() *Driver { return &Driver{objects: map[string]*object{}} }

// Versioned is a store that keeps the newest deleted version of each object.
type Versioned struct{ *Driver }

// NewVersioned returns an empty store that keeps deleted versions.
func NewVersioned() *Versioned {
	d := New()
	d.deleted = map[string]*object{}
	return &Versioned{d}
}

// String is the URL of any store in memory.
func (d *Driver) String() string { return "mem:" }

// Put implements blob.Driver.
func (d *Driver) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	var b bytes.Buffer
	b.Grow(int(min(body.Size, 64<<20)))
	if err := body.Copy(ctx, &b); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	at, exists := slices.BinarySearch(d.keys, key)
	if exists && opts.IfAbsent {
		return fs.ErrExist
	}
	if !exists {
		if err := d.clashLocked(key); err != nil {
			return err
		}
		d.keys = slices.Insert(d.keys, at, key)
	}
	d.objects[key] = &object{data: b.Bytes(), modified: d.nowLocked(), expirable: opts.TTL > 0}
	return nil
}

// clashLocked refuses keys of which one is a path prefix of another, as a file system does.
func (d *Driver) clashLocked(key string) error {
	for i, c := range key {
		if c == '/' && d.objects[key[:i]] != nil {
			return fmt.Errorf("%q is an object, so it cannot have others below it", key[:i])
		}
	}
	at, _ := slices.BinarySearch(d.keys, key+"/")
	if at < len(d.keys) && strings.HasPrefix(d.keys[at], key+"/") {
		return fmt.Errorf("there are objects below it, such as %q", d.keys[at])
	}
	return nil
}

// nowLocked never gives the same time twice, so that order of writing shows.
func (d *Driver) nowLocked() time.Time {
	now := time.Now().Round(0)
	if !now.After(d.last) {
		now = d.last.Add(1)
	}
	d.last = now
	return now
}

// Now implements blob.Clock.
func (d *Driver) Now(ctx context.Context) (time.Time, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.nowLocked(), ctx.Err()
}

// Get implements blob.Driver.
func (d *Driver) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	d.mu.RLock()
	o := d.objects[key]
	d.mu.RUnlock()
	return open(ctx, o, offset, length)
}

// GetDeleted implements blob.DeletedReader.
func (v *Versioned) GetDeleted(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	v.mu.RLock()
	o := v.deleted[key]
	v.mu.RUnlock()
	return open(ctx, o, offset, length)
}

func open(ctx context.Context, o *object, offset, length int64) (io.ReadCloser, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if o == nil {
		return nil, fs.ErrNotExist
	}
	p := o.data[min(offset, int64(len(o.data))):]
	if length >= 0 {
		p = p[:min(length, int64(len(p)))]
	}
	return &reader{ctx: ctx, Reader: bytes.NewReader(p)}, nil
}

// reader ends with its context, as a connection would.
type reader struct {
	*bytes.Reader
	ctx context.Context
}

func (r *reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

func (r *reader) Close() error { return nil }

// Stat implements blob.Driver.
func (d *Driver) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := ctx.Err(); err != nil {
		return blob.Info{}, err
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.infoLocked(key)
}

func (d *Driver) infoLocked(key string) (blob.Info, error) {
	o := d.objects[key]
	if o == nil {
		return blob.Info{}, fs.ErrNotExist
	}
	return blob.Info{Key: key, Size: int64(len(o.data)), Modified: o.modified}, nil
}

// List implements blob.Driver. It looks the next key up each time, so it holds no lock
// while the caller has the turn.
func (d *Driver) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		for last := startAfter; ; {
			if err := ctx.Err(); err != nil {
				yield(blob.Info{}, err)
				return
			}
			info, ok := d.next(prefix, last)
			if !ok || !yield(info, nil) {
				return
			}
			last = info.Key
		}
	}
}

// next is the first object with the prefix whose key is greater than last.
func (d *Driver) next(prefix, last string) (blob.Info, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	at, _ := slices.BinarySearch(d.keys, max(prefix, last+"\x00"))
	if at == len(d.keys) || !strings.HasPrefix(d.keys[at], prefix) {
		return blob.Info{}, false
	}
	info, err := d.infoLocked(d.keys[at])
	return info, err == nil
}

// Delete implements blob.Driver.
func (d *Driver) Delete(ctx context.Context, keys []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, k := range keys {
		d.removeLocked(k)
	}
	return nil
}

func (d *Driver) removeLocked(key string) {
	at, ok := slices.BinarySearch(d.keys, key)
	if !ok {
		return
	}
	if d.deleted != nil {
		d.deleted[key] = d.objects[key]
	}
	d.keys = slices.Delete(d.keys, at, at+1)
	delete(d.objects, key)
}

// RemoveTTL implements blob.Driver.
func (d *Driver) RemoveTTL(ctx context.Context, keys []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	failed := map[string]error{}
	for _, k := range keys {
		if o := d.objects[k]; o != nil {
			o.expirable = false
		} else {
			failed[k] = fs.ErrNotExist
		}
	}
	return blob.JoinKeys(failed)
}

// Expire removes every object that has a TTL still, as the store could do at any moment
// after it, and returns their keys.
func (d *Driver) Expire() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var gone []string
	for _, k := range d.keys {
		if d.objects[k].expirable {
			gone = append(gone, k)
		}
	}
	for _, k := range gone {
		d.removeLocked(k)
	}
	return gone
}

// Corrupt lets change return other bytes for an object, which keeps its time: damage in
// the store. It returns fs.ErrNotExist for an absent one.
func (d *Driver) Corrupt(key string, change func(data []byte) []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	o := d.objects[key]
	if o == nil {
		return fs.ErrNotExist
	}
	if change == nil {
		return errors.New("memblob: no change given")
	}
	d.objects[key] = &object{data: change(bytes.Clone(o.data)), modified: o.modified, expirable: o.expirable}
	return nil
}

// Close implements blob.Driver; the objects stay.
func (d *Driver) Close() error { return nil }
