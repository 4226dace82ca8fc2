package blob

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// probePrefix begins the keys of throw-away objects. They lie beside what is stored for
// real and are gone again at once, unless their writer is killed.
const probePrefix = "snapferry-probe-"

// Now is the store's own time. Only differences to Info.Modified and to earlier answers
// mean anything.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	now, err := s.driverNow(ctx)
	if errors.Is(err, ErrUnsupported) {
		now, err = s.probeNow(ctx)
	}
	return now, wrap("now", "", err)
}

func (s *Store) driverNow(ctx context.Context) (now time.Time, err error) {
	c, ok := s.driver.(Clock)
	if !ok {
		return now, ErrUnsupported
	}
	err = s.retry(ctx, "now", "", func(ctx context.Context) error {
		return s.call(ctx, func(w *watch) (err error) {
			now, err = c.Now(w.ctx)
			return err
		})
	})
	return now, err
}

// probeNow reads the time off an object written for it.
func (s *Store) probeNow(ctx context.Context) (time.Time, error) {
	key := probePrefix + rand.Text()
	if err := s.Put(ctx, key, Bytes(nil), PutOptions{}); err != nil {
		return time.Time{}, err
	}
	info, err := s.Stat(ctx, key)
	return info.Modified, errors.Join(err, s.Delete(context.WithoutCancel(ctx), []string{key}))
}

// Probe checks with throw-away objects that the store keeps the promises that the commit
// protocol stands on: create-if-absent on a single put, reading and listing what was
// just written, in order and from a start, and deleting. A store that does not is
// ErrUnsupported; it is ErrUnfenced if nothing but create-if-absent is missing.
func (s *Store) Probe(ctx context.Context) (err error) {
	base := probePrefix + rand.Text()
	a, b := base+"-a", base+"/b"
	defer func() {
		err = wrap("probe", "", errors.Join(err, s.Delete(context.WithoutCancel(ctx), []string{a, b})))
	}()
	for _, k := range []string{b, a} {
		if err := s.Put(ctx, k, Bytes([]byte(k)), PutOptions{IfAbsent: true}); err != nil {
			return err
		}
	}
	unfenced := s.probeFence(ctx, a)
	if unfenced != nil && !errors.Is(unfenced, ErrUnfenced) {
		return unfenced
	}
	if err := s.probeList(ctx, base, a, b); err != nil {
		return err
	}
	return unfenced
}

// probeFence creates a key that is there and looks at what that did. Only an answer that
// breaks a promise speaks against the store; a fault says nothing.
func (s *Store) probeFence(ctx context.Context, key string) error {
	const other = "other"
	err := s.Put(ctx, key, Bytes([]byte(other)), PutOptions{IfAbsent: true})
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	got, rerr := s.ReadAll(ctx, key, 0, -1)
	switch {
	case rerr != nil && !errors.Is(rerr, fs.ErrNotExist):
		return rerr
	case rerr != nil || string(got) != key && string(got) != other:
		return fmt.Errorf("%w: reading what was just written gave %q, %v", ErrUnsupported, got, rerr)
	case err == nil || string(got) == other:
		return fmt.Errorf("%w: a second create-if-absent of one key succeeded", ErrUnfenced)
	}
	return nil
}

func (s *Store) probeList(ctx context.Context, base, a, b string) error {
	if err := s.wantList(ctx, base, "", a, b); err != nil {
		return err
	}
	if err := s.wantList(ctx, base, a, b); err != nil {
		return err
	}
	if err := s.Delete(ctx, []string{a, b}); err != nil {
		return err
	}
	return s.wantList(ctx, base, "")
}

func (s *Store) wantList(ctx context.Context, prefix, after string, want ...string) error {
	var got []string
	for info, err := range s.List(ctx, prefix, after) {
		if err != nil {
			return err
		}
		got = append(got, info.Key)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("%w: a list after %q gave %q, want %q", ErrUnsupported, after, got, want)
	}
	return nil
}

// Expires tells whether the store can expire objects by a rule that InstallExpiry makes.
func (s *Store) Expires() bool {
	_, ok := s.driver.(Expirer)
	return ok
}

// InstallExpiry makes the store remove what is put with this TTL and not made permanent
// in time; see Expirer. Stores that cannot are ErrUnsupported.
func (s *Store) InstallExpiry(ctx context.Context, ttl time.Duration) error {
	d, ok := s.driver.(Expirer)
	if !ok {
		return wrap("install expiry", "", fmt.Errorf("%w: %s does not expire objects", ErrUnsupported, s))
	}
	err := s.retry(ctx, "install expiry", "", func(ctx context.Context) error {
		return s.call(ctx, func(w *watch) error { return d.InstallExpiry(w.ctx, ttl) })
	})
	return wrap("install expiry", "", err)
}

// SweepTemp removes temporary files that killed writers left behind, where a store can
// have such, and tells how many. They are no objects and no List shows them.
func (s *Store) SweepTemp(ctx context.Context) (n int, err error) {
	d, ok := s.driver.(TempSweeper)
	if !ok {
		return 0, nil
	}
	err = s.call(ctx, func(w *watch) (err error) {
		n, err = d.SweepTemp(w.ctx)
		return err
	})
	return n, wrap("sweep", "", err)
}
