package walsim_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	pb "go.etcd.io/raft/v3/raftpb"
)

// That a Disk behaves as files do is tested beside the WAL on disk; this is about what only a Disk does.

func save(t *testing.T, w raftlog.WAL, i, commit uint64, sync bool) {
	t.Helper()
	hs := &pb.HardState{Term: new(uint64(1)), Commit: new(commit)}
	var ents []*pb.Entry
	if i > 0 {
		ents = append(ents, &pb.Entry{Index: new(i), Term: new(uint64(1)), Data: make([]byte, 100)})
	}
	if err := w.Save(hs, ents, sync); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, d *walsim.Disk) (raftlog.WAL, *raftlog.Replay) {
	t.Helper()
	w, r, err := d.Open(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w, r
}

func TestCrashLosesWhatWasNotSynced(t *testing.T) {
	commits := map[uint64]bool{}
	for seed := range uint64(30) {
		d := walsim.New(&walsim.Options{Seed: seed})
		w, _ := open(t, d)
		save(t, w, 1, 0, true)
		save(t, w, 2, 0, true)
		save(t, w, 0, 1, false)
		save(t, w, 0, 2, false)
		d.Crash()
		_, r := open(t, d)
		if len(r.Entries) != 2 {
			t.Fatalf("seed %d: %d entries", seed, len(r.Entries))
		}
		commits[r.HardState.GetCommit()] = true
	}
	if len(commits) != 3 {
		t.Errorf("crashes left the commits %v, want all of 0, 1 and 2", commits)
	}
}

func TestFailedSyncMayLoseEverything(t *testing.T) {
	kept := map[int]bool{}
	for seed := range uint64(30) {
		d := walsim.New(&walsim.Options{Seed: seed})
		w, _ := open(t, d)
		save(t, w, 1, 0, true)
		boom := errors.New("boom")
		d.Fail(walsim.OpSync, 0, boom)
		hs := &pb.HardState{Term: new(uint64(1))}
		err := w.Save(hs, []*pb.Entry{{Index: new(uint64(2)), Term: new(uint64(1))}}, true)
		if !errors.Is(err, boom) {
			t.Fatalf("save: %v", err)
		}
		if err := w.Sync(); err == nil {
			t.Fatal("a WAL that failed goes on")
		}
		d.Crash()
		_, r := open(t, d)
		kept[len(r.Entries)] = true
	}
	if !kept[1] || !kept[2] {
		t.Errorf("entries kept: %v, want both old and new", kept)
	}
}

func TestProcesses(t *testing.T) {
	d := walsim.New(nil)
	if _, _, err := d.Open(&raftlog.WALOptions{MustExist: true}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("empty disk: %v", err)
	}
	w, _ := open(t, d)
	if _, _, err := d.Open(nil); !errors.Is(err, raftlog.ErrLocked) {
		t.Errorf("second process: %v", err)
	}
	d.Crash()
	if err := w.Sync(); err == nil {
		t.Error("a dead process writes")
	}
	if _, _, err := d.Open(&raftlog.WALOptions{Metadata: []byte("x")}); !errors.Is(err, raftlog.ErrOtherMember) {
		t.Errorf("other member: %v", err)
	}
	boom := errors.New("boom")
	d.Fail(walsim.OpOpen, 1, boom)
	w, _ = open(t, d)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.Open(nil); !errors.Is(err, boom) {
		t.Errorf("second opening: %v", err)
	}
}

// TestSegmentsByRoom: a disk that ends segments by itself frees them, too.
func TestSegmentsByRoom(t *testing.T) {
	d := walsim.New(&walsim.Options{SegmentBytes: 1000})
	w, _ := open(t, d)
	for i := uint64(1); i <= 100; i++ {
		save(t, w, i, i, true)
	}
	before, bytes := d.Segments(), d.Bytes()
	if err := w.SaveSnapshot(&pb.SnapshotMetadata{Index: new(uint64(60)), Term: new(uint64(1))}); err != nil {
		t.Fatal(err)
	}
	if err := w.Release(60); err != nil {
		t.Fatal(err)
	}
	if d.Segments() >= before || d.Bytes() >= bytes {
		t.Errorf("%d segments of %d bytes, were %d of %d", d.Segments(), d.Bytes(), before, bytes)
	}
	d.Crash()
	_, r := open(t, d)
	if r.Base.GetIndex() != 60 || len(r.Entries) != 40 {
		t.Errorf("opened at %d with %d entries", r.Base.GetIndex(), len(r.Entries))
	}
}
