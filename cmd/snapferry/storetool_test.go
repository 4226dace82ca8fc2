package main

import (
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/dgraph-io/badger/v4"
	"go.etcd.io/bbolt"
	_ "modernc.org/sqlite" // driver
)

// storetool is the owner of databases in scripts:
//
//	storetool make KIND PATH N   makes a database with the numbers 1 to N
//	storetool hold KIND PATH     opens it, makes the file PATH.held, and keeps it open while
//	                             that is there; an SQLite database is written to meanwhile
//	storetool count KIND PATH    lets the database check itself, and prints N
//	storetool crash sqlite PATH  ends in the middle of a transaction
//
// KIND is sqlite, wal, bolt, pebble or badger.
func storetool() {
	if err := runStoretool(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "storetool:", err)
		os.Exit(1)
	}
}

func runStoretool(args []string) error {
	s, err := openStore(args[1], args[2])
	if err != nil {
		return err
	}
	switch args[0] {
	case "make":
		n, err := strconv.Atoi(args[3])
		return errors.Join(err, s.add(1, n), s.close())
	case "hold":
		return errors.Join(holdStore(s, args[1], args[2]+".held"), s.close())
	case "count":
		n, err := s.count()
		fmt.Println(n)
		return errors.Join(err, s.close())
	case "crash":
		return s.crash()
	}
	return fmt.Errorf("unknown verb %s", args[0])
}

func holdStore(s ownStore, kind, held string) error {
	if err := os.WriteFile(held, nil, 0o600); err != nil {
		return err
	}
	for n := 1_000_000; ; n++ {
		if _, err := os.Stat(held); err != nil {
			return nil
		}
		if kind == "sqlite" || kind == "wal" {
			if err := s.add(n, n); err != nil {
				return err
			}
		}
		<-time.After(time.Millisecond)
	}
}

// ownStore is an open database.
type ownStore struct {
	add   func(from, to int) error
	count func() (int, error)
	close func() error
	crash func() error
}

func openStore(kind, path string) (ownStore, error) {
	switch kind {
	case "sqlite":
		return openSQLite(path, "delete")
	case "wal":
		return openSQLite(path, "wal")
	case "bolt":
		return openBolt(path)
	case "pebble":
		return openPebble(path)
	case "badger":
		return openBadger(path)
	}
	return ownStore{}, fmt.Errorf("unknown kind %s", kind)
}

func openSQLite(path, mode string) (s ownStore, err error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(10000)&_pragma=journal_mode("+mode+")")
	if err != nil {
		return s, err
	}
	db.SetMaxOpenConns(1)
	if _, err := db.Exec("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, v BLOB)"); err != nil {
		return s, err
	}
	insert := "WITH RECURSIVE c(n) AS (SELECT ? UNION ALL SELECT n+1 FROM c WHERE n < ?) INSERT OR REPLACE INTO t SELECT n, randomblob(1000) FROM c"
	return ownStore{
		add: func(from, to int) error { _, err := db.Exec(insert, from, to); return err },
		count: func() (n int, err error) {
			var said string
			if err := db.QueryRow("PRAGMA integrity_check").Scan(&said); err != nil || said != "ok" {
				return 0, fmt.Errorf("integrity check: %s, %w", said, err)
			}
			return n, db.QueryRow("SELECT count(*) FROM t WHERE n < 1000000").Scan(&n)
		},
		close: db.Close,
		crash: func() error {
			// More than fits into the cache, so that pages are written before the commit.
			for _, q := range []string{"PRAGMA cache_size = 10", "BEGIN", "UPDATE t SET v = randomblob(1000)"} {
				if _, err := db.Exec(q); err != nil {
					return err
				}
			}
			os.Exit(0)
			return nil
		},
	}, nil
}

func openBolt(path string) (s ownStore, err error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		return s, err
	}
	return ownStore{
		add: func(from, to int) error {
			return db.Update(func(tx *bbolt.Tx) error {
				b, err := tx.CreateBucketIfNotExists([]byte("t"))
				for n := from; n <= to && err == nil; n++ {
					err = b.Put(binary.BigEndian.AppendUint64(nil, uint64(n)), make([]byte, 1000))
				}
				return err
			})
		},
		count: func() (n int, err error) {
			return n, db.View(func(tx *bbolt.Tx) error {
				for err := range tx.Check() {
					return err
				}
				n = tx.Bucket([]byte("t")).Stats().KeyN
				return nil
			})
		},
		close: db.Close,
	}, nil
}

func openPebble(path string) (s ownStore, err error) {
	db, err := pebble.Open(path, &pebble.Options{Logger: silent{}})
	if err != nil {
		return s, err
	}
	return ownStore{
		add: func(from, to int) error {
			for n := from; n <= to; n++ {
				if err := db.Set(binary.BigEndian.AppendUint64(nil, uint64(n)), make([]byte, 1000), pebble.NoSync); err != nil {
					return err
				}
			}
			return db.Flush()
		},
		count: func() (n int, err error) {
			if err := db.CheckLevels(nil); err != nil {
				return 0, err
			}
			it, err := db.NewIter(nil)
			if err != nil {
				return 0, err
			}
			for it.First(); it.Valid(); it.Next() {
				n++
			}
			return n, it.Close()
		},
		close: db.Close,
	}, nil
}

// silent is a logger for databases in tests.
type silent struct{}

func (silent) Infof(string, ...any)           {}
func (silent) Errorf(string, ...any)          {}
func (silent) Fatalf(format string, a ...any) { panic(fmt.Sprintf(format, a...)) }

func openBadger(path string) (s ownStore, err error) {
	db, err := badger.Open(badger.DefaultOptions(path).WithLogger(nil).WithMemTableSize(1 << 20).WithValueThreshold(512).WithValueLogFileSize(4 << 20))
	if err != nil {
		return s, err
	}
	return ownStore{
		add: func(from, to int) error {
			w := db.NewWriteBatch()
			for n := from; n <= to; n++ {
				if err := w.Set([]byte(fmt.Sprintf("%08d", n)), []byte(strings.Repeat("v", 1000))); err != nil {
					return err
				}
			}
			return w.Flush()
		},
		count: func() (n int, err error) {
			if err := db.VerifyChecksum(); err != nil {
				return 0, err
			}
			return n, db.View(func(tx *badger.Txn) error {
				it := tx.NewIterator(badger.DefaultIteratorOptions)
				defer it.Close()
				for it.Rewind(); it.Valid(); it.Next() {
					n++
				}
				return nil
			})
		},
		close: db.Close,
	}, nil
}
