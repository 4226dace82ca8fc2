package protocol

import (
	"os"
	"strings"
	"testing"
	"time"
)

// TestTranscripts runs the transcripts that are not tests by name.
func TestTranscripts(t *testing.T) {
	entries, err := os.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".txt")
		if !ok || strings.HasPrefix(name, "regression-") {
			continue
		}
		ran++
		t.Run(name, func(t *testing.T) { transcript(t, name) })
	}
	if ran == 0 {
		t.Error("no transcripts")
	}
}

// The core's side of the twelve regressions that the surveyed systems have had.

func TestRegression14102SourceRefusesForEver(t *testing.T) { transcript(t, "regression-14102") }
func TestRegression14934OneBadCandidate(t *testing.T)      { transcript(t, "regression-14934") }
func TestRegression12179SnapshotOlderThanLog(t *testing.T) { transcript(t, "regression-12179") }
func TestRegression12100ApplyingSuspended(t *testing.T)    { transcript(t, "regression-12100") }
func TestRegression13720LeaderGetsNoSnapshot(t *testing.T) { transcript(t, "regression-13720") }
func TestRegressionRatis987InProgressForEver(t *testing.T) { transcript(t, "regression-ratis-987") }
func TestRegressionCockroach87581StaleDelegate(t *testing.T) {
	transcript(t, "regression-cockroach-87581")
}
func TestRegressionCamunda4784PendingAtRestart(t *testing.T) {
	transcript(t, "regression-camunda-4784")
}
func TestRegressionTikv15292DamagedWhileApplying(t *testing.T) {
	transcript(t, "regression-tikv-15292")
}
func TestRegressionScylladb29092LostAndRegained(t *testing.T) {
	transcript(t, "regression-scylladb-29092")
}

// TestRegression15873PollIsCheap: Alluxio's leader was polled on every applied entry and
// made a client and a thread for each poll. Ten thousand steps while a round is open ask
// nobody anything new, and open no second one.
func TestRegression15873PollIsCheap(t *testing.T) {
	w := newWorld(t, small(), 1, 3)
	w.applied(100)
	effects := w.step(Tick{})
	for i := range 10_000 {
		w.applied(101 + uint64(i))
		effects = append(effects, w.step(Tick{})...)
	}
	if got := count[Ask](effects); got != 2 || len(effects) != 2 {
		t.Errorf("%d asks in %d effects, want 2 in 2", got, len(effects))
	}
}

// TestRegressionConsul9609LogIsCutDuringInstall: an install took longer than the trailing
// entries lasted, so that the next one was needed as soon as it was done. The log is held
// while it lasts, and the entries kept afterwards are what came in during twice its time,
// within four times the setting.
func TestRegressionConsul9609LogIsCutDuringInstall(t *testing.T) {
	b := NewInstalls(Config{TrailingEntries: 1000})
	b.Sent(0, 2, 3, 500)
	for now := time.Second; now < time.Minute; now += time.Second {
		if _, refusal := b.Outcome(now, Outcome{From: 2, Term: 3, Kind: Progress, Index: 500}, 400); refusal != nil {
			t.Fatal(refusal)
		}
		if reports := b.Tick(now, 1<<20); len(reports) > 0 {
			t.Fatalf("reported %v at %v", reports, now)
		}
		if floor, ok := b.Floor(); !ok || floor != 500 {
			t.Fatalf("floor %d, %v at %v", floor, ok, now)
		}
	}
	reports, _ := b.Outcome(time.Minute, Outcome{From: 2, Term: 3, Kind: Installed, Index: 500}, 400)
	if len(reports) != 1 || !reports[0].Finish {
		t.Fatalf("reports %v", reports)
	}
	if got := b.Trailing(20, 100); got != 2400 {
		t.Errorf("trailing %d at 20 entries a second, want 2400", got)
	}
	if got := b.Trailing(1e6, 100); got != 4000 {
		t.Errorf("trailing %d at most, want 4000", got)
	}
}
