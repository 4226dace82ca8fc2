package place

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// meta sets what an index says of a file beside its bytes. The order matters: a change of
// owner clears set-user-ID and capabilities, a read-only mode forbids a plain user to set
// xattrs, and all of them come before the mtime only by habit, but writing must.
type meta struct {
	strict bool // an owner that cannot be set is an error
	names  bool // names of owners go before their numbers
	warn   func(path string, err error)

	asked sync.Map // "u"+name or "g"+name to int, -1 when unknown
	told  *told
}

// told are the warnings that are given once for all stores of a run.
type told struct{ owner, setID sync.Once }

func newMeta(opts *Options, store string) *meta {
	m := &meta{strict: opts.StrictOwner, names: opts.OwnerNames, told: opts.told}
	if m.told == nil {
		m.told = new(told)
	}
	if opts.Warn != nil {
		m.warn = func(path string, err error) { opts.Warn(store, path, err) }
	}
	return m
}

func (m *meta) warning(path string, err error) {
	if m.warn != nil {
		m.warn(path, err)
	}
}

// open sets the metadata of an open file or directory. stale: it may have xattrs that are
// not wanted.
func (m *meta) open(t *tree, fd int, e *snapshot.Entry, stale bool) error {
	err := m.owner(e, func(uid, gid int) error {
		return t.do("chown", e.Path, func() error { return unix.Fchown(fd, uid, gid) })
	})
	if err != nil {
		return err
	}
	if stale {
		dropXattrs(fd)
	}
	for _, x := range e.Xattrs {
		err := t.do("setxattr", e.Path, func() error { return unix.Fsetxattr(fd, x.Name, x.Value, 0) })
		if err != nil {
			m.warning(e.Path, fmt.Errorf("extended attribute %q: %w", x.Name, err))
		}
	}
	mode, err := m.mode(fd, e)
	if err != nil {
		return t.named("stat", e.Path, err)
	}
	if err := t.do("chmod", e.Path, func() error { return unix.Fchmod(fd, mode) }); err != nil {
		return err
	}
	return t.do("utimes", e.Path, func() error { return setTime(fd, e.MTime) })
}

// setID are the bits that lend a file's owner or group to whoever runs it.
const setID = unix.S_ISUID | unix.S_ISGID

// mode is the mode to set. With another owner or group than was meant, set-user-ID and
// set-group-ID would lend the wrong one, root's for one, so then they are left out.
func (m *meta) mode(fd int, e *snapshot.Entry) (uint32, error) {
	mode := e.Mode & 0o7777
	if mode&setID == 0 {
		return mode, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	if int(st.Uid) == m.id("u", e.User, e.UID) && int(st.Gid) == m.id("g", e.Group, e.GID) {
		return mode, nil
	}
	m.told.setID.Do(func() {
		m.warning(e.Path, errors.New("set-user-ID and set-group-ID are left out where the owner could not be set"))
	})
	return mode &^ setID, nil
}

// dir opens a directory of t and sets its metadata.
func (m *meta) dir(t *tree, path string, e *snapshot.Entry) error {
	fd, err := t.open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return m.open(t, fd, e, path == "")
}

// symlink sets the metadata of a symbolic link itself. It has no mode of its own.
func (m *meta) symlink(t *tree, e *snapshot.Entry) error {
	return t.at(e.Path, func(fd int, name string) error {
		err := m.owner(e, func(uid, gid int) error {
			return t.do("chown", e.Path, func() error { return unix.Fchownat(fd, name, uid, gid, unix.AT_SYMLINK_NOFOLLOW) })
		})
		if err != nil {
			return err
		}
		for _, x := range e.Xattrs {
			if err := unix.Lsetxattr(procPath(fd)+"/"+name, x.Name, x.Value, 0); err != nil {
				m.warning(e.Path, fmt.Errorf("extended attribute %q: %w", x.Name, err))
			}
		}
		return t.do("utimes", e.Path, func() error {
			ts, err := timespecs(e.MTime)
			if err != nil {
				return err
			}
			return unix.UtimesNanoAt(fd, name, ts, unix.AT_SYMLINK_NOFOLLOW)
		})
	})
}

// owner decides about an owner and sets it by chown. A plain user cannot give files away,
// so then owners are left out as a whole, and said so once.
func (m *meta) owner(e *snapshot.Entry, chown func(uid, gid int) error) error {
	uid, gid := m.id("u", e.User, e.UID), m.id("g", e.Group, e.GID)
	if os.Geteuid() != 0 {
		if uid == os.Geteuid() && gid == os.Getegid() {
			return nil
		}
		err := fmt.Errorf("owner %d:%d needs root: %w", uid, gid, unix.EPERM)
		if m.strict {
			return fmt.Errorf("%s: %w", e.Path, err)
		}
		m.told.owner.Do(func() { m.warning(e.Path, fmt.Errorf("owners are not restored: %w", err)) })
		return nil
	}
	err := chown(uid, gid)
	if err != nil && !m.strict {
		m.warning(e.Path, err)
		return nil
	}
	return err
}

// id is the number to use: that of the name if names go first and it is known here.
func (m *meta) id(kind, name string, number uint32) int {
	if !m.names || name == "" {
		return int(number)
	}
	v, ok := m.asked.Load(kind + name)
	if !ok {
		v = lookUp(kind, name)
		m.asked.Store(kind+name, v)
	}
	if v.(int) < 0 {
		return int(number)
	}
	return v.(int)
}

func lookUp(kind, name string) int {
	var text string
	if kind == "u" {
		if u, err := user.Lookup(name); err == nil {
			text = u.Uid
		}
	} else if g, err := user.LookupGroup(name); err == nil {
		text = g.Gid
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return -1
	}
	return n
}

// dropXattrs removes the attributes that a file has from an earlier run, as far as it may.
func dropXattrs(fd int) {
	size, err := unix.Flistxattr(fd, nil)
	if err != nil || size == 0 {
		return
	}
	list := make([]byte, size)
	if size, err = unix.Flistxattr(fd, list); err != nil {
		return
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:size]), "\x00"), "\x00") {
		if name != "security.selinux" {
			unix.Fremovexattr(fd, name)
		}
	}
}

func setTime(fd int, t snapshot.Time) error {
	ts, err := timespecs(t)
	if err != nil {
		return err
	}
	err = unix.UtimesNanoAt(fd, "", ts, unix.AT_EMPTY_PATH)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // before Linux 5.8
		err = unix.UtimesNanoAt(unix.AT_FDCWD, procPath(fd), ts, 0)
	}
	return err
}

func timespecs(t snapshot.Time) ([]unix.Timespec, error) {
	ts, err := unix.TimeToTimespec(time.Unix(t.Sec, int64(t.Nsec)))
	return []unix.Timespec{ts, ts}, err
}
