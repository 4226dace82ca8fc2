package hotsrc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/snapferry/snapferry/internal/linkfile"
	"github.com/snapferry/snapferry/source"
)

// A copier copies the database in live. It keeps nothing between two images.
type copier struct {
	live  string
	open  pebble.Options
	tries int

	// between is called after the MANIFEST was copied and before the logs are; nil but in
	// tests.
	between func()
}

func isTable(name string) bool    { return strings.HasSuffix(name, ".sst") }
func isLog(name string) bool      { return strings.HasSuffix(name, ".log") }
func isManifest(name string) bool { return strings.HasPrefix(name, "MANIFEST-") }
func isMarker(name string) bool   { return strings.HasPrefix(name, "marker.") }

// errMoved says that a try found the database changed.
var errMoved = errors.New("changed while it was copied")

// Between two tries, so that a flush or compaction can end.
const (
	firstWait = time.Millisecond
	lastWait  = 100 * time.Millisecond
)

// copy fills dir, which exists and is empty.
func (c *copier) copy(ctx context.Context, dir string) error {
	var err error
	wait := firstWait
	for range c.tries {
		if err = c.try(dir); err == nil || errors.Is(err, source.ErrUnsupported) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(wait):
		}
		wait = min(2*wait, lastWait)
	}
	return fmt.Errorf("%w, %d times; the last time: %w", ErrBusy, c.tries, err)
}

func (c *copier) try(dir string) error {
	before, err := c.look()
	if err != nil {
		return err
	}
	if err := c.refuse(before); err != nil {
		return err
	}
	if err := c.linkTables(dir, before.names); err != nil {
		return err
	}
	if err := c.copyRest(dir, before); err != nil {
		return err
	}
	after, err := c.look()
	if err != nil {
		return err
	}
	if what := before.moved(after); what != "" {
		return fmt.Errorf("%s %w", what, errMoved)
	}
	// Tables that appeared before the MANIFEST was copied may be named in it.
	if err := c.linkTables(dir, after.names); err != nil {
		return err
	}
	return c.prove(dir)
}

// A look is what a directory holds that decides about its state.
type look struct {
	names    []string // all, sorted
	manifest string
	options  string
	size     int64 // of the MANIFEST
	logs     []string
	markers  []string
}

func (c *copier) look() (l look, err error) {
	desc, err := pebble.Peek(c.live, vfs.Default)
	if err != nil {
		return l, err
	}
	l.manifest, l.options = filepath.Base(desc.ManifestFilename), filepath.Base(desc.OptionsFilename)
	list, err := os.ReadDir(c.live)
	if err != nil {
		return l, err
	}
	for _, d := range list {
		l.names = append(l.names, d.Name())
		switch {
		case isLog(d.Name()):
			l.logs = append(l.logs, d.Name())
		case isMarker(d.Name()):
			l.markers = append(l.markers, d.Name())
		}
	}
	if !desc.Exists {
		return l, c.noPebble(l)
	}
	info, err := os.Stat(filepath.Join(c.live, l.manifest))
	if err != nil {
		return l, err
	}
	l.size = info.Size()
	return l, nil
}

// noPebble explains a directory in which Pebble sees no database.
func (c *copier) noPebble(l look) error {
	if slices.Contains(l.names, "CURRENT") {
		return fmt.Errorf("%w: %s is a RocksDB or an old Pebble database, and a copy of it cannot be proved: let its owner make a checkpoint", source.ErrUnsupported, c.live)
	}
	return fmt.Errorf("%w: no Pebble database in %s", source.ErrUnsupported, c.live)
}

// moved says what of two looks differs that must not.
func (l look) moved(m look) string {
	switch {
	case l.manifest != m.manifest || l.size != m.size:
		return "manifest"
	case !slices.Equal(l.logs, m.logs):
		return "logs"
	case !slices.Equal(l.markers, m.markers) || l.options != m.options:
		return "format or options"
	}
	return ""
}

// refuse refuses a database whose data is not all in its directory.
func (c *copier) refuse(l look) error {
	for _, name := range l.names {
		switch {
		case strings.HasPrefix(name, "REMOTE-OBJ-CATALOG"):
			return fmt.Errorf("%w: tables of the database lie in remote storage", source.ErrUnsupported)
		case strings.HasSuffix(name, ".blob"):
			return fmt.Errorf("%w: the database keeps values in files of their own, which a copy cannot be proved to hold", source.ErrUnsupported)
		}
	}
	if l.options == "" || l.options == "." {
		return fmt.Errorf("%w: the database has no OPTIONS file that says where its log lies", source.ErrUnsupported)
	}
	text, err := os.ReadFile(filepath.Join(c.live, l.options))
	if err != nil {
		return err
	}
	var o pebble.Options
	if err := o.Parse(string(text), c.hooks()); err != nil {
		return fmt.Errorf("%w: %s: %w", errMoved, l.options, err)
	}
	switch {
	case o.DisableWAL:
		return fmt.Errorf("%w: the database has no WAL: what is not flushed lies in its owner's memory", source.ErrUnsupported)
	case o.WALFailover != nil:
		return fmt.Errorf("%w: the database has WAL failover: parts of its log may lie in %s", source.ErrUnsupported, o.WALFailover.Secondary.Dirname)
	case o.WALDir != "" && !sameDir(o.WALDir, c.live):
		return fmt.Errorf("%w: the database keeps its log apart, in %s", source.ErrUnsupported, o.WALDir)
	}
	return nil
}

func sameDir(a, b string) bool {
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	return errX == nil && errY == nil && os.SameFile(x, y)
}

// hooks let Parse pass over what this process does not know; the proof judges it.
func (c *copier) hooks() *pebble.ParseHooks {
	o := c.open
	o.EnsureDefaults()
	return &pebble.ParseHooks{
		NewComparer:  func(string) (*pebble.Comparer, error) { return o.Comparer, nil },
		NewMerger:    func(string) (*pebble.Merger, error) { return o.Merger, nil },
		NewKeySchema: func(name string) (pebble.KeySchema, error) { return pebble.KeySchema{Name: name}, nil },
		SkipUnknown:  func(string, string) bool { return true },
	}
}

// linkTables links tables that dir does not have yet. One that vanished is not needed, or
// its absence is found by the proof. A number may have been used again, by an owner that
// crashed and came back.
func (c *copier) linkTables(dir string, names []string) error {
	for _, name := range names {
		if !isTable(name) {
			continue
		}
		from, to := filepath.Join(c.live, name), filepath.Join(dir, name)
		err := linkfile.LinkOrCopy(from, to)
		if errors.Is(err, fs.ErrExist) {
			err = relink(from, to)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// relink makes sure that to is the file that from is now.
func relink(from, to string) error {
	live, err := os.Lstat(from)
	if err != nil {
		return err
	}
	if have, err := os.Lstat(to); err != nil || os.SameFile(live, have) {
		return err
	}
	if err := os.Remove(to); err != nil {
		return err
	}
	return linkfile.LinkOrCopy(from, to)
}

// copyRest copies what is not a table: the MANIFEST first, as long as it was, then the
// logs. In each log the copy holds at least what was in it before.
func (c *copier) copyRest(dir string, l look) error {
	if err := dropRest(dir); err != nil {
		return err
	}
	if err := c.copyPrefix(dir, l.manifest, l.size); err != nil {
		return err
	}
	if c.between != nil {
		c.between()
	}
	for _, name := range slices.Concat(l.logs, l.markers, []string{l.options}) {
		if err := c.copyPrefix(dir, name, -1); err != nil {
			return err
		}
	}
	return nil
}

// dropRest removes what an earlier try copied.
func dropRest(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range list {
		if isTable(d.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, d.Name())); err != nil {
			return err
		}
	}
	return nil
}

// copyPrefix copies the beginning of a file; all of it if size is negative.
func (c *copier) copyPrefix(dir, name string, size int64) error {
	f, err := os.Open(filepath.Join(c.live, name))
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if size < 0 {
		size = info.Size()
	}
	return linkfile.WritePrefix(f, filepath.Join(dir, name), size, info.Mode().Perm())
}
