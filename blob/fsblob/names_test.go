package fsblob

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
)

// The mapping is a format: these never change (docs/format.md).
func TestPath(t *testing.T) {
	long := strings.Repeat("x", 240)
	tests := []struct{ key, path string }{
		{"snapferry.json", "snapferry.json"},
		{"t/My-job_1.2/task/log/00000000000000ff", "t/My-job_1.2/task/log/00000000000000ff"},
		{".a/b.", "%2Ea/b."},
		{"...", "%2E.."},
		{"100% a/\n", "100%25%20a/%0A"},
		{"é~+", "%C3%A9%7E%2B"},
		{long, long},
		{long + "y", long + "%+/y"},
		{long + ".", long + "%+/%2E"},
		{"a" + long[1:] + long + "z/k", "a" + long[1:] + "%+/" + long + "%+/z/k"},
		{strings.Repeat("x", 239) + "é", strings.Repeat("x", 239) + "%+/%C3%A9"},
		{strings.Repeat("x", 238) + "%a", strings.Repeat("x", 238) + "%+/%25a"},
		{strings.Repeat("x", 237) + "%a", strings.Repeat("x", 237) + "%25%+/a"},
	}
	d := &Driver{root: "/r"}
	for _, tt := range tests {
		if got := d.path(tt.key); got != "/r/"+tt.path {
			t.Errorf("path(%q)\n got %q\nwant %q", tt.key, got, "/r/"+tt.path)
		}
	}
}

// What names would not write is not taken for an object.
func TestForeignNames(t *testing.T) {
	long := strings.Repeat("x", 241)
	for _, list := range [][]string{
		{".hidden"}, {".tmp"}, {"lost+found"}, {"%"}, {"%4"}, {"%41"}, {"%2e"}, {"a%2Fb"}, {"%2E"}, {"%2E."}, {"a b"},
		{"%00"}, {"%FF"}, {long}, {"x%+", "y"}, {long[:240] + "%+", ".y"}, {"a~"},
	} {
		if c, ok := component(list); ok {
			t.Errorf("%q is taken for %q", list, c)
		}
	}
}

func FuzzNames(f *testing.F) {
	for _, k := range []string{"a", "a/.b", "%", strings.Repeat("é", 200), strings.Repeat(".", 500)} {
		f.Add(k)
	}
	f.Fuzz(func(t *testing.T, key string) {
		if blob.ValidKey(key) != nil {
			return
		}
		for c := range strings.SplitSeq(key, "/") {
			list := names(c)
			got, ok := component(list)
			if !ok || got != c {
				t.Fatalf("component(names(%q)) = %q, %v", c, got, ok)
			}
			if len(list) > maxNames {
				t.Fatalf("%d names", len(list))
			}
			for _, name := range list {
				if len(name) > 255 || name[0] == '.' || name != filepath.Base(name) {
					t.Fatalf("name %q", name)
				}
			}
		}
	})
}

// FuzzForeign: any file name is one component's or nobody's.
func FuzzForeign(f *testing.F) {
	f.Add("a%20b", "")
	f.Add(strings.Repeat("x", 240)+more, "y")
	f.Fuzz(func(t *testing.T, a, b string) {
		list := []string{a}
		if b != "" {
			list = append(list, b)
		}
		if c, ok := component(list); ok {
			if diff := cmp.Diff(names(c), list); diff != "" || blob.ValidKey(c) != nil {
				t.Fatalf("%q is taken for %q: %s", list, c, diff)
			}
		}
	})
}
