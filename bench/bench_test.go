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
// that the program works on the day somebody wants numbers. Without rclone the rows that
// compare with it are measured and fail.
func TestTinyRun(t *testing.T) {
	dir := t.TempDir()
	var out, log bytes.Buffer
	if _, err := run(t.Context(), []string{"-scale", "0.001", "-n", "1", "-json", "-rclone", "", "-dir", dir}, &out, &log); err != nil {
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
		inside, rival := strings.HasPrefix(l.Row, "freeze"), strings.HasPrefix(l.Row, "s3")
		if l.Ours <= 0 || (l.PeakBytes > 0) == inside || (l.MaxShare > 0) != (l.Share > 0) || (l.MaxPuts > 0) != (l.Puts > 0) ||
			(l.MaxRatio > 0 && !rival) != (l.Ratio > 0) || rival && l.Met {
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
		{"share met", limit{share: 0.15}, sample{Ours: ms(9), Share: 0.15}, true},
		{"share missed", limit{share: 0.15}, sample{Ours: ms(9), Share: 0.16}, false},
		{"no reference", limit{ratio: 1.5}, sample{Ours: ms(1)}, false},
		{"requests met", limit{puts: 60}, sample{Ours: ms(1), Puts: 60}, true},
		{"requests missed", limit{puts: 60}, sample{Ours: ms(1), Puts: 61}, false},
		{"share met, time missed", limit{time: time.Second, share: 0.15}, sample{Ours: ms(1001), Share: 0.1}, false},
		{"too much memory", limit{time: time.Second}, sample{Ours: fat}, false},
	}
	for _, c := range cases {
		if l := newLine(result{row: row{limit: c.limit}, samples: []sample{c.s}}); l.Met != c.met {
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
