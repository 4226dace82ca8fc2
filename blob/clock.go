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
// ErrUnsupported.
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
	// Only an answer that breaks a promise speaks against the store; a fault says nothing.
	err = s.Put(ctx, a, Bytes([]byte("other")), PutOptions{IfAbsent: true})
	if err == nil {
		return fmt.Errorf("%w: a second create-if-absent of one key succeeded", ErrUnsupported)
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	got, err := s.ReadAll(ctx, a, 0, -1)
	if errors.Is(err, fs.ErrNotExist) || err == nil && string(got) != a {
		return fmt.Errorf("%w: reading what was just written gave %q, %v", ErrUnsupported, got, err)
	}
	if err != nil {
		return err
	}
	return s.probeList(ctx, base, a, b)
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
