package transfer

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// desk is a server without a network, so that its time can be a test's.
type desk struct {
	*Server
	store *snapstore.Store
	ended []string
}

func newDesk(t *testing.T, opts ServerOptions) *desk {
	t.Helper()
	d := &desk{store: newStore(t)}
	opts.Ended = func(e LeaseEnd) {
		d.ended = append(d.ended, fmt.Sprintf("%s %s after %v and %d bytes", e.Transfer, e.Why, e.Duration, e.Bytes))
	}
	d.Server = NewServer(d.store, &control{}, &opts)
	return d
}

// ask sends a request and returns the kind of the refusal, "" for none.
func (d *desk) ask(t *testing.T, method, path, transfer string, header ...string) protocol.RefusalKind {
	t.Helper()
	r := httptest.NewRequest(method, Prefix+path, strings.NewReader(""))
	r.Header.Set(transferHeader, transfer)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	d.ServeHTTP(w, r)
	if w.Code < 300 {
		return ""
	}
	return asRefusal(readRefusal(w.Result())).Kind
}

// F42: a lease is renewed by bytes that move and not by requests.
func TestLeaseIsRenewedByBytesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, ServerOptions{Lease: time.Minute})
		defer d.Close()
		held := makeSnapshot(t, d.store, 10, tree{"a": bytesOf(1, 1000)})
		snap := "snapshots/" + held.ID.String()

		for i := range 10 { // ten minutes of a byte now and then
			if k := d.ask(t, "POST", snap+"/lease", "reader"); k != "" {
				t.Fatalf("lease: %s", k)
			}
			if k := d.ask(t, "GET", snap+"/files/0", "reader", "Range", fmt.Sprintf("bytes=%d-%d", i, i)); k != "" {
				t.Fatalf("byte %d: %s", i, k)
			}
			_ = sleep(t.Context(), 50*time.Second)
		}
		if k := d.ask(t, "POST", snap+"/lease", "asker"); k != "" {
			t.Fatalf("lease: %s", k)
		}
		for range 2 { // the last request is 10 s before the end
			_ = sleep(t.Context(), 25*time.Second)
			d.ask(t, "POST", snap+"/lease", "asker")
		}
		_ = sleep(t.Context(), 20*time.Second)
		for _, who := range []string{"reader", "asker"} {
			if k := d.ask(t, "GET", snap+"/files/0", who); k != protocol.Gone {
				t.Errorf("%s still reads: %q", who, k)
			}
		}
		want := []string{"reader expired after 8m30s and 10 bytes", "asker expired after 1m0s and 0 bytes"}
		if len(d.ended) != 2 || !strings.HasPrefix(d.ended[0], "reader expired") || !strings.HasPrefix(d.ended[1], "asker expired") {
			t.Errorf("leases ended: %v, want about %v", d.ended, want)
		}
		if s := d.Stats(); s.LeasesLost != 2 || s.Leases != 0 || s.PinnedBytes != 0 {
			t.Errorf("stats %+v", s)
		}
		// What is pinned no more may be removed.
		if _, err := d.store.Retire(func(protocol.ID) bool { return false }); err != nil {
			t.Error(err)
		}
	})
}

// The cap on pinned bytes takes the least advanced reader's lease, though not in the first
// life of any lease; the readers of one snapshot count its bytes once.
func TestLeaseCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, ServerOptions{Lease: time.Minute, MaxPinned: 2500})
		defer d.Close()
		var snap []string
		for i := range 4 {
			held := makeSnapshot(t, d.store, uint64(10+i), tree{"a": bytesOf(uint64(i), 1000)})
			snap = append(snap, "snapshots/"+held.ID.String())
		}
		lease := func(n int, who string, want protocol.RefusalKind) {
			t.Helper()
			if k := d.ask(t, "POST", snap[n]+"/lease", who); k != want {
				t.Errorf("lease of %d for %s: %q, want %q", n, who, k, want)
			}
		}
		read := func(n int, who string, bytes int) {
			t.Helper()
			if k := d.ask(t, "GET", snap[n]+"/files/0", who, "Range", fmt.Sprintf("bytes=0-%d", bytes-1)); k != "" {
				t.Errorf("read of %d by %s: %s", n, who, k)
			}
		}
		lease(0, "quick", "")
		lease(0, "also", "")
		lease(1, "slow", "")
		lease(2, "new", protocol.Busy) // all are in their first life
		for range 3 {
			_ = sleep(t.Context(), 30*time.Second)
			read(0, "quick", 300)
			read(0, "also", 1)
			read(1, "slow", 10)
		}
		lease(2, "new", "")
		if k := d.ask(t, "GET", snap[1]+"/files/0", "slow"); k != protocol.Gone {
			t.Errorf("the displaced reader got %q, want gone", k)
		}
		read(0, "quick", 10)
		read(0, "also", 10)
		read(2, "new", 10)
		lease(3, "newer", "") // the old readers are safe no longer, the new one is
		if s := d.Stats(); s.PinnedBytes != 2000 || s.Leases != 2 {
			t.Errorf("stats %+v, want two snapshots pinned", s)
		}
	})
}

// A single snapshot is served whatever its size, and by default a few of its size are.
func TestLeaseCapDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, ServerOptions{MaxPinned: 10})
		defer d.Close()
		held := makeSnapshot(t, d.store, 10, tree{"a": bytesOf(1, 1000)})
		if k := d.ask(t, "POST", "snapshots/"+held.ID.String()+"/lease", "a"); k != "" {
			t.Errorf("the only lease: %s", k)
		}
		e := newDesk(t, ServerOptions{})
		defer e.Close()
		var got []protocol.RefusalKind
		for i := range 5 {
			held := makeSnapshot(t, e.store, uint64(10+i), tree{"a": bytesOf(uint64(i), 1000)})
			got = append(got, e.ask(t, "POST", "snapshots/"+held.ID.String()+"/lease", "a"))
		}
		if diff := cmp.Diff(got, []protocol.RefusalKind{"", "", "", "", protocol.Busy}); diff != "" {
			t.Errorf("five leases (-got +want):\n%s", diff)
		}
	})
}

// slowWriter takes its first bytes only when it is told to.
type slowWriter struct {
	httptest.ResponseRecorder
	begun, goOn chan struct{}
	once        atomic.Bool
}

func (s *slowWriter) Write(p []byte) (int, error) {
	if s.once.CompareAndSwap(false, true) {
		close(s.begun)
		<-s.goOn
	}
	return s.ResponseRecorder.Write(p)
}

// R9: what is being sent when its lease ends is finished with the right bytes, even when
// the snapshot is removed meanwhile; the next request is told that it is gone.
func TestLeaseEndsWhileServing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, ServerOptions{Lease: time.Minute})
		defer d.Close()
		data := bytesOf(1, 3*mib)
		held := makeSnapshot(t, d.store, 10, tree{"a": data})
		snap := "snapshots/" + held.ID.String()
		d.ask(t, "POST", snap+"/lease", "t1")

		w := &slowWriter{ResponseRecorder: *httptest.NewRecorder(), begun: make(chan struct{}), goOn: make(chan struct{})}
		done := make(chan struct{})
		go func() {
			defer close(done)
			r := httptest.NewRequest("GET", Prefix+snap+"/files/0", nil)
			r.Header.Set(transferHeader, "t1")
			d.ServeHTTP(w, r)
		}()
		<-w.begun
		_ = sleep(t.Context(), 2*time.Minute)
		if err := d.store.Quarantine(held.ID, "test"); err != nil {
			t.Fatal(err)
		}
		makeSnapshot(t, d.store, 10, tree{"a": bytesOf(2, 3*mib)}) // the name "a" again
		close(w.goOn)
		<-done
		if !bytes.Equal(w.Body.Bytes(), data) {
			t.Errorf("%d bytes that differ came", w.Body.Len())
		}
		if k := d.ask(t, "GET", snap+"/files/0", "t1"); k != protocol.Gone {
			t.Errorf("after that: %q, want gone", k)
		}
	})
}

// A lease that is lost is taken again while the snapshot is there.
func TestFetchLeaseLost(t *testing.T) {
	files := tree{"a": bytesOf(1, 24*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	var n atomic.Int64
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if n.Add(1) == 3 {
			p.server.leases.endAll(held.ID, "test")
		}
		next.ServeHTTP(w, r)
	})
	fetch(t, Fetch{Store: newStore(t), ID: held.ID, Sources: sources(p), Window: 2}, files)
}

// A snapshot that goes while it is read ends the transfer with "gone", and what has come is
// kept (ra#619: missing parts must be an error).
func TestFetchSnapshotGoes(t *testing.T) {
	files := tree{"a": bytesOf(1, 24*mib)}
	p := newPeer(t, 1, nil, nil)
	held := hold(t, 10, files, p)
	var n atomic.Int64
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if n.Add(1) == 3 {
			p.server.leases.endAll(held.ID, "test")
			if err := p.store.Quarantine(held.ID, "test"); err != nil {
				t.Error(err)
			}
		}
		next.ServeHTTP(w, r)
	})
	s := newStore(t)
	_, stats, err := newClient(t).Fetch(t.Context(), Fetch{Store: s, ID: held.ID, Sources: sources(p), Window: 1})
	wantFailure(t, err, protocol.FailGone, 1)
	if stats.Sources[0].Chunks != 2 {
		t.Errorf("%d chunks, want 2", stats.Sources[0].Chunks)
	}
	b := newPeer(t, 2, nil, nil)
	hold(t, 10, files, b)
	if stats := fetch(t, Fetch{Store: s, ID: held.ID, Sources: sources(p, b)}, files); stats.Fetched != 16*mib {
		t.Errorf("fetched %d bytes from the next source, want the rest", stats.Fetched)
	}
}
