package snapferry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
)

// expiring is a store that expires objects by a rule once it is told to, and whose clock
// can be set on.
type expiring struct {
	*memblob.Driver
	installed time.Duration
	refuse    error
	ahead     atomic.Int64 // how far the clock is set on
	atSeal    func()
	timed     atomic.Int64 // puts with a TTL
	sealed    atomic.Int64
}

func (e *expiring) InstallExpiry(_ context.Context, ttl time.Duration) error {
	e.installed = ttl
	return e.refuse
}

func (e *expiring) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	if opts.TTL > 0 {
		e.timed.Add(1)
	}
	return e.Driver.Put(ctx, key, body, opts)
}

func (e *expiring) RemoveTTL(ctx context.Context, keys []string) error {
	e.sealed.Add(int64(len(keys)))
	if e.atSeal != nil {
		e.atSeal()
	}
	return e.Driver.RemoveTTL(ctx, keys)
}

func (e *expiring) Now(ctx context.Context) (time.Time, error) {
	now, err := e.Driver.Now(ctx)
	return now.Add(time.Duration(e.ahead.Load())), err
}

func newExpiringWorld(t *testing.T, e *expiring, opts *InitOptions) (*world, RepoInfo) {
	t.Helper()
	e.Driver = memblob.New()
	info, err := Init(t.Context(), blob.New(e, nil), opts)
	check(t, err)
	w := newWorldOn(t, e)
	w.write(map[string]string{"a": "alpha", "d/b": "beta"})
	return w, info
}

// Only a repository that was made so lets the store expire anything, and then all that is
// not sealed, and nothing that is (P7, I2).
func TestExpireUnsealed(t *testing.T) {
	e := &expiring{}
	w, info := newExpiringWorld(t, e, &InitOptions{ExpireUnsealed: true})
	if !info.ExpireUnsealed || e.installed != unsealedTTL {
		t.Fatalf("made %+v with a rule of %v", info, e.installed)
	}
	task := w.open()
	w.mustCommit(task, nil)
	if gone := e.Expire(); len(gone) > 0 {
		t.Fatalf("the store could remove %q of a checkpoint", gone)
	}
	w.wantSound()
	if n := e.timed.Load(); n == 0 || n != e.sealed.Load() {
		t.Errorf("%d blobs were put with a TTL and %d sealed", n, e.sealed.Load())
	}
	e.atSeal = func() { panic("killed") }
	func() {
		defer func() { _ = recover() }()
		w.write(map[string]string{"a": "never sealed"})
		_, _ = w.commit(t.Context(), task, nil)
	}()
	if gone := e.Expire(); len(gone) == 0 {
		t.Error("nothing of an attempt that died can be removed by the store")
	}
	w.wantSound()
}

func TestExpiryIsOffByDefault(t *testing.T) {
	e := &expiring{}
	w, info := newExpiringWorld(t, e, nil)
	w.mustCommit(w.open(), nil)
	if info.ExpireUnsealed || e.installed != 0 || e.timed.Load() != 0 || e.sealed.Load() != 0 {
		t.Errorf("made %+v; rule of %v, %d blobs with a TTL, %d sealed", info, e.installed, e.timed.Load(), e.sealed.Load())
	}
	if gone := e.Expire(); len(gone) > 0 {
		t.Errorf("the store could remove %q", gone)
	}
}

// Blobs that waited for half of their TTL are not relied on: the store may have them on
// its list already (P7).
func TestSealTooLate(t *testing.T) {
	e := &expiring{}
	w, _ := newExpiringWorld(t, e, &InitOptions{ExpireUnsealed: true})
	task := w.open()
	first := w.mustCommit(task, nil)
	e.atSeal = func() { e.ahead.Add(int64(unsealedTTL / 2)) }
	w.write(map[string]string{"a": "slow"})
	if _, err := w.commit(t.Context(), task, nil); err == nil || !strings.Contains(err.Error(), "run it again") {
		t.Fatalf("sealed after half of the TTL: %v", err)
	}
	if got := w.state().Latest().ID; got != first.Checkpoint {
		t.Errorf("%s was published", got)
	}
	e.atSeal = nil
	w.mustCommit(task, nil)
	w.wantSound()
}

// A store that cannot expire is refused; who only may not have it expire goes without.
func TestExpiryRefused(t *testing.T) {
	if _, err := Init(t.Context(), blob.New(memblob.New(), nil), &InitOptions{ExpireUnsealed: true}); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a store that cannot expire: %v", err)
	}
	var warned []string
	e := &expiring{refuse: fmt.Errorf("no rules for you: %w", fs.ErrPermission)}
	w, info := newExpiringWorld(t, e, &InitOptions{ExpireUnsealed: true, Warn: func(text string) { warned = append(warned, text) }})
	if info.ExpireUnsealed || len(warned) != 1 || !strings.Contains(warned[0], "no rules for you") {
		t.Errorf("made %+v, warned %q", info, warned)
	}
	w.mustCommit(w.open(), nil)
	if e.timed.Load() != 0 {
		t.Error("blobs have a TTL that nobody watches")
	}
}

// unfenced replaces what it was to create only.
type unfenced struct{ blob.Driver }

func (u unfenced) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	opts.IfAbsent = false
	return u.Driver.Put(ctx, key, body, opts)
}

// A store that keeps nobody out is refused unless it was asked for, which is remembered.
func TestNoFencing(t *testing.T) {
	d := unfenced{memblob.New()}
	if _, err := Init(t.Context(), blob.New(d, nil), nil); !errors.Is(err, blob.ErrUnfenced) || !errors.Is(err, ErrUnsupported) {
		t.Fatalf("init: %v", err)
	}
	var warned []string
	info, err := Init(t.Context(), blob.New(d, nil), &InitOptions{UnsafeNoFencing: true, Warn: func(text string) { warned = append(warned, text) }})
	if err != nil || !info.NoFencing || len(warned) != 1 {
		t.Fatalf("init: %+v, %v, warned %q", info, err, warned)
	}
	w := newWorldOn(t, d)
	w.write(map[string]string{"a": "alpha"})
	w.mustCommit(w.open(), nil)
	w.wantSound()

	fine, err := Init(t.Context(), blob.New(memblob.New(), nil), &InitOptions{UnsafeNoFencing: true})
	if err != nil || fine.NoFencing {
		t.Errorf("a store that fences: %+v, %v", fine, err)
	}
}

// lateStore loses the first answer of one put; what was sent arrives only after the seal,
// when the Store has long sent it again under the same name.
type lateStore struct {
	expiring
	mu   sync.Mutex
	late func()
}

func (l *lateStore) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if opts.TTL == 0 || l.late != nil || !strings.Contains(key, "/b/") {
		return l.expiring.Put(ctx, key, body, opts)
	}
	var sent bytes.Buffer
	if err := body.Copy(ctx, &sent); err != nil {
		return err
	}
	l.late = func() { _ = l.expiring.Put(context.Background(), key, blob.Bytes(sent.Bytes()), opts) }
	return blob.Retriable(errors.New("connection reset"))
}

// I1, I2: no published blob can expire, also when a put whose answer was lost lands late.
func TestLatePutAfterSealI2(t *testing.T) {
	e := &lateStore{}
	e.Driver = memblob.New()
	_, err := Init(t.Context(), blob.New(e, nil), &InitOptions{ExpireUnsealed: true})
	check(t, err)
	w := newWorldOn(t, e)
	w.write(map[string]string{"a": "alpha", "d/b": "beta"})
	w.mustCommit(w.open(), nil)
	e.late()
	if gone := e.Expire(); len(gone) > 0 {
		t.Errorf("the store can remove %q of a checkpoint", gone)
	}
	w.wantSound()
}
