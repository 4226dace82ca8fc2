package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Control messages arrive as they were sent, and so do answers and refusals.
func TestControl(t *testing.T) {
	id := protocol.ID{Term: 3, Index: 9, Digest: [32]byte{1, 2}}
	ask := protocol.InfoRequest{Group: "g", From: 2, Term: 3, Transfer: "t", Held: id, MinTerm: 1, MinIndex: 8, Needs: 4, Make: true, Wait: time.Second}
	answer := protocol.Answer{Transfer: "t", From: 1, Term: 4, State: protocol.Ready, ID: id,
		Lineage: protocol.Lineage{Maker: 1, Incarnation: "i"}, Bytes: 5, Applied: 11, Reason: "r",
		Refusal: &protocol.Refusal{Kind: protocol.StaleTerm, Term: 4, Text: "old"}}
	told := protocol.Outcome{Group: "g", From: 2, To: 1, Term: 3, Transfer: "t", Kind: protocol.Installed, Index: 9, Bytes: 7}
	notLeader := &protocol.Refusal{Kind: protocol.NotLeader, Leader: 3, Term: 5, Text: "deposed"}

	var asked protocol.InfoRequest
	var outcome protocol.Outcome
	c := &control{
		info:    func(_ context.Context, r protocol.InfoRequest) protocol.Answer { asked = r; return answer },
		outcome: func(o protocol.Outcome) error { outcome = o; return notLeader },
	}
	p := newPeer(t, 1, nil, c)
	client := newClient(t)

	got, err := client.Info(t.Context(), p.web.URL, ask)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]any{got, asked}, []any{answer, ask}); diff != "" {
		t.Errorf("info (-got +want):\n%s", diff)
	}
	announce := protocol.Announce{Group: "g", From: 1, Term: 3, ID: id, Holders: []uint64{1, 2}}
	if err := client.Announce(t.Context(), p.web.URL+"/", announce); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c.announced, []protocol.Announce{announce}); diff != "" {
		t.Errorf("announce (-got +want):\n%s", diff)
	}
	// scylladb#29092, E.2: an outcome for a deposed leader ends with NOT_LEADER and a hint.
	err = client.Outcome(t.Context(), p.web.URL, told)
	r, _ := errors.AsType[*protocol.Refusal](err)
	if diff := cmp.Diff([]any{r, outcome}, []any{notLeader, told}); diff != "" {
		t.Errorf("outcome (-got +want):\n%s", diff)
	}
}

// The header that says who a member is goes with every request.
func TestClientHeader(t *testing.T) {
	p := newPeer(t, 1, nil, nil)
	files := tree{"a": bytesOf(1, 100), "b": bytesOf(2, 100)}
	held := hold(t, 10, files, p)
	p.between(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Snapferry-Group") != "g" {
				t.Errorf("%s %s without the header", r.Method, r.URL)
			}
			next.ServeHTTP(w, r)
		})
	})
	c := NewClient(&ClientOptions{Header: http.Header{"Snapferry-Group": {"g"}}})
	defer c.Close()
	if _, _, err := c.Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Info(t.Context(), p.web.URL, protocol.InfoRequest{}); err != nil {
		t.Fatal(err)
	}
}

// An Info may wait no longer than the server allows, and ends with the request and with
// the server (E.1.7: the follower's wait outlasted the leader's deadline).
func TestInfoWaitIsBounded(t *testing.T) {
	waits := make(chan time.Duration, 1)
	ended := make(chan struct{}, 1)
	c := &control{info: func(ctx context.Context, r protocol.InfoRequest) protocol.Answer {
		waits <- r.Wait
		<-ctx.Done()
		ended <- struct{}{}
		return protocol.Answer{}
	}}
	p := newPeer(t, 1, &ServerOptions{MaxWait: time.Minute}, c)
	client := NewClient(&ClientOptions{Timeout: time.Hour})
	defer client.Close()

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := client.Info(ctx, p.web.URL, protocol.InfoRequest{Wait: time.Hour})
		done <- err
	}()
	if w := <-waits; w != time.Minute {
		t.Errorf("wait of %v let through, want a minute", w)
	}
	cancel()
	<-ended
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want it cancelled", err)
	}

	go func() {
		_, err := client.Info(t.Context(), p.web.URL, protocol.InfoRequest{Wait: -5})
		done <- err
	}()
	if w := <-waits; w != 0 {
		t.Errorf("wait of %v let through, want none", w)
	}
	p.server.Close()
	<-ended
	<-done
	_, err := client.Info(t.Context(), p.web.URL, protocol.InfoRequest{})
	wantRefusal(t, err, protocol.Closed)
}

// Requests over the limit are refused as busy, with a time to wait.
func TestBusy(t *testing.T) {
	p := newPeer(t, 1, &ServerOptions{Serving: 1}, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 100)}, p)
	p.server.serving <- struct{}{}
	resp := send(t, p, http.MethodGet, "snapshots/"+held.ID.String()+"/manifest", "")
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("status %d, retry after %q", resp.StatusCode, resp.Header.Get("Retry-After"))
	}
	wantRefusal(t, readRefusal(resp), protocol.Busy)
}

// A source that is busy is waited for, and given up as busy when it stays so.
func TestFetchBusySource(t *testing.T) {
	files := tree{"a": bytesOf(1, 9*mib)}
	p := newPeer(t, 1, &ServerOptions{Serving: 1}, nil)
	held := hold(t, 10, files, p)
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)}, files)

	p.server.serving <- struct{}{}
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p), Idle: 500 * time.Millisecond})
	wantFailure(t, err, protocol.FailBusy, 1)
	<-p.server.serving
}

// Several receivers are served at once, each with its own lease.
func TestServeSeveral(t *testing.T) {
	files := tree{"a": bytesOf(1, 20*mib), "b": bytesOf(2, 3000)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	c := newClient(t)
	errs := make(chan error)
	for range 4 {
		s := newStore(t)
		go func() {
			_, _, err := c.Fetch(context.Background(), Fetch{Store: s, ID: held.ID, Sources: sources(p), Window: 4})
			errs <- err
		}()
	}
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if s := p.server.Stats(); s.Leases != 0 || s.PinnedBytes != 0 || s.Served < 4*(20*mib+3000) {
		t.Errorf("after everybody is done: %+v", s)
	}
}

// send sends a request as a client of another making would.
func send(t *testing.T, p *peer, method, path, body string, header ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, p.web.URL, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	raw, query, _ := strings.Cut(Prefix+path, "?")
	req.URL.Opaque = "//" + req.URL.Host + raw // as it is, not cleaned
	req.URL.RawQuery = query
	req.Header.Set(transferHeader, "t1")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// Requests that break a rule are refused with a JSON refusal, and never with bytes or a
// redirect (ledger#1751: a server-side path guard let ".." through).
func TestServeHostileRequests(t *testing.T) {
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 100), "d/b": bytesOf(2, 10)}, p)
	snap := "snapshots/" + held.ID.String()
	if resp := send(t, p, http.MethodPost, snap+"/lease", ""); resp.StatusCode != http.StatusOK {
		t.Fatalf("lease: %d", resp.StatusCode)
	}
	bad := Malformed
	for _, c := range []struct {
		name, method, path, body string
		header                   []string
		kind                     protocol.RefusalKind
	}{
		{name: "dots", method: "GET", path: snap + "/files/../../../../etc/passwd", kind: bad},
		{name: "encoded dots", method: "GET", path: snap + "/files/%2e%2e%2fmanifest", kind: bad},
		{name: "encoded slash", method: "GET", path: "snapshots%2f" + held.ID.String(), kind: bad},
		{name: "double slash", method: "GET", path: "/" + snap + "/manifest", kind: bad},
		{name: "a name for a number", method: "GET", path: snap + "/files/a", kind: bad},
		{name: "negative file", method: "GET", path: snap + "/files/-1", kind: bad},
		{name: "plus file", method: "GET", path: snap + "/files/+0", kind: bad},
		{name: "padded file", method: "GET", path: snap + "/files/00", kind: bad},
		{name: "file past the end", method: "GET", path: snap + "/files/3", kind: bad},
		{name: "huge file", method: "GET", path: snap + "/files/99999999999999999999", kind: bad},
		{name: "a directory", method: "GET", path: snap + "/files/1", kind: bad},
		{name: "latest", method: "GET", path: "snapshots/latest/manifest", kind: bad},
		{name: "upper-case id", method: "GET", path: "snapshots/" + strings.ToUpper(held.ID.String()) + "/manifest", kind: bad},
		{name: "unknown id", method: "GET", path: "snapshots/" + protocol.ID{Term: 1, Index: 10}.String() + "/manifest", kind: protocol.Gone},
		{name: "no transfer", method: "GET", path: snap + "/manifest", header: []string{transferHeader, ""}, kind: bad},
		{name: "long transfer", method: "GET", path: snap + "/manifest", header: []string{transferHeader, strings.Repeat("x", 200)}, kind: bad},
		{name: "no lease", method: "GET", path: snap + "/files/0", header: []string{transferHeader, "t2"}, kind: protocol.Gone},
		{name: "range past the end", method: "GET", path: snap + "/files/0", header: []string{"Range", "bytes=50-100"}, kind: bad},
		{name: "range behind the end", method: "GET", path: snap + "/files/0", header: []string{"Range", "bytes=100-"}, kind: bad},
		{name: "range backwards", method: "GET", path: snap + "/files/0", header: []string{"Range", "bytes=9-8"}, kind: bad},
		{name: "suffix range", method: "GET", path: snap + "/files/0", header: []string{"Range", "bytes=-5"}, kind: bad},
		{name: "two ranges", method: "GET", path: snap + "/files/0", header: []string{"Range", "bytes=0-1,3-4"}, kind: bad},
		{name: "huge range", method: "GET", path: snap + "/files/0", header: []string{"Range", "bytes=0-99999999999999999999"}, kind: bad},
		{name: "other unit", method: "GET", path: snap + "/files/0", header: []string{"Range", "lines=0-1"}, kind: bad},
		{name: "no extents", method: "POST", path: snap + "/pieces", body: `{"extents":[]}`, kind: bad},
		{name: "extent past the end", method: "POST", path: snap + "/pieces", body: `{"extents":[[0,50,51]]}`, kind: bad},
		{name: "extent that wraps", method: "POST", path: snap + "/pieces", body: `{"extents":[[0,9223372036854775807,2]]}`, kind: bad},
		{name: "negative extent", method: "POST", path: snap + "/pieces", body: `{"extents":[[0,-1,1]]}`, kind: bad},
		{name: "empty extent", method: "POST", path: snap + "/pieces", body: `{"extents":[[0,0,0]]}`, kind: bad},
		{name: "extent of a directory", method: "POST", path: snap + "/pieces", body: `{"extents":[[1,0,1]]}`, kind: bad},
		{name: "extent of two numbers", method: "POST", path: snap + "/pieces", body: `{"extents":[[0,1]]}`, kind: bad},
		{name: "many extents", method: "POST", path: snap + "/pieces", body: `{"extents":[` + strings.Repeat("[0,0,1],", maxExtents) + `[0,0,1]]}`, kind: bad},
		{name: "many bytes asked", method: "POST", path: snap + "/pieces", body: strings.Repeat(" ", maxRequest+1), kind: bad},
		{name: "no JSON", method: "POST", path: snap + "/pieces", body: `x`, kind: bad},
		{name: "chunk of nobody", method: "GET", path: "chunks/" + strings.Repeat("0", 64), kind: protocol.Gone},
		{name: "chunk by another name", method: "GET", path: "chunks/abc", kind: bad},
		{name: "doubt about nothing", method: "POST", path: snap + "/doubt", body: `{"file":7}`, kind: bad},
		{name: "wrong method", method: "PUT", path: snap + "/files/0", kind: bad},
		{name: "nothing", method: "GET", path: "", kind: bad},
		{name: "control over the limit", method: "POST", path: "info", body: `{"group":"` + strings.Repeat("x", maxControl) + `"}`, kind: bad},
		{name: "info that is no JSON", method: "POST", path: "info", body: `[`, kind: bad},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp := send(t, p, c.method, c.path, c.body, c.header...)
			wantRefusal(t, readRefusal(resp), c.kind)
			if resp.StatusCode < 400 || resp.StatusCode != statuses[c.kind] || resp.Header.Get("Content-Type") != "application/json" {
				t.Errorf("status %d, type %q", resp.StatusCode, resp.Header.Get("Content-Type"))
			}
		})
	}
}

// Ranges and extents give exactly the bytes that they name.
func TestServeRanges(t *testing.T) {
	data := bytesOf(1, 3*mib+5)
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, tree{"a": data, "b": []byte("bee"), "c": {}}, p)
	snap := "snapshots/" + held.ID.String()
	send(t, p, http.MethodPost, snap+"/lease", "")

	for _, c := range []struct {
		header   string
		from, to int
		status   int
	}{
		{"", 0, len(data), 200},
		{"bytes=0-", 0, len(data), 206},
		{"bytes=0-0", 0, 1, 206},
		{fmt.Sprintf("bytes=7-%d", len(data)-1), 7, len(data), 206},
		{"bytes=1048575-2097152", 1048575, 2097153, 206},
	} {
		resp := send(t, p, http.MethodGet, snap+"/files/0", "", "Range", c.header)
		got, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != c.status || !bytes.Equal(got, data[c.from:c.to]) {
			t.Errorf("range %q: status %d, %d bytes, %v", c.header, resp.StatusCode, len(got), err)
		}
	}
	ext, err := json.Marshal(piecesRequest{[]extent{{1, 1, 2}, {0, 3, mib}, {1, 0, 3}}})
	if err != nil {
		t.Fatal(err)
	}
	resp := send(t, p, http.MethodPost, snap+"/pieces", string(ext))
	got, err := io.ReadAll(resp.Body)
	want := "ee" + string(data[3:3+mib]) + "bee"
	if err != nil || string(got) != want || resp.ContentLength != int64(len(want)) {
		t.Errorf("pieces: %d bytes of %d, %v", len(got), len(want), err)
	}
	resp = send(t, p, http.MethodGet, snap+"/files/2", "")
	if got, err := io.ReadAll(resp.Body); err != nil || len(got) != 0 || resp.StatusCode != http.StatusOK {
		t.Errorf("empty file: status %d, %d bytes, %v", resp.StatusCode, len(got), err)
	}
}

// deaf is the connection of a receiver that does not read: writes end by the deadline only.
type deaf struct {
	httptest.ResponseRecorder
	writing, cut chan struct{}
}

func (d *deaf) Write([]byte) (int, error) {
	close(d.writing)
	<-d.cut
	return 0, os.ErrDeadlineExceeded
}

func (d *deaf) SetWriteDeadline(at time.Time) error {
	if !at.IsZero() && at.Before(time.Now()) {
		close(d.cut)
	}
	return nil
}

// Close cuts an answer whose receiver does not read, and returns (RATIS-987: every path
// ends what it began).
func TestServerCloseCutsAnswers(t *testing.T) {
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 2*mib)}, p)
	snap := "snapshots/" + held.ID.String()
	send(t, p, http.MethodPost, snap+"/lease", "")
	w := &deaf{*httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
	ended := make(chan any, 1)
	go func() {
		defer func() { ended <- recover() }()
		r := httptest.NewRequest(http.MethodGet, Prefix+snap+"/files/0", nil)
		r.Header.Set(transferHeader, "t1")
		p.server.ServeHTTP(w, r)
	}()
	<-w.writing
	p.server.Close()
	if got := <-ended; got != http.ErrAbortHandler {
		t.Errorf("the answer ended with %v, want it aborted", got)
	}
	if n := p.server.Stats().Leases; n != 0 {
		t.Errorf("%d leases after Close", n)
	}
	wantRefusal(t, readRefusal(send(t, p, http.MethodGet, snap+"/manifest", "")), protocol.Closed)
}

// A receiver that stops reading is cut off after a while, so that it does not hold its slot
// and its file for ever.
func TestServeStalledReceiver(t *testing.T) {
	const stall = 100 * time.Millisecond
	p := newPeer(t, 1, &ServerOptions{Stall: stall}, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 64*mib), "b": bytesOf(2, 10)}, p)
	snap := "snapshots/" + held.ID.String()
	send(t, p, http.MethodPost, snap+"/lease", "")
	ended := make(chan struct{})
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		defer close(ended)
		next.ServeHTTP(w, r)
	})
	send(t, p, http.MethodGet, snap+"/files/0", "") // nobody reads it
	<-ended
}

// Transfers work over TLS, and stay with HTTP/1.1 there.
func TestFetchTLS(t *testing.T) {
	files := tree{"a": bytesOf(1, 5*mib), "b": bytesOf(2, 10)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	web := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 {
			t.Errorf("request by %s", r.Proto)
		}
		p.server.ServeHTTP(w, r)
	}))
	web.EnableHTTP2 = true
	web.Config.ErrorLog = discardLog()
	web.StartTLS()
	defer web.Close()

	c := NewClient(&ClientOptions{TLS: web.Client().Transport.(*http.Transport).TLSClientConfig})
	defer c.Close()
	s := newStore(t)
	if _, _, err := c.Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: []Source{{ID: 1, URL: web.URL}}}); err != nil {
		t.Fatal(err)
	}
	checkTree(t, s, held.ID, files)
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: []Source{{ID: 1, URL: web.URL}}})
	wantFailure(t, err, protocol.FailUnreachable, 1) // whose certificate is unknown
}
