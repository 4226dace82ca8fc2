package peer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// TestBootstrapTogether: three members that start at the same instant find each other (R11).
func TestBootstrapTogether(t *testing.T) {
	a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	bootstrap(t, a, b, c)
	ids := map[uint64]bool{}
	for _, s := range []*site{a, b, c} {
		id, err := Load(s.dir)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(s.door.Identity(), id); diff != "" {
			t.Error(diff)
		}
		if !id.Started || id.Group != a.door.Identity().Group || id.URL != s.url() || len(id.Table()) != 3 {
			t.Errorf("%s: %+v", s.name, id)
		}
		ids[id.ID] = true
		for _, o := range []*site{a, b, c} {
			if got, want := s.door.Incarnation(o.id()), o.door.Identity().Incarnation; got != want {
				t.Errorf("%s knows %s as %q, want %q", s.name, o.name, got, want)
			}
		}
	}
	if len(ids) != 3 {
		t.Errorf("ids %v", ids)
	}
}

func TestBootstrapAlone(t *testing.T) {
	a := newSite(t, "a")
	bootstrap(t, a)
}

// TestBootstrapNeedsMajority: one of three waits and names who is missing; two begin,
// unless a majority of the others is asked for.
func TestBootstrapNeedsMajority(t *testing.T) {
	a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	all := cluster(a, b, c)
	b.hangUp()
	c.hangUp()
	_, err := a.door.Bootstrap(shortly(t), "a", "", all)
	if err == nil || !strings.Contains(err.Error(), "0 of the 1 answers needed") || !strings.Contains(err.Error(), "b (") || !strings.Contains(err.Error(), "waited enough") {
		t.Fatalf("alone: got %v", err)
	}
	b.listen()
	start := func(name string, s *site, opts *DoorOptions) (err error) {
		s.open(opts)
		_, err = s.door.Bootstrap(shortly(t), name, "", all)
		return err
	}
	var wg sync.WaitGroup
	for _, s := range []*site{a, b} {
		wg.Go(func() {
			if err := start(s.name, s, &DoorOptions{OthersMajority: true}); err == nil {
				t.Errorf("%s started without a majority of the others", s.name)
			}
		})
	}
	wg.Wait()
	for _, s := range []*site{a, b} {
		s.open(nil)
		wg.Go(func() {
			if _, err := s.door.Bootstrap(t.Context(), s.name, "", all); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestNeeded(t *testing.T) {
	self, others := &Door{}, &Door{opts: DoorOptions{OthersMajority: true}}
	for n, want := range [][2]int{{0, 0}, {1, 1}, {1, 2}, {2, 2}, {2, 3}, {3, 3}, {3, 4}} {
		if got := [2]int{self.needed(n), others.needed(n)}; got != want {
			t.Errorf("%d others: got %v, want %v", n, got, want)
		}
	}
}

var errKilled = errors.New("killed")

// killer dies at the n-th step on disk.
type killer struct{ left atomic.Int64 }

func (k *killer) step(name string) error {
	if k.left.Add(-1) < 0 {
		return fmt.Errorf("%w before %s", errKilled, name)
	}
	return nil
}

func (k *killer) in(d *Door) { d.disk.fault, d.known.disk.fault = k.step, k.step }

// TestFirstStartKilled: a member killed at any step of its very first start comes back
// as the one it was (R11), and the group begins with it.
func TestFirstStartKilled(t *testing.T) {
	killed := true
	for n := 0; killed; n++ {
		a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
		all := cluster(a, b, c)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, s := range []*site{b, c} {
			wg.Go(func() {
				if _, err := s.door.Bootstrap(ctx, s.name, "", all); err != nil {
					t.Errorf("killed at %d: %v", n, err)
				}
			})
		}
		k := new(killer)
		k.left.Store(int64(n))
		k.in(a.door)
		_, err := a.door.Bootstrap(ctx, "a", "", all)
		killed = errors.Is(err, errKilled)
		if err != nil && !killed {
			t.Fatal(err)
		}
		before, _ := Load(a.dir)
		a.open(nil)
		id, err := a.door.Bootstrap(ctx, "a", "", all)
		if err != nil {
			t.Fatalf("killed at %d: %v", n, err)
		}
		if before != nil && before.Incarnation != id.Incarnation {
			t.Errorf("killed at %d: came back as %s, was %s", n, id.Incarnation, before.Incarnation)
		}
		wg.Wait()
		cancel()
	}
}

// wipe empties the directory and opens a new door, as if the disk had been replaced.
func (s *site) wipe() {
	s.t.Helper()
	if err := os.RemoveAll(s.dir); err != nil {
		s.t.Fatal(err)
	}
	s.tr = nil
	s.open(nil)
}

// TestWipedStaysOut: a member that lost its directory cannot come back under its id (R11,
// F35), whether it bootstraps, or claims to have started and opens a stream.
func TestWipedStaysOut(t *testing.T) {
	a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	bootstrap(t, a, b, c)
	a.wipe()
	_, err := a.door.Bootstrap(t.Context(), "a", a.url(), cluster(a, b, c))
	wantIs(t, err, OtherIncarnation)
	if !strings.Contains(err.Error(), "remove it and add it anew") {
		t.Errorf("no advice in %v", err)
	}
	// Those it asked are new processes: they know it from their disks.
	b.open(nil)
	c.open(nil)
	_, err = a.door.Bootstrap(t.Context(), "a", a.url(), cluster(a, b, c))
	wantIs(t, err, OtherIncarnation)

	if _, err := a.door.start(a.door.Identity()); err != nil {
		t.Fatal(err)
	}
	refused := make(chan *Refusal, 8)
	b.run(nil)
	a.run(&Options{Refused: func(id uint64, r *Refusal) {
		if id == b.id() {
			refused <- r
		}
	}})
	a.tr.SetMembers(a.door.Identity().Table())
	if r := <-refused; r.Kind != OtherIncarnation || r.By != "b" {
		t.Errorf("got %v", r)
	}
	b.tr.SetMembers(b.door.Identity().Table())
	eventually(t, "b says why it does not talk to a", func() bool {
		return strings.Contains(b.tr.Status()[0].Trouble+b.tr.Status()[1].Trouble, string(OtherIncarnation))
	})
}

// TestLateObjection: whoever has not answered when enough others have is still waited for
// a little, as it may be the one that knows better (R11).
func TestLateObjection(t *testing.T) {
	a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	bootstrap(t, a, b, c)
	a.wipe()
	a.door.grace = patience
	if err := b.door.disk.put(knownFile, knownKind, knownTable{Group: b.door.Identity().Group}); err != nil { // b has never met a
		t.Fatal(err)
	}
	b.open(nil)
	mux := http.NewServeMux()
	mux.HandleFunc(HelloPath, func(w http.ResponseWriter, r *http.Request) {
		for a.door.Incarnation(b.id()) == "" { // b's answer has not come yet
			pause(r.Context(), time.Millisecond)
		}
		c.door.ServeHTTP(w, r)
	})
	c.routes.Store(mux)
	_, err := a.door.Bootstrap(t.Context(), "a", "", cluster(a, b, c))
	wantIs(t, err, OtherIncarnation)
}

// TestStrangerAnswers: who answers a hello must be the one that was seen before, too (R11).
func TestStrangerAnswers(t *testing.T) {
	a, b := newSite(t, "a"), newSite(t, "b")
	bootstrap(t, a, b)
	id := a.door.Identity()
	to := without(id.Initial, id.ID)[0]
	if err := a.door.sayHello(t.Context(), id, to); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc(HelloPath, func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, welcome{ID: to.ID, Name: to.Name, Incarnation: newIncarnation()})
	})
	b.routes.Store(mux)
	wantIs(t, a.door.sayHello(t.Context(), id, to), OtherIncarnation)
}

// TestOtherInitialCluster: members that were told different things say so, and what.
func TestOtherInitialCluster(t *testing.T) {
	a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	bootstrap(t, b, c)
	_, err := a.door.Bootstrap(t.Context(), "a", "", cluster(a, b, c))
	wantIs(t, err, OtherGroup)
	for _, part := range []string{flag(b.door.Identity().Initial), flag(a.door.Identity().Initial), "says "} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q lacks %q", err, part)
		}
	}
	// What never started may be told something else: nobody has met it.
	before := a.door.Identity()
	id, err := a.door.Bootstrap(t.Context(), "a", "", cluster(a))
	if err != nil || id.Group == before.Group || id.Incarnation != before.Incarnation {
		t.Errorf("got %+v, %v", id, err)
	}
}

// TestSwappedAddresses: a list that has a member at another one's address is refused.
func TestSwappedAddresses(t *testing.T) {
	a, b, c := newSite(t, "a"), newSite(t, "b"), newSite(t, "c")
	all := map[string]string{"a": a.url(), "b": c.url(), "c": b.url()}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, s := range []*site{b, c} {
		wg.Go(func() { _, _ = s.door.Bootstrap(ctx, s.name, "", all) })
	}
	_, err := a.door.Bootstrap(ctx, "a", "", all)
	wantIs(t, err, OtherMember)
	cancel()
	wg.Wait()
}

// TestRestart: a member that has started needs nobody to start again.
func TestRestart(t *testing.T) {
	a, b := newSite(t, "a"), newSite(t, "b")
	bootstrap(t, a, b)
	b.hangUp()
	want := a.door.Identity()
	a.open(nil)
	for _, url := range []string{"", a.url(), strings.ToUpper(a.url()[:4]) + a.url()[4:]} {
		got, err := a.door.Bootstrap(t.Context(), "a", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	if _, _, err := a.door.Join(t.Context(), "a", "", nil); err != nil {
		t.Error(err)
	}
	for name, url := range map[string]string{"x": "", "a": b.url()} {
		if _, err := a.door.Bootstrap(t.Context(), name, url, nil); err == nil {
			t.Errorf("started as %s at %q", name, url)
		}
	}
	if err := a.door.Retire(); err != nil {
		t.Fatal(err)
	}
	a.open(nil)
	_, err := a.door.Bootstrap(t.Context(), "a", "", nil)
	wantIs(t, err, Removed)
	_, _, err = a.door.Join(t.Context(), "a", a.url(), []string{b.url()})
	wantIs(t, err, Removed)
}

// group is the member table that a test's members answer joins from.
type group struct {
	mu    sync.Mutex
	id    string
	table []protocol.Member
}

func (g *group) members() []protocol.Member {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]protocol.Member(nil), g.table...)
}

func (g *group) add(s *site) uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := protocol.Member{ID: NewID(), Name: s.name, URL: s.url()}
	g.table = append(g.table, m)
	return m.ID
}

func (g *group) remove(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, m := range g.table {
		if m.Name == name {
			g.table = append(append([]protocol.Member(nil), g.table[:i]...), g.table[i+1:]...)
			return
		}
	}
}

// joinable gives a running group of two.
func joinable(t *testing.T) (*group, []*site) {
	sites := []*site{newSite(t, "a"), newSite(t, "b")}
	bootstrap(t, sites...)
	g := &group{id: sites[0].door.Identity().Group, table: sites[0].door.Identity().Table()}
	for _, s := range sites {
		s.door.AnswerJoin(joinFrom(g.id, g.members))
	}
	return g, sites
}

// TestJoinWaits: a member may start before it is added, and asks on until it is; one of
// those it asks may be down.
func TestJoinWaits(t *testing.T) {
	g, sites := joinable(t)
	dead, n := newSite(t, "dead"), newSite(t, "n")
	dead.hangUp()
	ask := []string{dead.url(), sites[1].url()}

	_, _, err := n.door.Join(shortly(t), "n", n.url(), ask)
	wantIs(t, err, NotAdded)
	if !strings.Contains(err.Error(), "nobody has added n at "+n.url()) {
		t.Errorf("got %v", err)
	}
	var asked atomic.Int64
	join := joinFrom(g.id, g.members)
	waits := make(chan struct{})
	sites[1].door.AnswerJoin(func(name, url string) (string, uint64, []protocol.Member, error) {
		if asked.Add(1) == 3 {
			close(waits)
		}
		return join(name, url)
	})
	done := make(chan error, 1)
	var id *Identity
	var table []protocol.Member
	go func() {
		var err error
		id, table, err = n.door.Join(t.Context(), "n", n.url(), ask)
		done <- err
	}()
	<-waits
	raftID := g.add(n)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if id.ID != raftID || id.Group != g.id || !id.Started || len(id.Initial) != 0 {
		t.Errorf("got %+v", id)
	}
	if diff := cmp.Diff(g.members(), table); diff != "" {
		t.Error(diff)
	}
	for _, s := range sites {
		if got := s.door.Incarnation(raftID); got != id.Incarnation {
			t.Errorf("%s knows n as %q, want %q", s.name, got, id.Incarnation)
		}
	}
	// The directory knows all of it now.
	n.open(nil)
	again, table2, err := n.door.Join(t.Context(), "n", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(id, again); diff != "" || len(table2) != 3 {
		t.Error(diff, table2)
	}
}

// TestWipedJoinerStaysOut: what holds for initial members holds for those that joined
// (R11): a new directory needs a new id.
func TestWipedJoinerStaysOut(t *testing.T) {
	g, sites := joinable(t)
	n := newSite(t, "n")
	old := g.add(n)
	if _, _, err := n.door.Join(t.Context(), "n", n.url(), []string{sites[0].url()}); err != nil {
		t.Fatal(err)
	}
	keep := n.dir
	n.wipe()
	_, _, err := n.door.Join(t.Context(), "n", n.url(), []string{sites[1].url()})
	wantIs(t, err, OtherIncarnation)

	g.remove("n")
	id := g.add(n)
	got, _, err := n.door.Join(t.Context(), "n", n.url(), []string{sites[1].url()})
	if err != nil || got.ID != id || id == old {
		t.Fatalf("added anew: %+v, %v", got, err)
	}
	if n.dir != keep {
		t.Error("the test looks at another directory")
	}
}

// TestJoinKilled: a joining member killed at any step comes back with the same incarnation.
func TestJoinKilled(t *testing.T) {
	killed := true
	for n := 0; killed; n++ {
		g, sites := joinable(t)
		s := newSite(t, "n")
		raftID := g.add(s)
		k := new(killer)
		k.left.Store(int64(n))
		k.in(s.door)
		_, _, err := s.door.Join(t.Context(), "n", s.url(), []string{sites[0].url()})
		killed = errors.Is(err, errKilled)
		if err != nil && !killed {
			t.Fatal(err)
		}
		before, _ := Load(s.dir)
		s.open(nil)
		id, _, err := s.door.Join(t.Context(), "n", s.url(), []string{sites[1].url()})
		if err != nil || id.ID != raftID {
			t.Fatalf("killed at %d: %+v, %v", n, id, err)
		}
		if before != nil && before.Incarnation != id.Incarnation {
			t.Errorf("killed at %d: came back as %s, was %s", n, id.Incarnation, before.Incarnation)
		}
	}
}

func TestJoinRefusals(t *testing.T) {
	g, sites := joinable(t)
	n := newSite(t, "n")
	for _, c := range []struct {
		name, url string
		peers     []string
	}{{"n", n.url(), nil}, {"n", "", []string{sites[0].url()}}, {"n", n.url(), []string{"x"}}, {"/", n.url(), []string{sites[0].url()}}} {
		if _, _, err := n.door.Join(t.Context(), c.name, c.url, c.peers); err == nil {
			t.Errorf("joined with %+v", c)
		}
	}
	// A group that expects this member elsewhere says so at once.
	raftID := g.add(n)
	sites[0].door.AnswerJoin(func(string, string) (string, uint64, []protocol.Member, error) {
		return g.id, raftID, []protocol.Member{{ID: raftID, Name: "n", URL: "http://10.0.0.9:1"}}, nil
	})
	_, _, err := n.door.Join(t.Context(), "n", n.url(), []string{sites[0].url()})
	wantIs(t, err, OtherMember)

	for what, answer := range map[string]string{
		"nonsense": `{"group":"g"}`, "no JSON": "x", "no row": `{"group":"` + g.id + `","id":7,"members":[]}`,
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) }))
		if _, _, err := n.door.Join(shortly(t), "n", n.url(), []string{srv.URL}); err == nil {
			t.Errorf("%s: joined", what)
		}
		srv.Close()
	}
}
