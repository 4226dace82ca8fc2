package checkpoint

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/snapferry/snapferry/internal/frame"
)

// Kind says what an entry does to its task.
type Kind string

// The kinds of P1. Claim alone has a meaning in this package: it starts an epoch.
const (
	Claim   Kind = "claim"   // a new owner, epoch+1
	Commit  Kind = "commit"  // a checkpoint is published
	Prepare Kind = "prepare" // a checkpoint waits for the caller's own publishing
	Confirm Kind = "confirm" // the caller has published it
	Partial Kind = "partial" // what a long upload has sent so far is kept
	Void    Kind = "void"    // an attempt can commit no more
	Trim    Kind = "trim"    // checkpoints are dropped
	Hold    Kind = "hold"    // a checkpoint is pinned
	Release Kind = "release" // a pin is gone
	Drop    Kind = "drop"    // the task is dropped
)

var kinds = []Kind{Claim, Commit, Prepare, Confirm, Partial, Void, Trim, Hold, Release, Drop}

// Known reports whether this program knows what the kind means. A task whose head is
// of an unknown kind can be read but not written.
func (k Kind) Known() bool { return slices.Contains(kinds, k) }

// Nonce tells the tries of one entry from every other entry.
type Nonce [16]byte

// NewNonce returns a random nonce.
func NewNonce() Nonce {
	var n Nonce
	rand.Read(n[:]) // never fails: it ends the process instead
	return n
}

// ParseNonce reads what Nonce.String wrote.
func ParseNonce(s string) (Nonce, error) {
	var n Nonce
	if b, err := hex.DecodeString(s); err != nil || len(b) != len(n) || hex.EncodeToString(b) != s {
		return Nonce{}, fmt.Errorf("nonce %.40q: %w", s, fs.ErrInvalid)
	} else {
		copy(n[:], b)
	}
	return n, nil
}

// String returns 32 lower-case hex digits.
func (n Nonce) String() string { return hex.EncodeToString(n[:]) }

// IsZero reports whether n is no nonce at all.
func (n Nonce) IsZero() bool { return n == Nonce{} }

// Entry is one entry of a task's log. Entries are write-once: nobody changes one that
// was returned by this package.
type Entry struct {
	Kind  Kind
	Slot  uint64 // 1 for the first entry, then one more each
	Prev  string // digest of the entry before, "" at slot 1
	Nonce Nonce
	Epoch uint64    // the owner's fencing token
	Time  time.Time // UTC; a label, never below the time of the entry before
	Body  []byte    // the head: one JSON value, opaque here; nil for none

	// Digest is the hex BLAKE3-256 of the entry as stored. It is set when the entry
	// was read or appended.
	Digest string
	// Stored is when the store received the entry by its own clock; zero if unknown.
	Stored time.Time
}

// MaxEntrySize is the greatest size in bytes of an entry as stored.
const MaxEntrySize = 64 << 10

const (
	frameKind    = "entry"
	frameVersion = 1
)

// wireEntry is the payload without its last field, head, which is put in as it stands
// because encoding/json would reformat it.
type wireEntry struct {
	Kind  Kind   `json:"kind"`
	Slot  uint64 `json:"slot"`
	Prev  string `json:"prev"`
	Nonce string `json:"nonce"`
	Epoch uint64 `json:"epoch"`
	Time  string `json:"time"`
}

// Encode returns the entry as it is stored and sets e.Digest. An entry that breaks a
// rule of the format is an error that wraps fs.ErrInvalid.
func Encode(e *Entry) ([]byte, error) {
	if err := e.validate(); err != nil {
		return nil, err
	}
	payload, err := json.Marshal(wireEntry{
		Kind: e.Kind, Slot: e.Slot, Prev: e.Prev, Nonce: e.Nonce.String(), Epoch: e.Epoch,
		Time: e.Time.UTC().Format(time.RFC3339Nano),
	})
	if err != nil {
		return nil, err
	}
	if len(e.Body) > 0 {
		payload = append(append(payload[:len(payload)-1], `,"head":`...), e.Body...)
		payload = append(payload, '}')
		if !json.Valid(payload) { // nested too deep
			return nil, fmt.Errorf("body cannot be stored: %w", fs.ErrInvalid)
		}
	}

	data := frame.Encode(frameKind, frameVersion, payload)
	if len(data) > MaxEntrySize {
		return nil, fmt.Errorf("entry has %d bytes, at most %d are allowed: %w", len(data), MaxEntrySize, fs.ErrInvalid)
	}
	e.Digest = frame.Digest(data)
	return data, nil
}

// Decode reads what Encode wrote. Damage is ErrCorrupt, a newer format ErrUnsupported.
// Fields it does not know are ignored.
func Decode(data []byte) (*Entry, error) {
	if len(data) > MaxEntrySize {
		return nil, fmt.Errorf("%w: entry has more than %d bytes", ErrCorrupt, MaxEntrySize)
	}
	payload, err := frame.Decode(frameKind, frameVersion, data)
	if err != nil {
		return nil, err
	}
	e, err := decodePayload(payload)
	if err == nil {
		err = e.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: entry: %v", ErrCorrupt, err)
	}
	e.Digest = frame.Digest(data)
	return e, nil
}

func decodePayload(payload []byte) (*Entry, error) {
	var w struct {
		wireEntry
		Head json.RawMessage `json:"head"`
	}
	if err := json.Unmarshal(payload, &w); err != nil {
		return nil, err
	}
	nonce, err := ParseNonce(w.Nonce)
	if err != nil {
		return nil, err
	}
	stamp, err := time.Parse(time.RFC3339Nano, w.Time)
	if err != nil {
		return nil, err
	}
	return &Entry{
		Kind: w.Kind, Slot: w.Slot, Prev: w.Prev, Nonce: nonce, Epoch: w.Epoch,
		Time: stamp.UTC(), Body: w.Head,
	}, nil
}

// validate holds the rules that both sides of the format share. A kind only has to
// look like one: whether it is known matters to writers (Log.Append).
func (e *Entry) validate() error {
	switch {
	case ValidName(string(e.Kind)) != nil:
		return fmt.Errorf("kind %.40q: %w", e.Kind, fs.ErrInvalid)
	case e.Slot == 0:
		return fmt.Errorf("slot 0: %w", fs.ErrInvalid)
	case (e.Slot == 1) != (e.Prev == ""), e.Prev != "" && !isDigest(e.Prev):
		return fmt.Errorf("slot %d has predecessor %.80q: %w", e.Slot, e.Prev, fs.ErrInvalid)
	case e.Nonce.IsZero():
		return fmt.Errorf("no nonce: %w", fs.ErrInvalid)
	case e.Epoch == 0:
		return fmt.Errorf("epoch 0: %w", fs.ErrInvalid)
	case e.Time.UTC().Year() < 1 || e.Time.UTC().Year() > 9999:
		return fmt.Errorf("time out of range: %w", fs.ErrInvalid)
	case len(e.Body) > 0 && !json.Valid(e.Body):
		return fmt.Errorf("body is not JSON: %w", fs.ErrInvalid)
	}
	return nil
}

func isDigest(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == 32 && hex.EncodeToString(b) == s
}
