package raftlog_test

import (
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(childEnv) != "" {
		appendForever(os.Getenv(childEnv))
		return
	}
	if flag.Lookup("test.bench").Value.String() == "" {
		raftlog.SetSegmentBytes(smallSegment)
	}
	raft.SetLogger(&raft.DefaultLogger{Logger: log.New(io.Discard, "", 0)})
	goleak.VerifyTestMain(m)
}

// smallSegment lets tests fill segments; it must hold more than the head of one.
const smallSegment = 16 << 10

func entry(i, term uint64) *pb.Entry {
	return &pb.Entry{Index: new(i), Term: new(term), Type: pb.EntryNormal.Enum(), Data: fmt.Appendf(nil, "entry %d of term %d", i, term)}
}

// entries gives [lo, hi] of one term.
func entries(lo, hi, term uint64) (out []*pb.Entry) {
	for i := lo; i <= hi; i++ {
		out = append(out, entry(i, term))
	}
	return out
}

// heavy gives [lo, hi] with bytes each.
func heavy(lo, hi, term uint64, bytes int) []*pb.Entry {
	out := entries(lo, hi, term)
	for _, e := range out {
		data := make([]byte, bytes)
		for k := range data {
			data[k] = byte(1 + (uint64(k)*7+e.GetIndex())%255)
		}
		e.Data = data
	}
	return out
}

func state(term, commit uint64) *pb.HardState {
	return &pb.HardState{Term: new(term), Vote: new(uint64(1)), Commit: new(commit)}
}

func meta(i, term uint64, voters ...uint64) *pb.SnapshotMetadata {
	if len(voters) == 0 {
		voters = []uint64{1, 2, 3}
	}
	return &pb.SnapshotMetadata{Index: new(i), Term: new(term), ConfState: &pb.ConfState{Voters: voters}}
}

// first is what the tests' groups begin with.
func first() *raftlog.WALOptions {
	return &raftlog.WALOptions{Metadata: []byte("member 1"), First: meta(1, 1)}
}

// opener opens a WAL that outlives the process, in memory or on disk.
type opener func() (raftlog.WAL, *raftlog.Replay, error)

// onBoth runs a test over the WAL on disk and the one in memory.
func onBoth(t *testing.T, opts *raftlog.WALOptions, test func(t *testing.T, open opener)) {
	t.Run("disk", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "log")
		test(t, func() (raftlog.WAL, *raftlog.Replay, error) { return raftlog.OpenWAL(dir, opts) })
	})
	t.Run("sim", func(t *testing.T) {
		d := walsim.New(&walsim.Options{SegmentBytes: smallSegment})
		test(t, func() (raftlog.WAL, *raftlog.Replay, error) { return d.Open(opts) })
	})
}

func mustOpen(t testing.TB, open opener) *raftlog.Log {
	t.Helper()
	w, r, err := open()
	if err != nil {
		t.Fatal(err)
	}
	l := raftlog.New(w, r)
	t.Cleanup(func() { must(t, l.Close()) })
	return l
}

func reopen(t testing.TB, l *raftlog.Log, open opener) *raftlog.Log {
	t.Helper()
	must(t, l.Close())
	return mustOpen(t, open)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal(t testing.TB, what string, got, want any) {
	t.Helper()
	if a, ok := got.([]*pb.Entry); ok {
		if b, ok := want.([]*pb.Entry); ok && sameEntries(a, b) {
			return // cmp is slow on many messages
		}
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

func sameEntries(a, b []*pb.Entry) bool {
	return slices.EqualFunc(a, b, func(x, y *pb.Entry) bool { return x == y || proto.Equal(x, y) })
}

// span gives the first and the last index.
func span(l *raftlog.Log) [2]uint64 {
	lo, _ := l.FirstIndex()
	hi, _ := l.LastIndex()
	return [2]uint64{lo, hi}
}

// all gives every entry of the log.
func all(t testing.TB, l *raftlog.Log) []*pb.Entry {
	t.Helper()
	s := span(l)
	if s[0] > s[1] {
		return nil
	}
	got, err := l.Entries(s[0], s[1]+1, 1<<62)
	must(t, err)
	return got
}
