//go:build !linux

package source

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"
)

var errPlatform = fmt.Errorf("%w on %s", ErrUnsupported, runtime.GOOS)

// Freeze is not supported on this operating system.
func (d *dir) Freeze(context.Context) (Image, error) {
	return nil, fmt.Errorf("freeze %s: %w", d.path, errPlatform)
}

// Freeze is not supported on this operating system.
func (f *fromFunc) Freeze(context.Context) (Image, error) {
	return nil, fmt.Errorf("freeze: %w", errPlatform)
}

type volume struct{ device uint64 }

func volumeOf(string) (volume, bool)                 { return volume{}, false }
func (v volume) scope(string) ([32]byte, error)      { return [32]byte{}, errPlatform }
func newProbe(uint64, ...string) *probe              { return &probe{} }
func locked(dir string, f func() error) error        { return f() }
func (p *probe) now() (Timespec, error)              { return Timespec{}, errPlatform }
func (p *probe) close() error                        { return nil }
func (p *probe) granularity() (time.Duration, error) { return 0, errPlatform }

func (p *probe) until(context.Context, Timespec) (Timespec, error) {
	return Timespec{}, errors.ErrUnsupported
}

type probe struct{}

// OpenView is not supported on this operating system.
func OpenView(v View) (Image, error) {
	return nil, fmt.Errorf("freeze %s: %w", v.Path, errPlatform)
}
