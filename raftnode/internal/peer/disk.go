package peer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/sentinel"
)

// ErrCorrupt says that a file of this package is damaged.
var ErrCorrupt = sentinel.Corrupt

const (
	fileVersion = 1
	maxFile     = 16 << 20
	tempSuffix  = ".tmp"
)

// disk keeps small framed JSON files in one directory. A file is the old or the new one
// at every instant, and the new one for good once put has returned.
type disk struct {
	dir   string
	fault func(step string) error // tests: die before this step; nil in production
}

// openDisk makes the directory if need be, durably.
func openDisk(dir string) (disk, error) {
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = syncDir(filepath.Dir(dir))
	}
	return disk{dir: dir}, err
}

func (d disk) step(name string) error {
	if d.fault == nil {
		return nil
	}
	return d.fault(name)
}

// put replaces the file. The temporary name is always the same: what a crash leaves is
// overwritten by the next put, and nobody else writes in this directory.
func (d disk) put(name, kind string, v any) error {
	payload, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	path := filepath.Join(d.dir, name)
	if err := d.writeTemp(path+tempSuffix, frame.Encode(kind, fileVersion, append(payload, '\n'))); err != nil {
		return err
	}
	if err := d.step("rename " + name); err != nil {
		return err
	}
	if err := os.Rename(path+tempSuffix, path); err != nil {
		return err
	}
	if err := d.step("sync directory of " + name); err != nil {
		return err
	}
	return syncDir(d.dir)
}

func (d disk) writeTemp(path string, data []byte) (err error) {
	name := filepath.Base(path)
	if err := d.step("create " + name); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()

	if err := d.step("write " + name); err != nil {
		_, _ = f.Write(data[:len(data)/2]) // a death in the middle of it
		return err
	}
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := d.step("sync " + name); err != nil {
		return err
	}
	return f.Sync()
}

// get reads a file into v. No file is fs.ErrNotExist, a damaged one ErrCorrupt.
func (d disk) get(name, kind string, v any) error {
	path := filepath.Join(d.dir, name)
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return err
	}
	payload, err := frame.Decode(kind, fileVersion, data)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if err := json.Unmarshal(payload, v); err != nil {
		return fmt.Errorf("read %s: %w: %w", path, ErrCorrupt, err)
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
