package protocol

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// TestClockJumpsBack: a clock that is set back stands still; it neither ends a transfer
// early nor lets it hang.
func TestClockJumpsBack(t *testing.T) {
	w := fetchingTakeOver(t)
	start := w.now
	w.now = start - 50*time.Second
	w.step(FetchMoved{w.fetch.Transfer, 5})
	w.now = start + 29*time.Second
	mustNot[CancelFetch](t, w.step(Tick{}))
	w.now = start + 30*time.Second
	must[CancelFetch](t, w.step(Tick{}))
}

// TestNothingAfterClose takes a closed Machine through each event of the matrix.
func TestNothingAfterClose(t *testing.T) {
	for _, s := range situations() {
		w := s.reach(t)
		w.step(Close{})
		for _, hs := range [][]happening{requestHappenings(), infoHappenings(), fetchHappenings(), localHappenings()} {
			for _, h := range hs {
				if effects := w.step(h.event(w)); len(effects) > 0 {
					t.Fatalf("%s, %s: %v", s.name, h.name, showAll(effects))
				}
			}
		}
		if got := w.m.Answer(&w.v, makeRequest(1)); got.Refusal == nil || got.Refusal.Kind != Closed {
			t.Errorf("answer %+v", got)
		}
	}
}

// TestSameEventsSameEffects: the Machine knows no time and no chance but what it is given.
func TestSameEventsSameEffects(t *testing.T) {
	run := func() string {
		c := newChaos(t, 42)
		for range 300 {
			c.anything()
		}
		return strings.Join(c.audit.log, "\n")
	}
	if first := run(); first != run() {
		t.Error("two runs of the same events differ")
	}
}

// TestRefusedAsAhead: the host knows the applied index better than a view that is behind.
func TestRefusedAsAhead(t *testing.T) {
	w := fetchingTakeOver(t)
	w.done()
	w.step(RecordDone{Transfer: w.m.slot.transfer, Refusal: &Refusal{Kind: Ahead}})
	if effects := w.step(Tick{}); w.m.slot.stage != Recording {
		t.Errorf("stage %s, effects %v: want to try again", w.m.slot.stage, showAll(effects))
	}
}

// TestWrongSnapshotComes: what was not asked for is not taken.
func TestWrongSnapshotComes(t *testing.T) {
	w := fetchingTakeOver(t)
	effects := w.step(FetchDone{w.fetch.Transfer, snap(195, 3, 2)})
	if w.m.peers.healthy(w.now, 2) {
		t.Error("the source is not blamed")
	}
	must[Freed](t, effects)
	w = fetchingTakeOver(t)
	h := snap(190, 3, 2)
	h.Meta.Group = "h"
	mustNot[Record](t, w.step(FetchDone{w.fetch.Transfer, h}))
}

// TestFetchOvertaken: what is fetched becomes needless when a newer one is recorded by
// other means; it ends instead of moving bytes for nothing.
func TestFetchOvertaken(t *testing.T) {
	w := fetchingAdopt(t)
	w.has(snap(195, 3, 2))
	must[CancelFetch](t, w.step(Tick{}))
	must[Freed](t, w.step(FetchEnded{w.fetch.Transfer, Failure{Kind: FailCancelled}}))
	if got := w.m.peers.fails(w.now, 3); got != 0 {
		t.Error("a source is blamed for a cancellation")
	}
}

// TestOneEnvelope: the highest term counts, then the latest (R8).
func TestOneEnvelope(t *testing.T) {
	w := followerWorld(t)
	e := envelope(1000)
	e.Term = 5
	w.step(InstallAsked{e})
	older := envelope(2000)
	older.Term = 4
	told := must[Tell](t, w.step(InstallAsked{older}))
	if told.Outcome.Kind != InstallFailed || told.Outcome.Refusal.Kind != StaleTerm {
		t.Errorf("told %+v", told)
	}
	later := envelope(1100)
	later.Term = 5
	w.step(InstallAsked{later})
	if got := w.m.rescue.env.SnapIndex; got != 1100 {
		t.Errorf("envelope of %d is kept, want 1100", got)
	}
}

// TestUnfitForInstall goes through R8.2: what would not do although it is held.
func TestUnfitForInstall(t *testing.T) {
	tests := []struct {
		name string
		held func() Held
	}{
		{"of a later term than the leader's", func() Held { return snap(1000, 4, 2) }},
		{"below the announced", func() Held { return snap(999, 3, 2) }},
		{"without this member", func() Held { h := snap(1000, 3, 2); h.Meta.Conf = Conf{Voters: []uint64{1}}; return h }},
		{"of another group", func() Held { h := snap(1000, 3, 2); h.Meta.Group = "h"; return h }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := followerWorld(t)
			w.hold(tt.held())
			effects := w.step(InstallAsked{envelope(1000)})
			mustNot[Hand](t, effects)
			must[Ask](t, effects)
		})
	}
}

// TestFetchedBelowCommit: the log has overtaken what was fetched, though not what the
// leader announces by now; another one is looked for.
func TestFetchedBelowCommit(t *testing.T) {
	w := fetchingRescue(t)
	e := envelope(1200)
	e.First = 950
	w.step(InstallAsked{e})
	w.v.Commit, w.v.Applied = 1100, 1100
	effects := w.done()
	mustNot[Hand](t, effects)
	if ask := must[Ask](t, effects); ask.Request.MinIndex != 1200 {
		t.Errorf("asked for %d, want 1200", ask.Request.MinIndex)
	}
}

// TestInstallIsGivenUp: after some transfers that fail the leader is told, so that it does
// not wait for its deadline.
func TestInstallIsGivenUp(t *testing.T) {
	w := followerWorld(t)
	effects := w.step(InstallAsked{envelope(1000)})
	for range 4 {
		for range 600 {
			if w.m.slot.stage == Asking {
				break
			}
			effects = append(effects, w.tick(100*time.Millisecond)...)
		}
		for i := range w.m.slot.round.asks {
			if w.m.slot.stage == Asking {
				effects = append(effects, w.step(w.answer(w.m.slot.round.asks[i].peer, None, ""))...)
			}
		}
		effects = append(effects, w.step(Tick{})...)
	}
	last := slices.IndexFunc(effects, func(e Effect) bool {
		tell, ok := e.(Tell)
		return ok && tell.Outcome.Kind == InstallFailed
	})
	if last < 0 || w.m.rescue.env != nil {
		t.Errorf("not given up: %v", showAll(effects))
	}
}

// TestPollsTheMaker: who is generating is asked again, and nobody else is.
func TestPollsTheMaker(t *testing.T) {
	w := askingTakeOver(t)
	w.step(w.answer(3, None, ""))
	w.step(w.answer(2, Generating, ""))
	effects := w.tick(300 * time.Millisecond)
	if n := count[Ask](effects); n != 1 {
		t.Fatalf("%d asks, want 1: %v", n, showAll(effects))
	}
	if ask := must[Ask](t, effects); ask.Peer != 2 || !ask.Request.Make || ask.Request.Wait <= 0 {
		t.Errorf("asked %+v", ask)
	}
}

// TestOffersThatDoNotFit: what is offered is checked, whoever offers it.
func TestOffersThatDoNotFit(t *testing.T) {
	tests := []struct {
		name  string
		offer Held
		fits  bool
	}{
		{"fits", snap(190, 3, 3), true},
		{"of a term that this leader does not know", snap(190, 4, 3), false},
		{"of a lower term than the recorded", snap(190, 1, 3), false},
		{"older than asked", snap(50, 3, 3), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := askingTakeOver(t)
			w.step(w.answer(2, Generating, ""))
			w.step(w.ready(3, tt.offer))
			w.tick(time.Second)
			w.step(w.answer(2, Failed, ""))
			w.tick(time.Second)
			if got := w.m.slot.stage == Fetching; got != tt.fits {
				t.Errorf("fetching: %v, want %v", got, tt.fits)
			}
		})
	}
	// For an install the least term is that of the announced snapshot.
	w := askingRescue(t)
	w.step(w.ready(1, snap(1000, 2, 3)))
	w.step(w.ready(3, snap(1000, 4, 3)))
	if w.m.slot.stage == Fetching {
		t.Error("fetching what does not fit the envelope")
	}
}

// TestWaitsForTheMakerOfTheLineage: another member's snapshot would be a full transfer, so
// it is taken only when the maker of the held lineage is late (R10).
func TestWaitsForTheMakerOfTheLineage(t *testing.T) {
	w := askingTakeOver(t)
	w.step(w.answer(2, Generating, ""))
	w.step(w.ready(3, snap(200, 3, 3)))
	for range 1190 {
		w.tick(100 * time.Millisecond)
		w.step(w.answer(2, Generating, ""))
		if w.m.slot.stage != Asking {
			t.Fatalf("not waiting after %v", w.now)
		}
	}
	w.tick(2 * time.Second)
	if w.m.slot.stage != Fetching || w.m.slot.lineage.Maker != 3 {
		t.Errorf("stage %s: want to fetch what there is", w.m.slot.stage)
	}
}

// TestSurveyDoesNotWaitForTheDead: once there is an answer, those who say nothing hold it
// up for a moment only.
func TestSurveyDoesNotWaitForTheDead(t *testing.T) {
	w := askingTakeOver(t)
	w.step(w.ready(2, snap(200, 3, 2)))
	if w.m.slot.stage != Asking {
		t.Fatal("not waiting for the other answer")
	}
	fetch := must[Fetch](t, w.tick(600*time.Millisecond))
	if !slices.Equal(fetch.Sources, []uint64{2}) {
		t.Errorf("sources %v", fetch.Sources)
	}
}

// TestForkedIsNotFetchedAgain: what was quarantined is not taken from the next peer.
func TestForkedIsNotFetchedAgain(t *testing.T) {
	w := fetchingTakeOver(t)
	w.done()
	w.step(RecordDone{Transfer: w.m.slot.transfer, Refusal: &Refusal{Kind: Forked}})
	w.tick(time.Second)
	w.step(w.ready(3, snap(190, 3, 2)))
	w.tick(time.Second)
	if w.m.slot.stage == Fetching {
		t.Errorf("fetching %s again", w.m.slot.id.Short())
	}
}

// TestMakerHasTheLog: a member whose log does not reach that far is not the maker.
func TestMakerHasTheLog(t *testing.T) {
	w := newWorld(t, small(), 1, 3)
	w.applied(200)
	w.v.Peers[0].Match = 50
	for _, e := range w.step(Tick{}) {
		if a, ok := e.(Ask); ok && a.Request.Make != (a.Peer == 3) {
			t.Errorf("%s", show(a))
		}
	}
}

// TestWishOfAFormerLeader: a follower makes what is wished for from itself at once; what it
// wished for as a leader the new leader gets, and it stands in only if nobody serves.
func TestWishOfAFormerLeader(t *testing.T) {
	w := followerWorld(t)
	must[Make](t, w.step(Wanted{MinIndex: 180}))

	w = newWorld(t, small(), 1, 3)
	w.has(snap(190, 3, 2))
	w.applied(200)
	w.step(Wanted{MinIndex: 195})
	w.v.Role, w.v.Term, w.v.Leader = Follower, 4, 2
	mustNot[Make](t, w.tick(9*time.Second))
	must[Make](t, w.tick(10*time.Second))
}

// TestWantedAndNobodyGives: a new member cannot join without a snapshot that names it. If
// round after round nobody has or makes one, the leader is the only one able to (R5, R6).
func TestWantedAndNobodyGives(t *testing.T) {
	w := newWorld(t, small(), 1, 3)
	w.has(snap(190, 3, 2))
	w.applied(200)
	effects := w.step(Wanted{MinIndex: 195, Needs: 3})
	made := false
	for i := 0; !made; i++ {
		if i > 600 {
			t.Fatal("nobody ever makes one")
		}
		for len(effects) > 0 {
			made = made || count[Make](effects[:1]) > 0
			a, ok := effects[0].(Ask)
			effects = effects[1:]
			if ok && w.m.slot.stage == Asking {
				effects = append(effects, w.step(w.answer(a.Peer, Failed, "disk"))...)
			}
		}
		effects = w.tick(100 * time.Millisecond)
	}
	if w.m.sched.empty < 4 {
		t.Errorf("after %d rounds only", w.m.sched.empty)
	}
}

// TestThresholds: entries, bytes and time each make a snapshot due.
func TestThresholds(t *testing.T) {
	cfg := Config{Entries: 1000, Bytes: 1 << 20, Interval: time.Hour, LogCap: -1}
	tests := []struct {
		name    string
		applied uint64
		bytes   int64
		wait    time.Duration
		due     bool
	}{
		{"nothing", 500, 1 << 10, time.Minute, false},
		{"entries", 1100, 0, time.Minute, true},
		{"bytes", 500, 1 << 20, time.Minute, true},
		{"time", 101, 0, time.Hour, true},
		{"time, nothing applied", 100, 0, time.Hour, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, cfg, 1, 3)
			w.has(snap(100, 3, 2))
			w.applied(100)
			w.step(Tick{})
			w.now += tt.wait
			w.applied(tt.applied)
			w.v.AppliedBytes = tt.bytes
			if got := count[Ask](w.step(Tick{})) > 0; got != tt.due {
				t.Errorf("due %v, want %v", got, tt.due)
			}
		})
	}
}

// TestMinGap: a busy group is not asked for one snapshot after the other without a pause.
func TestMinGap(t *testing.T) {
	w := fetchingTakeOver(t)
	w.done()
	w.step(RecordDone{Transfer: w.m.slot.transfer})
	w.applied(1000)
	mustNot[Ask](t, w.tick(900*time.Millisecond))
	must[Ask](t, w.tick(200*time.Millisecond))
}

// TestPromotedWhileMaking: what a leader began to make as a follower it may finish,
// and asks nobody meanwhile.
func TestPromotedWhileMaking(t *testing.T) {
	w := followerWorld(t)
	w.step(Asked{makeRequest(195)})
	w.v.Role, w.v.Term, w.v.Leader = Leader, 4, 2
	w.applied(400)
	mustNot[Ask](t, w.tick(time.Second))
	must[Record](t, w.step(Made{snap(400, 3, 2)}))
	w.step(RecordDone{Transfer: w.m.maker.transfer})
	if w.v.RecordedIndex != 400 {
		t.Errorf("recorded %d", w.v.RecordedIndex)
	}
}

// TestPromotedWhileWaitingToMake: what was not begun as a follower is not begun as a leader
// (I12).
func TestPromotedWhileWaitingToMake(t *testing.T) {
	w := followerWorld(t)
	w.step(Asked{makeRequest(250)})
	w.v.Role, w.v.Term, w.v.Leader = Leader, 4, 2
	w.applied(260)
	mustNot[Make](t, w.tick(time.Second))
}

// TestMakingIsFollowedByANewerOne: a request for a later index than the making under way
// may give is served after it, once.
func TestMakingIsFollowedByANewerOne(t *testing.T) {
	w := followerWorld(t)
	w.step(Asked{makeRequest(195)})
	w.step(Asked{makeRequest(220)})
	w.applied(230)
	w.step(Made{snap(200, 3, 2)})
	next := must[Make](t, w.step(RecordDone{Transfer: w.m.maker.transfer}))
	if next.MinIndex != 220 {
		t.Errorf("make >=%d, want 220", next.MinIndex)
	}
	w.step(Made{snap(230, 3, 2)})
	mustNot[Make](t, w.step(RecordDone{Transfer: w.m.maker.transfer}))
}

// TestMakeForANewcomer: a held snapshot at the index does not name the new member, so the
// next one must be of a later index, or it would be the same again.
func TestMakeForANewcomer(t *testing.T) {
	w := followerWorld(t)
	w.has(snap(200, 3, 2))
	r := makeRequest(195)
	r.Needs = 7
	mustNot[Make](t, w.step(Asked{r}))
	w.applied(201)
	if m := must[Make](t, w.step(Tick{})); m.MinIndex != 201 {
		t.Errorf("make >=%d, want 201", m.MinIndex)
	}
}

// TestMakingStopsForAnInstall: a member that is about to get another state begins none.
func TestMakingStopsForAnInstall(t *testing.T) {
	w := askingRescue(t)
	effects := w.step(Asked{makeRequest(195)})
	mustNot[Make](t, effects)
	if r := must[Refused](t, effects); r.Refusal.Kind != Busy {
		t.Errorf("%+v", r)
	}
	w = followerWorld(t)
	w.step(Asked{makeRequest(250)})
	w.step(InstallAsked{envelope(1000)})
	w.applied(260)
	mustNot[Make](t, w.step(Tick{}))
}

// TestMakingKeepsFailing is for people, and the back-off is for the disk.
func TestMakingKeepsFailing(t *testing.T) {
	w := followerWorld(t)
	var effects []Effect
	for range 4 {
		effects = append(effects, w.tick(3*time.Second)...)
		effects = append(effects, w.step(Asked{makeRequest(195)})...)
		effects = append(effects, w.step(MakeFailed{Failure{Kind: FailLocal, Text: "disk"}})...)
	}
	must[Alarm](t, effects)
	mustNot[Make](t, w.step(Asked{makeRequest(195)}))
	if a := w.m.Answer(&w.v, makeRequest(195)); a.State != Failed || !strings.Contains(a.Reason, "disk") {
		t.Errorf("answer %+v", a)
	}
}

// TestAnnouncementIsNotTriedForEver: four sources that fail are enough, and one that says
// that the snapshot is gone is too.
func TestAnnouncementIsNotTriedForEver(t *testing.T) {
	for kind, want := range map[FailureKind]int{FailCorrupt: 4, FailGone: 1} {
		w := fetchingAdopt(t)
		fetches := 1
		for range 100 {
			w.step(FetchEnded{w.fetch.Transfer, Failure{Kind: kind}})
			fetches += count[Fetch](w.tick(time.Second))
		}
		if fetches != want {
			t.Errorf("%s: %d fetches, want %d", kind, fetches, want)
		}
	}
}

// TestOlderAnnouncement: of two that wait, the newer is kept.
func TestOlderAnnouncement(t *testing.T) {
	w := fetchingAdopt(t)
	for _, index := range []uint64{199, 195} {
		w.step(Announced{Announce{Group: "g", From: 1, Term: 3, ID: snap(index, 3, 3).ID, Holders: []uint64{3}}})
	}
	w.done()
	fetch := must[Fetch](t, w.step(RecordDone{Transfer: w.m.slot.transfer}))
	if fetch.Target.Index != 199 {
		t.Errorf("fetch of %d, want 199", fetch.Target.Index)
	}
}

// TestLeaderSpreadsAgain: an announcement may be lost.
func TestLeaderSpreadsAgain(t *testing.T) {
	w := newWorld(t, small(), 1, 3)
	w.has(snap(190, 3, 2))
	w.applied(200)
	if n := count[Spread](w.tick(61 * time.Second)); n != 6 {
		t.Errorf("%d announcements to two members in 61 s, want 6", n)
	}
}

// TestSilenceOfAllPeers: a round without any answer ends by the deadlines of the answers,
// that of the next maker in rank included.
func TestSilenceOfAllPeers(t *testing.T) {
	w := askingTakeOver(t)
	mustNot[Ask](t, w.tick(9*time.Second))
	if ask := must[Ask](t, w.tick(time.Second)); ask.Peer != 3 || !ask.Request.Make {
		t.Errorf("%s, want the next in rank", show(ask))
	}
	mustNot[Freed](t, w.tick(9*time.Second))
	must[Freed](t, w.tick(time.Second))
}

// TestGeneratingForEver: makers that say for ever that they are at it are late one after
// the other, and then the round is over; the next one will find what they have made.
func TestGeneratingForEver(t *testing.T) {
	w := askingTakeOver(t)
	w.step(w.answer(2, Generating, ""))
	w.step(w.answer(3, Generating, ""))
	for end := w.now + 5*time.Minute; !w.audit.freed["run-1"]; {
		if w.now > end {
			t.Fatal("the round does not end")
		}
		for _, e := range w.tick(100 * time.Millisecond) {
			if a, ok := e.(Ask); ok {
				w.step(w.answer(a.Peer, Generating, ""))
			}
		}
	}
	if w.m.sched.empty != 0 {
		t.Error("late is not the same as unable")
	}
}

// TestStrangersAnnounce: another group's announcement is refused.
func TestStrangersAnnounce(t *testing.T) {
	w := followerWorld(t)
	effects := w.step(Announced{Announce{Group: "h", From: 1, Term: 3, ID: snap(190, 3, 3).ID, Holders: []uint64{3}}})
	mustNot[Fetch](t, effects)
	if r := must[Refused](t, effects); r.Refusal.Kind != OtherGroup {
		t.Errorf("%+v", r)
	}
}

// TestViewIsBehind: a view that does not show the recording yet does not lead to another.
func TestViewIsBehind(t *testing.T) {
	w := fetchingTakeOver(t)
	w.done()
	e := RecordDone{Transfer: w.m.slot.transfer}
	mustNot[Record](t, w.m.Step(w.now, &w.v, e))
	mustNot[Record](t, w.m.Step(w.now, &w.v, Tick{}))
}

// TestWishForOneWhoHasLeft: a member that has left meanwhile is in no later snapshot
// either, and must not have one made after the other.
func TestWishForOneWhoHasLeft(t *testing.T) {
	w := followerWorld(t)
	w.step(Wanted{MinIndex: 180, Needs: 9})
	w.step(Made{snap(200, 3, 2)})
	w.step(RecordDone{Transfer: w.m.maker.transfer})
	w.applied(210)
	mustNot[Make](t, w.tick(time.Minute))
}

// TestInstallSucceedsAfterFailures: the back-off of the next install begins anew.
func TestInstallSucceedsAfterFailures(t *testing.T) {
	w := followerWorld(t)
	w.hold(snap(1000, 3, 3))
	w.step(InstallAsked{envelope(1000)})
	for range 6 {
		w.step(HandDone{w.m.slot.transfer, Outcome{Kind: InstallFailed}})
		w.step(InstallAsked{envelope(1000)})
		w.tick(10 * time.Second)
	}
	w.step(HandDone{w.m.slot.transfer, Outcome{Kind: Installed}})
	w.hold(snap(2000, 3, 3))
	w.step(InstallAsked{envelope(2000)})
	w.step(HandDone{w.m.slot.transfer, Outcome{Kind: InstallFailed}})
	w.step(InstallAsked{envelope(2000)})
	must[Hand](t, w.tick(time.Second))
}

// TestAlarmsAreNotRepeated: the same words once a minute.
func TestAlarmsAreNotRepeated(t *testing.T) {
	w := followerWorld(t)
	var effects []Effect
	fork := Announced{Announce{Group: "g", From: 1, Term: 3, ID: snap(5000, 1, 3).ID}}
	for range 10 {
		effects = append(effects, w.step(fork)...)
	}
	if n := count[Alarm](effects); n != 1 {
		t.Errorf("%d alarms, want 1", n)
	}
	w.now += time.Minute
	must[Alarm](t, w.step(fork))
}

// TestHolders: the hints of a MsgSnap name who is known to hold the snapshot.
func TestHolders(t *testing.T) {
	w := fetchingTakeOver(t)
	w.done()
	w.step(RecordDone{Transfer: w.m.slot.transfer})
	if got := w.m.Holders(snap(190, 3, 2).ID); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("holders %v", got)
	}
	if got := w.m.Holders(snap(10, 2, 2).ID); got != nil {
		t.Errorf("holders of another one: %v", got)
	}
}

// TestWhyIsReadOnly: asking why changes nothing.
func TestWhyIsReadOnly(t *testing.T) {
	for _, s := range situations() {
		w, twin := s.reach(t), s.reach(t)
		for range 3 {
			w.m.Why(w.now+time.Hour, &w.v)
			w.m.Answer(&w.v, makeRequest(150))
			w.m.Status()
		}
		if a, b := showAll(w.tick(time.Second)), showAll(twin.tick(time.Second)); !slices.Equal(a, b) {
			t.Errorf("%s: %v, want %v", s.name, a, b)
		}
	}
}
