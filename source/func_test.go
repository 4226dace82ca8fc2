//go:build linux

package source_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/sourcetest"
)

// A logStore keeps its history as lines of a file, and copies itself under its lock.
type logStore struct {
	dir string

	mu sync.Mutex
	f  *os.File
}

func newLogStore(t *testing.T, dir string) *logStore {
	t.Helper()
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "history"))
	if err != nil {
		t.Fatal(err)
	}
	return &logStore{dir: dir, f: f}
}

func (s *logStore) Source() source.Source {
	return source.Func(s.copyTo, &source.FuncOptions{Live: s.dir})
}

func (s *logStore) Write(n uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := fmt.Fprintln(s.f, n)
	return err
}

func (s *logStore) Close() error { return s.f.Close() }

func (s *logStore) copyTo(_ context.Context, dir string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, err := os.ReadFile(s.f.Name())
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "history"), data, 0o600)
}

func readHistory(t *testing.T, dir string) (numbers []uint64) {
	f, err := os.Open(filepath.Join(dir, "history"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		n, err := strconv.ParseUint(lines.Text(), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		numbers = append(numbers, n)
	}
	return numbers
}

func TestFunc(t *testing.T) {
	sourcetest.Run(t, sourcetest.Harness{
		New:  func(t *testing.T, dir string) sourcetest.Store { return newLogStore(t, dir) },
		Read: readHistory,
	})
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, d := range found {
		names = append(names, d.Name())
	}
	return names
}

func fill(files ...string) func(context.Context, string) error {
	return func(_ context.Context, dir string) error {
		for _, f := range files {
			if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(f)), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, f), []byte(f), 0o600); err != nil {
				return err
			}
		}
		return nil
	}
}

func TestFuncDeclaresItsFiles(t *testing.T) {
	parent := t.TempDir()
	live := filepath.Join(parent, "live")
	if err := os.Mkdir(live, 0o751); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(live, "1.sst"), []byte("table"), 0o600); err != nil {
		t.Fatal(err)
	}
	img := sourcetest.Freeze(t, source.Func(func(_ context.Context, dir string) error {
		if err := os.Link(filepath.Join(live, "1.sst"), filepath.Join(dir, "1.sst")); err != nil {
			return err
		}
		return fill("2.sst", "wal/log")(nil, dir)
	}, &source.FuncOptions{
		Live:      live,
		Immutable: func(path string) bool { return strings.HasSuffix(path, ".sst") },
		ChunkSize: func(path string) uint32 { return uint32(len(path)) << 10 },
	}))

	type declared struct {
		Path             string
		Immutable, Fresh bool
		ChunkSize        uint32
	}
	var got []declared
	for _, e := range img.Entries() {
		got = append(got, declared{e.Path, e.Immutable, e.Fresh, e.ChunkSize})
		if e.Immutable != e.Identity.CTime.IsZero() {
			t.Errorf("%s: ctime %v", e.Path, e.Identity.CTime)
		}
	}
	want := []declared{
		{"", false, true, 0}, {"1.sst", true, false, 5 << 10}, {"2.sst", true, true, 5 << 10},
		{"wal", false, true, 0}, {"wal/log", false, true, 7 << 10},
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("-got +want:\n%s", diff)
	}
	if root := img.Entries()[0]; root.Mode != 0o751 {
		t.Errorf("root has mode %o, want that of the live store", root.Mode)
	}
	if img.CacheKey() != live {
		t.Errorf("cache key %q", img.CacheKey())
	}
}

// A make that fails leaves nothing, and its error comes through.
func TestFuncThatFails(t *testing.T) {
	scratch, broken := t.TempDir(), errors.New("disk on fire")
	_, err := source.Func(func(ctx context.Context, dir string) error {
		fill("half")(ctx, dir)
		return broken
	}, &source.FuncOptions{Scratch: scratch}).Freeze(t.Context())
	if !errors.Is(err, broken) {
		t.Errorf("freeze: %v", err)
	}
	if got := list(t, scratch); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
	_, err = source.Func(fill("f"), &source.FuncOptions{Scratch: filepath.Join(scratch, "absent")}).Freeze(t.Context())
	if err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("freeze into an absent scratch directory: %v", err)
	}
}

// A make may replace the directory, as stores do that insist on creating it, and
// make parts of it read only.
func TestFuncMayReplaceAndProtect(t *testing.T) {
	scratch := t.TempDir()
	src := source.Func(func(ctx context.Context, dir string) error {
		if err := os.Remove(dir); err != nil {
			return err
		}
		if err := fill("ro/f")(ctx, dir); err != nil {
			return err
		}
		return os.Chmod(filepath.Join(dir, "ro"), 0o555)
	}, &source.FuncOptions{Scratch: scratch})
	img := sourcetest.Freeze(t, src)
	sourcetest.Copy(t, img)
	if err := img.Release(); err != nil {
		t.Fatal(err)
	}
	if got := list(t, scratch); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
}

// What a crash leaves is swept by the next Freeze of that store; what is in use, or
// of another name, is not.
func TestFuncSweepsAfterCrash(t *testing.T) {
	parent := t.TempDir()
	live := filepath.Join(parent, "kv")
	if err := os.Mkdir(live, 0o755); err != nil {
		t.Fatal(err)
	}
	if os.Getenv("CRASH_IN") != "" {
		crash(t)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestFuncSweepsAfterCrash$")
	cmd.Env = append(os.Environ(), "CRASH_IN="+live, "TMPDIR="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err == nil || len(list(t, parent)) != 2 {
		t.Fatalf("the child did not crash with an image: %v, %s, %v", err, out, list(t, parent))
	}

	inUse := sourcetest.Freeze(t, source.Func(fill("f"), &source.FuncOptions{Live: live}))
	others := []string{".snapferry-image-kv-2-0123456789abcdef", ".snapferry-image-kv-xyz", "unrelated"}
	for _, name := range others {
		if err := os.Mkdir(filepath.Join(parent, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	second := sourcetest.Freeze(t, source.Func(fill("f"), &source.FuncOptions{Live: live}))
	if got := len(list(t, parent)); got != 1+len(others)+2 {
		t.Errorf("beside the store: %v", list(t, parent))
	}
	sourcetest.Copy(t, inUse)
	sourcetest.Copy(t, second)
}

// crash freezes and dies without releasing.
func crash(t *testing.T) {
	src := source.Func(fill("a", "b"), &source.FuncOptions{Live: os.Getenv("CRASH_IN")})
	if _, err := src.Freeze(t.Context()); err != nil {
		io.WriteString(os.Stderr, err.Error())
	}
	unix.Kill(os.Getpid(), unix.SIGKILL)
}
