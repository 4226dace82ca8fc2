package snapferry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// bulk returns n bytes that no compression or cutting makes smaller, the same for the
// same seed.
func bulk(seed uint64, n int) string {
	b := make([]byte, n)
	var s [32]byte
	s[0], s[1], s[2] = byte(seed), byte(seed>>8), byte(seed>>16)
	_, _ = rand.NewChaCha8(s).Read(b)
	return string(b)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// portrait tells everything that a restore promises about a tree, one line a path.
func portrait(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	inodes := map[uint64]string{}
	check(t, filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		out[rel], err = describePath(p, rel, inodes)
		return err
	}))
	return out
}

func describePath(p, rel string, inodes map[uint64]string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(p, &st); err != nil {
		return "", err
	}
	line := fmt.Sprintf("%06o %d:%d %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		to, err := os.Readlink(p)
		return line + " -> " + to, err
	case unix.S_IFREG:
		if first, ok := inodes[st.Ino]; ok {
			return line + " = " + first, nil
		}
		inodes[st.Ino] = rel
		if st.Size > 1<<30 { // sparse: its ends tell enough
			return fmt.Sprintf("%s %d bytes", line, st.Size), nil
		}
		data, err := os.ReadFile(p)
		return fmt.Sprintf("%s %d %s", line, len(data), snapshot.Sum(data)), err
	}
	return line, nil
}

func wantSameTree(t testing.TB, got, want string) {
	t.Helper()
	if diff := cmp.Diff(portrait(t, want), portrait(t, got)); diff != "" {
		t.Fatalf("trees differ (-want +got):\n%s", diff)
	}
}

// at names a checkpoint.
func at(t testing.TB, id string) At {
	t.Helper()
	a, err := ParseAt(id)
	check(t, err)
	return a
}

// restore brings store kv of a checkpoint to a new directory.
func (w *world) restore(id string) string {
	w.t.Helper()
	out := filepath.Join(w.t.TempDir(), "out")
	_, err := w.repo().Restore(w.t.Context(), kvTask, at(w.t, id), map[string]string{"kv": out}, nil)
	check(w.t, err)
	return out
}

// wantSound checks that every retained checkpoint can be restored, byte by byte.
func (w *world) wantSound() {
	w.t.Helper()
	rep, err := w.repo().Verify(w.t.Context(), VerifyOptions{ReadData: true})
	check(w.t, err)
	if !rep.OK {
		w.t.Fatalf("verify: missing %+v, corrupt %+v", rep.Missing, rep.Corrupt)
	}
}

// state is what the newest entry of the task's log says.
func (w *world) state() *head.State {
	w.t.Helper()
	v := &view{id: kvTask, blobs: w.blobs, log: w.cps.Log(kvTask)}
	_, l, err := v.head(w.t.Context())
	check(w.t, err)
	return l.State
}

// keys lists what lies below a prefix, such as "b/" of the task.
func (w *world) keys(below string) []string {
	w.t.Helper()
	var out []string
	for info, err := range w.blobs.List(w.t.Context(), taskPrefix(kvTask)+below, "") {
		check(w.t, err)
		out = append(out, info.Key)
	}
	return out
}

func (w *world) gc(olderThan GCOptions) *GCReport {
	w.t.Helper()
	rep, err := w.repo().GC(w.t.Context(), olderThan)
	check(w.t, err)
	return rep
}

// wantOnlyNamed checks that gc without grace leaves exactly what the head names.
func (w *world) wantOnlyNamed() {
	w.t.Helper()
	w.gc(GCOptions{})
	v := &view{id: kvTask, blobs: w.blobs, log: w.cps.Log(kvTask)}
	_, l, err := v.head(w.t.Context())
	check(w.t, err)
	named, err := v.named(w.t.Context(), l, nil)
	check(w.t, err)
	for _, k := range w.keys("b/") {
		if !named[k] {
			w.t.Errorf("%s stays and nothing names it", k)
		}
		delete(named, k)
	}
	for k := range named {
		w.t.Errorf("%s is named and gone", k)
	}
}

// spied is a source whose files tell when they are opened and read.
type spied struct {
	source.Source
	open func(path string)                   // before a file is opened
	read func(path string, off int64, n int) // after bytes were read
	xatt func(path string)                   // before attributes are read
	n    *atomic.Int64                       // bytes read
}

func (s spied) Freeze(ctx context.Context) (source.Image, error) {
	img, err := s.Source.Freeze(ctx)
	if err != nil {
		return nil, err
	}
	return spiedImage{img, s}, nil
}

type spiedImage struct {
	source.Image
	spy spied
}

func (m spiedImage) Open(path string) (source.File, error) {
	if m.spy.open != nil {
		m.spy.open(path)
	}
	f, err := m.Image.Open(path)
	if err != nil {
		return nil, err
	}
	return spiedFile{f, path, m.spy}, nil
}

func (m spiedImage) Xattrs(path string) ([]source.Xattr, error) {
	if m.spy.xatt != nil {
		m.spy.xatt(path)
	}
	return m.Image.Xattrs(path)
}

type spiedFile struct {
	source.File
	path string
	spy  spied
}

func (f spiedFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	if f.spy.n != nil {
		f.spy.n.Add(int64(n))
	}
	if f.spy.read != nil {
		f.spy.read(f.path, off, n)
	}
	return n, err
}

// commitFrom commits other sources than the world's own.
func (w *world) commitFrom(task *Task, sources map[string]source.Source) (*CommitReport, error) {
	p, err := task.Snapshot(w.t.Context(), sources, nil)
	if err != nil {
		return nil, err
	}
	return p.Commit(w.t.Context())
}

// patch overwrites a part of a file in place and, if it can, hides that: the size and
// the mtime stay.
func patch(t testing.TB, path string, off int64, data string) {
	t.Helper()
	info, err := os.Stat(path)
	check(t, err)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteAt([]byte(data), off)
	check(t, err)
	check(t, f.Close())
	check(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
}

// flip changes one bit in the middle of a blob.
func flip(data []byte) []byte {
	data[len(data)/2] ^= 0x10
	return data
}

// errandSpec is what a child process is to do.
type errandSpec struct {
	Name       string
	Repo, Dir  string
	Cache, Out string
	KillAt     int64
	Size       int64
}

const errandVar = "SNAPFERRY_TEST_ERRAND"

// sendErrand runs TestChild in a process of its own and says whether it was killed.
func sendErrand(t testing.TB, e errandSpec) (out []byte, killed bool, usage *syscall.Rusage) {
	t.Helper()
	given, err := json.Marshal(e)
	check(t, err)
	c := exec.Command("/proc/self/exe", "-test.run=^TestChild$", "-test.count=1", "-test.timeout=5m")
	c.Env = append(os.Environ(), errandVar+"="+string(given), "GOCOVERDIR=")
	var b bytes.Buffer
	c.Stdout, c.Stderr = &b, &b
	err = c.Run()
	usage, _ = c.ProcessState.SysUsage().(*syscall.Rusage)
	if err == nil {
		return b.Bytes(), false, usage
	}
	if status, ok := c.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signal() == syscall.SIGKILL {
		return b.Bytes(), true, usage
	}
	t.Fatalf("child: %v\n%s", err, b.Bytes())
	return nil, false, nil
}

// die ends the process as a crash does.
func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// childErrands are what a child process can be sent for.
var childErrands = map[string]func(t *testing.T, e errandSpec){
	"upload":  childUpload,
	"restore": childRestore,
	"commit":  childCommits,
	"memory":  childMemory,
}

// TestChild is the child's side; without an errand there is nothing to test in it.
func TestChild(t *testing.T) {
	given := os.Getenv(errandVar)
	if given == "" {
		return
	}
	var e errandSpec
	check(t, json.Unmarshal([]byte(given), &e))
	childErrands[e.Name](t, e)
}

// stored sums the sizes of the task's blobs.
func (w *world) stored() (n int64) {
	w.t.Helper()
	for info, err := range w.blobs.List(w.t.Context(), blobPrefix(kvTask), "") {
		check(w.t, err)
		n += info.Size
	}
	return n
}

// ext4 tells whether identities can be cached in a directory: what is claimed of the
// cache can only be shown there.
func ext4(t testing.TB, dir string) bool {
	t.Helper()
	var st unix.Statfs_t
	check(t, unix.Statfs(dir, &st))
	return st.Type == unix.EXT4_SUPER_MAGIC
}

// packsOf returns the data blobs of a checkpoint's store kv.
func (w *world) packsOf(id string) []string {
	w.t.Helper()
	cp, err := w.repo().Show(w.t.Context(), kvTask, at(w.t, id))
	check(w.t, err)
	x, err := w.repo().Index(w.t.Context(), cp, "kv")
	check(w.t, err)
	var out []string
	for i := range x.Entries {
		for _, c := range x.Entries[i].Chunks {
			if !slices.Contains(out, c.Blob) {
				out = append(out, c.Blob)
			}
		}
	}
	return out
}

// chunkOf returns the first chunk of a file of a checkpoint's store kv.
func (w *world) chunkOf(id, path string) snapshot.Chunk {
	w.t.Helper()
	cp, err := w.repo().Show(w.t.Context(), kvTask, at(w.t, id))
	check(w.t, err)
	x, err := w.repo().Index(w.t.Context(), cp, "kv")
	check(w.t, err)
	e, ok := x.Lookup(path)
	if !ok || len(e.Chunks) == 0 {
		w.t.Fatalf("no content of %s", path)
	}
	return e.Chunks[0]
}

func isBlob(key string) bool { return strings.Contains(key, "/b/") }

var _ blob.Driver = (*hookDriver)(nil)

// hookDriver calls before ahead of each put, after with its outcome behind it, and get
// ahead of each get. The first two may fail the put.
type hookDriver struct {
	blob.Driver
	before func(key string, n int64) error
	after  func(key string, err error) error
	get    func(key string)
}

func (d *hookDriver) Put(ctx context.Context, key string, body blob.Body, opts blob.PutOptions) error {
	if d.before != nil {
		if err := d.before(key, body.Size); err != nil {
			return err
		}
	}
	err := d.Driver.Put(ctx, key, body, opts)
	if d.after != nil {
		err = d.after(key, err)
	}
	return err
}

func (d *hookDriver) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if d.get != nil {
		d.get(key)
	}
	return d.Driver.Get(ctx, key, offset, length)
}
