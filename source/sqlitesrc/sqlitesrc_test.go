//go:build linux

package sqlitesrc_test

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	_ "modernc.org/sqlite" // driver

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/sourcetest"
	"github.com/snapferry/snapferry/source/sqlitesrc"
)

const fileName = "store.db"

type store struct {
	db   *sql.DB
	file string
}

func (s store) Source() source.Source { return sqlitesrc.New(s.file, nil) }
func (s store) Close() error          { return s.db.Close() }

func (s store) Write(n uint64) error {
	_, err := s.db.Exec("INSERT INTO history VALUES (?, zeroblob(300))", n)
	return err
}

func openDB(t *testing.T, file, mode string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=busy_timeout(20000)&_pragma=synchronous(off)&_pragma=journal_mode("+mode+")")
	if err != nil {
		t.Fatal(err)
	}
	return db
}

func newStore(mode string) func(*testing.T, string) sourcetest.Store {
	return func(t *testing.T, dir string) sourcetest.Store {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, fileName)
		db := openDB(t, file, mode)
		mustExec(t, db, "CREATE TABLE history (n INTEGER PRIMARY KEY, value BLOB)")
		return store{db, file}
	}
}

func mustExec(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// read opens a copy, which has to be one file, as an application would.
func read(t *testing.T, dir string) []uint64 {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.Query("SELECT n FROM history ORDER BY n")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var numbers []uint64
	for rows.Next() {
		var n uint64
		if err := rows.Scan(&n); err != nil {
			t.Fatal(err)
		}
		numbers = append(numbers, n)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return numbers
}

func check(t *testing.T, dir string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != 1 || list[0].Name() != fileName {
		t.Fatalf("the image is not the one file %s: %v, %v", fileName, list, err)
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var said string
	if err := db.QueryRow("PRAGMA integrity_check").Scan(&said); err != nil || said != "ok" {
		t.Fatalf("PRAGMA integrity_check: %s, %v", said, err)
	}
}

var increment = &sourcetest.Increment{
	Records: 20_000,
	Fill: func(t *testing.T, s sourcetest.Store, n uint64) {
		mustExec(t, s.(store).db, "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c WHERE n < ?) INSERT INTO history SELECT n, zeroblob(3000) FROM c", n)
	},
	Rewrite: func(t *testing.T, s sourcetest.Store, numbers []uint64) {
		tx, err := s.(store).db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		for _, n := range numbers {
			if _, err := tx.Exec("UPDATE history SET value = ? WHERE n = ?", fmt.Sprintf("%03000d", n), n); err != nil {
				t.Fatal(err)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	},
	// One page of 4 KiB to a record, 8 pages to a chunk, and 1-0.99^8 = 7.7 %, give or take a little.
	// A database of this size has 2,500 chunks.
	MaxShare: 0.095,
}

func harness(mode string) sourcetest.Harness {
	return sourcetest.Harness{New: newStore(mode), Read: read, Check: check, Increment: increment}
}

func TestWAL(t *testing.T) { sourcetest.Run(t, harness("wal")) }

func TestDelete(t *testing.T) { sourcetest.Run(t, harness("delete")) }

func TestTruncate(t *testing.T) { sourcetest.Run(t, harness("truncate")) }

func TestPersist(t *testing.T) { sourcetest.Run(t, harness("persist")) }
