//go:build linux

package badgersrc_test

import (
	"encoding/binary"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/badgersrc"
)

const (
	benchRecords = 150_000
	benchSmall   = 400      // in tables
	benchLarge   = 16 << 10 // in the value log: every eighth record
)

func benchDB(b *testing.B) *badger.DB {
	b.Helper()
	o := badger.DefaultOptions(filepath.Join(b.TempDir(), "db")).WithLogger(nil).WithValueThreshold(1 << 10)
	o.ValueLogFileSize = 128 << 20
	db, err := badger.Open(o)
	if err != nil {
		b.Fatal(err)
	}
	all := make([]uint64, benchRecords)
	for i := range all {
		all[i] = uint64(i)
	}
	benchPut(b, db, all)
	return db
}

func benchPut(b *testing.B, db *badger.DB, records []uint64) {
	b.Helper()
	batch := db.NewWriteBatch()
	defer batch.Cancel()
	for _, n := range records {
		v := make([]byte, benchSmall)
		if n%8 == 0 {
			v = make([]byte, benchLarge)
		}
		for i := 0; i < len(v); i += 8 {
			binary.LittleEndian.PutUint64(v[i:], rand.Uint64())
		}
		if err := batch.Set(binary.BigEndian.AppendUint64(nil, n), v); err != nil {
			b.Fatal(err)
		}
	}
	if err := batch.Flush(); err != nil {
		b.Fatal(err)
	}
}

func onePercent() []uint64 {
	var some []uint64
	for range benchRecords / 100 {
		some = append(some, rand.Uint64N(benchRecords))
	}
	return some
}

// BenchmarkFreeze freezes a database of some 370 MB while a writer commits, and reports
// how long that takes, how much is linked, and how much is read after 1 % of the records
// were written again.
func BenchmarkFreeze(b *testing.B) {
	db := benchDB(b)
	defer db.Close()
	src := badgersrc.New(db, nil)
	quit, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-quit:
				ended <- nil
				return
			default:
			}
			err := db.Update(func(txn *badger.Txn) error {
				return txn.Set(binary.BigEndian.AppendUint64(nil, rand.Uint64N(benchRecords)), make([]byte, benchSmall))
			})
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	var times []time.Duration
	for b.Loop() {
		begun := time.Now()
		img, err := src.Freeze(b.Context())
		times = append(times, time.Since(begun))
		if err != nil {
			b.Fatal(err)
		}
		if err := img.Release(); err != nil {
			b.Fatal(err)
		}
	}
	close(quit)
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, "ms-median")
	b.ReportMetric(float64(times[len(times)-1].Microseconds())/1000, "ms-max")
	reportIncrement(b, db, src)
}

func reportIncrement(b *testing.B, db *badger.DB, src source.Source) {
	known := map[source.Identity]bool{}
	total, _ := toRead(b, src, known)
	benchPut(b, db, onePercent())
	_, fresh := toRead(b, src, known)
	b.ReportMetric(float64(total)/1e6, "MB-image")
	b.ReportMetric(float64(fresh)/1e6, "MB-read-after-1%")
}

// toRead returns the size of an image and of what is not known of it.
func toRead(b *testing.B, src source.Source, known map[source.Identity]bool) (total, fresh int64) {
	img, err := src.Freeze(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer img.Release()
	for _, e := range img.Entries() {
		total += e.Size
		if e.Fresh || !known[e.Identity] {
			fresh += e.Size
		}
		known[e.Identity] = true
	}
	return total, fresh
}

type counter int64

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

// BenchmarkStream is the other way: Badger's own backup of all, and of what is newer than
// the one before after 1 % of the records were written again.
func BenchmarkStream(b *testing.B) {
	db := benchDB(b)
	defer db.Close()
	for b.Loop() {
		var full, some counter
		begun := time.Now()
		version, err := db.Backup(&full, 0)
		if err != nil {
			b.Fatal(err)
		}
		first := time.Since(begun)
		benchPut(b, db, onePercent())
		begun = time.Now()
		if _, err := db.Backup(&some, version); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(first.Seconds()*1000, "ms-full")
		b.ReportMetric(float64(full)/1e6, "MB-full")
		b.ReportMetric(time.Since(begun).Seconds()*1000, "ms-after-1%")
		b.ReportMetric(float64(some)/1e6, "MB-after-1%")
	}
}
