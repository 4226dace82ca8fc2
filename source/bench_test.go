//go:build linux

package source

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

const (
	benchDirs  = 500
	benchFiles = 50_000
)

func benchTree(b *testing.B) string {
	b.Helper()
	dir := b.TempDir()
	for i := range benchFiles {
		sub := fmt.Sprintf("%s/directory-%03d", dir, i%benchDirs)
		if i < benchDirs {
			must(b, os.Mkdir(sub, 0o755))
		}
		must(b, os.WriteFile(fmt.Sprintf("%s/file-%06d.sst", sub, i), nil, 0o644))
	}
	return dir
}

// BenchmarkFind50k is the yardstick of BenchmarkUnchanged50k: the same tree, listed by find.
func BenchmarkFind50k(b *testing.B) {
	dir := benchTree(b)
	for b.Loop() {
		must(b, exec.Command("find", dir, "-printf", "%s %T@").Run())
	}
}

func BenchmarkWalk50k(b *testing.B) {
	dir := benchTree(b)
	b.ReportAllocs()
	for b.Loop() {
		img, err := Dir(dir, nil).Freeze(b.Context())
		must(b, err)
		must(b, img.Release())
	}
}

// BenchmarkUnchanged50k is all that this package does for a tree that did not change.
func BenchmarkUnchanged50k(b *testing.B) {
	dir, cacheDir := benchTree(b), b.TempDir()
	benchRemember(b, dir, cacheDir)
	b.ReportAllocs()
	for b.Loop() {
		img, err := Dir(dir, nil).Freeze(b.Context())
		must(b, err)
		c, err := OpenCache(cacheDir, img)
		must(b, err)
		if hits := lookupAll(c, img); hits < benchFiles {
			b.Fatalf("%d of %d files are known", hits, benchFiles)
		}
		must(b, c.Save())
		must(b, img.Release())
	}
}

// BenchmarkCache50k is the cache alone: load and look up.
func BenchmarkCache50k(b *testing.B) {
	dir, cacheDir := benchTree(b), b.TempDir()
	benchRemember(b, dir, cacheDir)
	img := freeze(b, dir, nil)
	for b.Loop() {
		c, err := OpenCache(cacheDir, img)
		must(b, err)
		if hits := lookupAll(c, img); hits < benchFiles {
			b.Fatalf("%d of %d files are known", hits, benchFiles)
		}
	}
}

func lookupAll(c *Cache, img Image) (hits int) {
	for i := range img.Entries() {
		if _, ok := c.Lookup(&img.Entries()[i]); ok {
			hits++
		}
	}
	return hits
}

func benchRemember(b *testing.B, dir, cacheDir string) {
	b.Helper()
	img := freeze(b, dir, nil)
	c, err := OpenCache(cacheDir, img)
	must(b, err)
	must(b, c.Begin())
	var all []*Entry
	for i := range img.Entries() {
		all = append(all, &img.Entries()[i])
	}
	must(b, c.WaitSettled(b.Context(), all))
	for _, e := range all {
		c.Record(e.Path, e.Identity, [32]byte{1})
	}
	must(b, c.Save())
}
