package azblob

import (
	"crypto/tls"
	"crypto/x509"
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
	d, err := Open("box", &Options{
		Endpoint: "https://acc.stub", SASToken: "?sv=1&sig=SECRET",
		around: func(http.RoundTripper) http.RoundTripper { return s },
	})
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

func refusal(status int, code string) blobservers.Answer {
	return blobservers.Answer{
		Status: status, Header: http.Header{"X-Ms-Error-Code": {code}, "Content-Type": {"application/xml"}},
		Body: "<?xml version=\"1.0\"?><Error><Code>" + code + "</Code><Message>The text.\nRequestId:1</Message></Error>",
	}
}

func TestErrors(t *testing.T) {
	cases := []struct {
		name        string
		answer      blobservers.Answer
		err         error
		class, text string
	}{
		{"absent", refusal(404, "BlobNotFound"), nil, "not exist", ""},
		{"no container", refusal(404, "ContainerNotFound"), nil, "permanent", "container box does not exist"},
		{"exists", refusal(409, "BlobAlreadyExists"), nil, "exist", ""},
		{"condition", refusal(412, "ConditionNotMet"), nil, "exist", ""},
		{"wrong key", refusal(403, "AuthenticationFailed"), nil, "permission", "a wrong or expired key"},
		{"no permission", refusal(403, "AuthorizationPermissionMismatch"), nil, "permission", "Data Contributor"},
		{"no token", refusal(401, "InvalidAuthenticationInfo"), nil, "permission", "does not accept"},
		{"busy", refusal(503, "ServerBusy"), nil, "throttled", "ServerBusy: The text. (status 503)"},
		{"too many", refusal(429, "TooManyRequests"), nil, "throttled", ""},
		{"broken", refusal(500, "InternalError"), nil, "retriable", ""},
		{"slow", refusal(500, "OperationTimedOut"), nil, "retriable", ""},
		{"other writer", refusal(400, "InvalidBlockList"), nil, "retriable", ""},
		{"archived", refusal(409, "BlobArchived"), nil, "permanent", "BlobArchived"},
		{"reset", blobservers.Answer{}, io.ErrUnexpectedEOF, "retriable", ""},
		{"stranger", blobservers.Answer{}, &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, "permanent", "not trusted"},
		{"mistyped", blobservers.Answer{}, &net.DNSError{IsNotFound: true}, "permanent", "no such host"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d, _ := openStub(t, func(*http.Request, string) (blobservers.Answer, error) { return c.answer, c.err })
			_, statErr := d.Stat(t.Context(), "k")
			_, getErr := d.Get(t.Context(), "k", 0, -1)
			var listErr error
			for _, listErr = range d.List(t.Context(), "", "") {
			}
			errs := map[string]error{
				"stat": statErr, "get": getErr, "list": listErr,
				"put":   d.Put(t.Context(), "k", blob.Bytes([]byte("x")), blob.PutOptions{}),
				"large": d.Put(t.Context(), "k", blob.Bytes(make([]byte, blockSize+1)), blob.PutOptions{}),
				"seal":  d.RemoveTTL(t.Context(), []string{"k"}),
			}
			for op, err := range errs {
				text := fmt.Sprint(err)
				head := op == "stat" || op == "seal" // their answers have no text
				if got := blobtest.Class(err); got != c.class || !strings.Contains(text, c.text) && !(head && strings.Contains(c.text, "The text")) {
					t.Errorf("%s is %s, want %s: %v", op, got, c.class, err)
				}
				if strings.Contains(text, "SECRET") {
					t.Errorf("%s tells the signature: %v", op, err)
				}
			}
		})
	}
}

// listing is the answer to a list of one blob in some state.
func listing(name, state string) blobservers.Answer {
	return blobservers.Answer{Status: 200, Header: http.Header{"Content-Type": {"application/xml"}}, Body: `<?xml version="1.0" encoding="utf-8"?>
<EnumerationResults><Blobs><Blob><Name>` + name + `</Name>` + state + `<Properties><Content-Length>4</Content-Length></Properties></Blob>
<Blob><Name>k2</Name><Deleted>true</Deleted><Properties/></Blob></Blobs><NextMarker/></EnumerationResults>`}
}

func download(body string) blobservers.Answer {
	return blobservers.Answer{Status: 200, Header: http.Header{"Content-Length": {fmt.Sprint(len(body))}}, Body: body}
}

func readDeleted(t *testing.T, d *Driver) string {
	t.Helper()
	r, err := d.GetDeleted(t.Context(), "k", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	return string(got)
}

// Under soft delete a blob is read by undeleting it, and is deleted again afterwards.
func TestSoftDelete(t *testing.T) {
	d, s := openStub(t, func(r *http.Request, _ string) (blobservers.Answer, error) {
		switch {
		case r.URL.Query().Get("comp") == "list":
			return listing("k", "<Deleted>true</Deleted>"), nil
		case r.URL.Query().Get("comp") == "undelete":
			return blobservers.Answer{Status: 200}, nil
		case r.Method == http.MethodDelete:
			return blobservers.Answer{Status: 202}, nil
		}
		return download("kept"), nil
	})
	if got := readDeleted(t, d); got != "kept" {
		t.Errorf("%q", got)
	}
	if diff := cmp.Diff(s.Seen(), []string{"GET /box", "PUT /box/k", "GET /box/k", "DELETE /box/k"}); diff != "" {
		t.Errorf("requests (-got +want):\n%s", diff)
	}
}

// Where versions are kept the newest is read and nothing is changed.
func TestVersions(t *testing.T) {
	d, s := openStub(t, func(r *http.Request, _ string) (blobservers.Answer, error) {
		if r.URL.Query().Get("comp") == "list" {
			return listing("k", "<VersionId>2026-01-02T03:04:05.0000001Z</VersionId>"), nil
		}
		if r.URL.Query().Get("versionid") != "2026-01-02T03:04:05.0000001Z" {
			return refusal(404, "BlobNotFound"), nil
		}
		return download("old"), nil
	})
	if got := readDeleted(t, d); got != "old" {
		t.Errorf("%q", got)
	}
	if diff := cmp.Diff(s.Seen(), []string{"GET /box", "GET /box/k"}); diff != "" {
		t.Errorf("requests (-got +want):\n%s", diff)
	}
}

// Whether there is soft delete tells what it means that nothing is kept.
func TestNothingKept(t *testing.T) {
	for enabled, want := range map[string]error{"true": fs.ErrNotExist, "false": blob.ErrUnsupported} {
		d, _ := openStub(t, func(r *http.Request, _ string) (blobservers.Answer, error) {
			if r.URL.Query().Get("comp") == "list" {
				return listing("k1", ""), nil
			}
			return blobservers.Answer{Status: 200, Header: http.Header{"Content-Type": {"application/xml"}}, Body: `<?xml version="1.0"?>
<StorageServiceProperties><DeleteRetentionPolicy><Enabled>` + enabled + `</Enabled></DeleteRetentionPolicy></StorageServiceProperties>`}, nil
		})
		if _, err := d.GetDeleted(t.Context(), "k", 0, -1); !errors.Is(err, want) {
			t.Errorf("soft delete %s: %v, want %v", enabled, err, want)
		}
	}
}

// A TTL becomes a tag only where the account has a rule for it, and sealing takes it away (P7).
func TestExpiryTags(t *testing.T) {
	for _, tags := range []bool{false, true} {
		var tagged []string
		d, _ := openStub(t, func(r *http.Request, _ string) (blobservers.Answer, error) {
			if r.Method == http.MethodPut {
				tagged = append(tagged, r.URL.Query().Get("comp")+" "+headerOf(r, "x-ms-tags"))
			}
			if r.URL.Query().Get("comp") == "tags" {
				return blobservers.Answer{Status: 204}, nil
			}
			if r.Method == http.MethodHead {
				return blobservers.Answer{Status: 200, Header: http.Header{"Content-Length": {"1"}, "Last-Modified": {"Thu, 01 Jan 2026 00:00:00 GMT"}}}, nil
			}
			return blobservers.Answer{Status: 201}, nil
		})
		d.tags = tags
		installed := d.InstallExpiry(t.Context(), 3*day)
		if err := d.Put(t.Context(), "k", blob.Bytes([]byte("x")), blob.PutOptions{TTL: 3*day + time.Second}); err != nil {
			t.Fatal(err)
		}
		if err := d.RemoveTTL(t.Context(), []string{"k"}); err != nil {
			t.Fatal(err)
		}
		want := []string{" "}
		if tags {
			want = []string{" " + tagName + "=4", "tags "}
		}
		if diff := cmp.Diff(tagged, want); diff != "" {
			t.Errorf("tags %v (-got +want):\n%s", tags, diff)
		}
		if (installed == nil) != tags || !tags && !errors.Is(installed, blob.ErrUnsupported) {
			t.Errorf("tags %v: install: %v", tags, installed)
		}
	}
}

// headerOf finds a header that the library did not write in canonical form.
func headerOf(r *http.Request, name string) string {
	for key, values := range r.Header {
		if strings.EqualFold(key, name) {
			return strings.Join(values, "")
		}
	}
	return ""
}
