package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mib = 1 << 20

// bytesOf returns n bytes that depend on the seed and do not repeat.
func bytesOf(seed uint64, n int) []byte {
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	p := make([]byte, n)
	rand.NewChaCha8(key).Read(p)
	return p
}

// tree is what a snapshot holds: bytes by path.
type tree map[string][]byte

// peer is a member with a store and a server in front of it.
type peer struct {
	id     uint64
	store  *snapstore.Store
	server *Server
	web    *httptest.Server
	sent   atomic.Int64 // bytes of answers to requests for data
	asked  atomic.Int64 // requests for data
	front  atomic.Pointer[func(http.Handler) http.Handler]
}

func newStore(t testing.TB) *snapstore.Store {
	t.Helper()
	s, err := snapstore.Open(t.TempDir(), &snapstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// newPeer starts a member; it ends with the test. opts and c may be nil.
func newPeer(t testing.TB, id uint64, opts *ServerOptions, c Control) *peer {
	t.Helper()
	if c == nil {
		c = &control{}
	}
	p := &peer{id: id, store: newStore(t)}
	p.server = NewServer(p.store, c, opts)
	p.web = httptest.NewServer(http.HandlerFunc(p.serve))
	t.Cleanup(p.stop)
	return p
}

// stop ends the server; doing it twice is fine.
func (p *peer) stop() {
	p.server.Close()
	p.web.CloseClientConnections()
	p.web.Close()
}

// serve counts what is answered, and lets a test stand in between.
func (p *peer) serve(w http.ResponseWriter, r *http.Request) {
	var h http.Handler = p.server
	if f := p.front.Load(); f != nil {
		h = (*f)(h)
	}
	if isData(r) {
		p.asked.Add(1)
		w = &counter{w, &p.sent}
	}
	h.ServeHTTP(w, r)
}

// between puts a test's handler in front of the server.
func (p *peer) between(f func(next http.Handler) http.Handler) { p.front.Store(&f) }

// onData is between for requests for data only.
func (p *peer) onData(f func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	p.between(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if isData(r) {
				f(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
}

func isData(r *http.Request) bool {
	for _, part := range []string{"files", "pieces", "chunks"} {
		if ok, _ := filepath.Match(Prefix+"*/*/"+part+"*", r.URL.Path); ok {
			return true
		}
		if ok, _ := filepath.Match(Prefix+"*/*/"+part+"/*", r.URL.Path); ok {
			return true
		}
		if ok, _ := filepath.Match(Prefix+part+"/*", r.URL.Path); ok {
			return true
		}
	}
	return false
}

// counter counts the bytes of an answer. Being no ReaderFrom, it sees them all.
type counter struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.n.Add(int64(n))
	return n, err
}

// Unwrap lets deadlines through.
func (c *counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (p *peer) source() Source { return Source{ID: p.id, URL: p.web.URL} }

func sources(peers ...*peer) (all []Source) {
	for _, p := range peers {
		all = append(all, p.source())
	}
	return all
}

func metaAt(index uint64) protocol.Meta {
	return protocol.Meta{Group: "g", Term: 1, Index: index, Conf: protocol.Conf{Voters: []uint64{1, 2, 3}},
		Lineage: protocol.Lineage{Maker: 1, Incarnation: "a"}}
}

// hold makes a snapshot of files in each peer's store. All have the same id.
func hold(t testing.TB, index uint64, files tree, peers ...*peer) snapstore.Held {
	t.Helper()
	var held snapstore.Held
	for _, p := range peers {
		held = makeSnapshot(t, p.store, index, files)
	}
	return held
}

func makeSnapshot(t testing.TB, s *snapstore.Store, index uint64, files tree) snapstore.Held {
	t.Helper()
	d, err := s.Draft()
	if err != nil {
		t.Fatal(err)
	}
	writeTree(t, d.Dir(), files)
	held, err := d.Commit(context.Background(), metaAt(index), nil)
	if err != nil {
		t.Fatal(err)
	}
	return held
}

func writeTree(t testing.TB, dir string, files tree) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, data := range files {
		full := filepath.Join(dir, name)
		err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, data, 0o644))
		if err != nil {
			t.Fatal(err)
		}
	}
}

// newClient makes a client that does not rest for long between attempts.
func newClient(t testing.TB) *Client {
	t.Helper()
	c := NewClient(&ClientOptions{Backoff: time.Millisecond})
	t.Cleanup(c.Close)
	return c
}

// fetch fetches, and fails the test unless that works and brings exactly these files.
func fetch(t *testing.T, f Fetch, want tree) Stats {
	t.Helper()
	held, stats, err := newClient(t).Fetch(t.Context(), f)
	if err != nil {
		t.Fatalf("fetch: %v", err)
	}
	if held.ID != f.ID {
		t.Fatalf("fetched %v, want %v", held.ID, f.ID)
	}
	checkTree(t, f.Store, held.ID, want)
	return stats
}

// checkTree fails the test unless a store holds exactly these files, verified.
func checkTree(t testing.TB, s *snapstore.Store, id protocol.ID, want tree) {
	t.Helper()
	dir, err := s.Dir(id)
	if err != nil {
		t.Fatal(err)
	}
	got := tree{}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		got[name], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range want {
		if !bytes.Equal(got[name], want[name]) {
			t.Errorf("%s: got %d bytes that differ from the %d wanted", name, len(got[name]), len(want[name]))
		}
	}
	if len(got) != len(want) {
		t.Errorf("got %d files, want %d", len(got), len(want))
	}
}

// wantFailure fails the test unless err is a failure of a kind that blames a peer.
func wantFailure(t *testing.T, err error, kind protocol.FailureKind, peer uint64) {
	t.Helper()
	f, ok := errors.AsType[*protocol.Failure](err)
	if !ok {
		t.Fatalf("got error %v, want a failure", err)
	}
	if diff := cmp.Diff([]any{f.Kind, f.Peer}, []any{kind, peer}); diff != "" {
		t.Fatalf("failure %v (-got +want):\n%s", f, diff)
	}
}

// wantRefusal fails the test unless err is a refusal of a kind.
func wantRefusal(t *testing.T, err error, kind protocol.RefusalKind) {
	t.Helper()
	r, ok := errors.AsType[*protocol.Refusal](err)
	if !ok || r.Kind != kind {
		t.Fatalf("got error %v, want refusal %q", err, kind)
	}
}

// control is a Control that tests fill in.
type control struct {
	info    func(context.Context, protocol.InfoRequest) protocol.Answer
	outcome func(protocol.Outcome) error

	mu        sync.Mutex
	announced []protocol.Announce
}

func (c *control) Info(ctx context.Context, r protocol.InfoRequest) protocol.Answer {
	if c.info == nil {
		return protocol.Answer{State: protocol.None}
	}
	return c.info(ctx, r)
}

func (c *control) Announce(_ context.Context, a protocol.Announce) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.announced = append(c.announced, a)
}

func (c *control) Outcome(_ context.Context, o protocol.Outcome) error {
	if c.outcome == nil {
		return nil
	}
	return c.outcome(o)
}

// discardLog is for servers whose handlers are cut on purpose.
func discardLog() *log.Logger { return log.New(io.Discard, "", 0) }
