package blobcp_test

import (
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/checkpoint"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The operations of each action on the blob store (P2, P3), so that a change of the
// protocol shows as a change of text.
func TestTranscript(t *testing.T) {
	w := newWorld(t)
	rec := blobtest.NewRecorder(w.clock)
	a := w.log(rec)
	var text strings.Builder
	from := rec
	section := func(title string, do func() error) {
		from.Reset()
		err := do()
		text.WriteString("# " + title + "\n")
		for _, line := range from.Transcript() {
			text.WriteString(sizes.ReplaceAllString(line, "$1") + "\n")
		}
		if err != nil {
			text.WriteString("=> " + err.Error() + "\n")
		}
		text.WriteString("\n")
	}
	appending := func(l *checkpoint.Log, d func(*checkpoint.Entry) (checkpoint.Draft, error)) func() error {
		return func() error {
			_, err := l.Append(t.Context(), d)
			return err
		}
	}
	reading := func(l *checkpoint.Log) func() error {
		return func() error {
			_, err := l.Head(t.Context())
			return err
		}
	}

	section("head of an empty log", reading(a))
	section("claim in an empty log", appending(a, decideClaim))
	section("append by the owner", appending(a, decide(checkpoint.Commit, 1)))
	w.add(w.log(), 1)
	section("append against another writer's entry", appending(a, decide(checkpoint.Commit, 1)))
	section("head", reading(a))
	from = blobtest.NewRecorder(staleBy(w, 2))
	section("head through a listing that lags by two", reading(w.log(from)))
	from = rec

	w.claim(w.log())
	section("append by an owner that was replaced", appending(a, decide(checkpoint.Commit, 1)))
	section("its next append", appending(a, decide(checkpoint.Commit, 1)))
	w.clock.forward(2 * checkpoint.KeepSuperseded)
	section("trim", func() error { return a.Trim(t.Context()) })

	const golden = "testdata/transcript.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(text.String(), string(want)); d != "" {
		t.Errorf("transcript differs (-got +want):\n%s", d)
	}
}

// sizes are left out: times in entries have no fixed length.
var sizes = regexp.MustCompile(`^(put \S+) \d+`)

// staleBy adds n entries and returns a driver whose listings do not show them.
func staleBy(w *world, n int) *blobtest.Stale {
	s := blobtest.NewStale(w.clock, n)
	l := w.log(s)
	for range n {
		w.add(l, 1)
	}
	return s
}
