package checkpoint

import (
	"fmt"
	"io/fs"
)

// MaxNameLength is the greatest length in bytes of a job, task or store name.
const MaxNameLength = 128

// TaskID names a task: one owner of state within a job.
type TaskID struct {
	Job, Task string
}

// String returns "job/task".
func (t TaskID) String() string { return t.Job + "/" + t.Task }

// Validate returns an error that wraps fs.ErrInvalid unless both names are valid.
func (t TaskID) Validate() error {
	if err := ValidName(t.Job); err != nil {
		return fmt.Errorf("job: %w", err)
	}
	if err := ValidName(t.Task); err != nil {
		return fmt.Errorf("task: %w", err)
	}
	return nil
}

// ValidName reports whether s can name a job, task or store: 1 to MaxNameLength bytes
// of letters, digits, '.', '_' and '-', the first one not a dot. The error wraps
// fs.ErrInvalid and says what is wrong.
func ValidName(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("name is empty: %w", fs.ErrInvalid)
	case len(s) > MaxNameLength:
		return fmt.Errorf("name %.20q... has %d bytes, at most %d are allowed: %w", s, len(s), MaxNameLength, fs.ErrInvalid)
	case s[0] == '.':
		return fmt.Errorf("name %q starts with a dot: %w", s, fs.ErrInvalid)
	}
	for i := range len(s) {
		if !nameByte(s[i]) {
			return fmt.Errorf("name %q has byte %q, allowed are letters, digits and . _ -: %w", s, s[i], fs.ErrInvalid)
		}
	}
	return nil
}

func nameByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-'
}
