package blobtest

import (
	"errors"
	"io/fs"

	"github.com/snapferry/snapferry/blob"
)

// Class names what a caller can tell of a driver's error: throttled, retriable, not exist,
// exist, permission, corrupt, unsupported, permanent, or nil.
func Class(err error) string {
	if err == nil {
		return "nil"
	}
	if blob.IsThrottled(err) {
		return "throttled"
	}
	if blob.IsRetriable(err) {
		return "retriable"
	}
	for name, is := range map[string]error{
		"not exist": fs.ErrNotExist, "exist": fs.ErrExist, "permission": fs.ErrPermission,
		"corrupt": blob.ErrCorrupt, "unsupported": blob.ErrUnsupported,
	} {
		if errors.Is(err, is) {
			return name
		}
	}
	return "permanent"
}
