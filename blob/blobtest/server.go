package blobtest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/blobservers"
)

// Server is a real server under a driver, as RunServer gives it trouble.
type Server struct {
	// Addr is the HOST:PORT that it serves at.
	Addr string
	// Open opens a driver of one and the same empty store at an address: the server's own
	// or that of a proxy before it. RunServer closes it.
	Open func(t *testing.T, addr string) blob.Driver
	// Kill ends the server at once, and Restart starts it again at Addr.
	Kill, Restart func()
	// Forgets says that nothing is left after a Restart.
	Forgets bool
	// Large is the size of bodies that meet trouble in the middle: of more than one part
	// for a driver that cuts bodies, and of more than the machine's buffers for connections
	// hold. Default 24 MiB, at least 12 MiB.
	Large int64
}

// RunServer tests what a driver makes of a server that dies and of connections that are
// slow, stalled or broken.
func RunServer(t *testing.T, s Server) {
	s.Large = cmp.Or(s.Large, 24*mib)
	proxy := blobservers.Toxiproxy(t, s.Addr)
	tests := []struct {
		name string
		run  func(*testing.T, *trouble)
	}{
		{"KilledInPut", testKilledInPut},
		{"KilledAndBack", testKilledAndBack},
		{"SlowPut", testSlowPut},
		{"StalledPut", testStalledPut},
		{"StalledGet", testStalledGet},
		{"BrokenPut", testBrokenPut},
		{"BrokenGet", testBrokenGet},
		{"LostAnswer", testLostAnswer},
		{"Refused", testRefused},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			tr := &trouble{Server: s, proxy: proxy, data: random(s.Large)}
			tr.direct = tr.open(t, s.Addr, nil)
			t.Cleanup(proxy.Heal)
			test.run(t, tr)
		})
	}
}

// trouble is one test's view of the server.
type trouble struct {
	Server
	proxy  *blobservers.Proxy
	direct *blob.Store // beside the proxy
	data   []byte
}

func (tr *trouble) open(t *testing.T, addr string, opts *blob.Options) *blob.Store {
	t.Helper()
	s := blob.New(tr.Open(t, addr), opts)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

const (
	// tryTimeout is without progress; what takes longer in all must succeed all the same.
	tryTimeout = 2 * time.Second
	// slowTimeout is the same for a connection of slowRate KiB a second. What lies in the
	// buffers of the machine, which nobody sees move, takes less than that, and what a
	// driver sends at once, 8 MiB or more, takes longer.
	slowTimeout = 7 * time.Second
	slowRate    = 1024
)

// retries counts the tries of a store that failed, and heals the connection after the first.
type retries struct {
	n    int
	last error
	heal func()
}

// through opens the store behind the proxy.
func (tr *trouble) through(t *testing.T, timeout time.Duration) (*blob.Store, *retries) {
	t.Helper()
	r := &retries{heal: tr.proxy.Heal}
	return tr.open(t, tr.proxy.Addr, &blob.Options{
		TryTimeout: timeout,
		Retry:      blob.Retry{First: time.Millisecond, Total: time.Minute},
		OnRetry: func(op, key string, err error, _ time.Duration) {
			t.Logf("%s %s again: %v", op, key, err)
			r.n++
			r.last = err
			r.heal()
		},
	}), r
}

func (r *retries) wantSome(t *testing.T) {
	t.Helper()
	if r.n == 0 {
		t.Error("the trouble was not met: nothing was tried again")
	}
}

func (tr *trouble) put(t *testing.T, s *blob.Store, key string) {
	t.Helper()
	if err := s.Put(t.Context(), key, blob.Bytes(tr.data), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (tr *trouble) wantData(t *testing.T, key string) {
	t.Helper()
	got, err := tr.direct.ReadAll(t.Context(), key, 0, -1)
	if err != nil || !bytes.Equal(got, tr.data) {
		t.Fatalf("%s: %d of %d bytes, %v", key, len(got), len(tr.data), err)
	}
}

// interrupted is a body that calls hit once, when half of it was read.
func (tr *trouble) interrupted(hit func()) blob.Body {
	var once sync.Once
	half := int64(len(tr.data)) / 2
	return blob.Body{Size: int64(len(tr.data)), Open: func() (io.ReadCloser, error) {
		first := io.LimitReader(bytes.NewReader(tr.data), half)
		rest := bytes.NewReader(tr.data[half:])
		return plainReader{io.MultiReader(first, hook(func() { once.Do(hit) }), rest), 64 << 10}, nil
	}}
}

// hook is a reader of nothing that does something.
type hook func()

func (h hook) Read([]byte) (int, error) {
	h()
	return 0, io.EOF
}

// A server that dies in the middle of a put leaves nothing visible of it (I2), and what was
// there before.
func testKilledInPut(t *testing.T, tr *trouble) {
	tr.put(t, tr.direct, "killed/before")
	d := tr.Open(t, tr.Addr)
	err := d.Put(t.Context(), "killed/now", tr.interrupted(tr.Kill), blob.PutOptions{})
	if err == nil || !blob.IsRetriable(err) {
		t.Errorf("put to a server that died: %v, want an error to try again", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	tr.Restart()
	if _, err := tr.direct.Stat(t.Context(), "killed/now"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the interrupted object is there: %v", err)
	}
	for info, err := range tr.direct.List(t.Context(), "killed/now", "") {
		t.Errorf("listed: %v, %v", info, err)
	}
	if !tr.Forgets {
		tr.wantData(t, "killed/before")
	}
}

// A put goes on when the server is back.
func testKilledAndBack(t *testing.T, tr *trouble) {
	s, r := tr.through(t, tryTimeout)
	r.heal = tr.Restart
	if err := s.Put(t.Context(), "back", tr.interrupted(tr.Kill), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r.wantSome(t)
	tr.wantData(t, "back")
}

// A body that takes far longer than the limit on a try without progress gets there, as it
// moves. A driver that sends from memory has to tell of it by blob.Moved.
func testSlowPut(t *testing.T, tr *trouble) {
	s, r := tr.through(t, slowTimeout)
	r.heal = func() {
		if r.n > 2 { // one or two are a busy machine's
			t.Fatalf("a slow body was taken for a stalled one: %v", r.last)
		}
	}
	tr.proxy.Bandwidth(blobservers.Up, slowRate)
	tr.put(t, s, "slow")
	tr.proxy.Heal()
	tr.wantData(t, "slow")
}

func testStalledPut(t *testing.T, tr *trouble) {
	s, r := tr.through(t, tryTimeout)
	if _, err := s.Stat(t.Context(), "stalled"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("stat of the absent: %v", err)
	}
	tr.proxy.Stall(blobservers.Up)
	tr.put(t, s, "stalled")
	r.wantSome(t)
	tr.wantData(t, "stalled")
}

// A stream that stalls or breaks in the middle goes on where it was.
func testStalledGet(t *testing.T, tr *trouble) {
	tr.spoilGet(t, func() { tr.proxy.Stall(blobservers.Down) }).wantSome(t)
}

func testBrokenGet(t *testing.T, tr *trouble) {
	tr.spoilGet(t, func() { tr.proxy.Cut(blobservers.Down, mib) })
	tr.proxy.Cut(blobservers.Down, mib)
	d := tr.Open(t, tr.proxy.Addr)
	defer d.Close()
	r, err := d.Get(t.Context(), "spoilt", 0, -1)
	var got []byte
	if err == nil {
		got, err = io.ReadAll(r)
		_ = r.Close() // it may be broken
	}
	whole := err == nil && bytes.Equal(got, tr.data) // by a client that goes on by itself
	if !whole && !blob.IsRetriable(err) {
		t.Errorf("a cut stream gave %d of %d bytes, %v, want an error to try again", len(got), len(tr.data), err)
	}
}

func (tr *trouble) spoilGet(t *testing.T, spoil func()) *retries {
	t.Helper()
	tr.put(t, tr.direct, "spoilt")
	s, r := tr.through(t, tryTimeout)
	body, err := s.Get(t.Context(), "spoilt", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	got := make([]byte, 10)
	if _, err := io.ReadFull(body, got); err != nil {
		t.Fatal(err)
	}
	spoil()
	rest, err := io.ReadAll(body)
	if got = append(got, rest...); err != nil || !bytes.Equal(got, tr.data) {
		t.Fatalf("read %d of %d bytes, %v", len(got), len(tr.data), err)
	}
	return r
}

func testBrokenPut(t *testing.T, tr *trouble) {
	s, r := tr.through(t, tryTimeout)
	tr.proxy.Cut(blobservers.Up, mib)
	tr.put(t, s, "broken")
	r.wantSome(t)
	tr.wantData(t, "broken")
}

// A create whose answer is lost has happened: the next try finds it (P3.5).
func testLostAnswer(t *testing.T, tr *trouble) {
	s, r := tr.through(t, tryTimeout)
	tr.proxy.Cut(blobservers.Down, 1)
	small := tr.data[:1000]
	err := s.Put(t.Context(), "lost", blob.Bytes(small), blob.PutOptions{IfAbsent: true})
	if err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	r.wantSome(t)
	got, err := tr.direct.ReadAll(t.Context(), "lost", 0, -1)
	if err != nil || !bytes.Equal(got, small) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// Connections that are reset, and a server that is not there, are worth another try.
func testRefused(t *testing.T, tr *trouble) {
	tr.proxy.Reset(blobservers.Down, 0)
	s, r := tr.through(t, tryTimeout)
	tr.put(t, s, "refused")
	r.wantSome(t)
	tr.wantData(t, "refused")
	tr.Kill()
	d := tr.Open(t, tr.Addr)
	defer d.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := d.Stat(ctx, "refused"); !blob.IsRetriable(err) {
		t.Errorf("stat without a server: %v, want an error to try again", err)
	}
	tr.Restart()
}
