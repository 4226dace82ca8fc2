//go:build linux

package badgersrc_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/badgersrc"
	"github.com/snapferry/snapferry/source/sourcetest"
)

// small makes flushes, compactions and new value log files frequent.
func small(dir string) badger.Options {
	o := badger.DefaultOptions(dir).WithLogger(nil)
	o.MemTableSize = 64 << 10
	o.ValueThreshold = 1 << 10
	o.ValueLogFileSize = 1 << 20
	o.ValueLogMaxEntries = 100
	o.BaseTableSize = 64 << 10
	o.BaseLevelSize = 256 << 10
	o.NumLevelZeroTables = 2
	o.BlockCacheSize = 8 << 20
	o.NumCompactors = 2
	return o
}

func synced(dir string) badger.Options { return small(dir).WithSyncWrites(true) }

var secret = bytes.Repeat([]byte{7}, 32)

func encrypted(dir string) badger.Options {
	return small(dir).WithEncryptionKey(secret).WithIndexCacheSize(8 << 20)
}

// A store has beside its history keys that are written again and again, so that there is
// garbage in the value log.
type store struct {
	db        *badger.DB
	stop      chan struct{}
	done      chan struct{}
	collected atomic.Int64 // files of the value log
}

func newStore(t *testing.T, o badger.Options) *store {
	t.Helper()
	db, err := badger.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	s := &store{db: db, stop: make(chan struct{}), done: make(chan struct{})}
	go s.collect()
	return s
}

// collect runs the collector of the value log beside everything else.
func (s *store) collect() {
	defer close(s.done)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
			for collects && s.db.RunValueLogGC(0.01) == nil {
				s.collected.Add(1)
			}
		}
	}
}

func (s *store) Source() source.Source { return badgersrc.New(s.db, nil) }

func (s *store) Close() error {
	close(s.stop)
	<-s.done
	return s.db.Close()
}

// value returns the value of number n: each fourth is one for the value log.
func value(n uint64) []byte {
	size := 40 + int(n%7)*20
	if n%4 == 0 {
		size = 1500 + int(n%5)*3000
	}
	v := make([]byte, size)
	for i := range v {
		v[i] = byte(n*31 + uint64(i))
	}
	return v
}

const churned = 16

// Write is one transaction: the number, and a value that replaces another.
func (s *store) Write(n uint64) error {
	return s.db.Update(func(txn *badger.Txn) error {
		if err := txn.Set(binary.BigEndian.AppendUint64([]byte("n"), n), value(n)); err != nil {
			return err
		}
		churn := append(binary.BigEndian.AppendUint64(nil, n), value(4*n)...)
		return txn.Set([]byte{'c', byte(n % churned)}, churn)
	})
}

// reader opens copies with options like those of the store, lets Badger check them, and
// reads every value.
func reader(options func(string) badger.Options) func(t *testing.T, dir string) []uint64 {
	return func(t *testing.T, dir string) []uint64 {
		t.Helper()
		// Read-only first: Badger refuses to open a database so that needs repair.
		ro, err := badger.Open(options(dir).WithReadOnly(true))
		if err != nil {
			t.Fatalf("open read-only: %v", err)
		}
		if err := ro.Close(); err != nil {
			t.Fatal(err)
		}
		db, err := badger.Open(options(dir))
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if err := db.VerifyChecksum(); err != nil {
			t.Errorf("verify checksums: %v", err)
		}
		return numbers(t, db)
	}
}

func numbers(t *testing.T, db *badger.DB) (found []uint64) {
	t.Helper()
	churn := map[byte]uint64{}
	err := db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.DefaultIteratorOptions)
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := it.Item().KeyCopy(nil)
			v, err := it.Item().ValueCopy(nil)
			switch {
			case err != nil:
				return err
			case len(v) < 8:
				t.Errorf("key %q has a value of %d bytes", key, len(v))
				continue
			case key[0] == 'c':
				churn[key[1]] = binary.BigEndian.Uint64(v)
				continue
			}
			n := binary.BigEndian.Uint64(key[1:])
			if !bytes.Equal(v, value(n)) && !bytes.Equal(v, other(n)) {
				t.Errorf("number %d has another value", n)
			}
			found = append(found, n)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	// Transactions are whole: the other half of the last ones is there too.
	last := uint64(len(found))
	for n := last; n > 0 && n+churned > last; n-- {
		if churn[byte(n%churned)] != n {
			t.Errorf("key of transaction %d holds %d", n, churn[byte(n%churned)])
		}
	}
	return found
}

func harness(options func(string) badger.Options) sourcetest.Harness {
	return sourcetest.Harness{
		New:  func(t *testing.T, dir string) sourcetest.Store { return newStore(t, options(dir)) },
		Read: reader(options),
		// With tables and value log files of 1 MiB and less, compactions rewrite much of what
		// there is: this bound is for the tests' small stores.
		Increment: &sourcetest.Increment{Records: 20000, Fill: fill, Rewrite: rewrite, MaxShare: 0.35},
	}
}

func fill(t *testing.T, s sourcetest.Store, n uint64) {
	t.Helper()
	batch := s.(*store).db.NewWriteBatch()
	defer batch.Cancel()
	for i := uint64(1); i <= n; i++ {
		put(t, batch, i, value(i))
	}
	for i := n - churned + 1; i <= n; i++ {
		churn := append(binary.BigEndian.AppendUint64(nil, i), value(4*i)...)
		if err := batch.Set([]byte{'c', byte(i % churned)}, churn); err != nil {
			t.Fatal(err)
		}
	}
	if err := batch.Flush(); err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, batch *badger.WriteBatch, n uint64, v []byte) {
	t.Helper()
	if err := batch.Set(binary.BigEndian.AppendUint64([]byte("n"), n), v); err != nil {
		t.Fatal(err)
	}
}

func rewrite(t *testing.T, s sourcetest.Store, numbers []uint64) {
	t.Helper()
	batch := s.(*store).db.NewWriteBatch()
	defer batch.Cancel()
	for _, n := range numbers {
		put(t, batch, n, other(n))
	}
	if err := batch.Flush(); err != nil {
		t.Fatal(err)
	}
}

// other returns the value that a rewrite gives number n.
func other(n uint64) []byte {
	v := value(n)
	v[len(v)-1] ^= 0xff
	return v
}

func TestBadger(t *testing.T)          { sourcetest.Run(t, harness(small)) }
func TestBadgerSynced(t *testing.T)    { sourcetest.Run(t, harness(synced)) }
func TestBadgerEncrypted(t *testing.T) { sourcetest.Run(t, harness(encrypted)) }

// opened returns a store that is closed with the test.
func opened(t *testing.T) (s *store, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "db")
	s = newStore(t, small(dir))
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, dir
}

// A writer commits numbers and says how far it is. It pauses when it is as far ahead of
// the images as it may be, so that the history does not outgrow the test.
type writer struct {
	at      chan uint64 // the last number that was committed
	credits chan struct{}
	quit    chan struct{}
	ended   chan error
}

const ahead = 300

func startWriter(write func(n uint64) error) *writer {
	w := &writer{make(chan uint64, 1), make(chan struct{}, ahead), make(chan struct{}), make(chan error, 1)}
	w.at <- 0
	go func() { w.ended <- w.run(write) }()
	return w
}

func (w *writer) run(write func(n uint64) error) error {
	for n := uint64(1); ; n++ {
		select {
		case <-w.quit:
			return nil
		case <-w.credits:
		}
		if err := write(n); err != nil {
			return err
		}
		<-w.at
		w.at <- n
	}
}

// more lets the writer go on.
func (w *writer) more() {
	for range ahead {
		select {
		case w.credits <- struct{}{}:
		default:
			return
		}
	}
}

func (w *writer) last() uint64 {
	n := <-w.at
	w.at <- n
	return n
}

func (w *writer) stop(t *testing.T) {
	t.Helper()
	close(w.quit)
	if err := <-w.ended; err != nil {
		t.Error(err)
	}
}

func rounds() int {
	if testing.Short() {
		return 10
	}
	return 15
}

// Many images under the collector, compactions and rotation of everything: each a prefix
// of the history that holds what was committed before it (S1).
func TestManyImagesUnderLoadS1(t *testing.T) {
	s, _ := opened(t)
	w := startWriter(s.Write)
	defer w.stop(t)
	for range rounds() {
		w.more()
		least := w.last()
		img := sourcetest.Freeze(t, s.Source())
		got := reader(small)(t, sourcetest.Copy(t, img))
		for i, n := range got {
			if n != uint64(i)+1 {
				t.Fatalf("image has %d at place %d", n, i+1)
			}
		}
		if uint64(len(got)) < least {
			t.Fatalf("image holds %d writes, %d were committed before", len(got), least)
		}
		if err := img.Release(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d files of the value log were collected beside it", s.collected.Load())
	if collects && s.collected.Load() == 0 {
		t.Error("the collector found nothing to do: the test is too tame")
	}
}

// Several writers at once: what each had committed before Freeze is in the image, and of
// each a prefix.
func TestManyWritersS1(t *testing.T) {
	s, _ := opened(t)
	var writers [8]*writer
	for i := range writers {
		writers[i] = startWriter(func(n uint64) error { return writeRun(s.db, byte(i), n) })
		defer writers[i].stop(t)
	}
	for range rounds() / 2 {
		var least [len(writers)]uint64
		for i, w := range writers {
			w.more()
			least[i] = w.last()
		}
		img := sourcetest.Freeze(t, s.Source())
		checkRuns(t, sourcetest.Copy(t, img), least[:])
		if err := img.Release(); err != nil {
			t.Fatal(err)
		}
	}
}

// writeRun commits (w, n) with a value of any size.
func writeRun(db *badger.DB, w byte, n uint64) error {
	v := make([]byte, rand.IntN(6000))
	return db.Update(func(txn *badger.Txn) error {
		return txn.Set(binary.BigEndian.AppendUint64([]byte{w}, n), v)
	})
}

func checkRuns(t *testing.T, dir string, least []uint64) {
	t.Helper()
	db, err := badger.Open(small(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	got := make([]uint64, len(least))
	err = db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.DefaultIteratorOptions)
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := it.Item().Key()
			w, n := key[0], binary.BigEndian.Uint64(key[1:])
			if n != got[w]+1 {
				t.Errorf("writer %d: %d follows %d", w, n, got[w])
			}
			got[w] = n
			if _, err := it.Item().ValueCopy(nil); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for w := range least {
		if got[w] < least[w] {
			t.Errorf("writer %d: image ends at %d, %d was committed before", w, got[w], least[w])
		}
	}
}

// What Badger compacts and collects away while an image lives stays in it: it would be
// emptied, links or not.
func TestPinHoldsFiles(t *testing.T) {
	s, _ := opened(t)
	for n := uint64(1); n <= 1500; n++ {
		if err := s.Write(n); err != nil {
			t.Fatal(err)
		}
	}
	img := sourcetest.Freeze(t, s.Source())
	for n := uint64(1501); n <= 4000; n++ {
		if err := s.Write(n); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.db.Flatten(1); err != nil {
		t.Fatal(err)
	}
	if got := reader(small)(t, sourcetest.Copy(t, img)); len(got) != 1500 {
		t.Errorf("image holds %d writes, want 1500", len(got))
	}
}

// Tables and full value log files are the live inodes; only the rest is read again (I5).
func TestImmutableLinks(t *testing.T) {
	s, dir := opened(t)
	for n := uint64(1); n <= 2000; n++ {
		if err := s.Write(n); err != nil {
			t.Fatal(err)
		}
	}
	img := sourcetest.Freeze(t, s.Source())
	links, fresh := 0, 0
	for _, e := range img.Entries() {
		switch {
		case e.Immutable && !e.Fresh:
			links++
			live, err := os.Stat(filepath.Join(dir, e.Path))
			if err != nil || live.Size() != e.Size {
				t.Errorf("%s is not the live file: %v", e.Path, err)
			}
		case strings.HasSuffix(e.Path, ".sst"):
			t.Errorf("%s: immutable %v, fresh %v", e.Path, e.Immutable, e.Fresh)
		case strings.HasSuffix(e.Path, ".vlog"):
			fresh++
		}
	}
	if links < 5 || fresh > 1 {
		t.Errorf("%d linked files, %d value log files in use", links, fresh)
	}
}

func TestRefused(t *testing.T) {
	apart := small(filepath.Join(t.TempDir(), "db"))
	apart.ValueDir = filepath.Join(t.TempDir(), "values")
	for name, o := range map[string]badger.Options{
		"memory": small("").WithInMemory(true),
		"apart":  apart,
	} {
		db, err := badger.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		img, err := badgersrc.New(db, nil).Freeze(t.Context())
		if !errors.Is(err, source.ErrUnsupported) {
			t.Errorf("%s: error %v, want ErrUnsupported", name, err)
		}
		if img != nil {
			t.Errorf("%s: an image", name)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
}
