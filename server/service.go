package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/server/internal/tasklog"
)

// node is what the service needs of a raftnode.Node.
type node interface {
	Group() string
	Propose(ctx context.Context, data []byte) ([]byte, error)
	ReadIndex(ctx context.Context) error
	Leader() (protocol.Member, bool)
	Status() raftnode.Status
	AddLearner(ctx context.Context, name, url string) (protocol.Member, error)
	Promote(ctx context.Context, name string) error
	Remove(ctx context.Context, name string) error
	TransferLeader(ctx context.Context, name string) error
	Snapshot(ctx context.Context) (protocol.ID, error)
}

// Deadlines of what a request waits for.
const (
	proposeTimeout  = 10 * time.Second
	readTimeout     = 5 * time.Second
	changeTimeout   = 15 * time.Second // where the client does not say how long
	snapshotTimeout = 10 * time.Minute
)

// service is the API over a node and its state.
type service struct {
	node   node
	log    *slog.Logger
	now    func() time.Time
	state  atomic.Pointer[tasklog.Machine] // nil until the node has opened it
	failed func() error                    // why the member has stopped by itself
	first  firstStart
	appends
	cluster
}

// newService returns the API of n, which may be about to start.
func newService(n node, logger *slog.Logger) *service {
	s := &service{node: n, log: logger, now: time.Now, failed: func() error { return nil }}
	s.appends.init(s)
	s.cluster.init()
	return s
}

// close ends what is on its way and waits for it.
func (s *service) close() { s.appends.close() }

// firstStart is what a member waits for that has never run.
type firstStart struct {
	joins bool   // a group that exists, as a learner
	waits string // for whom; "" after the first start
}

// started says whether the node knows its group, without which it cannot be changed.
func (s *service) started() error {
	switch {
	case s.state.Load() != nil:
		return nil
	case s.first.waits != "":
		return fmt.Errorf("%w: %s", errStarting, s.first.waits)
	}
	return errStarting
}

// handler routes the API.
func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+cpwire.PathAppend, s.serveAppend)
	mux.HandleFunc("GET "+cpwire.PathTasks, s.serveTasks)
	mux.HandleFunc("GET "+cpwire.PathHead, s.serveHead)
	mux.HandleFunc("GET "+cpwire.PathEntry, s.serveEntry)
	mux.HandleFunc("GET "+cpwire.PathHistory, s.serveHistory)
	mux.HandleFunc("POST "+cpwire.PathTrim, s.serveTrim)
	mux.HandleFunc("GET "+cpwire.PathStatus, s.serveStatus)
	mux.HandleFunc("GET "+cpwire.PathCluster, s.serveCluster)
	mux.HandleFunc("POST "+cpwire.PathAddLearner, s.serveAddLearner)
	mux.HandleFunc("POST "+cpwire.PathPromote, s.change("promote", s.node.Promote))
	mux.HandleFunc("POST "+cpwire.PathRemove, s.change("remove", s.node.Remove))
	mux.HandleFunc("POST "+cpwire.PathTransferLeader, s.change("transfer leadership to", s.node.TransferLeader))
	mux.HandleFunc("POST "+cpwire.PathSnapshot, s.serveSnapshot)
	mux.HandleFunc("GET /healthz", s.serveHealth)
	mux.HandleFunc("GET /readyz", s.serveReady)
	mux.HandleFunc(anyOther, func(w http.ResponseWriter, r *http.Request) {
		err := errNoRoute
		if allow := allowed(mux, r); allow != "" {
			w.Header().Set("Allow", allow)
			err = errMethod
		}
		s.fail(w, r.Method, r.URL.Path, err)
	})
	return s.inGroup(mux)
}

// anyOther is the pattern of what no other pattern fits.
const anyOther = "/v1/"

// allowed lists the methods with which the path of a request would be served.
func allowed(mux *http.ServeMux, r *http.Request) string {
	var methods []string
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost} {
		with := *r
		with.Method = method
		if _, pattern := mux.Handler(&with); pattern != anyOther {
			methods = append(methods, method)
		}
	}
	return strings.Join(methods, ", ")
}

// inGroup names the group in every answer, and refuses who means another one.
func (s *service) inGroup(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		group := s.node.Group()
		w.Header().Set(cpwire.HeaderGroup, group)
		if want := r.Header.Get(cpwire.HeaderGroup); want != "" && group != "" && want != group {
			s.fail(w, r.Method, r.URL.Path, errOtherGroup)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// readable returns the state once it has everything that was answered before now.
func (s *service) readable(ctx context.Context) (*tasklog.Machine, error) {
	if err := s.started(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := s.node.ReadIndex(ctx); err != nil {
		return nil, err
	}
	return s.state.Load(), nil
}

// taskOf reads the names in a path.
func taskOf(r *http.Request) (cpwire.Task, error) {
	t := cpwire.Task{Job: r.PathValue("job"), Name: r.PathValue("task")}
	return t, t.Validate()
}

// uintOf reads a number of the query; none is 0.
func uintOf(r *http.Request, name string) (uint64, error) {
	v := r.FormValue(name)
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		return 0, invalid("%s=%.40q is no number", name, v)
	}
	return n, nil
}

func (s *service) serveHead(w http.ResponseWriter, r *http.Request) {
	const op = "read head of"
	task, err := taskOf(r)
	if err != nil {
		s.fail(w, op, task.String(), err)
		return
	}
	e, changed, err := s.head(r, task)
	switch {
	case err != nil:
		s.fail(w, op, task.String(), err)
	case !changed:
		w.WriteHeader(http.StatusNoContent)
	default:
		s.sent(cpwire.WriteEntry(w, &e))
	}
}

// head reads the newest entry. With after in the query it waits until there is one above
// that slot, and tells whether one came in time.
func (s *service) head(r *http.Request, task cpwire.Task) (e cpwire.Entry, changed bool, err error) {
	m, err := s.readable(r.Context())
	if err != nil {
		return e, false, err
	}
	if r.URL.Query().Has("after") {
		if changed, err = s.await(r, m, task); !changed || err != nil {
			return e, false, err
		}
	}
	e, err = m.Head(task, r.FormValue("body") != "0")
	return e, err == nil, err
}

func (s *service) await(r *http.Request, m *tasklog.Machine, task cpwire.Task) (bool, error) {
	after, err := uintOf(r, "after")
	if err != nil {
		return false, err
	}
	seconds, err := uintOf(r, "wait")
	if err != nil {
		return false, err
	}
	wait := min(time.Duration(min(seconds, 3600))*time.Second, cpwire.MaxWait)
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	if err = m.Await(ctx, task, after); errors.Is(err, context.DeadlineExceeded) {
		return false, nil
	}
	return err == nil, err
}

func (s *service) serveEntry(w http.ResponseWriter, r *http.Request) {
	task, err := taskOf(r)
	subject := task.String() + " at slot " + r.PathValue("slot")
	slot, serr := strconv.ParseUint(r.PathValue("slot"), 10, 64)
	if err == nil && serr != nil {
		err = invalid("slot %.40q is no number", r.PathValue("slot"))
	}
	var m *tasklog.Machine
	if err == nil {
		m, err = s.readable(r.Context())
	}
	var e cpwire.Entry
	if err == nil {
		e, err = m.Get(task, slot)
	}
	if err != nil {
		s.fail(w, "read entry of", subject, err)
		return
	}
	s.sent(cpwire.WriteEntry(w, &e))
}

func (s *service) serveHistory(w http.ResponseWriter, r *http.Request) {
	task, err := taskOf(r)
	var after uint64
	if err == nil {
		after, err = uintOf(r, "after")
	}
	var m *tasklog.Machine
	if err == nil {
		m, err = s.readable(r.Context())
	}
	var es []cpwire.Entry
	if err == nil {
		es, err = m.History(task, after, r.FormValue("bodies") == "true")
	}
	if err != nil {
		s.fail(w, "read history of", task.String(), err)
		return
	}
	var b []byte
	for i := range es {
		b = cpwire.AppendEntry(b, &es[i])
	}
	s.write(w, "application/octet-stream", b)
}

func (s *service) serveTasks(w http.ResponseWriter, r *http.Request) {
	after, err := afterTask(r.FormValue("after"))
	var limit uint64
	if err == nil {
		limit, err = uintOf(r, "limit")
	}
	var m *tasklog.Machine
	if err == nil {
		m, err = s.readable(r.Context())
	}
	if limit == 0 || limit > cpwire.MaxPage {
		limit = cpwire.MaxPage
	}
	var tasks []cpwire.Task
	if err == nil {
		tasks, err = m.Tasks(after, int(limit))
	}
	if err != nil {
		s.fail(w, "list tasks", "", err)
		return
	}
	var b []byte
	for _, t := range tasks {
		b = append(append(b, t.String()...), '\n')
	}
	s.write(w, "text/plain; charset=utf-8", b)
}

func (s *service) serveHealth(w http.ResponseWriter, _ *http.Request) {
	if err := s.failed(); err != nil {
		s.fail(w, "run member", s.node.Status().Name, err)
		return
	}
	s.write(w, "text/plain; charset=utf-8", []byte("ok\n"))
}

// serveReady says whether the member can be of use: it has its state and knows a leader.
func (s *service) serveReady(w http.ResponseWriter, _ *http.Request) {
	err := s.failed()
	if err == nil {
		err = s.started()
	}
	if _, known := s.node.Leader(); err == nil && !known {
		err = errNoLeader
	}
	if err != nil {
		s.fail(w, "run member", s.node.Status().Name, err)
		return
	}
	s.write(w, "text/plain; charset=utf-8", []byte("ready\n"))
}

func (s *service) write(w http.ResponseWriter, contentType string, b []byte) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, err := w.Write(b)
	s.sent(err)
}

// sent notes that an answer did not get through, which is nobody's fault here.
func (s *service) sent(err error) {
	if err != nil && !errors.Is(err, io.ErrClosedPipe) {
		s.log.Debug("answer not sent", "err", err)
	}
}
