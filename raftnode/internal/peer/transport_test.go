package peer

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// TestOrder: messages of one stream arrive whole and in order, small and large ones mixed.
func TestOrder(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	connected(t, sites...)
	const count = 2000
	for i := range uint64(count) {
		size := 10
		if i%200 == 7 {
			size = 1_500_000
		}
		a.tr.Send([]*raftpb.Message{entries(a, b, i, size), message(raftpb.MsgHeartbeat, a, b, i)})
	}
	next := map[raftpb.MessageType]uint64{}
	eventually(t, "all messages", func() bool { return len(b.box.messages()) == 2*count })
	for _, m := range b.box.messages() {
		if want := next[m.GetType()]; m.GetIndex() != want {
			t.Fatalf("%v %d came, want %d", m.GetType(), m.GetIndex(), want)
		}
		next[m.GetType()]++
		if m.GetType() == raftpb.MsgApp && m.Entries[0].GetIndex() != m.GetIndex()+1 {
			t.Fatalf("message %d has another one's entry", m.GetIndex())
		}
	}
}

// TestLargestMessage: a message at the limit travels, one above it is reported as lost and
// harms no other.
func TestLargestMessage(t *testing.T) {
	const limit = 5 << 20 // above every buffer that is kept
	sites := newGroup(t, &Options{MaxMessage: limit}, "a", "b")
	a, b := sites[0], sites[1]
	connected(t, sites...)
	a.tr.Send([]*raftpb.Message{entries(a, b, 1, limit-100), entries(a, b, 2, limit), entries(a, b, 3, 1)})
	eventually(t, "the messages around the one that is too large", func() bool { return b.box.has(1) && b.box.has(3) })
	eventually(t, "word of the lost one", func() bool { return a.box.losses(b.id()) > 0 })
	if b.box.has(2) || len(b.box.messages()[0].Entries[0].Data) != limit-100 {
		t.Error("wrong messages came")
	}
}

// TestUrgentPassesBulk: a heartbeat does not wait behind entries that nobody takes.
func TestUrgentPassesBulk(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	connected(t, sites...)
	release, beat := make(chan struct{}), make(chan struct{})
	var once sync.Once
	b.box.mu.Lock()
	b.box.handle = func(m *raftpb.Message) {
		if m.GetType() == raftpb.MsgApp {
			<-release
		} else {
			once.Do(func() { close(beat) })
		}
	}
	b.box.mu.Unlock()
	for i := range uint64(60) {
		a.tr.Send([]*raftpb.Message{entries(a, b, i, 1<<20)})
	}
	a.tr.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, a, b, 1)})
	select {
	case <-beat:
	case <-time.After(patience):
		t.Error("the heartbeat waits behind entries")
	}
	close(release)
}

func TestLanes(t *testing.T) {
	for kind, want := range map[raftpb.MessageType]laneKind{
		raftpb.MsgApp: bulk, raftpb.MsgSnap: bulk, raftpb.MsgProp: bulk, raftpb.MsgAppResp: urgent,
		raftpb.MsgHeartbeat: urgent, raftpb.MsgVote: urgent, raftpb.MsgPreVoteResp: urgent, raftpb.MsgTimeoutNow: urgent,
	} {
		if got := laneOf(&raftpb.Message{Type: kind.Enum()}); got != want {
			t.Errorf("%v goes %v, want %v", kind, got, want)
		}
	}
}

// TestReconnect: a member whose server comes back is reached again, and was not active
// in between.
func TestReconnect(t *testing.T) {
	sites := newGroup(t, &Options{ActiveWindow: 300 * time.Millisecond, Beat: 50 * time.Millisecond}, "a", "b")
	a, b := sites[0], sites[1]
	delivered(t, a, b)
	b.hangUp()
	if err := b.tr.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a notices", func() bool { s := a.tr.Status()[0]; return !s.Connected && !s.Active && s.Trouble != "" })
	eventually(t, "what is sent is lost, and said to be", func() bool {
		before := a.box.losses(b.id())
		a.tr.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, a, b, 1)})
		return before > 0
	})
	b.open(nil)
	b.listen()
	b.run(nil)
	b.tr.SetMembers(b.door.Identity().Table())
	delivered(t, a, b)
	delivered(t, b, a)
	connected(t, a, b)
}

// TestFullQueue: a queue that is full drops, says so, and never blocks the sender.
func TestFullQueue(t *testing.T) {
	lost := make(chan uint64, 100)
	sites := newGroup(t, &Options{QueueLength: 8, SnapshotLost: func(to uint64) { lost <- to }}, "a", "b")
	a, b := sites[0], sites[1]
	connected(t, sites...)
	release := make(chan struct{})
	b.box.mu.Lock()
	b.box.handle = func(*raftpb.Message) { <-release }
	b.box.mu.Unlock()
	for i := range uint64(200) { // 200 MiB: more than windows, sockets and queue hold
		a.tr.Send([]*raftpb.Message{entries(a, b, i, 1<<20)})
	}
	eventually(t, "word of the loss", func() bool { return a.box.losses(b.id()) > 0 })
	snap := message(raftpb.MsgSnap, a, b, 500)
	snap.Snapshot = &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{Index: new(uint64(5))}}
	eventually(t, "word of the lost snapshot (R7)", func() bool {
		a.tr.Send([]*raftpb.Message{snap})
		select {
		case to := <-lost:
			return to == b.id()
		default:
			return false
		}
	})
	close(release)
}

// TestUnknownMember: what is for a member that no table has is lost, not kept.
func TestUnknownMember(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a := sites[0]
	m := message(raftpb.MsgHeartbeat, a, sites[1], 1)
	m.To = new(uint64(77))
	a.tr.Send([]*raftpb.Message{m})
	eventually(t, "word of the loss", func() bool { return a.box.losses(77) > 0 })
	if a.tr.Active(77) || !a.tr.Active(a.id()) {
		t.Error("Active is wrong")
	}
}

// TestSilentPartition: a connection that dies without a word is noticed and replaced. The
// hole sits between both members, in both directions.
func TestSilentPartition(t *testing.T) {
	opts := &Options{Beat: 20 * time.Millisecond, Dead: 400 * time.Millisecond, ActiveWindow: 300 * time.Millisecond}
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	holes := []*hole{newHole(t, a.addr), newHole(t, b.addr)}
	for _, s := range sites {
		_ = s.tr.Close()
		s.run(opts)
	}
	through := a.door.Identity().Table()
	for i := range through {
		through[i].URL = "http://" + holes[slices.IndexFunc(sites, func(s *site) bool { return s.name == through[i].Name })].ln.Addr().String()
	}
	for _, s := range sites {
		s.tr.SetMembers(through)
	}
	for range 2 {
		connected(t, sites...)
		delivered(t, a, b)
		for _, h := range holes {
			h.set(true)
		}
		for i := range uint64(50) { // more than sockets take: the writer hangs as well
			a.tr.Send([]*raftpb.Message{entries(a, b, i, 1<<20)})
		}
		for _, s := range sites {
			eventually(t, s.name+" notices", func() bool { st := s.tr.Status()[0]; return !st.Active && !st.Connected })
		}
		eventually(t, "incoming streams end too", func() bool {
			a.tr.mu.RLock()
			defer a.tr.mu.RUnlock()
			return len(a.tr.mu.inbound) == 0
		})
		for _, h := range holes {
			h.set(false)
		}
		for _, s := range sites {
			s.box.mu.Lock()
			s.box.got = nil
			s.box.mu.Unlock()
		}
		delivered(t, a, b)
		delivered(t, b, a)
	}
}

// TestStuckReceiver: a member whose raft hangs for long is slow, not dead: its streams stay.
func TestStuckReceiver(t *testing.T) {
	const dead = time.Second
	sites := newGroup(t, &Options{Beat: 20 * time.Millisecond, Dead: dead}, "a", "b")
	a, b := sites[0], sites[1]
	connected(t, sites...)
	release := make(chan struct{})
	b.box.mu.Lock()
	b.box.handle = func(*raftpb.Message) { <-release }
	b.box.mu.Unlock()
	for range 50 {
		a.tr.Send([]*raftpb.Message{entries(a, b, 1, 1<<20), message(raftpb.MsgHeartbeat, a, b, 1)})
	}
	staysConnected(t, a, b, dead)
	close(release)
}

// TestIdleStreamsStay: having nothing to say is not being dead.
func TestIdleStreamsStay(t *testing.T) {
	const dead = time.Second
	sites := newGroup(t, &Options{Beat: 20 * time.Millisecond, Dead: dead}, "a", "b")
	connected(t, sites...)
	staysConnected(t, sites[0], sites[1], dead)
}

// staysConnected looks at the streams from a to b for three times as long as a dead member has.
func staysConnected(t *testing.T, a, b *site, dead time.Duration) {
	t.Helper()
	streams := func() []*inbound {
		b.tr.mu.RLock()
		defer b.tr.mu.RUnlock()
		return []*inbound{b.tr.mu.inbound[inboundKey{a.id(), "urgent"}], b.tr.mu.inbound[inboundKey{a.id(), "bulk"}]}
	}
	before, since := streams(), time.Since(a.tr.epoch)
	eventually(t, "signs of life", func() bool {
		return time.Duration(a.tr.contact(b.id()).Load())-since > 3*dead
	})
	if s := a.tr.Status()[0]; !s.Connected || !s.Active || !slices.Equal(before, streams()) {
		t.Errorf("got %+v, or other streams than before", s)
	}
}

// TestWrongGroup: members of two groups do not talk, and say why.
func TestWrongGroup(t *testing.T) {
	one, two := newGroup(t, nil, "a", "b"), newGroup(t, nil, "x", "y")
	refused := make(chan *Refusal, 8)
	a, x := one[0], two[0]
	_ = a.tr.Close()
	a.run(&Options{Refused: func(id uint64, r *Refusal) { refused <- r }})
	a.tr.SetMembers([]protocol.Member{{ID: x.id(), Name: "x", URL: x.url()}})
	if r := <-refused; r.Kind != OtherGroup || r.By != "x" {
		t.Errorf("got %v", r)
	}
}

// TestMovedAddress: whoever answers in another one's place is not talked to.
func TestMovedAddress(t *testing.T) {
	sites := newGroup(t, nil, "a", "b", "c")
	a, b, c := sites[0], sites[1], sites[2]
	refused := make(chan *Refusal, 8)
	_ = a.tr.Close()
	a.run(&Options{Refused: func(id uint64, r *Refusal) { refused <- r }})
	a.tr.SetMembers([]protocol.Member{{ID: b.id(), Name: "b", URL: c.url()}})
	if r := <-refused; r.Kind != OtherMember {
		t.Errorf("got %v", r)
	}
	// With the right address it goes on.
	a.tr.SetMembers(a.door.Identity().Table())
	delivered(t, a, b)
}

// TestImpostorAnswers: a member that takes a stream must be the one it is meant for, too.
func TestImpostorAnswers(t *testing.T) {
	for what, c := range map[string]struct {
		spoil func(*Identity)
		want  Kind
	}{
		"other member":    {func(id *Identity) { id.ID = 7 }, OtherMember},
		"other directory": {func(id *Identity) { id.Incarnation = newIncarnation() }, OtherIncarnation},
		"other group":     {func(id *Identity) { id.Group = strings.Repeat("0", 64) }, OtherGroup},
	} {
		sites := newGroup(t, nil, "a", "b")
		a, b := sites[0], sites[1]
		impostor := b.door.Identity()
		c.spoil(impostor)
		b.routes.Store(http.NewServeMux())
		b.routes.Load().HandleFunc(StreamPath, func(w http.ResponseWriter, r *http.Request) {
			for name, values := range Header(impostor) {
				w.Header()[name] = values
			}
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			_, _ = io.Copy(io.Discard, r.Body)
		})
		refused := make(chan *Refusal, 8)
		_ = a.tr.Close()
		a.run(&Options{Refused: func(_ uint64, r *Refusal) { refused <- r }})
		a.tr.SetMembers(a.door.Identity().Table())
		if r := <-refused; r.Kind != c.want {
			t.Errorf("%s: got %v", what, r)
		}
	}
}

// TestRemovedMember: who is removed is told at once and at every later try, and stays out
// after restarts of those that removed it. The others know nothing of its directory.
func TestRemovedMember(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	told := make(chan uint64, 8)
	_ = b.tr.Close()
	b.run(&Options{Removed: func(by uint64) { told <- by }})
	table := b.door.Identity().Table()
	b.tr.SetMembers(table)
	connected(t, sites...)
	a.tr.SetMembers(slices.DeleteFunc(table, func(m protocol.Member) bool { return m.ID == b.id() }))
	if by := <-told; by != a.id() {
		t.Errorf("told by %x", by)
	}
	if len(a.tr.Status()) != 0 {
		t.Errorf("a still has %v", a.tr.Status())
	}
	_ = a.tr.Close()
	a.open(nil)
	a.run(nil)
	a.tr.SetMembers(a.door.Identity().Table()) // an old table, as after a restart
	if len(a.tr.Status()) != 0 {
		t.Errorf("a connects to %v", a.tr.Status())
	}
	_ = b.tr.Close()
	b.run(&Options{Removed: func(by uint64) { told <- by }})
	b.tr.SetMembers(b.door.Identity().Table())
	<-told
}

// TestUnknownSender: a member that no table has yet is heard: the table of the one that
// hears may just be old.
func TestUnknownSender(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	_ = b.tr.Close()
	b.open(nil)
	b.run(nil) // and no SetMembers
	delivered(t, a, b)
	if !b.tr.Active(a.id()) {
		t.Error("a is not active at b")
	}
}

// TestHostileStreams: a stream that breaks the rules ends, and the member lives on.
func TestHostileStreams(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	_ = a.tr.Close() // its own streams would end those that are made here
	client := &http.Client{Transport: h2c()}
	defer client.CloseIdleConnections()
	post := func(change func(http.Header), body []byte) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url()+StreamPath, strings.NewReader(string(body)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = Header(a.door.Identity())
		req.Header.Set(headerTo, formatID(b.id()))
		req.Header.Set(headerLane, "urgent")
		req.Header.Set(headerVersion, "1")
		change(req.Header)
		resp, err := client.Do(req)
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		data, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(data)
	}
	none := func(http.Header) {}
	hostile := message(raftpb.MsgHeartbeat, b, a, 1<<50) // from the wrong one
	good := message(raftpb.MsgHeartbeat, a, b, 1<<51)
	for what, c := range map[string]struct {
		change func(http.Header)
		body   []byte
		status int
	}{
		"regular":     {none, frameOf(t, good), http.StatusOK},
		"empty":       {none, nil, http.StatusOK},
		"too long":    {none, []byte{0xff, 0xff, 0xff, 0xff, frameMessage}, http.StatusOK},
		"garbage":     {none, appendFrame(nil, frameMessage, []byte("garbage")), http.StatusOK},
		"wrong kind":  {none, appendFrame(nil, 9, nil), http.StatusOK},
		"refusal":     {none, appendFrame(nil, frameRefusal, []byte(`{"kind":"removed"}`)), http.StatusOK},
		"fat beat":    {none, appendFrame(nil, frameBeat, []byte("x")), http.StatusOK},
		"other name":  {none, append(frameOf(t, hostile), frameOf(t, hostile)...), http.StatusOK},
		"no lane":     {func(h http.Header) { h.Del(headerLane) }, nil, http.StatusBadRequest},
		"version":     {func(h http.Header) { h.Set(headerVersion, "2") }, nil, http.StatusBadRequest},
		"no target":   {func(h http.Header) { h.Del(headerTo) }, nil, http.StatusConflict},
		"for another": {func(h http.Header) { h.Set(headerTo, formatID(a.id())) }, nil, http.StatusConflict},
		"as itself":   {func(h http.Header) { h.Set(headerMember, formatID(b.id())) }, nil, http.StatusForbidden},
		"incarnation": {func(h http.Header) { h.Set(headerIncarnation, newIncarnation()) }, nil, http.StatusForbidden},
	} {
		if status, text := post(c.change, c.body); status != c.status {
			t.Errorf("%s: got %d %s, want %d", what, status, text, c.status)
		}
	}
	resp, err := http.Post(b.url()+StreamPath, "", nil) //nolint // HTTP/1.1 on purpose
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("over HTTP/1.1: %s", resp.Status)
	}
	eventually(t, "the regular message", func() bool { return b.box.has(1 << 51) })
	if b.box.has(1 << 50) {
		t.Error("a message in another one's name was received")
	}
	a.run(nil)
	a.tr.SetMembers(a.door.Identity().Table())
	delivered(t, a, b)
}

func h2c() *http.Transport {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return &http.Transport{Protocols: p}
}

// TestNewStreamReplacesOld: the second stream of a member ends the first, which may be a
// dead connection.
func TestNewStreamReplacesOld(t *testing.T) {
	sites := newGroup(t, nil, "a", "b")
	a, b := sites[0], sites[1]
	connected(t, sites...)
	b.tr.mu.RLock()
	old := b.tr.mu.inbound[inboundKey{a.id(), "urgent"}]
	b.tr.mu.RUnlock()
	second := NewTransport(a.door.Identity(), a.door, newBox(), nil)
	second.SetMembers(a.door.Identity().Table())
	<-old.stop
	_ = second.Close()
	delivered(t, a, b)
}

// TestCloseEnds: Close ends with streams in every state, and what comes after it does
// nothing. The check for goroutines at the end of all tests has the rest to say.
func TestCloseEnds(t *testing.T) {
	for range 5 {
		sites := newGroup(t, nil, "a", "b", "c")
		sites[2].hangUp()
		for _, s := range sites[:2] {
			s.tr.Send([]*raftpb.Message{entries(s, sites[2], 1, 1<<20)})
			if err := s.tr.Close(); err != nil {
				t.Fatal(err)
			}
			s.tr.SetMembers(s.door.Identity().Table())
			s.tr.Send([]*raftpb.Message{entries(s, sites[2], 1, 1)})
			if err := s.tr.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
