package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/snapferry/snapferry/source"
)

// writeTree makes files, by path below a new directory.
func writeTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestDetect(t *testing.T) {
	meta := "\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00"
	for name, tt := range map[string]struct {
		files map[string]string
		path  string
		want  string
	}{
		"sqlite":             {files: map[string]string{"f": sqliteMagic + "..."}, path: "f", want: kindSQLite},
		"sqlite in text":     {files: map[string]string{"f": "SQLite format 3\n"}, path: "f", want: kindDir},
		"bolt":               {files: map[string]string{"f": meta + "\xed\xda\x0c\xed\x02\x00\x00\x00rest"}, path: "f", want: kindBolt},
		"bolt, big endian":   {files: map[string]string{"f": meta + "\xed\x0c\xda\xed\x00\x00\x00\x02rest"}, path: "f", want: kindBolt},
		"bolt of the future": {files: map[string]string{"f": meta + "\xed\xda\x0c\xed\x03\x00\x00\x00rest"}, path: "f", want: kindDir},
		"short":              {files: map[string]string{"f": meta}, path: "f", want: kindDir},
		"empty":              {files: map[string]string{"f": ""}, path: "f", want: kindDir},
		"plain":              {files: map[string]string{"MANIFEST": "text", "CURRENT": "x"}, want: kindDir},
		"badger":             {files: map[string]string{"MANIFEST": "Bdgr\x00\x00\x00\x08", "KEYREGISTRY": ""}, want: kindBadger},
		"pebble":             {files: map[string]string{"marker.manifest.000001.MANIFEST-000001": "", "MANIFEST-000001": ""}, want: kindPebble},
		"old pebble":         {files: map[string]string{"CURRENT": "", "MANIFEST-000001": "", "OPTIONS-000002": "[Version]\n  pebble_version=0.1\n"}, want: kindPebble},
		"rocksdb":            {files: map[string]string{"CURRENT": "", "MANIFEST-000001": "", "OPTIONS-000002": "[Version]\n  rocksdb_version=7.8.3\n"}, want: kindRocksDB},
		"leveldb":            {files: map[string]string{"CURRENT": "", "MANIFEST-000001": "", "000003.log": ""}, want: kindDir},
		"odd name":           {files: map[string]string{"a[b*/marker.manifest.1": ""}, path: "a[b*", want: kindPebble},
	} {
		got, err := detect(filepath.Join(writeTree(t, tt.files), tt.path))
		if err != nil || got != tt.want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, tt.want)
		}
	}
	if _, err := detect(filepath.Join(t.TempDir(), "absent")); err == nil {
		t.Error("an absent path has a kind")
	}
}

func TestCheckpointDirs(t *testing.T) {
	one := func() map[string]rule { return map[string]rule{"kv": {name: "kv", kind: kindPebble}} }
	two := func() map[string]rule {
		return map[string]rule{"kv": {name: "kv", kind: kindPebble}, "b": {name: "b", kind: kindBolt}}
	}
	for _, tt := range []struct {
		rules map[string]rule
		args  []string
		want  string // of kv; empty for a usage error
	}{
		{one(), []string{"/c"}, "/c"},
		{one(), []string{"kv=/c"}, "/c"},
		{one(), []string{"/a=b"}, "/a=b"},
		{two(), []string{"kv=/c"}, "/c"},
		{two(), []string{"/c"}, ""},
		{two(), []string{"b=/c"}, ""},
		{one(), []string{"/c", "/d"}, ""},
		{one(), []string{"kv="}, ""},
		{one(), []string{""}, ""},
	} {
		err := addCheckpointDirs(tt.rules, tt.args)
		if got := tt.rules["kv"].checkpointDir; tt.want == "" && !isUsage(err) || tt.want != "" && (err != nil || got != tt.want) {
			t.Errorf("%q gives %q, %v, want %q", tt.args, got, err, tt.want)
		}
	}
}

// freezer counts the images that it gives and that are released.
type freezer struct {
	source.Source
	frozen, released int
}

type countedRelease struct {
	source.Image
	of *freezer
}

func (f *freezer) Freeze(ctx context.Context) (source.Image, error) {
	img, err := f.Source.Freeze(ctx)
	f.frozen++
	return &countedRelease{img, f}, err
}

func (c *countedRelease) Release() error {
	c.of.released++
	return c.Image.Release()
}

// A second look is given the image of the first, until that is spoilt; each image is
// released once, when nobody holds it.
func TestSharedImage(t *testing.T) {
	dir := writeTree(t, map[string]string{"f": "one"})
	f := &freezer{Source: source.Dir(dir, nil)}
	s := newShared(f)
	freeze := func() source.Image {
		img, err := s.Freeze(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	count := func(when string, frozen, released int) {
		t.Helper()
		if f.frozen != frozen || f.released != released {
			t.Errorf("%s: %d frozen and %d released, want %d and %d", when, f.frozen, f.released, frozen, released)
		}
	}
	first, second := freeze(), freeze()
	first.Release()
	first.Release()
	count("one of two holds", 1, 0)
	file, err := second.Open("f")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := file.Check(); !errors.Is(err, source.ErrChanged) {
		t.Fatal(err)
	}
	third := freeze()
	count("after a change", 2, 0)
	second.Release()
	count("the spoilt one is let go", 2, 1)
	third.Release()
	count("at the end", 2, 2)
	freeze().Release()
	count("anew", 3, 3)
}
