package cpwire

import (
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// The paths of the API, as patterns of http.ServeMux without the method.
const (
	PathAppend  = "/v1/append"
	PathTasks   = "/v1/tasks"
	PathHead    = "/v1/tasks/{job}/{task}/head"
	PathEntry   = "/v1/tasks/{job}/{task}/entries/{slot}"
	PathHistory = "/v1/tasks/{job}/{task}/history"
	PathTrim    = "/v1/tasks/{job}/{task}/trim"
	PathStatus  = "/v1/status"
	PathCluster = "/v1/cluster"

	PathAddLearner     = "/v1/cluster/add-learner"
	PathPromote        = "/v1/cluster/promote"
	PathRemove         = "/v1/cluster/remove"
	PathTransferLeader = "/v1/cluster/transfer-leader"
	PathSnapshot       = "/v1/cluster/snapshot"
)

// The headers of the API.
const (
	// HeaderGroup names the group: in answers the member's, in requests the one that is
	// meant, so that a client never mixes two groups up.
	HeaderGroup = "Snapferry-Group"

	headerSlot   = "Snapferry-Slot"
	headerDigest = "Snapferry-Digest"
	headerNonce  = "Snapferry-Nonce"
	headerStored = "Snapferry-Stored"
)

const (
	// MaxWait bounds how long a member keeps a request for a change waiting.
	MaxWait = 30 * time.Second
	// MaxPromote bounds how long a member waits for a learner to catch up.
	MaxPromote = 10 * time.Minute
	// MaxPage is how many tasks one answer lists at most.
	MaxPage = 1000
)

func taskPath(t Task, rest string) string {
	return PathTasks + "/" + url.PathEscape(t.Job) + "/" + url.PathEscape(t.Name) + "/" + rest
}

// WriteEntry writes an entry as an answer: its body, and the rest in headers.
func WriteEntry(w http.ResponseWriter, e *Entry) error {
	h := w.Header()
	h.Set(headerSlot, strconv.FormatUint(e.Slot, 10))
	h.Set(headerDigest, e.Digest.String())
	h.Set(headerNonce, hex.EncodeToString(e.Nonce[:]))
	h.Set(headerStored, e.Stored.UTC().Format(time.RFC3339Nano))
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", strconv.Itoa(len(e.Body)))
	_, err := w.Write(e.Body)
	return err
}

// readEntry reads what WriteEntry wrote.
func readEntry(a *answer) (e Entry, err error) {
	if e.Slot, err = strconv.ParseUint(a.header.Get(headerSlot), 10, 64); err != nil {
		return Entry{}, err
	}
	if e.Digest, err = ParseDigest(a.header.Get(headerDigest)); err != nil {
		return Entry{}, err
	}
	if e.Nonce, err = parseNonce(a.header.Get(headerNonce)); err != nil {
		return Entry{}, err
	}
	e.Stored, err = time.Parse(time.RFC3339Nano, a.header.Get(headerStored))
	e.Body = a.body
	return e, err
}
