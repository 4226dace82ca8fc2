package hotsrc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2"
)

// prove lets Pebble open the image, removes the tables that it does not need, and, if
// there were any, proves again that it does without them.
func (c *copier) prove(dir string) error {
	for {
		needed, err := c.tablesOf(dir)
		if err == nil {
			err = removeLock(dir)
		}
		if err != nil {
			return fmt.Errorf("the copy does not open: %w", err)
		}
		removed, err := keepOnly(dir, needed)
		if err != nil || removed == 0 {
			return err
		}
	}
}

// tablesOf opens the image read-only and returns the names of its tables. Pebble checks
// that each is there and as large as the MANIFEST says.
func (c *copier) tablesOf(dir string) (names map[string]bool, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	db, err := pebble.Open(dir, c.readOnly())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	levels, err := db.SSTables()
	if err != nil {
		return nil, err
	}
	names = map[string]bool{}
	for _, level := range levels {
		for _, t := range level {
			names[fmt.Sprintf("%06d.sst", uint64(t.BackingSSTNum))] = true
			if !t.Virtual {
				names[fmt.Sprintf("%06d.sst", uint64(t.FileNum))] = true
			}
		}
	}
	return names, nil
}

func (c *copier) readOnly() *pebble.Options {
	return &pebble.Options{
		ReadOnly:         true,
		ErrorIfNotExists: true,
		Comparer:         c.open.Comparer,
		Merger:           c.open.Merger,
		KeySchema:        c.open.KeySchema,
		KeySchemas:       c.open.KeySchemas,
		Logger:           silent{},
	}
}

// removeLock removes what opening leaves behind.
func removeLock(dir string) error { return os.Remove(filepath.Join(dir, "LOCK")) }

func keepOnly(dir string, needed map[string]bool) (removed int, err error) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, d := range list {
		if !isTable(d.Name()) || needed[d.Name()] {
			continue
		}
		if err := os.Remove(filepath.Join(dir, d.Name())); err != nil {
			return removed, err
		}
		removed++
	}
	return removed, nil
}

// silent takes Pebble's messages; what is fatal to a database is an error of a try.
type silent struct{}

func (silent) Infof(string, ...any)      {}
func (silent) Errorf(string, ...any)     {}
func (silent) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
