//go:build linux

package grouptest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// patience is how long a group may take for what it must do in the end. Tests pass long
// before on any machine.
const patience = 2 * time.Minute

// group is a group of processes and the network between them.
type group struct {
	base    testing.TB // whose group it is: for goroutines
	t       testing.TB // the same, or the step that runs
	net     network
	dir     string
	flags   []string // of every member, beside those that say who it is
	initial string   // the first members, as --initial-cluster wants them
	members []*member
	eyes    *eyes
	after   []func() error // for when nobody runs any more
}

// member is a member that may be running or not.
type member struct {
	g           *group
	i           int
	id          string
	listen, url string
	data, log   string

	mu    sync.Mutex // guards what follows, which the eyes look at
	proc  *process   // nil while it does not run
	birth int        // counts processes
}

// process is one life of a member.
type process struct {
	cmd    *exec.Cmd
	ended  chan struct{} // closed when it has ended
	wanted atomic.Bool   // its end is
}

// options of a group; zero is valid.
type options struct {
	members int    // default 3
	entries int    // --snapshot-entries, default 100
	trail   int    // --trailing-entries, default 20
	rate    string // --rate-limit
	net     func(t testing.TB) network
	prepare func(g *group) // before anybody starts
}

// newGroup starts a group and waits until it works. When the test ends it checks that all
// that run end well.
func newGroup(t testing.TB, o options) *group {
	t.Helper()
	if o.members == 0 {
		o.members = 3
	}
	if o.entries == 0 {
		o.entries, o.trail = 100, 20
	}
	if o.net == nil {
		o.net = newNetwork
	}
	g := &group{base: t, t: t, net: o.net(t), dir: t.TempDir()}
	t.Cleanup(g.close)
	g.flags = []string{"--insecure", "--snapshot-entries", fmt.Sprint(o.entries), "--trailing-entries", fmt.Sprint(o.trail)}
	if o.rate != "" {
		g.flags = append(g.flags, "--rate-limit", o.rate)
	}
	var initial []string
	for range o.members {
		m := g.newMember(fmt.Sprint("n", len(g.members)+1))
		initial = append(initial, m.id+"="+m.url)
	}
	g.initial = strings.Join(initial, ",")
	if o.prepare != nil {
		o.prepare(g)
	}
	for _, m := range g.members {
		m.start("--initial-cluster", g.initial)
	}
	g.eyes = watch(g)
	g.leader()
	return g
}

// step runs a part of a test under a name of its own. What comes after relies on it.
func (g *group) step(t *testing.T, name string, f func()) {
	ok := t.Run(name, func(t *testing.T) {
		g.t = t
		defer func() { g.t = g.base }()
		f()
	})
	if !ok {
		t.FailNow()
	}
}

// newMember makes a member with an empty directory, which does not run yet.
func (g *group) newMember(id string) *member {
	g.t.Helper()
	listen, url, err := g.net.add()
	if err != nil {
		g.t.Fatal(err)
	}
	m := &member{g: g, i: len(g.members), id: id, listen: listen, url: url}
	m.data, m.log = filepath.Join(g.dir, id+"-data"), filepath.Join(g.dir, id+".log")
	if err := os.MkdirAll(m.data, 0o755); err != nil {
		g.t.Fatal(err)
	}
	g.members = append(g.members, m)
	return m
}

// close ends everything, and tells what the members said if the test has failed.
func (g *group) close() {
	if g.eyes != nil {
		g.eyes.close()
	}
	for _, m := range g.members {
		m.resume()
	}
	var all sync.WaitGroup
	for _, m := range g.members {
		all.Go(m.stop)
	}
	all.Wait()
	if g.t.Failed() {
		for _, m := range g.members {
			g.t.Logf("%s said last:\n%s", m.id, tail(m.log, 25))
		}
	}
	for _, undo := range append(g.after, g.net.close) {
		if err := undo(); err != nil {
			g.t.Error(err)
		}
	}
}

// tail returns the last lines of a file.
func tail(path string, n int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.SplitAfter(strings.TrimSuffix(string(data), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "")
}

// start starts the member's process. Its end is an error unless somebody wants it.
func (m *member) start(args ...string) {
	m.g.t.Helper()
	m.launch(false, args)
}

// startInVain starts a process that must give up, and returns what it said last.
func (m *member) startInVain(args ...string) string {
	m.g.t.Helper()
	m.launch(true, args)
	if code := m.finish(nil); code != 1 {
		m.g.t.Errorf("%s ended with exit code %d, want 1", m.id, code)
	}
	return tail(m.log, 1)
}

func (m *member) launch(mayEnd bool, args []string) {
	m.g.t.Helper()
	if p := m.process(); p != nil {
		m.g.t.Fatalf("%s runs already", m.id)
	}
	log, err := os.OpenFile(m.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		m.g.t.Fatal(err)
	}
	defer log.Close()
	args = append([]string{"server", "--id", m.id, "--data", m.data, "--listen", m.listen, "--advertise", m.url}, args...)
	p := &process{cmd: exec.Command(command, append(args, m.g.flags...)...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.wanted.Store(mayEnd)
	if err := m.g.net.start(m.i, p.cmd); err != nil {
		m.g.t.Fatalf("start %s: %v", m.id, err)
	}
	m.mu.Lock()
	m.proc = p
	m.birth++
	m.mu.Unlock()
	go func() { // ends with the process, which close ends
		err := p.cmd.Wait()
		if !p.wanted.Load() {
			m.g.base.Errorf("%s ended by itself: %v\n%s", m.id, err, tail(m.log, 5))
		}
		close(p.ended)
	}()
}

// mayEnd says that the member may end by itself from now on.
func (m *member) mayEnd() { m.process().wanted.Store(true) }

// process returns the running process, nil if there is none.
func (m *member) process() *process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proc
}

// finish wants the process to end, by a signal or by itself if there is none, and returns
// its exit code: -1 if a signal ended it.
func (m *member) finish(s os.Signal) int {
	p := m.process()
	p.wanted.Store(true)
	if s != nil {
		if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
			m.g.t.Errorf("signal %s: %v", m.id, err)
		}
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case <-p.ended:
	case <-late.C:
		m.g.t.Errorf("%s has not ended in %v", m.id, patience)
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
	m.mu.Lock()
	m.proc = nil
	m.mu.Unlock()
	return p.cmd.ProcessState.ExitCode()
}

// stop ends the member as an operator does. One that does not run stays so.
func (m *member) stop() {
	if m.process() == nil {
		return
	}
	if code := m.finish(syscall.SIGTERM); code != 0 {
		m.g.t.Errorf("%s ended with exit code %d after SIGTERM:\n%s", m.id, code, tail(m.log, 5))
	}
}

// kill ends the member as a loss of power to its process does.
func (m *member) kill() {
	if m.process() != nil {
		m.finish(syscall.SIGKILL)
	}
}

// pause holds the process until resume.
func (m *member) pause() { m.signal(syscall.SIGSTOP) }

func (m *member) resume() { m.signal(syscall.SIGCONT) }

func (m *member) signal(s syscall.Signal) {
	p := m.process()
	if p == nil {
		return
	}
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		m.g.t.Errorf("signal %s: %v", m.id, err)
	}
}

// unplug takes the member off the net; plug brings it back.
func (m *member) unplug() { m.plugged(true) }

func (m *member) plug() { m.plugged(false) }

func (m *member) plugged(off bool) {
	m.g.t.Helper()
	if err := m.g.net.unplug(m.i, off); err != nil {
		m.g.t.Error(err)
	}
}

// cut loses what m sends to another member; mend ends that.
func (m *member) cut(to *member) { m.line(to, true) }

func (m *member) mend(to *member) { m.line(to, false) }

func (m *member) line(to *member, lose bool) {
	m.g.t.Helper()
	if err := m.g.net.cut(m.i, to.i, lose); err != nil {
		m.g.t.Error(err)
	}
}

// urls are the addresses of all members.
func (g *group) urls() (urls []string) {
	for _, m := range g.members {
		urls = append(urls, m.url)
	}
	return urls
}

// client returns a client of the group, closed after the test.
func (g *group) client(opts *cpwire.Options) *cpwire.Client {
	g.t.Helper()
	c, err := cpwire.New(g.urls(), opts)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	return c
}

// member returns the member of that id.
func (g *group) member(id string) *member {
	for _, m := range g.members {
		if m.id == id {
			return m
		}
	}
	g.t.Fatalf("no member %q", id)
	return nil
}

// cluster runs a verb of snapferry cluster. It names the leader first, so that nobody waits
// for a member that stands still.
func (g *group) cluster(verb string, args ...string) ([]byte, error) {
	urls := g.urls()
	if s, err := g.look(); err == nil && s.Leader != "" {
		urls = append([]string{s.member(s.Leader).URL}, urls...)
	}
	return g.run(verb, unique(urls), args...)
}

// run runs a verb of snapferry cluster with these addresses.
func (g *group) run(verb string, urls []string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	args = append([]string{"cluster", verb, "--server", strings.Join(urls, ","), "--json"}, args...)
	cmd := exec.CommandContext(ctx, command, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("cluster %s: %w: %s%s", verb, err, out, stderr.String())
	}
	return out, err
}

// unique keeps the first of each.
func unique(all []string) (kept []string) {
	for _, s := range all {
		if !slices.Contains(kept, s) {
			kept = append(kept, s)
		}
	}
	return kept
}

// must is cluster for what has to work.
func (g *group) must(verb string, args ...string) []byte {
	g.t.Helper()
	out, err := g.cluster(verb, args...)
	if err != nil {
		g.t.Fatal(err)
	}
	return out
}

// status is the state of the group as the command tells it.
type status struct {
	Leader  string                `json:"leader"`
	Term    uint64                `json:"term"`
	Members []cpwire.MemberStatus `json:"members"`
}

func (s *status) member(id string) *cpwire.MemberStatus {
	for i := range s.Members {
		if s.Members[i].ID == id {
			return &s.Members[i]
		}
	}
	return &cpwire.MemberStatus{}
}

// look asks all members for the state of the group and returns what the best informed one
// says. One that is cut off knows less than it thinks.
func (g *group) look() (best status, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var asked sync.WaitGroup
	defer asked.Wait()
	defer cancel()
	answers := make(chan error, len(g.members))
	all := make(chan status, len(g.members))
	for _, m := range g.members {
		asked.Go(func() {
			var s status
			err := get(ctx, m.url+cpwire.PathCluster, &s)
			if err == nil {
				all <- s
			}
			answers <- err
		})
	}
	var late <-chan time.Time
	for range g.members {
		select {
		case one := <-answers:
			if err = cmp.Or(err, one); one == nil {
				s := <-all
				if late == nil || s.Term > best.Term || s.Term == best.Term && best.Leader == "" {
					best = s
				}
				late = time.After(time.Second)
			}
		case <-late:
			return best, nil
		}
	}
	if late != nil {
		err = nil
	}
	return best, err
}

// asking is how tests ask a member what any client may.
var asking = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}}

// get reads the JSON at an address.
func get(ctx context.Context, url string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := asking.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, resp.Status)
	}
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	return err
}

// eventually waits until the state of the group is as wanted, and returns it.
func (g *group) eventually(what string, ok func(s *status) bool) *status {
	g.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		s, err := g.look()
		if err == nil && ok(&s) {
			return &s
		}
		select {
		case <-again.C:
		case <-late.C:
			text, _ := json.MarshalIndent(s, "", " ")
			g.t.Fatalf("not in %v: %s\n%s\n%v", patience, what, text, err)
		}
	}
}

// leader waits until a majority has a leader, and returns it.
func (g *group) leader() *member {
	g.t.Helper()
	s := g.eventually("a leader", func(s *status) bool {
		return s.Leader != "" && s.member(s.Leader).Reachable && s.member(s.Leader).Role == "leader"
	})
	return g.member(s.Leader)
}

// followers are the members that do not lead.
func (g *group) followers() (all []*member) {
	g.t.Helper()
	lead := g.leader()
	for _, m := range g.members {
		if m != lead {
			all = append(all, m)
		}
	}
	return all
}

// level tells whether all members answer and have applied the same.
func level(s *status) bool {
	for i := range s.Members {
		if m := &s.Members[i]; !m.Reachable || m.Applied != s.Members[0].Applied || m.Applied < m.Snapshot.Index {
			return false
		}
	}
	return s.Leader != ""
}

// pause waits for a while, or until stop is closed.
func pause(d time.Duration, stop <-chan struct{}) {
	wait := time.NewTimer(d)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-stop:
	}
}

// status returns what a member that answers says of itself.
func (g *group) status(m *member) cpwire.MemberStatus {
	g.t.Helper()
	s := g.eventually(m.id+" answers", func(s *status) bool { return s.member(m.id).Reachable })
	return *s.member(m.id)
}

// outgrow lets clients work until the others' logs begin above all that m had when it was
// last looked at, so that it needs a snapshot.
func (h *history) outgrow(m *member, had uint64) {
	h.g.t.Helper()
	h.progress(50)
	h.g.eventually("the others' logs cut", func(s *status) bool {
		for _, o := range h.g.members {
			if o != m && s.member(o.id).FirstIndex <= had+1 {
				return false
			}
		}
		return true
	})
}

// checkStatus wants what the command tells of a group in peace to make sense.
func (g *group) checkStatus() {
	g.t.Helper()
	var s status
	out := json.NewDecoder(bytes.NewReader(g.must("status")))
	out.DisallowUnknownFields()
	if err := out.Decode(&s); err != nil {
		g.t.Fatalf("status: %v", err)
	}
	sources := []string{"local", "none"}
	for _, m := range g.members {
		sources = append(sources, m.id)
	}
	leads := 0
	for i, m := range s.Members {
		ok := m.Reachable && m.ID == g.members[i].id && m.URL == g.members[i].url &&
			m.FirstIndex <= m.LastIndex+1 && m.Applied <= m.LastIndex && m.Snapshot.Index <= m.Applied && m.Snapshot.Term <= s.Term &&
			m.LogBytes >= 0 && m.LogBytes <= 1<<30 && slices.Contains(sources, m.Snapshot.Source) && m.Snapshot.Source != m.ID
		if (m.Role == "leader") == (m.ID == s.Leader) && m.Role != "learner" {
			leads += strings.Count(m.Role, "leader")
		}
		if !ok {
			g.t.Errorf("status of %s: %+v", g.members[i].id, m)
		}
	}
	if leads != 1 || len(s.Members) != len(g.members) {
		g.t.Errorf("status: leader %s, %d members, %d leaders", s.Leader, len(s.Members), leads)
	}
}

// checkCut checks that all logs were cut, and that snapshots went from one to the other.
func (g *group) checkCut() {
	g.t.Helper()
	s := g.eventually("logs cut everywhere", func(s *status) bool {
		for _, m := range g.members {
			if s.member(m.id).FirstIndex <= 2 {
				return false
			}
		}
		return true
	})
	for _, m := range s.Members {
		if m.Snapshot.Source == "none" || m.Snapshot.Index+1 < m.FirstIndex {
			g.t.Errorf("%s has a log from %d and the snapshot %+v", m.ID, m.FirstIndex, m.Snapshot)
		}
	}
	var made, taken int64
	for _, m := range g.members {
		made += g.eyes.seen(m.id).GeneratedFollower
		taken += g.eyes.seen(m.id).TakenOver
	}
	if made == 0 || taken == 0 {
		g.t.Errorf("%d snapshots made by followers, %d taken over by leaders", made, taken)
	}
}
