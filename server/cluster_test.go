package server

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// The JSON that scripts read has every field, also of a member that never answered.
func TestClusterFields(t *testing.T) {
	g := newGroup(t, 2)
	g.members[1].breakNet(refuse)
	_, _, body := g.members[0].call("GET", "/v1/cluster", "")
	var d map[string]any
	if err := json.Unmarshal([]byte(body), &d); err != nil {
		t.Fatal(err)
	}
	keys := func(m any) []string { return slices.Sorted(maps.Keys(m.(map[string]any))) }
	if diff := cmp.Diff(keys(d), []string{"group", "leader", "members", "term"}); diff != "" {
		t.Error(diff)
	}
	for _, m := range d["members"].([]any) {
		if diff := cmp.Diff(keys(m), []string{"applied", "first_index", "id", "last_index", "log_bytes", "reachable", "role", "snapshot", "stats", "url", "why"}); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(keys(m.(map[string]any)["snapshot"]), []string{"index", "source", "term"}); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(keys(m.(map[string]any)["stats"]), []string{"bytes_fetched", "bytes_reused", "failed", "generated", "generated_follower", "installed", "refused", "served", "taken_over"}); diff != "" {
			t.Error(diff)
		}
	}
}

// The status has what the node says, and of a member that is away what it said last.
func TestClusterStatus(t *testing.T) {
	g := newGroup(t, 3)
	c := g.client(nil)
	fill(t, c, task("p7"), 5)
	g.members[2].learner = true
	g.members[1].status = raftnode.Status{
		First: 7, Last: 9, LogBytes: 123, Snapshot: raftnode.SnapshotStatus{Term: 2, Index: 6, Source: "n3"},
		Snaps: raftsnap.Status{Why: "none is due", Stats: raftsnap.Stats{
			Generated: 1, GeneratedFollower: 2, TakenOver: 3, Installed: 4, Served: 5, Refused: 6, Failed: 7, BytesFetched: 8, BytesReused: 9,
		}},
	}
	want := cpwire.MemberStatus{
		ID: "n2", URL: g.members[1].http.URL, Role: "follower", Reachable: true, Applied: 5, FirstIndex: 7, LastIndex: 9, LogBytes: 123,
		Snapshot: cpwire.SnapshotStatus{Term: 2, Index: 6, Source: "n3"}, Why: "none is due",
		Stats: cpwire.Stats{
			Generated: 1, GeneratedFollower: 2, TakenOver: 3, Installed: 4, Served: 5, Refused: 6, Failed: 7, BytesFetched: 8, BytesReused: 9,
		},
	}

	s, err := c.Cluster(t.Context())
	if err != nil || s.Leader != "n1" || s.Term != 1 || s.Group != "group-1" || len(s.Members) != 3 {
		t.Fatalf("status %+v, %v", s, err)
	}
	if d := cmp.Diff(s.Members[1], want); d != "" {
		t.Errorf("member (-got +want):\n%s", d)
	}
	if s.Members[0].Role != "leader" || s.Members[2].Role != "learner" {
		t.Errorf("roles %s and %s", s.Members[0].Role, s.Members[2].Role)
	}

	g.members[1].breakNet(refuse)
	want.Reachable = false
	if s, err = c.Cluster(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(s.Members[1], want); d != "" {
		t.Errorf("member that is away (-got +want):\n%s", d)
	}
}

// A member that was away and still takes itself for the leader is not believed.
func TestClusterOldLeader(t *testing.T) {
	g := newGroup(t, 3)
	old := g.members[0]
	own := old.svc.ownStatus()
	own.Leader, own.Term = "n1", 1
	old.breakNet(func(w http.ResponseWriter, r *http.Request, _ http.HandlerFunc) {
		w.Header().Set(cpwire.HeaderGroup, "group-1")
		old.svc.respond(w, http.StatusOK, own)
	})
	g.lead(1) // term 2
	s := g.members[2].svc.clusterStatus(t.Context())
	if s.Leader != "n2" || s.Term != 2 || s.Members[0].Role != "follower" || s.Members[1].Role != "leader" || !s.Members[0].Reachable {
		t.Errorf("status %+v", s)
	}

	// The other way round: asked at the old one, the others know better.
	if fresher(own, g.members[1].svc.ownStatus()) || !fresher(g.members[1].svc.ownStatus(), own) {
		t.Error("the old leader's view counts more")
	}
}

// Another member at an address of the group does not count as the one that belongs there.
func TestClusterWrongMember(t *testing.T) {
	g := newGroup(t, 2)
	g.members[1].breakNet(func(w http.ResponseWriter, r *http.Request, _ http.HandlerFunc) {
		g.members[0].svc.serveStatus(w, r)
	})
	if s := g.members[0].svc.clusterStatus(t.Context()); s.Members[1].Reachable {
		t.Errorf("status %+v", s)
	}
}

func TestMembership(t *testing.T) {
	g := newGroup(t, 4)
	g.lead(2)
	g.members[3].learner = true
	c := g.client(nil)
	m, err := c.AddLearner(t.Context(), "n9", "h:1")
	if err != nil || cmp.Diff(m, cpwire.Member{ID: "n9", URL: "http://h:1", Role: "learner"}) != "" {
		t.Errorf("add: %+v, %v", m, err)
	}
	if _, err := c.AddLearner(t.Context(), "n9", "ftp://h"); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("add with a bad address: %v", err)
	}
	learner, voter := g.members[3].http.URL, g.members[1].http.URL
	if m, err := c.AddLearner(t.Context(), "n4", learner); err != nil || m.Role != "learner" {
		t.Errorf("add the same learner again: %+v, %v", m, err)
	}
	if m, err := c.AddLearner(t.Context(), "n2", voter); !errors.Is(err, sentinel.Conflict) || !strings.Contains(err.Error(), "votes") {
		t.Errorf("add one that votes: %+v, %v", m, err)
	}
	g.lag = "n4"
	if err := c.Promote(t.Context(), "n4"); !errors.Is(err, sentinel.Conflict) || strings.Count(err.Error(), "n4") != 1 {
		t.Errorf("promote one that lags: %v", err)
	}
	if g.waits < 20*time.Second || g.waits > 30*time.Second {
		t.Errorf("the member waits %s for a client that waits 30 s", g.waits)
	}
	g.lag = ""
	if err := c.Promote(t.Context(), "n4"); err != nil || g.members[3].learner {
		t.Errorf("promote: %v", err)
	}
	if err := c.TransferLeader(t.Context(), "n1"); err != nil || g.leader != 0 {
		t.Errorf("transfer: %v", err)
	}
	if id, err := c.Snapshot(t.Context()); err != nil || id.Index != 7 {
		t.Errorf("snapshot: %+v, %v", id, err)
	}
	if err := c.Remove(t.Context(), "n8"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("remove nobody: %v", err)
	}
	var told atomic.Bool
	g.after = func() error { // the answer is lost, the change is not
		if told.Swap(true) {
			return nil
		}
		return raftnode.ErrUnknown
	}
	if err := c.Remove(t.Context(), "n4"); err != nil || len(g.members) != 3 {
		t.Errorf("remove: %v", err)
	}
	if s, err := c.Status(t.Context()); err != nil || s.Group != "group-1" || len(s.Members) != 3 || s.Members[0].Role != protocol.Leader.String() {
		t.Errorf("status: %+v, %v", s, err)
	}
}

// How long a member waits for a learner is bounded, whatever a client says.
func TestPatience(t *testing.T) {
	for wait, want := range map[int64]time.Duration{
		0: changeTimeout, -1: changeTimeout, 1500: 1500 * time.Millisecond, 1 << 62: cpwire.MaxPromote,
	} {
		if got := patience(cpwire.Change{Wait: wait}); got != want {
			t.Errorf("%d ms: %s, want %s", wait, got, want)
		}
	}
}
