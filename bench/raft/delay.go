//go:build linux

package main

import (
	"context"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// delayPipe is the size of a pipe: as large as anybody may have it.
const delayPipe = 1 << 20

// delay is a proxy that holds everything back for a while, in each direction, and limits
// nothing besides. The bytes never enter this process: the kernel moves them from socket to
// pipe and from pipe to socket without copying, so that the proxy takes less of the
// processors, which sender and receiver need too. Only what is sent is delayed: connections
// open at once, and no TCP window ever notices.
type delay struct {
	l    *net.TCPListener
	to   string
	each time.Duration
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu   sync.Mutex
	free []*pipe // guarded by mu
}

// newDelay starts a proxy in front of an address.
func newDelay(ctx context.Context, to string, each time.Duration) (*delay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	d := &delay{l: l.(*net.TCPListener), to: to, each: each}
	d.ctx, d.stop = context.WithCancel(ctx)
	d.wg.Go(d.accept)
	return d, nil
}

func (d *delay) addr() string { return d.l.Addr().String() }

// close cuts all connections.
func (d *delay) close() error {
	d.stop()
	err := d.l.Close()
	d.wg.Wait()
	for _, p := range d.free {
		p.close()
	}
	return err
}

func (d *delay) accept() {
	for {
		in, err := d.l.AcceptTCP()
		if err != nil {
			return
		}
		d.wg.Go(func() { d.connect(in) })
	}
}

// connect relays a connection until both sides have ended it.
func (d *delay) connect(in *net.TCPConn) {
	defer in.Close()
	conn, err := net.Dial("tcp", d.to)
	if err != nil {
		return
	}
	defer conn.Close()
	out := conn.(*net.TCPConn)
	defer context.AfterFunc(d.ctx, func() { in.Close(); out.Close() })()
	var wg sync.WaitGroup
	wg.Go(func() { d.relay(in, out) })
	wg.Go(func() { d.relay(out, in) })
	wg.Wait()
}

// parcel is so many bytes of a pipe, which go on at a certain time.
type parcel struct {
	pipe *pipe
	n    int
	due  time.Time
	last bool // nothing comes after it in this pipe
}

// relay moves what comes from one connection to the other, in time. Whatever is under way
// lies in as many pipes as it takes.
func (d *delay) relay(from, to *net.TCPConn) {
	under := make(chan parcel, 1<<15)
	var taking sync.WaitGroup
	taking.Go(func() {
		defer close(under)
		d.take(from, under)
	})
	broken := false
	for next := range under {
		if wait := time.Until(next.due); wait > 0 && !broken {
			<-time.After(wait)
		}
		if !broken && next.n > 0 && !next.pipe.drain(to, next.n) {
			from.Close()
			broken = true
		}
		if next.last {
			d.giveBack(next.pipe, broken)
		}
	}
	taking.Wait()
	_ = to.CloseWrite() // it may be closed
}

// take fills pipes with what comes, until nothing does any more.
func (d *delay) take(from *net.TCPConn, under chan<- parcel) {
	for {
		p, err := d.newPipe()
		if err != nil {
			from.Close()
			return
		}
		for {
			n, full := p.fill(from)
			under <- parcel{p, n, time.Now().Add(d.each), n == 0}
			if n == 0 && !full {
				return
			}
			if n == 0 {
				break
			}
		}
	}
}

// pipe holds bytes that are under way.
type pipe struct{ r, w int }

// newPipe returns an empty pipe of the size that needs no privilege.
func (d *delay) newPipe() (*pipe, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if last := len(d.free) - 1; last >= 0 {
		p := d.free[last]
		d.free = d.free[:last]
		return p, nil
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, delayPipe) // a smaller one does it too
	return &pipe{fds[0], fds[1]}, nil
}

// giveBack keeps a pipe for others, unless there may be something in it.
func (d *delay) giveBack(p *pipe, dirty bool) {
	if dirty {
		p.close()
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free = append(d.free, p)
}

func (p *pipe) close() {
	_ = unix.Close(p.r) // nothing is written behind our back
	_ = unix.Close(p.w)
}

// fill moves bytes from a connection into the pipe. It moves none when the pipe is full, and
// when the connection is at its end.
func (p *pipe) fill(from syscall.Conn) (n int, full bool) {
	raw, err := from.SyscallConn()
	if err != nil {
		return 0, false
	}
	_ = raw.Read(func(fd uintptr) bool { // it fails where the connection is closed: its end
		n, err = splice(int(fd), p.w, delayPipe)
		if err == unix.EAGAIN {
			waiting, _ := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			full = waiting > 0
			return full
		}
		return true
	})
	return max(n, 0), full
}

// drain moves n bytes from the pipe into a connection.
func (p *pipe) drain(to syscall.Conn, n int) bool {
	raw, err := to.SyscallConn()
	for n > 0 && err == nil {
		var moved int
		var failed error
		err = raw.Write(func(fd uintptr) bool {
			moved, failed = splice(p.r, int(fd), n)
			return failed != unix.EAGAIN
		})
		if failed != nil || moved == 0 {
			return false
		}
		n -= moved
	}
	return err == nil
}

func splice(from, to, n int) (int, error) {
	for {
		moved, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if err != unix.EINTR {
			return int(moved), err
		}
	}
}
