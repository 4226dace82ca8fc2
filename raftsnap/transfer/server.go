package transfer

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// Control answers the control messages of other members. Its methods may be called
// concurrently.
type Control interface {
	// Info answers what the member has for the asker. It may wait as long as the request
	// says, and must return when ctx ends.
	Info(ctx context.Context, r protocol.InfoRequest) protocol.Answer
	// Announce takes a leader's announcement.
	Announce(ctx context.Context, a protocol.Announce)
	// Outcome takes what became of an install elsewhere. A *protocol.Refusal travels back
	// as it is, every other error as "busy".
	Outcome(ctx context.Context, o protocol.Outcome) error
}

// ServerOptions tunes a Server. The zero value of each field means its default.
type ServerOptions struct {
	// Lease is how long a pin lives on without a byte being moved: 60 s by default.
	Lease time.Duration
	// MaxPinned bounds the bytes of all pinned snapshots together, each counted once. By
	// default it is four times the size of the snapshot that is to be pinned. A single
	// snapshot may always be pinned.
	MaxPinned int64
	// Serving bounds the data requests served at one time: 64 by default. As many Info
	// requests may wait besides.
	Serving int
	// MaxWait bounds how long an answer to Info may wait: 30 s by default.
	MaxWait time.Duration
	// Patience is how long a receiver waits for the first verification of a snapshot
	// before it is told to come again: 3 s by default. The verification goes on.
	Patience time.Duration
	// Stall is how long a receiver may take for one slice, of 1 MiB at most, before its
	// connection is given up: 30 s by default.
	Stall time.Duration
	// Work paces what is read for serving and verification. Nil means no limit.
	Work *snapstore.Work
	// Peer tells which member sent a request, for LeaseEnd. It may be nil.
	Peer func(r *http.Request) uint64
	// Ended is called for each lease that ends. It must not block, and may be nil.
	Ended func(e LeaseEnd)
	// Damaged is called after a snapshot that turned out to be damaged was quarantined. It
	// must not block, and may be nil.
	Damaged func(id protocol.ID, cause error)
}

func (o *ServerOptions) withDefaults() ServerOptions {
	var d ServerOptions
	if o != nil {
		d = *o
	}
	d.Lease = orDefault(d.Lease, time.Minute)
	d.Serving = orDefault(d.Serving, 64)
	d.MaxWait = orDefault(d.MaxWait, 30*time.Second)
	d.Patience = orDefault(d.Patience, 3*time.Second)
	d.Stall = orDefault(d.Stall, 30*time.Second)
	if d.Peer == nil {
		d.Peer = func(*http.Request) uint64 { return 0 }
	}
	if d.Ended == nil {
		d.Ended = func(LeaseEnd) {}
	}
	if d.Damaged == nil {
		d.Damaged = func(protocol.ID, error) {}
	}
	return d
}

// orDefault returns v, or the default where v says nothing.
func orDefault[T int | int64 | time.Duration](v, by T) T {
	if v <= 0 {
		return by
	}
	return v
}

// ServerStats counts what a Server has done since it began.
type ServerStats struct {
	Served      int64 // bytes of files and chunks
	Requests    int64 // data requests that were answered with bytes
	Refused     int64 // requests of all kinds that were refused
	Leases      int   // held now
	PinnedBytes int64 // of the snapshots that leases hold now
	LeasesLost  int64 // expired, or displaced by the cap
	Quarantined int64 // snapshots found damaged
}

// Server serves the snapshots of a store to other members, and hands their control
// messages on. It is an http.Handler for all paths below Prefix; who may come in is the
// business of whoever wraps it.
type Server struct {
	store   *snapstore.Store
	control Control
	opts    ServerOptions
	leases  *leases
	checks  *checks

	serving chan struct{} // one for each data request that runs
	waiting chan struct{} // one for each Info that waits

	ctx  context.Context // ends at Close
	stop context.CancelFunc
	gate sync.RWMutex   // held for reading while a request is let in
	wg   sync.WaitGroup // requests and the lease clock

	served, requests, refused atomic.Int64
}

// NewServer makes a Server of what s holds; c answers the control messages. opts may be
// nil. Close the Server before the store.
func NewServer(s *snapstore.Store, c Control, opts *ServerOptions) *Server {
	o := opts.withDefaults()
	ctx, stop := context.WithCancel(context.Background())
	srv := &Server{store: s, control: c, opts: o, ctx: ctx, stop: stop,
		leases:  newLeases(o.Lease, o.MaxPinned, o.Ended),
		serving: make(chan struct{}, o.Serving), waiting: make(chan struct{}, o.Serving)}
	srv.checks = newChecks(ctx, s, o.Work, o.Patience, srv.damaged)
	srv.wg.Go(srv.watchLeases)
	return srv
}

// Close refuses what comes from now on, cuts what runs, and returns when all of it has
// ended and every pin is gone.
func (s *Server) Close() {
	s.gate.Lock()
	s.stop()
	s.gate.Unlock()
	s.wg.Wait()
	s.checks.wait()
	s.leases.shut()
}

// Stats tells what the Server has done so far.
func (s *Server) Stats() ServerStats {
	n, pinned, lost := s.leases.totals()
	return ServerStats{Served: s.served.Load(), Requests: s.requests.Load(), Refused: s.refused.Load(),
		Leases: n, PinnedBytes: pinned, LeasesLost: lost, Quarantined: s.checks.found()}
}

// watchLeases ends leases in time also when nobody asks for anything.
func (s *Server) watchLeases() {
	tick := time.NewTicker(max(s.opts.Lease/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.leases.expire()
		case <-s.ctx.Done():
			return
		}
	}
}

// damaged is told by the checks of a snapshot that is in quarantine now.
func (s *Server) damaged(id protocol.ID, cause error) {
	s.leases.endAll(id, "quarantined")
	s.opts.Damaged(id, cause)
}

// ServeHTTP answers one request. Each answer that is not what was asked for is a Refusal.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.enter() {
		s.refuse(w, refusal(protocol.Closed, "closing"))
		return
	}
	defer s.wg.Done()
	if err := s.route(w, r); err != nil {
		s.refuse(w, asRefusal(err))
	}
}

// enter counts a request in, unless the Server is closed.
func (s *Server) enter() bool {
	s.gate.RLock()
	defer s.gate.RUnlock()
	if s.ctx.Err() != nil {
		return false
	}
	s.wg.Add(1)
	return true
}

func (s *Server) refuse(w http.ResponseWriter, r *protocol.Refusal) {
	s.refused.Add(1)
	writeRefusal(w, r)
}

// route finds who answers. It takes paths as they are: an http.ServeMux would clean them
// and answer with a redirect. An error means that nothing has been written yet.
func (s *Server) route(w http.ResponseWriter, r *http.Request) error {
	path, ok := strings.CutPrefix(r.URL.EscapedPath(), Prefix)
	if !ok {
		return refusal(Malformed, "path %.200q", r.URL.EscapedPath())
	}
	part := strings.Split(path, "/")
	switch key := r.Method + " " + part[0]; {
	case key == "POST info" && len(part) == 1:
		return s.info(w, r)
	case key == "POST announce" && len(part) == 1:
		return s.announce(w, r)
	case key == "POST outcome" && len(part) == 1:
		return s.outcome(w, r)
	case key == "GET chunks" && len(part) == 2:
		return s.limited(w, r, func() error { return s.chunk(w, part[1]) })
	case part[0] == "snapshots" && len(part) > 2:
		return s.routeSnapshot(w, r, part[1], part[2:])
	}
	return refusal(Malformed, "no such thing: %.10q %.200q", r.Method, r.URL.EscapedPath())
}

func (s *Server) routeSnapshot(w http.ResponseWriter, r *http.Request, name string, part []string) error {
	id, err := protocol.ParseID(name)
	if err != nil {
		return refusal(Malformed, "%v", err)
	}
	holder := protocol.TransferID(r.Header.Get(transferHeader))
	if holder == "" || len(holder) > maxTransfer {
		return refusal(Malformed, "header %s of %d bytes", transferHeader, len(holder))
	}
	k := leaseKey{id, holder}

	switch key := r.Method + " " + part[0]; {
	case key == "GET manifest" && len(part) == 1:
		return s.limited(w, r, func() error { return s.manifest(w, r, k) })
	case key == "POST lease" && len(part) == 1:
		return s.takeLease(w, r, k)
	case key == "DELETE lease" && len(part) == 1:
		s.leases.end(k, "released")
		w.WriteHeader(http.StatusNoContent)
		return nil
	case key == "GET files" && len(part) == 2:
		return s.limited(w, r, func() error { return s.file(w, r, k, part[1]) })
	case key == "POST pieces" && len(part) == 1:
		return s.limited(w, r, func() error { return s.pieces(w, r, k) })
	case key == "POST doubt" && len(part) == 1:
		return s.limited(w, r, func() error { return s.doubt(w, r, k) })
	}
	return refusal(Malformed, "no such thing: %.10q %.200q", r.Method, r.URL.EscapedPath())
}

// limited runs a data request if there is room for one more.
func (s *Server) limited(w http.ResponseWriter, r *http.Request, serve func() error) error {
	select {
	case s.serving <- struct{}{}:
		defer func() { <-s.serving }()
	default:
		return refusal(protocol.Busy, "%d requests are being served", cap(s.serving))
	}
	// At Close a receiver that takes its time must not be waited for. The deadline ends with
	// the request: net/http sees to that.
	rc := http.NewResponseController(w)
	unhook := context.AfterFunc(s.ctx, func() { _ = rc.SetWriteDeadline(time.Unix(1, 0)) })
	defer unhook()
	return serve()
}

func (s *Server) info(w http.ResponseWriter, r *http.Request) error {
	var q protocol.InfoRequest
	if err := readControl(r, &q); err != nil {
		return err
	}
	select {
	case s.waiting <- struct{}{}:
		defer func() { <-s.waiting }()
	default:
		return refusal(protocol.Busy, "%d members wait for an answer", cap(s.waiting))
	}
	q.Wait = min(max(q.Wait, 0), s.opts.MaxWait)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	return writeControl(w, s.control.Info(ctx, q))
}

func (s *Server) announce(w http.ResponseWriter, r *http.Request) error {
	var a protocol.Announce
	if err := readControl(r, &a); err != nil {
		return err
	}
	s.control.Announce(r.Context(), a)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) outcome(w http.ResponseWriter, r *http.Request) error {
	var o protocol.Outcome
	if err := readControl(r, &o); err != nil {
		return err
	}
	if err := s.control.Outcome(r.Context(), o); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// readControl decodes the body of a control message, of which only so much is read.
func readControl(r *http.Request, v any) error { return readJSON(r, maxControl, v) }

func readJSON(r *http.Request, limit int64, v any) error {
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	if err != nil {
		return refusal(Malformed, "read body: %v", err)
	}
	if int64(len(body)) > limit {
		return refusal(Malformed, "body over %d bytes", limit)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return refusal(Malformed, "body: %v", err)
	}
	return nil
}

// writeControl sends v as the answer.
func writeControl(w http.ResponseWriter, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return refusal(protocol.Busy, "encode answer: %v", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body) // the asker may have left: there is nobody to tell
	return nil
}
