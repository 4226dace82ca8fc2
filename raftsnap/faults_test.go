package raftsnap

import (
	"net/http"
	"strings"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// Misbehaviours of a member towards the others, for member.fault.

// hang makes requests wait until the asker gives up.
func hang(part string) func(http.ResponseWriter, *http.Request) bool {
	return func(_ http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, part) {
			return false
		}
		<-r.Context().Done()
		return true
	}
}

// answer makes requests end with a status.
func answer(status int, part string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, part) {
			return false
		}
		http.Error(w, "by order of the test", status)
		return true
	}
}

// limitedWriter breaks the connection after so many bytes.
type limitedWriter struct {
	http.ResponseWriter
	left int
}

func (w *limitedWriter) Write(p []byte) (int, error) {
	if len(p) > w.left {
		_, _ = w.ResponseWriter.Write(p[:w.left])
		panic(http.ErrAbortHandler)
	}
	w.left -= len(p)
	return w.ResponseWriter.Write(p)
}

// flippingWriter changes one bit in each answer.
type flippingWriter struct{ http.ResponseWriter }

func (w *flippingWriter) Write(p []byte) (int, error) {
	q := append([]byte(nil), p...)
	if len(q) > 0 {
		q[len(q)/2] ^= 1
	}
	return w.ResponseWriter.Write(q)
}

// data tells whether a request is for the bytes of a snapshot's files.
func data(r *http.Request) bool {
	return strings.Contains(r.URL.Path, "/files/") || strings.Contains(r.URL.Path, "/pieces") || strings.Contains(r.URL.Path, "/chunks/")
}

// through serves a request of data by the member's own handler with another writer.
func (m *member) through(wrap func(http.ResponseWriter) http.ResponseWriter) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		manager := get(m, func(m *member) *Manager { return m.manager })
		if manager == nil || !data(r) {
			return false
		}
		manager.Handler().ServeHTTP(wrap(w), r)
		return true
	}
}

// attempts counts what a member's calls came to, by peer.
func (m *member) attempts(what string, which func(Attempt) bool) map[uint64]int {
	return get(m, func(m *member) map[uint64]int {
		n := map[uint64]int{}
		for _, a := range m.events.attempts {
			if a.What == what && (which == nil || which(a)) {
				n[a.Peer]++
			}
		}
		return n
	})
}

// seed puts a snapshot of the member's own into its store, as if it had made it at index.
func (m *member) seed(index uint64) protocol.ID {
	m.g.t.Helper()
	m.g.mu.Lock()
	meta := m.g.metaLocked(m, index)
	m.g.mu.Unlock()
	return m.put(meta)
}

// seedForked puts in a snapshot that contradicts the group's history.
func (m *member) seedForked(index, term uint64) protocol.ID {
	m.g.t.Helper()
	m.g.mu.Lock()
	meta := m.g.metaLocked(m, index)
	m.g.mu.Unlock()
	meta.Term = term
	return m.put(meta)
}

func (m *member) put(meta protocol.Meta) protocol.ID {
	t := m.g.t
	t.Helper()
	draft, err := m.store.Draft()
	if err != nil {
		t.Fatal(err)
	}
	if err := writeTree(draft.Dir(), m.g.files(meta.Index)); err != nil {
		t.Fatal(err)
	}
	held, err := draft.Commit(t.Context(), meta, nil)
	if err != nil {
		t.Fatal(err)
	}
	m.poll()
	return held.ID
}

// testOptions makes everything quick, and leaves to chance as little as can be.
func testOptions() Options {
	const ms = time.Millisecond
	return Options{
		Tick: 5 * ms, CallTimeout: 2 * time.Second, ScrubEvery: -1,
		Server: &transfer.ServerOptions{Lease: time.Second},
		Protocol: protocol.Config{
			Entries: 10, Bytes: -1, Interval: -1, MinGap: ms, StandIn: time.Hour, SpreadInterval: 50 * ms,
			InfoDeadline: 500 * ms, SurveyWait: 50 * ms, PollInterval: 10 * ms, MakeDeadline: 5 * time.Second,
			ApplyDeadline: 2 * time.Second, StartDeadline: 500 * ms, IdleDeadline: 500 * ms, CancelDeadline: time.Second,
			InstallDeadline: 10 * time.Second, ProgressInterval: 20 * ms, ReportDeadline: 2 * time.Second,
			BackoffBase: 5 * ms, BackoffMax: 100 * ms, BackoffDecay: time.Second, LogCap: -1,
		},
	}
}
