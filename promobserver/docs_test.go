package promobserver_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/snapferry/snapferry/promobserver"
)

// recorder is a Registerer that keeps a line for each metric: name, kind, labels, help.
type recorder struct {
	prometheus.Registerer
	lines []string
}

var descPattern = regexp.MustCompile(`fqName: "([^"]*)", help: "([^"]*)".*variableLabels: \{([^}]*)\}`)

func (r *recorder) Register(c prometheus.Collector) error {
	kind := "gauge"
	switch c.(type) {
	case *prometheus.CounterVec:
		kind = "counter"
	case *prometheus.HistogramVec:
		kind = "histogram"
	}
	ch := make(chan *prometheus.Desc, 1)
	c.Describe(ch)
	m := descPattern.FindStringSubmatch((<-ch).String())
	labels := strings.ReplaceAll(m[3], ",", ", ")
	r.lines = append(r.lines, "| `"+m[1]+"` | "+kind+" | "+labels+" | "+m[2]+" |")
	return nil
}

// TestDocs compares the metrics with the tables of docs/metrics.md. On a difference it
// prints the lines that belong there.
func TestDocs(t *testing.T) {
	var r recorder
	if _, err := promobserver.New(&r, nil); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "| `snapferry_") {
			listed = append(listed, line)
		}
	}
	if diff := cmp.Diff(r.lines, listed); diff != "" {
		t.Errorf("docs/metrics.md (-metrics +listed):\n%s\nwanted, in this order:\n%s", diff, strings.Join(r.lines, "\n"))
	}
	slices.Sort(r.lines)
	if n := len(slices.Compact(r.lines)); n != len(listed) {
		t.Errorf("%d different lines of %d", n, len(listed))
	}
}

// TestNames: units and kinds are in the names as the Prometheus guide asks.
func TestNames(t *testing.T) {
	var r recorder
	if _, err := promobserver.New(&r, nil); err != nil {
		t.Fatal(err)
	}
	for _, line := range r.lines {
		total := strings.Contains(line, "_total`")
		if counter := strings.Contains(line, "| counter |"); counter != total {
			t.Errorf("%s: a counter ends with _total, and nothing else does", line)
		}
		if strings.Contains(line, "| histogram |") && !strings.Contains(line, "_seconds`") && !strings.Contains(line, "_bytes`") {
			t.Errorf("%s: a histogram names its unit", line)
		}
	}
}
