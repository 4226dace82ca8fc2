package protocol

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestReportRules goes through R7: what each outcome of an install makes Raft be told.
func TestReportRules(t *testing.T) {
	const first = 901 // of the leader's log
	finish, failure := []Report{{2, true}}, []Report{{2, false}}
	tests := []struct {
		name    string
		outcome Outcome
		want    []Report
		refused RefusalKind
	}{
		{"installed as announced", Outcome{Kind: Installed, Index: 1000}, finish, ""},
		{"installed another one", Outcome{Kind: Installed, Index: 1010}, finish, ""},
		{"installed where the log still goes on", Outcome{Kind: Installed, Index: 900}, finish, ""},
		{"installed below the log", Outcome{Kind: Installed, Index: 899}, failure, ""},
		{"not needed", Outcome{Kind: StepNotNeeded, Index: 1000}, finish, ""},
		{"failed", Outcome{Kind: InstallFailed, Index: 1000}, failure, ""},
		{"progress", Outcome{Kind: Progress, Index: 1000}, nil, ""},
		{"of another term", Outcome{Kind: Installed, Index: 1000, Term: 6}, nil, StaleTerm},
		{"of another member", Outcome{Kind: Installed, Index: 1000, From: 3}, nil, Gone},
		{"failed, of an older MsgSnap", Outcome{Kind: InstallFailed, Index: 950}, nil, Gone},
		{"nonsense", Outcome{Kind: "x", Index: 1000}, nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := NewInstalls(Config{})
			b.Sent(0, 2, 5, 1000)
			o := tt.outcome
			o.From, o.Term = max(o.From, 2), max(o.Term, 5)
			got, refusal := b.Outcome(time.Second, o, first)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if (refusal != nil) != (tt.refused != "") || refusal != nil && refusal.Kind != tt.refused {
				t.Errorf("refusal %v, want %q", refusal, tt.refused)
			}
			// The second time there is nothing left to report.
			if got, _ := b.Outcome(time.Second, o, first); len(tt.want) > 0 && got != nil {
				t.Errorf("reported again: %v", got)
			}
		})
	}
}

func TestReportOnSendFailure(t *testing.T) {
	b := NewInstalls(Config{})
	b.Sent(0, 2, 5, 1000)
	if diff := cmp.Diff([]Report{{2, false}}, b.SendFailed(1, 2)); diff != "" {
		t.Error(diff)
	}
	if got := b.SendFailed(2, 2); got != nil {
		t.Errorf("reported again: %v", got)
	}
}

// TestReportOnSilence: progress keeps an install open, silence for the deadline ends it.
func TestReportOnSilence(t *testing.T) {
	b := NewInstalls(Config{ReportDeadline: 10 * time.Second})
	b.Sent(0, 2, 5, 1000)
	b.Sent(0, 3, 5, 1000)
	b.Outcome(9*time.Second, Outcome{From: 3, Term: 5, Kind: Progress, Bytes: 7}, 1)
	if got := b.Tick(9*time.Second, 0); got != nil {
		t.Errorf("reported %v before the deadline", got)
	}
	if diff := cmp.Diff([]Report{{2, false}}, b.Tick(10*time.Second, 0)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]InstallStatus{{Peer: 3, Index: 1000, Bytes: 7}}, b.Status()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]Report{{3, false}}, b.Tick(19*time.Second, 0)); diff != "" {
		t.Error(diff)
	}
}

// TestReportsAfterLostLeadership: what belongs to the old leadership reports nothing, and
// a late outcome of it does not hit an install of the new one (scylladb#29092).
func TestReportsAfterLostLeadership(t *testing.T) {
	b := NewInstalls(Config{})
	b.Sent(0, 2, 5, 1000)
	b.Lost()
	if got := b.Tick(time.Hour, 0); got != nil {
		t.Errorf("reported %v", got)
	}
	b.Sent(time.Hour, 2, 7, 1200)
	got, refusal := b.Outcome(time.Hour, Outcome{From: 2, Term: 5, Kind: InstallFailed, Index: 1000}, 1)
	if got != nil || refusal == nil || refusal.Kind != StaleTerm {
		t.Errorf("%v, %v", got, refusal)
	}
}

// TestSentAgain: Raft sends another MsgSnap only after it has given the first one up by
// itself, so only the second is reported.
func TestSentAgain(t *testing.T) {
	b := NewInstalls(Config{})
	b.Sent(0, 2, 5, 1000)
	b.Sent(1, 2, 5, 1100)
	if got, _ := b.Outcome(2, Outcome{From: 2, Term: 5, Kind: InstallFailed, Index: 1000}, 1); got != nil {
		t.Errorf("the first was reported: %v", got)
	}
	if got, _ := b.Outcome(2, Outcome{From: 2, Term: 5, Kind: Installed, Index: 1000}, 900); len(got) != 1 {
		t.Errorf("the second was not: %v", got)
	}
}

// TestFloor goes through R9: held while an install is open, and a moment longer; ended for
// good at its bounds in time and in bytes.
func TestFloor(t *testing.T) {
	b := NewInstalls(Config{FloorTime: time.Minute, FloorBytes: 1000, ReportDeadline: time.Hour, FloorGrace: 5 * time.Second})
	floor := func(want uint64, wantOK bool) {
		t.Helper()
		if got, ok := b.Floor(); got != want || ok != wantOK {
			t.Errorf("floor %d, %v, want %d, %v", got, ok, want, wantOK)
		}
	}
	floor(0, false)
	b.Sent(0, 2, 5, 500)
	b.Sent(0, 3, 5, 400)
	floor(400, true)
	b.Outcome(1, Outcome{From: 3, Term: 5, Kind: Installed, Index: 400}, 1)
	b.Tick(4*time.Second, 0)
	floor(400, true)
	b.Tick(6*time.Second, 0)
	floor(500, true)
	b.Tick(7*time.Second, 1001)
	floor(0, false)
	b.Tick(8*time.Second, 10)
	floor(0, false)
	b.Sent(10*time.Second, 4, 5, 600)
	floor(600, true)
	b.Tick(70*time.Second, 0)
	floor(0, false)
	if n := len(b.Status()); n != 2 {
		t.Errorf("%d installs open, want 2: the end of a floor is not the end of an install", n)
	}
}

func TestFloorOfFailedInstall(t *testing.T) {
	b := NewInstalls(Config{})
	b.Sent(0, 2, 5, 500)
	b.SendFailed(1, 2)
	if _, ok := b.Floor(); ok {
		t.Error("held for a member that is merely down (a10 would never install)")
	}
}

func TestTrailing(t *testing.T) {
	tests := []struct {
		name        string
		took        time.Duration
		rate, bytes float64
		want        uint64
	}{
		{"nothing measured", 0, 1000, 100, 1000},
		{"quick", time.Second, 100, 100, 1000},
		{"twice the time", 10 * time.Second, 100, 100, 2000},
		{"at most four times", time.Hour, 100, 100, 4000},
		{"bounded in bytes", time.Hour, 100, 1e6 / 2500, 2500},
		{"never below the setting", time.Hour, 100, 1e6, 1000},
		{"no rate", time.Hour, 0, 0, 1000},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := NewInstalls(Config{TrailingEntries: 1000, TrailingBytes: 1e6})
			if tt.took > 0 {
				b.Sent(0, 2, 5, 500)
				b.Outcome(tt.took, Outcome{From: 2, Term: 5, Kind: Installed, Index: 500}, 1)
			}
			if got := b.Trailing(tt.rate, tt.bytes); got != tt.want {
				t.Errorf("%d, want %d", got, tt.want)
			}
		})
	}
}

func TestTookFallsSlowly(t *testing.T) {
	b := NewInstalls(Config{})
	for _, took := range []time.Duration{8 * time.Second, 0} {
		b.Sent(b.now, 2, 5, 500)
		b.Outcome(b.now+took, Outcome{From: 2, Term: 5, Kind: Installed, Index: 500}, 1)
	}
	if b.took != 6*time.Second {
		t.Errorf("%v, want 6s", b.took)
	}
}

// TestRandomInstalls: whatever is heard, each MsgSnap is reported exactly once unless it
// was replaced or the leadership was lost, and no floor outlives its install and grace.
func TestRandomInstalls(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		b := NewInstalls(Config{})
		var now time.Duration
		open := map[uint64]bool{}
		reported := func(reports []Report) {
			for _, r := range reports {
				if !open[r.Peer] {
					t.Fatalf("seed %d: report of %d, which is not open", seed, r.Peer)
				}
				delete(open, r.Peer)
			}
		}
		for range 200 {
			now += time.Duration(rng.Int64N(int64(3 * time.Second)))
			peer := 2 + rng.Uint64N(4)
			switch rng.IntN(8) {
			case 0:
				b.Sent(now, peer, 5, 100)
				open[peer] = true
			case 1:
				reported(b.SendFailed(now, peer))
			case 2:
				if rng.IntN(10) == 0 {
					b.Lost()
					clear(open)
				}
			case 3, 4, 5:
				kinds := []OutcomeKind{Progress, Progress, Installed, StepNotNeeded, InstallFailed}
				r, _ := b.Outcome(now, Outcome{From: peer, Term: 4 + rng.Uint64N(2), Kind: kinds[rng.IntN(5)], Index: 90 + rng.Uint64N(20)}, 100)
				reported(r)
			default:
				reported(b.Tick(now, rng.Int64N(2<<30)))
			}
		}
		reported(b.Tick(now+time.Minute, 0))
		if len(open) > 0 {
			t.Fatalf("seed %d: never reported: %v", seed, open)
		}
		if floor, ok := b.Floor(); ok {
			t.Fatalf("seed %d: floor %d of nothing", seed, floor)
		}
	}
}
