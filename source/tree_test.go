//go:build linux

package source

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// A node of a tree literal: content of a file, target of a link, or mode of a
// directory or special file.
type node struct {
	data string
	link string
	mode uint32 // type and permissions; zero is a regular file 0644
}

type layout map[string]node

func directory() node { return node{mode: unix.S_IFDIR | 0o755} }

// build makes the tree under a new directory. Parents of paths are made.
func (l layout) build(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(realTemp(t), "store")
	must(t, os.Mkdir(dir, 0o755))
	for path, n := range l {
		full := join(dir, path)
		must(t, os.MkdirAll(filepath.Dir(full), 0o755))
		must(t, n.make(full))
	}
	return dir
}

func (n node) make(path string) error {
	switch {
	case n.link != "":
		return os.Symlink(n.link, path)
	case n.mode&unix.S_IFMT == unix.S_IFDIR:
		return os.MkdirAll(path, 0o755)
	case n.mode&unix.S_IFMT != 0 && n.mode&unix.S_IFMT != unix.S_IFREG:
		return unix.Mknod(path, n.mode, 0)
	}
	return os.WriteFile(path, []byte(n.data), 0o644)
}

// realTemp is a temporary directory under a path without symbolic links.
func realTemp(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	return dir
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func freeze(t testing.TB, dir string, opts *DirOptions) Image {
	t.Helper()
	img, err := Dir(dir, opts).Freeze(t.Context())
	must(t, err)
	t.Cleanup(func() { img.Release() })
	return img
}

func paths(img Image) []string {
	list := []string{}
	for _, e := range img.Entries() {
		list = append(list, e.Path)
	}
	return list
}

func same(t *testing.T, got, want any) {
	t.Helper()
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("-got +want:\n%s", diff)
	}
}

func openFile(t testing.TB, img Image, path string) File {
	t.Helper()
	f, err := img.Open(path)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func content(t *testing.T, f File) string {
	t.Helper()
	data, err := io.ReadAll(io.NewSectionReader(f, 0, f.Identity().Size))
	must(t, err)
	return string(data)
}

// asPlainUser runs the calling test again as a user without privileges, and reports
// whether the caller is that run. dir is given to that user.
func asPlainUser(t *testing.T, dir *string) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		*dir = realTemp(t)
		return true
	}
	exe, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	home := realTemp(t)
	must(t, os.Chmod(filepath.Dir(home), 0o755))
	program := filepath.Join(home, "test")
	must(t, os.WriteFile(program, exe, 0o755))
	work := filepath.Join(home, "work")
	must(t, os.Mkdir(work, 0o755))
	must(t, os.Chown(work, 65534, 65534))

	cmd := exec.Command(program, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env, cmd.Dir = append(os.Environ(), "TMPDIR="+work), work
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as a plain user: %v\n%s", err, out)
	}
	return false
}
