//go:build !linux

package place

import (
	"context"
	"fmt"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// durability has a meaning on Linux only.
type durability int

// told has a meaning on Linux only.
type told struct{}

// restore needs what only Linux has: directory descriptors that no path leaves, and the
// exchange of two directories in one step.
func restore(context.Context, []Store, *Options) (map[string]Report, error) {
	return nil, fmt.Errorf("restore: %w: only Linux", sentinel.Unsupported)
}

func unfinished(string) error { return nil }
