package sqlitesrc

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
	"modernc.org/libc"
	lib "modernc.org/sqlite/lib"
)

// A conn is a connection of SQLite's C interface, as the transpiled library has it.
// Package database/sql leads neither to the descriptors that SQLite reads from nor to
// the place in the log at which a transaction stands. It is for one goroutine at a time.
type conn struct {
	tls *libc.TLS
	db  uintptr
}

// at returns what lies at an address of SQLite's heap, which is none of Go's.
func at[T any](address uintptr) *T { return *(**T)(unsafe.Pointer(&address)) }

// openConn opens a database that exists. Without write it cannot change a byte of it.
func openConn(path string, write bool) (*conn, error) {
	c := &conn{tls: libc.NewTLS()}
	name, err := libc.CString(path)
	if err != nil {
		c.tls.Close()
		return nil, err
	}
	defer libc.Xfree(c.tls, name)
	handle := c.tls.Alloc(int(unsafe.Sizeof(c.db)))
	defer c.tls.Free(int(unsafe.Sizeof(c.db)))
	flags := int32(lib.SQLITE_OPEN_READONLY)
	if write {
		flags = lib.SQLITE_OPEN_READWRITE
	}
	rc := lib.Xsqlite3_open_v2(c.tls, name, handle, flags, 0)
	c.db = *at[uintptr](handle)
	if rc == lib.SQLITE_OK {
		lib.Xsqlite3_extended_result_codes(c.tls, c.db, 1)
		return c, nil
	}
	return nil, errors.Join(c.explain(rc), c.close())
}

// close ends the transaction, if there is one, and the connection.
func (c *conn) close() error {
	defer c.tls.Close()
	if c.db == 0 {
		return nil
	}
	if lib.Xsqlite3_get_autocommit(c.tls, c.db) == 0 {
		if err := c.exec("ROLLBACK"); err != nil {
			return errors.Join(err, c.explain(lib.Xsqlite3_close_v2(c.tls, c.db)))
		}
	}
	return c.explain(lib.Xsqlite3_close_v2(c.tls, c.db))
}

func (c *conn) exec(sql string) error {
	text, err := libc.CString(sql)
	if err != nil {
		return err
	}
	defer libc.Xfree(c.tls, text)
	return c.explain(lib.Xsqlite3_exec(c.tls, c.db, text, 0, 0, 0))
}

// begin begins a read transaction and makes it take its locks.
func (c *conn) begin() error {
	err := c.exec("BEGIN")
	if err != nil {
		return err
	}
	if err = c.exec("SELECT 1 FROM sqlite_schema LIMIT 1"); err != nil {
		return errors.Join(err, c.exec("ROLLBACK"))
	}
	return nil
}

// explain turns a result code into an error; nil for success.
func (c *conn) explain(rc int32) error {
	if rc == lib.SQLITE_OK {
		return nil
	}
	said := libc.GoString(lib.Xsqlite3_errstr(c.tls, rc))
	if c.db != 0 {
		if more := libc.GoString(lib.Xsqlite3_errmsg(c.tls, c.db)); !strings.Contains(said, more) {
			said = more
		}
	}
	err := fmt.Errorf("%s (SQLite code %d)", said, rc)
	switch rc & 0xff {
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED:
		return fmt.Errorf("%w: %w", ErrLocked, err)
	case lib.SQLITE_NOTADB, lib.SQLITE_CORRUPT:
		return fmt.Errorf("%w: %w", ErrNotDatabase, err)
	}
	if rc == lib.SQLITE_READONLY_ROLLBACK || rc == lib.SQLITE_READONLY_RECOVERY {
		return fmt.Errorf("%w: open it once with its own program, or with sqlite3, and back up then: %w", ErrHotJournal, err)
	}
	return err
}

// file returns SQLite's own file of the database.
func (c *conn) file() (*lib.TunixFile, error) {
	out := c.tls.Alloc(int(unsafe.Sizeof(c.db)))
	defer c.tls.Free(int(unsafe.Sizeof(c.db)))
	rc := lib.Xsqlite3_file_control(c.tls, c.db, 0, lib.SQLITE_FCNTL_FILE_POINTER, out)
	if rc != lib.SQLITE_OK {
		return nil, c.explain(rc)
	}
	return at[lib.TunixFile](*at[uintptr](out)), nil
}

// reserved tells whether a writer, in any process, has begun to write.
func reserved(tls *libc.TLS, f *lib.TunixFile) bool {
	out := tls.Alloc(4)
	defer tls.Free(4)
	methods := at[lib.Tsqlite3_io_methods](f.FpMethod)
	ask := *(*func(*libc.TLS, uintptr, uintptr) int32)(unsafe.Pointer(&struct{ uintptr }{methods.FxCheckReservedLock}))
	rc := ask(tls, uintptr(unsafe.Pointer(f)), out)
	return rc == lib.SQLITE_OK && *at[int32](out) != 0
}

// Where SQLite locks, from its description of the file formats.
const (
	sharedAt, sharedLen = 0x40000002, 510 // in the database
	readLockAt          = 120 + 3         // of the first reader's mark, in the -shm
)

// A lock is a POSIX lock that SQLite holds for a transaction.
type lock struct {
	fd       int
	at, size int64
}

// heldLocks are the locks of a transaction in WAL mode, on the database and on a mark.
func heldLocks(f *lib.TunixFile, mark int64) []lock {
	locks := []lock{{int(f.Fh), sharedAt, sharedLen}}
	if f.FpShm != 0 {
		if node := at[lib.TunixShmNode](at[lib.TunixShm](f.FpShm).FpShmNode); node.FhShm >= 0 {
			locks = append(locks, lock{int(node.FhShm), readLockAt + mark, 1})
		}
	}
	return locks
}

// lost tells whether nobody holds the lock. The question is that of an open file
// description, to which the locks of its own process are those of another.
func (l lock) lost() (bool, error) {
	ask := unix.Flock_t{Type: unix.F_WRLCK, Start: l.at, Len: l.size}
	err := unix.FcntlFlock(uintptr(l.fd), unix.F_OFD_GETLK, &ask)
	return ask.Type == unix.F_UNLCK, err
}

// A moment is what a read transaction stands on.
type moment struct {
	pageSize int64
	size     int64 // of the database
	wal      bool  // in WAL mode

	// What of the write-ahead log belongs to the transaction: its first so many frames.
	// None if all of the database lies in its file and stays there.
	frames uint32
	log    int // descriptor
	salt   [8]byte

	locks []lock // without which it is no moment any more
}

// moment reads from SQLite's own structures where the transaction stands.
func (c *conn) moment() (m moment, err error) {
	main := at[lib.TDb](at[lib.Tsqlite3](c.db).FaDb)
	shared := at[lib.TBtShared](at[lib.TBtree](main.FpBt).FpBt)
	pager := at[lib.TPager](shared.FpPager)
	m.pageSize = int64(shared.FpageSize)
	m.size = int64(pager.FdbSize) * m.pageSize
	if pager.FpWal == 0 {
		return m, nil
	}
	m.wal = true
	wal := at[lib.TWal](pager.FpWal)
	switch {
	case wal.FreadLock < 0:
		return m, errors.New("the read transaction holds no lock")
	}
	f := at[lib.TunixFile](pager.Ffd)
	m.locks = heldLocks(f, int64(wal.FreadLock))
	if wal.FreadLock == 0 && wal.FbShmUnreliable == 0 || wal.Fhdr.FmxFrame == 0 {
		// Everything was moved into the database, and this lock forbids to move more. To who
		// may only read the -shm, and so cannot trust it, the same lock only forbids to move:
		// then the log counts, which can begin anew only after that.
		return m, nil
	}
	m.frames = wal.Fhdr.FmxFrame
	m.log = int(at[lib.TunixFile](wal.FpWalFd).Fh)
	m.salt = *(*[8]byte)(unsafe.Pointer(&wal.Fhdr.FaSalt))
	return m, nil
}
