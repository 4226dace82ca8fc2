//go:build linux

package grouptest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// network is what lies between members, which it numbers from 0, and between them and the
// tests. Its methods are called by one goroutine at a time.
type network interface {
	// add makes a place for the next member and tells where it listens and where others
	// find it.
	add() (listen, url string, err error)
	// start starts the process of a member at its place.
	start(i int, cmd *exec.Cmd) error
	// cut loses what one member sends to another, until it is mended.
	cut(from, to int, lose bool) error
	// unplug takes a member off the net, from the tests too, until it is plugged in again.
	unplug(i int, off bool) error
	close() error
}

// newNetwork makes the best network that can be had here.
func newNetwork(t testing.TB) network {
	t.Helper()
	if !namespaces {
		return newLoopback(t)
	}
	s, err := newSwitched()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// switched is a bridge with a network namespace at each of its ports. Who is where is told
// by permanent neighbour entries: to cut one direction, the sender gets a wrong one, and its
// frames reach nobody.
type switched struct {
	n     int // of the bridge
	hosts []*host
}

type host struct {
	ns      *os.File
	ip, mac string
	port    string // of the bridge
}

var bridges atomic.Int32

const (
	servicePort = "7480" // a namespace has no other service
	nobody      = "02:00:00:00:00:fe"
)

func newSwitched() (*switched, error) {
	s := &switched{n: int(bridges.Add(1))}
	br := s.bridge()
	return s, ipCommand("link add "+br+" type bridge",
		fmt.Sprintf("addr add %s/24 dev %s", s.ip(253), br), "link set "+br+" up")
}

func (s *switched) bridge() string  { return fmt.Sprint("br", s.n) }
func (s *switched) ip(i int) string { return fmt.Sprintf("10.%d.%d.%d", 64+s.n/256, s.n%256, i+1) }

func (s *switched) add() (listen, url string, err error) {
	i := len(s.hosts)
	h := &host{ip: s.ip(i), mac: fmt.Sprintf("02:01:00:%02x:%02x:%02x", s.n/256, s.n%256, i+1), port: fmt.Sprintf("p%d-%d", s.n, i+1)}
	if h.ns, err = newNamespace(); err != nil {
		return "", "", err
	}
	s.hosts = append(s.hosts, h)
	if err := ipCommand(
		fmt.Sprintf("link add %s type veth peer name eth0 address %s netns /proc/%d/fd/%d", h.port, h.mac, os.Getpid(), h.ns.Fd()),
		fmt.Sprintf("link set %s master %s up", h.port, s.bridge())); err != nil {
		return "", "", err
	}
	lines := []string{"link set lo up", "addr add " + h.ip + "/24 dev eth0", "link set eth0 up"}
	if err := h.do(func() error { return ipCommand(lines...) }); err != nil {
		return "", "", err
	}
	for j := range i {
		if err := s.introduce(i, j, s.hosts[j].mac); err != nil {
			return "", "", err
		}
		if err := s.introduce(j, i, h.mac); err != nil {
			return "", "", err
		}
	}
	address := net.JoinHostPort(h.ip, servicePort)
	return address, "http://" + address, nil
}

// introduce tells one host the other's hardware address.
func (s *switched) introduce(to, other int, mac string) error {
	line := fmt.Sprintf("neigh replace %s lladdr %s dev eth0 nud permanent", s.hosts[other].ip, mac)
	return s.hosts[to].do(func() error { return ipCommand(line) })
}

func (s *switched) start(i int, cmd *exec.Cmd) error { return s.hosts[i].do(cmd.Start) }

func (s *switched) cut(from, to int, lose bool) error {
	mac := s.hosts[to].mac
	if lose {
		mac = nobody
	}
	return s.introduce(from, to, mac)
}

func (s *switched) unplug(i int, off bool) error {
	state := "up"
	if off {
		state = "down"
	}
	return ipCommand(fmt.Sprintf("link set %s %s", s.hosts[i].port, state))
}

func (s *switched) close() error {
	for _, h := range s.hosts {
		h.ns.Close() // its end of the link goes with it
	}
	return ipCommand("link del " + s.bridge())
}

// newNamespace returns an empty network namespace, which lasts while it is open or in use.
func newNamespace() (ns *os.File, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread must not serve others
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			ns, err = os.Open("/proc/thread-self/ns/net")
		}
	}()
	<-done
	return ns, err
}

// do runs f where the host is.
func (h *host) do(f func() error) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good, as above
		if err = unix.Setns(int(h.ns.Fd()), unix.CLONE_NEWNET); err == nil {
			err = f()
		}
	}()
	<-done
	return err
}
