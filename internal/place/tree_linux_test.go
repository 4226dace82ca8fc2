package place

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// node is one entry of a tree literal.
type node struct {
	kind     snapshot.Type
	data     []byte
	size     int64 // of a sparse file; data stands in its middle
	link     string
	hard     string
	mode     uint32
	uid, gid int
	mtime    time.Time
	xattrs   map[string]string
}

type literal map[string]*node

func text(s string) *node { return &node{data: []byte(s), mode: 0o644} }
func dir(mode uint32) *node {
	return &node{kind: snapshot.Dir, mode: mode}
}
func sym(to string) *node           { return &node{kind: snapshot.Symlink, link: to} }
func hard(first string) *node       { return &node{hard: first} }
func sparse(size int64) *node       { return &node{data: []byte("island"), size: size, mode: 0o600} }
func (n *node) perm(m uint32) *node { n.mode = m; return n }
func (n *node) own(u, g int) *node  { n.uid, n.gid = u, g; return n }
func (n *node) at(sec, nsec int64) *node {
	n.mtime = time.Unix(sec, nsec)
	return n
}
func (n *node) attr(name, value string) *node {
	n.xattrs = map[string]string{name: value}
	return n
}

// noise is a file of n bytes that depend on the seed.
func noise(seed uint64, n int) *node {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	p := make([]byte, n)
	rand.NewChaCha8(key).Read(p)
	return &node{data: p, mode: 0o644}
}

// build makes the tree of a literal at dir. Missing parents are made.
func build(t testing.TB, dir string, l literal) string {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o755))
	paths := slices.Sorted(maps.Keys(l))
	for _, p := range paths {
		n, full := l[p], filepath.Join(dir, p)
		must(t, os.MkdirAll(filepath.Dir(full), 0o755))
		switch {
		case n.kind == snapshot.Dir:
			must(t, os.MkdirAll(full, 0o755))
		case n.kind == snapshot.Symlink:
			must(t, os.Symlink(n.link, full))
		case n.hard != "":
			must(t, os.Link(filepath.Join(dir, n.hard), full))
		default:
			buildFile(t, full, n)
		}
	}
	slices.Reverse(paths)
	for _, p := range paths {
		dress(t, filepath.Join(dir, p), l[p])
	}
	return dir
}

func buildFile(t testing.TB, full string, n *node) {
	t.Helper()
	f, err := os.Create(full)
	must(t, err)
	defer f.Close()
	if n.size > 0 {
		must(t, f.Truncate(n.size))
	}
	_, err = f.WriteAt(n.data, n.size/2)
	must(t, err)
}

func dress(t testing.TB, full string, n *node) {
	t.Helper()
	if n.hard != "" {
		return
	}
	if n.uid != 0 || n.gid != 0 {
		must(t, os.Lchown(full, n.uid, n.gid))
	}
	for k, v := range n.xattrs {
		must(t, unix.Lsetxattr(full, k, []byte(v), 0))
	}
	if n.kind != snapshot.Symlink {
		must(t, unix.Chmod(full, n.mode))
	}
	if !n.mtime.IsZero() {
		ts := []unix.Timespec{unix.NsecToTimespec(n.mtime.UnixNano()), unix.NsecToTimespec(n.mtime.UnixNano())}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, full, ts, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// listing describes all below dir in words that cmp.Diff shows well: type, mode, owner,
// mtime, bytes, links, xattrs, and whether holes are holes.
func listing(t testing.TB, dir string) map[string]string {
	t.Helper()
	out, first := map[string]string{}, map[uint64]string{}
	must(t, filepath.WalkDir(dir, func(full string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		must(t, unix.Lstat(full, &st))
		p, _ := filepath.Rel(dir, full)
		s := fmt.Sprintf("%o %d:%d %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			to, err := os.Readlink(full)
			must(t, err)
			s += " -> " + to
		case unix.S_IFREG:
			data, err := os.ReadFile(full)
			must(t, err)
			s += fmt.Sprintf(" %d %.12s sparse=%v", st.Size, snapshot.Sum(data), st.Size >= 1<<20 && st.Blocks*512 <= st.Size/2)
			if st.Nlink > 1 && first[st.Ino] != "" {
				s += " = " + first[st.Ino]
			} else {
				first[st.Ino] = p
			}
		}
		out[p] = s + xattrText(t, full)
		return nil
	}))
	return out
}

func xattrText(t testing.TB, full string) string {
	t.Helper()
	list := make([]byte, 4096)
	n, err := unix.Llistxattr(full, list)
	must(t, err)
	var all []string
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if strings.HasPrefix(name, "user.") {
			value := make([]byte, 4096)
			n, err := unix.Lgetxattr(full, name, value)
			must(t, err)
			all = append(all, fmt.Sprintf(" %s=%q", name, value[:n]))
		}
	}
	sort.Strings(all)
	return strings.Join(all, "")
}

// packs is a blob store in memory.
type packs struct {
	size  int // of a pack at most
	cell  uint32
	zip   bool // stores compressed what gets shorter by it
	blobs map[string][]byte
	have  map[snapshot.Digest]snapshot.Location

	mu     sync.Mutex
	reads  int
	served int64 // bytes
	// fail is asked with the number of the Read, from 1.
	fail func(n int, blob string) error
}

func newPacks() *packs {
	return &packs{size: 256 << 10, cell: snapshot.MinChunkSize, blobs: map[string][]byte{}, have: map[snapshot.Digest]snapshot.Location{}}
}

func (s *packs) put(p []byte) snapshot.Chunk {
	c := snapshot.Chunk{Length: uint32(len(p)), Digest: snapshot.Sum(p)}
	if loc, ok := s.have[c.Digest]; ok {
		c.Location = loc
		return c
	}
	if z := snapshot.AppendZstd(nil, p); s.zip && len(z) < len(p) {
		p, c.Encoding = z, snapshot.Zstd
	}
	key := fmt.Sprintf("b/%d", len(s.blobs))
	if n := len(s.blobs); n > 0 && len(s.blobs[fmt.Sprintf("b/%d", n-1)])+len(p) <= s.size {
		key = fmt.Sprintf("b/%d", n-1)
	}
	c.Location = snapshot.Location{Blob: key, Offset: uint32(len(s.blobs[key])), Stored: uint32(len(p)), Encoding: c.Encoding}
	s.blobs[key] = append(s.blobs[key], p...)
	s.have[c.Digest] = c.Location
	return c
}

func (s *packs) read(_ context.Context, blob string, offset, length int64) (io.ReadCloser, error) {
	s.mu.Lock()
	s.reads++
	n, fail := s.reads, s.fail
	s.mu.Unlock()
	if fail != nil {
		if err := fail(n, blob); err != nil {
			return nil, err
		}
	}
	p, ok := s.blobs[blob]
	if !ok || offset > int64(len(p)) {
		return nil, fs.ErrNotExist
	}
	p = p[offset:min(offset+length, int64(len(p)))]
	s.mu.Lock()
	s.served += int64(len(p))
	s.mu.Unlock()
	return io.NopCloser(bytes.NewReader(p)), nil
}

// snap makes the index of what lies at dir and stores its chunks.
func (s *packs) snap(t testing.TB, dir string) *snapshot.Index {
	t.Helper()
	x := &snapshot.Index{Job: "j", Task: "t", Store: "kv", Checkpoint: "c"}
	names := map[uint64][]string{}
	must(t, filepath.WalkDir(dir, func(full string, d fs.DirEntry, err error) error {
		if err == nil {
			x.Entries = append(x.Entries, s.entry(t, dir, full, names))
		}
		return err
	}))
	slices.SortFunc(x.Entries, func(a, b snapshot.Entry) int { return strings.Compare(a.Path, b.Path) })
	linkUp(x, names)
	must(t, x.Validate())
	return x
}

func (s *packs) entry(t testing.TB, dir, full string, names map[uint64][]string) snapshot.Entry {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Lstat(full, &st))
	p, err := filepath.Rel(dir, full)
	must(t, err)
	if p == "." {
		p = ""
	}
	e := snapshot.Entry{Path: p, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, MTime: snapshot.Time{Sec: int64(st.Mtim.Sec), Nsec: int32(st.Mtim.Nsec)}}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.Type = snapshot.Dir
	case unix.S_IFLNK:
		e.Type = snapshot.Symlink
		e.Mode = 0o777
		e.Link, err = os.Readlink(full)
		must(t, err)
	default:
		names[st.Ino] = append(names[st.Ino], p)
		s.chunks(t, full, &e, st)
	}
	for _, kv := range strings.Split(strings.TrimSpace(xattrText(t, full)), " ") {
		if name, value, ok := strings.Cut(kv, "="); ok {
			e.Xattrs = append(e.Xattrs, snapshot.Xattr{Name: name, Value: []byte(strings.Trim(value, `"`))})
		}
	}
	return e
}

func (s *packs) chunks(t testing.TB, full string, e *snapshot.Entry, st unix.Stat_t) {
	t.Helper()
	f, err := os.Open(full)
	must(t, err)
	defer f.Close()
	e.Size, e.ChunkSize = st.Size, s.cell
	for off, n := range snapshot.Cut(st.Size, dataRuns(int(f.Fd()), 0, st.Size, st.Size), s.cell) {
		p := make([]byte, n)
		_, err := f.ReadAt(p, off)
		must(t, err)
		c := s.put(p)
		c.Offset = off
		e.Chunks = append(e.Chunks, c)
	}
}

// linkUp turns all but the least name of each inode into links to that.
func linkUp(x *snapshot.Index, names map[uint64][]string) {
	for _, group := range names {
		slices.Sort(group)
		for _, p := range group[1:] {
			e, _ := x.Lookup(p)
			e.Link, e.Size, e.ChunkSize, e.Chunks = group[0], 0, 0, nil
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// same fails the test unless both directories hold the same tree.
func same(t testing.TB, want, got string) {
	t.Helper()
	if d := cmp.Diff(listing(t, want), listing(t, got)); d != "" {
		t.Fatalf("%s is not as %s (-want +got):\n%s", got, want, d)
	}
}

// only fails the test unless dir has exactly these entries.
func only(t testing.TB, dir string, want ...string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	got := []string{}
	for _, d := range list {
		got = append(got, d.Name())
	}
	slices.Sort(want)
	if d := cmp.Diff(append([]string{}, want...), got); d != "" {
		t.Fatalf("entries of %s (-want +got):\n%s", dir, d)
	}
}

// Names are removed several at a time, whatever their modes, and the first error is told.
func TestRemoveAtOnce(t *testing.T) {
	l := literal{}
	for i := range 40 {
		l[fmt.Sprintf("d%02d", i)] = dir(0o500)
		for j := range 40 {
			l[fmt.Sprintf("d%02d/f%02d", i, j)] = text("x").perm(0)
		}
		l[fmt.Sprintf("d%02d/inner/f", i)] = text("y")
	}
	watchDescriptors(t)
	top := t.TempDir()
	build(t, top+"/old", l)
	tr, err := openTree(top, nil)
	must(t, err)
	defer tr.close()

	var calls atomic.Int32
	third, broken := make(chan struct{}), errors.New("broken")
	tr.fail = func(string) error {
		switch calls.Add(1) { // the first is for the whole
		case 2:
			select {
			case <-third:
			case <-time.After(30 * time.Second):
				return errors.New("nothing else is removed meanwhile")
			}
		case 3:
			close(third)
		case 1000:
			return broken
		}
		return nil
	}
	if err := tr.remove("old"); !errors.Is(err, broken) {
		t.Fatalf("got %v", err)
	}
	tr.fail = nil
	must(t, tr.remove("old"))
	must(t, tr.remove("old"))
	only(t, top)
}
