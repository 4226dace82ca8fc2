//go:build linux

package grouptest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// These are the tests of the reference that run whole groups: its fault tolerance, its
// checkpoints on request, and its journal, as far as they can be seen from outside.

// ledger writes to a group while nothing is wrong, and knows what it has written.
type ledger struct {
	g    *group
	job  string
	logs map[cpwire.Task][]head
}

func (g *group) newLedger() *ledger {
	return &ledger{g: g, job: fmt.Sprint("ledger", jobs.Add(1)), logs: map[cpwire.Task][]head{}}
}

// write appends n entries, to several tasks at once.
func (l *ledger) write(n int) {
	l.g.t.Helper()
	const tasks = 10
	c := l.g.client(&cpwire.Options{Patience: patience, TryTimeout: time.Second})
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range tasks {
		task := cpwire.Task{Job: l.job, Name: fmt.Sprint("t", i)}
		mu.Lock()
		log := l.logs[task]
		mu.Unlock()
		all.Go(func() {
			for range (n + i) / tasks {
				var at head
				if len(log) > 0 {
					at = log[len(log)-1]
				}
				a := cpwire.Append{Task: task, Slot: at.slot + 1, Prev: at.digest, Body: fmt.Append(nil, l.job, i, at.slot)}
				copy(a.Nonce[:], fmt.Sprintf("%d %s", at.slot, l.job))
				r, err := c.Append(l.g.t.Context(), a)
				if err != nil || !r.Status.InLog() {
					l.g.t.Errorf("append to %s: %v, %v", task, r.Status, err)
					return
				}
				log = append(log, head{r.Slot, r.Digest})
			}
			mu.Lock()
			defer mu.Unlock()
			l.logs[task] = log
		})
	}
	all.Wait()
}

// checkAt wants everything to be there when m leads.
func (l *ledger) checkAt(m *member) {
	l.g.t.Helper()
	got := l.g.contentsOf(m, l.job)
	for task, log := range l.logs {
		same := len(got[task]) == len(log)
		for i := 0; same && i < len(log); i++ {
			same = log[i] == head{got[task][i].Slot, got[task][i].Digest}
		}
		if !same {
			l.g.t.Errorf("%s has other entries of %s than were written: %d, want %d", m.id, task, len(got[task]), len(log))
		}
	}
}

func (l *ledger) check() {
	l.g.t.Helper()
	for _, m := range l.g.members {
		if m.process() != nil {
			l.checkAt(m)
		}
	}
}

// installed is how often a member had to install so far.
func (g *group) installed(m *member) int64 { return g.status(m).Stats.Installed }

// catchesUp waits until a member has all that the others have.
func (g *group) catchesUp(m *member) {
	g.t.Helper()
	g.eventually(m.id+" has caught up", level)
}

// EmbeddedJournalIntegrationTestFaultTolerance.failover: when the leader dies another one
// has everything.
func TestReferenceFailover(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	l := g.newLedger()
	l.write(50)
	dead := g.leader()
	dead.kill()
	l.write(50)
	lead := g.leader()
	if lead == dead {
		t.Fatal("a dead member leads")
	}
	l.checkAt(lead)
	dead.start()
	g.catchesUp(dead)
	l.checkAt(dead)
}

// copySnapshotToMaster: the leader ends with a snapshot on disk that a follower made.
func TestReferenceCopySnapshotToMaster(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{entries: 100, trail: 10})
	l := g.newLedger()
	l.write(2200) // appends that are made at once share entries
	lead := g.leader()
	s := g.eventually("the leader took a snapshot over", func(s *status) bool { return s.member(lead.id).Stats.TakenOver > 0 })
	if m := s.member(lead.id); m.Snapshot.Source == "local" || m.Snapshot.Source == "none" || m.Snapshot.Index < 100 || m.FirstIndex <= 2 {
		t.Errorf("leader: %+v", m)
	}
	if found, err := filepath.Glob(filepath.Join(lead.data, "snapshots", "*")); err != nil || len(found) == 0 {
		t.Errorf("no snapshot in the leader's directory: %v, %v", found, err)
	}
	l.check()
	g.checkCut()
}

// copySnapshotToFollower: the reference wipes a follower's journal, starts it again, and a
// snapshot arrives. Here such a member must not come back as what it was (R11): it has
// forgotten its vote and its log, and as the same voter it could help to elect a leader
// that lacks what it had acknowledged. It says so and ends. Once it is removed and added
// anew, the snapshot arrives.
func TestReferenceCopySnapshotToFollower(t *testing.T) {
	t.Parallel()
	g := newGroup(t, options{})
	l := g.newLedger()
	l.write(300)
	m := g.followers()[0]
	m.stop()
	if err := os.RemoveAll(m.data); err != nil {
		t.Fatal(err)
	}
	if said := m.startInVain("--initial-cluster", g.initial); !strings.Contains(said, "incarnation") {
		t.Errorf("a wiped member says: %s", said)
	}
	l.write(300)

	g.must("remove", "--id", m.id)
	g.must("add-learner", "--id", m.id, "--url", m.url)
	if err := os.RemoveAll(m.data); err != nil {
		t.Fatal(err)
	}
	m.start("--join", strings.Join(g.urls(), ","))
	g.eventually("a snapshot arrived", func(s *status) bool { return s.member(m.id).Stats.Installed > 0 })
	g.must("promote", "--id", m.id)
	g.catchesUp(m)
	l.check()
}

// restart: everything is there after all members were stopped and started.
func TestReferenceRestart(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	l := g.newLedger()
	l.write(250)
	g.restartAll()
	l.check()
	l.write(20)
	l.check()
}

func (g *group) restartAll() {
	var all sync.WaitGroup
	for _, m := range g.members {
		all.Go(m.stop)
	}
	all.Wait()
	for _, m := range g.members {
		m.start()
	}
}

// restartStress: the same again and again while clients work.
func TestReferenceRestartStress(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	h := g.begin(newSeed(t), load{})
	for range times(3, 8) {
		h.progress(100)
		g.restartAll()
	}
	h.progress(20)
	h.end()
}

// TriggeredCheckpointTest: a snapshot on request is made, has what was there, cuts the logs,
// and is what members start from.
func TestReferenceTriggeredCheckpoint(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{entries: 1_000_000, trail: 10})
	l := g.newLedger()
	l.write(100)
	lead := g.leader()
	before := g.status(lead)
	var id cpwire.SnapshotID
	if err := json.Unmarshal(g.must("snapshot"), &id); err != nil {
		t.Fatal(err)
	}
	if id.Index < before.Applied || id.Digest == "" {
		t.Errorf("snapshot %+v, %d were applied before", id, before.Applied)
	}
	g.eventually("everybody has it and has cut the log", func(s *status) bool {
		for _, m := range s.Members {
			if m.Snapshot.Index < id.Index || m.FirstIndex+20 < id.Index {
				return false
			}
		}
		return true
	})
	g.restartAll()
	l.check()
}

// RaftJournalTest, on one group.
func TestReferenceRaftJournal(t *testing.T) {
	t.Parallel()
	g := newGroup(t, options{entries: 1_000_000, trail: 10})
	l := g.newLedger()
	g.step(t, "writeJournal", func() {
		l.write(20)
		l.check()
	})
	g.step(t, "joinCluster", func() { g.joinCluster(l) })

	follower := func() *member { return g.followers()[0] }
	g.step(t, "suspendCatchupResume", func() {
		m := follower()
		had := g.installed(m)
		m.pause()
		l.write(20)
		m.resume()
		g.catchesUp(m)
		if g.installed(m) != had {
			t.Error("it installed a snapshot though the log was there")
		}
		l.checkAt(m)
	})
	g.step(t, "suspendSnapshotRestart", func() {
		m := follower()
		m.pause()
		l.write(20)
		g.must("snapshot")
		m.kill()
		l.write(20)
		m.start()
		g.catchesUp(m)
		l.checkAt(m)
	})
	g.step(t, "catchUpInSteps", func() {
		m := follower()
		for range 3 {
			m.pause()
			l.write(10)
			m.resume()
			g.catchesUp(m)
		}
		l.checkAt(m)
	})
	g.step(t, "subsequentCatchups", func() {
		m := follower()
		for range 2 {
			last := g.status(m).LastIndex
			m.kill()
			l.write(500)
			g.must("snapshot")
			// The log stays a little after the first install (R9).
			g.eventually("the log is too short", func(s *status) bool { return s.member(s.Leader).FirstIndex > last+1 })
			m.start()
			g.catchesUp(m)
			if g.installed(m) == 0 {
				t.Error("it did not install")
			}
		}
		l.checkAt(m)
	})
	g.step(t, "gainPrimacyAfterSuspend", func() {
		m := follower()
		m.pause()
		l.write(20)
		m.resume()
		l.checkAt(m)
	})
	g.step(t, "gainPrimacyAfterCatchup", func() {
		m := follower()
		m.kill()
		l.write(20)
		m.start()
		g.catchesUp(m)
		l.checkAt(m)
	})
	g.step(t, "gainPrimacyDuringCatchup", func() {
		m := follower()
		m.kill()
		l.write(20)
		g.must("snapshot")
		m.start()
		l.checkAt(m) // at once, and again until it leads
	})
}

// joinCluster adds a member, lets it lead, and takes it away again.
func (g *group) joinCluster(l *ledger) {
	m := g.newMember("n4")
	g.must("add-learner", "--id", m.id, "--url", m.url)
	m.start("--join", g.members[0].url)
	g.eyes.also(m)
	g.must("promote", "--id", m.id)
	l.write(20)
	l.checkAt(m)
	g.must("transfer-leader", "--id", "n1")
	m.mayEnd()
	g.must("remove", "--id", m.id)
	if code := m.finish(nil); code != 1 {
		g.t.Errorf("a removed member ended with exit code %d, want 1", code)
	}
	if said := tail(m.log, 1); !strings.Contains(said, "removed") {
		g.t.Errorf("a removed member says: %s", said)
	}
	g.members = g.members[:3]
	g.eventually("three members", func(s *status) bool { return len(s.Members) == 3 && s.Leader != "" })
}
