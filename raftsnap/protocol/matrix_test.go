package protocol

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// situation is a state of the Machine that the matrix starts from.
type situation struct {
	name  string
	stage Stage
	maker makerStage
	reach func(t testing.TB) *world
}

// leaderWorld is a leader of three whose recorded snapshot is due.
func leaderWorld(t testing.TB) *world {
	w := newWorld(t, small(), 1, 3)
	w.has(snap(10, 2, 2))
	w.applied(200)
	return w
}

// followerWorld is a follower of three that is up to date.
func followerWorld(t testing.TB) *world {
	w := newWorld(t, small(), 2, 3)
	w.has(snap(150, 3, 3))
	w.applied(200)
	return w
}

// envelope is a MsgSnap of the leader of term 3 for a snapshot at the index.
func envelope(index uint64) Envelope {
	return Envelope{From: 1, Term: 3, SnapTerm: 3, SnapIndex: index, Target: snap(index, 3, 3).ID, Holders: []uint64{1, 3}, First: index - 20}
}

func askingTakeOver(t testing.TB) *world {
	w := leaderWorld(t)
	w.step(Tick{})
	return w
}

func fetchingTakeOver(t testing.TB) *world {
	w := askingTakeOver(t)
	w.step(w.ready(2, snap(190, 3, 2)))
	w.step(w.answer(3, None, ""))
	return w
}

func fetchingAdopt(t testing.TB) *world {
	w := followerWorld(t)
	w.step(Announced{Announce{Group: "g", From: 1, Term: 3, ID: snap(190, 3, 3).ID, Holders: []uint64{1, 3}}})
	return w
}

func askingRescue(t testing.TB) *world {
	w := followerWorld(t)
	w.step(InstallAsked{envelope(1000)})
	return w
}

func fetchingRescue(t testing.TB) *world {
	w := askingRescue(t)
	w.step(w.ready(1, snap(1000, 3, 3)))
	w.step(w.ready(3, snap(1000, 3, 3)))
	return w
}

func (w *world) done() []Effect {
	h := snap(w.fetch.Target.Index, w.fetch.Target.Term, uint64(w.fetch.Target.Digest[0]))
	return w.step(FetchDone{Transfer: w.fetch.Transfer, Held: h})
}

func parkedTakeOver(t testing.TB) *world {
	w := fetchingTakeOver(t)
	w.v.Applied, w.v.Commit = 180, 180
	w.done()
	return w
}

func situations() []situation {
	return []situation{
		{"idle follower", Idle, makerResting, followerWorld},
		{"idle leader", Idle, makerResting, func(t testing.TB) *world {
			w := newWorld(t, small(), 1, 3)
			w.has(snap(190, 3, 2))
			w.applied(200)
			return w
		}},
		{"asking for a take-over", Asking, makerResting, askingTakeOver},
		{"asking, the maker generates", Asking, makerResting, func(t testing.TB) *world {
			w := askingTakeOver(t)
			w.step(w.answer(2, Generating, ""))
			return w
		}},
		{"asking for an install", Asking, makerResting, askingRescue},
		{"fetching to adopt", Fetching, makerResting, fetchingAdopt},
		{"fetching to take over", Fetching, makerResting, fetchingTakeOver},
		{"fetching to install", Fetching, makerResting, fetchingRescue},
		{"fetching as demoted", Fetching, makerResting, func(t testing.TB) *world {
			w := fetchingTakeOver(t)
			w.v.Role, w.v.Term, w.v.Leader = Follower, 4, 2
			w.step(Tick{})
			return w
		}},
		{"cancelling for an install", Fetching, makerResting, func(t testing.TB) *world {
			w := fetchingAdopt(t)
			w.step(InstallAsked{envelope(1000)})
			return w
		}},
		{"cancelling a silent fetch", Fetching, makerResting, func(t testing.TB) *world {
			w := fetchingTakeOver(t)
			w.tick(20 * time.Second)
			return w
		}},
		{"parked", Parked, makerResting, parkedTakeOver},
		{"parked to adopt", Parked, makerResting, func(t testing.TB) *world {
			w := fetchingAdopt(t)
			w.v.Applied, w.v.Commit = 180, 180
			w.done()
			return w
		}},
		{"recording a take-over", Recording, makerResting, func(t testing.TB) *world {
			w := fetchingTakeOver(t)
			w.done()
			return w
		}},
		{"recording to adopt", Recording, makerResting, func(t testing.TB) *world {
			w := fetchingAdopt(t)
			w.done()
			return w
		}},
		{"handing", Handing, makerResting, func(t testing.TB) *world {
			w := fetchingRescue(t)
			w.done()
			return w
		}},
		{"install in back-off", Idle, makerResting, func(t testing.TB) *world {
			w := fetchingRescue(t)
			w.step(FetchEnded{w.fetch.Transfer, Failure{Kind: FailLocal}})
			return w
		}},
		{"waiting to make", Idle, makerWaiting, func(t testing.TB) *world {
			w := followerWorld(t)
			w.step(Asked{makeRequest(250)})
			return w
		}},
		{"making", Idle, makerMaking, func(t testing.TB) *world {
			w := followerWorld(t)
			w.step(Asked{makeRequest(195)})
			return w
		}},
		{"making while adopting", Fetching, makerMaking, func(t testing.TB) *world {
			w := fetchingAdopt(t)
			w.step(Asked{makeRequest(195)})
			return w
		}},
		{"making while leading", Idle, makerMaking, func(t testing.TB) *world {
			w := newWorld(t, small(), 1, 1)
			w.applied(200)
			w.step(Tick{})
			return w
		}},
		{"recording the own one", Idle, makerRecording, func(t testing.TB) *world {
			w := followerWorld(t)
			w.step(Asked{makeRequest(195)})
			w.step(Made{snap(200, 3, 2)})
			return w
		}},
		{"making failed", Idle, makerResting, func(t testing.TB) *world {
			w := followerWorld(t)
			w.step(Asked{makeRequest(195)})
			w.step(MakeFailed{Failure{Kind: FailLocal, Text: "disk"}})
			return w
		}},
	}
}

func makeRequest(index uint64) InfoRequest {
	return InfoRequest{Group: "g", From: 1, Term: 3, Transfer: "other-1", MinIndex: index, Make: true}
}

// happening is an event of the matrix, made for the world it happens in.
type happening struct {
	name  string
	event func(w *world) Event
}

// alter is a change of the view alone, which the next Tick brings.
func alter(name string, f func(w *world)) happening {
	return happening{name, func(w *world) Event { f(w); return Tick{} }}
}

// each gives an event of the transfer in the slot, of the maker's, and of no transfer.
func each(name string, event func(w *world, t TransferID) Event) []happening {
	return []happening{
		{name, func(w *world) Event { return event(w, w.m.slot.transfer) }},
		{name + " of the maker", func(w *world) Event { return event(w, w.m.maker.transfer) }},
		{name + " of another", func(w *world) Event { return event(w, "another") }},
	}
}

func fetchHappenings() []happening {
	var hs []happening
	hs = append(hs, each("moved", func(_ *world, t TransferID) Event { return FetchMoved{t, 500} })...)
	hs = append(hs, each("moved back", func(_ *world, t TransferID) Event { return FetchMoved{t, -1} })...)
	hs = append(hs, each("done", func(w *world, t TransferID) Event {
		id := w.m.slot.id
		return FetchDone{t, snap(id.Index, id.Term, uint64(id.Digest[0]))}
	})...)
	hs = append(hs, each("wrong one done", func(_ *world, t TransferID) Event { return FetchDone{t, snap(77, 2, 3)} })...)
	for _, k := range []FailureKind{FailGone, FailNoSpace, FailCorrupt, FailUnreachable, FailIdle, FailBusy, FailCancelled, FailLocal} {
		hs = append(hs, each("ended "+string(k), func(_ *world, t TransferID) Event {
			return FetchEnded{t, Failure{Kind: k, Peer: 3}}
		})...)
	}
	return hs
}

func localHappenings() []happening {
	hs := each("recorded", func(_ *world, t TransferID) Event { return RecordDone{Transfer: t} })
	hs = append(hs, each("record broken", func(_ *world, t TransferID) Event { return RecordDone{Transfer: t, Err: "disk"} })...)
	for _, k := range []RefusalKind{Forked, NotNeeded, Ahead, Gone, Closed, NoSpace} {
		hs = append(hs, each("record refused "+string(k), func(_ *world, t TransferID) Event {
			return RecordDone{Transfer: t, Refusal: &Refusal{Kind: k}}
		})...)
	}
	for _, k := range []OutcomeKind{Progress, Installed, StepNotNeeded, InstallFailed} {
		hs = append(hs, each("handed "+string(k), func(_ *world, t TransferID) Event {
			return HandDone{t, Outcome{Kind: k}}
		})...)
	}
	for _, k := range []FailureKind{FailLocal, FailNoSpace} {
		hs = append(hs, happening{"make failed " + string(k), func(*world) Event { return MakeFailed{Failure{Kind: k}} }})
	}
	return append(hs,
		happening{"made", func(w *world) Event { return Made{snap(w.v.Applied, 3, w.v.Self)} }},
		happening{"made an old one", func(w *world) Event { return Made{snap(5, 1, w.v.Self)} }},
		happening{"damaged the recorded", func(w *world) Event {
			return Damaged{ID{Term: w.v.RecordedTerm, Index: w.v.RecordedIndex, Digest: snap(1, 1, 3).ID.Digest}}
		}},
		happening{"damaged that of the slot", func(w *world) Event { return Damaged{w.m.slot.id} }},
	)
}

func infoHappenings() []happening {
	var hs []happening
	for _, peer := range []uint64{1, 2, 3, 9} {
		hs = append(hs,
			happening{fmt.Sprint("ready ", peer), func(w *world) Event { return w.ready(peer, snap(1100, 3, 3)) }},
			happening{fmt.Sprint("offers an old one ", peer), func(w *world) Event { return w.ready(peer, snap(11, 2, 3)) }},
			happening{fmt.Sprint("offers a fork ", peer), func(w *world) Event { return w.ready(peer, snap(1100, 1, 3)) }},
			happening{fmt.Sprint("generating ", peer), func(w *world) Event { return w.answer(peer, Generating, "") }},
			happening{fmt.Sprint("none ", peer), func(w *world) Event { return w.answer(peer, None, "") }},
			happening{fmt.Sprint("failed ", peer), func(w *world) Event { return w.answer(peer, Failed, "disk") }},
			happening{fmt.Sprint("silent ", peer), func(w *world) Event { return InfoFailed{w.m.slot.transfer, peer, "refused"} }},
		)
	}
	for _, k := range []RefusalKind{NotLeader, StaleTerm, OtherGroup, Busy, NothingNewer, NoSpace, Closed} {
		hs = append(hs, happening{"refusal " + string(k), func(w *world) Event { return w.refusal(3, k) }})
	}
	return append(hs,
		happening{"answer to another transfer", func(w *world) Event { a := w.ready(3, snap(1100, 3, 3)); a.Answer.Transfer = "x"; return a }},
		happening{"silence to another transfer", func(w *world) Event { return InfoFailed{"x", 3, ""} }},
	)
}

func requestHappenings() []happening {
	asked := func(name string, change func(r *InfoRequest)) happening {
		return happening{"asked " + name, func(w *world) Event {
			r := makeRequest(w.v.Applied)
			change(&r)
			return Asked{r}
		}}
	}
	announced := func(name string, change func(a *Announce)) happening {
		return happening{"announced " + name, func(w *world) Event {
			a := Announce{Group: "g", From: 1, Term: w.v.Term, ID: snap(w.v.RecordedIndex+5, 3, 3).ID, Holders: []uint64{3}}
			change(&a)
			return Announced{a}
		}}
	}
	install := func(name string, change func(e *Envelope)) happening {
		return happening{"install " + name, func(w *world) Event {
			e := envelope(2000)
			e.Term, e.From = w.v.Term, 3
			change(&e)
			return InstallAsked{e}
		}}
	}
	return []happening{
		{"tick", func(*world) Event { return Tick{} }},
		{"close", func(*world) Event { return Close{} }},
		{"wanted", func(w *world) Event { return Wanted{MinIndex: w.v.Applied + 5, Needs: 3} }},
		{"wanted what is there", func(w *world) Event { return Wanted{MinIndex: 1} }},
		asked("to make", func(*InfoRequest) {}),
		asked("to make a later one", func(r *InfoRequest) { r.MinIndex += 50 }),
		asked("only", func(r *InfoRequest) { r.Make = false }),
		asked("by a stale leader", func(r *InfoRequest) { r.Term = 1 }),
		asked("by a later leader", func(r *InfoRequest) { r.Term = 9 }),
		asked("to make for a newcomer", func(r *InfoRequest) { r.Needs = 7 }),
		asked("by a stranger", func(r *InfoRequest) { r.Group = "h" }),
		announced("a newer one", func(*Announce) {}),
		announced("a much newer one", func(a *Announce) { a.ID = snap(5000, 3, 3).ID }),
		announced("the recorded one", func(a *Announce) { a.ID.Index -= 5 }),
		announced("by a stale leader", func(a *Announce) { a.Term = 1 }),
		announced("by a stranger", func(a *Announce) { a.Group = "h" }),
		announced("a fork", func(a *Announce) { a.ID = snap(5000, 1, 3).ID }),
		install("asked", func(*Envelope) {}),
		install("of a later leader", func(e *Envelope) { e.Term = 9 }),
		install("of a stale leader", func(e *Envelope) { e.Term = 2 }),
		install("not needed", func(e *Envelope) { e.SnapIndex = 3 }),
		install("of the last one", func(e *Envelope) { e.SnapIndex, e.First = 1000, 990 }),
		install("with a log far ahead", func(e *Envelope) { e.SnapIndex, e.First = 9000, 8900 }),
		alter("demoted", func(w *world) { w.v.Role, w.v.Term, w.v.Leader = Follower, w.v.Term+1, 3 }),
		alter("promoted", func(w *world) { w.v.Role, w.v.Term, w.v.Leader = Leader, w.v.Term+1, w.v.Self }),
		alter("a new term", func(w *world) { w.v.Term, w.v.Leader = w.v.Term+1, 0; w.v.Role = Follower }),
		alter("applied grows", func(w *world) { w.applied(w.v.Applied + 1000) }),
		alter("all peers are gone", func(w *world) {
			for i := range w.v.Peers {
				w.v.Peers[i].Active = false
			}
		}),
		alter("no peers", func(w *world) { w.v.Peers = nil }),
		alter("the store is empty", func(w *world) { w.v.Held = nil }),
		{"clock jumps ahead", func(w *world) Event { w.now += 24 * time.Hour; return Tick{} }},
		{"clock jumps back", func(w *world) Event { w.now -= 30 * time.Second; return Tick{} }},
	}
}

// TestEveryStateTimesEveryEvent takes each state through each event. The auditor checks
// each effect (R4, R8, one Freed for each transfer, nothing after Close); then all that is
// open must end within the deadlines, and the Machine must be able to go on.
func TestEveryStateTimesEveryEvent(t *testing.T) {
	var happenings []happening
	for _, hs := range [][]happening{requestHappenings(), infoHappenings(), fetchHappenings(), localHappenings()} {
		happenings = append(happenings, hs...)
	}
	pairs := 0
	for _, s := range situations() {
		for _, h := range happenings {
			pairs++
			t.Run(s.name+"/"+h.name, func(t *testing.T) {
				w := s.reach(t)
				if w.m.slot.stage != s.stage || w.m.maker.stage != s.maker {
					t.Fatalf("state is %s and %s, want %s and %s", w.m.slot.stage, w.m.maker.stage, s.stage, s.maker)
				}
				effects := w.step(h.event(w))
				if strings.HasSuffix(h.name, "another") && !strings.Contains(h.name, "done") || strings.Contains(h.name, "another transfer") {
					// What belongs to no open transfer changes nothing, but that a snapshot
					// which came too late lies in the store.
					twin := s.reach(t)
					if diff := cmp.Diff(showAll(twin.step(Tick{})), showAll(effects)); diff != "" {
						t.Errorf("effects differ from those of a tick (-tick +event):\n%s", diff)
					}
				}
				if w.m.Why(w.now, &w.v) == "" {
					t.Error("no text")
				}
				w.silence()
			})
		}
	}
	t.Logf("%d states, %d events, %d pairs", len(situations()), len(happenings), pairs)
}

// silence lets nobody but the own host answer any more: every transfer must end.
func (w *world) silence() {
	w.t.Helper()
	if w.audit.closed {
		w.tick(time.Minute)
		return
	}
	for i := range w.v.Peers {
		w.v.Peers[i].Active = false
	}
	w.settle()
}
