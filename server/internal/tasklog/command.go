package tasklog

import (
	"encoding/binary"
	"errors"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// A command is a header and what its kind wants:
//
//	version 1 | kind | leader's time, ns since 1970 (8 bytes, little endian)
//	appends:  how many (2) | items as in a request
//	trim:     task
const (
	commandVersion = 1
	commandHeader  = 1 + 1 + 8

	kindAppends = 1
	kindTrim    = 2
)

// The first byte of a command's result; nothing follows but after done.
const (
	done        = 0
	unsupported = 1
	malformed   = 2
)

// Conditions that a result tells.
var (
	// ErrUnsupported says that the members do not know the command.
	ErrUnsupported = errors.New("command of a newer program")
	// ErrMalformed says that the command is damaged or breaks a rule.
	ErrMalformed = errors.New("malformed command")
)

// BeginAppends begins a command with n appends; their items follow.
func BeginAppends(b []byte, stamp int64, n int) []byte {
	return binary.LittleEndian.AppendUint16(header(b, kindAppends, stamp), uint16(n))
}

// EncodeTrim returns the command that removes what a task needs no longer.
func EncodeTrim(stamp int64, task cpwire.Task) []byte {
	return cpwire.AppendTask(header(nil, kindTrim, stamp), task)
}

func header(b []byte, kind byte, stamp int64) []byte {
	return binary.LittleEndian.AppendUint64(append(b, commandVersion, kind), uint64(stamp))
}

// DecodeResult returns what follows in the result of a command that was done: for appends
// one encoded cpwire.Result each.
func DecodeResult(b []byte) ([]byte, error) {
	switch {
	case len(b) > 0 && b[0] == done:
		return b[1:], nil
	case len(b) == 1 && b[0] == unsupported:
		return nil, ErrUnsupported
	}
	return nil, ErrMalformed
}
