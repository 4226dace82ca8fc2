package transfer

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// benchBytes is the size of the snapshot that is moved, in files of 64 MiB.
var benchBytes = envSize("SNAPFERRY_BENCH_MIB", 256)

func envSize(name string, def int) int {
	var n int
	if _, err := fmt.Sscan(os.Getenv(name), &n); err != nil || n <= 0 {
		n = def
	}
	return n * mib
}

func benchPeer(b *testing.B) (*peer, protocol.ID) {
	b.Helper()
	files := tree{}
	for i := range benchBytes / (64 * mib) {
		files[fmt.Sprintf("f%d", i)] = bytesOf(uint64(i), 64*mib)
	}
	p := newPeer(b, 1, nil, nil)
	p.web.Config.Handler = p.server // without the counter, which keeps the kernel from copying
	return p, hold(b, 10, files, p).ID
}

// BenchmarkFetch is a full install's transfer over loopback: fetched, verified, durable.
func BenchmarkFetch(b *testing.B) {
	p, id := benchPeer(b)
	benchFetch(b, id, p.source())
}

func benchFetch(b *testing.B, id protocol.ID, from Source) {
	b.Helper()
	c := NewClient(nil)
	defer c.Close()
	b.SetBytes(int64(benchBytes))
	for b.Loop() {
		b.StopTimer()
		s, err := snapstore.Open(b.TempDir(), &snapstore.Options{Reserve: -1})
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if _, _, err := c.Fetch(context.Background(), Fetch{Store: s, ID: id, Sources: []Source{from}}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		s.Close()
		b.StartTimer()
	}
}

// BenchmarkPlainGet is the yardstick: the same files by plain GETs, one after the other,
// with fdatasync at the end.
func BenchmarkPlainGet(b *testing.B) {
	p, id := benchPeer(b)
	dir, err := p.store.Dir(id)
	if err != nil {
		b.Fatal(err)
	}
	p.web.Config.Handler = http.FileServer(http.Dir(dir))
	b.SetBytes(int64(benchBytes))
	for b.Loop() {
		to := b.TempDir()
		for i := range benchBytes / (64 * mib) {
			name := fmt.Sprintf("f%d", i)
			if err := plainGet(p.web.URL+"/"+name, filepath.Join(to, name)); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func plainGet(url, to string) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	resp, err := http.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(f, resp.Body); err != nil {
		return err
	}
	return unix.Fdatasync(int(f.Fd()))
}

// BenchmarkFetchFar has 10 ms of round trip to the source.
func BenchmarkFetchFar(b *testing.B) {
	p, id := benchPeer(b)
	far := newDelay(b, p.web.Listener.Addr().String(), 5*time.Millisecond)
	benchFetch(b, id, Source{ID: 1, URL: "http://" + far})
}

// BenchmarkStopAndWaitFar asks for 4 MiB at a time over the same 10 ms, to memory.
func BenchmarkStopAndWaitFar(b *testing.B) {
	p, id := benchPeer(b)
	dir, err := p.store.Dir(id)
	if err != nil {
		b.Fatal(err)
	}
	p.web.Config.Handler = http.FileServer(http.Dir(dir))
	far := newDelay(b, p.web.Listener.Addr().String(), 5*time.Millisecond)
	b.SetBytes(int64(benchBytes))
	for b.Loop() {
		for i := range benchBytes / (64 * mib) {
			for off := 0; off < 64*mib; off += 4 * mib {
				req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s/f%d", far, i), nil)
				if err != nil {
					b.Fatal(err)
				}
				req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+4*mib-1))
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					b.Fatal(err)
				}
				resp.Body.Close()
			}
		}
	}
}

// newDelay starts a proxy that delays what passes it, each way, and limits nothing. It
// returns its address.
func newDelay(b *testing.B, to string, each time.Duration) string {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			wg.Go(func() { pump(in, out, each) })
			wg.Go(func() { pump(out, in, each) })
		}
	})
	b.Cleanup(func() {
		l.Close()
		http.DefaultClient.CloseIdleConnections()
		wg.Wait()
	})
	return l.Addr().String()
}

type parcel struct {
	data []byte
	due  time.Time
}

// pump moves bytes after a delay.
func pump(from, to net.Conn, delay time.Duration) {
	parcels := make(chan parcel, 1024)
	free := sync.Pool{New: func() any { return new([128 << 10]byte) }}
	go func() {
		defer close(parcels)
		for {
			buf := free.Get().(*[128 << 10]byte)
			n, err := from.Read(buf[:])
			if n > 0 {
				parcels <- parcel{buf[:n], time.Now().Add(delay)}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range parcels {
		if d := time.Until(p.due); d > 0 {
			<-time.After(d)
		}
		if _, err := to.Write(p.data); err != nil {
			from.Close()
		}
		free.Put((*[128 << 10]byte)(p.data[:128<<10]))
	}
	to.Close()
}
