//go:build linux

package source

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// keepTimes calls change and puts the mtime of the file back, as a program that
// hides a write would (Samza failure 1, I5).
func keepTimes(t *testing.T, path string, change func()) {
	t.Helper()
	st, err := os.Stat(path)
	must(t, err)
	change()
	must(t, os.Chtimes(path, time.Time{}, st.ModTime()))
}

func writeAt(t *testing.T, path, data string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte(data), 0)
	must(t, err)
}

// How a file can change behind a backup. want says how its name opens afterwards.
var changes = []struct {
	name   string
	change func(t *testing.T, path string)
	gone   bool // Open itself is ErrChanged
}{
	{"grown", func(t *testing.T, p string) { must(t, os.Truncate(p, 9)) }, false},
	{"shrunk", func(t *testing.T, p string) { must(t, os.Truncate(p, 1)) }, false},
	{"same size, mtime put back", func(t *testing.T, p string) { keepTimes(t, p, func() { writeAt(t, p, "B") }) }, false},
	{"mode only", func(t *testing.T, p string) { must(t, os.Chmod(p, 0o600)) }, false},
	{"replaced, same size and mtime", func(t *testing.T, p string) {
		keepTimes(t, p, func() {
			must(t, os.WriteFile(p+".new", []byte("XXXX"), 0o644))
			must(t, os.Rename(p+".new", p))
		})
	}, false},
	{"removed", func(t *testing.T, p string) { must(t, os.Remove(p)) }, true},
	{"now a FIFO", func(t *testing.T, p string) {
		must(t, os.Remove(p))
		must(t, unix.Mkfifo(p, 0o600))
	}, true},
	{"now a link", func(t *testing.T, p string) {
		must(t, os.Rename(p, p+".old"))
		must(t, os.Symlink(filepath.Base(p)+".old", p))
	}, true},
	{"now a directory", func(t *testing.T, p string) {
		must(t, os.Remove(p))
		must(t, os.Mkdir(p, 0o755))
	}, true},
}

// S2: what happens between Freeze and Open shows in the identity (Samza 1, 4, 11).
func TestChangedBeforeOpenS2(t *testing.T) {
	for _, tt := range changes {
		t.Run(tt.name, func(t *testing.T) {
			dir := layout{"f": {data: "AAAA"}}.build(t)
			img := freeze(t, dir, nil)
			tt.change(t, join(dir, "f"))
			f, err := img.Open("f")
			if tt.gone {
				if !errors.Is(err, ErrChanged) {
					t.Errorf("open: %v", err)
				}
				return
			}
			must(t, err)
			defer f.Close()
			if f.Identity() == findEntry(img.Entries(), "f").Identity {
				t.Error("the identity is still that of Freeze")
			}
		})
	}
}

// S2, S3: what happens while the file is read shows in Check (Samza 4, 5).
func TestChangedWhileReadS2(t *testing.T) {
	for _, tt := range changes {
		t.Run(tt.name, func(t *testing.T) {
			dir := layout{"f": {data: "AAAA"}}.build(t)
			f := openFile(t, freeze(t, dir, nil), "f")
			must(t, f.Check())
			tt.change(t, join(dir, "f"))
			if err := f.Check(); !errors.Is(err, ErrChanged) {
				t.Errorf("check: %v", err)
			}
		})
	}
}

// A directory put in place of another moves no time of the files in either.
func TestDirectoryReplacedWhileReadS2(t *testing.T) {
	dir := layout{"d/f": {data: "AAAA"}, "e/f": {data: "BBBB"}}.build(t)
	f := openFile(t, freeze(t, dir, nil), "d/f")
	must(t, os.Rename(join(dir, "d"), join(dir, "old")))
	must(t, os.Rename(join(dir, "e"), join(dir, "d")))
	if err := f.Check(); !errors.Is(err, ErrChanged) {
		t.Errorf("check: %v", err)
	}
}

func TestReleaseIsIdempotentAndClosesS2(t *testing.T) {
	dir := layout{"f": {data: "x"}}.build(t)
	img := freeze(t, dir, nil)
	f := openFile(t, img, "f")
	must(t, img.Release())
	must(t, img.Release())
	if _, err := img.Open("f"); !errors.Is(err, ErrClosed) {
		t.Errorf("open: %v", err)
	}
	if _, err := img.Xattrs("f"); !errors.Is(err, ErrClosed) {
		t.Errorf("xattrs: %v", err)
	}
	same(t, content(t, f), "x")
}

func TestReadAt(t *testing.T) {
	dir := layout{"f": {data: "0123456789"}}.build(t)
	f := openFile(t, freeze(t, dir, nil), "f")
	tests := []struct {
		off  int64
		n    int
		want string
		err  error
	}{
		{0, 10, "0123456789", nil}, {3, 4, "3456", nil}, {8, 4, "89", io.EOF}, {10, 1, "", io.EOF}, {99, 1, "", io.EOF},
	}
	for _, tt := range tests {
		buf := make([]byte, tt.n)
		n, err := f.ReadAt(buf, tt.off)
		if string(buf[:n]) != tt.want || err != tt.err {
			t.Errorf("ReadAt(%d, %d) = %q, %v", tt.n, tt.off, buf[:n], err)
		}
	}
}

// S5: holes of 64 KiB or more, aligned to 4 KiB, are left out; smaller ones are data.
func TestRunsS5(t *testing.T) {
	const k = 1 << 10
	tests := []struct {
		name string
		size int64
		data []Run
		want []Run
	}{
		{"empty", 0, nil, nil},
		{"small", 5, []Run{{0, 5}}, []Run{{0, 5}}},
		{"dense", 300 * k, []Run{{0, 300 * k}}, []Run{{0, 300 * k}}},
		{"all hole", 1 << 20, nil, nil},
		{"small all hole", 60 * k, nil, []Run{{0, 60 * k}}},
		{"least hole", 64*k + 4*k + 1, []Run{{64 * k, 4*k + 1}}, []Run{{64 * k, 4*k + 1}}},
		{"hole too small", 64*k + 60*k, []Run{{0, 4 * k}, {64 * k, 60 * k}}, []Run{{0, 124 * k}}},
		{"hole in the middle", 200 * k, []Run{{0, 4 * k}, {68 * k, 132 * k}}, []Run{{0, 4 * k}, {68 * k, 132 * k}}},
		{"unaligned data", 500 * k, []Run{{0, 10}, {200*k + 7, 10}}, []Run{{0, 4 * k}, {200 * k, 4 * k}}},
		{"hole at the end, odd size", 200*k + 3, []Run{{0, 1}}, []Run{{0, 4 * k}}},
		{"small hole at the end", 40*k + 3, []Run{{0, 1}}, []Run{{0, 40*k + 3}}},
		{"two holes", 1 << 20, []Run{{100 * k, 4 * k}, {300 * k, 4 * k}, {340 * k, 4 * k}}, []Run{{100 * k, 4 * k}, {300 * k, 44 * k}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := layout{"f": {}}.build(t)
			w, err := os.OpenFile(join(dir, "f"), os.O_WRONLY, 0)
			must(t, err)
			must(t, w.Truncate(tt.size))
			for _, r := range tt.data {
				_, err := w.WriteAt(make([]byte, r.Length), r.Offset)
				must(t, err)
			}
			must(t, w.Close())
			got, err := openFile(t, freeze(t, dir, nil), "f").Runs()
			must(t, err)
			same(t, got, tt.want)
		})
	}
}

// The same rule on extents as another file system could report them, with a block
// size below 4 KiB: no byte of data is ever in a hole.
func TestRunsOfOddExtentsS5(t *testing.T) {
	const k = 1 << 10
	tests := []struct {
		extents [][2]int64
		size    int64
		want    []Run
	}{
		{[][2]int64{{0, 1 * k}, {66 * k, 67 * k}}, 67 * k, []Run{{0, 67 * k}}},
		{[][2]int64{{0, 1 * k}, {71 * k, 72 * k}}, 72 * k, []Run{{0, 4 * k}, {68 * k, 4 * k}}},
		{[][2]int64{{65 * k, 66 * k}}, 66 * k, []Run{{64 * k, 2 * k}}},
		{[][2]int64{{0, 3 * k}, {3 * k, 5 * k}}, 72 * k, []Run{{0, 8 * k}}},
		{[][2]int64{{0, 5 * k}}, 71 * k, []Run{{0, 71 * k}}},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.extents), func(t *testing.T) {
			var r runs
			for _, e := range tt.extents {
				r.add(e[0], e[1])
			}
			same(t, r.finish(tt.size), tt.want)
		})
	}
}
