package raftnode_test

import (
	"context"
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

// TestLostLog: a member that ran must not begin with an empty log.
func TestLostLog(t *testing.T) {
	g := newGroup(t, 1, nil)
	m := g.members["m1"]
	g.put("a", "1")
	g.stop(m)
	if err := os.RemoveAll(filepath.Join(m.dir, "log")); err != nil {
		t.Fatal(err)
	}
	node, err := raftnode.New(raftnode.Options{Name: m.name, Dir: m.dir, URL: m.url(), InitialCluster: g.initial, Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Start(t.Context(), openKV); err == nil {
		t.Error("a member whose log is gone starts")
	}
	if err := node.Close(); err != nil {
		t.Error(err)
	}
}
