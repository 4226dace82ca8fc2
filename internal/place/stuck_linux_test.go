package place

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// S8: a restore in place is cut short, and then files are replaced by renames, as a database
// does when the service starts on the mixture: it is a mixture still, until the next restore.
func TestInPlaceMixtureIsRemembered(t *testing.T) {
	w := newWorld(t)
	_, x := w.source("src", literal{"a": noise(1, 1000), "b": noise(2, 1000), "c": noise(3, 1000)})
	target := build(t, w.path("out/kv"), literal{"a": noise(4, 1000), "b": noise(5, 1000), "c": noise(6, 1000)})
	opts, n := w.options(), 0
	opts.InPlace = true
	opts.fail = func(op string) error {
		if op == "exchange" {
			if n++; n >= 2 {
				return unix.EIO
			}
		}
		return nil
	}
	_, err := w.restore(x, target, opts)
	if !errors.Is(err, ErrUnfinished) || !errors.Is(Unfinished(target), ErrUnfinished) {
		t.Fatalf("restore = %v, Unfinished = %v", err, Unfinished(target))
	}
	for _, name := range []string{"a", "b", "c"} {
		p := filepath.Join(target, name)
		data, err := os.ReadFile(p)
		must(t, err)
		must(t, os.WriteFile(p+".tmp", data, 0o600))
		must(t, os.Rename(p+".tmp", p))
	}
	if err := Unfinished(target); !errors.Is(err, ErrUnfinished) {
		t.Errorf("the target is a mixture, and Unfinished says %v", err)
	}
	opts.fail = nil
	_, err = w.restore(x, target, opts)
	must(t, err)
	must(t, Unfinished(target))
}

// S7: a staging was removed by hand between two swaps. The plan cannot be completed, but a
// restore of all its stores starts anew, and one of some of them says what to do.
func TestStagingRemovedByHand(t *testing.T) {
	a := newArena(t)
	e := a.errand("kv", "meta")
	between := func() {
		for e.KillAt = 1; ; e.KillAt++ {
			a.reset()
			if !e.send(t) {
				t.Fatal("never between the stores")
			}
			if a.state("kv") != a.state("meta") {
				break
			}
		}
		must(t, os.RemoveAll(a.path("out/.meta.snapferry")))
		e.KillAt = 0
	}
	between()
	must(t, e.do(t))
	between()
	if err := a.errand("kv").do(t); err == nil || !errors.Is(err, ErrUnfinished) {
		t.Errorf("restore of kv alone: %v", err)
	}
	must(t, os.RemoveAll(a.path("out/.kv.snapferry")))
	must(t, a.errand("kv").do(t))
}

// A plain user whose old tree holds a directory of root's: the new tree is in place, so the
// restore has worked.
func TestOldTreeOfAnotherUser(t *testing.T) {
	const nobody = 65534
	a := newArena(t)
	must(t, os.Chmod(filepath.Dir(a.dir), 0o711))
	must(t, os.RemoveAll(a.path("src")))
	a.src[0] = build(t, a.path("src/kv"), literal{"f": text("new")})
	target := build(t, a.path("out/kv"), literal{"f": text("old"), "sub/g": text("g")})
	giveAway(t, a.dir, nobody)
	must(t, os.Chown(filepath.Join(target, "sub"), 0, 0))
	e := a.errand("kv")
	e.Uid = nobody
	given, err := json.Marshal(e)
	must(t, err)
	for try := range 2 {
		c := exec.Command("/proc/self/exe", "-test.run=^TestErrand$", "-test.count=1")
		c.Env = append(os.Environ(), errandVariable+"="+string(given), "GOCOVERDIR=")
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		c.Dir = "/"
		out, err := c.CombinedOutput()
		data, rerr := os.ReadFile(filepath.Join(target, "f"))
		must(t, rerr)
		if err != nil || string(data) != "new" {
			t.Errorf("try %d: %v, f is %q:\n%s", try, err, data, out)
		}
	}
}
