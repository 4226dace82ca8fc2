package fsblob

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
)

// The test binary is also the processes of some tests.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	goleak.VerifyTestMain(m)
}

// modes are the two ways of writing a file.
var modes = map[string]Options{"unnamed": {}, "named": {named: true}}

func eachMode(t *testing.T, f func(t *testing.T, opts Options)) {
	for name, opts := range modes {
		t.Run(name, func(t *testing.T) { f(t, opts) })
	}
}

func open(t testing.TB, dir string, opts Options) *Driver {
	t.Helper()
	d, err := Open(dir, &opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func put(t *testing.T, d *Driver, key, value string) {
	t.Helper()
	if err := d.Put(t.Context(), key, blob.Bytes([]byte(value)), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

// files is every path below dir but .tmp itself, directories with a slash.
func files(t *testing.T, dir string) []string {
	t.Helper()
	list := []string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, path)
		switch {
		case err != nil || rel == "." || rel == tempDir:
			return err
		case e.IsDir():
			rel += "/"
		}
		list = append(list, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	if want == nil {
		want = []string{}
	}
	if diff := cmp.Diff(files(t, dir), want); diff != "" {
		t.Fatalf("files (-got +want):\n%s", diff)
	}
}

func TestConformance(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		blobtest.Run(t, func(t *testing.T) blob.Driver {
			dir := t.TempDir()
			t.Cleanup(func() { checkTree(t, dir) })
			return open(t, dir, opts)
		}, nil)
	})
}

// checkTree looks at what a test of the suite left: no temporary files, and modes that
// let nobody else read (0700, 0600).
func checkTree(t *testing.T, dir string) {
	for _, path := range files(t, dir) {
		info, err := os.Lstat(filepath.Join(dir, path))
		if err != nil {
			t.Error(err)
		} else if want := map[bool]fs.FileMode{true: fs.ModeDir | 0o700, false: 0o600}[info.IsDir()]; info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
		}
		if filepath.Dir(path) == tempDir {
			t.Errorf("%s was left behind", path)
		}
	}
}

func TestOpen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	if _, err := Open(dir, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent directory: %v", err)
	}
	for range 2 {
		if d, err := Open(dir, &Options{Create: true}); err != nil || d.Dir() != dir || d.String() != "file://"+dir {
			t.Fatalf("create: %v, %v", d, err)
		}
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Fatalf("made with mode %v, %v", info.Mode(), err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, file + "/below"} {
		for _, create := range []bool{false, true} {
			d, err := Open(path, &Options{Create: create})
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("open of the file %s: %v, %v", path, d, err)
			}
		}
	}
}

// A person can read the tree, and what the person puts there is no object.
func TestTree(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{})
	put(t, d, "snapferry.json", "{}")
	put(t, d, "t/job/task/log/0000000000000001", "x")
	wantFiles(t, dir, "snapferry.json", "t/", "t/job/", "t/job/task/", "t/job/task/log/", "t/job/task/log/0000000000000001")

	for _, name := range []string{".DS_Store", "a b", "t/job/.nfs0001", "lost+found"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	want := []string{"snapferry.json", "t/job/task/log/0000000000000001"}
	if diff := cmp.Diff(keys(t, d), want); diff != "" {
		t.Fatal(diff)
	}
	if _, err := d.Stat(t.Context(), "link"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a symbolic link is an object: %v", err)
	}
}

func keys(t *testing.T, d *Driver) []string {
	t.Helper()
	list := []string{}
	for info, err := range d.List(t.Context(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, info.Key)
	}
	return list
}

// Directories that become empty go with the last object in them.
func TestDeletePrunes(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{})
	put(t, d, "a/b/c/1", "")
	put(t, d, "a/b/c/2", "")
	put(t, d, "a/x", "")
	if err := d.Delete(t.Context(), []string{"a/b/c/1"}); err != nil {
		t.Fatal(err)
	}
	wantFiles(t, dir, "a/", "a/b/", "a/b/c/", "a/b/c/2", "a/x")
	if err := d.Delete(t.Context(), []string{"a/b/c/2", "a"}); err != nil {
		t.Fatal(err)
	}
	wantFiles(t, dir, "a/", "a/x")
	put(t, d, "a/b/c/1", "again")
	if err := d.Delete(t.Context(), []string{"a/b/c/1", "a/x"}); err != nil {
		t.Fatal(err)
	}
	wantFiles(t, dir)
}

// A key that is a path prefix of another is refused with the reason.
func TestPathPrefix(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		d := open(t, t.TempDir(), opts)
		put(t, d, "p/q", "")
		for key, reason := range map[string]string{
			"p": "objects below this key", "p/q/r": "cannot have others below", "p/q/r/s": "cannot have others below",
		} {
			err := d.Put(t.Context(), key, blob.Bytes(nil), blob.PutOptions{})
			if err == nil || !strings.Contains(err.Error(), reason) {
				t.Errorf("put %s beside p/q: %v", key, err)
			}
		}
	})
}

// An empty directory, left by a Delete that was cut short, is not in the way.
func TestEmptyDirectoryInTheWay(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{})
	if err := os.Mkdir(filepath.Join(dir, "k"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, ifAbsent := range []bool{false, true} {
		if err := d.Put(t.Context(), "k", blob.Bytes(nil), blob.PutOptions{IfAbsent: ifAbsent}); ifAbsent != errors.Is(err, fs.ErrExist) {
			t.Fatalf("if-absent %v: %v", ifAbsent, err)
		}
	}
	wantFiles(t, dir, "k")
}

// List reads no directory that start-after has passed or that the prefix excludes.
func TestListPrunes(t *testing.T) {
	w := walk{prefix: "a/", after: "a/2/x/y"}
	for dir, want := range map[string]bool{
		"a/": true, "a/1/": false, "a/2/": true, "a/2/w/": false, "a/2/x/": true, "a/2/x/z/": true, "a/3/": true,
		"a-/": false, "b/": false,
	} {
		if got := w.wants(dir, true); got != want {
			t.Errorf("reads %s: %v", dir, got)
		}
	}
	if w := (walk{prefix: "a/b"}); !w.wants("a/", true) || !w.wants("a/b/", true) || w.wants("a/a/", true) {
		t.Error("prefix that ends within a component")
	}
}

// A get goes on when its object is deleted or replaced, and is told when its file was cut.
func TestGetIsUndisturbed(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{})
	for name, disturb := range map[string]func() error{
		"delete":  func() error { return d.Delete(context.Background(), []string{"k"}) },
		"replace": func() error { return d.Put(context.Background(), "k", blob.Bytes([]byte("new!")), blob.PutOptions{}) },
		"cut":     func() error { return os.Truncate(filepath.Join(dir, "k"), 1) },
	} {
		put(t, d, "k", "0123")
		r, err := d.Get(t.Context(), "k", 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		if err := disturb(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if cut := name == "cut"; cut != errors.Is(err, blob.ErrCorrupt) || !cut && string(got) != "0123" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A store that went away is not an empty one.
func TestStoreGone(t *testing.T) {
	for name, disturb := range map[string]func(dir string) error{
		"gone": os.RemoveAll,
		"replaced": func(dir string) error {
			return errors.Join(os.Rename(dir, dir+".old"), os.Mkdir(dir, 0o700))
		},
	} {
		dir := filepath.Join(t.TempDir(), "store")
		d := open(t, dir, Options{Create: true})
		put(t, d, "a/b", "1")
		if err := disturb(dir); err != nil {
			t.Fatal(err)
		}
		_, getErr := d.Get(t.Context(), "a/b", 0, -1)
		_, statErr := d.Stat(t.Context(), "a/b")
		var listErr error
		for _, err := range d.List(t.Context(), "a/", "") {
			listErr = err
		}
		for op, err := range map[string]error{
			"get": getErr, "stat": statErr, "list": listErr,
			"put":    d.Put(t.Context(), "a/c", blob.Bytes(nil), blob.PutOptions{}),
			"delete": d.Delete(t.Context(), []string{"a/b"}),
		} {
			if err == nil || errors.Is(err, fs.ErrNotExist) || blob.IsRetriable(err) {
				t.Errorf("%s, %s: %v", name, op, err)
			}
		}
		if _, err := os.Stat(filepath.Join(dir, "a")); err == nil {
			t.Errorf("%s: something was written there", name)
		}
	}
}

// A put whose bytes did not reach the disk does not become visible.
func TestSyncFails(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		dir := t.TempDir()
		d := open(t, dir, opts)
		put(t, d, "old", "1")
		d.sync = func(*os.File) error { return syscall.EIO }
		for _, key := range []string{"old", "new"} {
			err := d.Put(t.Context(), key, blob.Bytes([]byte("2")), blob.PutOptions{})
			if !errors.Is(err, syscall.EIO) || blob.IsRetriable(err) || !errors.Is(err, blob.ErrNoEffect) {
				t.Errorf("put %s: %v", key, err)
			}
		}
		wantFiles(t, dir, "old")
		if got, err := os.ReadFile(filepath.Join(dir, "old")); string(got) != "1" {
			t.Errorf("old object: %q, %v", got, err)
		}
	})
}

// An error of the body is not blamed on the store's file system.
func TestBodyErrorKeepsItsName(t *testing.T) {
	d := open(t, t.TempDir(), Options{})
	body := blob.Body{Size: 1, Open: func() (io.ReadCloser, error) { return nil, syscall.ENOSPC }}
	err := d.Put(t.Context(), "k", body, blob.PutOptions{})
	if !errors.Is(err, syscall.ENOSPC) || err.Error() != syscall.ENOSPC.Error() {
		t.Errorf("got %v", err)
	}
}

// Large objects are whole in both ways, with writeback in between.
func TestLarge(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		d := open(t, t.TempDir(), opts)
		data := bytes.Repeat([]byte("0123456789abcdef"), 20<<20/16)
		put(t, d, "k", string(data))
		got, err := blob.New(d, nil).ReadAll(t.Context(), "k", 0, -1)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	})
}

func Benchmark(b *testing.B) {
	blobtest.Benchmark(b, func(b *testing.B) blob.Driver { return open(b, b.TempDir(), Options{}) })
}
