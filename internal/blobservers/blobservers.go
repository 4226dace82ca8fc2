// Package blobservers starts real object stores for tests: the Versity S3 gateway, SeaweedFS,
// fake-gcs-server and Azurite, and a proxy that spoils connections.
//
// It hides how they are built, started and ended. Each call starts a process of its own on
// free ports, waits until it answers, and ends it with the test; when the test's process is
// killed, the kernel ends the server. Programs come from the small modules beside this file,
// which pin versions and sums, and stay in the build cache of Go, so the first start of each
// builds for minutes and later ones take a moment. Azurite comes from npm, into the
// user's cache directory.
//
// Only the Versity gateway and the proxy are cheap enough for every run; tests that use another
// one call Long first.
package blobservers

import (
	"context"
	"os"
)

// T is what a server needs of a testing.TB. It is named here so that programs which measure
// can start servers too.
type T interface {
	// Helper marks the caller as one.
	Helper()
	// Cleanup is called when the test has ended, the last one first.
	Cleanup(func())
	// Context ends just before the cleanups.
	Context() context.Context
	// TempDir makes a directory that goes with the test.
	TempDir() string
	// Failed tells whether the test has failed.
	Failed() bool
	// Logf tells something.
	Logf(format string, args ...any)
	// Errorf fails the test.
	Errorf(format string, args ...any)
	// Fatalf fails the test and ends it.
	Fatalf(format string, args ...any)
	// Skipf ends the test without a result.
	Skipf(format string, args ...any)
}

// Long skips a test that needs an expensive server unless SNAPFERRY_LONG is set.
func Long(t T) {
	t.Helper()
	if os.Getenv("SNAPFERRY_LONG") == "" {
		t.Skipf("uses a server that takes long to build; set SNAPFERRY_LONG=1")
	}
}
