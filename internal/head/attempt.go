package head

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// NoOwner is the ordinal of blobs that somebody who does not own the task writes:
// segments of a long head (P1).
const NoOwner = math.MaxUint32

// Attempt is one upload. Every blob it writes lies under its own prefix, so that no
// two writers ever write the same key.
type Attempt struct {
	Epoch   uint64
	Ordinal uint32
	Random  string // 16 hex digits
}

// NewAttempt returns an attempt that nobody else has.
func NewAttempt(epoch uint64, ordinal uint32) Attempt {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return Attempt{epoch, ordinal, hex.EncodeToString(b[:])}
}

// String gives EPOCH-ORDINAL-RANDOM in fixed-width hex: attempts sort by age as text.
func (a Attempt) String() string { return fmt.Sprintf("%016x-%08x-%s", a.Epoch, a.Ordinal, a.Random) }

// ParseAttempt reads what String writes.
func ParseAttempt(s string) (Attempt, error) {
	bad := func() (Attempt, error) {
		return Attempt{}, fmt.Errorf("%w: %q is not an attempt", sentinel.Corrupt, s)
	}
	f := strings.Split(s, "-")
	if len(f) != 3 {
		return bad()
	}
	epoch, err1 := strconv.ParseUint(f[0], 16, 64)
	ordinal, err2 := strconv.ParseUint(f[1], 16, 32)
	a := Attempt{epoch, uint32(ordinal), f[2]}
	if err1 != nil || err2 != nil || a.String() != s || len(a.Random) != 16 {
		return bad()
	}
	return a, nil
}
