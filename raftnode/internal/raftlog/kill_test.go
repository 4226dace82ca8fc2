package raftlog_test

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
)

// childEnv makes the test binary append to the log in the directory it names until it is killed.
const childEnv = "SNAPFERRY_RAFTLOG_CHILD"

// appendForever writes the index of what is durable to standard output, a line each time.
func appendForever(dir string) {
	raftlog.SetSegmentBytes(smallSegment)
	err := func() error {
		w, r, err := raftlog.OpenWAL(dir, first())
		if err != nil {
			return err
		}
		l := raftlog.New(w, r)
		term := l.HardState().GetTerm() + 1
		for {
			if err := appendOnce(l, term); err != nil {
				return err
			}
			last, _ := l.LastIndex()
			if _, err := fmt.Println(last); err != nil {
				return err
			}
		}
	}()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// appendOnce saves a batch of a length that follows from its place, and now and then records and compacts.
func appendOnce(l *raftlog.Log, term uint64) error {
	last, _ := l.LastIndex()
	n := 1 + last%17
	if err := l.Save(state(term, last), heavy(last+1, last+n, 1, int(50+last%500)), true); err != nil {
		return err
	}
	if last%5 != 0 || last < 100 {
		return nil
	}
	err := l.Record(meta(last-20, 1), last)
	if errors.Is(err, raftlog.ErrOld) {
		return nil
	}
	if err == nil {
		err = l.Compact(last - 60)
	}
	return err
}

// TestKilledWriterLosesNothing: every index that the child printed is in the log after SIGKILL.
func TestKilledWriterLosesNothing(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	dir := filepath.Join(t.TempDir(), "log")
	rng := rand.New(rand.NewPCG(1, 2))
	var acked uint64
	for round := range rounds {
		acked = max(acked, killedAfter(t, dir, 1+rng.IntN(120)))
		w, r, err := raftlog.OpenWAL(dir, first())
		must(t, err)
		l := raftlog.New(w, r)
		s := span(l)
		if s[1] < acked {
			t.Fatalf("round %d: the log ends at %d, acknowledged was %d", round, s[1], acked)
		}
		for _, e := range all(t, l) {
			if e.GetTerm() != 1 || len(e.GetData()) < 50 {
				t.Fatalf("round %d: entry %d is %v", round, e.GetIndex(), e)
			}
		}
		startsRaft(t, l)
		must(t, l.Close())
	}
	if acked < 500 {
		t.Errorf("only %d entries were written", acked)
	}
}

// killedAfter runs the child until it acknowledged so many times, kills it, and gives the last index it printed.
func killedAfter(t *testing.T, dir string, lines int) (acked uint64) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	in := bufio.NewScanner(out)
	for k := 0; in.Scan(); k++ { // after the kill, what is still in the pipe
		n, err := strconv.ParseUint(in.Text(), 10, 64)
		if err == nil {
			acked = n
		}
		if k == lines {
			must(t, cmd.Process.Kill())
		}
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() >= 0 {
		t.Fatalf("the child ended by itself: %v", err)
	}
	return acked
}
