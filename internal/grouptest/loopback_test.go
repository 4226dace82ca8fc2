//go:build linux

package grouptest

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
)

// loopback is a network of proxies. Members know each other by the proxies' addresses; a
// proxy finds out whose connection it has got from the kernel's tables. What is cut is held
// back rather than lost: it comes when the line is mended, as TCP would send it again.
type loopback struct {
	t     testing.TB
	owned sync.WaitGroup

	mu      sync.Mutex // guards the rest
	proxies []*proxy
	lines   map[net.Conn]bool
	cuts    map[[2]int]chan struct{} // closed when mended
}

type proxy struct {
	net.Listener
	behind string
	pid    int // of the member, 0 before it ran
}

// theTests is the number of those who are no members.
const theTests = -1

func newLoopback(t testing.TB) *loopback {
	return &loopback{t: t, lines: map[net.Conn]bool{}, cuts: map[[2]int]chan struct{}{}}
}

func (l *loopback) add() (listen, url string, err error) {
	p := &proxy{}
	if p.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return "", "", err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	i := len(l.proxies)
	l.proxies = append(l.proxies, p)
	// The proxy's port is taken at its own address only.
	_, port, _ := net.SplitHostPort(p.Addr().String())
	p.behind = net.JoinHostPort("127.0.1.1", port)
	l.owned.Go(func() { l.accept(i, p) })
	return p.behind, "http://" + p.Addr().String(), nil
}

func (l *loopback) start(i int, cmd *exec.Cmd) error {
	if !namespaces {
		// The signal comes when a thread ends, and where there are namespaces some do.
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	}
	err := cmd.Start()
	if err == nil {
		l.mu.Lock()
		l.proxies[i].pid = cmd.Process.Pid
		l.mu.Unlock()
	}
	return err
}

func (l *loopback) cut(from, to int, lose bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cutLocked(from, to, lose)
	return nil
}

func (l *loopback) cutLocked(from, to int, lose bool) {
	key := [2]int{from, to}
	switch was := l.cuts[key]; {
	case lose && was == nil:
		l.cuts[key] = make(chan struct{})
	case !lose && was != nil:
		close(was)
		delete(l.cuts, key)
	}
}

// unplug leaves cuts behind only while the member is off the net.
func (l *loopback) unplug(i int, off bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for j := theTests; j < len(l.proxies); j++ {
		if j != i {
			l.cutLocked(i, j, off)
			l.cutLocked(j, i, off)
		}
	}
	return nil
}

func (l *loopback) close() error {
	l.mu.Lock()
	for _, p := range l.proxies {
		p.Close()
	}
	for c := range l.lines {
		c.Close()
	}
	for key := range l.cuts {
		l.cutLocked(key[0], key[1], false)
	}
	l.mu.Unlock()
	l.owned.Wait()
	return nil
}

func (l *loopback) accept(i int, p *proxy) {
	for {
		in, err := p.Accept()
		if err != nil {
			return
		}
		l.owned.Go(func() { l.carry(in, i, p) })
	}
}

// carry carries one connection to the member behind a proxy.
func (l *loopback) carry(in net.Conn, to int, p *proxy) {
	defer in.Close()
	from := l.caller(in)
	out, err := net.Dial("tcp", p.behind)
	if err != nil {
		return
	}
	defer out.Close()
	l.mu.Lock()
	l.lines[in], l.lines[out] = true, true
	l.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { l.pump(out, in, from, to) })
	both.Go(func() { l.pump(in, out, to, from) })
	both.Wait()
	l.mu.Lock()
	delete(l.lines, in)
	delete(l.lines, out)
	l.mu.Unlock()
}

// pump moves bytes from one member to another while the line is whole. The end of one
// direction ends both.
func (l *loopback) pump(dst, src net.Conn, from, to int) {
	defer func() {
		dst.Close()
		src.Close()
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		l.pass(from, to)
		if n > 0 {
			if _, werr := dst.Write(buf[:n]); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass returns when nothing is cut between the two.
func (l *loopback) pass(from, to int) {
	for {
		l.mu.Lock()
		mended := l.cuts[[2]int{from, to}]
		l.mu.Unlock()
		if mended == nil {
			return
		}
		<-mended
	}
}

// caller tells which member a connection comes from.
func (l *loopback) caller(c net.Conn) int {
	inode := socketInode(c.RemoteAddr().(*net.TCPAddr), c.LocalAddr().(*net.TCPAddr))
	l.mu.Lock()
	var pids []int
	for _, p := range l.proxies {
		pids = append(pids, p.pid)
	}
	l.mu.Unlock()
	return slices.IndexFunc(pids, func(pid int) bool { return pid != 0 && holds(pid, inode) }) // or theTests
}

// socketInode finds the socket with these ends among those of this machine.
func socketInode(local, remote *net.TCPAddr) string {
	// The first thread, of which /proc/net tells, may be in a namespace of its own by now.
	table, err := os.Open("/proc/thread-self/net/tcp")
	if err != nil {
		return ""
	}
	defer table.Close()
	want := fmt.Appendf(nil, " 0100007F:%04X 0100007F:%04X ", local.Port, remote.Port)
	for lines := bufio.NewScanner(table); lines.Scan(); {
		if fields := bytes.Fields(lines.Bytes()); bytes.Contains(lines.Bytes(), want) && len(fields) > 9 {
			return string(fields[9])
		}
	}
	return ""
}

// holds tells whether a process has a socket open.
func holds(pid int, inode string) bool {
	open, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range open {
		if to, err := os.Readlink(fd); err == nil && to == "socket:["+inode+"]" {
			return true
		}
	}
	return false
}
