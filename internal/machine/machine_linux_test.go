package machine

import (
	"strings"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	cases := []struct {
		in   []time.Duration
		want time.Duration
	}{{nil, 0}, {[]time.Duration{7}, 7}, {[]time.Duration{9, 1, 5}, 5}, {[]time.Duration{4, 2, 100, 0}, 3}}
	for _, c := range cases {
		if got := Median(c.in); got != c.want {
			t.Errorf("median of %v is %v, want %v", c.in, got, c.want)
		}
	}
	if got := Median([]float64{1, 2}); got != 1.5 {
		t.Errorf("median of 1 and 2 is %v", got)
	}
}

func TestDescribe(t *testing.T) {
	m := Describe(t.Context(), t.TempDir())
	if m.CPUs < 1 || m.Kernel == "unknown" || m.FileSystem == "unknown" || !strings.Contains(m.String(), m.Kernel) {
		t.Errorf("%v", m)
	}
	if m := Describe(t.Context(), "/nowhere"); m.FileSystem != "unknown" {
		t.Errorf("the file system of no directory is %s", m.FileSystem)
	}
}
