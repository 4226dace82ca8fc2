//go:build linux

package source

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A mapping of a file, through which a test writes without a system call.
func mapFile(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	st, err := f.Stat()
	must(t, err)
	m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	t.Cleanup(func() { unix.Munmap(m) })
	return m
}

// S3, F22: a store through a mapping into a page that is dirty already moves no
// time. After Open has written the file back it does, so Check sees it, and a file
// that was recorded is not known any more. This is the test that a file system must
// pass to be in safeFileSystems.
func testMappedStore(t *testing.T, base string) {
	for name, spent := range map[string]time.Duration{"file by file": 0, "all at once": 2 * flushBudget} {
		t.Run(name, func(t *testing.T) { testMappedStoreFlushed(t, filepath.Join(base, name), spent) })
	}
}

// testMappedStoreFlushed pretends that flushes took some time already.
func testMappedStoreFlushed(t *testing.T, dir string, spent time.Duration) {
	must(t, os.Mkdir(dir, 0o755))
	path := join(dir, "f")
	const pages = 16
	must(t, os.WriteFile(path, make([]byte, pages*4096), 0o600))
	cacheDir := t.TempDir()
	m := mapFile(t, path)

	for i := range pages {
		m[i*4096] = 1 // the page is dirty now
		img := freeze(t, dir, nil)
		c := begin(t, cacheDir, img)
		settle(t, c)
		flushes := &img.(*image).flusher
		flushes.spent.Store(int64(spent))
		f := openFile(t, img, "f")
		if flushes.covered.Load() != nil != (spent > 0) {
			t.Fatalf("flushed all at once: %v", spent == 0)
		}
		if i%2 == 0 {
			m[i*4096+1] = 2 // while the file is read
			if err := f.Check(); !errors.Is(err, ErrChanged) {
				t.Fatalf("page %d: store while the file is read: %v", i, err)
			}
			continue
		}
		must(t, f.Check())
		c.Record("f", f.Identity(), sumOf("f"))
		must(t, c.Save())
		same(t, known(t, cacheDir, dir), []string{"f"})
		m[i*4096+1] = 2 // after the backup
		same(t, known(t, cacheDir, dir), []string{})
	}
}

// A page dirtied after all was flushed at once needs a flush of its own file, if the
// file is to be recorded under a later probe (S3).
func TestMappedStoreAfterFlushOfAllS3(t *testing.T) {
	dir := layout{"f": {data: string(make([]byte, 4096))}, "g": {}}.build(t)
	m, cacheDir := mapFile(t, join(dir, "f")), t.TempDir()
	img := freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	settle(t, c)
	img.(*image).flusher.spent.Store(int64(2 * flushBudget))
	openFile(t, img, "g")
	m[0] = 1
	settle(t, c)
	f := openFile(t, img, "f")
	m[1] = 2
	if err := f.Check(); !errors.Is(err, ErrChanged) {
		t.Errorf("check: %v", err)
	}
}

// S3: the store lies between Freeze and Open, into a page that was dirty at Freeze.
// No time moves, so the identity cannot show it; the probe must not let it through
// as something else than what was read.
func TestMappedStoreBeforeOpenIsReadS3(t *testing.T) {
	dir := layout{"f": {data: string(make([]byte, 4096))}}.build(t)
	m := mapFile(t, join(dir, "f"))
	m[0] = 'a'
	img := freeze(t, dir, nil)
	m[1] = 'b'
	f := openFile(t, img, "f")
	same(t, content(t, f)[:2], "ab")
	must(t, f.Check())
}

func TestMappedStoreS3(t *testing.T) {
	t.Run("here", func(t *testing.T) {
		base := realTemp(t)
		if _, ok := volumeOf(base); !ok {
			t.Skip("the temporary directory lies on a file system that is not on the list")
		}
		testMappedStore(t, base)
	})
	for _, fs := range []struct{ name, mkfs, options string }{
		{"ext4", "mkfs.ext4 -q -F", ""},
		{"ext4", "mkfs.ext4 -q -F", "data=journal"},
		{"ext4", "mkfs.ext4 -q -F -O ^has_journal", ""},
		{"xfs", "mkfs.xfs -q -f", ""},
		{"btrfs", "mkfs.btrfs -q -f", ""},
		{"btrfs", "mkfs.btrfs -q -f", "compress-force=zstd"},
		{"btrfs", "mkfs.btrfs -q -f", "nodatacow"},
	} {
		t.Run(fs.name+" "+fs.options, func(t *testing.T) {
			base := loopMount(t, fs.name, fs.mkfs, fs.options)
			if v, ok := volumeOf(base); !ok || v.kind != fs.name {
				t.Fatalf("%+v is not on the list", v)
			}
			testMappedStore(t, base)
		})
	}
}

// loopMount mounts a new file system, or skips the test where that cannot be done.
func loopMount(t *testing.T, kind, mkfs, options string) string {
	t.Helper()
	base := realTemp(t)
	img, at := filepath.Join(base, "img"), filepath.Join(base, "mnt")
	must(t, os.WriteFile(img, nil, 0o600))
	must(t, os.Truncate(img, 400<<20))
	must(t, os.Mkdir(at, 0o755))
	if out, err := exec.Command("sh", "-c", mkfs+" "+img).CombinedOutput(); err != nil {
		t.Skipf("%s: %v %s", mkfs, err, out)
	}
	args := []string{"-t", kind, "-o", "loop", img, at}
	if options != "" {
		args[3] += "," + options
	}
	if out, err := exec.Command("mount", args...).CombinedOutput(); err != nil {
		t.Skipf("mount %s: %v %s", kind, err, out)
	}
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	return at
}

// On tmpfs a write back protects nothing (F22), which is why it is not on the list.
// If this fails, the kernel has changed and the list may grow.
func TestTmpfsIsNotSafeS3(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "source-test-")
	must(t, err)
	defer os.RemoveAll(dir)
	must(t, os.WriteFile(join(dir, "f"), make([]byte, 4096), 0o600))
	m := mapFile(t, join(dir, "f"))
	m[0] = 1
	f := openFile(t, freeze(t, dir, nil), "f")
	m[1] = 2
	if err := f.Check(); err != nil {
		t.Errorf("check: %v", err)
	}
}

// S4 on a file system with whole seconds: its young files are not waited for, and
// not recorded.
func TestCoarseTimesS4(t *testing.T) {
	dir := join(loopMount(t, "ext4", "mkfs.ext4 -q -F -I 128", ""), "store")
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.WriteFile(join(dir, "f"), []byte("x"), 0o600))
	cacheDir := t.TempDir()
	img := freeze(t, dir, nil)
	c := begin(t, cacheDir, img)
	if c.guard < 2*time.Second {
		t.Errorf("guard %v", c.guard)
	}
	if !c.Settled(findEntry(img.Entries(), "f")) {
		t.Error("waits for seconds")
	}
	settle(t, c)
	readAndRecord(t, c, "f")
	must(t, c.Save())
	same(t, known(t, cacheDir, dir), []string{})
}
