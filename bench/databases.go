//go:build linux

package main

import (
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"go.etcd.io/bbolt"
	_ "modernc.org/sqlite" // the driver
)

// databaseBytes is the size of the databases in one file, at scale 1.
const databaseBytes = 1 << 30

// database is one in a file that is changed in place.
type database struct {
	file string
	// change writes the values of a round, and check tells whether another file has them.
	change func(round int) error
	check  func(file string, round int) error
}

// increments measures a backup after each change of a database that was backed up before. What
// the last one saved is restored and looked at.
func (b *bench) increments(d *database) ([]sample, error) {
	if err := warm(filepath.Dir(d.file)); err != nil {
		return nil, err
	}
	repo, cache, out := d.file+".repo", d.file+".cache", d.file+".out"
	if _, err := b.backup(repo, cache, d.file); err != nil {
		return nil, err
	}
	samples, err := b.repeat(func(i int) (s sample, err error) {
		if err := d.change(i); err != nil {
			return s, err
		}
		info, err := os.Stat(d.file)
		if err != nil {
			return s, err
		}
		rep, err := b.backup(repo, cache, d.file)
		n := rep.Stores[storeName].BytesUploaded
		if err == nil && n == 0 {
			err = errors.New("a change was not uploaded")
		}
		s.Ours, s.Share = rep.usage, float64(n)/float64(info.Size())
		return s, err
	})
	if err != nil {
		return nil, err
	}
	if _, err := b.restoreTo(repo, out); err != nil {
		return nil, err
	}
	err = d.check(filepath.Join(out, storeName, filepath.Base(d.file)), b.runs-1)
	return samples, first(err, os.RemoveAll(repo), os.RemoveAll(out), os.Remove(d.file))
}

// chosen are the numbers below n that a round changes.
func chosen(n int64, count, round int) []int {
	perm := rand.New(random(4, uint64(round))).Perm(int(n))
	return perm[:count]
}

// value is what a round writes for a number. Round 0 is how a database begins.
func value(size, number, round int) []byte {
	v := make([]byte, size)
	_, _ = random(5, uint64(number), uint64(round)).Read(v) // never fails
	return v
}

// A row of these bytes fills one page of SQLite, so that rows are pages.
const (
	sqlitePage = 4096
	sqliteRow  = 4000

	sqliteTable  = "CREATE TABLE kv (n INTEGER PRIMARY KEY, v BLOB)"
	sqliteInsert = "INSERT INTO kv (v, n) VALUES (?, ?)"
)

func (b *bench) sqlite() ([]sample, error) {
	n := scaled(databaseBytes/sqlitePage, b.scale)
	d := &database{file: b.path("app.sqlite")}
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	if err := writeSQLite(d.file, sqliteTable, sqliteInsert, all, 0); err != nil {
		return nil, err
	}
	percent := int(max(1, n/100))
	d.change = func(i int) error {
		return writeSQLite(d.file, "", "UPDATE kv SET v = ? WHERE n = ?", chosen(n, percent, i+1), i+1)
	}
	d.check = func(file string, i int) error { return checkSQLite(file, chosen(n, percent, i+1), i+1) }
	return b.increments(d)
}

// writeSQLite executes a statement for each number in one transaction. It closes the database,
// which ends its write-ahead log.
func writeSQLite(file, before, each string, numbers []int, round int) (err error) {
	db, err := sql.Open("sqlite", "file:"+file+fmt.Sprintf("?_pragma=page_size(%d)&_pragma=journal_mode(wal)&_pragma=synchronous(off)", sqlitePage))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if _, err := tx.Exec(before); err != nil {
		return err
	}
	stmt, err := tx.Prepare(each)
	if err != nil {
		return err
	}
	defer stmt.Close()
	for _, n := range numbers {
		if _, err := stmt.Exec(value(sqliteRow, n, round), n); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func checkSQLite(file string, numbers []int, round int) (err error) {
	db, err := sql.Open("sqlite", "file:"+file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	for _, n := range numbers {
		var got []byte
		if err := db.QueryRow("SELECT v FROM kv WHERE n = ?", n).Scan(&got); err != nil {
			return err
		}
		if string(got) != string(value(sqliteRow, n, round)) {
			return fmt.Errorf("%s has another value of %d", file, n)
		}
	}
	return nil
}

const (
	boltValue = 500
	boltBatch = 10_000
)

var boltBucket = []byte("kv")

func (b *bench) bolt() ([]sample, error) {
	d := &database{file: b.path("app.bolt")}
	n, err := fillBolt(d.file, scaled(databaseBytes, b.scale))
	if err != nil {
		return nil, err
	}
	count := int(min(n, 1000))
	d.change = func(i int) error { return updateBolt(d.file, chosen(n, count, i+1), i+1) }
	d.check = func(file string, i int) error { return checkBolt(file, chosen(n, count, i+1), i+1) }
	return b.increments(d)
}

// fillBolt writes keys until the file has its size, and returns how many there are.
func fillBolt(file string, size int64) (keys int64, err error) {
	db, err := bbolt.Open(file, 0o600, &bbolt.Options{NoSync: true})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	for have := int64(0); have < size; {
		err := db.Update(func(tx *bbolt.Tx) error {
			bucket, err := tx.CreateBucketIfNotExists(boltBucket)
			if err != nil {
				return err
			}
			bucket.FillPercent = 0.9 // keys come in order
			for range boltBatch {
				if err := bucket.Put(boltKey(int(keys)), value(boltValue, int(keys), 0)); err != nil {
					return err
				}
				keys++
			}
			have = tx.Size()
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return keys, db.Sync()
}

func boltKey(n int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }

// updateBolt changes ten keys in a transaction, as an application would.
func updateBolt(file string, numbers []int, round int) (err error) {
	db, err := bbolt.Open(file, 0o600, &bbolt.Options{NoSync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	for len(numbers) > 0 {
		some := numbers[:min(10, len(numbers))]
		numbers = numbers[len(some):]
		err := db.Update(func(tx *bbolt.Tx) error {
			for _, n := range some {
				if err := tx.Bucket(boltBucket).Put(boltKey(n), value(boltValue, n, round)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return db.Sync()
}

func checkBolt(file string, numbers []int, round int) (err error) {
	db, err := bbolt.Open(file, 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return db.View(func(tx *bbolt.Tx) error {
		for _, n := range numbers {
			if string(tx.Bucket(boltBucket).Get(boltKey(n))) != string(value(boltValue, n, round)) {
				return fmt.Errorf("%s has another value of %d", file, n)
			}
		}
		return nil
	})
}
