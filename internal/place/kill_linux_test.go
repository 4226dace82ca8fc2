package place

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// arena is where child processes restore and are killed.
type arena struct {
	*world
	src [2]string // of the stores kv and meta, the new state
	old map[string]map[string]string
	new map[string]map[string]string

	inPlace bool
}

// newArena makes a source for two stores; every target starts as old says.
func newArena(t testing.TB) *arena {
	a := &arena{world: newWorld(t).inMemory(), old: map[string]map[string]string{}, new: map[string]map[string]string{}}
	a.src[0] = build(t, a.path("src/kv"), small())
	a.src[1] = build(t, a.path("src/meta"), literal{"": dir(0o700).at(1, 1), "m": noise(5, 20_000), "ro": dir(0o500), "ro/x": text("x")})
	a.new["kv"], a.new["meta"] = listing(t, a.src[0]), listing(t, a.src[1])
	return a
}

// reset makes both targets old again.
func (a *arena) reset() {
	a.Helper()
	must(a, os.RemoveAll(a.path("out")))
	for name, l := range map[string]literal{"kv": other(), "meta": {"m": noise(6, 20_000), "k": text("k")}} {
		a.old[name] = listing(a, build(a, a.path("out/"+name), l))
	}
}

func (a *arena) errand(names ...string) errand {
	var e errand
	for _, n := range names {
		e.Stores = append(e.Stores, errandStore{Name: n, Src: a.path("src/" + n), Target: a.path("out/" + n)})
	}
	return e
}

func (a *arena) state(name string) string {
	a.Helper()
	return stateOf(a, a.path("out/"+name), a.inPlace, a.old[name], a.new[name])
}

// sweep kills the errand before every change it makes, and hands over to check. It returns
// how often it killed.
func (a *arena) sweep(e errand, check func(at int64)) int64 {
	a.Helper()
	for at := int64(1); ; at++ {
		a.reset()
		before, err := os.ReadFile(a.path("out/kv/h"))
		must(a, err)
		held, err := os.Open(a.path("out/kv/h"))
		must(a, err)
		defer held.Close()
		e.KillAt = at
		if !e.send(a) {
			return at - 1
		}
		check(at)
		e.KillAt = 0
		must(a, e.do(a))
		for _, s := range e.Stores {
			if got := a.state(s.Name); got != "new" {
				a.Fatalf("killed before change %d, run again: %s is %q", at, s.Name, got)
			}
		}
		// Who has a file of the old tree open keeps its bytes, whatever is resumed (F27).
		if now, err := io.ReadAll(held); err != nil || !bytes.Equal(before, now) {
			a.Fatalf("killed before change %d, run again: an open file of the old tree changed (%v)", at, err)
		}
		only(a, a.path("out"), "kv", "meta")
	}
}

// I7, I9: killed at any moment, a target is the whole old tree or the whole new one, and
// running it again completes it.
func TestKillOneStore(t *testing.T) {
	a := newArena(t)
	n := a.sweep(a.errand("kv"), func(at int64) {
		if got := a.state("kv"); got == "" {
			t.Fatalf("killed before change %d: a mixture", at)
		}
		must(t, Unfinished(a.path("out/kv")))
	})
	if n < 50 {
		t.Errorf("only %d kills", n)
	}
}

// S7: killed between two stores, each is old or new as a whole; exactly then each of them
// tells that the restore is unfinished, and a later restore of only one of them first
// brings the other to the checkpoint.
func TestKillBetweenStores(t *testing.T) {
	a := newArena(t)
	mixed := 0
	a.sweep(a.errand("kv", "meta"), func(at int64) {
		kv, meta := a.state("kv"), a.state("meta")
		if kv == "" || meta == "" {
			t.Fatalf("killed before change %d: %q, %q", at, kv, meta)
		}
		for _, name := range []string{"kv", "meta"} {
			if err := Unfinished(a.path("out/" + name)); (err != nil) != (kv != meta) || err != nil && !errors.Is(err, ErrUnfinished) {
				t.Fatalf("killed before change %d: kv is %s, meta is %s; %s: %v", at, kv, meta, name, err)
			}
		}
		if kv == meta {
			return
		}
		mixed++
		one := a.errand([]string{"kv", "meta"}[mixed%2])
		if one.send(t); a.state("kv") != "new" || a.state("meta") != "new" {
			t.Fatalf("killed before change %d: restoring %s left %q, %q", at, one.Stores[0].Name, a.state("kv"), a.state("meta"))
		}
		only(t, a.path("out"), "kv", "meta")
	})
	if mixed == 0 {
		t.Error("never killed between the stores")
	}
}

// S8: in place a kill may leave a mixture, but then it is known, and completed.
func TestKillInPlace(t *testing.T) {
	a := newArena(t)
	e := a.errand("kv")
	e.InPlace, a.inPlace = true, true
	mixed := 0
	a.sweep(e, func(at int64) {
		if state := a.state("kv"); state == "" {
			mixed++
			if err := Unfinished(a.path("out/kv")); !errors.Is(err, ErrUnfinished) {
				t.Fatalf("killed before change %d: a mixture, and %v", at, err)
			}
		}
	})
	if mixed == 0 {
		t.Error("never a mixture: the kill comes at the wrong moments")
	}
}

// Kills in a row, to and fro between two states, as in an unlucky night: always one of the
// two, whatever the stagings have piled up to.
func TestKillsInARow(t *testing.T) {
	a := newArena(t)
	a.reset()
	must(t, os.Rename(a.path("out/kv"), a.path("src/old")))
	build(t, a.path("out/kv"), other())
	a.old["kv"] = listing(t, a.path("src/old"))
	must(t, os.RemoveAll(a.path("out/kv")))
	must(t, errand{Stores: []errandStore{{"kv", a.path("src/old"), a.path("out/kv")}}}.do(t))
	for i := range int64(60) {
		e := a.errand("kv")
		if i%2 == 1 {
			e.Stores[0].Src = a.path("src/old")
		}
		e.KillAt = 1 + i*37%101
		e.send(t)
		if a.state("kv") == "" {
			t.Fatalf("kill %d, before change %d: a mixture", i, e.KillAt)
		}
	}
	if a.errand("kv").send(t); a.state("kv") != "new" {
		t.Fatal("the run without a kill did not complete it")
	}
	only(t, a.path("out"), "kv", "meta")
}

// A plain user restores read-only files and directories, and can replace them; killed at
// any moment too. Owners are left out.
func TestPlainUser(t *testing.T) {
	const nobody = 65534
	a := newArena(t)
	must(t, os.Chmod(filepath.Dir(a.dir), 0o711))
	must(t, os.RemoveAll(a.path("src")))
	l := small()
	l["b"].uid, l["b"].gid = 0, 0
	l[""] = dir(0o555).at(7, 7)
	l["d/e"] = text("e").perm(0o400)
	a.src[0] = build(t, a.path("src/kv"), l)
	giveAway(t, a.dir, nobody)
	a.new["kv"] = listing(t, a.src[0])
	e := a.errand("kv")
	e.Uid = nobody
	for at := int64(0); ; at++ {
		must(t, os.RemoveAll(a.path("out")))
		target := build(t, a.path("out/kv"), other())
		giveAway(t, a.path("out"), nobody)
		a.old["kv"] = listing(t, target)
		e.KillAt = at
		killed := e.send(t)
		if at > 0 && !killed {
			return
		}
		if state := a.plainState("kv"); state == "" || state == "old" && at == 0 {
			t.Fatalf("killed before change %d: %q", at, state)
		}
		e.KillAt = 0
		if e.send(t); a.state("kv") != "new" {
			t.Fatalf("killed before change %d, run again: %q", at, a.state("kv"))
		}
		only(t, a.path("out"), "kv")
	}
}

// plainState forgives the mode of the root, which a plain user has to loosen around the
// swap.
func (a *arena) plainState(name string) string {
	a.Helper()
	full := a.path("out/" + name)
	var st unix.Stat_t
	must(a, unix.Stat(full, &st))
	got := listing(a, full)["."]
	for _, m := range []map[string]string{a.old[name], a.new[name]} {
		was := m["."]
		m["."] = got
		defer func() { m["."] = was }()
	}
	return a.state(name)
}

// A plain user gets set-user-ID and set-group-ID back for what is its own only; in no case
// under its own name what was root's.
func TestPlainUserSetID(t *testing.T) {
	const nobody = 65534
	a := newArena(t)
	must(t, os.Chmod(filepath.Dir(a.dir), 0o711))
	must(t, os.RemoveAll(a.path("src")))
	a.src[0] = build(t, a.path("src/kv"), literal{
		"theirs": text("t").perm(0o4755), "group": text("g").perm(0o2755).own(nobody, 0),
		"dir": dir(0o2755), "own": text("o").perm(0o6755).own(nobody, nobody)})
	must(t, os.MkdirAll(a.path("out"), 0o755))
	must(t, os.Chown(a.path("out"), nobody, nobody))
	e := a.errand("kv")
	e.Uid = nobody
	e.send(t)
	for name, mode := range map[string]uint32{"theirs": 0o755, "group": 0o755, "dir": 0o755, "own": 0o6755} {
		var st unix.Stat_t
		must(t, unix.Stat(a.path("out/kv/"+name), &st))
		if st.Mode&0o7777 != mode || st.Uid != nobody {
			t.Errorf("%s: mode %o of user %d, want %o of %d", name, st.Mode&0o7777, st.Uid, mode, nobody)
		}
	}
}

func giveAway(t testing.TB, dir string, id int) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		must(t, unix.Lstat(p, &st))
		must(t, os.Lchown(p, id, id))
		if !strings.HasPrefix(d.Type().String(), "L") {
			return unix.Chmod(p, st.Mode&0o7777)
		}
		return nil
	}))
}
