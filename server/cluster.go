package server

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// cluster remembers what other members said of themselves last.
type cluster struct {
	http *http.Client // set before serving where the members speak TLS

	mu   sync.Mutex // guards last
	last map[string]cpwire.MemberStatus
}

// askTimeout is how long a member may take to tell its status.
const askTimeout = time.Second

func (c *cluster) init() {
	c.last = map[string]cpwire.MemberStatus{}
	c.http = &http.Client{}
}

func (s *service) serveStatus(w http.ResponseWriter, _ *http.Request) {
	s.respond(w, http.StatusOK, s.ownStatus())
}

// ownStatus is what this member knows.
func (s *service) ownStatus() cpwire.OwnStatus {
	st := s.node.Status()
	own := cpwire.OwnStatus{
		Group: s.node.Group(), Leader: st.Leader, Term: st.Term,
		Member: cpwire.MemberStatus{
			ID: st.Name, URL: st.URL, Role: st.Role.String(), Reachable: true,
			Applied: st.Applied, FirstIndex: st.First, LastIndex: st.Last, LogBytes: st.LogBytes,
			Snapshot: cpwire.SnapshotStatus{Term: st.Snapshot.Term, Index: st.Snapshot.Index, Source: st.Snapshot.Source},
			Why:      st.Snaps.Why,
		},
		Members: []cpwire.Member{},
	}
	x := st.Snaps.Stats
	own.Member.Stats = cpwire.Stats{
		Generated: x.Generated, GeneratedFollower: x.GeneratedFollower, TakenOver: x.TakenOver, Installed: x.Installed,
		Served: x.Served, Refused: x.Refused, Failed: x.Failed, BytesFetched: x.BytesFetched, BytesReused: x.BytesReused,
	}
	if err := s.started(); err != nil {
		own.Member.Why = err.Error()
		if s.first.joins {
			own.Member.Role = protocol.Learner.String()
		}
	}
	for _, m := range st.Members {
		own.Members = append(own.Members, cpwire.Member{ID: m.Name, URL: m.URL, Role: m.Role.String()})
	}
	return own
}

func (s *service) serveCluster(w http.ResponseWriter, r *http.Request) {
	s.respond(w, http.StatusOK, s.clusterStatus(r.Context()))
}

// clusterStatus asks all members. Who leads is told by the one with the highest term, and
// so is who belongs to the group: a member that was away knows neither.
func (s *service) clusterStatus(ctx context.Context) cpwire.ClusterStatus {
	own := s.ownStatus()
	views := s.ask(ctx, own)
	best := own
	for _, v := range views {
		if fresher(v, best) {
			best = v
		}
	}
	status := cpwire.ClusterStatus{Group: own.Group, Leader: best.Leader, Term: best.Term, Members: []cpwire.MemberStatus{}}
	for _, m := range best.Members {
		status.Members = append(status.Members, s.memberStatus(m, views))
	}
	if len(best.Members) == 0 { // not in a group yet
		status.Members = append(status.Members, own.Member)
	}
	slices.SortFunc(status.Members, func(a, b cpwire.MemberStatus) int { return cmp.Compare(a.ID, b.ID) })
	return status
}

// fresher compares two views of the group: by term, then the leader's own, then whoever
// has applied more of the changes to it.
func fresher(a, b cpwire.OwnStatus) bool {
	leads := func(v cpwire.OwnStatus) int {
		switch v.Leader {
		case "":
			return 0
		case v.Member.ID:
			return 2
		}
		return 1
	}
	return cmp.Or(cmp.Compare(a.Term, b.Term), cmp.Compare(leads(a), leads(b)), cmp.Compare(a.Member.Applied, b.Member.Applied)) > 0
}

// memberStatus is what a member said of itself now, else what it said last.
func (s *service) memberStatus(m cpwire.Member, views map[string]cpwire.OwnStatus) cpwire.MemberStatus {
	s.cluster.mu.Lock()
	defer s.cluster.mu.Unlock()
	one, known := s.last[m.ID]
	v, ok := views[m.ID]
	switch {
	case ok:
		one = v.Member
	case !known || one.URL != m.URL: // another member of that name
		one = cpwire.MemberStatus{Snapshot: cpwire.SnapshotStatus{Source: "none"}}
	}
	one.Reachable = ok
	one.ID, one.URL, one.Role = m.ID, m.URL, m.Role
	s.last[m.ID] = one
	return one
}

// ask returns what the members that answer say, by name, this one included.
func (s *service) ask(ctx context.Context, own cpwire.OwnStatus) map[string]cpwire.OwnStatus {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var mu sync.Mutex
	views := map[string]cpwire.OwnStatus{own.Member.ID: own}
	var wg sync.WaitGroup
	for _, m := range own.Members {
		if m.ID == own.Member.ID {
			continue
		}
		wg.Go(func() {
			v, err := s.askOne(ctx, m.URL, own.Group)
			if err != nil || v.Member.ID != m.ID {
				return // not reachable, or another member at its address
			}
			mu.Lock()
			defer mu.Unlock()
			views[m.ID] = v
		})
	}
	wg.Wait()
	return views
}

func (s *service) askOne(ctx context.Context, url, group string) (v cpwire.OwnStatus, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+cpwire.PathStatus, nil)
	if err != nil {
		return v, err
	}
	req.Header.Set(cpwire.HeaderGroup, group)
	resp, err := s.cluster.http.Do(req)
	if err != nil {
		return v, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return v, err
	}
	if resp.StatusCode != http.StatusOK {
		return v, fmt.Errorf("%s answers %s", url, resp.Status)
	}
	err = json.Unmarshal(data, &v)
	return v, err
}

// changeOf reads the body of a request that changes the membership.
func changeOf(w http.ResponseWriter, r *http.Request) (c cpwire.Change, err error) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<10))
	if err != nil {
		return c, err
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("%w: %w", fs.ErrInvalid, err)
	}
	if (cpwire.Task{Job: c.ID, Name: c.ID}).Validate() != nil {
		return c, invalid("id %.150q", c.ID)
	}
	return c, nil
}

func (s *service) serveAddLearner(w http.ResponseWriter, r *http.Request) {
	c, err := changeOf(w, r)
	if err == nil {
		err = s.started()
	}
	if err == nil {
		err = s.checkURL(c.URL)
	}
	var m protocol.Member
	if err == nil {
		ctx, cancel := context.WithTimeout(r.Context(), changeTimeout)
		defer cancel()
		if m, err = s.node.AddLearner(ctx, c.ID, c.URL); err == nil {
			err = s.checkLearner(m)
		}
	}
	if err != nil {
		s.fail(w, "add learner", c.ID, err)
		return
	}
	s.respond(w, http.StatusOK, cpwire.Member{ID: m.Name, URL: m.URL, Role: protocol.Learner.String()})
}

// checkURL refuses an address that no member of this group can have: all speak either
// http or https.
func (s *service) checkURL(raw string) error {
	if raw == "" {
		return invalid("no url")
	}
	u, err := url.Parse(raw)
	if err != nil {
		return invalid("url %.200q: %v", raw, err)
	}
	scheme, _, _ := strings.Cut(s.node.Status().URL, "://")
	port, perr := strconv.ParseUint(u.Port(), 10, 16)
	switch {
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "", perr != nil, port == 0:
		return invalid("url %.200q, want %s://HOST:PORT", raw, scheme)
	case u.User != nil, u.RawQuery != "", u.Fragment != "", u.Path != "" && u.Path != "/":
		return invalid("url %.200q has more than scheme, host and port", raw)
	case u.Scheme != scheme:
		return invalid("url %.200q: the members of this group speak %s to each other", raw, scheme)
	}
	return nil
}

// checkLearner refuses to call a member a learner that is one no more. Whoever adds it
// again may have lost its disk, which promoting it would hide.
func (s *service) checkLearner(m protocol.Member) error {
	for _, one := range s.node.Status().Members {
		if one.Name == m.Name && one.Role != protocol.Learner {
			return fmt.Errorf("%s at %s is a member that votes; if it lost its disk, remove it first: %w", m.Name, m.URL, raftnode.ErrConflict)
		}
	}
	return nil
}

// change serves one of the other changes.
func (s *service) change(op string, do func(ctx context.Context, name string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c, err := changeOf(w, r)
		if err == nil {
			err = s.started()
		}
		if err == nil {
			ctx, cancel := context.WithTimeout(r.Context(), patience(c))
			defer cancel()
			err = do(ctx, c.ID)
		}
		if err != nil {
			s.fail(w, op, c.ID, err)
			return
		}
		s.respond(w, http.StatusOK, struct{}{})
	}
}

// patience is how long the client wants a change to be waited for, within bounds.
func patience(c cpwire.Change) time.Duration {
	if c.Wait <= 0 {
		return changeTimeout
	}
	most := int64(cpwire.MaxPromote / time.Millisecond)
	return time.Duration(min(c.Wait, most)) * time.Millisecond
}

// serveSnapshot asks for a snapshot at the leader, whose log it cuts.
func (s *service) serveSnapshot(w http.ResponseWriter, r *http.Request) {
	var id protocol.ID
	var err error
	if s.node.Status().Role != protocol.Leader {
		leader, _ := s.node.Leader()
		err = &raftnode.NotLeaderError{Leader: leader}
	} else {
		ctx, cancel := context.WithTimeout(r.Context(), snapshotTimeout)
		defer cancel()
		id, err = s.node.Snapshot(ctx)
	}
	if err != nil {
		s.fail(w, "snapshot", "", err)
		return
	}
	s.respond(w, http.StatusOK, cpwire.SnapshotID{Term: id.Term, Index: id.Index, Digest: id.Digest.String()})
}
