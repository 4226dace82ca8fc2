package blobservers

import (
	"io"
	"net/http"
	"strings"
	"sync"
)

// Stub is an http.RoundTripper that answers in place of a server, for answers that no server
// gives when it is asked to.
type Stub struct {
	// Answer gives an answer or what went wrong on the way.
	Answer func(r *http.Request, body string) (Answer, error)

	mu   sync.Mutex
	seen []string
}

// Answer is what a Stub answers.
type Answer struct {
	Status int
	Header http.Header
	Body   string
}

// RoundTrip implements http.RoundTripper.
func (s *Stub) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		if err := r.Body.Close(); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	s.seen = append(s.seen, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+string(body)))
	s.mu.Unlock()
	a, err := s.Answer(r, string(body))
	if err != nil {
		return nil, err
	}
	if a.Header == nil {
		a.Header = http.Header{}
	}
	return &http.Response{
		Status: http.StatusText(a.Status), StatusCode: a.Status, Header: a.Header, Request: r, ProtoMajor: 1, ProtoMinor: 1,
		Body: io.NopCloser(strings.NewReader(a.Body)), ContentLength: int64(len(a.Body)),
	}, nil
}

// Seen is what was asked so far: lines of "METHOD PATH BODY".
func (s *Stub) Seen() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.seen...)
}
