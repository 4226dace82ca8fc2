package raftnode_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

func short(o *raftnode.Options) { o.SnapshotEntries, o.TrailingEntries = 200, 50 }

// settled waits until all running members have a snapshot and nothing more to apply.
func (g *group) settled() {
	g.t.Helper()
	g.eventually("all have a recorded snapshot", func() bool {
		for _, m := range g.members {
			if m.node != nil && m.node.Status().Snapshot.Index == 0 {
				return false
			}
		}
		return true
	})
	g.level()
}

// TestAllRestart holds R2: what the state machine lost comes back from the snapshot of the
// newest record and the log above it, and conf changes in between are followed.
func TestAllRestart(t *testing.T) {
	g := newGroup(t, 3, short)
	g.fill("k", 1000)
	g.settled()
	g.fill("above", 30)
	g.level()
	want := g.leader().sm.pairs()
	for _, m := range g.members {
		g.stop(m)
	}
	var starting sync.WaitGroup
	for _, m := range g.members {
		starting.Go(func() { g.start(m, nil) })
	}
	starting.Wait()
	g.eventually("a leader after the restart", func() bool {
		for _, m := range g.members {
			if m.node != nil && m.node.Status().Role == protocol.Leader {
				return true
			}
		}
		return false
	})
	g.level()
	for _, m := range g.members {
		if diff := cmp.Diff(want, m.sm.pairs()); diff != "" {
			t.Errorf("%s lost something in the restart (-before +after):\n%s", m.name, diff)
		}
	}
}

// snapshotFiles returns the data files of a stopped member's snapshots.
func snapshotFiles(t *testing.T, m *testMember) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(m.dir, "snapshots", "*", "data", kvFile))
	if err != nil || len(files) == 0 {
		t.Fatalf("no snapshot files in %s: %v", m.dir, err)
	}
	return files
}

// TestDamagedSnapshotAtStart holds R2: the state is behind the newest record and the
// record's directory is damaged, so another one is fetched before Raft starts.
func TestDamagedSnapshotAtStart(t *testing.T) {
	for name, damage := range map[string]func(*testing.T, string){
		"flipped": func(t *testing.T, file string) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			data[len(data)/2] ^= 0x40
			if err := os.WriteFile(file, data, 0o644); err != nil {
				t.Fatal(err)
			}
		},
		"gone": func(t *testing.T, file string) {
			if err := os.RemoveAll(filepath.Dir(filepath.Dir(file))); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t, 3, short)
			g.fill("k", 1000)
			g.settled()
			f := g.follower()
			g.stop(f)
			for _, file := range snapshotFiles(t, f) {
				damage(t, file)
			}
			g.put("while", "away")
			g.start(f, nil)
			g.level()
			if diff := cmp.Diff(g.leader().sm.pairs(), f.sm.pairs()); diff != "" {
				t.Errorf("states differ (-leader +member):\n%s", diff)
			}
		})
	}
}

// TestWipedMember holds R11 and F35: a member whose disk was replaced must not come back
// under its old id.
func TestWipedMember(t *testing.T) {
	g := newGroup(t, 3, nil)
	g.put("a", "1")
	f := g.follower()
	g.stop(f)
	wiped := &testMember{name: f.name, dir: t.TempDir(), addr: f.addr, scheme: "http"}
	node, err := raftnode.New(raftnode.Options{
		Name: wiped.name, Dir: wiped.dir, URL: wiped.url(), InitialCluster: g.initial, Insecure: true, Logger: logger(f.name),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = node.Start(ctx, openKV)
	if err == nil || !strings.Contains(err.Error(), "add it anew") {
		t.Errorf("a wiped member starts: %v", err)
	}
	if err := node.Close(); err != nil {
		t.Error(err)
	}
	g.put("a", "2")
}

func TestStartWithoutAGroup(t *testing.T) {
	node, err := raftnode.New(raftnode.Options{Name: "m1", Dir: t.TempDir(), URL: "http://127.0.0.1:1", Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	err = node.Start(t.Context(), openKV)
	if err == nil || !strings.Contains(err.Error(), "initial cluster") {
		t.Errorf("start of an empty directory: %v", err)
	}
	if err := node.Close(); err != nil {
		t.Error(err)
	}
	if _, err := raftnode.New(raftnode.Options{Name: "m1"}); err == nil {
		t.Error("a member without a directory is opened")
	}
}

// startWithout starts a member of a group of one from a directory that it has run in and
// that lacks some files.
func startWithout(t *testing.T, names ...string) (*testMember, error) {
	t.Helper()
	g := newGroup(t, 1, nil)
	m := g.members["m1"]
	g.put("a", "1")
	g.stop(m)
	for _, name := range names {
		if err := os.RemoveAll(filepath.Join(m.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	node, err := raftnode.New(raftnode.Options{Name: m.name, Dir: m.dir, URL: m.url(), InitialCluster: g.initial, Insecure: true})
	if err != nil {
		return m, err
	}
	err = node.Start(t.Context(), openKV)
	if err := node.Close(); err != nil {
		t.Error(err)
	}
	return m, err
}

// TestLostLog: a member that ran must not begin with an empty log, also when the mark of that
// is lost too.
func TestLostLog(t *testing.T) {
	for _, names := range [][]string{{"log"}, {"log", "ran"}} {
		if _, err := startWithout(t, names...); err == nil || !strings.Contains(err.Error(), "the log of a member that ran before is gone") {
			t.Errorf("start without %v: %v", names, err)
		}
	}
}

// TestLostMark: the mark alone is no loss, and it is back after the next start.
func TestLostMark(t *testing.T) {
	m, err := startWithout(t, "ran")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(m.dir, "ran")); err != nil {
		t.Errorf("it is not written anew: %v", err)
	}
}

// TestLostPeers holds R11: a member that has forgotten the others does not start.
func TestLostPeers(t *testing.T) {
	for _, names := range [][]string{{"peers.json"}, {"peers.json", "ran"}} {
		if _, err := startWithout(t, names...); !errors.Is(err, raftnode.ErrCorrupt) || !strings.Contains(err.Error(), "peers.json is missing") {
			t.Errorf("start without %v: %v", names, err)
		}
	}
}
