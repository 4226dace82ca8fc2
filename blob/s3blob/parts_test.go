package s3blob

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/blobservers"
)

// What can happen to the requests of one body in parts, and how many uploads it takes then.
func TestPartsInTrouble(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	type hook = func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error)
	tests := map[string]struct {
		uploads int
		spoil   hook
	}{
		"nothing": {1, nil},
		"the answer to a part is lost": {1, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "PUT uploadId" && n == 0 {
				return lose(send)
			}
			return send()
		}},
		"a part is refused for now": {1, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "PUT uploadId" && n < 2 {
				return answered(req, 500, failure("InternalError", "We encountered an internal error.")), nil
			}
			return send()
		}},
		"the store wants fewer requests": {2, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "PUT uploadId" && n == 0 {
				return answered(req, 503, failure("SlowDown", "Please reduce your request rate.")), nil
			}
			return send()
		}},
		"the answer to the last step is lost": {1, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "POST uploadId" {
				return lose(send)
			}
			return send()
		}},
		"the last step was done before": {1, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "POST uploadId" {
				if _, err := lose(send); err != errLost {
					return nil, err
				}
				return answered(req, 404, failure("NoSuchUpload", "The specified upload does not exist.")), nil
			}
			return send()
		}},
		"an error under a status of success": {2, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "POST uploadId" && n == 0 {
				return answered(req, 200, failure("InternalError", "We encountered an internal error.")), nil
			}
			return send()
		}},
		"success without an ETag": {2, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "POST uploadId" && n == 0 {
				return answered(req, 200, `<?xml version="1.0"?><CompleteMultipartUploadResult></CompleteMultipartUploadResult>`), nil
			}
			return send()
		}},
		"success, and nothing there": {2, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "POST uploadId" && n == 0 {
				return answered(req, 200, `<?xml version="1.0"?><CompleteMultipartUploadResult><ETag>"x-3"</ETag></CompleteMultipartUploadResult>`), nil
			}
			return send()
		}},
		"somebody aborted it": {2, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
			if op == "PUT uploadId" && n == 1 {
				return answered(req, 404, failure("NoSuchUpload", "The specified upload does not exist.")), nil
			}
			return send()
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			opts, w := spoiled(manyParts, tt.spoil)
			d := open(t, s, s.Bucket(), opts)
			st := blob.New(d, &blob.Options{Retry: blob.Retry{First: time.Millisecond, Max: time.Millisecond}})
			defer st.Close()
			data := big()
			if err := st.Put(t.Context(), "t/k", blob.Bytes(data), blob.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			wantObject(t, st, "t/k", data)
			if n := w.count("POST uploads"); n != tt.uploads {
				t.Errorf("%d uploads were begun, want %d", n, tt.uploads)
			}
			wantNoUploads(t, d)
		})
	}
}

// A put in parts that is cancelled or whose body breaks leaves neither object nor parts (I2),
// and its memory goes back.
func TestPartsGivenUp(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	d := open(t, s, s.Bucket(), manyParts)
	defer d.Close()
	data := big()
	broken := errors.New("the disk broke")
	ctx, cancel := context.WithCancel(t.Context())
	for name, body := range map[string]struct {
		ctx  context.Context
		then func() error
		want error
	}{
		"cancelled": {ctx, func() error { cancel(); return nil }, context.Canceled},
		"broken":    {t.Context(), func() error { return broken }, broken},
	} {
		half := io.MultiReader(bytes.NewReader(data[:len(data)/2]), hook(body.then), bytes.NewReader(data[len(data)/2:]))
		err := d.Put(body.ctx, "t/k", blob.Body{Size: int64(len(data)), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(struct{ io.Reader }{half}), nil
		}}, blob.PutOptions{})
		if !errors.Is(err, body.want) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := d.Stat(t.Context(), "t/k"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the object is there: %v", name, err)
		}
		wantNoUploads(t, d)
		if !d.buffers.budget.TryAcquire(manyParts.Buffers) {
			t.Fatalf("%s: memory was not given back", name)
		}
		d.buffers.budget.Release(manyParts.Buffers)
	}
}

// hook is a reader of nothing that does something.
type hook func() error

func (h hook) Read([]byte) (int, error) {
	if err := h(); err != nil {
		return 0, err
	}
	return 0, io.EOF
}

// Bodies wait for the memory of others, and not for more than there is (I10).
func TestBuffersBounded(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	var now, most atomic.Int64
	opts, _ := spoiled(manyParts, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
		if req.ContentLength > 1<<20 {
			n := now.Add(req.ContentLength)
			defer now.Add(-req.ContentLength)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
			}
		}
		return send()
	})
	st := newStore(t, s, opts)
	data := big()
	done := make(chan error)
	for _, key := range []string{"t/a", "t/b", "t/c", "t/d"} {
		go func() { done <- st.Put(t.Context(), key, blob.Bytes(data), blob.PutOptions{}) }()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	wantObject(t, st, "t/c", data)
	if n := most.Load(); n > manyParts.Buffers {
		t.Errorf("%d bytes were on their way at once, of %d that are allowed", n, manyParts.Buffers)
	}
}

// A condition goes with a body in one request, whatever SinglePut is, and never with parts.
func TestConditionalInOneRequest(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	opts, w := spoiled(manyParts, nil)
	st := newStore(t, s, opts)
	large := big()
	for _, want := range []error{nil, fs.ErrExist} {
		if err := st.Put(t.Context(), "t/k", blob.Bytes(large), blob.PutOptions{IfAbsent: true}); !errors.Is(err, want) {
			t.Errorf("a conditional put of %d bytes: %v, want %v", len(large), err, want)
		}
	}
	wantObject(t, st, "t/k", large)
	if n := w.count("POST uploads"); n != 0 {
		t.Errorf("%d uploads in parts", n)
	}
	err := st.Put(t.Context(), "t/l", blob.Bytes(make([]byte, defaultSinglePut+1)), blob.PutOptions{IfAbsent: true})
	if !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("a conditional put in parts: %v", err)
	}
	if _, err := st.Stat(t.Context(), "t/l"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is there: %v", err)
	}
}

func TestPartSize(t *testing.T) {
	const mib = 1 << 20
	for _, tt := range []struct{ want, body, size int64 }{
		{16 * mib, 100 * mib, 16 * mib},
		{5 * mib, 5 * mib * maxParts, 5 * mib},
		{5 * mib, 5*mib*maxParts + 1, 6 * mib},
		{5 * mib, 5 << 40, 525 * mib},
	} {
		if got := partSize(tt.want, tt.body); got != tt.size || (tt.body+got-1)/got > maxParts {
			t.Errorf("parts of %d bytes are wanted for %d: got %d, want %d", tt.want, tt.body, got, tt.size)
		}
	}
}

// Left-over uploads go when they are old by the store's clock; others stay, and so do those
// of other programs in the bucket.
func TestSweepUploads(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	bucket := s.Bucket()
	d := open(t, s, bucket, Options{Prefix: "mine"})
	other := open(t, s, bucket, Options{Prefix: "other"})
	defer d.Close()
	defer other.Close()
	for _, left := range []struct {
		d   *Driver
		key string
	}{{d, "t/a b+c/1"}, {d, "t/x/2"}, {d, "foreign"}, {other, "t/x/2"}} {
		p := &parts{driver: left.d, key: left.key, token: newToken()}
		if err := p.begin(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := d.SweepTemp(t.Context()); n != 0 || err != nil {
		t.Errorf("swept %d young uploads, %v", n, err)
	}
	if n, err := d.sweepUploads(t.Context(), -time.Hour); n != 2 || err != nil {
		t.Errorf("swept %d old uploads, %v, want 2", n, err)
	}
	if n, err := other.sweepUploads(t.Context(), -time.Hour); n != 1 || err != nil {
		t.Errorf("%d of the other prefix were there, %v, want 1", n, err)
	}
}
