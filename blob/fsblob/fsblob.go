// Package fsblob keeps blobs as files in a directory: of a local disk, or of a mounted
// share.
//
// Open takes the directory, a Driver does the rest: it is right among any number of
// processes without locks or a daemon. An object appears whole, by one link or rename,
// when its bytes are on disk, and a Put returns when its name is too. Where the file system
// has unnamed files (ext4, xfs, btrfs, tmpfs, ...) a killed writer leaves nothing; elsewhere
// it leaves a file in .tmp, which is no object and which SweepTemp removes. Nothing
// expires here: a TTL is ignored and RemoveTTL checks existence only.
//
// How keys become file names is written in docs/format.md; keys of
// [A-Za-z0-9._-] and slashes are their own paths, so a person can read the tree.
//
// Errors say what to do about them: no space, no quota and a read-only file system are
// permanent, and what is refused is fs.ErrPermission.
package fsblob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/blob"
)

const (
	dirMode  = 0o700
	fileMode = 0o600
)

// Options tune a Driver; nil means the zero value.
type Options struct {
	// Create makes the directory, and those above it, when it is absent.
	Create bool

	// named makes every put go by a named temporary file, as on file systems without
	// unnamed ones.
	named bool
}

// Driver keeps objects as files below one directory. It holds no resources while nobody
// calls it.
type Driver struct {
	root string
	self fs.FileInfo // the directory as it was at Open; see checkRoot

	named   atomic.Bool // puts go by named temporary files
	durable dirSet
	sync    func(*os.File) error // a seam for tests
}

var (
	_ blob.Driver      = (*Driver)(nil)
	_ blob.Clock       = (*Driver)(nil)
	_ blob.TempSweeper = (*Driver)(nil)
)

// Open opens the store in dir. A directory that does not exist is fs.ErrNotExist unless
// opts.Create is set. A store on a read-only file system can be opened and read.
func Open(dir string, opts *Options) (*Driver, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	if o.Create {
		if err := makeRoot(root); err != nil {
			return nil, fmt.Errorf("open store %s: %w", root, explain(err, root))
		}
	}
	self, err := os.Stat(root)
	if err == nil && !self.IsDir() {
		err = errors.New("it is a file and not a directory")
	}
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", root, explain(bare(err), root))
	}
	d := &Driver{root: root, self: self, sync: syncFile}
	d.named.Store(o.named || !hasUnnamed)
	return d, nil
}

// makeRoot makes the store's directory and those above it, durable from the top.
func makeRoot(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if err := makeRoot(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(parent)
}

// String is the store's URL.
func (d *Driver) String() string { return "file://" + d.root }

// Dir is the absolute path of the store's directory.
func (d *Driver) Dir() string { return d.root }

// checkRoot fails when the store's directory is not the one that was opened: unmounted,
// removed or replaced. Without it a store that went away would look like an empty one.
func (d *Driver) checkRoot() error {
	now, err := os.Stat(d.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return explain(err, d.root)
	}
	if err != nil || !os.SameFile(now, d.self) {
		return fmt.Errorf("the store's directory %s is not there any more (unmounted, or replaced)", d.root)
	}
	return nil
}

// absent is the error for what has no file; err is why.
func (d *Driver) absent(err error) error {
	if !isAbsent(err) {
		return explain(err, d.root)
	}
	if err := d.checkRoot(); err != nil {
		return err
	}
	return fs.ErrNotExist
}

// Get implements blob.Driver. The stream reads the file at its place in it and is not
// disturbed when the object is deleted or replaced meanwhile.
func (d *Driver) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(d.path(key), os.O_RDONLY|noFollow, 0)
	if err != nil {
		return nil, d.absent(err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		_ = f.Close() // nothing was read from it
		return nil, explain(err, d.root)
	}
	offset = min(offset, info.Size())
	n := info.Size() - offset
	if length >= 0 {
		n = min(n, length)
	}
	return &section{file: f, offset: offset, left: n}, nil
}

// section is a range of an open file.
type section struct {
	file         *os.File
	offset, left int64
}

func (s *section) Read(p []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	n, err := s.file.ReadAt(p[:min(int64(len(p)), s.left)], s.offset)
	s.offset += int64(n)
	s.left -= int64(n)
	if err == io.EOF && s.left > 0 {
		return n, fmt.Errorf("%w: %s became shorter while it was read: %w", blob.ErrCorrupt, s.file.Name(), io.ErrUnexpectedEOF)
	}
	if n > 0 {
		err = nil
	}
	return n, explain(err, s.file.Name())
}

func (s *section) Close() error { return s.file.Close() }

// Stat implements blob.Driver.
func (d *Driver) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := ctx.Err(); err != nil {
		return blob.Info{}, err
	}
	info, err := d.stat(key, d.path(key))
	if err != nil {
		return blob.Info{}, d.absent(err)
	}
	return info, nil
}

// stat is fs.ErrNotExist for what is no plain file.
func (d *Driver) stat(key, path string) (blob.Info, error) {
	info, err := os.Lstat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return blob.Info{}, err
	}
	return blob.Info{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil
}

// RemoveTTL implements blob.Driver; nothing expires here.
func (d *Driver) RemoveTTL(ctx context.Context, keys []string) error {
	return blob.CheckPresent(ctx, d, keys)
}

// Now implements blob.Clock: it is the time that the file system stamps on a new file,
// which on a share is the server's. Where nothing can be written it is the process's
// clock, since nothing can be decided with it there.
func (d *Driver) Now(ctx context.Context) (time.Time, error) {
	if err := ctx.Err(); err != nil {
		return time.Time{}, err
	}
	t, err := d.create()
	if err != nil {
		if err = explain(err, d.root); errors.Is(err, fs.ErrPermission) {
			return time.Now(), nil
		}
		return time.Time{}, err
	}
	defer t.discard()
	info, err := t.Stat()
	if err != nil {
		return time.Time{}, explain(err, d.root)
	}
	return info.ModTime(), nil
}

// Close implements blob.Driver.
func (d *Driver) Close() error { return nil }
