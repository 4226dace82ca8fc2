package fsblob

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"

	"github.com/snapferry/snapferry/blob"
)

// isAbsent is for a path that names nothing, be it that one above it is no directory.
func isAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP)
}

// refusals are errors of a call that was turned down before it did anything.
var refusals = []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EACCES, syscall.EPERM, syscall.EROFS}

func isRefusal(err error) bool {
	return slices.ContainsFunc(refusals, func(r error) bool { return errors.Is(err, r) })
}

// bare drops the operation and path from an error whose caller names them better.
func bare(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	return err
}

// advice is what a person can do about an error of the file system that holds %s.
var advice = map[syscall.Errno]string{
	syscall.ENOSPC: "the file system of %s is full (or out of inodes): free some space there, then run it again",
	syscall.EDQUOT: "the disk quota on %s is used up: free some space there or have the quota raised, then run it again",
	syscall.EFBIG:  "the file system of %s does not take files of this size",
	syscall.EROFS:  "the file system of %s is mounted read-only",
	syscall.EACCES: "this user may not do that in %s: check owner and mode of it and what is in it",
	syscall.EPERM:  "this user may not do that in %s: check owner, mode and attributes of it and what is in it",
	syscall.EXDEV:  "part of %s lies on another file system, which is not supported: keep the whole store on one",
	syscall.EIO:    "the disk of %s reports errors: check the system log",
}

// passing errors come from load or a server, and may be gone at the next try.
var passing = []syscall.Errno{
	syscall.EINTR, syscall.EAGAIN, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EBUSY,
	syscall.ESTALE, syscall.ETIMEDOUT, syscall.ECONNRESET, syscall.ECONNREFUSED,
}

// explain adds what to do about an error, and its class, for the store in dir.
func explain(err error, dir string) error {
	errno, ok := errors.AsType[syscall.Errno](err)
	if !ok {
		return err
	}
	for _, e := range passing {
		if errno == e {
			return blob.Retriable(err)
		}
	}
	text, ok := advice[errno]
	if !ok {
		return err
	}
	text = fmt.Sprintf(text, dir)
	if errno == syscall.EROFS { // which the standard library does not count as refused
		return fmt.Errorf("%w: %s: %w", err, text, fs.ErrPermission)
	}
	return fmt.Errorf("%w: %s", err, text)
}
