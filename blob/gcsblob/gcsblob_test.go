package gcsblob

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/internal/blobservers"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// The client library's metrics keep one for as long as the process lives.
		goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start"),
		// It asks whether this machine is one of Google's, and keeps that connection for a
		// minute if anything answers.
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
}

// open opens a bucket at an emulator.
func open(t testing.TB, endpoint, bucket string, opts Options) *Driver {
	t.Helper()
	opts.Endpoint, opts.Anonymous = endpoint, true
	d, err := Open(context.Background(), bucket, &opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConformance(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.GCS(t)
	blobtest.Run(t, func(t *testing.T) blob.Driver {
		return open(t, s.Endpoint, s.Bucket(), Options{Prefix: "some/prefix"})
	}, &blobtest.Options{Many: 3203}) // the emulator's listings take ever longer
}

func TestServer(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.GCS(t)
	bucket := s.Bucket()
	blobtest.RunServer(t, blobtest.Server{
		Addr: s.Addr,
		Open: func(t *testing.T, addr string) blob.Driver {
			return open(t, "http://"+addr, bucket, Options{})
		},
		Kill: s.Kill,
		Restart: func() {
			s.Restart()
			s.CreateBucket(bucket)
		},
		Forgets: true,
		Large:   12 << 20,
	})
}
