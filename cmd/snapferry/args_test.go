package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry"
)

func isUsage(err error) bool {
	_, ok := errors.AsType[*usageError](err)
	return ok
}

func TestParseRule(t *testing.T) {
	tests := []struct {
		arg  string
		want rule
		bad  bool
	}{
		{arg: "/data/kv", want: rule{path: "/data/kv", kind: "auto"}},
		{arg: "kv=/data", want: rule{name: "kv", path: "/data", kind: "auto"}},
		{arg: "kv=/a=b", want: rule{name: "kv", path: "/a=b", kind: "auto"}},
		{arg: "./a=b", want: rule{path: "./a=b", kind: "auto"}},
		{arg: "/a=b", want: rule{path: "/a=b", kind: "auto"}},
		{arg: ".a=b", want: rule{path: ".a=b", kind: "auto"}},
		{arg: "a b=c", want: rule{path: "a b=c", kind: "auto"}},
		{arg: "=x", want: rule{path: "=x", kind: "auto"}},
		{arg: strings.Repeat("n", 129) + "=x", want: rule{path: strings.Repeat("n", 129) + "=x", kind: "auto"}},
		{arg: "kv=/data,kind=dir", want: rule{name: "kv", path: "/data", kind: "dir"}},
		{arg: "/a,b,kind=auto", want: rule{path: "/a,b", kind: "auto"}},
		{arg: "/a,kind=dir,b", want: rule{path: "/a,kind=dir,b", kind: "auto"}},
		{arg: "/a,kind=dir,kind=dir", want: rule{path: "/a,kind=dir", kind: "dir"}},
		{arg: "kind=dir", want: rule{name: "kind", path: "dir", kind: "auto"}},
		{arg: "kv=/data,kind=", bad: true},
		{arg: "kv=/data,kind=sqlite", want: rule{name: "kv", path: "/data", kind: "sqlite"}},
		{arg: "kv=/data,kind=mysql", bad: true},
		{arg: "kv=/data,kind=DIR", bad: true},
		{arg: "kv=", bad: true},
		{arg: "", bad: true},
		{arg: ",kind=dir", bad: true},
	}
	for _, tt := range tests {
		got, err := parseRule(tt.arg)
		if tt.bad {
			if !isUsage(err) {
				t.Errorf("parseRule(%q) gives %+v, %v, want a usage error", tt.arg, got, err)
			}
			continue
		}
		if diff := cmp.Diff(got, tt.want, cmp.AllowUnexported(rule{})); err != nil || diff != "" {
			t.Errorf("parseRule(%q): %v\n%s", tt.arg, err, diff)
		}
	}
}

func TestResolveRule(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(dir+"/kv", 0o700), os.Symlink("kv", dir+"/link"), os.Mkdir(dir+"/bad name", 0o700)); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir + "/kv")
	for arg, want := range map[string]rule{
		dir + "/kv/":    {name: "kv", path: dir + "/kv", kind: kindDir},
		".":             {name: "kv", path: dir + "/kv", kind: kindDir},
		dir + "/link":   {name: "link", path: dir + "/kv", kind: kindDir},
		"n=../bad name": {name: "n", path: dir + "/bad name", kind: kindDir},
	} {
		rules, err := parseRules([]string{arg})
		if diff := cmp.Diff(rules, map[string]rule{want.name: want}, cmp.AllowUnexported(rule{})); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", arg, err, diff)
		}
	}
	for _, args := range [][]string{{}, {"../bad name"}, {"/"}, {"../kv", "."}, {"a=.", "a=../link"}} {
		if rules, err := parseRules(args); !isUsage(err) {
			t.Errorf("%q: %v, %v, want a usage error", args, rules, err)
		}
	}
	if _, err := parseRules([]string{"nosuch"}); err == nil || isUsage(err) {
		t.Errorf("absent path: %v, want a failure that is no usage error", err)
	}
}

func TestRealPath(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(dir+"/real", 0o700), os.Symlink("real", dir+"/link")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		dir + "/link/": dir + "/real", dir + "/link/not/yet": dir + "/real/not/yet", dir + "/x/../link": dir + "/real", "/": "/",
	} {
		if got := realPath(path); got != want {
			t.Errorf("realPath(%s) is %s, want %s", path, got, want)
		}
	}
	for _, tt := range []struct {
		dir, path string
		want      bool
	}{{"/a", "/a", true}, {"/a", "/a/b", true}, {"/a", "/ab", false}, {"/a/b", "/a", false}, {"/", "/a", true}, {"/a", "/a/..b", true}} {
		if got := inside(tt.dir, tt.path); got != tt.want {
			t.Errorf("inside(%s, %s) is %t", tt.dir, tt.path, got)
		}
	}
}

func TestParseOffsets(t *testing.T) {
	got, err := parseOffsets([]string{"a=1", "b=x=y", "c="})
	if diff := cmp.Diff(got, map[string]string{"a": "1", "b": "x=y", "c": ""}); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for _, args := range [][]string{{"a"}, {"=1"}, {"a=1", "a=1"}} {
		if _, err := parseOffsets(args); !isUsage(err) {
			t.Errorf("%q: %v, want a usage error", args, err)
		}
	}
}

func TestCleanGlobs(t *testing.T) {
	got, err := cleanGlobs("--include", []string{"conf/", "/conf", "./conf", "a//b/*", "*.sst", ".//x/./y", "[^.]?", "..a"})
	if diff := cmp.Diff(got, []string{"conf", "conf", "conf", "a/b/*", "*.sst", "x/y", "[^.]?", "..a"}); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for _, g := range []string{"", "[", "/", ".", "./", "..", "../x", "a/..", "/../a"} {
		if got, err := cleanGlobs("--include", []string{g}); !isUsage(err) {
			t.Errorf("%q gives %q, %v, want a usage error", g, got, err)
		}
	}
}

func TestByteRate(t *testing.T) {
	for s, want := range map[string]byteRate{
		"1000": 1000, "500K": 500 << 10, "500KB": 500_000, "20MiB/s": 20 << 20, "20M": 20 << 20, "1.5GB/s": 1_500_000_000,
		"1g": 1 << 30, " 7 kib/s ": 7 << 10, "0": 0, "12B/s": 12, "1T": 1 << 40, "1TiB": 1 << 40, "2TB/s": 2e12,
	} {
		var r byteRate
		if err := r.Set(s); err != nil || r != want {
			t.Errorf("%q gives %d, %v, want %d", s, r, err, want)
		}
	}
	for _, s := range []string{"", "fast", "-1", "1P", "1e30", "1 2", "NaN", "Inf", "0.1", "K", "9e18G"} {
		var r byteRate
		if err := r.Set(s); err == nil {
			t.Errorf("%q gives %d, want an error", s, r)
		}
	}
}

func TestAge(t *testing.T) {
	for s, want := range map[string]time.Duration{"0s": 0, "90m": 90 * time.Minute, "7d": 7 * 24 * time.Hour, "24h": 24 * time.Hour, "1w": 7 * 24 * time.Hour} {
		var a age
		if err := a.Set(s); err != nil || a != age(want) {
			t.Errorf("%q gives %v, %v, want %v", s, a, err, want)
		}
	}
	for _, s := range []string{"", "-1s", "never", "1.5d", "-1d", "d", "w", "99999d", "65535w", "5"} {
		var a age
		if err := a.Set(s); err == nil {
			t.Errorf("%q gives %v, want an error", s, a)
		}
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1<<20 - 1: "1.0 MiB", 5 << 30: "5.0 GiB", math.MaxInt64: "8192.0 PiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) is %s, want %s", n, got, want)
		}
	}
}

func TestQuote(t *testing.T) {
	for s, want := range map[string]string{
		"plain.sst": "plain.sst", "naïve ✓ 日本": "naïve ✓ 日本", "two words": "two words", "-rf": "-rf",
		"": `""`, " lead": `" lead"`, "trail ": `"trail "`, "new\nline": `"new\nline"`, "a\tb": `"a\tb"`,
		`quo"te`: `"quo\"te"`, `back\slash`: `"back\\slash"`, "\xff\xfe no": `"\377\376 no"`, "bell\a": `"bell\007"`,
		"a -> b": `"a -> b"`, "\u202egpj": `"\342\200\256gpj"`,
	} {
		if got := quote(s); got != want {
			t.Errorf("quote(%q) is %s, want %s", s, got, want)
		}
	}
}

// Nothing is lost in JSON, and different bytes stay different.
func TestPairsKeepEveryByte(t *testing.T) {
	got := newPairs(map[string]string{"a": "1", "b": "\xff", "\xfe": "2", "\xfd": "2"})
	want := pairs{
		Offsets: map[string]string{"a": "1"},
		Base64:  map[string]string{"Yg==": "/w==", "/g==": "Mg==", "/Q==": "Mg=="},
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Error(diff)
	}
}

func TestExitCodes(t *testing.T) {
	deep := func(err error) error {
		return &snapferry.Error{Op: "commit", Subject: "a/b", Err: fmt.Errorf("slot 7: %w", err)}
	}
	for _, tt := range []struct {
		err  error
		want int
	}{
		{errors.New("x"), 1},
		{deep(fs.ErrPermission), 1},
		{deep(fs.ErrNotExist), 1}, // a source file, for instance
		{deep(snapferry.ErrChanged), 1},
		{deep(snapferry.ErrUnsupported), 1},
		{usagef("x: %w", snapferry.ErrCorrupt), 2},
		{deep(snapferry.ErrNotFound), 3},
		{errNoRepository, 3},
		{deep(snapferry.ErrFenced), 4},
		{deep(snapferry.ErrConflict), 4},
		{deep(snapferry.ErrRunning), 4},
		{deep(snapferry.ErrForeign), 4},
		{deep(snapferry.ErrBusy), 4},
		{deep(snapferry.ErrBaseGone), 4},
		{deep(snapferry.ErrCorrupt), 5},
		{&reported{5, "x"}, 5},
		{deep(snapferry.ErrUnknown), 6},
		{&snapferry.Error{Op: "open", Err: snapferry.ErrUnknown}, 1}, // only a claim
		// What must not be taken for harmless wins.
		{errors.Join(snapferry.ErrNotFound, deep(snapferry.ErrCorrupt)), 5},
		{errors.Join(snapferry.ErrFenced, snapferry.ErrUnknown), 6},
		{errors.Join(snapferry.ErrCorrupt, fs.ErrNotExist), 5},
	} {
		if got, _ := classify(tt.err); got != tt.want {
			t.Errorf("%v: exit code %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	if wasInterrupted(ctx, context.Canceled) {
		t.Error("a context that lives was not interrupted")
	}
	cancel(errInterrupted)
	for _, err := range []error{fmt.Errorf("read: %w", context.Canceled), fmt.Errorf("read: %w", errInterrupted)} {
		if !wasInterrupted(ctx, err) {
			t.Errorf("%v: not taken for an interruption", err)
		}
	}
	if wasInterrupted(ctx, fs.ErrPermission) {
		t.Error("another failure taken for an interruption")
	}
}

func TestWantsJSON(t *testing.T) {
	for args, want := range map[string]bool{"ls --json": true, "ls --json=true": true, "ls": false, "backup -- --json": false, "ls --jsonx": false} {
		if got := wantsJSON(strings.Fields(args)); got != want {
			t.Errorf("%s: %t", args, got)
		}
	}
}
