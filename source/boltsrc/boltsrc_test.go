//go:build linux

package boltsrc_test

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/boltsrc"
	"github.com/snapferry/snapferry/source/sourcetest"
)

const fileName = "store.db"

var bucket = []byte("history")

type store struct{ db *bbolt.DB }

func (s store) Source() source.Source { return boltsrc.New(s.db, nil) }
func (s store) Close() error          { return s.db.Close() }
func (s store) Write(n uint64) error  { return s.put([]uint64{n}, 0) }

// put writes numbers in one transaction.
func (s store) put(numbers []uint64, fill byte) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists(bucket)
		if err != nil {
			return err
		}
		for _, n := range numbers {
			value := make([]byte, 300)
			value[0], value[299] = fill, fill
			if err := b.Put(binary.BigEndian.AppendUint64(nil, n), value); err != nil {
				return err
			}
		}
		return nil
	})
}

// kept opens a database that is closed after the images that a test takes of it.
func kept(t *testing.T, file string) *bbolt.DB {
	t.Helper()
	db := open(t, file, nil)
	t.Cleanup(func() { db.Close() })
	return db
}

func open(t *testing.T, file string, opts *bbolt.Options) *bbolt.DB {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	db, err := bbolt.Open(file, 0o600, opts)
	if err != nil {
		t.Fatal(err)
	}
	return db
}

func newStore(opts bbolt.Options) func(*testing.T, string) sourcetest.Store {
	// A test holds images from the goroutine that writes: the map must not have to grow.
	opts.InitialMmapSize = 256 << 20
	opts.NoSync = true
	return func(t *testing.T, dir string) sourcetest.Store {
		return store{open(t, filepath.Join(dir, fileName), &opts)}
	}
}

func read(t *testing.T, dir string) []uint64 {
	db := open(t, filepath.Join(dir, fileName), nil)
	defer db.Close()
	var numbers []uint64
	err := db.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucket)
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, _ []byte) error {
			numbers = append(numbers, binary.BigEndian.Uint64(k))
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return numbers
}

// check is bbolt's own: every page is reachable or free, once, and in order.
func check(t *testing.T, dir string) {
	t.Helper()
	db := open(t, filepath.Join(dir, fileName), &bbolt.Options{ReadOnly: true, PreLoadFreelist: true})
	defer db.Close()
	err := db.View(func(tx *bbolt.Tx) error {
		var all []error
		for err := range tx.Check() {
			all = append(all, err)
		}
		return errors.Join(all...)
	})
	if err != nil {
		t.Fatalf("bbolt check: %v", err)
	}
}

var increment = &sourcetest.Increment{
	Records: 100_000,
	Fill: func(t *testing.T, s sourcetest.Store, n uint64) {
		var batch []uint64
		for i := uint64(1); i <= n; i++ {
			if batch = append(batch, i); len(batch) == 10_000 || i == n {
				rewrite(t, s, batch)
				batch = batch[:0]
			}
		}
	},
	Rewrite: rewrite,
	// Half of the leaves are written anew, 10 records to a leaf of 4 KiB, one after the
	// other at the end of the file.
	MaxShare: 0.2,
}

func rewrite(t *testing.T, s sourcetest.Store, numbers []uint64) {
	t.Helper()
	if err := s.(store).put(numbers, byte(len(numbers)%251)); err != nil {
		t.Fatal(err)
	}
}

func TestBolt(t *testing.T) {
	sourcetest.Run(t, sourcetest.Harness{New: newStore(bbolt.Options{}), Read: read, Check: check, Increment: increment})
}

// The free list may be left out of the file, and is found by a scan when it is opened.
func TestBoltWithoutFreelist(t *testing.T) {
	sourcetest.Run(t, sourcetest.Harness{
		New:  newStore(bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType}),
		Read: read, Check: check,
	})
}

func TestBoltLargePages(t *testing.T) {
	sourcetest.Run(t, sourcetest.Harness{New: newStore(bbolt.Options{PageSize: 16 << 10}), Read: read, Check: check})
}

// A database whose path leads to another file by now is refused: its image would get the
// name, and the metadata, of a stranger.
func TestReplacedFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), fileName)
	db := open(t, file, nil)
	defer db.Close()
	if err := os.Rename(file, file+".old"); err != nil {
		t.Fatal(err)
	}
	other := open(t, file, nil)
	defer other.Close()
	if img, err := boltsrc.New(db, nil).Freeze(t.Context()); !errors.Is(err, source.ErrChanged) {
		t.Fatalf("freeze of a replaced database: %v, %v", img, err)
	}
	if n := db.Stats().OpenTxN; n != 0 {
		t.Errorf("%d transactions are open after a failed freeze", n)
	}
}

func TestRemovedWhileRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), fileName)
	db := kept(t, file)
	img := sourcetest.Freeze(t, boltsrc.New(db, nil))
	f, err := img.Open(fileName)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := f.Check(); !errors.Is(err, source.ErrChanged) {
		t.Errorf("check of a removed database: %v", err)
	}
}

func TestClosedDatabase(t *testing.T) {
	db := open(t, filepath.Join(t.TempDir(), fileName), nil)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := boltsrc.New(db, nil).Freeze(t.Context()); err == nil {
		t.Error("freeze of a closed database succeeded")
	}
}

// Release ends the read transaction, so that the database can be closed.
func TestReleaseEndsTheTransaction(t *testing.T) {
	db := kept(t, filepath.Join(t.TempDir(), fileName))
	img := sourcetest.Freeze(t, boltsrc.New(db, nil))
	if n := db.Stats().OpenTxN; n != 1 {
		t.Errorf("%d transactions are open with an image, want 1", n)
	}
	if err := img.Release(); err != nil {
		t.Fatal(err)
	}
	if n := db.Stats().OpenTxN; n != 0 {
		t.Errorf("%d transactions are open after release", n)
	}
}
