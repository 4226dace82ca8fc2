package snapstore

import (
	"errors"
	"os"
	"sync"

	"github.com/snapferry/snapferry/snapshot"
)

const (
	flushers = 4   // files that are flushed at once
	maxOpen  = 128 // files of a receipt that stay open between two chunks
)

// staged is a file of a receipt. It stays open from its first chunk to the flush after its
// last one: that flush then hears of every write that failed behind our back, which one
// on a descriptor opened later might not.
type staged struct {
	r     *Receipt
	entry int
	e     *snapshot.Entry
	first int    // number of its first chunk
	name  string // in the store
	left  int    // chunks that are not present; guarded by r.mu

	mu       sync.Mutex // guards what follows, also while f is opened or closed
	f        *os.File
	users    int
	finished bool // complete and flushed
	linked   bool // another name of a file of a snapshot, durable; never opened here
	mark     mark // of that file when it was last known to be right
}

// write writes verified bytes.
func (st *staged) write(offset int64, data []byte) error {
	f, err := st.borrow()
	if err != nil {
		return err
	}
	return errors.Join(st.r.s.disk.write(f, st.name, data, offset), st.giveBack())
}

func (st *staged) borrow() (*os.File, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.f == nil {
		f, err := st.r.s.disk.openNew(st.name)
		if err != nil {
			return nil, err
		}
		st.f = f
		st.r.countOpen(1)
	}
	st.users++
	return st.f, nil
}

// giveBack closes a file that is done with, or one too many; that one it flushes for the
// reason above.
func (st *staged) giveBack() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch st.users--; {
	case st.users > 0:
		return nil
	case st.finished:
		return st.closeLocked()
	case st.r.countOpen(0) > st.r.maxOpen:
		err := st.r.durable(func() error { return st.r.s.disk.sync(st.f, st.name) })
		if err != nil {
			err = st.spoil(err)
		}
		return errors.Join(err, st.closeLocked())
	}
	return nil
}

// spoil ends a receipt that could not flush a file, and removes the file: what a later one
// reads of it could come from memory and never have reached the disk.
func (st *staged) spoil(err error) error {
	err = errors.Join(err, st.r.s.disk.remove(st.name))
	st.r.fail(err)
	return err
}

func (st *staged) closeLocked() error {
	if st.f == nil {
		return nil
	}
	err := st.f.Close()
	st.f = nil
	st.r.countOpen(-1)
	return err
}

// close closes the file as it is, when the receipt ends.
func (st *staged) close() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.closeLocked()
}

// finish gives a file that has all its chunks its length, makes it durable and closes it.
// Its error is kept by fail too.
func (st *staged) finish() error {
	if _, linked := st.source(); linked {
		return nil
	}
	f, err := st.borrow()
	if err != nil {
		st.r.fail(err)
		return err
	}
	disk := st.r.s.disk
	info, err := f.Stat()
	if err == nil && info.Size() != st.e.Size {
		err = disk.truncate(f, st.name, st.e.Size)
	}
	if err == nil {
		err = st.r.durable(func() error { return disk.sync(f, st.name) })
	}
	if err != nil {
		err = st.spoil(err)
	}
	st.mu.Lock()
	st.finished = true
	st.mu.Unlock()
	return errors.Join(err, st.giveBack())
}

// source tells whether the file is that of a snapshot.
func (st *staged) source() (m mark, linked bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.mark, st.linked
}

// countOpen changes the number of open files and returns it.
func (r *Receipt) countOpen(change int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.opened += change
	return r.mu.opened
}
