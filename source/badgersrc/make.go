package badgersrc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/dgraph-io/badger/v4"

	"github.com/snapferry/snapferry/internal/linkfile"
	"github.com/snapferry/snapferry/source"
)

const (
	logSuffix   = ".mem"
	valueSuffix = ".vlog"
	tableSuffix = ".sst"
)

// A maker makes one image and holds what it stands on.
type maker struct {
	db   *badger.DB
	live string
	dir  string // the image

	pin      *pin
	manifest []byte              // cut
	tables   map[uint64]bool     // those of the pin
	active   uint64              // number of the memtable log in use
	grown    map[string]*os.File // live files by their name in the image
}

// make fills dir, which exists and is empty. The order matters: the pin first, then the
// logs of the memtables, which point into the value log, and the value log after them.
func (m *maker) make(ctx context.Context, dir string) error {
	m.dir = dir
	if err := again(ctx, func() error { return m.fix(ctx) }); err != nil {
		return err
	}
	if err := m.writeManifest(); err != nil {
		return err
	}
	last, err := m.takeLogs(ctx)
	if err != nil {
		return err
	}
	if err := m.takeValues(ctx, last); err != nil {
		return err
	}
	for id := range m.tables {
		name := fmt.Sprintf("%06d%s", id, tableSuffix)
		if err := linkfile.LinkOrCopy(filepath.Join(m.live, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	for _, name := range []string{badger.KeyRegistryFileName, "DISCARD"} {
		if err := m.copySmall(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// fix pins the database and learns which tables the pin holds: they are known if the
// database had the same ones before and after it. The same goes for the log in use.
func (m *maker) fix(ctx context.Context) (err error) {
	before, activeBefore, err := m.look()
	if err != nil {
		return err
	}
	p, err := hold(ctx, m.db)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.release())
		}
	}()
	after, activeAfter, err := m.look()
	if err != nil {
		return err
	}
	if activeBefore != activeAfter || !maps.Equal(before, after) {
		return errMoved
	}
	data, err := os.ReadFile(filepath.Join(m.live, badger.ManifestFilename))
	if err != nil {
		return err
	}
	if m.manifest, err = cutManifest(data, after); err != nil {
		return err
	}
	m.pin, m.tables, m.active = p, after, activeAfter
	return nil
}

// look returns the tables of the database and the number of the memtable log in use.
func (m *maker) look() (ids map[uint64]bool, active uint64, err error) {
	logs, err := m.numbers(logSuffix)
	if err != nil {
		return nil, 0, err
	}
	if len(logs) == 0 {
		return nil, 0, errMoved
	}
	return tables(m.db), logs[len(logs)-1], nil
}

// numbers returns those of the live files with a suffix, in ascending order.
func (m *maker) numbers(suffix string) ([]uint64, error) {
	list, err := os.ReadDir(m.live)
	if err != nil {
		return nil, err
	}
	var numbers []uint64
	for _, d := range list {
		digits, ok := strings.CutSuffix(d.Name(), suffix)
		if n, err := strconv.ParseUint(digits, 10, 32); ok && err == nil {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

func (m *maker) writeManifest() error {
	size := int64(len(m.manifest))
	return linkfile.WritePrefix(bytes.NewReader(m.manifest), filepath.Join(m.dir, badger.ManifestFilename), size, 0o644)
}

// takeLogs takes the log in use and those before it whose memtables are not tables yet,
// and returns the last place in the value log that they name. The memtables become tables
// in the order of their numbers. So where a log is missing, those below it are remains
// that another iterator still holds, and so is one that goes away while it is copied: the
// pin would have held it.
func (m *maker) takeLogs(ctx context.Context) (last place, err error) {
	for n := m.active; ; n-- {
		s, err := m.takeLog(ctx, n)
		if n != m.active && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, errMoved)) {
			return last, nil
		}
		if err != nil {
			return last, err
		}
		if s.last.behind(last) {
			last = s.last
		}
		if n == 0 {
			return last, nil
		}
	}
}

func (m *maker) takeLog(ctx context.Context, n uint64) (s logScan, err error) {
	name := fmt.Sprintf("%05d%s", n, logSuffix)
	f, err := os.Open(filepath.Join(m.live, name))
	if err != nil {
		return s, err
	}
	keep := false
	defer func() {
		if !keep {
			err = errors.Join(err, f.Close())
		}
	}()
	if s, err = scanStill(ctx, f, n == m.active); err != nil {
		return s, fmt.Errorf("read %s: %w", name, err)
	}
	switch {
	case s.end <= logHeader: // empty, and Badger does without it
		return s, nil
	case n == m.active:
		keep = true
		return s, m.grow(name, f, s.end)
	}
	err = linkfile.WritePrefix(f, filepath.Join(m.dir, name), s.end, 0o644)
	if err == nil {
		err = m.unmoved(f, name)
	}
	if err != nil {
		return s, errors.Join(shortIsMoved(err), os.Remove(filepath.Join(m.dir, name)))
	}
	return s, nil
}

// unmoved is errMoved if Badger emptied the file f while it was read.
func (m *maker) unmoved(f *os.File, name string) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if _, err := os.Lstat(filepath.Join(m.live, name)); err != nil || info.Size() == 0 {
		return errMoved
	}
	return nil
}

// scanStill scans a log again as long as its last record is being written. Where nobody
// writes any more, something behind the end is damage.
func scanStill(ctx context.Context, f *os.File, active bool) (s logScan, err error) {
	before := int64(-1)
	stuck := again(ctx, func() error {
		info, e := f.Stat()
		if e != nil {
			return e
		}
		if s, err = scanLog(f, info.Size()); err != nil || !s.torn || active && before >= 0 && s.end > before {
			return nil
		}
		before = s.end
		return errMoved
	})
	if err == nil && stuck != nil {
		err = fmt.Errorf("a record that is not whole at byte %d: damaged? %w", s.end, stuck)
	}
	return s, err
}

// takeValues links the files of the value log that are full and takes the one in use up to
// its end; last is where a value that is needed ends. The collector may have been about
// to remove a file before the pin: it has moved what was alive in it to logs that were
// taken, and the image does without it.
func (m *maker) takeValues(ctx context.Context, last place) error {
	files, err := m.numbers(valueSuffix)
	if err != nil {
		return err
	}
	taken := false
	for _, n := range slices.Backward(files) {
		name := fmt.Sprintf("%06d%s", n, valueSuffix)
		if !taken {
			if taken, err = m.takeOpenValues(ctx, name, uint32(n), last); err != nil {
				return err
			}
			continue
		}
		err := linkfile.LinkOrCopy(filepath.Join(m.live, name), filepath.Join(m.dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return m.dropCollected(files)
}

// takeOpenValues takes the value log file in use. One that is just being created holds
// nothing yet: not taken, and the file before it, which is full, is read to its end
// like it.
func (m *maker) takeOpenValues(ctx context.Context, name string, n uint32, last place) (taken bool, err error) {
	f, err := os.Open(filepath.Join(m.live, name))
	if err != nil {
		return false, err
	}
	var end int64
	from := int64(logHeader)
	if last.file == n {
		from = max(from, last.end)
	}
	err = again(ctx, func() error {
		end, err = valuesIn(f, from)
		if errors.Is(err, errTorn) {
			return errMoved
		}
		return err
	})
	if err == nil && end >= logHeader {
		return true, m.grow(name, f, end)
	}
	return false, errors.Join(err, f.Close())
}

// valuesIn returns where the values in a file end, zero if the file is being created.
func valuesIn(f *os.File, from int64) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	var head [logHeader]byte
	if _, err := f.ReadAt(head[:], 0); err != nil && err != io.EOF {
		return 0, err
	}
	if head == [logHeader]byte{} {
		return 0, nil
	}
	return endOfValues(f, info.Size(), from)
}

// dropCollected removes from the image what Badger removed, or began to, while it was
// linked.
func (m *maker) dropCollected(files []uint64) error {
	for _, n := range files {
		name := fmt.Sprintf("%06d%s", n, valueSuffix)
		link := filepath.Join(m.dir, name)
		info, err := os.Lstat(link)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if _, err := os.Lstat(filepath.Join(m.live, name)); err == nil && info.Size() >= logHeader {
			continue
		}
		if err := os.Remove(link); err != nil {
			return err
		}
	}
	return nil
}

// grow keeps a live file for the image, and puts a placeholder of its present size there.
func (m *maker) grow(name string, f *os.File, size int64) error {
	m.grown[name] = f
	w, err := os.OpenFile(filepath.Join(m.dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	return errors.Join(w.Truncate(size), w.Close())
}

// copySmall copies a file that is written in place or appended to: two readings that
// agree are one state. It may be absent.
func (m *maker) copySmall(ctx context.Context, name string) error {
	var data []byte
	err := again(ctx, func() error {
		first, err := os.ReadFile(filepath.Join(m.live, name))
		if err != nil {
			return err
		}
		if data, err = os.ReadFile(filepath.Join(m.live, name)); err == nil && !bytes.Equal(first, data) {
			return errMoved
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	return linkfile.WritePrefix(bytes.NewReader(data), filepath.Join(m.dir, name), int64(len(data)), 0o600)
}

// immutable names what Badger never writes again: tables and full value log files.
func (m *maker) immutable(path string) bool {
	return m.grown[path] == nil && (strings.HasSuffix(path, tableSuffix) || strings.HasSuffix(path, valueSuffix))
}

// errEmptied says that Badger emptied a file that was linked: its removal had begun
// before the pin.
var errEmptied = fmt.Errorf("a file was emptied meanwhile: %w", source.ErrChanged)

// check refuses an image in which Badger emptied a file after all.
func (m *maker) check(img source.Image) error {
	for _, e := range img.Entries() {
		if m.immutable(e.Path) && e.Size < logHeader {
			return fmt.Errorf("freeze badger database %s: %s: %w", m.live, e.Path, errEmptied)
		}
	}
	return nil
}

// release closes the live files and lets go of the pin.
func (m *maker) release() error {
	var errs []error
	for _, f := range m.grown {
		errs = append(errs, f.Close())
	}
	if m.pin != nil {
		errs = append(errs, m.pin.release())
	}
	return errors.Join(errs...)
}
