package sqlitesrc

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"modernc.org/libc"
	lib "modernc.org/sqlite/lib"

	"github.com/snapferry/snapferry/source"
)

// lookEvery is how often a database in a rollback mode is asked for a writer.
const lookEvery = 10 * time.Millisecond

// copyStep is how much of a database is copied by one call.
const copyStep = 64 << 20

// plain is a database in a rollback mode, all of which lies in its file. The shared lock
// of the transaction forbids writing; when somebody wants to write, or if the file can be
// cloned, the content moves to an unnamed file and the lock is given up.
type plain struct {
	conn *conn
	file *lib.TunixFile
	size int64
	dir  string
	was  unix.Stat_t

	quit, done chan struct{}

	// mu guards what follows; readers hold it while they read.
	mu   sync.RWMutex
	copy *os.File // nil: read the database itself
	err  error    // of ending the transaction
}

// newPlain takes over the connection.
func newPlain(c *conn, f *lib.TunixFile, size int64, dir string) (*plain, error) {
	p := &plain{conn: c, file: f, size: size, dir: dir, quit: make(chan struct{}), done: make(chan struct{})}
	if err := unix.Fstat(int(f.Fh), &p.was); err != nil {
		return nil, err
	}
	if p.move(p.clone) {
		close(p.done)
		return p, nil
	}
	go p.watch()
	return p, nil
}

// watch moves the content away when a writer shows up. If it cannot, the lock stays and
// the writer waits for Release.
func (p *plain) watch() {
	defer close(p.done)
	tls := libc.NewTLS()
	defer tls.Close()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-p.quit:
			return
		case <-tick.C:
		}
		if reserved(tls, p.file) {
			p.move(p.copyTo)
			return
		}
	}
}

// move brings the content to an unnamed file by way of fill and then ends the
// transaction. It tells whether that was done.
func (p *plain) move(fill func(*os.File) error) bool {
	fd, err := unix.Open(p.dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), "copy of the database")
	if err := fill(f); err != nil || p.untouched() != nil {
		f.Close()
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.copy = f
	p.err = p.conn.close()
	return true
}

func (p *plain) clone(f *os.File) error {
	return unix.IoctlFileClone(int(f.Fd()), int(p.file.Fh))
}

func (p *plain) copyTo(f *os.File) error {
	for at := int64(0); at < p.size; {
		select {
		case <-p.quit:
			return source.ErrClosed
		default:
		}
		from, to := at, at
		n, err := unix.CopyFileRange(int(p.file.Fh), &from, int(f.Fd()), &to, int(min(copyStep, p.size-at)), 0)
		if err != nil {
			return err
		}
		if n == 0 {
			return errors.New("the database became shorter")
		}
		at += int64(n)
	}
	return nil
}

func (p *plain) ReadAt(b []byte, off int64) (int, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.copy != nil {
		return p.copy.ReadAt(b, off)
	}
	if err := preadFull(int(p.file.Fh), b, off); err != nil {
		return 0, err
	}
	return len(b), nil
}

// check finds those who wrote in spite of the lock: what is no SQLite.
func (p *plain) check() error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.copy != nil {
		return nil
	}
	return p.untouched()
}

func (p *plain) untouched() error {
	var now unix.Stat_t
	if err := unix.Fstat(int(p.file.Fh), &now); err != nil {
		return err
	}
	if now.Size != p.was.Size || now.Mtim != p.was.Mtim {
		return fmt.Errorf("%w: written to in spite of its lock, not by SQLite", source.ErrChanged)
	}
	return nil
}

func (p *plain) release() error {
	close(p.quit)
	<-p.done
	if p.copy != nil {
		return errors.Join(p.err, p.copy.Close())
	}
	return p.conn.close()
}
