//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

const (
	stateValue = 1 << 10  // bytes of a value in the database
	flatFile   = 64 << 20 // bytes of a file of a snapshot without a database
)

// snap is a snapshot that a process has made.
type snap struct {
	ID    string
	Bytes int64
	Dir   string // of its files
}

// maker makes snapshots in a store.
type maker struct {
	ctx   context.Context
	store *snapstore.Store
	made  []snap
}

// makerName is the store that a maker's process fills, and another one serves.
const makerName = "maker"

// withMaker opens the store of a directory, and closes it at the end.
func withMaker(ctx context.Context, dir string, work func(m *maker) error) (_ []snap, err error) {
	store, err := snapstore.Open(filepath.Join(dir, makerName), nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	m := &maker{ctx: ctx, store: store}
	err = work(m)
	return m.made, err
}

// freeze makes the next snapshot of what fill puts into a directory that it makes.
func (m *maker) freeze(fill func(dir string) error) error {
	d, err := m.store.Draft()
	if err != nil {
		return err
	}
	if err := fill(d.Dir()); err != nil {
		return errors.Join(err, d.Abort())
	}
	held, err := d.Commit(m.ctx, protocol.Meta{
		Group: "bench", Term: 1, Index: uint64(1 + len(m.made)), Conf: protocol.Conf{Voters: []uint64{1, 2, 3}},
		Lineage: protocol.Lineage{Maker: 1, Incarnation: "bench"},
	}, nil)
	if err != nil {
		return errors.Join(err, d.Abort())
	}
	dir, err := m.store.Dir(held.ID)
	m.made = append(m.made, snap{held.ID.String(), held.Bytes, dir})
	return err
}

// bytesFor gives bytes that do not compress, the same ones for the same numbers.
func bytesFor(numbers ...uint64) *rand.ChaCha8 {
	var seed [32]byte
	for i, n := range numbers {
		binary.LittleEndian.PutUint64(seed[8*i:], n)
	}
	return rand.NewChaCha8(seed)
}

// makeFiles makes one snapshot of so many MiB in large files.
func makeFiles(ctx context.Context, dir, mib string) ([]snap, error) {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return nil, err
	}
	return withMaker(ctx, dir, func(m *maker) error {
		return m.freeze(func(dir string) error {
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			for i, left := 0, n<<20; left > 0; i, left = i+1, left-flatFile {
				data := make([]byte, min(left, flatFile))
				_, _ = bytesFor(uint64(i)).Read(data) // it has no errors
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%06d", i)), data, 0o644); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// makeDatabase makes two snapshots of one database of so many keys: of all of them, and
// after one in a hundred, taken at random, has got another value.
func makeDatabase(ctx context.Context, dir, keys string) ([]snap, error) {
	n, err := strconv.Atoi(keys)
	if err != nil {
		return nil, err
	}
	return withMaker(ctx, dir, func(m *maker) (err error) {
		d, err := openDatabase(filepath.Join(dir, "database"))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.db.Close(), os.RemoveAll(filepath.Join(dir, "database"))) }()
		for i := range n {
			if err := d.set(uint64(i)); err != nil {
				return err
			}
		}
		// Keys that come in order stay where they are first written; in a database that has
		// lived for a while nearly everything lies in the last level.
		if err := d.db.Compact(ctx, []byte("key"), []byte("kez"), false); err != nil {
			return err
		}
		if err := errors.Join(d.settle(ctx), m.freeze(d.checkpoint)); err != nil {
			return err
		}
		changed, pick := map[uint64]bool{}, rand.New(bytesFor(1, 2))
		for len(changed) < n/100 {
			i := pick.Uint64N(uint64(n))
			if changed[i] {
				continue
			}
			changed[i] = true
			if err := d.set(i); err != nil {
				return err
			}
		}
		return errors.Join(d.settle(ctx), m.freeze(d.checkpoint))
	})
}

// database is the state of a member, with the settings that `snapferry server` gives to its
// own: Raft's log stands in for Pebble's, and memtables are large.
type database struct {
	db     *pebble.DB
	values *rand.ChaCha8
	value  [stateValue]byte
}

func openDatabase(dir string) (*database, error) {
	db, err := pebble.Open(dir, &pebble.Options{
		DisableWAL: true, MemTableSize: 32 << 20, MemTableStopWritesThreshold: 4,
		FormatMajorVersion: pebble.FormatTableFormatV6, ErrorIfExists: true, Logger: mute{},
	})
	return &database{db: db, values: bytesFor(0)}, err
}

// set gives a key a new value.
func (d *database) set(i uint64) error {
	_, _ = d.values.Read(d.value[:]) // it has no errors
	return d.db.Set(fmt.Appendf(nil, "key%013d", i), d.value[:], pebble.NoSync)
}

// settle waits until Pebble finds nothing to compact.
func (d *database) settle(ctx context.Context) error {
	if err := d.db.Flush(); err != nil {
		return err
	}
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for quiet := 0; quiet < 10; quiet++ {
		if m := d.db.Metrics(); m.Compact.NumInProgress > 0 || m.Flush.NumInProgress > 0 {
			quiet = 0
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (d *database) checkpoint(dir string) error { return d.db.Checkpoint(dir) }

// mute drops what Pebble says.
type mute struct{}

func (mute) Infof(string, ...any)  {}
func (mute) Errorf(string, ...any) {}
func (mute) Fatalf(format string, args ...any) {
	panic("pebble: " + fmt.Sprintf(format, args...))
}
