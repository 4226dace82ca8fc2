//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// layout describes a tree: dirs directories of files files of size bytes each.
type layout struct {
	dirs, files int
	size        int64
	seed        uint64
}

// tree is one that was made.
type tree struct {
	layout
	dir   string
	bytes int64
}

// random gives bytes that do not compress, at memory speed, the same ones for the
// same numbers.
func random(numbers ...uint64) *rand.ChaCha8 {
	var seed [32]byte
	for i, n := range numbers {
		binary.LittleEndian.PutUint64(seed[8*i:], n)
	}
	return rand.NewChaCha8(seed)
}

func makeTree(dir string, l layout) (*tree, error) {
	t := &tree{layout: l, dir: dir, bytes: int64(l.dirs) * int64(l.files) * l.size}
	r := random(l.seed)
	for d := range l.dirs {
		sub := filepath.Join(dir, fmt.Sprintf("%04d", d))
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return nil, err
		}
		for f := range l.files {
			if err := writeFile(filepath.Join(sub, fmt.Sprintf("%06d.sst", f)), r, l.size); err != nil {
				return nil, err
			}
		}
	}
	return t, warm(dir)
}

// replace puts a new file of the same size in the place of one, and returns the size.
func (t *tree) replace(i int) (int64, error) {
	name := filepath.Join(t.dir, "0000", fmt.Sprintf("%06d.sst", i%t.files))
	if err := writeFile(name+".new", random(t.seed, uint64(i)+1), t.size); err != nil {
		return 0, err
	}
	return t.size, os.Rename(name+".new", name)
}

func writeFile(name string, r io.Reader, size int64) (err error) {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, io.LimitReader(r, size), make([]byte, min(size, 1<<20)))
	return err
}

// warm reads every file below dir, so that what is timed afterwards finds it in the
// page cache.
func warm(dir string) error {
	buf := make([]byte, 1<<20)
	return filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, f, buf)
		return err
	})
}

// same tells whether two trees have the same names and bytes.
func same(want, got string) error {
	names, err := listing(want)
	if err != nil {
		return err
	}
	found, err := listing(got)
	if err != nil {
		return err
	}
	if !slices.Equal(names, found) {
		return fmt.Errorf("%s has other names than %s", got, want)
	}
	for _, name := range names {
		if err := sameFile(filepath.Join(want, name), filepath.Join(got, name)); err != nil {
			return err
		}
	}
	return nil
}

// listing returns the regular files below dir.
func listing(dir string) ([]string, error) {
	var names []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(dir, p)
		names = append(names, name)
		return err
	})
	return names, err
}

func sameFile(want, got string) error {
	a, err := os.Open(want)
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := os.Open(got)
	if err != nil {
		return err
	}
	defer b.Close()
	p, q := make([]byte, 1<<20), make([]byte, 1<<20)
	for {
		n, errA := io.ReadFull(a, p)
		m, errB := io.ReadFull(b, q)
		if !bytes.Equal(p[:n], q[:m]) {
			return fmt.Errorf("%s differs from %s", got, want)
		}
		if errA != nil || errB != nil {
			return ended(errA, errB)
		}
	}
}

// ended turns the ends of two files into nil when both are plain ends.
func ended(errs ...error) error {
	for _, err := range errs {
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return err
		}
	}
	return nil
}
