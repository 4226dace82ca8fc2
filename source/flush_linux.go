package source

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// flushBudget is how long the files of an image may take to be written back one by
// one. A tree of small files that was just written takes ten times longer that way
// than by one call for its whole file system, which in turn is too much for a few
// files on a busy host.
const flushBudget = 300 * time.Millisecond

// A flusher writes back what is dirty of the files of an image (rule S3).
type flusher struct {
	spent atomic.Int64 // nanoseconds in flushes of single files
	once  sync.Once
	// covered is set when the whole file system was written back: a file whose times
	// are older needs no flush of its own. A page that was dirtied since then has
	// moved them.
	covered atomic.Pointer[Timespec]
}

func (fl *flusher) flush(fd int, m *image) error {
	if fl.spent.Load() > int64(flushBudget) {
		fl.once.Do(func() { fl.flushAll(m) })
	}
	if limit := fl.covered.Load(); limit != nil {
		st, err := statFD(fd)
		if err != nil || youngest(identity(&st)).Compare(*limit) < 0 {
			return err
		}
	}
	began := time.Now()
	err := flushFile(fd)
	fl.spent.Add(int64(time.Since(began)))
	return err
}

// flushAll writes back the file system of an image. If it cannot, files go on to be
// flushed one by one.
func (fl *flusher) flushAll(m *image) {
	p := newProbe(m.tree.dev, m.probeDir)
	step, err := p.granularity()
	if err != nil {
		return
	}
	defer p.file.Close()
	stamp, err := p.now()
	if err != nil || m.tree.use(unix.Syncfs) != nil {
		return
	}
	limit := stamp.add(-2 * max(step, minGranularity))
	fl.covered.Store(&limit)
}

func flushFile(fd int) error {
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	switch err := unix.SyncFileRange(fd, 0, 0, all); err {
	case unix.ENOSYS, unix.EINVAL, unix.ESPIPE, unix.EOPNOTSUPP:
		// A file system without the call is not among those whose identities the
		// cache believes.
		return nil
	default:
		return err
	}
}
