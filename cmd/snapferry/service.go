package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"golang.org/x/time/rate"
)

const (
	eventBytes   = 1 << 10
	eventsPerSec = 10_000
)

// service is the application of the demo: it applies a stream of numbered events to a
// Pebble store. Event n writes its own key, and its number under appliedKey, in one
// batch.
type service struct {
	db *pebble.DB

	mu     sync.Mutex // held while an event is applied, and by whoever takes a cut
	offset uint64     // the last event applied
	moved  *sync.Cond // offset has grown, or the service has ended
	err    error      // why it ended
}

var appliedKey = []byte("applied")

func eventKey(n uint64) []byte { return fmt.Appendf(nil, "event-%016d", n) }

// eventValue is what event n writes: bytes that follow from n and do not compress.
func eventValue(n uint64) []byte {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], n)
	value := make([]byte, eventBytes)
	rand.NewChaCha8(seed).Read(value)
	return value
}

// openService opens the store, whose last applied event is offset.
func openService(dir string, offset uint64) (*service, error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	db, err := pebble.Open(dir, &pebble.Options{Logger: quietLogger{}, MemTableSize: 8 << 20})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, err)
	}
	s := &service{db: db, offset: offset}
	s.moved = sync.NewCond(&s.mu)
	return s, nil
}

func (s *service) close() error { return s.db.Close() }

// run applies events in the background until the returned function is called.
func (s *service) run(ctx context.Context) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		pace := rate.NewLimiter(eventsPerSec, eventsPerSec/100)
		for pace.Wait(ctx) == nil {
			if err := s.apply(); err != nil {
				s.fail(err)
				return
			}
		}
		s.fail(context.Cause(ctx))
	})
	return func() error {
		cancel()
		done.Wait()
		if errors.Is(s.err, context.Canceled) {
			return nil
		}
		return s.err
	}
}

func (s *service) apply() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.offset + 1
	b := s.db.NewBatch()
	defer b.Close()
	if err := errors.Join(b.Set(eventKey(n), eventValue(n), nil), b.Set(appliedKey, binary.BigEndian.AppendUint64(nil, n), nil)); err != nil {
		return err
	}
	// No sync: what is not yet durable when the machine dies is read again from the
	// input, from the last checkpoint's offset on.
	if err := b.Commit(pebble.NoSync); err != nil {
		return err
	}
	s.offset = n
	s.moved.Broadcast()
	return nil
}

func (s *service) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	s.moved.Broadcast()
}

func (s *service) applied() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.offset
}

// await returns when the service has applied n more events, or has ended.
func (s *service) await(ctx context.Context, n uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for goal := s.offset + n; s.offset < goal; s.moved.Wait() {
		if s.err != nil {
			return s.err
		}
	}
	return context.Cause(ctx)
}

// check compares the store with what the events up to offset have to leave there, and
// returns how many of them it found. One missing, one too many, or one wrong byte is
// an error.
func (s *service) check() (found uint64, err error) {
	applied, closer, err := s.db.Get(appliedKey)
	if err != nil {
		return 0, fmt.Errorf("offset in the store: %w", err)
	}
	n := binary.BigEndian.Uint64(applied)
	if err := closer.Close(); err != nil {
		return 0, err
	}
	if n != s.offset {
		return 0, fmt.Errorf("the store is at event %d, the checkpoint at %d", n, s.offset)
	}
	events, err := s.db.NewIter(&pebble.IterOptions{LowerBound: []byte("event-"), UpperBound: []byte("event.")})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, events.Close()) }()
	for ok := events.First(); ok; ok = events.Next() {
		want := found + 1
		switch {
		case want > s.offset:
			return found, fmt.Errorf("%s is there, after the offset %d", events.Key(), s.offset)
		case !bytes.Equal(events.Key(), eventKey(want)):
			return found, fmt.Errorf("%s is missing: the next is %s", eventKey(want), events.Key())
		case !bytes.Equal(events.Value(), eventValue(want)):
			return found, fmt.Errorf("%s has other bytes", events.Key())
		}
		found = want
	}
	if err := events.Error(); err != nil {
		return found, err
	}
	if found != s.offset {
		return found, fmt.Errorf("events %d to %d are missing", found+1, s.offset)
	}
	return found, nil
}

// quietLogger keeps Pebble's own messages out of the output. What matters comes back
// as an error.
type quietLogger struct{}

func (quietLogger) Infof(string, ...any)  {}
func (quietLogger) Errorf(string, ...any) {}

// Fatalf is for broken invariants, after which Pebble must not go on.
func (quietLogger) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
