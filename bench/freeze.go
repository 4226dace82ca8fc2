//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/pebblesrc"
)

const (
	pebbleBytes   = 2 << 30
	pebbleValue   = 1 << 10
	pebbleBatch   = 1000
	pebbleWriters = 4
	freezes       = 100                    // at scale 1
	freezePause   = 100 * time.Millisecond // in which the load writes on
)

// freezeSync is how long writes wait for Freeze where each of them is synced.
func (b *bench) freezeSync() ([]sample, error) { return b.freezeUnder(pebble.Sync) }

// freezeNoSync is the same where none is, so that Freeze finds much to sync.
func (b *bench) freezeNoSync() ([]sample, error) { return b.freezeUnder(pebble.NoSync) }

// freezeUnder freezes a database while writers replace random values as fast as they can.
func (b *bench) freezeUnder(wo *pebble.WriteOptions) (samples []sample, err error) {
	keys, err := b.pebble()
	if err != nil {
		return nil, err
	}
	db, err := openPebble(b.pebbleDir, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	load, ctx := errgroup.WithContext(b.ctx)
	loading, stop := context.WithCancel(ctx)
	defer stop()
	written := make([]int64, pebbleWriters)
	for w := range written {
		load.Go(func() (err error) {
			written[w], err = writeOn(loading, db, wo, keys, uint64(w))
			return err
		})
	}
	start := time.Now()
	samples, err = freezeAgain(ctx, pebblesrc.New(db, nil), int(scaled(freezes, b.scale)))
	stop()
	if err := errors.Join(err, load.Wait()); err != nil {
		return nil, err
	}
	total := int64(0)
	for _, n := range written {
		total += n
	}
	b.note = fmt.Sprintf("p99 %s, longest %s of %d freezes; %d writers, %.0f values of 1 KiB a second",
		millis(percentile(samples, 0.99)), millis(percentile(samples, 1)), len(samples), pebbleWriters,
		float64(total)/time.Since(start).Seconds())
	return samples, nil
}

// freezeAgain measures freezes with pauses between them.
func freezeAgain(ctx context.Context, src source.Source, n int) ([]sample, error) {
	tick := time.NewTicker(freezePause)
	defer tick.Stop()
	var samples []sample
	for len(samples) < n {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		start := time.Now()
		img, err := src.Freeze(ctx)
		took := time.Since(start)
		if err != nil {
			return nil, err
		}
		if err := img.Release(); err != nil {
			return nil, err
		}
		samples = append(samples, sample{Ours: usage{Wall: took}})
	}
	return samples, nil
}

// writeOn replaces random values until ctx is over, and returns how many.
func writeOn(ctx context.Context, db *pebble.DB, wo *pebble.WriteOptions, keys int64, seed uint64) (n int64, err error) {
	r := random(6, seed)
	numbers, v := rand.New(r), make([]byte, pebbleValue)
	for ; ctx.Err() == nil; n++ {
		_, _ = r.Read(v) // never fails
		if err := db.Set(pebbleKey(numbers.Int64N(keys)), v, wo); err != nil {
			return n, err
		}
	}
	return n, nil
}

// pebble makes the database when a row first needs it, and returns how many keys it has.
func (b *bench) pebble() (keys int64, err error) {
	keys = max(pebbleBatch, scaled(pebbleBytes/pebbleValue, b.scale))
	if b.pebbleDir != "" {
		return keys, nil
	}
	dir := b.path("pebble")
	db, err := openPebble(dir, true)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	r, v := random(7), make([]byte, pebbleValue)
	for at := int64(0); at < keys; {
		batch := db.NewBatch()
		for range min(pebbleBatch, keys-at) {
			_, _ = r.Read(v) // never fails
			if err := batch.Set(pebbleKey(at), v, nil); err != nil {
				return 0, err
			}
			at++
		}
		if err := batch.Commit(pebble.NoSync); err != nil {
			return 0, err
		}
	}
	b.pebbleDir = dir
	return keys, db.Flush()
}

func openPebble(dir string, withoutWAL bool) (*pebble.DB, error) {
	opts := &pebble.Options{
		FS:                 pebblesrc.FS(vfs.Default),
		FormatMajorVersion: pebble.FormatNewest, MemTableSize: 32 << 20, DisableWAL: withoutWAL, Logger: quiet{},
	}
	opts.EnsureDefaults()
	opts.WithFSDefaults()
	return pebble.Open(dir, opts)
}

func pebbleKey(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }

// percentile is a time that this share of the samples does not exceed.
func percentile(samples []sample, share float64) time.Duration {
	var times []time.Duration
	for _, s := range samples {
		times = append(times, s.Ours.Wall)
	}
	slices.Sort(times)
	return times[int(math.Ceil(share*float64(len(times))))-1]
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }

// quiet keeps Pebble's tales of its compactions out of the output.
type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}

func (quiet) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
