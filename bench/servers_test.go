//go:build linux

package main

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/blobservers"
)

// TestCounter: the proxy passes requests on with the host that was signed, and counts what
// makes objects and not what reads or deletes.
func TestCounter(t *testing.T) {
	var hosts []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { hosts = append(hosts, r.Host) }))
	defer server.Close()
	c, err := newCounter(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	for _, call := range []struct{ method, path string }{
		{"PUT", "/b/k"}, {"POST", "/b/k?uploads"}, {"POST", "/b?delete"}, {"GET", "/b/k"}, {"DELETE", "/b/k"}, {"PUT", "/b/k?partNumber=1"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), call.method, c.endpoint+call.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if err := c.close(); err != nil {
		t.Error(err)
	}
	if got := c.puts.Load(); got != 3 {
		t.Errorf("counted %d requests, want 3", got)
	}
	if want := strings.TrimPrefix(c.endpoint, "http://"); len(hosts) != 6 || slices.ContainsFunc(hosts, func(h string) bool { return h != want }) {
		t.Errorf("hosts %q, want 6 times %s", hosts, want)
	}
}

// TestHost: what ends a test ends the start only, cleanups run in reverse order, and what
// fails at the end is told.
func TestHost(t *testing.T) {
	h := &host{ctx: t.Context(), dir: t.TempDir(), log: t.Output()}
	var order []int
	err := h.start(func(t blobservers.T) {
		t.Cleanup(func() { order = append(order, 1) })
		t.Cleanup(func() { order = append(order, 2); t.Errorf("it ended by itself") })
		t.Fatalf("no port %d", 7)
	})
	if err == nil || err.Error() != "no port 7" {
		t.Errorf("start: %v", err)
	}
	if err := h.close(); err == nil || !strings.Contains(err.Error(), "by itself") {
		t.Errorf("close: %v", err)
	}
	if !slices.Equal(order, []int{2, 1}) {
		t.Errorf("cleanups ran as %v", order)
	}
}

func TestPercentile(t *testing.T) {
	var samples []sample
	for i := range 100 {
		samples = append(samples, sample{Ours: usage{Wall: time.Duration(100 - i)}})
	}
	if got := percentile(samples, 0.5); got != 50 {
		t.Errorf("middle of 1 to 100 is %d", got)
	}
	if got := percentile(samples, 1); got != 100 {
		t.Errorf("longest of 1 to 100 is %d", got)
	}
	if got := percentile(samples[:1], 0.99); got != 100 {
		t.Errorf("p99 of one is %d", got)
	}
}
