//go:build linux

package source

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Samza failures 6, 7 and 12: names are bytes, odd files are reported and not turned
// into directories, links are kept as links, and a link to "." ends.
func TestWalkKeepsEveryKind(t *testing.T) {
	dir := layout{
		"a/b":                 {data: "in a"},
		"a-b":                 {data: "sorts between a and a/b"},
		"a0":                  {data: "sorts after a/b"},
		"caf\xe9\xff":         {data: "not UTF-8"},
		"new\nline":           {data: "x"},
		"d\xfe/deep/er/leaf":  {data: "x"},
		"empty":               {},
		"emptydir":            directory(),
		"loop":                {link: "."},
		"dangling":            {link: "no/such\xff"},
		"a/fifo":              {mode: unix.S_IFIFO | 0o600},
		"a/in/a/b/c/d/e/deep": {data: "x"},
	}.build(t)
	l, err := net.Listen("unix", join(dir, "sock"))
	must(t, err)
	defer l.Close()

	img := freeze(t, dir, nil)
	same(t, paths(img), []string{
		"", "a", "a-b", "a/b", "a/in", "a/in/a", "a/in/a/b", "a/in/a/b/c", "a/in/a/b/c/d", "a/in/a/b/c/d/e", "a/in/a/b/c/d/e/deep",
		"a0", "caf\xe9\xff", "dangling", "d\xfe", "d\xfe/deep", "d\xfe/deep/er", "d\xfe/deep/er/leaf", "empty", "emptydir", "loop", "new\nline",
	})
	same(t, img.Skipped(), []string{"a/fifo: FIFO", "sock: socket"})
	same(t, findEntry(img.Entries(), "loop").Link, ".")
	same(t, findEntry(img.Entries(), "dangling").Link, "no/such\xff")
	same(t, content(t, openFile(t, img, "caf\xe9\xff")), "not UTF-8")
	same(t, content(t, openFile(t, img, "empty")), "")
}

func TestWalkOfLargeDirectoriesIsSorted(t *testing.T) {
	l := layout{}
	for i := range 3 * statBatch {
		l[fmt.Sprintf("d%d/f%d", i%3, i*7919%100000)] = node{}
	}
	img := freeze(t, l.build(t), nil)
	got := paths(img)
	if len(got) != len(l)+4 {
		t.Errorf("%d entries, want %d", len(got), len(l)+4)
	}
	if !slices.IsSorted(got) {
		t.Error("entries are not sorted")
	}
}

func TestMetadata(t *testing.T) {
	dir := layout{"f": {data: "12345"}, "d": directory()}.build(t)
	must(t, os.Chown(join(dir, "f"), 12345, 54321))
	must(t, unix.Chmod(join(dir, "f"), 0o6751))
	must(t, unix.Chmod(join(dir, "d"), 0o1777))
	stamp := []unix.Timespec{{Sec: 1}, {Sec: -5, Nsec: 123456789}}
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, join(dir, "f"), stamp, 0))

	img := freeze(t, dir, nil)
	f := findEntry(img.Entries(), "f")
	if f.Mode != 0o6751 || f.UID != 12345 || f.GID != 54321 || f.User != "" || f.Size != 5 || f.Type != Regular {
		t.Errorf("%+v", f)
	}
	same(t, f.MTime, Timespec{Sec: -5, Nsec: 123456789})
	if f.Identity.BTime.IsZero() || f.Identity.CTime.IsZero() || f.Identity.Ino == 0 {
		t.Errorf("incomplete identity %+v", f.Identity)
	}
	same(t, findEntry(img.Entries(), "d").Mode, uint32(0o1777))
	same(t, img.Entries()[0].User, "root")
	same(t, img.CacheKey(), dir)
}

func TestSingleFileIsOneEntry(t *testing.T) {
	dir := layout{"f.db": {data: "one"}, "link": {link: "f.db"}, "other": {}}.build(t)
	for _, name := range []string{"f.db", "link"} {
		img := freeze(t, join(dir, name), nil)
		same(t, paths(img), []string{name})
		f := openFile(t, img, name)
		same(t, content(t, f), "one")
		must(t, f.Check())
		same(t, img.CacheKey(), join(dir, "f.db"))
		_, err := img.Open("other")
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("open of a neighbour: %v", err)
		}
	}
}

func TestRootLinkIsResolvedAndOthersAreNot(t *testing.T) {
	outside := layout{"secret": {data: "x"}}.build(t)
	dir := layout{"sub": {link: outside}, "f": {}}.build(t)
	link := join(filepath.Dir(dir), "link")
	must(t, os.Symlink("store", link))
	img := freeze(t, link, nil)
	same(t, paths(img), []string{"", "f", "sub"})
	same(t, img.CacheKey(), dir)
	for _, path := range []string{"sub/secret", "../x", "sub/../f", "/etc/passwd"} {
		if _, err := img.Open(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("open %q: %v", path, err)
		}
	}
}

// The path from the root is resolved without links even if the entry was a
// directory at Freeze.
func TestDirectoryReplacedByLinkIsNotFollowed(t *testing.T) {
	outside := layout{"f": {data: "outside"}}.build(t)
	dir := layout{"d/f": {data: "inside"}}.build(t)
	img := freeze(t, dir, nil)
	held := openFile(t, img, "d/f")
	must(t, os.Rename(join(dir, "d"), join(dir, "old")))
	must(t, os.Symlink(outside, join(dir, "d")))
	if _, err := img.Open("d/f"); !errors.Is(err, ErrChanged) {
		t.Errorf("open: %v", err)
	}
	if err := held.Check(); !errors.Is(err, ErrChanged) {
		t.Errorf("check: %v", err)
	}
}

// openSteps is what is used where openat2 is missing.
func TestOpenWithoutOpenat2(t *testing.T) {
	noOpenat2.Store(true)
	defer noOpenat2.Store(false)
	outside := layout{"f": {}}.build(t)
	dir := layout{"a/b/f": {data: "x"}, "l": {link: outside}}.build(t)
	img := freeze(t, dir, nil)
	same(t, paths(img), []string{"", "a", "a/b", "a/b/f", "l"})
	must(t, openFile(t, img, "a/b/f").Check())
	tr := img.(*image).tree
	for _, path := range []string{"l/f", "../store/a", "a/../a", "a//b", "/a", "a/b/f/g"} {
		if fd, err := tr.open(path, unix.O_RDONLY); !errors.Is(err, errGone) {
			t.Errorf("open %q: %d, %v", path, fd, err)
		}
	}
}

func TestExclude(t *testing.T) {
	l := layout{
		"LOCK": {}, "a.tmp": {}, "keep": {}, "log/1": {}, "log/sub/2": {}, "x/a.tmp": {}, "x/cache/big": {}, "x/keep": {},
	}
	tests := []struct {
		exclude []string
		want    []string
	}{
		{[]string{"*.tmp"}, []string{"", "LOCK", "keep", "log", "log/1", "log/sub", "log/sub/2", "x", "x/cache", "x/cache/big", "x/keep"}},
		{[]string{"log/*", "cache", "LOCK"}, []string{"", "a.tmp", "keep", "log", "x", "x/a.tmp", "x/keep"}},
		{[]string{"x/a.tmp", "log/[0-9]", "x/*/big"}, []string{"", "LOCK", "a.tmp", "keep", "log", "log/sub", "log/sub/2", "x", "x/cache", "x/keep"}},
		{[]string{"*"}, []string{""}},
		{[]string{"store", "/x", "b"}, []string{"", "LOCK", "a.tmp", "keep", "log", "log/1", "log/sub", "log/sub/2", "x", "x/a.tmp", "x/cache", "x/cache/big", "x/keep"}},
	}
	dir := l.build(t)
	for _, tt := range tests {
		t.Run(strings.Join(tt.exclude, " "), func(t *testing.T) {
			same(t, paths(freeze(t, dir, &DirOptions{Exclude: tt.exclude})), tt.want)
		})
	}
	if _, err := Dir(dir, &DirOptions{Exclude: []string{"["}}).Freeze(t.Context()); err == nil {
		t.Error("a malformed glob was accepted")
	}
}

func TestHardLinksAreNamesInsideTheStore(t *testing.T) {
	dir := layout{"b": {data: "x"}, "alone": {data: "x"}, "two": {data: "x"}}.build(t)
	must(t, os.Mkdir(join(dir, "d"), 0o755))
	must(t, os.Link(join(dir, "b"), join(dir, "d/c")))
	must(t, os.Link(join(dir, "b"), join(dir, "a")))
	must(t, os.Link(join(dir, "two"), join(filepath.Dir(dir), "outside")))
	img := freeze(t, dir, nil)
	got := map[string]string{}
	for later, first := range HardLinks(img.Entries()) {
		got[img.Entries()[later].Path] = img.Entries()[first].Path
	}
	same(t, got, map[string]string{"b": "a", "d/c": "a"})
}

func TestChangedComparesTwoWalksS2(t *testing.T) {
	dir := layout{"gone": {}, "kept": {}, "written": {data: "1"}}.build(t)
	src := Dir(dir, nil)
	first, err := src.Freeze(t.Context())
	must(t, err)
	defer first.Release()
	same(t, Changed(first.Entries(), freeze(t, dir, nil).Entries()), []string(nil))
	must(t, os.Remove(join(dir, "gone")))
	must(t, os.WriteFile(join(dir, "made"), nil, 0o600))
	must(t, os.WriteFile(join(dir, "written"), []byte("2"), 0o600))
	same(t, Changed(first.Entries(), freeze(t, dir, nil).Entries()), []string{"", "gone", "made", "written"})
}

func TestNoSuchStore(t *testing.T) {
	_, err := Dir(join(t.TempDir(), "no"), nil).Freeze(t.Context())
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("freeze: %v", err)
	}
	dir := layout{"p": {mode: unix.S_IFIFO | 0o600}}.build(t)
	if _, err := Dir(join(dir, "p"), nil).Freeze(t.Context()); err == nil || !strings.Contains(err.Error(), "FIFO") {
		t.Errorf("freeze of a FIFO: %v", err)
	}
}

// B5.69: what cannot be read fails the walk and is named; it is never left out.
func TestUnreadableFails(t *testing.T) {
	var work string
	if !asPlainUser(t, &work) {
		return
	}
	dir := layout{"open/f": {}, "closed/f": {}, "secret": {data: "x"}}.build(t)
	must(t, os.Chmod(join(dir, "secret"), 0))
	must(t, os.Chmod(join(dir, "closed"), 0o300))
	defer os.Chmod(join(dir, "closed"), 0o700)

	_, err := Dir(dir, nil).Freeze(t.Context())
	denied(t, err, join(dir, "closed"))
	img := freeze(t, dir, &DirOptions{Exclude: []string{"closed"}})
	same(t, paths(img), []string{"", "open", "open/f", "secret"})
	_, err = img.Open("secret")
	denied(t, err, join(dir, "secret"))
}

func denied(t *testing.T, err error, path string) {
	t.Helper()
	if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "run as") {
		t.Errorf("error %q, want permission, %s and an advice", err, path)
	}
}

func TestMountInsideIsNamed(t *testing.T) {
	dir := layout{"m/below": {}, "bind": directory(), "from/x": {}, "f": {}}.build(t)
	mount := func(from, to, kind string, flags uintptr) func() {
		if err := unix.Mount(from, to, kind, flags, ""); err != nil {
			t.Skipf("mount: %v", err)
		}
		return func() { must(t, unix.Unmount(to, unix.MNT_DETACH)) }
	}
	for name, mounted := range map[string]func() func(){
		"m":    func() func() { return mount("none", join(dir, "m"), "tmpfs", 0) },
		"bind": func() func() { return mount(join(dir, "from"), join(dir, "bind"), "", unix.MS_BIND) },
		"f":    func() func() { return mount(join(dir, "from/x"), join(dir, "f"), "", unix.MS_BIND) },
	} {
		t.Run(name, func(t *testing.T) {
			defer mounted()()
			_, err := Dir(dir, nil).Freeze(t.Context())
			if err == nil || !strings.Contains(err.Error(), join(dir, name)+": is a mount point") {
				t.Errorf("freeze: %v", err)
			}
			freeze(t, dir, &DirOptions{Exclude: []string{name}})
		})
	}
	t.Run("after Freeze", func(t *testing.T) {
		img := freeze(t, dir, nil)
		defer mount(join(dir, "from"), join(dir, "m"), "", unix.MS_BIND)()
		if _, err := img.Open("m/below"); err == nil || !strings.Contains(err.Error(), "mount point") {
			t.Errorf("open: %v", err)
		}
	})
}

// S2: a name that vanishes starts the walk again, three times, then it is an error.
func TestVanishedNamesWalkAgain(t *testing.T) {
	calls := 0
	walk := func(failures int, err error) func() error {
		calls = 0
		return func() error {
			if calls++; calls <= failures {
				return err
			}
			return nil
		}
	}
	if err := untilStable(walk(2, errGone)); err != nil || calls != 3 {
		t.Errorf("two failures: %d calls, %v", calls, err)
	}
	err := untilStable(walk(9, fmt.Errorf("/d/x: %w", errGone)))
	if calls != 3 || err == nil || !strings.Contains(err.Error(), "/d/x") || !strings.Contains(err.Error(), "exclude it") {
		t.Errorf("always: %d calls, %v", calls, err)
	}
	if err := untilStable(walk(9, fs.ErrPermission)); calls != 1 || err == nil {
		t.Errorf("another error: %d calls, %v", calls, err)
	}
}

// Samza failure 11 and I5: while names are renamed a walk sees exactly one of the
// two names, or fails; it never misses both.
func TestRenamesDuringWalk(t *testing.T) {
	l := layout{"x": {data: "here"}}
	for i := range 6000 {
		l[fmt.Sprintf("some-longer-name-%05d", i)] = node{}
	}
	dir := l.build(t)
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			for _, names := range [][2]string{{"x", "y"}, {"y", "x"}} {
				os.Rename(join(dir, names[0]), join(dir, names[1]))
			}
			select {
			case <-quit:
				return
			default:
			}
		}
	}()
	defer func() { close(quit); <-ended }()

	for range 25 {
		img, err := Dir(dir, nil).Freeze(t.Context())
		if err != nil {
			if !errors.Is(err, errGone) {
				t.Fatal(err)
			}
			continue
		}
		if n := len(img.Entries()); n != 6002 {
			t.Errorf("%d entries, want 6002", n)
		}
		img.Release()
	}
}

// B1.15: nothing is written into the source: not a name, not a time.
func TestNothingIsWrittenIntoTheSource(t *testing.T) {
	dir := layout{"d/f": {data: "x"}, "g": {data: "y"}}.build(t)
	accessed := func() unix.StatxTimestamp {
		var st unix.Statx_t
		must(t, unix.Statx(unix.AT_FDCWD, join(dir, "g"), 0, unix.STATX_ATIME, &st))
		return st.Atime
	}
	must(t, os.Chtimes(join(dir, "g"), time.Unix(1, 0), time.Time{}))
	read := accessed()
	before := freeze(t, dir, nil)
	img := freeze(t, dir, nil)
	cache, err := OpenCache(t.TempDir(), img)
	must(t, err)
	must(t, cache.Begin())
	for _, path := range []string{"d/f", "g"} {
		f := openFile(t, img, path)
		content(t, f)
		cache.Record(path, f.Identity(), [32]byte{1})
	}
	must(t, cache.Save())
	same(t, accessed(), read)
	same(t, Changed(before.Entries(), freeze(t, dir, nil).Entries()), []string(nil))
}

func TestXattrs(t *testing.T) {
	dir := layout{"f": {data: "x"}, "d": directory(), "l": {link: "f"}, "none": {}}.build(t)
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x04\x00\x39\x30\x00\x00\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x04\x00\xff\xff\xff\xff\x20\x00\x00\x00\xff\xff\xff\xff"
	capability := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	set := func(path, name, value string) {
		if err := unix.Lsetxattr(join(dir, path), name, []byte(value), 0); err != nil {
			t.Fatalf("%s %s: %v", path, name, err)
		}
	}
	set("f", "user.z", "last")
	set("f", "user.a", "\x00binary\xff")
	set("f", "user.empty", "")
	set("f", "security.capability", capability)
	set("f", "system.posix_acl_access", acl)
	set("f", "security.other", "left out")
	set("d", "user.dir", strings.Repeat("v", 3000))
	set("l", "trusted.link", "on the link itself")

	img := freeze(t, dir, nil)
	tests := map[string][]Xattr{
		"f": {
			{"security.capability", []byte(capability)}, {"system.posix_acl_access", []byte(acl)},
			{"user.a", []byte("\x00binary\xff")}, {"user.empty", nil}, {"user.z", []byte("last")},
		},
		"d":    {{"user.dir", []byte(strings.Repeat("v", 3000))}},
		"l":    {{"trusted.link", []byte("on the link itself")}},
		"none": nil,
		"":     nil,
	}
	for path, want := range tests {
		got, err := img.Xattrs(path)
		must(t, err)
		same(t, got, want)
	}
	if _, err := img.Xattrs("absent"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of an absent entry: %v", err)
	}
}
