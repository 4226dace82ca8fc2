package blob

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxKey is the greatest length of a key in bytes; every store that we know takes it.
const MaxKey = 900

// ValidKey tells why a key is not one that every store can hold: it has 1 to MaxKey
// bytes of UTF-8 without NUL, in components between slashes that are neither empty nor
// "." nor "..".
func ValidKey(key string) error {
	switch {
	case key == "":
		return errors.New("invalid key: empty")
	case len(key) > MaxKey:
		return fmt.Errorf("invalid key: %d bytes, at most %d are allowed", len(key), MaxKey)
	case !utf8.ValidString(key) || strings.IndexByte(key, 0) >= 0:
		return fmt.Errorf("invalid key %q: not UTF-8 without NUL", key)
	}
	for c := range strings.SplitSeq(key, "/") {
		if c == "" || c == "." || c == ".." {
			return fmt.Errorf("invalid key %q: component %q", key, c)
		}
	}
	return nil
}
