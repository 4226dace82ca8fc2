package transfer

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// What a source may do to a request for data, and what becomes of it: given up, while the
// honest source gives everything.
func TestFetchHostileAnswers(t *testing.T) {
	const size = 8 * mib
	files := tree{"a": bytesOf(1, size)}
	answer := func(status int, length int64, contentRange string, body []byte) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if length >= 0 {
				w.Header().Set("Content-Length", fmt.Sprint(length))
			}
			if contentRange != "" {
				w.Header().Set("Content-Range", contentRange)
			}
			w.WriteHeader(status)
			w.Write(body)
		}
	}
	whole := contentRange(0, size, size)
	for name, evil := range map[string]http.HandlerFunc{
		"too short":        answer(206, size-1, whole, files["a"][:size-1]),
		"too long":         answer(206, size+1, whole, append(append([]byte{}, files["a"]...), 0)),
		"cut":              answer(206, size, whole, files["a"][:5]),
		"no length":        answer(206, -1, whole, files["a"]),
		"wrong range":      answer(206, size, contentRange(1, size, size+1), files["a"]),
		"no range":         answer(206, size, "", files["a"]),
		"whole file":       answer(200, size, "", files["a"]),
		"nothing":          answer(204, -1, "", nil),
		"not found":        answer(404, 3, "", []byte("404")),
		"error as HTML":    answer(500, -1, "", []byte(strings.Repeat("<p>", 1<<16))),
		"unknown refusal":  answer(409, -1, "", []byte(`{"kind":"because"}`)),
		"malformed":        answer(400, -1, "", []byte(`{"kind":"malformed"}`)),
		"refusal as bytes": answer(206, size, whole, []byte(`{"kind":"gone"}`)),
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		},
		"compressed": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			answer(206, size, whole, files["a"])(w, r)
		},
		"hang-up": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
			held := hold(t, 10, files, a, b)
			a.onData(func(w http.ResponseWriter, r *http.Request, _ http.Handler) { evil(w, r) })
			a.web.Config.ErrorLog = discardLog()

			s := newStore(t)
			_, stats, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: sources(a), RangeSize: size, Idle: time.Minute})
			if name != "unknown refusal" { // which may be of a newer version
				wantFailure(t, err, protocol.FailUnreachable, 1)
			}
			if err == nil || stats.Sources[0].Failed == nil {
				t.Fatalf("got %v from a hostile source", err)
			}
			fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(a, b), RangeSize: size}, files)
		})
	}
}

// What a source may do to the request for the manifest.
func TestFetchHostileManifest(t *testing.T) {
	files := tree{"a": bytesOf(1, 100)}
	for name, evil := range map[string]struct {
		serve http.HandlerFunc
		kind  protocol.FailureKind
	}{
		"huge": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(int64(snapstore.MaxManifest)+1))
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, protocol.FailCorrupt},
		"endless": {func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, mib)); err != nil {
					return
				}
			}
		}, protocol.FailCorrupt},
		"promised and not sent": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(snapstore.MaxManifest))
			w.WriteHeader(http.StatusOK)
			panic(http.ErrAbortHandler)
		}, protocol.FailUnreachable},
		"empty":   {func(w http.ResponseWriter, r *http.Request) {}, protocol.FailCorrupt},
		"garbage": {func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "garbage") }, protocol.FailCorrupt},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		}, protocol.FailUnreachable},
		"silent": {func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, protocol.FailIdle},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
			held := hold(t, 10, files, a, b)
			a.web.Config.ErrorLog = discardLog()
			a.between(func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if path.Base(r.URL.Path) == "manifest" {
						evil.serve(w, r)
						return
					}
					next.ServeHTTP(w, r)
				})
			})
			idle := time.Minute
			if evil.kind == protocol.FailIdle {
				idle = time.Second
			}
			_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a), Idle: idle})
			wantFailure(t, err, evil.kind, 1)
			fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a, b), Idle: idle}, files)
		})
	}
}

// A source may not send a transfer to somebody else.
func TestRedirectsAreNotFollowed(t *testing.T) {
	asked := make(chan string, 10)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r.URL.Path }))
	defer elsewhere.Close()
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 100)}, p)
	p.between(func(http.Handler) http.Handler {
		return http.RedirectHandler(elsewhere.URL+"/x", http.StatusPermanentRedirect)
	})
	c := newClient(t)
	_, _, err := c.Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)})
	wantFailure(t, err, protocol.FailUnreachable, 1)
	if _, err := c.Info(t.Context(), p.web.URL, protocol.InfoRequest{}); err == nil {
		t.Error("an answer came from elsewhere")
	}
	if len(asked) > 0 {
		t.Errorf("asked elsewhere for %s", <-asked)
	}
}

// An answer to a control message is bounded too.
func TestControlHostileAnswers(t *testing.T) {
	for name, evil := range map[string]http.HandlerFunc{
		"long": func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, `"`+strings.Repeat("x", maxControl)+`"`)
		},
		"no JSON":    func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "<html>") },
		"empty":      func(w http.ResponseWriter, r *http.Request) {},
		"long error": func(w http.ResponseWriter, r *http.Request) { http.Error(w, strings.Repeat("x", mib), 500) },
	} {
		t.Run(name, func(t *testing.T) {
			web := httptest.NewServer(evil)
			defer web.Close()
			c := newClient(t)
			defer c.Close()
			if a, err := c.Info(t.Context(), web.URL, protocol.InfoRequest{}); err == nil {
				t.Errorf("got %+v", a)
			}
		})
	}
	if err := newClient(t).Announce(t.Context(), "://", protocol.Announce{}); err == nil {
		t.Error("no error for a URL that is none")
	}
}

// Nobody to fetch from is an answer, too.
func TestFetchNobody(t *testing.T) {
	id := protocol.ID{Term: 1, Index: 1}
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: id})
	wantFailure(t, err, protocol.FailGone, 0)
	_, _, err = newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: id, Sources: []Source{{ID: 4, URL: "http://127.0.0.1:1"}}})
	wantFailure(t, err, protocol.FailUnreachable, 4)
	p := newPeer(t, 1, nil, nil)
	_, _, err = newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: id, Sources: sources(p)})
	wantFailure(t, err, protocol.FailGone, 1)
}
