package source

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const scratchTries = 10

// A scratch is a directory for one image. The lock on it, which dies with the
// process, tells the images in use from those a crash left behind.
type scratch struct {
	dir   string // the locked directory
	image string // the directory in it that becomes the image
	lock  *os.File
}

// newScratch sweeps what crashes left in parent and makes a new scratch there.
func newScratch(parent, name string) (*scratch, error) {
	parent, err := filepath.Abs(parent)
	if err == nil {
		parent, err = filepath.EvalSymlinks(parent)
	}
	if err != nil {
		return nil, fmt.Errorf("scratch directory: %w", err)
	}
	prefix := scratchPrefix + name + "-"
	if err := sweepScratch(parent, prefix); err != nil {
		return nil, fmt.Errorf("scratch directory: %w", err)
	}
	for range scratchTries {
		s, err := makeScratch(parent, prefix)
		if s != nil || err != nil {
			return s, err
		}
	}
	return nil, fmt.Errorf("scratch directory %s: others keep removing what is made there", parent)
}

// makeScratch returns nil without an error if a sweep took the new directory for
// one without an owner, before it was locked.
func makeScratch(parent, prefix string) (*scratch, error) {
	var random [scratchRandom / 2]byte
	rand.Read(random[:])
	dir := filepath.Join(parent, prefix+hex.EncodeToString(random[:]))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("scratch directory: %w; name another place with the option Scratch", err)
	}
	lock, err := lockScratch(dir)
	if lock == nil || err != nil {
		return nil, err
	}
	s := &scratch{dir: dir, image: filepath.Join(dir, "image"), lock: lock}
	if err := os.Mkdir(s.image, 0o700); err != nil {
		return nil, errors.Join(fmt.Errorf("scratch directory: %w", err), s.remove())
	}
	return s, nil
}

// lockScratch locks a directory and makes sure that the name still leads to it. It
// returns nil if the directory is locked by another or gone.
func lockScratch(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, nil
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	held, heldErr := f.Stat()
	there, err := os.Lstat(dir)
	if heldErr != nil || err != nil || !os.SameFile(held, there) {
		f.Close()
		return nil, nil
	}
	return f, nil
}

// remove deletes the directory and then lets the lock go.
func (s *scratch) remove() error {
	err := removeTree(s.dir)
	return errors.Join(err, s.lock.Close())
}

// sweepScratch removes the directories of this prefix whose owner is gone. One that
// cannot be removed, such as another user's, is left alone: it is in nobody's way.
func sweepScratch(parent, prefix string) error {
	list, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	for _, d := range list {
		random, ok := strings.CutPrefix(d.Name(), prefix)
		if !ok || !isRandom(random) || !d.IsDir() {
			continue
		}
		dir := filepath.Join(parent, d.Name())
		lock, err := lockScratch(dir)
		if lock == nil || err != nil {
			continue
		}
		removeTree(dir)
		lock.Close()
	}
	return nil
}

// removeTree removes a directory and what is in it, also below directories that
// were made read only. It changes no file: a file may have names in a live store.
func removeTree(dir string) error {
	err := os.RemoveAll(dir)
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			os.Chmod(path, 0o700)
		}
		return nil
	})
	return os.RemoveAll(dir)
}
