package s3blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
)

// alone is a driver whose requests all get one answer.
func alone(t *testing.T, answer func(*http.Request) (*http.Response, error)) *Driver {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", "ak")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "sk")
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
	opts, _ := spoiled(Options{Region: "eu-west-1", Prefix: "p"}, func(_ string, _ int, req *http.Request, _ func() (*http.Response, error)) (*http.Response, error) {
		return answer(req)
	})
	d, err := Open(t.Context(), "bucket", &opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// meaning is what callers branch on.
type meaning struct {
	is        error // nil: none of the named ones
	retriable bool
	throttled bool
	text      string
}

func (c meaning) check(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, e := range []error{fs.ErrNotExist, fs.ErrExist, fs.ErrPermission, blob.ErrUnsupported, blob.ErrCorrupt} {
		if want := e == c.is; errors.Is(err, e) != want {
			t.Errorf("errors.Is(%v, %v) is %v", err, e, !want)
		}
	}
	if blob.IsRetriable(err) != c.retriable || blob.IsThrottled(err) != c.throttled {
		t.Errorf("%v: retriable %v, throttled %v", err, blob.IsRetriable(err), blob.IsThrottled(err))
	}
	if !strings.Contains(err.Error(), c.text) {
		t.Errorf("%q does not say %q", err, c.text)
	}
	if strings.Contains(err.Error(), "operation error") {
		t.Errorf("%q tells of the SDK", err)
	}
}

// What a store answers to a put, a get and a list, and what it means.
func TestClasses(t *testing.T) {
	tests := []struct {
		status  int
		code    string
		message string
		want    meaning
	}{
		{404, "NoSuchKey", "", meaning{is: fs.ErrNotExist}},
		{404, "NoSuchBucket", "", meaning{text: "there is no bucket bucket"}},
		{412, "PreconditionFailed", "", meaning{is: fs.ErrExist}},
		{409, "ConditionalRequestConflict", "", meaning{retriable: true}},
		{409, "OperationAborted", "", meaning{retriable: true}},
		{403, "AccessDenied", "", meaning{is: fs.ErrPermission, text: "s3:"}},
		{403, "InvalidAccessKeyId", "", meaning{is: fs.ErrPermission, text: "does not accept the credentials"}},
		{403, "SignatureDoesNotMatch", "", meaning{is: fs.ErrPermission, text: "does not accept the credentials"}},
		{404, "XAdminUserNotFound", "", meaning{is: fs.ErrPermission, text: "does not accept the credentials"}},
		{404, "SomethingElse", "", meaning{text: "SomethingElse"}},
		{403, "RequestTimeTooSkewed", "", meaning{text: "set it"}},
		{503, "SlowDown", "", meaning{retriable: true, throttled: true}},
		{503, "", "", meaning{retriable: true, throttled: true}},
		{429, "TooManyRequests", "", meaning{retriable: true, throttled: true}},
		{500, "InternalError", "", meaning{retriable: true}},
		{502, "", "", meaning{retriable: true}},
		{400, "RequestTimeout", "", meaning{retriable: true}},
		{501, "NotImplemented", "", meaning{is: blob.ErrUnsupported}},
		{403, "InvalidObjectState", "", meaning{text: "thawed"}},
		{301, "PermanentRedirect", "", meaning{text: "region="}},
		{400, "AuthorizationHeaderMalformed", "the region 'eu-west-1' is wrong; expecting 'us-west-2'", meaning{text: "is in region us-west-2"}},
		{400, "InvalidRequest", "", meaning{text: "InvalidRequest"}},
		{507, "", "", meaning{text: "507"}},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.status, tt.code), func(t *testing.T) {
			d := alone(t, func(req *http.Request) (*http.Response, error) {
				if tt.code == "" {
					return answered(req, tt.status, ""), nil
				}
				return answered(req, tt.status, failure(tt.code, tt.message)), nil
			})
			tt.want.check(t, d.Put(t.Context(), "k", blob.Bytes([]byte("v")), blob.PutOptions{}))
			if r, err := d.Get(t.Context(), "k", 0, -1); r == nil {
				tt.want.check(t, err)
			}
			if tt.want.is == fs.ErrNotExist {
				return // a list has no absent object
			}
			for _, err := range d.List(t.Context(), "", "") {
				tt.want.check(t, err)
			}
		})
	}
}

// Connections that break are worth another try, and a cancelled request is what it is.
func TestNoAnswer(t *testing.T) {
	for _, cause := range []error{io.ErrUnexpectedEOF, io.EOF, errLost} {
		d := alone(t, func(*http.Request) (*http.Response, error) { return nil, cause })
		_, err := d.Stat(t.Context(), "k")
		meaning{retriable: true}.check(t, err)
		if !errors.Is(err, cause) {
			t.Errorf("%v hides its cause", err)
		}
	}
	plain := alone(t, func(*http.Request) (*http.Response, error) {
		return nil, errors.New("http: server gave HTTP response to HTTPS client")
	})
	if _, err := plain.Stat(t.Context(), "k"); blob.IsRetriable(err) || !strings.Contains(err.Error(), "endpoint=http://") {
		t.Errorf("no TLS: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	d := alone(t, func(req *http.Request) (*http.Response, error) {
		cancel()
		return nil, req.Context().Err()
	})
	if _, err := d.Stat(ctx, "k"); !errors.Is(err, context.Canceled) || blob.IsRetriable(err) {
		t.Errorf("cancelled: %v", err)
	}
}

// The difference of the clocks is told, both ways.
func TestSkew(t *testing.T) {
	for text, off := range map[string]time.Duration{"behind the store's": 2 * time.Hour, "ahead of the store's": -2 * time.Hour} {
		d := alone(t, func(req *http.Request) (*http.Response, error) {
			resp := answered(req, 403, failure("RequestTimeTooSkewed", ""))
			resp.Header.Set("Date", time.Now().Add(off).UTC().Format(http.TimeFormat))
			return resp, nil
		})
		_, err := d.Get(t.Context(), "k", 0, -1)
		meaning{text: text}.check(t, err)
		if !strings.Contains(err.Error(), "h0m") && !strings.Contains(err.Error(), "1h59m") {
			t.Errorf("%v does not tell the difference", err)
		}
	}
}

// The permission that lacks is named, with what it is needed for.
func TestMissingPermission(t *testing.T) {
	d := alone(t, func(req *http.Request) (*http.Response, error) {
		return answered(req, 403, failure("AccessDenied", "")), nil
	})
	_, getErr := d.Get(t.Context(), "k", 0, -1)
	_, sweepErr := d.SweepTemp(t.Context())
	for want, err := range map[string]error{
		"s3:GetObject on arn:aws:s3:::bucket/p/*":                getErr,
		"s3:PutObject on arn:aws:s3:::bucket/p/*":                d.Put(t.Context(), "k", blob.Bytes(nil), blob.PutOptions{}),
		"s3:DeleteObject on arn:aws:s3:::bucket/p/*":             d.Delete(t.Context(), []string{"k"}),
		"s3:ListBucketMultipartUploads on arn:aws:s3:::bucket: ": sweepErr,
	} {
		meaning{is: fs.ErrPermission, text: want}.check(t, err)
	}
}

// Who is asked for the time and refuses has told it.
func TestNowOfRefusal(t *testing.T) {
	at := time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC)
	d := alone(t, func(req *http.Request) (*http.Response, error) {
		resp := answered(req, 403, "")
		resp.Header.Set("Date", at.Format(http.TimeFormat))
		return resp, nil
	})
	if now, err := d.Now(t.Context()); err != nil || !now.Equal(at) {
		t.Errorf("%v, %v", now, err)
	}
}

// A bucket that is not there is not an absent object, which a HEAD alone cannot tell.
func TestStatWithoutBucket(t *testing.T) {
	d := alone(t, func(req *http.Request) (*http.Response, error) { return answered(req, 404, ""), nil })
	_, err := d.Stat(t.Context(), "k")
	meaning{text: "there is no bucket"}.check(t, err)
}

// Answers that are not what was asked for are never taken for the object.
func TestWrongRange(t *testing.T) {
	for _, tt := range []struct {
		status, length int
		contentRange   string
	}{
		{206, 4, "bytes 2-5/100"},
		{206, 4, "bytes 3-6/100"},
		{206, 5, "bytes 3-8/100"},
		{206, 5, "nonsense"},
		{200, 100, ""},
	} {
		d := alone(t, func(req *http.Request) (*http.Response, error) {
			resp := answered(req, tt.status, strings.Repeat("x", tt.length))
			resp.Header.Set("Content-Range", tt.contentRange)
			resp.Header.Set("Content-Length", fmt.Sprint(tt.length))
			return resp, nil
		})
		if _, err := d.Get(t.Context(), "k", 3, 5); err == nil {
			t.Errorf("asked for 5 bytes from 3 on, taken: %+v", tt)
		}
	}
}
