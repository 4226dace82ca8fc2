package snapshot

import (
	"encoding/hex"
	"fmt"

	"github.com/zeebo/blake3"
)

// Digest is the BLAKE3-256 of some bytes.
type Digest [32]byte

// Sum returns the digest of p.
func Sum(p []byte) Digest { return blake3.Sum256(p) }

// ParseDigest reads what String writes. Only lower-case hex digits are accepted, so that
// a digest has one spelling.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	if len(s) != 2*len(d) {
		return Digest{}, fmt.Errorf("parse digest %.80q: %w: want %d hex digits", s, ErrCorrupt, 2*len(d))
	}
	if _, err := hex.Decode(d[:], []byte(s)); err != nil || d.String() != s {
		return Digest{}, fmt.Errorf("parse digest %q: %w: not lower-case hex", s, ErrCorrupt)
	}
	return d, nil
}

// String returns the digest as 64 lower-case hex digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// IsZero reports whether d is the zero value, which stands for "no digest".
func (d Digest) IsZero() bool { return d == Digest{} }

// AppendText appends what String returns.
func (d Digest) AppendText(b []byte) ([]byte, error) { return hex.AppendEncode(b, d[:]), nil }

// MarshalText returns what String returns.
func (d Digest) MarshalText() ([]byte, error) { return d.AppendText(nil) }

// UnmarshalText reads what MarshalText writes.
func (d *Digest) UnmarshalText(text []byte) error {
	parsed, err := ParseDigest(string(text))
	if err != nil {
		return err
	}
	*d = parsed
	return nil
}
