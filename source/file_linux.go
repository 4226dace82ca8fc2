package source

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"
)

// A file is an open regular file of an image.
type file struct {
	img    *image
	entry  *Entry
	fd     int
	id     Identity
	blocks int64 // units of 512 bytes that the file system allotted
	closed sync.Once
}

var _ File = (*file)(nil)

func (f *file) Identity() Identity { return f.id }

// settle writes back what is dirty and takes the identity, in this order (rule S3):
// a page that was written back is write protected, so that the next store through
// a mapping moves the times; a store into a page already dirty would not.
func (f *file) settle() error {
	if err := f.img.flusher.flush(f.fd, f.img); err != nil {
		return fmt.Errorf("write back before reading: %w", err)
	}
	st, err := statFD(f.fd)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%w: no longer a regular file", errGone)
	}
	if f.img.tree.foreign(&st) {
		return f.img.tree.mountError(f.img.real(f.entry.Path))
	}
	f.id, f.blocks = f.identity(&st), int64(st.Blocks)
	return nil
}

// identity leaves out the ctime of an immutable file, as Entry.Identity does.
func (f *file) identity(st *unix.Statx_t) Identity {
	id := identity(st)
	if f.entry.Immutable {
		id.CTime = Timespec{}
	}
	return id
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(f.fd, p[done:], off+int64(done))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return done, fmt.Errorf("read %w", f.img.explain(f.entry.Path, err))
		case n == 0:
			return done, io.EOF
		}
		done += n
	}
	return done, nil
}

func (f *file) Close() error {
	err := error(nil)
	f.closed.Do(func() { err = unix.Close(f.fd) })
	return err
}

func (f *file) Check() error {
	if err := f.check(); err != nil {
		return fmt.Errorf("check %w", f.img.explain(f.entry.Path, err))
	}
	return nil
}

func (f *file) check() error {
	st, err := statFD(f.fd)
	if err != nil {
		return err
	}
	if id := f.identity(&st); id != f.id {
		return fmt.Errorf("%w: %s", ErrChanged, difference(f.id, id))
	}
	at, err := f.img.tree.stat(f.img.real(f.entry.Path))
	if err != nil {
		return err
	}
	if at.Ino != f.id.Ino || device(&at) != f.id.Dev {
		return fmt.Errorf("%w: replaced by another file", ErrChanged)
	}
	return nil
}

// difference says in words what tells two identities apart.
func difference(old, now Identity) string {
	switch {
	case old.Size != now.Size:
		return fmt.Sprintf("%d bytes, was %d", now.Size, old.Size)
	case old.MTime != now.MTime:
		return "written to"
	}
	return "written to, or its metadata changed"
}

func (f *file) Runs() ([]Run, error) {
	runs, err := f.runs()
	if err != nil {
		return nil, fmt.Errorf("find holes %w", f.img.explain(f.entry.Path, err))
	}
	return runs, nil
}

func (f *file) runs() ([]Run, error) {
	size := f.id.Size
	if size == 0 {
		return nil, nil
	}
	if size < MinHole || f.blocks*512 >= size {
		return []Run{{0, size}}, nil
	}
	var r runs
	for at := int64(0); at < size; {
		data, err := unix.Seek(f.fd, at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break // a hole up to the end
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			return []Run{{0, size}}, nil
		}
		if err != nil {
			return nil, err
		}
		if at, err = unix.Seek(f.fd, data, unix.SEEK_HOLE); err != nil {
			return nil, err
		}
		r.add(min(data, size), min(at, size))
	}
	return r.finish(size), nil
}

// runs collects extents of data and drops the holes that are too small or, once
// aligned, become so.
type runs struct {
	list []Run
	end  int64 // of the last extent
}

// add takes the extent [from, to), which lies behind all before it.
func (r *runs) add(from, to int64) {
	hole := alignUp(r.end)
	from = from / HoleAlign * HoleAlign
	r.end = max(r.end, to)
	if from-hole >= MinHole {
		r.closeAt(hole)
		r.list = append(r.list, Run{Offset: from})
		return
	}
	if len(r.list) == 0 {
		r.list = append(r.list, Run{})
	}
}

// finish closes the last run at the end of the file, or where its last hole begins.
func (r *runs) finish(size int64) []Run {
	hole := alignUp(r.end)
	switch {
	case size-hole >= MinHole:
		r.closeAt(hole)
	case len(r.list) == 0:
		return []Run{{0, size}}
	default:
		r.closeAt(size)
	}
	return r.list
}

func (r *runs) closeAt(end int64) {
	if n := len(r.list); n > 0 {
		r.list[n-1].Length = end - r.list[n-1].Offset
	}
}

func alignUp(n int64) int64 { return (n + HoleAlign - 1) / HoleAlign * HoleAlign }
