package sqlitesrc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/snapferry/snapferry/source"
)

// retryEvery is how often a locked database is tried again.
const retryEvery = 5 * time.Millisecond

// hotTries is how often in a row a journal must look like that of a crash. One that a
// writer begins just now does, for a moment: to a connection that may not write, SQLite
// says so before it would notice the writer's lock.
const hotTries = 10

// Freeze begins a read transaction.
func (s *sqlite) Freeze(ctx context.Context) (source.Image, error) {
	img, err := s.freeze(ctx)
	if err != nil {
		return nil, fmt.Errorf("freeze SQLite database %s: %w", s.path, err)
	}
	return img, nil
}

func (s *sqlite) freeze(ctx context.Context) (source.Image, error) {
	path, err := filepath.Abs(s.path)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: it is no regular file", ErrNotDatabase)
	}
	c, err := s.begin(ctx, path)
	if err != nil {
		return nil, err
	}
	return s.image(path, c)
}

// begin opens the database and begins a transaction, again and again while others have
// it locked.
func (s *sqlite) begin(ctx context.Context, path string) (*conn, error) {
	deadline := time.Now().Add(s.opts.BusyTimeout)
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for hot := 0; ; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		c, err := s.tryBegin(path)
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, ErrHotJournal):
			if hot++; hot == hotTries {
				return nil, err
			}
		case !errors.Is(err, ErrLocked):
			return nil, err
		case !time.Now().Before(deadline):
			return nil, fmt.Errorf("%w; waited %s for it", err, max(0, s.opts.BusyTimeout))
		default:
			hot = 0
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

func (s *sqlite) tryBegin(path string) (*conn, error) {
	c, err := openReader(path)
	if err != nil {
		return nil, err
	}
	if err := c.begin(); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// openReader opens a database so that it is left as it was. Read only is enough, but for
// a database in WAL mode that nobody has open: to read it SQLite makes a -wal and a -shm,
// and removes them at the end only if it might have written.
func openReader(path string) (*conn, error) {
	c, err := openConn(path, false)
	if err != nil {
		return nil, err
	}
	f, err := c.file()
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	var head [20]byte
	n, err := pread(int(f.Fh), head[:], 0)
	if err == nil && n == len(head) && head[18] == 2 && absent(path+"-wal") {
		if err := c.close(); err != nil {
			return nil, err
		}
		return openConn(path, true)
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

func absent(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, os.ErrNotExist)
}

// image makes the image of a transaction and takes over the connection, also if it fails.
func (s *sqlite) image(path string, c *conn) (source.Image, error) {
	v := source.View{Path: path, ChunkSize: s.opts.ChunkSize, Release: c.close}
	if err := s.fill(&v, c); err != nil {
		return nil, errors.Join(err, c.close())
	}
	img, err := source.OpenView(v)
	if err != nil {
		return nil, errors.Join(err, v.Release())
	}
	return img, nil
}

// fill says where the content of a transaction is.
func (s *sqlite) fill(v *source.View, c *conn) error {
	f, err := c.file()
	if err != nil {
		return err
	}
	if v.File, err = os.Stat(fmt.Sprintf("/proc/self/fd/%d", f.Fh)); err != nil {
		return err
	}
	m, err := c.moment()
	if err != nil {
		return err
	}
	v.Size = m.size
	v.Locked = []fs.FileInfo{v.File}
	if m.wal {
		for _, l := range m.locks[1:] {
			info, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d", l.fd))
			if err != nil {
				return err
			}
			v.Locked = append(v.Locked, info)
		}
		v.Check = m.check
		v.Content, err = readLog(int(f.Fh), m)
		return err
	}
	p, err := newPlain(c, f, m.size, s.scratch(v.Path))
	if err != nil {
		return err
	}
	v.Content, v.Check, v.Release = p, p.check, p.release
	return nil
}

// check finds that the locks of the transaction are gone: this process has closed another
// descriptor of the file. Then the log may have begun anew under the reader.
func (m moment) check() error {
	for _, l := range m.locks {
		if lost, err := l.lost(); err != nil || lost {
			return errors.Join(err, fmt.Errorf("%w: the process lost its locks on the database, because it closed another descriptor of it", source.ErrChanged))
		}
	}
	return nil
}

func (s *sqlite) scratch(path string) string {
	if s.opts.Scratch != "" {
		return s.opts.Scratch
	}
	return filepath.Dir(path)
}
