package snapstore

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

const (
	killDir = "SNAPSTORE_TEST_DIR" // where a child runs the story
	killAt  = "SNAPSTORE_TEST_KILL_AT"
)

// TestKillChild is the side of the child: it runs the story and dies before the operation
// it was told. What was acknowledged it notes beside the store. Without an errand there is
// nothing to test in it.
func TestKillChild(t *testing.T) {
	dir := os.Getenv(killDir)
	if dir == "" {
		return
	}
	at, err := strconv.ParseInt(os.Getenv(killAt), 10, 64)
	must(t, err)
	st := newStory(t)
	var n atomic.Int64
	must(t, st.run(dir, func(op, name string, do func() error) error {
		if n.Add(1) == at {
			must(t, os.WriteFile(dir+".acked", []byte(fmt.Sprint(st.acknowledged())), 0o644))
			must(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
			select {}
		}
		return do()
	}))
}

// child runs the story in a process of its own and reports whether it was killed.
func child(t testing.TB, dir string, at int) (killed bool) {
	t.Helper()
	c := exec.Command("/proc/self/exe", "-test.run=^TestKillChild$", "-test.count=1")
	c.Env = append(os.Environ(), killDir+"="+dir, killAt+"="+strconv.Itoa(at), "GOCOVERDIR=", "TMPDIR="+filepath.Dir(dir)) // a killed child cleans up nothing
	out, err := c.CombinedOutput()
	if err == nil {
		return false
	}
	if status, ok := c.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signal() == syscall.SIGKILL {
		return true
	}
	t.Fatalf("child: %v\n%s", err, out)
	return false
}

// Killed with SIGKILL in mid-draft, mid-receive, mid-anything: the lock is free, what was
// acknowledged is there, and the next process goes on to the end.
func TestKill(t *testing.T) {
	top := memory(t)
	step := 9
	if os.Getenv("SNAPFERRY_LONG") != "" {
		step = 1
	}
	for at := 1; ; at += step {
		dir := filepath.Join(top, "s")
		must(t, os.RemoveAll(dir))
		if !child(t, dir, at) {
			if at < 100 {
				t.Errorf("only %d operations", at)
			}
			return
		}
		when := fmt.Sprintf("killed before operation %d", at)
		st := newStory(t)
		acked, err := os.ReadFile(dir + ".acked")
		must(t, err)
		for _, text := range strings.Fields(strings.Trim(string(acked), "[]")) {
			index, err := strconv.ParseUint(text, 10, 64)
			must(t, err)
			st.ack(index, true)
		}
		st.check(when, dir)
		st.finish(when, dir)
	}
}

// A receipt of a killed process is gone on with: what it had is not fetched again.
func TestKilledReceiptIsResumed(t *testing.T) {
	top := memory(t)
	reused := int64(0)
	for at := 60; at < 130; at += 2 {
		dir := filepath.Join(top, "s")
		must(t, os.RemoveAll(dir))
		if !child(t, dir, at) {
			break
		}
		st := newStory(t)
		s := openStore(t, dir, nil)
		list, err := os.ReadDir(filepath.Join(dir, receiveName))
		must(t, err)
		if len(list) == 0 {
			must(t, s.Close())
			continue
		}
		r, err := s.Receive(t.Context(), manifestOf(t, st.from, st.two.ID))
		must(t, err)
		claims := int64(0)
		for _, f := range r.files {
			for j := range f.e.Chunks {
				if r.mu.state[f.first+j] == claimed {
					claims += int64(f.e.Chunks[j].Length)
				}
			}
		}
		if _, err := r.verifyClaims(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		if got := r.presentBytes(); got != claims {
			t.Errorf("killed before operation %d: %d of %d claimed bytes are right", at, got, claims)
		}
		reused = max(reused, r.presentBytes())
		must(t, r.Close())
		must(t, s.Close())
	}
	if reused == 0 {
		t.Error("never anything to go on with: the kill comes at the wrong moments")
	}
}
