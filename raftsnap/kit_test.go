package raftsnap

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/snapshot"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// group is a Raft group without Raft: a history of entries, a leader by decree, and
// members whose Managers talk over real HTTP and keep real snapshot stores. The state at an
// index is files(index), so what a member has can always be compared with what it should.
type group struct {
	t     *testing.T
	name  string
	files func(index uint64) map[string][]byte

	options func(*Options) // changes those of all members, nil for none

	mu      sync.Mutex
	history []uint64 // term of entry 1, 2, ...
	term    uint64
	leader  uint64
	conf    protocol.Conf
	changed chan struct{} // closed and replaced whenever anything has happened
	members map[uint64]*member
}

// member is one of them, and the Host of its Manager.
type member struct {
	g    *group
	id   uint64
	dir  string
	url  string
	opts Options

	reserve  int64 // of the store
	requests sync.WaitGroup

	// Of the running instance; nil while it is down.
	store   *snapstore.Store
	manager *Manager

	// g.mu guards what follows.
	incarnation string
	spoiled     bool // its store was damaged by the test
	paused      bool // applies nothing
	deaf        bool // to announcements
	down        bool // takes no part: not active for the others
	applied     uint64
	first       uint64
	recorded    protocol.ID
	believes    *belief // in another leader than the group's, nil for none
	outcomes    []protocol.Outcome
	envelopes   int
	fault       func(w http.ResponseWriter, r *http.Request) bool // true: it has answered
	freeze      func(ctx context.Context) error
	record      func(ctx context.Context, id protocol.ID) error
	install     func(ctx context.Context, id protocol.ID) error
	events      events
}

type belief struct{ term, leader uint64 }

// events is what a member's Observer has told.
type events struct {
	made      []Made
	fetched   []Fetched
	recorded  []Recorded
	installed []Installed
	attempts  []Attempt
	refused   []Refused
	damaged   []Damaged
	alarms    []string
}

// newGroup starts members 1 to n; member 1 leads in term 1.
func newGroup(t *testing.T, n int, adjust ...func(*group)) *group {
	t.Helper()
	g := &group{
		t: t, name: "g", files: someFiles, term: 1, leader: 1,
		changed: make(chan struct{}), members: map[uint64]*member{},
	}
	for id := range uint64(n) {
		g.conf.Voters = append(g.conf.Voters, id+1)
	}
	for _, f := range adjust {
		f(g)
	}
	for id := range uint64(n) {
		g.add(id + 1)
	}
	for _, m := range g.all() {
		m.start()
	}
	t.Cleanup(g.check)
	return g
}

// add makes a member that is not running yet.
func (g *group) add(id uint64) *member {
	g.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		g.t.Fatal(err)
	}
	m := &member{
		g: g, id: id, dir: g.t.TempDir(), url: "http://" + l.Addr().String(),
		incarnation: fmt.Sprintf("disk-%d", id), first: 1, down: true, reserve: -1,
	}
	m.opts = testOptions()
	if g.options != nil {
		g.options(&m.opts)
	}
	// Of a request whose body nobody has read, net/http does not notice that the asker is
	// gone: those that hang by order of the test end with the test.
	ctx, cancel := context.WithCancel(context.Background())
	srv := &http.Server{Handler: m, BaseContext: func(net.Listener) context.Context { return ctx }}
	m.requests.Go(func() { _ = srv.Serve(l) })
	g.t.Cleanup(func() {
		cancel()
		srv.Close()
		m.requests.Wait()
	})
	g.mu.Lock()
	g.members[id] = m
	g.mu.Unlock()
	return m
}

// start opens the store and begins. What applied is in the "state" survives in the member.
func (m *member) start() {
	m.g.t.Helper()
	store, err := snapstore.Open(filepath.Join(m.dir, "snapshots"), &snapstore.Options{Reserve: m.reserve})
	if err != nil {
		m.g.t.Fatal(err)
	}
	o := m.opts
	o.Observer = m.observer()
	manager := New(m, store, &o)
	m.g.do(func() { m.store, m.manager, m.down = store, manager, false })
	manager.Start(m.g.t.Context())
	m.g.t.Cleanup(m.stop)
	m.g.catchUp()
}

// stop closes the member's Manager and store, as a process would that ends.
func (m *member) stop() {
	manager, store := m.manager, m.store
	if manager == nil {
		return
	}
	m.g.do(func() { m.down = true })
	if err := manager.Close(); err != nil {
		m.g.t.Error(err)
	}
	if err := store.Close(); err != nil {
		m.g.t.Error(err)
	}
	m.g.do(func() { m.manager, m.store = nil, nil })
}

func (m *member) restart() {
	m.g.t.Helper()
	m.stop()
	m.start()
}

// ServeHTTP is the member's listener: it may misbehave by order of the test.
func (m *member) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.requests.Add(1)
	defer m.requests.Done()
	m.g.mu.Lock()
	manager, fault, deaf := m.manager, m.fault, m.deaf
	m.g.mu.Unlock()
	if deaf && strings.HasSuffix(r.URL.Path, "/announce") {
		return
	}
	if fault != nil && fault(w, r) {
		return
	}
	if manager == nil {
		panic(http.ErrAbortHandler)
	}
	manager.Handler().ServeHTTP(w, r)
}

// do changes something and wakes those who wait for a change.
func (g *group) do(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f != nil {
		f()
	}
	close(g.changed)
	g.changed = make(chan struct{})
}

// patience bounds every wait of these tests: it ends a test that hangs, and decides
// nothing else.
const patience = 30 * time.Second

// until waits for a state of the group.
func (g *group) until(what string, ok func() bool) {
	g.t.Helper()
	end := time.NewTimer(patience)
	defer end.Stop()
	for {
		g.mu.Lock()
		next := g.changed
		g.mu.Unlock()
		if ok() {
			return
		}
		select {
		case <-next:
		case <-end.C:
			g.t.Fatalf("waited in vain for: %s\n%s", what, g.dump())
		}
	}
}

func (g *group) dump() string {
	var b strings.Builder
	for _, m := range g.all() {
		g.mu.Lock()
		manager := m.manager
		fmt.Fprintf(&b, "member %d: applied %d first %d recorded %d/%d down %v\n  outcomes %v\n  attempts %v\n  alarms %v\n",
			m.id, m.applied, m.first, m.recorded.Term, m.recorded.Index, m.down, m.outcomes, m.events.attempts, m.events.alarms)
		g.mu.Unlock()
		if manager != nil {
			fmt.Fprintf(&b, "  %+v\n", manager.Status())
		}
	}
	return b.String()
}

func (g *group) all() []*member {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []*member
	for _, id := range slices.Sorted(maps.Keys(g.members)) {
		all = append(all, g.members[id])
	}
	return all
}

func (g *group) member(id uint64) *member {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.members[id]
}

// write commits n entries in the group's term; all that run and are not paused apply them.
func (g *group) write(n int) {
	g.do(func() {
		for range n {
			g.history = append(g.history, g.term)
		}
	})
	g.catchUp()
}

// catchUp lets members apply what their logs can have: everything that the leader still
// holds.
func (g *group) catchUp() {
	g.do(func() {
		last := uint64(len(g.history))
		leader := g.members[g.leader]
		for _, m := range g.members {
			if !m.paused && !m.down && (leader == nil || m.applied+1 >= leader.first) {
				m.applied = last
			}
		}
	})
	for _, m := range g.all() {
		m.poll()
	}
}

func (m *member) poll() {
	m.g.mu.Lock()
	manager := m.manager
	m.g.mu.Unlock()
	if manager != nil {
		manager.Poll()
	}
}

// lead makes a member the leader of a new term.
func (g *group) lead(id uint64) {
	g.do(func() { g.term, g.leader = g.term+1, id })
	for _, m := range g.all() {
		m.poll()
	}
}

// set changes members' settings under the lock.
func (m *member) set(f func(m *member)) { m.g.do(func() { f(m) }) }

// get reads something of a member under the lock.
func get[T any](m *member, f func(m *member) T) T {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	return f(m)
}

func (m *member) recordedIndex() uint64 {
	return get(m, func(m *member) uint64 { return m.recorded.Index })
}

func (m *member) status() Status {
	manager := get(m, func(m *member) *Manager { return m.manager })
	if manager == nil {
		return Status{}
	}
	return manager.Status()
}

// View is the Host's.
func (m *member) View() protocol.View {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	return m.viewLocked()
}

func (m *member) viewLocked() protocol.View {
	g := m.g
	b := m.beliefLocked()
	v := protocol.View{
		Group: g.name, Self: m.id, Lineage: m.lineage(), Role: protocol.Follower, Term: b.term, Leader: b.leader,
		Applied: m.applied, Commit: m.applied, First: m.first, Last: max(m.applied, m.first-1),
		RecordedTerm: m.recorded.Term, RecordedIndex: m.recorded.Index,
	}
	v.LogBytes = int64(v.Last+1-v.First) * 100
	v.AppliedBytes = int64(v.Applied-m.recorded.Index) * 100
	if b.leader == m.id {
		v.Role = protocol.Leader
	} else if slices.Contains(g.conf.Learners, m.id) {
		v.Role = protocol.Learner
	}
	for _, id := range slices.Sorted(maps.Keys(g.members)) {
		if p := g.members[id]; id != m.id {
			v.Peers = append(v.Peers, protocol.Peer{
				Member: p.rowLocked(), Voter: slices.Contains(g.conf.Voters, id), Active: !p.down, Match: p.applied,
			})
		}
	}
	return v
}

func (m *member) beliefLocked() belief {
	if m.believes != nil {
		return *m.believes
	}
	return belief{m.g.term, m.g.leader}
}

func (m *member) lineage() protocol.Lineage {
	return protocol.Lineage{Maker: m.id, Incarnation: m.incarnation}
}

func (m *member) rowLocked() protocol.Member {
	return protocol.Member{ID: m.id, Name: fmt.Sprintf("n%d", m.id), URL: m.url, Incarnation: m.incarnation}
}

func (g *group) metaLocked(m *member, index uint64) protocol.Meta {
	meta := protocol.Meta{Group: g.name, Term: g.history[index-1], Index: index, Conf: g.conf, Lineage: m.lineage()}
	for _, id := range slices.Sorted(maps.Keys(g.members)) {
		meta.Members = append(meta.Members, g.members[id].rowLocked())
	}
	return meta
}

// Freeze is the Host's.
func (m *member) Freeze(ctx context.Context, dir string) (protocol.Meta, error) {
	m.g.mu.Lock()
	hook, index := m.freeze, m.applied
	m.g.mu.Unlock()
	if hook != nil {
		if err := hook(ctx); err != nil {
			return protocol.Meta{}, err
		}
	}
	if index == 0 {
		return protocol.Meta{}, errors.New("nothing is applied")
	}
	if err := writeTree(dir, m.g.files(index)); err != nil {
		return protocol.Meta{}, err
	}
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	return m.g.metaLocked(m, index), nil
}

// Record is the Host's: R4.
func (m *member) Record(ctx context.Context, id protocol.ID, meta protocol.Meta) error {
	if hook := get(m, func(m *member) func(context.Context, protocol.ID) error { return m.record }); hook != nil {
		if err := hook(ctx, id); err != nil {
			return err
		}
	}
	if err := m.g.compare(m, id); err != nil {
		return err
	}
	defer m.g.do(nil)
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	switch {
	case meta.Group != m.g.name:
		return &protocol.Refusal{Kind: protocol.OtherGroup}
	case id.Index <= m.recorded.Index:
		return &protocol.Refusal{Kind: protocol.NotNeeded}
	case id.Index > m.applied:
		return &protocol.Refusal{Kind: protocol.Ahead}
	case m.g.history[id.Index-1] != id.Term:
		return &protocol.Refusal{Kind: protocol.Forked}
	}
	m.recorded = id
	m.first = max(m.first, id.Index+1-min(id.Index, trailing))
	return nil
}

// trailing entries stay in the log below a recorded snapshot.
const trailing = 5

// Install is the Host's: R8.3 and R8.4.
func (m *member) Install(ctx context.Context, e protocol.Envelope, id protocol.ID, meta protocol.Meta, dir string) (protocol.Outcome, error) {
	if hook := get(m, func(m *member) func(context.Context, protocol.ID) error { return m.install }); hook != nil {
		if err := hook(ctx, id); err != nil {
			return protocol.Outcome{}, err
		}
	}
	if err := m.g.compare(m, id); err != nil {
		return protocol.Outcome{}, err
	}
	defer m.g.do(nil)
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	o := protocol.Outcome{Group: m.g.name, From: m.id, To: e.From, Term: e.Term, Index: id.Index}
	term := m.beliefLocked().term
	switch {
	case e.Term < term:
		o.Kind, o.Refusal = protocol.InstallFailed, &protocol.Refusal{Kind: protocol.StaleTerm, Term: term}
	case id.Index <= m.applied:
		o.Kind = protocol.StepNotNeeded
	default:
		o.Kind, m.applied, m.recorded, m.first = protocol.Installed, id.Index, id, id.Index+1
	}
	return o, nil
}

// Outcome is the Host's: R7.
func (m *member) Outcome(o protocol.Outcome) error {
	defer m.g.do(nil)
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	if b := m.beliefLocked(); b.leader != m.id {
		return &protocol.Refusal{Kind: protocol.NotLeader, Leader: b.leader, Term: b.term}
	}
	m.outcomes = append(m.outcomes, o)
	return nil
}

// msgSnap is what the leader's Raft does for a member that is behind its log: it sends the
// metadata of its recorded snapshot.
func (g *group) msgSnap(from, to uint64) protocol.Envelope {
	g.mu.Lock()
	l, m := g.members[from], g.members[to]
	b := l.beliefLocked()
	e := protocol.Envelope{
		From: from, Term: b.term, SnapTerm: l.recorded.Term, SnapIndex: l.recorded.Index, Target: l.recorded,
		First: l.first,
	}
	for id, p := range g.members {
		if p.recorded == l.recorded && id != to {
			e.Holders = append(e.Holders, id)
		}
	}
	slices.Sort(e.Holders)
	manager := m.manager
	m.envelopes++
	g.mu.Unlock()
	if manager != nil {
		manager.Install(e)
	}
	return e
}

// compare tells whether a snapshot in a member's store is the state at its index.
func (g *group) compare(m *member, id protocol.ID) error {
	dir, err := m.store.Dir(id)
	if err != nil {
		return err
	}
	got, err := readTree(dir)
	if err != nil {
		return err
	}
	if diff := cmp.Diff(digests(g.files(id.Index)), digests(got)); diff != "" {
		err := fmt.Errorf("snapshot %d/%d of member %d is not the state at its index", id.Term, id.Index, m.id)
		if get(m, func(m *member) bool { return m.spoiled }) {
			return err
		}
		g.t.Errorf("%v (-want +got):\n%.2000s", err, diff)
		return err
	}
	return nil
}

// digests stands for the content of files, because it is much quicker to compare.
func digests(files map[string][]byte) map[string]snapshot.Digest {
	d := map[string]snapshot.Digest{}
	for name, data := range files {
		d[name] = snapshot.Sum(data)
	}
	return d
}

// check holds what must be so after every test: what is recorded is held, durable and
// right (I11), and nothing is pinned by Raft any more.
func (g *group) check() {
	for _, m := range g.all() {
		id := get(m, func(m *member) protocol.ID { return m.recorded })
		if m.store == nil || get(m, func(m *member) bool { return m.spoiled }) || id.Digest.IsZero() {
			continue
		}
		if err := g.compare(m, id); err != nil {
			g.t.Errorf("member %d: recorded snapshot: %v", m.id, err)
		}
	}
}

func (m *member) observer() *Observer {
	note := func(f func(e *events)) { m.g.do(func() { f(&m.events) }) }
	return &Observer{
		Made:     func(x Made) { note(func(e *events) { e.made = append(e.made, x) }) },
		Fetched:  func(x Fetched) { note(func(e *events) { e.fetched = append(e.fetched, x) }) },
		Recorded: func(x Recorded) { note(func(e *events) { e.recorded = append(e.recorded, x) }) },
		Install:  func(x Installed) { note(func(e *events) { e.installed = append(e.installed, x) }) },
		Attempt:  func(x Attempt) { note(func(e *events) { e.attempts = append(e.attempts, x) }) },
		Refused:  func(x Refused) { note(func(e *events) { e.refused = append(e.refused, x) }) },
		Damaged:  func(x Damaged) { note(func(e *events) { e.damaged = append(e.damaged, x) }) },
		Alarm:    func(x string) { note(func(e *events) { e.alarms = append(e.alarms, x) }) },
		Stepped:  func(Status) { m.g.do(nil) },
	}
}

// someFiles is a state of a few files, of which an entry changes one.
func someFiles(index uint64) map[string][]byte {
	files := map[string][]byte{"APPLIED": []byte(strconv.FormatUint(index, 10))}
	const n = 8
	for k := range uint64(n) {
		last := index - (index+n-k)%n // newest entry that wrote file k
		if last > 0 && last <= index {
			files[fmt.Sprintf("data/%d", k)] = noise(last, 12_000)
		}
	}
	return files
}

// noise is n bytes that depend on a seed.
func noise(seed uint64, n int) []byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, seed))
	data := make([]byte, n)
	rand.NewChaCha8(sum).Read(data)
	return data
}

func writeTree(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, data := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func readTree(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		files[filepath.ToSlash(name)], err = os.ReadFile(path)
		return err
	})
	return files, err
}
