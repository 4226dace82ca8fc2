package protocol

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var (
	randomSeeds = flag.Int("protocol.seeds", 1000, "random runs of TestRandomEvents")
	randomFirst = flag.Uint64("protocol.seed", 1, "first seed of TestRandomEvents")
)

// chaos plays hosts and peers that do anything at all.
type chaos struct {
	*world
	rng  *rand.Rand
	asks []Ask
	old  []TransferID // of transfers that may have ended
}

// TestRandomEvents takes a Machine through random events, most of which fit and many of
// which are late, doubled, or of nothing that is open. The auditor checks every effect;
// at the end all transfers end by their deadlines although nobody answers, and then, with
// everything healthy again, the member gets its snapshot: nothing is wedged.
func TestRandomEvents(t *testing.T) {
	for i := range *randomSeeds {
		seed := *randomFirst + uint64(i)
		c := newChaos(t, seed)
		for range 150 {
			c.anything()
		}
		c.audit.log = append(c.audit.log, fmt.Sprintf("seed %d: silence", seed))
		c.silence()
		c.audit.log = append(c.audit.log, fmt.Sprintf("seed %d: healthy", seed))
		c.heal()
		c.step(Close{})
		c.tick(time.Second)
	}
}

func newChaos(t *testing.T, seed uint64) *chaos {
	rng := rand.New(rand.NewPCG(seed, 7))
	cfg := small()
	cfg.Seed = seed
	if rng.IntN(3) == 0 {
		cfg.Interval = time.Minute
	}
	w := newWorld(t, cfg, 2, 1+rng.IntN(5))
	w.v.Role = []Role{Follower, Leader, Learner}[rng.IntN(3)]
	w.audit.log = append(w.audit.log, fmt.Sprintf("seed %d", seed))
	if rng.IntN(2) == 0 {
		w.has(snap(10, 2, 3))
	}
	w.applied(100)
	return &chaos{world: w, rng: rng}
}

func (c *chaos) do(e Event) {
	for _, eff := range c.step(e) {
		switch eff := eff.(type) {
		case Ask:
			c.asks = append(c.asks, eff)
			c.old = append(c.old, eff.Request.Transfer)
		case Fetch:
			c.old = append(c.old, eff.Transfer)
		case Record:
			c.old = append(c.old, eff.Transfer)
		case Hand:
			c.old = append(c.old, eff.Transfer)
		}
	}
}

// transfer gives the open transfer mostly, and at times any that ever was.
func (c *chaos) transfer() TransferID {
	if len(c.old) > 0 && c.rng.IntN(5) == 0 {
		return c.old[c.rng.IntN(len(c.old))]
	}
	if c.m.maker.stage == makerRecording && c.rng.IntN(2) == 0 {
		return c.m.maker.transfer
	}
	return c.m.slot.transfer
}

func (c *chaos) peer() uint64 {
	if len(c.v.Peers) == 0 || c.rng.IntN(20) == 0 {
		return 9
	}
	return c.v.Peers[c.rng.IntN(len(c.v.Peers))].ID
}

func (c *chaos) near(i uint64) uint64 { return i + uint64(c.rng.IntN(300)) - min(i, 100) }

// anything does one random thing.
func (c *chaos) anything() {
	switch c.rng.IntN(12) {
	case 0, 1, 2:
		c.now += time.Duration(c.rng.Int64N(int64(4 * time.Second)))
		c.do(Tick{})
	case 3, 4:
		c.changeView()
		c.do(Tick{})
	case 5, 6:
		c.answerAsk()
	case 7, 8:
		c.anyFetch()
	case 9:
		c.anyLocal()
	case 10:
		c.anyRequest()
	case 11:
		c.anyInstall()
	}
}

func (c *chaos) changeView() {
	v := &c.v
	switch c.rng.IntN(8) {
	case 0, 1, 2:
		c.applied(v.Applied + uint64(c.rng.IntN(120)))
	case 3:
		v.Role, v.Term, v.Leader = Leader, v.Term+1, v.Self
	case 4:
		v.Role, v.Term, v.Leader = Follower, v.Term+uint64(c.rng.IntN(2)), c.peer()
	case 5:
		if len(v.Peers) > 0 {
			p := &v.Peers[c.rng.IntN(len(v.Peers))]
			p.Active, p.Match = c.rng.IntN(4) > 0, c.near(v.Applied)
		}
	case 6:
		if len(v.Held) > 2 {
			v.Held = slices.Delete(v.Held, 0, 1)
		}
	case 7:
		v.LogBytes = c.rng.Int64N(1 << 33)
	}
}

func (c *chaos) answerAsk() {
	if len(c.asks) == 0 {
		return
	}
	i := c.rng.IntN(len(c.asks))
	a := c.asks[i]
	if c.rng.IntN(8) > 0 {
		c.asks = slices.Delete(c.asks, i, i+1)
	}
	answer := Answer{Transfer: a.Request.Transfer, From: a.Peer, Term: c.v.Term}
	switch c.rng.IntN(8) {
	case 0:
		c.do(InfoFailed{a.Request.Transfer, a.Peer, "no route"})
		return
	case 1, 2, 3:
		h := snap(c.near(a.Request.MinIndex), c.v.Term-min(c.v.Term, uint64(c.rng.IntN(2))), a.Peer)
		answer.State, answer.ID, answer.Lineage = Ready, h.ID, h.Meta.Lineage
	case 4:
		answer.State = Generating
	case 5:
		answer.State, answer.Reason = Failed, "disk"
	case 6:
		answer.State = None
	case 7:
		kinds := []RefusalKind{NotLeader, StaleTerm, OtherGroup, Busy, NothingNewer, NoSpace, Closed}
		answer.Refusal = &Refusal{Kind: kinds[c.rng.IntN(len(kinds))]}
	}
	c.do(InfoCame{answer})
}

func (c *chaos) anyFetch() {
	t, target := c.transfer(), c.fetch.Target
	switch c.rng.IntN(6) {
	case 0, 1, 2:
		c.do(FetchMoved{t, c.m.slot.bytes + c.rng.Int64N(100) - 20})
	case 3, 4:
		h := snap(target.Index, target.Term, uint64(target.Digest[0]))
		if target.Index%16 == 5 {
			h.Meta.Conf = Conf{Voters: []uint64{8}}
		}
		c.do(FetchDone{t, h})
	case 5:
		kinds := []FailureKind{FailGone, FailNoSpace, FailCorrupt, FailUnreachable, FailIdle, FailBusy, FailCancelled, FailLocal}
		c.do(FetchEnded{t, Failure{Kind: kinds[c.rng.IntN(len(kinds))], Peer: c.peer() * uint64(c.rng.IntN(2))}})
	}
}

func (c *chaos) anyLocal() {
	t := c.transfer()
	switch c.rng.IntN(6) {
	case 0, 1:
		c.do(RecordDone{Transfer: t})
	case 2:
		kinds := []RefusalKind{NotNeeded, Ahead, Forked, Gone}
		c.do(RecordDone{Transfer: t, Refusal: &Refusal{Kind: kinds[c.rng.IntN(len(kinds))]}})
	case 3:
		kinds := []OutcomeKind{Installed, Installed, StepNotNeeded, InstallFailed, Progress}
		c.do(HandDone{t, Outcome{Kind: kinds[c.rng.IntN(len(kinds))]}})
	case 4:
		if c.audit.making || c.rng.IntN(10) == 0 {
			c.do(Made{snap(c.v.Applied, c.v.Term, c.v.Self)})
		}
	case 5:
		if c.rng.IntN(2) == 0 {
			c.do(MakeFailed{Failure{Kind: FailLocal}})
		} else if len(c.v.Held) > 0 {
			c.do(Damaged{c.v.Held[c.rng.IntN(len(c.v.Held))].ID})
		}
	}
}

func (c *chaos) anyRequest() {
	switch c.rng.IntN(4) {
	case 0:
		c.do(Wanted{MinIndex: c.near(c.v.Applied), Needs: uint64(c.rng.IntN(5))})
	case 1, 2:
		r := makeRequest(c.near(c.v.Applied))
		r.Term, r.Make, r.Needs = c.v.Term+1-uint64(c.rng.IntN(3)), c.rng.IntN(3) > 0, uint64(c.rng.IntN(6))
		c.do(Asked{r})
	case 3:
		c.do(Announced{Announce{Group: "g", From: c.peer(), Term: c.v.Term + 1 - uint64(c.rng.IntN(3)),
			ID: snap(c.near(c.v.Applied), c.v.Term, c.peer()).ID, Holders: []uint64{c.peer(), c.v.Self}}})
	}
}

func (c *chaos) anyInstall() {
	e := envelope(c.near(c.v.Commit) + 20)
	e.From, e.Term = c.peer(), c.v.Term+1-uint64(c.rng.IntN(3))
	e.SnapTerm = min(e.Term, c.v.Term)
	e.First = c.near(e.SnapIndex)
	if c.rng.IntN(3) > 0 {
		e.First = e.SnapIndex - 10
	}
	c.do(InstallAsked{e})
}

// heal makes this member the leader of healthy members and lets the log grow by more than
// the threshold: it must come to record a newer snapshot.
func (c *chaos) heal() {
	v := &c.v
	v.Term++
	v.Role, v.Leader = Leader, v.Self
	for i := range v.Peers {
		v.Peers[i].Active = true
	}
	c.applied(v.Applied + 1000)
	want := v.RecordedIndex + 1
	for range 3000 {
		if v.RecordedIndex >= want {
			return
		}
		c.now += 100 * time.Millisecond
		c.obey(c.step(Tick{}))
	}
	c.audit.fail("no newer snapshot than %d: %s", v.RecordedIndex, c.m.Why(c.now, v))
}

// obey answers effects as healthy hosts and peers would.
func (c *chaos) obey(effects []Effect) {
	for len(effects) > 0 {
		e := effects[0]
		effects = effects[1:]
		switch e := e.(type) {
		case Ask:
			h := snap(c.v.Applied, c.v.Term, e.Peer)
			answer := Answer{Transfer: e.Request.Transfer, From: e.Peer, Term: c.v.Term, State: None}
			if e.Request.Make {
				answer.State, answer.ID, answer.Lineage = Ready, h.ID, h.Meta.Lineage
			}
			effects = append(effects, c.step(InfoCame{answer})...)
		case Fetch:
			effects = append(effects, c.step(FetchDone{e.Transfer, snap(e.Target.Index, e.Target.Term, uint64(e.Target.Digest[0]))})...)
		case CancelFetch:
			effects = append(effects, c.step(FetchEnded{e.Transfer, Failure{Kind: FailCancelled}})...)
		case Record:
			effects = append(effects, c.step(RecordDone{Transfer: e.Transfer})...)
		case Hand:
			effects = append(effects, c.step(HandDone{e.Transfer, Outcome{Kind: Installed}})...)
		case Make:
			effects = append(effects, c.step(Made{snap(c.v.Applied, c.v.Term, c.v.Self)})...)
		}
	}
}
