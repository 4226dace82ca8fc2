package protocol

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/snapferry/snapferry/snapshot"
)

// ErrID is what ParseID wraps when a text is not an ID.
var ErrID = errors.New("not a snapshot id")

// idLength is the length of every ID in text.
const idLength = 16 + 1 + 16 + 1 + 2*len(snapshot.Digest{})

// String writes the ID as TERM-INDEX-DIGEST in lower-case hex of fixed width: it sorts as
// Compare orders the snapshots of one history, and may name a directory.
func (id ID) String() string {
	return fmt.Sprintf("%016x-%016x-%s", id.Term, id.Index, id.Digest)
}

// Short writes the ID for people: index, term, and the beginning of the digest.
func (id ID) Short() string {
	return fmt.Sprintf("%d@%d/%s", id.Index, id.Term, hex.EncodeToString(id.Digest[:4]))
}

// IsZero reports whether the ID names no snapshot.
func (id ID) IsZero() bool { return id == ID{} }

// Compare orders snapshots by index, then term, then digest. In one valid history the
// term never falls as the index grows, so a pair that the term would order the other way
// is a sign of a fork, which Contradicts finds, and not something to sort.
func (id ID) Compare(other ID) int {
	return cmp.Or(
		cmp.Compare(id.Index, other.Index),
		cmp.Compare(id.Term, other.Term),
		bytes.Compare(id.Digest[:], other.Digest[:]),
	)
}

// Contradicts reports whether the two cannot both belong to one history: two terms at one
// index, or a lower term at a higher index.
func (id ID) Contradicts(other ID) bool {
	if id.IsZero() || other.IsZero() {
		return false
	}
	if id.Index == other.Index {
		return id.Term != other.Term
	}
	return (id.Index < other.Index) != (id.Term <= other.Term) && id.Term != other.Term
}

// ParseID reads what String writes and nothing else, so one snapshot has one name.
func ParseID(s string) (ID, error) {
	bad := func(why string) (ID, error) {
		return ID{}, fmt.Errorf("parse snapshot id %.120q: %w: %s", s, ErrID, why)
	}
	parts := strings.Split(s, "-")
	if len(s) != idLength || len(parts) != 3 || len(parts[0]) != 16 || len(parts[1]) != 16 {
		return bad("want TERM-INDEX-DIGEST in hex")
	}
	term, err := strconv.ParseUint(parts[0], 16, 64)
	if err != nil {
		return bad("term")
	}
	index, err := strconv.ParseUint(parts[1], 16, 64)
	if err != nil {
		return bad("index")
	}
	digest, err := snapshot.ParseDigest(parts[2])
	if err != nil {
		return bad("digest")
	}
	id := ID{Term: term, Index: index, Digest: digest}
	if id.String() != s {
		return bad("not in lower case")
	}
	return id, nil
}

// MarshalText writes the ID as String does; no snapshot is the empty text.
func (id ID) MarshalText() ([]byte, error) {
	if id.IsZero() {
		return []byte{}, nil
	}
	return []byte(id.String()), nil
}

// UnmarshalText reads what MarshalText writes.
func (id *ID) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*id = ID{}
		return nil
	}
	parsed, err := ParseID(string(text))
	if err != nil {
		return err
	}
	*id = parsed
	return nil
}

// IsZero reports whether the lineage is unknown.
func (l Lineage) IsZero() bool { return l == Lineage{} }

// ID gives the snapshot's name for a manifest digest.
func (m Meta) ID(digest snapshot.Digest) ID {
	return ID{Term: m.Term, Index: m.Index, Digest: digest}
}
