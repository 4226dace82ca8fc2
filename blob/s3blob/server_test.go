package s3blob

import (
	"context"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/internal/blobservers"
)

func TestServer(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	bucket := s.Bucket()
	for name, opts := range map[string]Options{"single": {}, "parts": {SinglePut: 1 << 20, PartSize: 5 << 20}} {
		t.Run(name, func(t *testing.T) {
			blobtest.RunServer(t, blobtest.Server{
				Addr: s.Addr, Kill: s.Kill, Restart: s.Restart,
				Open: func(t *testing.T, addr string) blob.Driver {
					o := opts
					o.Region, o.Endpoint, o.Prefix = s.Region, "http://"+addr, name
					d, err := Open(t.Context(), bucket, &o)
					if err != nil {
						t.Fatal(err)
					}
					return d
				},
			})
		})
	}
}

// In a versioned bucket the suite holds too, and what was deleted can be read.
func TestVersioned(t *testing.T) {
	s := blobservers.VersityVersioned(t)
	use(t, s)
	bucket := s.Bucket()
	s.SetVersioning(bucket)
	st := blob.New(open(t, s, bucket, Options{Prefix: "p"}), nil)
	defer st.Close()
	for _, v := range []string{"first", "second"} {
		if err := st.Put(t.Context(), "k", blob.Bytes([]byte(v)), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := st.Delete(t.Context(), []string{"k"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := st.Put(t.Context(), "k2", blob.Bytes([]byte("other")), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"a-b", "a/x", "b"} { // b is put again at once
		for range 2 {
			if err := st.Put(t.Context(), v, blob.Bytes([]byte(v)), blob.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := st.Delete(t.Context(), []string{"b"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := st.Put(t.Context(), "b", blob.Bytes(nil), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	wantListed(t, st)
	if _, err := st.Stat(t.Context(), "k"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("deleted, and there: %v", err)
	}
	for want, length := range map[string]int64{"second": -1, "sec": 3, "": 0} {
		r, err := st.GetDeleted(t.Context(), "k", 0, length)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || string(got) != want {
			t.Errorf("deleted version: %q, %v, want %q", got, err, want)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := st.GetDeleted(t.Context(), "k2", 0, -1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("never deleted: %v", err)
	}
	wantUnversioned(t, newStore(t, s, Options{}))
}

// Stores that take no batches of deletes are served one by one from then on.
func TestDeleteOneByOne(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	for _, code := range []string{"NotImplemented", "MissingContentMD5"} {
		opts, w := spoiled(Options{}, func(op string, _ int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "POST delete" {
				return answered(req, 501, failure(code, "")), nil
			}
			return send()
		})
		st := newStore(t, s, opts)
		for range 2 {
			for _, k := range []string{"a", "b"} {
				if err := st.Put(t.Context(), k, blob.Bytes(nil), blob.PutOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if err := st.Delete(t.Context(), []string{"a", "b", "absent"}); err != nil {
				t.Fatal(err)
			}
			if _, err := st.Stat(t.Context(), "b"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: deleted, and there: %v", code, err)
			}
		}
		if n := w.count("POST delete"); n != 1 {
			t.Errorf("%s: tried %d batches", code, n)
		}
	}
}

// Keys that fail in a batch are told one by one.
func TestDeleteErrors(t *testing.T) {
	d := alone(t, func(req *http.Request) (*http.Response, error) {
		return answered(req, 200, `<DeleteResult><Error><Key>p/b</Key><Code>AccessDenied</Code></Error><Error><Key>p/c</Key><Code>InternalError</Code></Error><Error><Key>p/d</Key><Code>NoSuchKey</Code></Error></DeleteResult>`), nil
	})
	err := d.Delete(t.Context(), []string{"a", "b", "c", "d"})
	de, ok := errors.AsType[*blob.DeleteError](err)
	if !ok || len(de.Errors) != 2 || !errors.Is(de.Errors["b"], fs.ErrPermission) || !blob.IsRetriable(de.Errors["c"]) {
		t.Errorf("%v", err)
	}
}

// An error of a key that nobody asked for is no success of those that were.
func TestDeleteErrorOfUnknownKey(t *testing.T) {
	d := alone(t, func(req *http.Request) (*http.Response, error) {
		return answered(req, 200, `<DeleteResult><Error><Code>InternalError</Code></Error></DeleteResult>`), nil
	})
	if err := d.Delete(t.Context(), []string{"a", "b"}); !blob.IsRetriable(err) {
		t.Errorf("%v", err)
	}
}

// A listing of versions goes on where the store says, in its encoding, and never in circles.
func TestVersionsGoOn(t *testing.T) {
	var asked []string
	next := "p%2Fodd%20key"
	d := alone(t, func(req *http.Request) (*http.Response, error) {
		q := req.URL.Query()
		if !q.Has("versions") {
			return answered(req, 404, failure("NoSuchKey", "")), nil
		}
		asked = append(asked, q.Get("key-marker"))
		if len(asked) > 1 {
			return answered(req, 200, `<ListVersionsResult><IsTruncated>false</IsTruncated></ListVersionsResult>`), nil
		}
		return answered(req, 200, `<ListVersionsResult><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextKeyMarker>`+next+`</NextKeyMarker></ListVersionsResult>`), nil
	})
	if _, err := d.hiddenVersion(t.Context(), "odd key"); err != nil || len(asked) != 2 || asked[1] != "p/odd key" {
		t.Errorf("asked from %q, %v", asked, err)
	}
	asked, next = nil, ""
	if _, err := d.hiddenVersion(t.Context(), "odd key"); !blob.IsRetriable(err) {
		t.Errorf("a listing without an end: %v", err)
	}
}

// A certificate is trusted because of the environment, because of the URL, or not at all.
func TestCertificates(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	bucket := s.Bucket()
	upstream, err := url.Parse(s.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewUnstartedServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host = upstream.Scheme, upstream.Host
		r.Out.Host = r.In.Host
	}})
	front.Config.ErrorLog = log.New(io.Discard, "", 0)
	front.StartTLS()
	defer front.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	get := func(caFile string) error {
		d, err := Open(t.Context(), bucket, &Options{Endpoint: front.URL, Region: s.Region, CAFile: caFile, Checksums: WhenSupported})
		if err != nil {
			return err
		}
		defer d.Close()
		return d.Put(t.Context(), "k", blob.Bytes([]byte("v")), blob.PutOptions{})
	}
	if err := get(""); err == nil || blob.IsRetriable(err) {
		t.Errorf("an unknown certificate: %v", err)
	}
	if err := get(ca); err != nil {
		t.Errorf("trusted by the URL: %v", err)
	}
	if err := get(ca + "-absent"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
	t.Setenv("AWS_CA_BUNDLE", ca)
	if err := get(""); err != nil {
		t.Errorf("trusted by $AWS_CA_BUNDLE: %v", err)
	}
}

// Without credentials there is a clear end, and anonymous access needs none.
func TestCredentials(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	bucket := s.Bucket()
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	_, err := open(t, s, bucket, Options{}).Get(t.Context(), "k", 0, -1)
	if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "no credentials") {
		t.Errorf("no credentials: %v", err)
	}
	_, err = open(t, s, bucket, Options{Anonymous: true}).Get(t.Context(), "k", 0, -1)
	meaning{is: fs.ErrPermission, text: "s3:GetObject"}.check(t, err)

	t.Setenv("AWS_ACCESS_KEY_ID", s.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong")
	_, err = open(t, s, bucket, Options{}).Get(t.Context(), "k", 0, -1)
	meaning{is: fs.ErrPermission, text: "does not accept the credentials"}.check(t, err)
	t.Setenv("AWS_ACCESS_KEY_ID", "AKNOBODY")
	_, err = open(t, s, bucket, Options{}).Stat(t.Context(), "k")
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an unknown user found an object absent: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := open(t, s, bucket, Options{}).Now(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
