package fsblob

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
)

// mount gives a directory on a file system of its own.
func mount(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("snapferry-test", dir, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// A full disk is a clear, permanent error; nothing is left of the put, and room helps.
func TestFullDisk(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		dir := mount(t, "size=2m")
		d := open(t, dir, opts)
		put(t, d, "old", strings.Repeat("x", 1<<20))
		big := blob.Bytes(make([]byte, 3<<19))
		err := d.Put(t.Context(), "a/big", big, blob.PutOptions{})
		if !errors.Is(err, syscall.ENOSPC) || !errors.Is(err, blob.ErrNoEffect) || blob.IsRetriable(err) || !strings.Contains(err.Error(), dir+" is full") {
			t.Fatalf("put to a full disk: %v", err)
		}
		wantFiles(t, dir, "old")
		if err := d.Delete(t.Context(), []string{"old"}); err != nil {
			t.Fatal(err)
		}
		if err := d.Put(t.Context(), "a/big", big, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		wantFiles(t, dir, "a/", "a/big")
	})
}

// No inode left is the same error, also when only a directory cannot be made.
func TestNoInodes(t *testing.T) {
	d := open(t, mount(t, "size=1m,nr_inodes=3"), Options{})
	err := d.Put(t.Context(), "a/b/c/d", blob.Bytes(nil), blob.PutOptions{})
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "inodes") {
		t.Fatalf("got %v", err)
	}
	if got := keys(t, d); len(got) != 0 {
		t.Fatalf("visible: %q", got)
	}
}

// A read-only store reads, tells a time, and refuses the rest as fs.ErrPermission.
func TestReadOnly(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		dir := mount(t, "size=2m")
		put(t, open(t, dir, opts), "a/b", "1")
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			t.Fatal(err)
		}
		d := open(t, dir, Options{Create: true, named: opts.named})
		s := blob.New(d, nil)
		if got, err := s.ReadAll(t.Context(), "a/b", 0, -1); err != nil || string(got) != "1" {
			t.Errorf("read: %q, %v", got, err)
		}
		if now, err := s.Now(t.Context()); err != nil || now.IsZero() {
			t.Errorf("now: %v, %v", now, err)
		}
		for op, err := range map[string]error{
			"put":    s.Put(t.Context(), "a/c", blob.Bytes(nil), blob.PutOptions{}),
			"delete": s.Delete(t.Context(), []string{"a/b"}),
		} {
			if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "read-only") {
				t.Errorf("%s: %v", op, err)
			}
		}
		if err := s.Delete(t.Context(), []string{"no/such"}); err != nil {
			t.Errorf("delete of what is absent: %v", err)
		}
	})
}

// A user without the right to write or read is told so.
func TestPermission(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	d := open(t, dir, Options{Create: true})
	put(t, d, "a/b", "1")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	// The thread's file system user is another one for a while; the kernel drops root's
	// powers over files with it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setfsuid(65534); err != nil {
		t.Fatal(err)
	}
	_, getErr := d.Get(t.Context(), "a/b", 0, -1)
	putErr := d.Put(t.Context(), "c", blob.Bytes(nil), blob.PutOptions{})
	deleteErr := d.Delete(t.Context(), []string{"a/b"})
	if err := unix.Setfsuid(0); err != nil {
		t.Fatal(err)
	}
	for op, err := range map[string]error{"get": getErr, "put": putErr, "delete": deleteErr} {
		if !errors.Is(err, fs.ErrPermission) || blob.IsRetriable(err) || !strings.Contains(err.Error(), "check owner") {
			t.Errorf("%s: %v", op, err)
		}
	}
	if got := keys(t, d); len(got) != 1 {
		t.Errorf("objects: %q", got)
	}
}

// Part of a store on another file system is refused clearly and without leftovers.
func TestOtherFileSystemInside(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{})
	put(t, d, "m/x", "")
	inner := filepath.Join(dir, "m")
	if err := unix.Mount("snapferry-test", inner, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	err := d.Put(t.Context(), "m/y", blob.Bytes(nil), blob.PutOptions{})
	if uerr := unix.Unmount(inner, 0); uerr != nil {
		t.Fatal(uerr)
	}
	if !errors.Is(err, syscall.EXDEV) || !strings.Contains(err.Error(), "another file system") {
		t.Fatalf("got %v", err)
	}
	wantFiles(t, dir, "m/", "m/x")
}

// The names of directories that another process made are synced too before they count,
// and a directory made anew is not taken for the old one.
func TestDurableDirectories(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{})
	put(t, d, "a/b", "")
	path := filepath.Join(dir, "a")
	id, err := identify(path)
	if err != nil || !d.durable.has(path, id) {
		t.Fatalf("not remembered: %v", err)
	}
	if err := errors.Join(os.RemoveAll(path), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	again, err := identify(path)
	if err != nil || d.durable.has(path, again) {
		t.Fatalf("taken for the one before: %v", err)
	}
	put(t, d, "a/b", "")
	if !d.durable.has(path, again) {
		t.Fatal("not remembered the second time")
	}
}
