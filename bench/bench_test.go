//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestTinyRun runs every row on a thousandth of the trees with the real command, so
// that the program works on the day somebody wants numbers.
func TestTinyRun(t *testing.T) {
	dir := t.TempDir()
	var out, log bytes.Buffer
	if _, err := run(t.Context(), []string{"-scale", "0.001", "-n", "1", "-json", "-dir", dir}, &out, &log); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	var rep report
	if err := json.Unmarshal(out.Bytes(), &rep); err != nil {
		t.Fatal(err)
	}
	if len(rep.Rows) != len(rows) {
		t.Errorf("%d rows, want %d", len(rep.Rows), len(rows))
	}
	for _, l := range rep.Rows {
		if l.Ours <= 0 || l.PeakBytes <= 0 || (l.MaxRatio > 0) != (l.Ratio > 0) {
			t.Errorf("row %s is not measured: %+v", l.Row, l)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestUnknownRow(t *testing.T) {
	_, err := run(t.Context(), []string{"-rows", "first,nosuch"}, &bytes.Buffer{}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("got %v, want an error that names the row", err)
	}
}

func TestVerdict(t *testing.T) {
	ms := func(n time.Duration) usage { return usage{Wall: n * time.Millisecond, PeakBytes: 1 << 20} }
	reference := ms(100)
	fat := ms(1)
	fat.PeakBytes = memoryLimit + 1
	cases := []struct {
		name  string
		limit limit
		s     sample
		met   bool
	}{
		{"ratio met", limit{ratio: 1.5}, sample{Ours: ms(150), Reference: &reference}, true},
		{"ratio missed", limit{ratio: 1.5}, sample{Ours: ms(151), Reference: &reference}, false},
		{"time met", limit{time: 100 * time.Millisecond}, sample{Ours: ms(100)}, true},
		{"time missed", limit{time: 100 * time.Millisecond}, sample{Ours: ms(101)}, false},
		{"too much memory", limit{time: time.Second}, sample{Ours: fat}, false},
	}
	for _, c := range cases {
		if l := newLine(result{row{limit: c.limit}, []sample{c.s}}); l.Met != c.met {
			t.Errorf("%s: met %v, want %v", c.name, l.Met, c.met)
		}
	}
}

// TestTree: trees are the same for the same numbers, a replaced file is another one,
// and same sees both.
func TestTree(t *testing.T) {
	l := layout{dirs: 3, files: 4, size: 5000, seed: 9}
	a, b := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	made, err := makeTree(a, l)
	if err != nil {
		t.Fatal(err)
	}
	if made.bytes != 3*4*5000 {
		t.Errorf("tree of %d bytes", made.bytes)
	}
	if _, err := makeTree(b, l); err != nil {
		t.Fatal(err)
	}
	if err := same(a, b); err != nil {
		t.Errorf("equal trees: %v", err)
	}
	if _, err := made.replace(2); err != nil {
		t.Fatal(err)
	}
	if err := same(a, b); err == nil {
		t.Error("a replaced file was not seen")
	}
	if err := os.Remove(filepath.Join(b, "0001", "000001.sst")); err != nil {
		t.Fatal(err)
	}
	if err := same(a, b); err == nil || !strings.Contains(err.Error(), "names") {
		t.Errorf("a missing file: %v", err)
	}
}
