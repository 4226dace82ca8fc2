// Package frame wraps the small text objects of a repository (log entries,
// checkpoint blobs, bind, snapferry.json) so that truncation, damage and a newer
// format are recognised before anything inside is believed.
//
// A framed object is one header line and the payload:
//
//	snapferry KIND VERSION LENGTH BLAKE3-256-HEX\n
//	payload
//
// The digest covers the payload; the header is bound by Digest, which covers all
// bytes and is how one log entry names the entry before it.
package frame

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/internal/sentinel"
)

const (
	magic     = "snapferry"
	maxHeader = 160
)

// Encode frames a payload. kind must be a single word.
func Encode(kind string, version int, payload []byte) []byte {
	sum := blake3.Sum256(payload)
	b := fmt.Appendf(make([]byte, 0, maxHeader+len(payload)), "%s %s %d %d %x\n", magic, kind, version, len(payload), sum)
	return append(b, payload...)
}

// Decode returns the payload of a framed object of this kind. A frame that is
// damaged, truncated or of another kind is sentinel.Corrupt; one of a version above
// maxVersion is sentinel.Unsupported. The payload aliases data.
func Decode(kind string, maxVersion int, data []byte) ([]byte, error) {
	head, _, ok := bytes.Cut(data[:min(len(data), maxHeader)], []byte("\n"))
	if !ok {
		return nil, fmt.Errorf("%w: no %s header", sentinel.Corrupt, kind)
	}
	payload := data[len(head)+1:]
	f := bytes.Split(head, []byte(" "))
	if len(f) != 5 || string(f[0]) != magic || string(f[1]) != kind {
		return nil, fmt.Errorf("%w: not a %s", sentinel.Corrupt, kind)
	}
	version, err := strconv.Atoi(string(f[2]))
	if err != nil || version < 1 || strconv.Itoa(version) != string(f[2]) {
		return nil, fmt.Errorf("%w: %s version %q", sentinel.Corrupt, kind, f[2])
	}
	if version > maxVersion {
		return nil, fmt.Errorf("%w: %s has format version %d, this program reads up to %d; use a newer one", sentinel.Unsupported, kind, version, maxVersion)
	}
	if string(f[3]) != strconv.Itoa(len(payload)) {
		return nil, fmt.Errorf("%w: %s has %d bytes, its header says %s", sentinel.Corrupt, kind, len(payload), f[3])
	}
	if sum := blake3.Sum256(payload); hex.EncodeToString(sum[:]) != string(f[4]) {
		return nil, fmt.Errorf("%w: %s does not match its digest", sentinel.Corrupt, kind)
	}
	return payload, nil
}

// Digest returns the hex BLAKE3-256 of a whole framed object.
func Digest(data []byte) string {
	sum := blake3.Sum256(data)
	return hex.EncodeToString(sum[:])
}
