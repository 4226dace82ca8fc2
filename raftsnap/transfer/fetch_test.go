package transfer

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// The sizes at which cutting files into chunks and ranges may go wrong (list of part C,
// "not tested anywhere").
func TestFetchSizes(t *testing.T) {
	for _, size := range []int{0, 1, snapstore.ChunkSize - 1, snapstore.ChunkSize, snapstore.ChunkSize + 1, 3*snapstore.ChunkSize + 7} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			files := tree{"a/file": bytesOf(1, size)}
			p := newPeer(t, 1, nil, nil)
			held := hold(t, 10, files, p)
			stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)}, files)
			if stats.Fetched != int64(size) || p.sent.Load() != int64(size) {
				t.Errorf("fetched %d bytes, %d sent, want %d", stats.Fetched, p.sent.Load(), size)
			}
		})
	}
}

func TestFetchEmptySnapshot(t *testing.T) {
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, tree{}, p)
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)}, tree{})
}

// A thousand small files are a few requests (camunda#5135: 4000 files took 5 minutes).
func TestFetchThousandSmallFiles(t *testing.T) {
	files := tree{}
	for i := range 1000 {
		files[fmt.Sprintf("d%d/f%d", i%10, i)] = bytesOf(uint64(i), i%3000)
	}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)}, files)
	if n := p.asked.Load(); n > 4 {
		t.Errorf("%d requests for 1000 small files, want a few", n)
	}
}

// What is held already is not fetched, and nobody is asked.
func TestFetchHeld(t *testing.T) {
	files := tree{"f": bytesOf(1, 100)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	s := newStore(t)
	makeSnapshot(t, s, 10, files)
	fetch(t, Fetch{Store: s, ID: held.ID, Sources: []Source{{ID: 9, URL: "http://127.0.0.1:1"}}}, files)
}

// R8, F40: what an older snapshot of the same maker has is not fetched again.
func TestFetchReusesLocalChunks(t *testing.T) {
	old := tree{"a": bytesOf(1, 9*mib), "b": bytesOf(2, 5*mib)}
	files := tree{"a": old["a"], "c": bytesOf(3, 2*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 20, files, p)
	s := newStore(t)
	makeSnapshot(t, s, 10, old)
	stats := fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(p)}, files)
	if stats.Fetched != 2*mib || stats.Reused != 9*mib {
		t.Errorf("fetched %d, reused %d, want %d and %d", stats.Fetched, stats.Reused, 2*mib, 9*mib)
	}
}

// R10: several holders of one id share the work.
func TestFetchFromSeveralSources(t *testing.T) {
	files := tree{"a": bytesOf(1, 25*mib), "b": bytesOf(2, 19*mib)}
	peers := []*peer{newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil), newPeer(t, 3, nil, nil)}
	held := hold(t, 10, files, peers...)

	// Nobody answers a second time before everybody has been asked.
	var asked [3]atomic.Bool
	all := make(chan struct{})
	for i, p := range peers {
		p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			asked[i].Store(true)
			if asked[0].Load() && asked[1].Load() && asked[2].Load() {
				select {
				case <-all:
				default:
					close(all)
				}
			}
			<-all
			next.ServeHTTP(w, r)
		})
	}
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(peers...)}, files)
	var chunks int64
	for _, s := range stats.Sources {
		chunks += s.Chunks
	}
	if chunks != 12 {
		t.Errorf("%d chunks were accepted, want 12, each once", chunks)
	}
}

// flight counts the requests for data that are in flight, until their bodies are closed.
type flight struct {
	http.RoundTripper
	now, most atomic.Int64
}

func (f *flight) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := f.RoundTripper.RoundTrip(r)
	if err == nil && isData(r) {
		n := f.now.Add(1)
		for m := f.most.Load(); n > m && !f.most.CompareAndSwap(m, n); m = f.most.Load() {
		}
		resp.Body = &flightBody{resp.Body, f}
	}
	return resp, err
}

type flightBody struct {
	io.ReadCloser
	f *flight
}

func (b *flightBody) Close() error {
	b.f.now.Add(-1)
	return b.ReadCloser.Close()
}

// The window bounds the requests in flight, over all sources.
func TestFetchWindow(t *testing.T) {
	files := tree{"a": bytesOf(1, 48*mib)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a, b)
	f := &flight{RoundTripper: newTransport(nil)}
	c := NewClient(&ClientOptions{Transport: f})
	defer c.Close()
	_, _, err := c.Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a, b), Window: 4})
	if err != nil {
		t.Fatal(err)
	}
	if m := f.most.Load(); m > 4 {
		t.Errorf("%d requests in flight, want at most 4", m)
	}
}

// A source dies in mid-file, and the other one gives the rest (I12).
func TestFetchSourceDies(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a, b)
	var served atomic.Int64
	a.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if served.Add(1) > 2 {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a, b)}, files)
	if stats.Sources[1].Chunks == 0 {
		t.Error("the second source gave nothing")
	}
}

// An answer that ends early loses only the chunk that it ended in.
func TestFetchAnswerCut(t *testing.T) {
	files := tree{"a": bytesOf(1, 16*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	var cuts atomic.Int64
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if cuts.Add(1) == 1 {
			next.ServeHTTP(&cutter{w, 9 * mib}, r)
			return
		}
		next.ServeHTTP(w, r)
	})
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p), RangeSize: 16 * mib, Window: 1}, files)
	if stats.Fetched > 18*mib {
		t.Errorf("fetched %d bytes: chunks that had come were fetched again", stats.Fetched)
	}
}

// cutter cuts the connection after so many bytes.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	if c.left -= len(p); c.left < 0 {
		http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	return c.ResponseWriter.Write(p)
}

func (c *cutter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// All sources die; when one is back, only the rest is fetched, also from another source and
// after a restart of the receiver.
func TestFetchResume(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib), "b": bytesOf(2, 5)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a, b)
	var served atomic.Int64
	a.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if served.Add(1) > 4 {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
	dir := t.TempDir()
	s, err := snapstore.Open(dir, &snapstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	_, first, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: sources(a), Window: 1})
	wantFailure(t, err, protocol.FailUnreachable, 1)
	if first.Sources[0].Chunks != 4 {
		t.Fatalf("%d chunks came, want 4", first.Sources[0].Chunks)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s, err = snapstore.Open(dir, &snapstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	stats := fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(b)}, files)
	if want := int64(40*mib + 5 - 16*mib); stats.Fetched != want || b.sent.Load() != want {
		t.Errorf("fetched %d bytes, %d sent, want the rest, %d", stats.Fetched, b.sent.Load(), want)
	}
	if stats.Reused != 16*mib {
		t.Errorf("reused %d bytes, want %d", stats.Reused, 16*mib)
	}
}

// Cancelling returns promptly, keeps the staging, and blames nobody (tikv#10930,
// RATIS-987).
func TestFetchCancelled(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	ctx, cancel := context.WithCancel(t.Context())
	var served atomic.Int64
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if served.Add(1) > 3 {
			cancel()
			<-r.Context().Done()
			return
		}
		next.ServeHTTP(w, r)
	})
	s := newStore(t)
	_, stats, err := newClient(t).Fetch(ctx, Fetch{Store: s, ID: held.ID, Sources: sources(p), Window: 1})
	wantFailure(t, err, protocol.FailCancelled, 0)
	if stats.Sources[0].Failed != nil {
		t.Errorf("the source is blamed: %v", stats.Sources[0].Failed)
	}

	p.between(func(next http.Handler) http.Handler { return next })
	stats = fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(p)}, files)
	if stats.Fetched != 28*mib {
		t.Errorf("fetched %d bytes after a cancelled transfer, want %d", stats.Fetched, 28*mib)
	}
}

// Cancelling while sources cannot be had does not wait for them.
func TestFetchCancelledBeforeManifest(t *testing.T) {
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 10)}, p)
	ctx, cancel := context.WithCancel(t.Context())
	p.between(func(http.Handler) http.Handler {
		return http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			cancel()
			<-r.Context().Done()
		})
	})
	_, _, err := newClient(t).Fetch(ctx, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)})
	wantFailure(t, err, protocol.FailCancelled, 0)
}

// A source that stops sending without closing is found out by the bytes that do not come
// (E.1.3); there is no total deadline.
func TestFetchStallWithoutClose(t *testing.T) {
	files := tree{"a": bytesOf(1, 12*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	p.onData(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		h := w.Header()
		h.Set("Content-Length", fmt.Sprint(12*mib))
		h.Set("Content-Range", contentRange(0, 12*mib, 12*mib))
		w.WriteHeader(http.StatusPartialContent)
		w.Write(files["a"][:5*mib])
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	_, stats, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p),
		Idle: time.Second, RangeSize: 16 * mib, Window: 1})
	wantFailure(t, err, protocol.FailIdle, 1)
	if stats.Sources[0].Chunks != 1 {
		t.Errorf("%d chunks kept of a source that stalled after one, want 1", stats.Sources[0].Chunks)
	}
}

// A stalled source does not hold the end: the other one takes its work over.
func TestFetchStealsFromStalledSource(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a, b)
	stalled := make(chan struct{})
	var once atomic.Bool
	a.onData(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		if once.CompareAndSwap(false, true) {
			close(stalled)
		}
		<-r.Context().Done()
	})
	b.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		<-stalled
		next.ServeHTTP(w, r)
	})
	// With the default idle time the test would not end before 15 s.
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a, b), Idle: time.Hour}, files)
	if stats.Stolen == 0 || stats.Sources[1].Chunks != 10 {
		t.Errorf("%d requests took work over, %d chunks from the other, want some and 10", stats.Stolen, stats.Sources[1].Chunks)
	}
}

// smallStore opens a store on a disk of that size.
func smallStore(t *testing.T, size string) (s *snapstore.Store, dir string) {
	t.Helper()
	dir = mountTmpfs(t, size)
	s, err := snapstore.Open(dir, &snapstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, dir
}

// No space for the transfer, found before it begins and in its middle.
func TestFetchDiskFull(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	s, _ := smallStore(t, "24m")
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: sources(p)})
	wantFailure(t, err, protocol.FailNoSpace, 0)
	if n := p.asked.Load(); n != 0 {
		t.Errorf("%d requests for a snapshot that does not fit, want none", n)
	}
}

// The disk becomes full in the middle: the transfer ends at once and blames no source.
func TestFetchDiskFullInTheMiddle(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	s, dir := smallStore(t, "64m")
	var served atomic.Int64
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if served.Add(1) == 3 {
			if err := os.WriteFile(dir+"/ballast", bytesOf(9, 44*mib), 0o600); err != nil {
				t.Error(err)
			}
		}
		next.ServeHTTP(w, r)
	})
	_, stats, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: sources(p), Window: 1})
	wantFailure(t, err, protocol.FailNoSpace, 0)
	if stats.Sources[0].Failed != nil {
		t.Errorf("the source is blamed: %v", stats.Sources[0].Failed)
	}
	// Others on the disk need the space, and nothing can go on here soon.
	if left, err := os.ReadDir(dir + "/receive"); err != nil || len(left) > 0 {
		t.Errorf("left in the staging: %v, %v", left, err)
	}
}

// A full disk ends the transfer also for those who still wait for their turn in the pace.
func TestFetchDiskFullUnderLowLimit(t *testing.T) {
	files := tree{"a": bytesOf(1, 40*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	s, dir := smallStore(t, "64m")
	waits := make(chan struct{}, 100)
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		<-waits // the second one, which has begun
		if err := os.WriteFile(dir+"/ballast", bytesOf(9, 62*mib), 0o600); err != nil {
			t.Error(err)
		}
		next.ServeHTTP(w, r)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var turns atomic.Int64
	_, _, err := newClient(t).Fetch(ctx, Fetch{Store: s, ID: held.ID, Sources: sources(p), Window: 2, Work: &snapstore.Work{
		Wait: func(ctx context.Context, _ int) error {
			if turns.Add(1) == 1 {
				return nil
			}
			waits <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}}})
	wantFailure(t, err, protocol.FailNoSpace, 0)
}

// Progress is told, does not fall, and ends with everything.
func TestFetchProgress(t *testing.T) {
	files := tree{"a": bytesOf(1, 20*mib), "b": bytesOf(2, 8*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 20, files, p)
	s := newStore(t)
	makeSnapshot(t, s, 10, tree{"b": files["b"]})
	var fetched, reused int64
	fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(p), Progress: func(f, r int64) {
		if f < fetched || r < reused {
			t.Errorf("progress fell from (%d, %d) to (%d, %d)", fetched, reused, f, r)
		}
		fetched, reused = f, r
	}}, files)
	if fetched != 20*mib || reused != 8*mib {
		t.Errorf("last progress (%d, %d), want (%d, %d)", fetched, reused, 20*mib, 8*mib)
	}
}

// Every byte that is fetched is asked for at the pace.
func TestFetchAsksPace(t *testing.T) {
	files := tree{"a": bytesOf(1, 20*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	var paced atomic.Int64
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p), Work: &snapstore.Work{
		Wait: func(_ context.Context, n int) error { paced.Add(int64(n)); return nil }}}, files)
	if paced.Load() < 20*mib {
		t.Errorf("%d bytes were paced, want at least %d", paced.Load(), 20*mib)
	}
}
