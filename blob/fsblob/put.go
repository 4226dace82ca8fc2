package fsblob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/sentinel"
)

const (
	// writeSize is how many bytes a write call has. Much larger ones make the kernel look
	// for large runs of free memory, which on a virtual machine are those that the host has
	// to provide first: 8 MiB a call took three times as long there, 128 KiB up to half as
	// long again, and smaller ones than this gained nothing.
	writeSize     = 32 << 10
	writebackSize = 8 << 20 // bytes after which their way to the disk begins

	// linkTries bounds how often a put makes its directory again because a racing
	// Delete has removed it as empty.
	linkTries = 1000
)

// errNoUnnamed says that this file system cannot link an unnamed file.
var errNoUnnamed = errors.New("no unnamed files")

// Put implements blob.Driver: write a file that has no name, or one in .tmp, sync it, give
// it its name in one step, sync the directory. When only that last sync fails, the
// object stays, as others may have acted on it already, and the error says that its
// durability is unknown.
func (d *Driver) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	target := d.path(key)
	if opts.IfAbsent {
		if err := d.exists(target); !isAbsent(err) {
			return explain(err, d.root)
		}
	}
	err := d.put(ctx, target, body, opts.IfAbsent)
	if errors.Is(err, errNoUnnamed) {
		d.named.Store(true)
		err = d.put(ctx, target, body, opts.IfAbsent)
	}
	return err
}

func (d *Driver) put(ctx context.Context, target string, body blob.Body, ifAbsent bool) error {
	t, err := d.create()
	if errors.Is(err, errNoUnnamed) {
		return err
	}
	if err != nil {
		return sentinel.Harmless(explain(err, d.root))
	}
	defer t.discard()
	// An error of the body is not of this file system, so it stays as it is.
	if err := body.Copy(ctx, &writer{ctx: ctx, f: t.File, root: d.root}); err != nil {
		return sentinel.Harmless(err)
	}
	if err := d.sync(t.File); err != nil {
		return sentinel.Harmless(fmt.Errorf("not stored, its bytes did not reach the disk: %w", explain(err, d.root)))
	}
	return explain(d.publish(ctx, t, target, ifAbsent), d.root)
}

// writer writes in pieces and starts their writeback early, so that the sync at the end
// has little left to wait for and the disk works while the rest arrives.
type writer struct {
	ctx     context.Context
	f       *os.File
	root    string
	written int64
	started int64 // writeback was started up to here
}

func (w *writer) Write(p []byte) (done int, err error) {
	for len(p) > 0 {
		if err := w.ctx.Err(); err != nil {
			return done, err
		}
		n, err := w.f.Write(p[:min(len(p), writeSize)])
		done += n
		w.written += int64(n)
		if err != nil {
			return done, explain(err, w.root)
		}
		p = p[n:]
		if w.written-w.started >= writebackSize {
			startWriteback(w.f, w.started, w.written-w.started)
			w.started = w.written
		}
	}
	return done, nil
}

// publish gives a synced file its name.
func (d *Driver) publish(ctx context.Context, t *temp, target string, ifAbsent bool) error {
	dir := filepath.Dir(target)
	for range linkTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := d.ensureDir(dir)
		if err == nil {
			err = t.link(target)
		}
		if errors.Is(err, fs.ErrExist) {
			if err = d.exists(target); !ifAbsent && errors.Is(err, fs.ErrExist) {
				err = t.replace(target)
			}
		}
		if !isAbsent(err) {
			return d.published(dir, err)
		}
	}
	return fmt.Errorf("directory %s was removed again and again", dir)
}

// published syncs the name; a directory that is gone held an object that somebody has
// deleted since.
func (d *Driver) published(dir string, err error) error {
	if isRefusal(err) {
		return sentinel.Harmless(err)
	}
	if err != nil {
		return err
	}
	if err := syncDir(dir); err != nil && !isAbsent(err) {
		return fmt.Errorf("stored, but perhaps not durably: %w", err)
	}
	return nil
}

// exists is the error for a name that is taken. Whoever hears that an object exists may
// rely on it (it may be his own, of a try that ended early), so its name is synced
// first. An empty directory left in the way is removed, and then nothing exists.
func (d *Driver) exists(target string) error {
	info, err := os.Lstat(target)
	if err != nil {
		return err
	}
	if info.IsDir() {
		if rmdir(target) == nil {
			return fs.ErrNotExist
		}
		return fmt.Errorf("%s is a directory: there are objects below this key", target)
	}
	if err := syncDir(filepath.Dir(target)); err != nil {
		return err
	}
	return fs.ErrExist
}
