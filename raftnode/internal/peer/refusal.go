package peer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// Kind is the reason of a Refusal. It is an error too, so that errors.Is(err, Removed)
// asks for the reason of whatever err wraps.
type Kind string

// The reasons for which a member is turned away.
const (
	OtherGroup       Kind = "other_group"       // it belongs to another group
	OtherIncarnation Kind = "other_incarnation" // its id was seen with another data directory
	OtherMember      Kind = "other_member"      // it looks for somebody else than the one it found
	Removed          Kind = "removed"           // it was removed from the group
	NotAdded         Kind = "not_added"         // nobody has added it yet; worth another try
	NotReady         Kind = "not_ready"         // the one asked is just starting; worth another try
	Malformed        Kind = "malformed"         // the request makes no sense
	OtherVersion     Kind = "other_version"     // it speaks another version of the protocol
)

// Error returns the word.
func (k Kind) Error() string { return string(k) }

// passes tells whether the same request may well succeed later.
func (k Kind) passes() bool { return k == NotAdded || k == NotReady }

func (k Kind) status() int {
	switch k {
	case OtherGroup, OtherMember:
		return http.StatusConflict
	case OtherIncarnation:
		return http.StatusForbidden
	case Removed:
		return http.StatusGone
	case NotAdded:
		return http.StatusNotFound
	case NotReady:
		return http.StatusServiceUnavailable
	}
	return http.StatusBadRequest
}

// Refusal is a member's "no" to another one. It travels as JSON.
type Refusal struct {
	Kind Kind   `json:"kind"`
	Text string `json:"text"`         // for people: what is wrong and what to do
	By   string `json:"by,omitempty"` // the name of the one who refuses, as far as known
}

// Error returns the kind and the text.
func (r *Refusal) Error() string {
	by := ""
	if r.By != "" {
		by = " (says " + r.By + ")"
	}
	return fmt.Sprintf("%s: %s%s", r.Kind, r.Text, by)
}

// Is makes errors.Is(err, kind) work.
func (r *Refusal) Is(target error) bool { return target == r.Kind }

func refuse(kind Kind, format string, args ...any) *Refusal {
	return &Refusal{Kind: kind, Text: fmt.Sprintf(format, args...)}
}

// asRefusal gives any error the shape in which it can be told to another member. What is
// not a refusal is trouble of our own, which may pass.
func asRefusal(err error) *Refusal {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r
	}
	return refuse(NotReady, "%v", err)
}

// maxJSON bounds every JSON text that one member reads from another.
const maxJSON = 1 << 20

func writeJSON(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil { // only our own plain structs come here
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data) // a client that is gone will ask again
}

func writeRefusal(w http.ResponseWriter, r *Refusal) { writeJSON(w, r.Kind.status(), r) }

// readJSON reads the body of a request, or refuses it.
func readJSON(w http.ResponseWriter, r *http.Request, v any) bool {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxJSON))
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		writeRefusal(w, refuse(Malformed, "%s: %v", r.URL.Path, err))
	}
	return err == nil
}

// readAnswer reads the answer to a request: v, a *Refusal, or whatever else went wrong.
func readAnswer(resp *http.Response, v any) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxJSON))
	if err != nil {
		return err
	}
	if resp.StatusCode == http.StatusOK {
		return json.Unmarshal(data, v)
	}
	var r Refusal
	if json.Unmarshal(data, &r) == nil && r.Kind != "" {
		return &r
	}
	return fmt.Errorf("status %s", resp.Status)
}
