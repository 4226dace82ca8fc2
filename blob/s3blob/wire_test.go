package s3blob

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/blobservers"
)

// wire is what lies between the SDK and a server: it counts the requests, and hands those
// that spoil wants to it.
type wire struct {
	next httpDoer

	mu    sync.Mutex
	seen  map[string]int // mu guards; by operation
	spoil func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error)
}

// spoiled makes options whose requests go over a wire.
func spoiled(opts Options, spoil func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error)) (Options, *wire) {
	w := &wire{seen: map[string]int{}, spoil: spoil}
	opts.around = func(next httpDoer) httpDoer {
		w.next = next
		return w
	}
	return opts, w
}

// Do implements httpDoer.
func (w *wire) Do(req *http.Request) (*http.Response, error) {
	op := operation(req)
	w.mu.Lock()
	n := w.seen[op]
	w.seen[op]++
	w.mu.Unlock()
	send := func() (*http.Response, error) { return w.next.Do(req) }
	if w.spoil == nil {
		return send()
	}
	return w.spoil(op, n, req, send)
}

func (w *wire) count(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[op]
}

// operation is a short name of a request.
func operation(req *http.Request) string {
	q := req.URL.Query()
	for _, sub := range []string{"uploadId", "uploads", "delete", "tagging", "lifecycle", "versions", "versioning", "list-type"} {
		if q.Has(sub) {
			return req.Method + " " + sub
		}
	}
	if strings.Count(strings.Trim(req.URL.Path, "/"), "/") == 0 {
		return req.Method + " bucket"
	}
	return req.Method
}

// answered makes an answer of a store.
func answered(req *http.Request, status int, body string) *http.Response {
	h := http.Header{"Content-Type": {"application/xml"}, "Date": {time.Now().UTC().Format(http.TimeFormat)}}
	if req.Body != nil {
		_, _ = io.Copy(io.Discard, req.Body)
		_ = req.Body.Close()
	}
	return &http.Response{
		StatusCode: status, Status: http.StatusText(status), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: req,
	}
}

func failure(code, message string) string {
	return fmt.Sprintf(`<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>%s</Message><RequestId>R1</RequestId></Error>`, code, message)
}

var errLost = errors.New("the connection broke")

// lose lets the server act and loses its answer.
func lose(send func() (*http.Response, error)) (*http.Response, error) {
	resp, err := send()
	if err == nil {
		_ = resp.Body.Close()
	}
	return nil, errLost
}

// newStore is a store on a bucket of its own.
func newStore(t *testing.T, s *blobservers.S3, opts Options) *blob.Store {
	t.Helper()
	st := blob.New(open(t, s, s.Bucket(), opts), &blob.Options{Retry: blob.Retry{First: time.Millisecond, Max: time.Millisecond}})
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return st
}

// big is a body of several parts.
func big() []byte { return bytes.Repeat([]byte("0123456789abcdef"), 11<<20/16) }

func wantObject(t *testing.T, s *blob.Store, key string, want []byte) {
	t.Helper()
	got, err := s.ReadAll(t.Context(), key, 0, -1)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%s: %d bytes, %v, want %d", key, len(got), err, len(want))
	}
}

// wantNoUploads fails if parts are left on the server.
func wantNoUploads(t *testing.T, d *Driver) {
	t.Helper()
	n, err := d.sweepUploads(t.Context(), -time.Hour)
	if err != nil || n != 0 {
		t.Errorf("%d uploads were left behind, %v", n, err)
	}
}
