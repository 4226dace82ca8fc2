package place

import (
	"encoding/json"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine behind (I10).
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watchDescriptors fails a test that leaves a file open (I10).
func watchDescriptors(t testing.TB) {
	t.Helper()
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	before := count()
	t.Cleanup(func() {
		if after := count(); after > before {
			t.Errorf("%d descriptors are open, were %d", after, before)
		}
	})
}

// errand is what a child process is to do: restore what lies at Src to Target.
type errand struct {
	Stores  []errandStore
	KillAt  int64 // die before the change of this number, from 1; 0: live
	InPlace bool
	Uid     uint32
}

type errandStore struct{ Name, Src, Target string }

const errandVariable = "PLACE_TEST_ERRAND"

// TestErrand is the child's side; without an errand there is nothing to test in it.
func TestErrand(t *testing.T) {
	given := os.Getenv(errandVariable)
	if given == "" {
		return
	}
	var e errand
	must(t, json.Unmarshal([]byte(given), &e))
	must(t, e.do(t))
}

func (e errand) do(t testing.TB) error {
	p := newPacks()
	opts := &Options{Checkpoint: "child", Read: p.read, Workers: 2, InPlace: e.InPlace}
	var stores []Store
	for _, s := range e.Stores {
		stores = append(stores, Store{Name: s.Name, Target: s.Target, Index: p.snap(t, s.Src)})
	}
	var n atomic.Int64
	opts.fail = func(string) error {
		if n.Add(1) == e.KillAt {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		return nil
	}
	_, err := Restore(t.Context(), stores, opts)
	return err
}

// send runs an errand in a process of its own and reports whether it was killed.
func (e errand) send(t testing.TB) (killed bool) {
	t.Helper()
	given, err := json.Marshal(e)
	must(t, err)
	c := exec.Command("/proc/self/exe", "-test.run=^TestErrand$", "-test.count=1")
	c.Env = append(os.Environ(), errandVariable+"="+string(given), "GOCOVERDIR=")
	if e.Uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: e.Uid, Gid: e.Uid}}
		c.Dir = "/"
	}
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
