package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/server/internal/tasklog"
)

// TLS names the files of a member's identity towards other members and clients.
type TLS = raftnode.TLS

// Options describe a member. ID, Data and Listen must be set, and either TLS or Insecure.
type Options struct {
	ID     string // name of the member, unique in its group
	Data   string // its directory
	Listen string // HOST:PORT

	// URL is where others reach this member. The default is the one that InitialCluster
	// has for ID, else the address of the listener.
	URL string
	// InitialCluster names the first members of a new group with their URLs. It is needed
	// at the first start only, as is Join.
	InitialCluster map[string]string
	// Join has the URLs of members of the group that this one was added to.
	Join []string

	SnapshotEntries  uint64        // applied entries between snapshots; 0 means the default of raftnode
	TrailingEntries  uint64        // entries kept below a snapshot; 0 means the default of raftnode
	SnapshotInterval time.Duration // greatest age of a snapshot while entries come; 0 for none
	RateLimit        int64         // bytes a second that snapshots are fetched with; 0 for no limit

	// Insecure allows plain HTTP; without it TLS must be set.
	Insecure bool
	TLS      *TLS

	Logger *slog.Logger // nil discards
}

func (o *Options) validate() error {
	switch {
	case checkpoint.ValidName(o.ID) != nil:
		return checkpoint.ValidName(o.ID)
	case o.Data == "":
		return invalid("no data directory")
	case o.TLS == nil && !o.Insecure:
		return invalid("neither certificates nor leave to go without")
	case len(o.InitialCluster) > 0 && o.InitialCluster[o.ID] == "":
		return invalid("the initial cluster does not name this member")
	}
	return nil
}

// Server is a running member.
type Server struct {
	url  string
	addr net.Addr
	log  *slog.Logger
	node *raftnode.Node
	svc  *service
	http *http.Server

	done  chan struct{}
	owned sync.WaitGroup
	once  sync.Once
	shut  error // what Close returned

	mu  sync.Mutex // guards err
	err error
}

// Start starts a member and returns when it answers requests. Its first start then waits
// for the others in the background, so that members can be started one after the other:
// /readyz tells when it has found its group, Done when it cannot. ctx bounds Start only.
func Start(ctx context.Context, opts Options) (*Server, error) {
	s, err := start(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("start server %s: %w", opts.ID, err)
	}
	return s, nil
}

func start(ctx context.Context, opts Options) (*Server, error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{log: opts.Logger, done: make(chan struct{}), http: &http.Server{
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(opts.Logger.Handler(), slog.LevelDebug),
	}}
	if err := raftnode.ConfigureServer(s.http, opts.TLS); err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", opts.Listen)
	if err != nil {
		return nil, err
	}
	if err := s.build(opts, ln); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	s.run(ln, opts)
	return s, nil
}

// reachableAt is the URL that others are told, "" for the one that the directory knows
// from the first start.
func (o *Options) reachableAt(ln net.Listener) string {
	if o.URL != "" {
		return o.URL
	}
	if raftnode.Known(o.Data) {
		return ""
	}
	if u := o.InitialCluster[o.ID]; u != "" {
		return u
	}
	if o.TLS != nil {
		return "https://" + ln.Addr().String()
	}
	return "http://" + ln.Addr().String()
}

// first tells what the start of a member that has never run waits for. A log is there from
// the moment when the wait was over.
func (o *Options) first() firstStart {
	if _, err := os.Stat(filepath.Join(o.Data, "log")); err == nil {
		return firstStart{}
	}
	if len(o.Join) > 0 {
		return firstStart{true, "it waits in its first start for a member of the group at " + strings.Join(o.Join, ", ") + " that knows it by add-learner"}
	}
	var others []string
	for id, u := range o.InitialCluster {
		if id != o.ID {
			others = append(others, id+" at "+u)
		}
	}
	if len(others) == 0 {
		return firstStart{}
	}
	slices.Sort(others)
	return firstStart{waits: "it waits in its first start until more than half of the initial members answer; the others are " + strings.Join(others, ", ")}
}

// build makes what serves, without running any of it.
func (s *Server) build(opts Options, ln net.Listener) error {
	n, err := raftnode.New(raftnode.Options{
		Name: opts.ID, Dir: opts.Data, URL: opts.reachableAt(ln), InitialCluster: opts.InitialCluster, Join: opts.Join,
		SnapshotEntries: opts.SnapshotEntries, TrailingEntries: opts.TrailingEntries,
		SnapshotInterval: opts.SnapshotInterval, RateLimit: opts.RateLimit,
		TLS: opts.TLS, Insecure: opts.Insecure, Logger: opts.Logger,
	})
	if err != nil {
		return err
	}
	s.url, s.addr = n.Status().URL, ln.Addr()
	s.node, s.svc = n, newService(n, opts.Logger)
	s.svc.failed, s.svc.first = s.Err, opts.first()
	if opts.TLS != nil {
		config, err := opts.TLS.Client()
		if err != nil {
			return errors.Join(err, n.Close())
		}
		s.svc.cluster.http.Transport = &http.Transport{TLSClientConfig: config}
	}
	members := n.Handler()
	mux := http.NewServeMux()
	mux.Handle("/raft/", members)
	mux.Handle("/raftsnap/", members)
	mux.Handle("/", s.svc.handler())
	s.http.Handler = mux
	return nil
}

// run starts the server's goroutines.
func (s *Server) run(ln net.Listener, opts Options) {
	s.owned.Go(func() {
		serve := s.http.Serve
		if opts.TLS != nil {
			serve = func(ln net.Listener) error { return s.http.ServeTLS(ln, "", "") }
		}
		if err := serve(ln); !errors.Is(err, http.ErrServerClosed) {
			s.fail(fmt.Errorf("serve %s: %w", opts.Listen, err))
		}
	})
	s.owned.Go(func() {
		err := s.node.Start(context.Background(), s.open) // Close ends it
		if err == nil {
			<-s.node.Done()
			err = s.node.Err()
		}
		s.fail(err)
	})
}

// open opens the state for the node, which closes it.
func (s *Server) open(dir string) (raftnode.StateMachine, error) {
	m, err := tasklog.Open(dir, &tasklog.Options{Logger: s.log, Failed: s.fail, Fatal: func(err error) {
		s.fail(fmt.Errorf("%w: %w; remove %s and start again: the state is installed anew", checkpoint.ErrCorrupt, err, dir))
		select {} // whoever called holds locks of the database, which nobody may use now
	}})
	if err != nil {
		return nil, err
	}
	s.svc.state.Store(m)
	return m, nil
}

// fail notes that the member has stopped; the first reason counts.
func (s *Server) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.done:
	default:
		s.err = err
		close(s.done)
	}
}

// URL returns where others reach the member.
func (s *Server) URL() string { return s.url }

// Addr returns the address that the member listens on.
func (s *Server) Addr() net.Addr { return s.addr }

// Done is closed when the member has stopped, by Close or by itself.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err returns why the member stopped by itself, nil before that and after Close.
func (s *Server) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// closeTimeout is how long requests on their way have after the member has stopped: all of
// them get an answer at once, so it is only for slow clients.
const closeTimeout = 3 * time.Second

// Close stops the member and waits for it.
func (s *Server) Close() error {
	s.once.Do(func() {
		s.fail(nil)
		err := s.node.Close()
		s.svc.close()
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		if serr := s.http.Shutdown(ctx); serr != nil {
			serr = s.http.Close()
			err = errors.Join(err, serr)
		}
		s.owned.Wait()
		s.svc.cluster.http.CloseIdleConnections()
		if err != nil && !errors.Is(err, fs.ErrClosed) {
			s.shut = fmt.Errorf("close server: %w", err)
		}
	})
	return s.shut
}
