package sqlitesrc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// The layout of a write-ahead log, from SQLite's description of its file format.
const (
	logHeader   = 32
	frameHeader = 24
)

// logged is a database whose newest pages lie in a write-ahead log. The transaction's
// lock keeps the log from being overwritten. Frames up to its end may be copied into the
// database meanwhile, so a page that has a frame is read from there; one that has none is
// not touched.
type logged struct {
	main     int
	log      int
	pageSize int64
	at       map[uint32]int64 // page number to the place of its newest content in the log
}

// readLog finds the newest frame of each page.
func readLog(main int, m moment) (*logged, error) {
	l := &logged{main: main, log: m.log, pageSize: m.pageSize, at: map[uint32]int64{}}
	var head [frameHeader]byte
	for i := range int64(m.frames) {
		off := logHeader + i*(frameHeader+m.pageSize)
		if err := preadFull(l.log, head[:], off); err != nil {
			return nil, fmt.Errorf("read write-ahead log at %d: %w", off, err)
		}
		if [8]byte(head[8:16]) != m.salt {
			return nil, fmt.Errorf("write-ahead log at %d: a frame of another time", off)
		}
		l.at[binary.BigEndian.Uint32(head[:4])] = off + frameHeader
	}
	return l, nil
}

func (l *logged) ReadAt(p []byte, off int64) (int, error) {
	// Pages that exist only in the log lie behind the end of the file.
	if err := preadZeros(l.main, p, off); err != nil {
		return 0, err
	}
	for from := off / l.pageSize * l.pageSize; from < off+int64(len(p)); from += l.pageSize {
		at, ok := l.at[uint32(from/l.pageSize)+1]
		if !ok {
			continue
		}
		begin := max(from, off)
		end := min(from+l.pageSize, off+int64(len(p)))
		if err := preadFull(l.log, p[begin-off:end-off], at+begin-from); err != nil {
			return 0, fmt.Errorf("read write-ahead log at %d: %w", at, err)
		}
	}
	return len(p), nil
}

// preadZeros reads what there is and takes zeros for what lies behind the end, as a
// checkpoint does when it makes the file longer.
func preadZeros(fd int, p []byte, off int64) error {
	n, err := pread(fd, p, off)
	clear(p[n:])
	return err
}

func preadFull(fd int, p []byte, off int64) error {
	n, err := pread(fd, p, off)
	if err == nil && n < len(p) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// pread reads until p is full or the file ends.
func pread(fd int, p []byte, off int64) (n int, err error) {
	for n < len(p) {
		m, err := unix.Pread(fd, p[n:], off+int64(n))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || m == 0 {
			return n, err
		}
		n += m
	}
	return n, nil
}
