//go:build linux

package grouptest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// A leader that is killed loses nothing that it acknowledged.
func TestKillLeader(t *testing.T) {
	t.Parallel()
	g := newGroup(t, options{})
	h := g.begin(newSeed(t), load{})
	for range times(2, 5) {
		h.progress(200)
		lead := g.leader()
		lead.kill()
		h.progress(100)
		lead.start()
	}
	h.end()
}

// A follower that was away for longer than the log installs a snapshot, which one of the
// others made and the leader took over. All logs are cut.
func TestKillFollower(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	h := g.begin(newSeed(t), load{tasks: 6})
	for range times(2, 5) {
		m := g.followers()[0]
		last := g.status(m).LastIndex
		m.kill()
		h.outgrow(m, last)
		m.start()
		g.eventually("an install", func(s *status) bool { return s.member(m.id).Reachable && s.member(m.id).Stats.Installed > 0 })
	}
	h.end()
	g.checkCut()
}

// All members are killed at once, as by a loss of power that spares the disks.
func TestKillAll(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	h := g.begin(newSeed(t), load{})
	for range times(2, 5) {
		h.progress(150)
		for _, m := range g.members {
			m.kill()
		}
		for _, m := range g.members {
			m.start()
		}
	}
	h.progress(50)
	h.end()
}

// A leader that stands still is replaced, and when it goes on nobody reads old news from it.
func TestFaultPaused(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	h := g.begin(newSeed(t), load{})
	for range times(2, 4) {
		h.progress(100)
		lead, others := g.leader(), g.followers()
		lead.pause()
		h.progress(100)
		lead.resume()
		h.progress(50)

		others[0].pause()
		h.progress(100)
		others[0].resume()
	}
	h.end()
}

// A member that takes a request and says nothing holds nobody up for long who knows of
// others, whatever the verb.
func TestFaultSilentMember(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{})
	silent := g.followers()[0]
	urls := []string{silent.url}
	for _, m := range g.members {
		if m != silent {
			urls = append(urls, m.url)
		}
	}
	silent.pause()
	for _, args := range [][]string{
		{"status"}, {"members"}, {"snapshot"}, {"transfer-leader", "--id", g.followers()[1].id},
		{"add-learner", "--id", "n9", "--url", "http://127.0.0.1:9"}, {"remove", "--id", "n9"},
	} {
		if out, err := g.run(args[0], urls, args[1:]...); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

// The net breaks in every way that leaves a majority together.
func TestFaultPartition(t *testing.T) {
	t.Parallel()
	testPartition(t, newNetwork, partitions)
}

// The same with proxies for a net, which is all that there is where nobody may make
// namespaces.
func TestFaultPartitionOfProxies(t *testing.T) {
	long(t)
	t.Parallel()
	testPartition(t, func(t testing.TB) network { return newLoopback(t) }, partitions[1:4])
}

// partition is a way in which a net breaks.
type partition struct {
	name        string
	cut, mend   func(lead *member, others []*member)
	needsOthers bool // the leader cannot go on
}

// partitions are what may happen between a leader and the others.
var partitions = []partition{
	{"leader off the net", func(lead *member, _ []*member) { lead.unplug() }, func(lead *member, _ []*member) { lead.plug() }, true},
	{"follower off the net", func(_ *member, o []*member) { o[0].unplug() }, func(_ *member, o []*member) { o[0].plug() }, false},
	{"leader not heard by members", func(lead *member, o []*member) { lead.cut(o[0]); lead.cut(o[1]) }, func(lead *member, o []*member) { lead.mend(o[0]); lead.mend(o[1]) }, true},
	{"leader hears no member", func(lead *member, o []*member) { o[0].cut(lead); o[1].cut(lead) }, func(lead *member, o []*member) { o[0].mend(lead); o[1].mend(lead) }, true},
	{"leader and one follower", func(lead *member, o []*member) { lead.cut(o[0]); o[0].cut(lead) }, func(lead *member, o []*member) { lead.mend(o[0]); o[0].mend(lead) }, false},
	{"two followers", func(_ *member, o []*member) { o[1].cut(o[0]); o[0].cut(o[1]) }, func(_ *member, o []*member) { o[1].mend(o[0]); o[0].mend(o[1]) }, false},
	{"one follower not heard", func(lead *member, o []*member) { o[0].cut(lead); o[0].cut(o[1]) }, func(lead *member, o []*member) { o[0].mend(lead); o[0].mend(o[1]) }, false},
}

// A leader that clients reach and members do not must stop to answer, in either direction.
func testPartition(t *testing.T, net func(testing.TB) network, partitions []partition) {
	g := newGroup(t, options{net: net})
	h := g.begin(newSeed(t), load{})
	for range times(1, 2) {
		for _, p := range partitions {
			h.progress(30)
			lead, others := g.leader(), g.followers()
			begun := time.Now()
			p.cut(lead, others)
			if p.needsOthers {
				g.eventually("another leader", func(s *status) bool { return s.Leader != "" && s.Leader != lead.id })
			} else {
				pause(2*time.Second, nil) // who hears no leader wants to become one by now
			}
			h.progress(100)
			p.mend(lead, others)
			t.Logf("%s: %v", p.name, time.Since(begun).Round(time.Millisecond))
		}
	}
	h.end()
}

// A member that is killed again and again while it installs gets there in the end, and each
// of its lives begins without a complaint.
func TestCrashWhileInstalling(t *testing.T) {
	long(t)
	t.Parallel()
	g := newGroup(t, options{entries: 50, trail: 10, rate: "16MiB"})
	seed := newSeed(t)
	g.fillTasks("bulk", 64, 3) // 12 MiB that do not change
	h := g.begin(seed, load{tasks: 8})
	m := g.followers()[0]
	rng := rand.New(rand.NewPCG(seed, 99))
	for range times(5, 15) {
		last := g.status(m).LastIndex
		m.kill()
		h.outgrow(m, last)
		m.start()
		pause(time.Duration(rng.IntN(1500))*time.Millisecond, nil)
	}
	g.eventually("an install", func(s *status) bool { return s.member(m.id).Reachable && s.member(m.id).Stats.Installed > 0 })
	h.end()
	g.checkCut()
}

// Members fail in any way at any time, within what a majority survives.
func TestChaos(t *testing.T) {
	t.Parallel()
	for round := range uint64(times(1, 2)) {
		seed := newSeed(t) + round
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			g := newGroup(t, options{})
			g.fillTasks("bulk", 32, 1)
			h := g.begin(seed, load{tasks: 6})
			c := &chaos{g: g, rng: rand.New(rand.NewPCG(seed, 1000))}
			for range times(12, 40) {
				c.step()
				h.progress(int64(10 + c.rng.IntN(80)))
			}
			c.calm()
			h.progress(50)
			h.end()
			t.Log(strings.Join(c.done, ", "))
		})
	}
}

// chaos does harm to one member after the other. Never more than one is worse off than
// it should be, or all for a moment, so the group goes on.
type chaos struct {
	g    *group
	rng  *rand.Rand
	undo func()
	done []string
}

// harms are what may be done to a member, and perhaps another one. Each returns how it ends.
var harms = []struct {
	name string
	do   func(m, other *member) (undo func())
}{
	{"kill", func(m, _ *member) func() { m.kill(); return func() { m.start() } }},
	{"stop", func(m, _ *member) func() { m.stop(); return func() { m.start() } }},
	{"pause", func(m, _ *member) func() { m.pause(); return m.resume }},
	{"unplug", func(m, _ *member) func() { m.unplug(); return m.plug }},
	{"cut one way from", func(m, other *member) func() { m.cut(other); return func() { m.mend(other) } }},
	{"cut both ways from", func(m, other *member) func() {
		m.cut(other)
		other.cut(m)
		return func() { m.mend(other); other.mend(m) }
	}},
	{"kill all around", func(m, _ *member) func() {
		for _, each := range m.g.members {
			each.kill()
		}
		for _, each := range m.g.members {
			each.start()
		}
		return nil
	}},
	{"give leadership to", func(m, _ *member) func() {
		if _, err := m.g.cluster("transfer-leader", "--id", m.id); err != nil {
			m.g.t.Log(err) // an election came between
		}
		return nil
	}},
	{"snapshot beside", func(m, _ *member) func() { m.g.must("snapshot"); return nil }},
}

// calm ends what is wrong.
func (c *chaos) calm() {
	if c.undo != nil {
		c.undo()
		c.undo = nil
		c.done = append(c.done, "calm")
	}
}

// step ends what is wrong, or does something new to the leader or another member.
func (c *chaos) step() {
	wasCalm := c.undo == nil
	c.calm()
	if !wasCalm && c.rng.IntN(3) > 0 {
		return
	}
	m := c.g.members[c.rng.IntN(len(c.g.members))]
	if lead := c.g.leader(); c.rng.IntN(2) == 0 {
		m = lead
	}
	other := c.g.members[(m.i+1+c.rng.IntN(len(c.g.members)-1))%len(c.g.members)]
	harm := harms[c.rng.IntN(len(harms))]
	c.done = append(c.done, fmt.Sprintf("%s %s (%s)", harm.name, m.id, other.id))
	c.undo = harm.do(m, other)
}
