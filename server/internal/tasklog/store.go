package tasklog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/snapferry/snapferry/checkpoint"
)

// A place is the directory that databases lie in, one of which is current:
//
//	CURRENT     name of the current database's folder and a line feed
//	db-N        a database; any but the current one is debris
//
// CURRENT is replaced by rename, so a crash leaves the old state or the new one (I7).
type place struct {
	fs     vfs.FS
	dir    string
	number uint64 // of the current database
}

const (
	currentName = "CURRENT"
	dbPrefix    = "db-"
)

func (p *place) path(number uint64) string {
	return p.fs.PathJoin(p.dir, dbPrefix+strconv.FormatUint(number, 10))
}

// find reads which database is current and removes all others. Without a current one
// number is 0.
func (p *place) find() error {
	if err := p.makeDir(p.dir); err != nil {
		return err
	}
	name, err := p.readCurrent()
	if err != nil {
		return err
	}
	if name != "" {
		n, err := strconv.ParseUint(strings.TrimPrefix(name, dbPrefix), 10, 64)
		if err != nil || n == 0 || p.path(n) != p.fs.PathJoin(p.dir, name) {
			return fmt.Errorf("%w: %s names %.40q", checkpoint.ErrCorrupt, currentName, name)
		}
		p.number = n
	}
	return p.sweep()
}

// makeDir makes a directory and those above it that are missing, all of them durable. One
// that is there may have been made just before a crash of the process.
func (p *place) makeDir(dir string) error {
	parent := p.fs.PathDir(dir)
	if _, err := p.fs.Stat(parent); errors.Is(err, fs.ErrNotExist) && parent != dir {
		if err := p.makeDir(parent); err != nil {
			return err
		}
	}
	return errors.Join(p.fs.MkdirAll(dir, 0o755), p.syncDir(parent))
}

func (p *place) readCurrent() (string, error) {
	f, err := p.fs.Open(p.fs.PathJoin(p.dir, currentName))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	data, err := io.ReadAll(io.LimitReader(f, 64))
	if err = errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	name, ok := strings.CutSuffix(string(data), "\n")
	if !ok {
		return "", fmt.Errorf("%w: %s is cut short", checkpoint.ErrCorrupt, currentName)
	}
	return name, nil
}

// sweep removes every database but the current one.
func (p *place) sweep() error {
	names, err := p.fs.List(p.dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		full := p.fs.PathJoin(p.dir, name)
		if strings.HasPrefix(name, dbPrefix) && full != p.path(p.number) {
			if err := p.fs.RemoveAll(full); err != nil {
				return err
			}
		}
	}
	return nil
}

// choose makes a database, which is durable, the current one.
func (p *place) choose(number uint64) error {
	tmp := p.fs.PathJoin(p.dir, currentName+".tmp")
	f, err := p.fs.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte(dbPrefix + strconv.FormatUint(number, 10) + "\n"))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := p.fs.Rename(tmp, p.fs.PathJoin(p.dir, currentName)); err != nil {
		return err
	}
	if err := p.syncDir(p.dir); err != nil {
		return err
	}
	p.number = number
	return nil
}

// fill makes a new database of the files of dir and leaves those as they are: what Pebble
// never writes again is linked, everything else copied (R8.5).
func (p *place) fill(number uint64, dir string) error {
	to := p.path(number)
	if err := p.fs.RemoveAll(to); err != nil {
		return err
	}
	if err := p.fs.MkdirAll(to, 0o755); err != nil {
		return err
	}
	names, err := p.fs.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		put := vfs.Copy
		if immutable(name) {
			put = vfs.LinkOrCopy
		}
		if err := put(p.fs, p.fs.PathJoin(dir, name), p.fs.PathJoin(to, name)); err != nil {
			return err
		}
	}
	return errors.Join(p.syncDir(to), p.syncDir(p.dir))
}

func (p *place) syncDir(dir string) error {
	d, err := p.fs.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// immutable names what Pebble never writes again once it is complete.
func immutable(name string) bool {
	return strings.HasSuffix(name, ".sst") || strings.HasSuffix(name, ".blob")
}

// open opens a database of the place. A new one must not be there, any other must.
func (p *place) open(number uint64, fresh bool, opts *Options) (*pebble.DB, error) {
	db, err := pebble.Open(p.path(number), p.dbOptions(fresh, opts))
	if err != nil {
		return nil, err
	}
	if err := checkVersion(db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// dbOptions returns Pebble's settings. Raft's log is the write-ahead log, so there is none
// here; memtables are large because most of what comes is written over soon.
func (p *place) dbOptions(fresh bool, opts *Options) *pebble.Options {
	return &pebble.Options{
		FS:                          p.fs,
		DisableWAL:                  true,
		MemTableSize:                opts.MemTableSize,
		MemTableStopWritesThreshold: 4,
		FormatMajorVersion:          pebble.FormatTableFormatV6,
		ErrorIfExists:               fresh,
		ErrorIfNotExists:            !fresh,
		Logger:                      pebbleLogger{opts.Logger, opts.Fatal, opts.broken},
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) {
				// Pebble tries again for ever, and says so each time.
				if opts.broken.CompareAndSwap(false, true) {
					opts.Failed(fmt.Errorf("state %s: %w", p.dir, cause(err)))
				}
			},
		},
	}
}

// checkVersion refuses the state of a newer program. The version comes before everything
// else in a new database, so it is there whenever anything is.
func checkVersion(db *pebble.DB) error {
	version, err := getShort(db, keyVersion, 4)
	if errors.Is(err, pebble.ErrNotFound) {
		return db.Set(keyVersion, []byte{stateVersion, 0, 0, 0}, pebble.NoSync)
	}
	if err == nil && version[0] != stateVersion {
		err = fmt.Errorf("%w: state of version %d, this program knows %d", checkpoint.ErrUnsupported, version[0], stateVersion)
	}
	return err
}

// pebbleLogger passes on what Pebble says. What it calls fatal leaves the database in an
// unknown state, and Pebble must not return from saying it.
type pebbleLogger struct {
	*slog.Logger
	fatal  func(error)
	broken *atomic.Bool // what comes after the first failure is its repetition
}

// cause leaves out the stack traces that Pebble's errors carry along.
func cause(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e
	}
	return errors.New(err.Error())
}

func (l pebbleLogger) Infof(format string, args ...any) {
	l.Debug("pebble", "event", fmt.Sprintf(format, args...))
}

func (l pebbleLogger) Errorf(format string, args ...any) {
	if !l.broken.Load() {
		l.Error("pebble", "event", fmt.Sprintf(format, args...))
	}
}

func (l pebbleLogger) Fatalf(format string, args ...any) {
	l.fatal(fmt.Errorf("state: %s", fmt.Sprintf(format, args...)))
	panic("unreachable: a fatal error was survived")
}
