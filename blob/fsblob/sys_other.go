//go:build !linux

package fsblob

import (
	"errors"
	"os"
	"runtime"
	"time"
)

const (
	hasUnnamed = false
	noFollow   = 0
)

// dirID tells nothing here, so the name of every directory is synced again.
type dirID struct{ dir bool }

func (id dirID) isDir() bool  { return id.dir }
func (id dirID) unique() bool { return false }

func identify(path string) (dirID, error) {
	info, err := os.Stat(path)
	if err != nil {
		return dirID{}, err
	}
	return dirID{dir: info.IsDir()}, nil
}

func openUnnamed(string) (*os.File, error) { return nil, errNoUnnamed }

func linkUnnamed(*os.File, string) error { return errNoUnnamed }

// renameNew is left to a hard link, which does not replace either.
func renameNew(string, string) error { return errors.ErrUnsupported }

func startWriteback(*os.File, int64, int64) {}

func syncFile(f *os.File) error { return f.Sync() }

func syncDir(path string) error {
	if runtime.GOOS == "windows" { // directories cannot be synced there
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// lock does nothing: age tells the dead from the living here.
func lock(*os.File) (free bool, err error) { return true, nil }

func isDead(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && time.Since(info.ModTime()) > 24*time.Hour
}

func unlink(path string) error { return os.Remove(path) }

func rmdir(path string) error {
	if !isDirectory(path) {
		return os.ErrNotExist
	}
	return os.Remove(path)
}
