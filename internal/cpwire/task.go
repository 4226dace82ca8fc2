package cpwire

import (
	"encoding/hex"
	"fmt"
	"io/fs"
	"time"
)

// Limits of the service.
const (
	// MaxName is the greatest length in bytes of a job or task name.
	MaxName = 128
	// MaxBody is the greatest size in bytes of an entry.
	MaxBody = 64 << 10
	// MaxBatch is how many appends one request may hold.
	MaxBatch = 1024
	// MaxRequest is the greatest size in bytes of the body of one request.
	MaxRequest = 1 << 20
	// KeptBodies is how many of a task's newest entries are kept whole.
	KeptBodies = 64
	// KeptRecords is how many of a task's newest entries are known by slot, nonce and
	// digest, so that a repeated append gets the answer of the first one.
	KeptRecords = 1024
)

// BenchJob is the job under which measurements append. A job whose name starts with a dot
// is no task of a repository, and drivers of package checkpoint do not list it.
const BenchJob = ".bench"

// Task names a log.
type Task struct {
	Job, Name string
}

// String returns "job/name".
func (t Task) String() string { return t.Job + "/" + t.Name }

// Validate returns an error that wraps fs.ErrInvalid unless both names are 1 to MaxName
// bytes of letters, digits, '.', '_' and '-', and the task's does not start with a dot.
func (t Task) Validate() error {
	if !validName(t.Job) || !validName(t.Name) || t.Name[0] == '.' || dots(t.Job) {
		return fmt.Errorf("task %.300q: %w", t.String(), fs.ErrInvalid)
	}
	return nil
}

func validName[S string | []byte](s S) bool {
	if len(s) == 0 || len(s) > MaxName {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

// Digest is the BLAKE3-256 of an entry's body.
type Digest [32]byte

// String returns 64 lower-case hex digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// IsZero reports whether d is no digest at all, as before the first entry.
func (d Digest) IsZero() bool { return d == Digest{} }

// ParseDigest reads what Digest.String wrote.
func ParseDigest(s string) (d Digest, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(d) {
		return Digest{}, fmt.Errorf("digest %.80q: %w", s, fs.ErrInvalid)
	}
	copy(d[:], b)
	return d, nil
}

// Nonce tells the tries of one append from every other append.
type Nonce [16]byte

func parseNonce(s string) (n Nonce, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(n) {
		return Nonce{}, fmt.Errorf("nonce %.40q: %w", s, fs.ErrInvalid)
	}
	copy(n[:], b)
	return n, nil
}

// Append asks for an entry at Slot, which is one more than the head's slot, in a log whose
// head has the digest Prev.
type Append struct {
	Task  Task
	Slot  uint64 // 1 for the first entry
	Prev  Digest // of the entry at Slot-1; zero at slot 1
	Nonce Nonce
	Body  []byte // opaque; must not change until the answer is there
}

// Status says what became of an Append.
type Status uint8

// The statuses. Only the first two mean that the entry is in the log.
const (
	Appended  Status = 1 // it is in the log now
	Known     Status = 2 // it was in the log before: an earlier try had come through
	Conflict  Status = 3 // its slot belongs to another entry
	NotOnHead Status = 4 // it is not built on the head: a slot is left out or Prev is another
	Forgotten Status = 5 // its slot is too far back to say whether it is in the log
)

// String returns the word for the status.
func (s Status) String() string {
	words := [...]string{"", "appended", "known", "conflict", "not on head", "forgotten"}
	if int(s) < len(words) && s > 0 {
		return words[s]
	}
	return fmt.Sprintf("status %d", uint8(s))
}

// InLog reports whether the entry is in the log.
func (s Status) InLog() bool { return s == Appended || s == Known }

// Result answers an Append. Slot, Digest and Stored are those of the entry if it is in the
// log, else of the head, with slot 0 for an empty log.
type Result struct {
	Status Status
	Slot   uint64
	Digest Digest
	Stored time.Time // when the leader took the entry, by its clock
}

// Entry is an entry as kept.
type Entry struct {
	Slot   uint64
	Digest Digest
	Nonce  Nonce
	Stored time.Time
	Body   []byte // nil where only the record is kept or was asked for
}
