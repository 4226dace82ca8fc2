// Package boltsrc freezes a bbolt database that is open.
//
// # Contract
//
// Freeze begins a read transaction, which takes microseconds whatever the size of the
// database; every write transaction that was committed before is in the image, and
// nothing of later ones. The image is one file, the database, whose two meta pages are
// those of the transaction; its pages are read from the file of the open database while
// the upload goes on, and writers go on too. It opens and passes Tx.Check: pages that are
// free in the transaction may hold anything, and nothing leads to them.
//
// Release ends the transaction. It must be called before DB.Close, which waits for it.
//
// # Limits
//
// A read transaction keeps the pages that writers replace meanwhile: they are not
// reused until Release, so the file grows by what is written during an upload. And bbolt
// cannot move its memory map under a reader: a writer that needs a larger one waits for
// Release. Open the database with Options.InitialMmapSize above the size that it will
// reach, and no writer waits. Where neither will do, give source.Func a function that
// calls Tx.CopyFile: it needs the disk space of a copy, and Freeze takes as long as that.
//
// The whole file is read by each backup, and the chunks that changed are sent.
package boltsrc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"go.etcd.io/bbolt"

	"github.com/snapferry/snapferry/source"
)

// DefaultChunkSize is the size of chunk if Options has none.
const DefaultChunkSize = 32 << 10

// Options adjusts New. Nil is valid.
type Options struct {
	// ChunkSize is the size of the pieces of which those that changed are sent, a
	// multiple of the database's page size between 16 KiB and 4 MiB. The default is
	// DefaultChunkSize. Once a database was backed up, another size sends all of it.
	ChunkSize uint32
}

// New returns the source of an open database, which stays open until images are
// released.
func New(db *bbolt.DB, opts *Options) source.Source {
	s := &bolt{db: db, chunkSize: DefaultChunkSize}
	if opts != nil && opts.ChunkSize != 0 {
		s.chunkSize = opts.ChunkSize
	}
	return s
}

type bolt struct {
	db        *bbolt.DB
	chunkSize uint32
}

// Freeze begins a read transaction.
func (s *bolt) Freeze(ctx context.Context) (source.Image, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("freeze %s: %w", s.db.Path(), context.Cause(ctx))
	}
	tx, err := s.db.Begin(false)
	if err != nil {
		return nil, fmt.Errorf("freeze bbolt database %s: %w", s.db.Path(), err)
	}
	img, err := s.image(tx)
	if err != nil {
		return nil, fmt.Errorf("freeze bbolt database %s: %w", s.db.Path(), errors.Join(err, tx.Rollback()))
	}
	return img, nil
}

func (s *bolt) image(tx *bbolt.Tx) (source.Image, error) {
	path, err := filepath.Abs(s.db.Path())
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return nil, err
	}
	p, err := capture(tx, 2*s.db.Info().PageSize)
	if err != nil {
		return nil, err
	}
	info, err := p.file.Stat()
	if err != nil {
		return nil, err
	}
	return source.OpenView(source.View{
		Path: path, File: info,
		Size: tx.Size(), Content: p, ChunkSize: s.chunkSize,
		Release: tx.Rollback,
	})
}

// pages is the content of a transaction: its own meta pages, and the file behind them.
type pages struct {
	metas []byte
	file  *os.File // the database's own, open as long as the transaction is
}

func (p *pages) ReadAt(b []byte, off int64) (int, error) {
	n := 0
	if off < int64(len(p.metas)) {
		n = copy(b, p.metas[off:])
	}
	if n == len(b) {
		return n, nil
	}
	m, err := p.file.ReadAt(b[n:], off+int64(n))
	return n + m, err
}

// errCaptured ends a copy of which the beginning was wanted.
var errCaptured = errors.New("captured")

// capture takes from a transaction what bbolt tells of its file only when it is copied:
// the meta pages that belong to it, and the descriptor that the rest is read from. A
// descriptor of our own would be that of another file if the path was replaced.
func capture(tx *bbolt.Tx, head int) (*pages, error) {
	c := &capturer{head: head}
	switch _, err := tx.WriteTo(c); {
	case !errors.Is(err, errCaptured):
		return nil, errors.Join(err, fmt.Errorf("%w: this version of bbolt copies in another way", source.ErrUnsupported))
	case len(c.metas) != head || c.file == nil:
		return nil, fmt.Errorf("%w: the database is not read from a file of the operating system", source.ErrUnsupported)
	}
	return &c.pages, nil
}

// A capturer is given the meta pages by Write and the rest by ReadFrom.
type capturer struct {
	pages
	head int
}

func (c *capturer) Write(b []byte) (int, error) {
	if len(c.metas)+len(b) > c.head {
		return 0, errCaptured
	}
	c.metas = append(c.metas, b...)
	return len(b), nil
}

func (c *capturer) ReadFrom(r io.Reader) (int64, error) {
	if l, ok := r.(*io.LimitedReader); ok {
		r = l.R
	}
	if s, ok := r.(*io.SectionReader); ok {
		under, _, _ := s.Outer()
		c.file, _ = under.(*os.File)
	}
	return 0, errCaptured
}
