package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/internal/linkfile"
	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/boltsrc"
	"github.com/snapferry/snapferry/source/hotsrc"
	"github.com/snapferry/snapferry/source/sqlitesrc"
)

// The kinds of stores. A kind says how a store is frozen.
const (
	kindAuto    = "auto"
	kindDir     = "dir"
	kindSQLite  = "sqlite"
	kindBolt    = "bolt"
	kindBadger  = "badger"
	kindPebble  = "pebble"
	kindHot     = "pebble-hot"
	kindRocksDB = "rocksdb"
)

var kinds = []string{kindAuto, kindDir, kindSQLite, kindBolt, kindBadger, kindPebble, kindHot, kindRocksDB}

// kindNames says what a kind is, in a sentence.
var kindNames = map[string]string{
	kindDir:     "plain files",
	kindSQLite:  "an SQLite database",
	kindBolt:    "a bbolt database",
	kindBadger:  "a Badger database",
	kindPebble:  "a Pebble database",
	kindHot:     "a Pebble database",
	kindRocksDB: "a RocksDB database",
}

// howFrozen says what a kind does, for the note that tells what was found.
var howFrozen = map[string]string{
	kindSQLite:  "read in a transaction, also while its owner writes",
	kindBolt:    "at rest, and locked for writers until it is read",
	kindBadger:  "at rest, and locked until it is read",
	kindPebble:  "at rest, and locked until it is read",
	kindHot:     "copied as a crash of its owner would leave it: without what was written with NoSync and lies in its memory",
	kindRocksDB: "at rest, and locked until it is read",
}

// detect returns the kind of what lies at a path; kindDir for everything unknown.
func detect(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if info.IsDir() {
		return detectDir(path), nil
	}
	head, err := head(path, 4096)
	return detectFile(head), err
}

const (
	sqliteMagic = "SQLite format 3\x00"
	badgerMagic = "Bdgr"
	// boltMagic follows the header of bbolt's first page.
	boltMagic     = 0xED0CDAED
	boltMagicAt   = 16
	boltVersionAt = 20
)

func detectFile(head []byte) string {
	if strings.HasPrefix(string(head), sqliteMagic) {
		return kindSQLite
	}
	if len(head) > boltVersionAt+4 {
		for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
			if order.Uint32(head[boltMagicAt:]) == boltMagic && order.Uint32(head[boltVersionAt:]) == 2 {
				return kindBolt
			}
		}
	}
	return kindDir
}

// detectDir goes by the files that only one of the databases makes.
func detectDir(dir string) string {
	has := func(pattern string) bool {
		found, _ := filepath.Glob(filepath.Join(escapeGlob(dir), pattern))
		return len(found) > 0
	}
	manifest, _ := head(filepath.Join(dir, "MANIFEST"), len(badgerMagic))
	switch {
	case string(manifest) == badgerMagic:
		return kindBadger
	case has("marker.manifest.*"), has("marker.format-version.*"):
		return kindPebble
	case has("CURRENT") && has("MANIFEST-*") && has("OPTIONS-*"):
		return rocksOrPebble(dir)
	}
	return kindDir
}

// rocksOrPebble reads who wrote the options: Pebble takes the names of RocksDB's files.
func rocksOrPebble(dir string) string {
	found, _ := filepath.Glob(filepath.Join(escapeGlob(dir), "OPTIONS-*"))
	for _, name := range found {
		if text, _ := head(name, 4096); bytes.Contains(text, []byte("pebble_version")) {
			return kindPebble
		}
	}
	return kindRocksDB
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// head returns the first bytes of a file, at most n.
func head(path string, n int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	buf := make([]byte, n)
	got, err := io.ReadFull(f, buf)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return buf[:got], err
}

// recognise settles the kind of a rule by what lies there, and refuses a kind that this
// is not. With kind=dir everything is plain files.
func (r rule) recognise() (rule, error) {
	if r.kind == kindDir {
		return r, nil
	}
	found, err := detect(r.path)
	if err != nil {
		return r, unreadable(r.path, err)
	}
	switch {
	case r.kind == kindAuto:
		r.kind = found
	case r.kind == found, r.kind == kindSQLite && isEmpty(r.path), r.kind == kindHot && found == kindPebble:
	case found == kindDir:
		return r, usagef("%s is not %s: it has nothing of one, or is encrypted; kind=dir backs up plain files at rest", r.path, kindNames[r.kind])
	default:
		return r, usagef("%s is not %s: it is %s (kind=%s)", r.path, kindNames[r.kind], kindNames[found], found)
	}
	return r, nil
}

// hasJournal tells whether beside a file lies what SQLite, or an encrypting kin of it, would
// read with it.
func hasJournal(path string) bool {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	for _, suffix := range []string{"-wal", "-journal"} {
		if info, err := os.Stat(path + suffix); err == nil && info.Size() > 0 {
			return true
		}
	}
	return false
}

// isEmpty tells whether a path is a file without content: for SQLite a database.
func isEmpty(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Size() == 0
}

// standsAlone tells whether the image of the rule's store is what was there at the
// freeze, whatever happens to the store later. Files of other kinds are read in place.
func (r rule) standsAlone() bool {
	return r.checkpointDir != "" || r.kind == kindSQLite || r.kind == kindBolt || r.kind == kindHot
}

// source returns what freezes the rule's store.
func (r rule) source(exclude []string) source.Source {
	switch {
	case r.checkpointDir != "":
		return newShared(checkpointSource(r.path, r.checkpointDir))
	case r.kind == kindSQLite:
		return newShared(sqlitesrc.New(r.path, nil))
	case r.kind == kindBolt:
		return newShared(boltFile(r.path))
	case r.kind == kindHot:
		return newShared(hotsrc.Pebble(r.path, nil))
	}
	plain := source.Dir(r.path, &source.DirOptions{Exclude: exclude})
	if lock := locks[r.kind]; lock != nil {
		return &atRest{plain, r, lock}
	}
	return plain
}

// errHeld is a store that another process has open and that nobody can freeze from here.
var errHeld = errors.New("another process has it open")

func (r rule) held() error {
	itself := "make a checkpoint and name that with --from-checkpoint-dir"
	switch r.kind {
	case kindBolt:
		itself = "copy itself with Tx.CopyFile and back up the copy"
	case kindPebble:
		itself += ", or take what it has synced with kind=" + kindHot
	}
	return fmt.Errorf("%s is %s and %w: it cannot be frozen from outside; stop that process, or let it stand still with --freeze-cmd and --thaw-cmd and back up with kind=dir, or have it %s", r.path, kindNames[r.kind], errHeld, itself)
}

// boltFile is the source of a bbolt database that no process has open for writing: a
// writer keeps an exclusive lock on the file for as long as it has it open.
type boltFile string

// Freeze opens the database for reading, which locks writers out until Release.
func (path boltFile) Freeze(ctx context.Context) (source.Image, error) {
	db, err := bbolt.Open(string(path), 0, &bbolt.Options{ReadOnly: true, Timeout: time.Millisecond})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return nil, rule{path: string(path), kind: kindBolt}.held()
	}
	if err != nil {
		return nil, fmt.Errorf("open bbolt database %s: %w", path, err)
	}
	img, err := boltsrc.New(db, nil).Freeze(ctx)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &closing{Image: img, also: db}, nil
}

// locks take the lock of a database, shared, so that no other process opens it.
var locks = map[string]func(dir string) (io.Closer, error){
	kindBadger:  lockDirectory,
	kindPebble:  lockFile,
	kindRocksDB: lockFile,
}

// lockDirectory takes the lock that Badger takes on its directory.
func lockDirectory(dir string) (io.Closer, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	return locked(f, unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB))
}

// lockFile takes the lock that Pebble and RocksDB take on their file LOCK. Without that
// file nobody has ever opened the database: it is a checkpoint.
func lockFile(dir string) (io.Closer, error) {
	f, err := os.Open(filepath.Join(dir, "LOCK"))
	if errors.Is(err, fs.ErrNotExist) {
		return io.NopCloser(nil), nil
	}
	if err != nil {
		return nil, err
	}
	return locked(f, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK}))
}

func locked(f *os.File, err error) (io.Closer, error) {
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return nil, errHeld
	}
	return nil, fmt.Errorf("lock: %w", err)
}

// atRest is a directory of which the files are read in place while its lock is held.
type atRest struct {
	source.Source
	rule rule
	lock func(dir string) (io.Closer, error)
}

// Freeze takes the lock and walks the directory.
func (s *atRest) Freeze(ctx context.Context) (source.Image, error) {
	lock, err := s.lock(s.rule.path)
	if errors.Is(err, errHeld) {
		return nil, s.rule.held()
	}
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", s.rule.path, err)
	}
	img, err := s.Source.Freeze(ctx)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return &closing{Image: img, also: lock}, nil
}

// checkpointSource is the source of a store of which the files come from a checkpoint
// that its owner made. Tables are linked and all else is copied, so that the owner may
// remove the checkpoint once it is frozen. Tables are known again by their identity, as
// links of the live ones.
func checkpointSource(live, dir string) source.Source {
	return source.Func(func(ctx context.Context, to string) error {
		return linkTree(ctx, dir, to)
	}, &source.FuncOptions{
		Live:       live,
		Scratch:    filepath.Dir(dir),
		Immutable:  isTable,
		Compressed: isTable,
	})
}

// isTable names what Pebble, RocksDB and Badger never write again.
func isTable(path string) bool {
	return slices.Contains([]string{".sst", ".blob"}, filepath.Ext(path))
}

// linkTree links the tables below from into to, and copies all else: another file that
// loses a name has changed, as far as its times tell.
func linkTree(ctx context.Context, from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case rel == ".":
			return nil
		case d.IsDir():
			return os.Mkdir(target, 0o700)
		case d.Type().IsRegular():
			return linkOrCopy(path, target)
		case d.Type()&fs.ModeSymlink != 0:
			return copyLink(path, target)
		}
		return fmt.Errorf("%s: is no file, directory or symbolic link", path)
	})
}

func copyLink(path, target string) error {
	leads, err := os.Readlink(path)
	if err != nil {
		return err
	}
	return os.Symlink(leads, target)
}

// errLiveLog is a log that the checkpoint shares with the live store.
var errLiveLog = errors.New("is a link of a log that the store may still write or recycle; make the checkpoint so that it flushes first (RocksDB: log_size_for_flush 0)")

func linkOrCopy(path, target string) error {
	if !isTable(path) {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 && filepath.Ext(path) == ".log" {
			return fmt.Errorf("%s %w", path, errLiveLog)
		}
		return linkfile.Copy(path, target)
	}
	return linkfile.LinkOrCopy(path, target)
}
