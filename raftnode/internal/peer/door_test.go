package peer

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// knock sends a request with headers through a Guard and returns the answer.
func knock(d *Door, h http.Header) (int, Refusal) {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/raftsnap/v1/x", nil)
	r.Header = h
	d.Guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })).ServeHTTP(w, r)
	var no Refusal
	_ = json.Unmarshal(w.Body.Bytes(), &no)
	return w.Code, no
}

// TestGuard: only members of the group come through, each with the directory it was first
// seen with (R11).
func TestGuard(t *testing.T) {
	a, b := newSite(t, "a"), newSite(t, "b")
	fresh := a.door
	bootstrap(t, a, b)
	id := b.door.Identity()
	with := func(change func(*Identity)) http.Header {
		c := *id
		change(&c)
		return Header(&c)
	}
	for _, c := range []struct {
		what   string
		header http.Header
		status int
		kind   Kind
	}{
		{"member", with(func(*Identity) {}), http.StatusNoContent, ""},
		{"other directory", with(func(c *Identity) { c.Incarnation = newIncarnation() }), http.StatusForbidden, OtherIncarnation},
		{"as oneself", with(func(c *Identity) { c.ID = a.id() }), http.StatusForbidden, OtherIncarnation},
		{"oneself", Header(a.door.Identity()), http.StatusNoContent, ""},
		{"other group", with(func(c *Identity) { c.Group = strings.Repeat("0", 64) }), http.StatusConflict, OtherGroup},
		{"no directory", with(func(c *Identity) { c.Incarnation = "" }), http.StatusBadRequest, Malformed},
		{"unknown without a directory", with(func(c *Identity) { c.ID, c.Incarnation = 7, "" }), http.StatusBadRequest, Malformed},
		{"nobody", with(func(c *Identity) { c.ID = 0 }), http.StatusBadRequest, Malformed},
		{"no headers", http.Header{}, http.StatusBadRequest, Malformed},
		{"newcomer", with(func(c *Identity) { c.ID, c.Incarnation = 7, strings.Repeat("ab", 16) }), http.StatusNoContent, ""},
		{"newcomer again", with(func(c *Identity) { c.ID, c.Incarnation = 7, strings.Repeat("ab", 16) }), http.StatusNoContent, ""},
		{"newcomer wiped", with(func(c *Identity) { c.ID = 7 }), http.StatusForbidden, OtherIncarnation},
	} {
		status, no := knock(fresh, c.header)
		if status != c.status || no.Kind != c.kind {
			t.Errorf("%s: got %d %v, want %d %s", c.what, status, no, c.status, c.kind)
		}
	}
	if err := a.door.known.remove(id.ID); err != nil {
		t.Fatal(err)
	}
	a.open(nil)
	if status, no := knock(a.door, Header(id)); status != http.StatusGone || no.Kind != Removed || no.By != "a" {
		t.Errorf("removed: got %d %v", status, no)
	}
	if status, no := knock(newSite(t, "x").door, Header(id)); status != http.StatusServiceUnavailable || no.Kind != NotReady {
		t.Errorf("asked a member without a group: got %d %v", status, no)
	}
}

// TestSeenIsDurable: nobody is trusted before the disk knows (R11); a disk that fails, at
// whatever step, lets nobody in.
func TestSeenIsDurable(t *testing.T) {
	a := newSite(t, "a")
	bootstrap(t, a)
	other := &Identity{Group: a.door.Identity().Group, ID: 7, Incarnation: newIncarnation()}
	for n, failed := 0, true; failed; n++ {
		k := new(killer)
		k.left.Store(int64(n))
		k.in(a.door)
		status, _ := knock(a.door, Header(other))
		failed = status == http.StatusServiceUnavailable
		if !failed && status != http.StatusNoContent {
			t.Fatalf("step %d: status %d", n, status)
		}
		if failed && a.door.Incarnation(7) != "" {
			t.Errorf("step %d: believed without a file", n)
		}
	}
	a.open(nil)
	if got := a.door.Incarnation(7); got != other.Incarnation {
		t.Errorf("got %q, want %q", got, other.Incarnation)
	}
}

func TestDamagedPeersFile(t *testing.T) {
	a, b := newSite(t, "a"), newSite(t, "b")
	bootstrap(t, a, b)
	path := filepath.Join(a.dir, knownFile)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data[:len(data)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = NewDoor(a.dir, nil)
	wantIs(t, err, ErrCorrupt)
}

// TestMissingPeersFile holds R11: what a member knows of the others is not forgotten with a
// file, nor exchanged for what somebody else knows.
func TestMissingPeersFile(t *testing.T) {
	a, b, alone := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	bootstrap(t, a, b)
	bootstrap(t, alone)
	for _, s := range []*site{a, alone} {
		path := filepath.Join(s.dir, knownFile)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		_, err = NewDoor(s.dir, nil)
		wantIs(t, err, ErrCorrupt)
		for _, part := range []string{knownFile + " is missing", "put the file of this directory back", "add it anew"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q lacks %q", err, part)
			}
		}
		other := knownTable{Group: GroupID(a.door.Identity().Initial[:1])}
		if err := (disk{dir: s.dir}).put(knownFile, knownKind, other); err != nil {
			t.Fatal(err)
		}
		_, err = NewDoor(s.dir, nil)
		wantIs(t, err, ErrCorrupt)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s.open(nil)
	}
}

// TestMark: the mark of a member that has run is this directory's, and survives.
func TestMark(t *testing.T) {
	a, b := newSite(t, "a"), newSite(t, "b")
	bootstrap(t, a, b)
	if ran, err := a.door.HasRun(); ran || err != nil {
		t.Errorf("has run before it did: %v, %v", ran, err)
	}
	if err := a.door.MarkRun(); err != nil {
		t.Fatal(err)
	}
	a.open(nil)
	if ran, err := a.door.HasRun(); !ran || err != nil {
		t.Errorf("the mark is lost: %v, %v", ran, err)
	}
	if err := os.Rename(filepath.Join(a.dir, ranFile), filepath.Join(b.dir, ranFile)); err != nil {
		t.Fatal(err)
	}
	_, err := b.door.HasRun()
	wantIs(t, err, ErrCorrupt)
}

// TestKnownLimit: strangers with the right group cannot fill the disk.
func TestKnownLimit(t *testing.T) {
	k, err := loadKnown(disk{dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint64(maxKnown) {
		k.rows[id+1] = knownRow{ID: id + 1}
	}
	wantIs(t, k.see(1<<60, newIncarnation()), Malformed)
	if err := k.see(1, newIncarnation()); err != nil {
		t.Error(err)
	}
}

// TestTableTeaches: incarnations in the replicated table count where none was seen, and
// never replace one that was.
func TestTableTeaches(t *testing.T) {
	k, err := loadKnown(disk{dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	seen, other := newIncarnation(), newIncarnation()
	row := func(id uint64, inc string) []protocol.Member { return []protocol.Member{{ID: id, Incarnation: inc}} }
	if err := errors.Join(k.see(1, seen), k.learn(row(2, seen)), k.learn(row(3, "")), k.learn(row(4, "junk"))); err != nil {
		t.Fatal(err)
	}
	wantIs(t, k.learn(row(1, other)), OtherIncarnation)
	wantIs(t, k.see(2, other), OtherIncarnation)
	if one, three, four := k.incarnation(1), k.incarnation(3), k.incarnation(4); one != seen || three+four != "" {
		t.Errorf("got %q, %q, %q", one, three, four)
	}
}

// TestHostileQuestions: the door answers nonsense with a refusal.
func TestHostileQuestions(t *testing.T) {
	a := newSite(t, "a")
	bootstrap(t, a)
	group := a.door.Identity().Group
	for _, c := range []struct {
		method, path, body string
		want               int
	}{
		{"GET", HelloPath, "", http.StatusMethodNotAllowed},
		{"POST", HelloPath, "", http.StatusBadRequest},
		{"POST", HelloPath, "[]", http.StatusBadRequest},
		{"POST", HelloPath, `{"group":"` + group + `"}`, http.StatusBadRequest},
		{"POST", HelloPath, `{"group":"x","initial":[{"name":"\n"}]}`, http.StatusConflict},
		{"POST", HelloPath, `{"x":"` + strings.Repeat("x", maxJSON) + `"}`, http.StatusBadRequest},
		{"POST", JoinPath, `{}`, http.StatusServiceUnavailable},
		{"POST", "/raft/v1/other", `{}`, http.StatusNotFound},
	} {
		w := httptest.NewRecorder()
		a.door.ServeHTTP(w, httptest.NewRequest(c.method, c.path, bytes.NewReader([]byte(c.body))))
		if w.Code != c.want {
			t.Errorf("%s %s %.40q: got %d, want %d", c.method, c.path, c.body, w.Code, c.want)
		}
	}
}
