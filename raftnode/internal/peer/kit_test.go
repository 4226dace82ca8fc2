package peer

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for what must happen; nothing in these tests asks how fast.
const patience = 30 * time.Second

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	end := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not in %v: %s", patience, what)
		}
	}
}

// site is an address with a server on it, which outlives the member behind it as a host
// outlives a process.
type site struct {
	t    testing.TB
	name string
	dir  string
	addr string
	tls  *TLS

	door   *Door
	tr     *Transport
	box    *box
	routes atomic.Pointer[http.ServeMux]
	server *http.Server
	served chan struct{}

	handlers sync.RWMutex // held by each request
	stopped  bool
}

func (s *site) url() string {
	if s.tls != nil {
		return "https://" + s.addr
	}
	return "http://" + s.addr
}

// newSite makes a site with an open door.
func newSite(t testing.TB, name string) *site { return newSiteTLS(t, name, nil, nil) }

func newSiteTLS(t testing.TB, name string, tls *TLS, opts *DoorOptions) *site {
	t.Helper()
	s := &site{t: t, name: name, dir: filepath.Join(t.TempDir(), name), tls: tls}
	s.addr = "127.0.0.1:0"
	s.open(opts)
	s.listen()
	t.Cleanup(s.stop)
	return s
}

// open makes a new Door of the directory, as a new process would.
func (s *site) open(opts *DoorOptions) {
	s.t.Helper()
	if opts == nil {
		opts = &DoorOptions{}
	}
	o := *opts
	o.Insecure, o.TLS = s.tls == nil, s.tls
	o.Logger = slog.New(slog.NewTextHandler(s.t.Output(), nil))
	door, err := NewDoor(s.dir, &o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.door = door
	s.route()
}

func (s *site) route() {
	mux := http.NewServeMux()
	mux.Handle("/raft/v1/", s.door)
	if s.tr != nil {
		mux.Handle(StreamPath, s.tr.Handler())
	}
	s.routes.Store(mux)
}

// listen starts the server, on the old address if there was one.
func (s *site) listen() {
	s.t.Helper()
	ln, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.addr = ln.Addr().String()
	s.server = &http.Server{
		Handler:  http.HandlerFunc(s.handle),
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	if err := ConfigureServer(s.server, s.tls); err != nil {
		s.t.Fatal(err)
	}
	served := make(chan struct{})
	s.served = served
	server := s.server
	go func() {
		defer close(served)
		if s.tls != nil {
			_ = server.ServeTLS(ln, "", "")
		} else {
			_ = server.Serve(ln)
		}
	}()
}

func (s *site) handle(w http.ResponseWriter, r *http.Request) {
	s.handlers.RLock()
	defer s.handlers.RUnlock()
	if s.stopped {
		return
	}
	s.routes.Load().ServeHTTP(w, r)
}

// hangUp stops the server and cuts its connections.
func (s *site) hangUp() {
	_ = s.server.Close()
	<-s.served
}

// stop ends all of it; a second call does nothing.
func (s *site) stop() {
	if s.tr != nil {
		if err := s.tr.Close(); err != nil {
			s.t.Error(err)
		}
	}
	s.hangUp()
	s.handlers.Lock() // waits for what still writes in the directory
	defer s.handlers.Unlock()
	s.stopped = true
}

// run starts the transport of a member that has started.
func (s *site) run(opts *Options) {
	s.box = newBox()
	s.tr = NewTransport(s.door.Identity(), s.door, s.box, opts)
	s.route()
}

func (s *site) id() uint64 { return s.door.Identity().ID }

// box is a Receiver that keeps what comes.
type box struct {
	mu          sync.Mutex
	got         []*raftpb.Message
	unreachable map[uint64]int
	handle      func(*raftpb.Message) // instead of keeping
}

func newBox() *box { return &box{unreachable: map[uint64]int{}} }

func (b *box) Receive(m *raftpb.Message) {
	b.mu.Lock()
	handle := b.handle
	if handle == nil {
		b.got = append(b.got, m)
	}
	b.mu.Unlock()
	if handle != nil {
		handle(m)
	}
}

func (b *box) Unreachable(id uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unreachable[id]++
}

func (b *box) losses(id uint64) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.unreachable[id]
}

func (b *box) messages() []*raftpb.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]*raftpb.Message(nil), b.got...)
}

// has tells whether a message with this index has come.
func (b *box) has(index uint64) bool {
	for _, m := range b.messages() {
		if m.GetIndex() == index {
			return true
		}
	}
	return false
}

func cluster(sites ...*site) map[string]string {
	out := map[string]string{}
	for _, s := range sites {
		out[s.name] = s.url()
	}
	return out
}

// bootstrap starts all sites as one group at the same instant.
func bootstrap(t testing.TB, sites ...*site) {
	t.Helper()
	var wg sync.WaitGroup
	for _, s := range sites {
		wg.Go(func() {
			if _, err := s.door.Bootstrap(t.Context(), s.name, s.url(), cluster(sites...)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// newGroup gives members that run and know each other.
func newGroup(t testing.TB, opts *Options, names ...string) []*site {
	t.Helper()
	var sites []*site
	for _, n := range names {
		sites = append(sites, newSite(t, n))
	}
	bootstrap(t, sites...)
	for _, s := range sites {
		s.run(opts)
		s.tr.SetMembers(s.door.Identity().Table())
	}
	return sites
}

// connected waits until all streams between the sites stand.
func connected(t testing.TB, sites ...*site) {
	t.Helper()
	for _, s := range sites {
		eventually(t, s.name+" is connected", func() bool {
			for _, p := range s.tr.Status() {
				if !p.Connected || !p.Active {
					return false
				}
			}
			return true
		})
	}
}

func message(kind raftpb.MessageType, from, to *site, index uint64) *raftpb.Message {
	return &raftpb.Message{Type: kind.Enum(), From: new(from.id()), To: new(to.id()), Term: new(uint64(1)), Index: &index}
}

func entries(from, to *site, index uint64, size int) *raftpb.Message {
	m := message(raftpb.MsgApp, from, to, index)
	m.Entries = []*raftpb.Entry{{Index: new(index + 1), Term: new(uint64(1)), Data: make([]byte, size)}}
	return m
}

// delivered sends heartbeats until one arrives: messages may be lost while a stream is made.
func delivered(t testing.TB, from, to *site) {
	t.Helper()
	index := uint64(1 << 40)
	eventually(t, "a message from "+from.name+" to "+to.name, func() bool {
		index++
		from.tr.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, from, to, index)})
		for _, m := range to.box.messages() {
			if m.GetIndex() >= 1<<40 && m.GetFrom() == from.id() {
				return true
			}
		}
		return false
	})
}

// shortly gives a context that ends by itself, for what must not succeed.
func shortly(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeoutCause(t.Context(), 300*time.Millisecond, errors.New("waited enough"))
	t.Cleanup(cancel)
	return ctx
}

func wantIs(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
}

// joinFrom answers joins from a table.
func joinFrom(group string, table func() []protocol.Member) JoinFunc {
	return func(name, url string) (string, uint64, []protocol.Member, error) {
		for _, m := range table() {
			if m.Name == name && m.URL == url {
				return group, m.ID, table(), nil
			}
		}
		return "", 0, nil, NotAdded
	}
}

// hole is a TCP proxy in front of a site that can swallow everything without a word, as a
// cut cable does.
type hole struct {
	ln     net.Listener
	target string
	wg     sync.WaitGroup

	mu    sync.Mutex
	black bool
	conns []net.Conn
	alive chan struct{} // closed when the connections of this time are dead
}

func newHole(t testing.TB, target string) *hole {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hole{ln: ln, target: target, alive: make(chan struct{})}
	h.wg.Go(h.accept)
	t.Cleanup(h.close)
	return h
}

func (h *hole) accept() {
	for {
		c, err := h.ln.Accept()
		if err != nil {
			return
		}
		h.mu.Lock()
		h.conns = append(h.conns, c)
		black, alive := h.black, h.alive
		h.mu.Unlock()
		if black {
			continue // accepted, and never a byte
		}
		d, err := net.Dial("tcp", h.target)
		if err != nil {
			_ = c.Close()
			continue
		}
		h.mu.Lock()
		h.conns = append(h.conns, d)
		h.mu.Unlock()
		h.wg.Go(func() { pipe(c, d, alive) })
		h.wg.Go(func() { pipe(d, c, alive) })
	}
}

// pipe copies until its time is over; then it neither reads nor closes.
func pipe(to, from net.Conn, alive <-chan struct{}) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-alive:
			return
		default:
		}
		if err == nil {
			_, err = to.Write(b[:n])
		}
		if err != nil {
			_ = to.Close()
			_ = from.Close()
			return
		}
	}
}

func (h *hole) set(black bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.black = black
	if black {
		close(h.alive)
		h.alive = make(chan struct{})
	}
}

func (h *hole) close() {
	_ = h.ln.Close()
	h.mu.Lock()
	for _, c := range h.conns {
		_ = c.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
}
