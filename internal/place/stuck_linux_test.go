package place

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// mixture makes a target that a restore in place has left half done, and whose files were
// then replaced by renames, as a database does when the service starts on it.
func mixture(t *testing.T, w *world) (target string, opts *Options, x *snapshot.Index) {
	t.Helper()
	_, x = w.source("src", literal{"a": noise(1, 1000), "b": noise(2, 1000), "c": noise(3, 1000)})
	target = build(t, w.path("out/kv"), literal{"a": noise(4, 1000), "b": noise(5, 1000), "c": noise(6, 1000)})
	opts = w.options()
	opts.InPlace = true
	n := 0
	opts.fail = func(op string) error {
		if op == "exchange" {
			if n++; n > 1 {
				return unix.EIO
			}
		}
		return nil
	}
	if _, err := w.restore(x, target, opts); !errors.Is(err, ErrUnfinished) {
		t.Fatalf("restore: %v", err)
	}
	for _, name := range []string{"a", "b", "c"} {
		replace(t, filepath.Join(target, name))
	}
	if err := Unfinished(target); !errors.Is(err, ErrUnfinished) {
		t.Fatalf("the target is a mixture, and Unfinished says %v", err)
	}
	opts.fail = nil
	return target, opts, x
}

// replace replaces a file by one with the same bytes.
func replace(t *testing.T, p string) {
	t.Helper()
	data, err := os.ReadFile(p)
	must(t, err)
	must(t, os.WriteFile(p+".tmp", data, 0o600))
	must(t, os.Rename(p+".tmp", p))
}

// S8: a mixture in place is remembered, whatever is written to it, until a restore is done.
func TestInPlaceMixtureIsRemembered(t *testing.T) {
	w := newWorld(t)
	target, opts, x := mixture(t, w)
	_, y := w.source("src2", literal{"a": noise(11, 1000), "b": noise(12, 1000), "c": noise(13, 1000)})
	w.packs.fail = func(int, string) error { return errors.New("the store is away") }
	if _, err := w.restore(y, target, opts); err == nil {
		t.Fatal("restored without a store")
	}
	if err := Unfinished(target); !errors.Is(err, ErrUnfinished) {
		t.Errorf("after a restore that failed: %v", err)
	}
	w.packs.fail = nil
	_, err := w.restore(x, target, opts)
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

// S7: a plan that cannot be completed is remembered until another takes its place, whenever
// the restore that makes it dies.
func TestGivenUpPlanIsRemembered(t *testing.T) {
	a := newArena(t)
	e := a.errand("kv", "meta")
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
	for at := int64(1); at < 40; at++ {
		e.KillAt = at
		if !e.send(t) {
			break
		}
		if a.state("kv") != a.state("meta") && Unfinished(a.path("out/kv")) == nil && Unfinished(a.path("out/meta")) == nil {
			t.Fatalf("killed at %d: kv %s meta %s, both say finished", at, a.state("kv"), a.state("meta"))
		}
	}
}

// S7: a restore of one of several stores does not drop the plan of all.
func TestInPlacePartOfSeveral(t *testing.T) {
	a := newArena(t)
	a.inPlace = true
	e := a.errand("kv", "meta")
	e.InPlace = true
	found := false
	for e.KillAt = 1; e.KillAt < 400; e.KillAt++ {
		a.reset()
		if !e.send(t) {
			break
		}
		if a.state("kv") == "new" && a.state("meta") == "old" && Unfinished(a.path("out/kv")) != nil {
			found = true
			break
		}
	}
	if !found {
		t.Fatal("never between the stores")
	}
	names, err := os.ReadDir(a.path("out/kv"))
	must(t, err)
	i := slices.IndexFunc(names, func(d os.DirEntry) bool { return d.Type().IsRegular() })
	replace(t, a.path("out/kv/"+names[i].Name()))
	one := a.errand("kv")
	one.InPlace = true
	err = one.do(t)
	if a.state("meta") == "old" && !errors.Is(Unfinished(a.path("out/meta")), ErrUnfinished) {
		t.Errorf("restore of one (%v) has dropped the plan of both", err)
	}
}
