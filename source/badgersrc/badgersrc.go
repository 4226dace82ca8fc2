// Package badgersrc freezes a Badger v4 database that is open.
//
// # Contract
//
// Freeze never stops a writer and copies next to nothing. It opens an iterator, which
// holds every table, memtable log and value log file of that moment in place, cuts the
// MANIFEST where it names exactly those tables, and cuts the files that still grow
// behind their last whole transaction. Every transaction that was committed before
// Freeze is in the image, synced or not, and of those beside it a prefix. The image is a
// directory that badger.Open takes, with the options of the database and without repair.
//
// Tables and full value log files are hard links, known by the identity of the live file,
// so that an earlier backup's are not read again. The memtable log and the value log file
// in use are read from the live files, up to where they were cut, as the upload goes on.
//
// Release lets go of the iterator. It must be called before DB.Close, which does not wait
// for it and takes the files away.
//
// # Limits
//
// Until Release Badger keeps what the image needs: files that it has compacted or
// collected away, the memtables of that moment, and versions of keys that are newer than
// the transaction. That is the price of links: Badger empties a file before it removes it,
// so that a link alone does not keep the content (a link to a live Badger file must never
// be taken for a copy).
//
// Freeze waits for transactions that are being committed. It reads the log of the memtable
// once, at most Options.MemTableSize, and of the value log file in use what follows the
// last value in that log; with encryption, whose log hides that place, the headers of all
// its values.
//
// If the collector of the value log is in the act of removing a file when Freeze begins,
// Freeze begins anew; in the rarest case it ends only during the upload, which then fails
// with ErrChanged and can be repeated.
//
// A database in memory, one that is opened read-only, and one that has its value log in
// another directory are refused with ErrUnsupported.
package badgersrc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"

	"github.com/snapferry/snapferry/source"
)

// Chunk sizes of the files that grow at their end: what was sent of them once need not
// be sent again when they are longer.
const (
	logChunk      = 256 << 10
	manifestChunk = 64 << 10
)

// Options adjusts New. Nil is valid.
type Options struct {
	// Scratch is the directory in which images are made. The default is the directory
	// that the database's own lies in. On another file system tables and value log files
	// are copied instead of linked, and read again by every backup.
	Scratch string
}

// New returns the source of an open database, which stays open until images are
// released.
func New(db *badger.DB, opts *Options) source.Source {
	s := &badgerSource{db: db}
	if opts != nil {
		s.opts = *opts
	}
	return s
}

type badgerSource struct {
	db   *badger.DB
	opts Options
}

// Freeze pins the database as it is and makes the image.
func (s *badgerSource) Freeze(ctx context.Context) (source.Image, error) {
	o := s.db.Opts()
	if err := supported(o); err != nil {
		return nil, fmt.Errorf("freeze badger database %s: %w", o.Dir, err)
	}
	for range freezes {
		img, err := s.freeze(ctx, o)
		if !errors.Is(err, errEmptied) {
			return img, err
		}
	}
	return nil, fmt.Errorf("freeze badger database %s: %w", o.Dir, errEmptied)
}

// freezes is how often Freeze begins anew because a file was emptied under it.
const freezes = 10

func (s *badgerSource) freeze(ctx context.Context, o badger.Options) (source.Image, error) {
	m := &maker{db: s.db, live: o.Dir, grown: map[string]*os.File{}}
	src := source.Func(m.make, &source.FuncOptions{
		Live:       o.Dir,
		Scratch:    s.opts.Scratch,
		Immutable:  m.immutable,
		ChunkSize:  chunkSize,
		Compressed: func(path string) bool { return compressed(path, o) },
	})
	img, err := src.Freeze(ctx)
	if err != nil {
		return nil, errors.Join(err, m.release())
	}
	if err := m.check(img); err != nil {
		return nil, errors.Join(err, img.Release(), m.release())
	}
	return &image{Image: img, m: m}, nil
}

func supported(o badger.Options) error {
	switch {
	case o.InMemory:
		return fmt.Errorf("%w: the database lies in memory", source.ErrUnsupported)
	case o.ReadOnly:
		return fmt.Errorf("%w: the database is opened read-only, nothing writes to it: use source.Dir", source.ErrUnsupported)
	}
	dir, errD := filepath.Abs(o.Dir)
	values, errV := filepath.Abs(o.ValueDir)
	if err := errors.Join(errD, errV); err != nil {
		return err
	}
	if dir != values {
		return fmt.Errorf("%w: the database keeps its values apart, in %s; open it with one directory", source.ErrUnsupported, values)
	}
	return nil
}

// compressed is true of what Badger compressed, and of what looks so because it is
// encrypted.
func compressed(path string, o badger.Options) bool {
	if len(o.EncryptionKey) > 0 {
		return true
	}
	return strings.HasSuffix(path, tableSuffix) && o.Compression != options.None
}

func chunkSize(path string) uint32 {
	switch {
	case path == badger.ManifestFilename:
		return manifestChunk
	case strings.HasSuffix(path, logSuffix):
		return logChunk
	}
	return 0
}

// An image is that of source.Func, in which placeholders of their size stand for the
// files that grow.
type image struct {
	source.Image
	m    *maker
	once sync.Once
	err  error
}

// Open opens a file; one that grows is read where Badger writes it.
func (i *image) Open(path string) (source.File, error) {
	f, err := i.Image.Open(path)
	if err != nil {
		return nil, err
	}
	if live := i.m.grown[path]; live != nil {
		return &grownFile{File: f, live: live, name: path, size: f.Identity().Size}, nil
	}
	return f, nil
}

// Release removes the links and lets Badger have its files back, in this order.
func (i *image) Release() error {
	i.once.Do(func() { i.err = errors.Join(i.Image.Release(), i.m.release()) })
	return i.err
}
