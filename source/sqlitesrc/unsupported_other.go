//go:build !linux

package sqlitesrc

import (
	"context"
	"fmt"
	"runtime"

	"github.com/snapferry/snapferry/source"
)

// Freeze is not supported on this operating system.
func (s *sqlite) Freeze(context.Context) (source.Image, error) {
	return nil, fmt.Errorf("freeze %s: %w on %s", s.path, source.ErrUnsupported, runtime.GOOS)
}
