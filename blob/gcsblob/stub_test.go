package gcsblob

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/internal/blobservers"
)

func openStub(t *testing.T, answer func(r *http.Request, body string) (blobservers.Answer, error)) (*Driver, *blobservers.Stub) {
	t.Helper()
	s := &blobservers.Stub{Answer: answer}
	d, err := Open(context.Background(), "box", &Options{Anonymous: true, Endpoint: "http://stub", around: func(http.RoundTripper) http.RoundTripper { return s }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, s
}

func ok(body string) (blobservers.Answer, error) {
	return blobservers.Answer{Status: http.StatusOK, Body: body}, nil
}

func apiError(code int, reason, message string) string {
	return fmt.Sprintf(`{"error":{"code":%d,"message":%q,"errors":[{"reason":%q,"message":%q}]}}`, code, message, reason, message)
}

func TestErrors(t *testing.T) {
	cases := []struct {
		name        string
		status      int
		reason      string
		err         error
		class, text string
	}{
		{"no credentials", 401, "authError", nil, "permission", "does not accept the credentials"},
		{"no permission", 403, "forbidden", nil, "permission", "storage.objects"},
		{"rate", 403, "rateLimitExceeded", nil, "throttled", ""},
		{"user's rate", 403, "userRateLimitExceeded", nil, "throttled", ""},
		{"no bucket", 404, "notFound", nil, "permanent", "bucket box does not exist"},
		{"timeout", 408, "", nil, "retriable", ""},
		{"exists", 412, "conditionNotMet", nil, "exist", ""},
		{"too many", 429, "", nil, "throttled", ""},
		{"broken", 500, "", nil, "retriable", "500"},
		{"busy", 503, "", nil, "throttled", ""},
		{"bad request", 400, "invalid", nil, "permanent", "400"},
		{"reset", 0, "", io.ErrUnexpectedEOF, "retriable", ""},
		{"stranger", 0, "", &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, "permanent", "not trusted"},
		{"mistyped", 0, "", &net.DNSError{IsNotFound: true}, "permanent", "no such host"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d, _ := openStub(t, func(*http.Request, string) (blobservers.Answer, error) {
				return blobservers.Answer{Status: c.status, Body: apiError(c.status, c.reason, "the text")}, c.err
			})
			_, statErr := d.Stat(t.Context(), "k")
			_, getErr := d.Get(t.Context(), "k", 0, -1)
			var listErr error
			for _, listErr = range d.List(t.Context(), "", "") {
			}
			errs := map[string]error{
				"stat": statErr, "get": getErr, "list": listErr,
				"put":   d.Put(t.Context(), "k", blob.Bytes([]byte("x")), blob.PutOptions{}),
				"large": d.Put(t.Context(), "k", blob.Bytes(make([]byte, inMemory+1)), blob.PutOptions{}),
				"seal":  d.RemoveTTL(t.Context(), []string{"k"}),
			}
			for op, err := range errs {
				if got := blobtest.Class(err); got != c.class || !strings.Contains(fmt.Sprint(err), c.text) {
					t.Errorf("%s is %s, want %s: %v", op, got, c.class, err)
				}
			}
		})
	}
}

// What arrives with another checksum does not stay.
func TestDamagedOnTheWay(t *testing.T) {
	d, s := openStub(t, func(r *http.Request, _ string) (blobservers.Answer, error) {
		if r.Method == http.MethodDelete {
			return blobservers.Answer{Status: http.StatusNoContent}, nil
		}
		return ok(`{"name":"k","generation":"7","size":"8388609","crc32c":"AAAAAA=="}`)
	})
	err := d.Put(t.Context(), "k", blob.Bytes([]byte(strings.Repeat("x", inMemory+1))), blob.PutOptions{})
	if !errors.Is(err, blob.ErrCorrupt) || !blob.IsRetriable(err) {
		t.Errorf("put: %v", err)
	}
	if seen := s.Seen(); seen[len(seen)-1] != "DELETE /storage/v1/b/box/o/k" {
		t.Errorf("last request: %.200s", seen[len(seen)-1])
	}
}

// The rule of expiry stands beside others and takes the place of its own earlier one (P7).
func TestInstallExpiry(t *testing.T) {
	const rules = `{"lifecycle":{"rule":[
		{"action":{"type":"Delete"},"condition":{"age":100}},
		{"action":{"type":"Delete"},"condition":{"age":9,"daysSinceCustomTime":1,"isLive":true}}]},"metageneration":"3"}`
	d, s := openStub(t, func(*http.Request, string) (blobservers.Answer, error) { return ok(rules) })
	for _, ttl := range []time.Duration{2 * day, 3*day + time.Hour} {
		if err := d.InstallExpiry(t.Context(), ttl); err == nil {
			t.Errorf("expiry after %v is no error", ttl)
		}
	}
	if err := d.InstallExpiry(t.Context(), 5*day); err != nil {
		t.Fatal(err)
	}
	seen := s.Seen()
	_, body, _ := strings.Cut(seen[len(seen)-1], "{")
	var sent any
	if err := json.Unmarshal([]byte("{"+body), &sent); err != nil {
		t.Fatalf("%v: %s", err, seen)
	}
	rule := func(condition map[string]any) any {
		return map[string]any{"action": map[string]any{"type": "Delete"}, "condition": condition}
	}
	want := map[string]any{"lifecycle": map[string]any{"rule": []any{
		rule(map[string]any{"age": 100.0}),
		rule(map[string]any{"age": 5.0, "daysSinceCustomTime": 1.0, "isLive": true}),
	}}}
	if diff := cmp.Diff(sent, any(want)); diff != "" {
		t.Errorf("rules (-got +want):\n%s", diff)
	}
}

// Under soft delete an object is read by restoring it, and is deleted again afterwards.
func TestSoftDelete(t *testing.T) {
	d, s := openStub(t, func(r *http.Request, _ string) (blobservers.Answer, error) {
		q := r.URL.Query()
		switch {
		case strings.HasSuffix(r.URL.Path, "/restore"):
			return ok(`{"name":"k","generation":"9"}`)
		case r.Method == http.MethodDelete:
			return blobservers.Answer{Status: http.StatusNoContent}, nil
		case q.Get("softDeleted") == "true" && q.Get("prefix") == "k":
			return ok(`{"items":[{"name":"k","generation":"4","softDeleteTime":"2026-01-02T03:04:05Z"},{"name":"k2","generation":"8","softDeleteTime":"2026-01-02T03:04:05Z"}]}`)
		case q.Get("alt") == "media":
			return blobservers.Answer{Status: http.StatusOK, Header: http.Header{"X-Goog-Generation": {"9"}}, Body: "kept"}, nil
		case strings.HasSuffix(r.URL.Path, "/o"):
			return ok(`{}`)
		}
		return ok(`{"softDeletePolicy":{"retentionDurationSeconds":"604800"}}`)
	})
	r, err := d.GetDeleted(t.Context(), "k", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil || string(got) != "kept" {
		t.Errorf("%q, %v", got, err)
	}
	const at = " /storage/v1/b/box/o/k"
	seen := s.Seen()
	if diff := cmp.Diff(seen[len(seen)-3:], []string{"POST" + at + "/restore", "GET" + at, "DELETE" + at}); diff != "" {
		t.Errorf("requests (-got +want):\n%s", diff)
	}
	if _, err := d.GetDeleted(t.Context(), "never", 0, -1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what never was: %v", err)
	}
}
