package fsblob

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
)

// The test binary is also the processes of some tests.
func TestMain(m *testing.M) {
	if child := os.Getenv(childEnv); child != "" {
		os.Exit(runChild(child))
	}
	goleak.VerifyTestMain(m)
}

// modes are the two ways of writing a file.
var modes = map[string]Options{"unnamed": {}, "named": {named: true}}

func eachMode(t *testing.T, f func(t *testing.T, opts Options)) {
	for name, opts := range modes {
		t.Run(name, func(t *testing.T) { f(t, opts) })
	}
}

func open(t testing.TB, dir string, opts Options) *Driver {
	t.Helper()
	d, err := Open(dir, &opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConformance(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		blobtest.Run(t, func(t *testing.T) blob.Driver { return open(t, t.TempDir(), opts) }, nil)
	})
}

func Benchmark(b *testing.B) {
	blobtest.Benchmark(b, func(b *testing.B) blob.Driver { return open(b, b.TempDir(), Options{}) })
}
