package transfer

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// flipper changes the byte at one place of each answer, as a bad cable would.
type flipper struct {
	http.ResponseWriter
	at int
}

func (f *flipper) Write(p []byte) (int, error) {
	if f.at >= 0 && f.at < len(p) {
		q := append([]byte(nil), p...)
		q[f.at] ^= 0x40
		p = q
	}
	f.at -= len(p)
	return f.ResponseWriter.Write(p)
}

func (f *flipper) Unwrap() http.ResponseWriter { return f.ResponseWriter }

// flipping makes the answers to requests for data wrong at one byte, as often as which says.
func flipping(p *peer, which func(n int64) bool) {
	var n atomic.Int64
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if which(n.Add(1)) {
			w = &flipper{w, 3}
		}
		next.ServeHTTP(w, r)
	})
}

func always(int64) bool { return true }

// A source whose bytes are wrong is marked and given up; the other one gives everything
// (R10; consul#6893, hashicorp/raft#522).
func TestFetchBadSource(t *testing.T) {
	files := tree{"a": bytesOf(1, 48*mib)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a, b)
	flipping(a, always)

	// The good one holds back until the bad one has been found out.
	found := make(chan struct{})
	var bad atomic.Int64
	a.between(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if isData(r) {
				w = &flipper{w, 3}
				if bad.Add(1) == maxBad+1 {
					close(found)
				}
			}
			next.ServeHTTP(w, r)
		})
	})
	b.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		select {
		case <-found:
		case <-r.Context().Done():
		}
		next.ServeHTTP(w, r)
	})
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a, b), Window: 8}, files)
	s := stats.Sources[0]
	if s.Failed == nil || s.Failed.Kind != protocol.FailCorrupt || s.Chunks != 0 || s.Bad < maxBad {
		t.Errorf("the bad source: %+v, want it given up as corrupt", s)
	}
	if stats.Sources[1].Chunks != 12 || stats.Sources[1].Bad != 0 {
		t.Errorf("the good source: %+v, want all 12 chunks", stats.Sources[1])
	}
}

// One bad chunk does not cost the rest of the answer, and is taken again.
func TestFetchOneBadChunk(t *testing.T) {
	files := tree{"a": bytesOf(1, 32*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	flipping(p, func(n int64) bool { return n == 1 })
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p), RangeSize: 32 * mib, Window: 1}, files)
	if stats.Fetched != 36*mib || stats.Sources[0].Bad != 1 {
		t.Errorf("fetched %d bytes with %d bad chunks, want one chunk twice", stats.Fetched, stats.Sources[0].Bad)
	}
}

// When every source gives wrong bytes, the failure says so and nothing wrong is kept.
func TestFetchAllBad(t *testing.T) {
	files := tree{"a": bytesOf(1, 8*mib)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a, b)
	flipping(a, always)
	flipping(b, always)
	s := newStore(t)
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: sources(a, b)})
	wantFailure(t, err, protocol.FailCorrupt, 1)
	if len(s.List()) != 0 {
		t.Error("a snapshot of wrong bytes was kept")
	}
}

// R10: a chunk that no source can give comes from any other member that has the bytes,
// whatever snapshot they are in.
func TestFetchChunkFromOthers(t *testing.T) {
	files := tree{"a": bytesOf(1, 16*mib), "b": bytesOf(2, 100)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a)
	hold(t, 7, tree{"elsewhere": files["a"][:12*mib]}, b)
	var bad atomic.Int64
	a.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Header.Get("Range") == "bytes=4194304-8388607" {
			bad.Add(1)
			w = &flipper{w, 3}
		}
		next.ServeHTTP(w, r)
	})
	stats := fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a), Others: sources(b)}, files)
	if stats.Others[0].Chunks != 1 || bad.Load() != maxBadPiece {
		t.Errorf("others gave %d chunks after %d bad ones, want 1 after %d", stats.Others[0].Chunks, bad.Load(), maxBadPiece)
	}
}

// Without any source the others may have it all, and if they do not, they are not asked for
// every chunk.
func TestFetchFromOthersOnly(t *testing.T) {
	files := tree{"a": bytesOf(1, 16*mib)}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a)
	hold(t, 11, tree{"x": files["a"][:8*mib]}, b)
	manifest := manifestOf(t, a, held.ID)

	s := newStore(t)
	_, stats, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Manifest: manifest, Others: sources(b)})
	wantFailure(t, err, protocol.FailGone, 0)
	if stats.Others[0].Chunks != 2 {
		t.Errorf("%d chunks, want the 2 that the other has", stats.Others[0].Chunks)
	}
	stats = fetch(t, Fetch{Store: s, ID: held.ID, Manifest: manifest, Others: sources(b, a)}, files)
	if stats.Fetched != 8*mib {
		t.Errorf("fetched %d bytes, want the %d that were missing", stats.Fetched, 8*mib)
	}
}

func TestFetchOthersHopeless(t *testing.T) {
	files := tree{}
	for i := range 500 {
		files[fmt.Sprint(i)] = bytesOf(uint64(i), 10)
	}
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, a)
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID,
		Manifest: manifestOf(t, a, held.ID), Others: sources(b), Window: 2})
	wantFailure(t, err, protocol.FailGone, 0)
	if n := b.asked.Load(); n > maxMisses+4 {
		t.Errorf("a member that has nothing was asked for %d chunks", n)
	}
}

func manifestOf(t *testing.T, p *peer, id protocol.ID) []byte {
	t.Helper()
	pin, err := p.store.Pin(id, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer pin.Close()
	return pin.Manifest()
}

// A manifest that is not the one the id names is not believed, whoever sends it.
func TestFetchManifestOfAnother(t *testing.T) {
	a, b := newPeer(t, 1, nil, nil), newPeer(t, 2, nil, nil)
	files := tree{"a": bytesOf(1, 100)}
	held := hold(t, 10, files, a, b)
	other := hold(t, 11, tree{"evil": []byte("x")}, a)
	wrong := manifestOf(t, a, other.ID)
	a.between(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if filepath.Base(r.URL.Path) == "manifest" {
				w.Write(wrong)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a)})
	wantFailure(t, err, protocol.FailCorrupt, 1)
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(a, b)}, files)

	_, _, err = newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Manifest: wrong, Sources: sources(b)})
	wantFailure(t, err, protocol.FailLocal, 0)
}

// damageFile changes one byte of a file of a held snapshot, keeping its size and times.
func damageFile(t *testing.T, s *snapstore.Store, id protocol.ID, name string, at int64, keepTime bool) {
	t.Helper()
	dir, err := s.Dir(id)
	if err != nil {
		t.Fatal(err)
	}
	full := filepath.Join(dir, name)
	info, err := os.Stat(full)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(full, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(full, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	if keepTime {
		if err := os.Chtimes(full, info.ModTime(), info.ModTime()); err != nil {
			t.Fatal(err)
		}
	}
}

// What is served was verified before; what is damaged goes to quarantine, the owner hears
// of it, and the asker is told that it is gone.
func TestServeVerifiesFirst(t *testing.T) {
	damaged := make(chan protocol.ID, 1)
	p := newPeer(t, 1, &ServerOptions{Damaged: func(id protocol.ID, cause error) { damaged <- id }}, nil)
	held := hold(t, 10, tree{"a": bytesOf(1, 5*mib)}, p)
	damageFile(t, p.store, held.ID, "a", 4*mib+5, false)

	_, _, err := newClient(t).Fetch(t.Context(), Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p)})
	wantFailure(t, err, protocol.FailGone, 1)
	if id := <-damaged; id != held.ID {
		t.Errorf("told of %v, want %v", id, held.ID)
	}
	if len(p.store.List()) != 0 || p.server.Stats().Quarantined != 1 {
		t.Error("the damaged snapshot is still held")
	}
}

// Damage after the verification is found when a receiver complains: the source looks at the
// chunk, and puts the snapshot out of use.
func TestDoubtFindsDamage(t *testing.T) {
	damaged := make(chan protocol.ID, 1)
	files := tree{"a": bytesOf(1, 12*mib)}
	p := newPeer(t, 1, &ServerOptions{Damaged: func(id protocol.ID, cause error) { damaged <- id }}, nil)
	good := newPeer(t, 2, nil, nil)
	held := hold(t, 10, files, p, good)
	manifest := manifestOf(t, p, held.ID)
	if err := p.store.Verify(t.Context(), held.ID, nil); err != nil {
		t.Fatal(err)
	}
	var first atomic.Bool
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if first.CompareAndSwap(false, true) { // verified by now
			damageFile(t, p.store, held.ID, "a", 5*mib, true)
		}
		next.ServeHTTP(w, r)
	})
	s := newStore(t)
	_, stats, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Manifest: manifest, Sources: sources(p)})
	wantFailure(t, err, protocol.FailCorrupt, 1)
	if id := <-damaged; id != held.ID {
		t.Errorf("told of %v, want %v", id, held.ID)
	}
	if stats.Sources[0].Chunks != 2 {
		t.Errorf("%d good chunks kept, want 2", stats.Sources[0].Chunks)
	}
	wantRefusal(t, p.server.checks.condemn(held.ID, snapstore.ErrCorrupt), protocol.Gone)
	if n := p.server.Stats().Quarantined; n != 1 {
		t.Errorf("quarantined %d times, want once", n)
	}
	fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(good)}, files)
}

// A complaint about what is right does no harm.
func TestDoubtUnfounded(t *testing.T) {
	files := tree{"a": bytesOf(1, 5*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	f := fetcherOf(t, p, held.ID)
	if err := f.doubt(t.Context(), f.board.sources[0], &piece{Piece: snapstore.Piece{File: 0, Offset: 4 * mib}}); err != nil {
		t.Fatal(err)
	}
	err := f.doubt(t.Context(), f.board.sources[0], &piece{Piece: snapstore.Piece{File: 0, Offset: 5}})
	wantRefusal(t, err, Malformed)
	if len(p.store.List()) != 1 {
		t.Error("the snapshot is gone")
	}
}

// fetcherOf makes a transfer whose requests a test sends one by one.
func fetcherOf(t *testing.T, p *peer, id protocol.ID) *fetcher {
	t.Helper()
	c := newClient(t)
	f := Fetch{ID: id, Sources: sources(p), Transfer: "t1"}.withDefaults()
	return &fetcher{Fetch: f, client: c, meter: newMeter(f.Progress), board: newBoard(c, f)}
}
