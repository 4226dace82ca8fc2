//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/snapferry/snapferry/internal/blobservers"
)

// host is the test that blobservers wants, for a program: it keeps servers running until
// close, and what would fail a test is an error of start or of close.
type host struct {
	ctx      context.Context
	dir      string // where temporary directories are made
	log      io.Writer
	cleanups []func()
	errs     []error
}

var _ blobservers.T = (*host)(nil)

// abandoned is what Fatalf and Skipf leave a start with.
type abandoned struct{ err error }

// start runs what starts servers.
func (h *host) start(serve func(blobservers.T)) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case abandoned:
			err = p.err
		default:
			panic(p)
		}
	}()
	serve(h)
	return nil
}

// close ends all servers and tells what went wrong with them.
func (h *host) close() error {
	for _, cleanup := range slices.Backward(h.cleanups) {
		cleanup()
	}
	h.cleanups = nil
	return errors.Join(h.errs...)
}

func (h *host) Helper() {}

func (h *host) Cleanup(f func()) { h.cleanups = append(h.cleanups, f) }

func (h *host) Context() context.Context { return h.ctx }

// TempDir makes a directory that goes with everything else below the host's.
func (h *host) TempDir() string {
	dir, err := os.MkdirTemp(h.dir, "server.")
	if err != nil {
		h.Fatalf("%v", err)
	}
	return dir
}

func (h *host) Failed() bool { return len(h.errs) > 0 }

func (h *host) Logf(format string, args ...any) { fmt.Fprintf(h.log, format+"\n", args...) }

func (h *host) Errorf(format string, args ...any) {
	h.errs = append(h.errs, fmt.Errorf(format, args...))
}

func (h *host) Fatalf(format string, args ...any) { panic(abandoned{fmt.Errorf(format, args...)}) }

func (h *host) Skipf(format string, args ...any) { h.Fatalf(format, args...) }
