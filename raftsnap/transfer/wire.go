package transfer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Prefix is what all paths of the HTTP interface begin with.
const Prefix = "/raftsnap/v1/"

// Malformed refuses a request that breaks a rule of the HTTP interface.
const Malformed protocol.RefusalKind = "malformed"

// transferHeader names the transfer for which a lease is held.
const transferHeader = "Snapferry-Transfer"

// Bounds of what is read before it is understood.
const (
	maxControl  = 64 << 10 // bytes of a control message or of a refusal
	maxTransfer = 128      // bytes of a transfer id
	maxExtents  = 4096     // extents of one request
	maxPieces   = 64 << 20 // bytes of the pieces of one request
	maxRequest  = 1 << 20  // bytes of a list of extents
)

// retryAfter is how many seconds somebody who was refused as busy is asked to wait.
const retryAfter = 1

// statuses are the HTTP statuses that refusals travel with. They are for people and
// proxies: a Client goes by the refusal alone.
var statuses = map[protocol.RefusalKind]int{
	protocol.NotLeader:    http.StatusMisdirectedRequest,
	protocol.StaleTerm:    http.StatusConflict,
	protocol.OtherGroup:   http.StatusForbidden,
	protocol.Busy:         http.StatusServiceUnavailable,
	protocol.NothingNewer: http.StatusNotFound,
	protocol.NotNeeded:    http.StatusConflict,
	protocol.Ahead:        http.StatusConflict,
	protocol.Forked:       http.StatusConflict,
	protocol.NoSpace:      http.StatusInsufficientStorage,
	protocol.Gone:         http.StatusGone,
	protocol.Closed:       http.StatusServiceUnavailable,
	Malformed:             http.StatusBadRequest,
}

// refusal makes a typed "no".
func refusal(kind protocol.RefusalKind, format string, args ...any) *protocol.Refusal {
	return &protocol.Refusal{Kind: kind, Text: fmt.Sprintf(format, args...)}
}

// asRefusal finds the refusal in err; an error of another kind is "busy", since the asker
// can do nothing but come again.
func asRefusal(err error) *protocol.Refusal {
	if r, ok := errors.AsType[*protocol.Refusal](err); ok {
		return r
	}
	return refusal(protocol.Busy, "%v", err)
}

// writeRefusal answers a request with a refusal.
func writeRefusal(w http.ResponseWriter, r *protocol.Refusal) {
	body, err := json.Marshal(r)
	if err != nil { // only a text that is no text could do that
		body = []byte(`{"kind":"busy"}`)
	}
	status, ok := statuses[r.Kind]
	if !ok {
		status = http.StatusConflict
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	if status == http.StatusServiceUnavailable {
		h.Set("Retry-After", strconv.Itoa(retryAfter))
	}
	w.WriteHeader(status)
	_, _ = w.Write(body) // the asker may have left: there is nobody to tell
}

// answerError is an answer that is neither what was asked for nor a refusal.
type answerError struct {
	status int
	text   string
}

func (e *answerError) Error() string { return fmt.Sprintf("answer %d: %s", e.status, e.text) }

// readRefusal makes an error of an answer that is not a success. It reads a bounded part of
// the body; closing the body then drops the connection if there was more.
func readRefusal(resp *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxControl))
	if err != nil {
		return &answerError{resp.StatusCode, "read refusal: " + err.Error()}
	}
	var r protocol.Refusal
	if json.Unmarshal(body, &r) == nil && r.Kind != "" {
		return &r
	}
	if loc := resp.Header.Get("Location"); loc != "" {
		return &answerError{resp.StatusCode, "redirects are not followed"}
	}
	return &answerError{resp.StatusCode, fmt.Sprintf("no refusal but %.80q", body)}
}

// waitAsked is how long a busy answerer asks to wait.
func waitAsked(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || n < 0 || n > 60 {
		n = retryAfter
	}
	return time.Duration(n) * time.Second
}

// extent is a run of bytes of one file, which the manifest numbers.
type extent struct {
	file           int
	offset, length int64
}

// MarshalJSON writes an extent as a list of three numbers.
func (e extent) MarshalJSON() ([]byte, error) {
	return json.Marshal([3]int64{int64(e.file), e.offset, e.length})
}

// UnmarshalJSON reads what MarshalJSON writes.
func (e *extent) UnmarshalJSON(data []byte) error {
	var n []int64
	if err := json.Unmarshal(data, &n); err != nil {
		return err
	}
	if len(n) != 3 {
		return fmt.Errorf("extent of %d numbers, want 3", len(n))
	}
	e.file, e.offset, e.length = int(n[0]), n[1], n[2]
	return nil
}

// piecesRequest asks for several extents in one answer, one after the other.
type piecesRequest struct {
	Extents []extent `json:"extents"`
}

// leaseAnswer confirms a lease.
type leaseAnswer struct {
	Bytes   int64         `json:"bytes"`   // of the snapshot's files
	Expires time.Duration `json:"expires"` // how long it lives without a byte being moved
}

// doubtRequest says that a chunk came with a wrong digest.
type doubtRequest struct {
	File   int   `json:"file"`
	Offset int64 `json:"offset"`
}

// readRange reads a Range header against the size of a file. Only one range of the form
// "bytes=first-last" or "bytes=first-" is served; no header means the whole file.
func readRange(header string, size int64) (off, length int64, err error) {
	if header == "" {
		return 0, size, nil
	}
	spec, ok := strings.CutPrefix(header, "bytes=")
	first, last, dash := strings.Cut(spec, "-")
	if !ok || !dash {
		return 0, 0, refusal(Malformed, "range %.80q", header)
	}
	from, err := strconv.ParseUint(first, 10, 63)
	to := uint64(max(size-1, 0))
	if err == nil && last != "" {
		to, err = strconv.ParseUint(last, 10, 63)
	}
	if err != nil || from > to || int64(to) >= size {
		return 0, 0, refusal(Malformed, "range %.80q of a file of %d bytes", header, size)
	}
	return int64(from), int64(to-from) + 1, nil
}

// contentRange is what the answer to a range says.
func contentRange(off, length, size int64) string {
	return fmt.Sprintf("bytes %d-%d/%d", off, off+length-1, size)
}
