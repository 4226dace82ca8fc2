package blobservers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

const (
	startTime = 90 * time.Second // for a server to answer on a busy machine
	pollEvery = 20 * time.Millisecond
	portTries = 5
)

// program is how a kind of server is started.
type program struct {
	name  string
	ports int // how many free ports it needs; the first one is its address
	// command makes the command line for the ports.
	command func(ports []string) *exec.Cmd
	// ready is nil when the server answers at its address.
	ready func(ctx context.Context, addr string) error
}

// Server is a running server process. Its test ends it.
type Server struct {
	// Addr is its HOST:PORT. It stays the same over a Restart.
	Addr string

	t     T
	prog  program
	ports []string
	log   string // file of what it writes
	run   *running
}

// running is one life of a process.
type running struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has been waited for
}

// errTaken says that another program has one of the ports.
var errTaken = errors.New("port taken by another")

// start starts a server on free ports. A port that somebody else takes between the choice and
// the server's own bind costs another try.
func start(t T, prog program) *Server {
	t.Helper()
	s := &Server{t: t, prog: prog, log: filepath.Join(t.TempDir(), prog.name+".log")}
	t.Cleanup(s.end)
	err := errTaken
	for try := 0; try < portTries && errors.Is(err, errTaken); try++ {
		if s.ports, err = freePorts(prog.ports); err != nil {
			break
		}
		s.Addr = net.JoinHostPort("127.0.0.1", s.ports[0])
		err = s.launch()
	}
	if err != nil {
		t.Fatalf("start %s: %v\n%s", prog.name, err, s.tail())
	}
	return s
}

// Kill ends the server as a crash would.
func (s *Server) Kill() {
	if s.run != nil {
		_ = s.run.cmd.Process.Kill() // an error says that it has ended
		<-s.run.ended
		s.run = nil
	}
}

// Restart starts a killed server again, with its data and at its address.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	ctx, cancel := context.WithTimeout(s.t.Context(), startTime)
	defer cancel()
	err := poll(ctx, func() error { return s.launch() })
	if err != nil {
		s.t.Fatalf("start %s again: %v\n%s", s.prog.name, err, s.tail())
	}
}

// end is the server's cleanup.
func (s *Server) end() {
	if s.run != nil {
		select {
		case <-s.run.ended:
			s.t.Errorf("%s ended by itself", s.prog.name)
		default:
		}
	}
	s.Kill()
	if s.t.Failed() {
		s.t.Logf("%s wrote:\n%s", s.prog.name, s.tail())
	}
}

// launch starts the process and waits until it answers.
func (s *Server) launch() error {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := s.prog.command(s.ports)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()
	if s.run, err = spawn(cmd); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), startTime)
	defer cancel()
	err = poll(ctx, func() error { return s.answers(ctx) })
	if err != nil {
		s.Kill()
		if taken(s.tail()) {
			err = errors.Join(errTaken, err)
		}
	}
	return err
}

// errEnded ends the waiting for a server.
var errEnded = errors.New("it ended")

// answers is nil when this process, and not one that took the port before, is ready.
func (s *Server) answers(ctx context.Context) error {
	select {
	case <-s.run.ended:
		return errEnded
	default:
	}
	if !listens(s.run.cmd.Process.Pid, s.ports[0]) {
		return fmt.Errorf("nothing listens on port %s", s.ports[0])
	}
	if s.prog.ready == nil {
		return nil
	}
	return s.prog.ready(ctx, s.Addr)
}

// spawn starts a process from a thread of its own that waits for it: the kernel ends a child
// when the thread that started it ends, not only when the process does.
func spawn(cmd *exec.Cmd) (*running, error) {
	started := make(chan error)
	r := &running{cmd: cmd, ended: make(chan struct{})}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in its log
		}
		close(r.ended)
	}()
	if err := <-started; err != nil {
		<-r.ended
		return nil, err
	}
	return r, nil
}

// poll repeats try until it succeeds, the server has ended, or ctx is over.
func poll(ctx context.Context, try func() error) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := try()
		if err == nil || errors.Is(err, errEnded) && !errors.Is(err, errTaken) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// freePorts returns ports that were free a moment ago, all different.
func freePorts(n int) ([]string, error) {
	var ports []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		ports = append(ports, strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
	}
	return ports, nil
}

// taken tells from what a server wrote that it could not have its port.
func taken(log string) bool {
	return strings.Contains(log, "address already in use") || strings.Contains(log, "EADDRINUSE")
}

// tail is the end of what the server wrote.
func (s *Server) tail() string {
	data, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	const most = 4000
	return string(bytes.TrimSpace(data[max(0, len(data)-most):]))
}
