// Package linkfile gives a file a second name in another directory: by a hard link where
// both lie on one file system, by a copy elsewhere. It is for the images that sources
// make of files which nobody writes again.
package linkfile

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// LinkOrCopy makes to, which must not exist, a name of the file from. Where file systems
// refuse a link, to is a copy with the permissions of from. A file that vanished matches
// os.ErrNotExist.
func LinkOrCopy(from, to string) error {
	err := os.Link(from, to)
	for _, refusal := range []error{syscall.EXDEV, syscall.EMLINK, syscall.EPERM, syscall.EACCES, syscall.ENOTSUP} {
		if errors.Is(err, refusal) {
			return Copy(from, to)
		}
	}
	return err
}

// Copy makes to, which must not exist, a copy of from with its permissions.
func Copy(from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return WritePrefix(f, to, info.Size(), info.Mode().Perm())
}

// WritePrefix makes the file to, which must not exist, of the first size bytes of r. A
// reader that has fewer is io.ErrUnexpectedEOF.
func WritePrefix(r io.ReaderAt, to string, size int64, mode os.FileMode) error {
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	n, err := io.Copy(w, io.NewSectionReader(r, 0, size))
	if err == nil && n < size {
		err = io.ErrUnexpectedEOF
	}
	return errors.Join(err, w.Close())
}
