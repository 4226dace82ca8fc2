package place

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// What lies in a staging. Trees of an interrupted restore are set aside under new names, so
// that the tree being built is always made anew, and a file of another origin is never
// written to: the old target's files may be open, or have names elsewhere (F27).
const (
	treeName    = "tree"    // what becomes the target
	leftPrefix  = "left."   // a tree that an earlier run staged
	oldPrefix   = "old."    // what was the target; only read and removed
	planName    = "plan"    // the journal of a swap
	pointerName = "pointer" // where the journal lies that this staging takes part in
)

// staging is the locked directory beside (in place: in) a target.
type staging struct {
	dir   *tree // where the staging lies
	tree  *tree // the staging itself; its descriptor holds the lock
	name  string
	fresh bool // this run made it
}

func (s *staging) close() {
	s.tree.close()
	s.dir.close()
}

// path is the staging's absolute path, which is also its key in a yard.
func (s *staging) path() string { return filepath.Join(s.dir.path, s.name) }

// busyError says that somebody else restores the same target.
type busyError struct{ path string }

func (e *busyError) Error() string {
	return "another restore of this target is running (it holds " + e.path + ")"
}

// Is makes it both of the conditions that mean "somebody else is at it".
func (e *busyError) Is(err error) bool { return err == sentinel.Busy || err == sentinel.Conflict }

// yard holds the stagings that one run has open, each once, because a second lock on the
// same directory would meet the first.
type yard struct {
	open map[string]*staging
	peek bool // look only: take no locks
	opts *Options
}

func newYard(opts *Options) *yard { return &yard{open: map[string]*staging{}, opts: opts} }

func (y *yard) close() {
	for _, s := range y.open {
		s.close()
	}
	clear(y.open)
}

// drop closes a staging before the others.
func (y *yard) drop(s *staging) {
	delete(y.open, s.path())
	s.close()
}

// get opens and locks the staging name in dir. Without create an absent one is
// fs.ErrNotExist.
func (y *yard) get(dir, name string, create bool) (*staging, error) {
	if s := y.open[filepath.Join(dir, name)]; s != nil {
		return s, nil
	}
	d, err := openTree(dir, y.opts.fail)
	if err != nil {
		return nil, err
	}
	s := &staging{dir: d, name: name}
	for again := true; again; {
		if again, err = s.enter(create, y.peek); err != nil {
			s.close()
			return nil, err
		}
	}
	y.open[s.path()] = s
	return s, nil
}

// enter makes one try to open and lock. again: the holder before removed the directory
// between the opening and the lock.
func (s *staging) enter(create, peek bool) (again bool, err error) {
	s.fresh = false
	if create {
		err := s.dir.mkdir(s.name)
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return false, err
		}
		s.fresh = err == nil
	}
	if s.tree, err = s.dir.sub(s.name); err != nil {
		if create && errors.Is(err, fs.ErrNotExist) {
			return true, nil
		}
		return false, s.inTheWay(err)
	}
	if peek {
		return false, nil
	}
	if err := s.lock(); err != nil {
		return false, err
	}
	st, err := s.tree.lstat("")
	now, err2 := s.dir.inode(s.name)
	if err := errors.Join(err, err2); err != nil {
		return false, err
	}
	if now != st.Ino {
		s.tree.close()
		return true, nil
	}
	return s.own(int(st.Uid), create)
}

func (s *staging) inTheWay(err error) error {
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return fmt.Errorf("%s is in the way: not a directory", s.path())
	}
	return err
}

func (s *staging) lock() error {
	_, err := retry(func() (int, error) { return 0, unix.Flock(s.tree.fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		return &busyError{s.path()}
	}
	return err
}

// own refuses to trust what another user staged: its files could still be open there for
// writing, and its journal could name any directory.
func (s *staging) own(uid int, create bool) (again bool, err error) {
	if uid == os.Geteuid() {
		if s.fresh {
			// A default ACL or a set-group-ID bit above would be inherited by all we make.
			unix.Fremovexattr(s.tree.fd, "system.posix_acl_default")
			unix.Fchown(s.tree.fd, -1, os.Getegid())
			return false, unix.Fchmod(s.tree.fd, 0o700)
		}
		return false, nil
	}
	for _, name := range []string{planName, pointerName} {
		if ino, err := s.tree.inode(name); err != nil || ino != 0 {
			return false, errors.Join(err, fmt.Errorf("%s is of an unfinished restore by user %d: run it again as that user, or remove it", s.path(), uid))
		}
	}
	if !create {
		return false, fs.ErrNotExist
	}
	err = s.dir.remove(s.name)
	s.tree.close()
	return true, err
}

// remains lists the trees in the staging that begin with prefix.
func (s *staging) remains(prefix string) ([]string, error) {
	names, err := s.tree.names("")
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, prefix) })
	slices.Sort(names)
	return names, nil
}

// free returns the first name prefix+number that is not taken.
func (s *staging) free(prefix string) (string, error) {
	for i := 0; ; i++ {
		name := fmt.Sprint(prefix, i)
		if ino, err := s.tree.inode(name); ino == 0 || err != nil {
			return name, err
		}
	}
}

// setAside renames what lies at name to the next free name with that prefix.
func (s *staging) setAside(name, prefix string) error {
	if ino, err := s.tree.inode(name); ino == 0 || err != nil {
		return err
	}
	to, err := s.free(prefix)
	if err != nil {
		return err
	}
	return s.tree.move(name, s.tree, to, 0)
}

// remove removes the staging. The lock is held until the descriptor is closed.
func (s *staging) remove() error {
	if err := s.dir.remove(s.name); err != nil {
		return err
	}
	return s.dir.sync()
}
