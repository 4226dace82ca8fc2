//go:build linux

package hotsrc

import (
	"encoding/binary"
	"errors"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// What the owner does between the copy of the MANIFEST and that of the logs would tear
// the image: a flush takes logs away that the MANIFEST still needs, or recycles them.
func TestChangeBetweenIsFound(t *testing.T) {
	live := filepath.Join(t.TempDir(), "db")
	db, err := pebble.Open(live, &pebble.Options{Logger: silent{}})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	last := uint64(0)
	write := func(n int) {
		for range n {
			last++
			if err := db.Set(binary.BigEndian.AppendUint64(nil, last), make([]byte, 100), pebble.Sync); err != nil {
				t.Error(err)
			}
		}
	}
	write(20)
	tries := 0
	c := &copier{live: live, tries: 10, between: func() {
		if tries++; tries > 4 {
			return
		}
		for range 3 {
			write(5)
			if err := db.Flush(); err != nil {
				t.Error(err)
			}
		}
		write(5)
	}}
	dir := t.TempDir()
	if err := c.copy(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if tries != 5 {
		t.Errorf("%d tries, want 5: four were torn", tries)
	}
	if got := count(t, dir); got != last {
		t.Errorf("the image holds %d writes, want %d", got, last)
	}
}

// Neither logs nor tables vanish when a table is ingested: a write after it would be in
// the image and the ingested table not.
func TestIngestionBetweenIsFound(t *testing.T) {
	live := filepath.Join(t.TempDir(), "db")
	db, err := pebble.Open(live, &pebble.Options{Logger: silent{}})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	tries := 0
	c := &copier{live: live, tries: 10, between: func() {
		if tries++; tries > 1 {
			return
		}
		table := filepath.Join(t.TempDir(), "table")
		writeTable(t, db, table, "ingested")
		if err := db.Ingest(t.Context(), []string{table}); err != nil {
			t.Error(err)
		}
		if err := db.Set([]byte("later"), nil, pebble.Sync); err != nil {
			t.Error(err)
		}
	}}
	dir := t.TempDir()
	if err := c.copy(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if got := count(t, dir); got != 2 || tries != 2 {
		t.Errorf("%d keys after %d tries, want 2 after 2", got, tries)
	}
}

func writeTable(t *testing.T, db *pebble.DB, path, key string) {
	t.Helper()
	f, err := vfs.Default.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	w := sstable.NewWriter(objstorageprovider.NewFileWritable(f), sstable.WriterOptions{TableFormat: db.TableFormat()})
	if err := errors.Join(w.Set([]byte(key), nil), w.Close()); err != nil {
		t.Fatal(err)
	}
}

// An owner that never stands still is refused.
func TestBusy(t *testing.T) {
	live := filepath.Join(t.TempDir(), "db")
	db, err := pebble.Open(live, &pebble.Options{Logger: silent{}})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	c := &copier{live: live, tries: 3, between: func() {
		if err := errors.Join(db.Set([]byte("k"), nil, nil), db.Flush()); err != nil {
			t.Error(err)
		}
	}}
	if err := c.copy(t.Context(), t.TempDir()); !errors.Is(err, ErrBusy) {
		t.Errorf("error %v, want ErrBusy", err)
	}
}

func count(t *testing.T, dir string) (n uint64) {
	t.Helper()
	db, err := pebble.Open(dir, &pebble.Options{Logger: silent{}})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	it, err := db.NewIter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer it.Close()
	for it.First(); it.Valid(); it.Next() {
		n++
	}
	return n
}
