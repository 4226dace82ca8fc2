package raftlog_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog/walsim"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// simulated gives a log on a WAL in memory that begins at (1, 1).
func simulated(t *testing.T) (*raftlog.Log, *walsim.Disk) {
	d := walsim.New(nil)
	return mustOpen(t, func() (raftlog.WAL, *raftlog.Replay, error) { return d.Open(first()) }), d
}

func TestNewGroupBeginsAtItsFirstRecord(t *testing.T) {
	onBoth(t, first(), func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		for range 3 {
			equal(t, "span", span(l), [2]uint64{2, 1})
			hs, cs, err := l.InitialState()
			must(t, err)
			equal(t, "hard state", hs, &pb.HardState{Term: new(uint64(1)), Commit: new(uint64(1))})
			equal(t, "configuration", cs, &pb.ConfState{Voters: []uint64{1, 2, 3}})
			snap, err := l.Snapshot()
			must(t, err)
			equal(t, "snapshot", snap, &pb.Snapshot{Metadata: meta(1, 1)})
			term, err := l.Term(1)
			must(t, err)
			equal(t, "term", term, uint64(1))
			l = reopen(t, l, open)
		}
	})
}

// TestJoinedMemberBeginsWithNothing: R3, never an empty snapshot, never another error.
func TestJoinedMemberBeginsWithNothing(t *testing.T) {
	onBoth(t, &raftlog.WALOptions{Metadata: []byte("member 4")}, func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		for range 2 {
			equal(t, "span", span(l), [2]uint64{1, 0})
			hs, cs, err := l.InitialState()
			must(t, err)
			if hs != nil || cs == nil || len(cs.Voters) != 0 {
				t.Fatalf("initial state %v, %v", hs, cs)
			}
			if snap, err := l.Snapshot(); err != raft.ErrSnapshotTemporarilyUnavailable || snap != nil {
				t.Fatalf("snapshot %v, %v", snap, err)
			}
			if l.Recorded() != nil {
				t.Fatal("something is recorded")
			}
			l = reopen(t, l, open)
		}
		must(t, l.Save(&pb.HardState{Term: new(uint64(3)), Commit: new(uint64(4))}, entries(1, 9, 3), true))
		l = reopen(t, l, open)
		equal(t, "entries", all(t, l), entries(1, 9, 3))
		if _, err := l.Snapshot(); err != raft.ErrSnapshotTemporarilyUnavailable {
			t.Fatalf("snapshot: %v", err)
		}
	})
}

// TestStorageAgreesWithMemoryStorage runs the same random life through the library's own storage.
func TestStorageAgreesWithMemoryStorage(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		l, _ := simulated(t)
		m := raft.NewMemoryStorage()
		must(t, m.ApplySnapshot(&pb.Snapshot{Metadata: meta(1, 1)}))
		term, commit := uint64(1), uint64(1)
		for range 80 {
			last, _ := m.LastIndex()
			switch rng.IntN(4) {
			case 0, 1: // append, now and then in the place of an uncommitted tail
				from := last + 1
				if rng.IntN(3) == 0 && last > commit {
					from, term = commit+1+rng.Uint64N(last-commit), term+1
				}
				ents := heavy(from, from+rng.Uint64N(12), term, rng.IntN(50))
				must(t, m.Append(ents))
				last = ents[len(ents)-1].GetIndex()
				commit += rng.Uint64N(last - commit + 1)
				must(t, l.Save(state(term, commit), ents, true))
			case 2:
				i := l.Recorded().GetIndex() + 1
				if i > commit {
					continue
				}
				i += rng.Uint64N(commit - i + 1)
				own, err := m.Term(i)
				must(t, err)
				must(t, l.Record(meta(i, own), commit))
				_, err = m.CreateSnapshot(i, meta(i, own).ConfState, nil)
				must(t, err)
			case 3:
				c, lo := l.Recorded().GetIndex(), span(l)[0]
				if c < lo {
					continue
				}
				c = lo + rng.Uint64N(c-lo+1)
				must(t, l.Compact(c))
				must(t, m.Compact(c))
			}
			compareStorage(t, rng, l, m)
		}
		must(t, l.Close())
	}
}

func compareStorage(t *testing.T, rng *rand.Rand, l *raftlog.Log, m *raft.MemoryStorage) {
	t.Helper()
	lo, _ := m.FirstIndex()
	hi, _ := m.LastIndex()
	equal(t, "span", span(l), [2]uint64{lo, hi})
	for i := lo - 1; i <= hi+1; i++ {
		want, wantErr := m.Term(i)
		got, err := l.Term(i)
		if got != want || err != wantErr {
			t.Fatalf("term of %d: %d, %v; want %d, %v", i, got, err, want, wantErr)
		}
	}
	wantSnap, _ := m.Snapshot()
	wantSnap.Metadata.ConfState.AutoLeave = nil // filled in by MemoryStorage, and false
	snap, _ := l.Snapshot()
	equal(t, "snapshot", snap, wantSnap)
	if lo > hi {
		return
	}
	from := lo + rng.Uint64N(hi-lo+1)
	to := from + 1 + rng.Uint64N(hi-from+1)
	limit := rng.Uint64N(400)
	want, err := m.Entries(from, to, limit)
	must(t, err)
	got, err := l.Entries(from, to, limit)
	must(t, err)
	equal(t, fmt.Sprintf("entries [%d, %d) within %d bytes", from, to, limit), got, want)
	var bytes int64
	for _, e := range all(t, l) {
		bytes += int64(len(e.Data))
	}
	if l.Bytes() <= bytes || l.Bytes() > bytes+int64(hi-lo+1)*40 {
		t.Fatalf("%d bytes for a payload of %d", l.Bytes(), bytes)
	}
	if got := l.Bytes() - l.BytesAbove(from); got < 0 || l.BytesAbove(hi) != 0 || l.BytesAbove(hi+9) != 0 {
		t.Fatalf("bytes above %d: %d of %d", from, l.BytesAbove(from), l.Bytes())
	}
}

func TestEntriesOutsideOfTheLog(t *testing.T) {
	l, _ := simulated(t)
	must(t, l.Save(state(1, 20), entries(2, 20, 1), true))
	must(t, l.Record(meta(10, 1), 20))
	must(t, l.Compact(5))
	for _, c := range []struct {
		lo, hi uint64
		want   error
	}{{5, 7, raft.ErrCompacted}, {1, 3, raft.ErrCompacted}, {18, 22, raft.ErrUnavailable}, {21, 22, raft.ErrUnavailable}} {
		if _, err := l.Entries(c.lo, c.hi, 1000); err != c.want {
			t.Errorf("entries [%d, %d): %v, want %v", c.lo, c.hi, err, c.want)
		}
	}
	none, err := l.Entries(21, 21, 1000)
	must(t, err)
	equal(t, "empty range", len(none), 0)
	got, err := l.Entries(6, 21, 0)
	must(t, err)
	equal(t, "one entry at least", got, entries(6, 6, 1))
}

// TestReturnedSlicesStay: what Entries gave may be read while the log goes on, and appended to by its owner.
func TestReturnedSlicesStay(t *testing.T) {
	l, _ := simulated(t)
	must(t, l.Save(state(1, 5), entries(2, 20, 1), true))
	got, err := l.Entries(2, 21, 1<<40)
	must(t, err)
	part, err := l.Entries(2, 11, 1<<40)
	must(t, err)
	_ = append(part, entry(99, 9))
	must(t, l.Save(state(2, 5), entries(8, 30, 2), true))
	must(t, l.Record(meta(5, 1), 5))
	must(t, l.Compact(5))
	equal(t, "old slice", got, entries(2, 20, 1))
	equal(t, "log", all(t, l), append(entries(6, 7, 1), entries(8, 30, 2)...))
}

// TestRecordChecks: the conditions of R4 in their order (F37, F44).
func TestRecordChecks(t *testing.T) {
	l, _ := simulated(t)
	must(t, l.Save(state(4, 30), append(entries(2, 20, 1), entries(21, 40, 4)...), true))
	must(t, l.Record(meta(10, 1), 25))
	must(t, l.Compact(8))
	for _, c := range []struct {
		name    string
		m       *pb.SnapshotMetadata
		applied uint64
		want    error
	}{
		{"older", meta(9, 1), 25, raftlog.ErrOld},
		{"equal", meta(10, 1), 25, raftlog.ErrOld},
		{"older and forked", meta(10, 3), 25, raftlog.ErrOld},
		{"above applied", meta(26, 4), 25, raftlog.ErrAhead},
		{"above applied and forked", meta(26, 3), 25, raftlog.ErrAhead},
		{"above the commit", meta(31, 4), 99, raftlog.ErrAhead},
		{"above the log", meta(50, 4), 99, raftlog.ErrAhead},
		{"forked, lower term", meta(22, 1), 25, raftlog.ErrForked},
		{"forked, higher term", meta(15, 2), 25, raftlog.ErrForked},
	} {
		if err := l.Record(c.m, c.applied); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	equal(t, "recorded after refusals", l.Recorded(), meta(10, 1))
	must(t, l.Record(meta(22, 4, 1, 2, 3, 4), 25))
	snap, err := l.Snapshot()
	must(t, err)
	equal(t, "snapshot carries the given configuration", snap.Metadata, meta(22, 4, 1, 2, 3, 4))
	equal(t, "recording cuts nothing", span(l), [2]uint64{9, 40})
}

// TestForkedHistoryIsRefusedNotPreferred is the reference's requestSnapshotHigherTermLowerIndex turned round: there a
// snapshot (2, 1) wins over (1, 10). In one valid history the term never falls as the index grows, so that the two
// are of different groups of facts and one of them must not be served (F44).
func TestForkedHistoryIsRefusedNotPreferred(t *testing.T) {
	l, _ := simulated(t)
	must(t, l.Save(state(1, 10), entries(2, 10, 1), true))
	if err := l.Record(meta(5, 2), 10); !errors.Is(err, raftlog.ErrForked) {
		t.Fatalf("snapshot of another history: %v", err)
	}
	must(t, l.Record(meta(10, 1), 10))
	if err := l.Record(meta(1, 2), 10); !errors.Is(err, raftlog.ErrOld) {
		t.Fatalf("higher term, lower index: %v", err)
	}
}

// TestCompactNeverPassesTheRecord: I12, the log is never cut past a durable snapshot.
func TestCompactNeverPassesTheRecord(t *testing.T) {
	l, _ := simulated(t)
	must(t, l.Save(state(1, 30), entries(2, 30, 1), true))
	must(t, l.Record(meta(20, 1), 30))
	if err := l.Compact(21); !errors.Is(err, raftlog.ErrAhead) {
		t.Fatalf("compact past the record: %v", err)
	}
	equal(t, "span", span(l), [2]uint64{2, 30})
	must(t, l.Compact(20))
	equal(t, "span", span(l), [2]uint64{21, 30})
	must(t, l.Compact(12))
	equal(t, "span", span(l), [2]uint64{21, 30})
}

// TestApplySnapshotReplacesTheLog: R8.4, and X6: an uncommitted tail is no reason to refuse, it is dropped (F36).
func TestApplySnapshotReplacesTheLog(t *testing.T) {
	for _, to := range []uint64{30, 300, 900} {
		onBoth(t, first(), func(t *testing.T, open opener) {
			l := mustOpen(t, open)
			must(t, l.Save(state(3, 10), append(entries(2, 10, 1), entries(11, 500, 3)...), true))
			must(t, l.ApplySnapshot(meta(to, 5, 1, 2), state(5, to), nil))
			for range 2 {
				equal(t, "span", span(l), [2]uint64{to + 1, to})
				equal(t, "recorded", l.Recorded(), meta(to, 5, 1, 2))
				equal(t, "hard state", l.HardState(), state(5, to))
				l = reopen(t, l, open)
			}
			must(t, l.Save(state(5, to+2), entries(to+1, to+4, 5), true))
			l = reopen(t, l, open)
			equal(t, "entries", all(t, l), entries(to+1, to+4, 5))
			equal(t, "hard state", l.HardState(), state(5, to+2))
			if err := l.ApplySnapshot(meta(to+2, 5), state(5, to+2), nil); !errors.Is(err, raftlog.ErrOld) {
				t.Fatalf("snapshot at the commit: %v", err)
			}
		})
	}
}

func TestApplySnapshotWithEntries(t *testing.T) {
	onBoth(t, first(), func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		must(t, l.ApplySnapshot(meta(100, 5), state(5, 103), entries(101, 110, 5)))
		for range 2 {
			equal(t, "entries", all(t, l), entries(101, 110, 5))
			equal(t, "hard state", l.HardState(), state(5, 103))
			l = reopen(t, l, open)
		}
	})
}

// TestRaiseCommit: R2, F34 (a).
func TestRaiseCommit(t *testing.T) {
	onBoth(t, first(), func(t *testing.T, open opener) {
		l := mustOpen(t, open)
		must(t, l.Save(state(2, 3), entries(2, 12, 2), true))
		must(t, l.RaiseCommit(2))
		equal(t, "commit", l.HardState().GetCommit(), uint64(3))
		must(t, l.RaiseCommit(12))
		equal(t, "commit", l.HardState(), state(2, 12))
		l = reopen(t, l, open)
		equal(t, "commit", l.HardState(), state(2, 12))
		if err := l.RaiseCommit(13); !errors.Is(err, raftlog.ErrAhead) {
			t.Fatalf("applied above the log: %v", err)
		}
	})
}

// TestRaisedCommitIsDurable: the library does not sync a commit index by itself.
func TestRaisedCommitIsDurable(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	must(t, l.Save(state(2, 3), entries(2, 12, 2), true))
	must(t, l.RaiseCommit(12))
	equal(t, "commit in a copy of the files", d.clone().log().HardState(), state(2, 12))
}

func TestSaveRefusesWhatCannotFollow(t *testing.T) {
	for name, save := range map[string]func(l *raftlog.Log) error{
		"gap":              func(l *raftlog.Log) error { return l.Save(state(2, 5), entries(12, 14, 2), true) },
		"committed":        func(l *raftlog.Log) error { return l.Save(state(2, 5), entries(5, 14, 2), true) },
		"commit too high":  func(l *raftlog.Log) error { return l.Save(state(2, 11), nil, true) },
		"install too high": func(l *raftlog.Log) error { return l.ApplySnapshot(meta(50, 2), state(2, 51), nil) },
		"install of later": func(l *raftlog.Log) error { return l.ApplySnapshot(meta(50, 7), state(2, 50), nil) },
	} {
		l, _ := simulated(t)
		must(t, l.Save(state(2, 5), entries(2, 10, 2), true))
		err := save(l)
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		if again := l.Save(state(2, 6), nil, true); again != err { //nolint:errorlint // the very same one
			t.Errorf("%s: then %v", name, again)
		}
		equal(t, name, all(t, l), entries(2, 10, 2))
	}
}

// TestFirstFailureStays: a failed write or fsync stops the member, whatever would succeed later, and shows nothing.
func TestFirstFailureStays(t *testing.T) {
	cause := fmt.Errorf("disk: %w", syscall.EIO)
	for name, op := range map[string]walsim.Op{"save": walsim.OpSave, "sync": walsim.OpSync, "record": walsim.OpRecord, "release": walsim.OpRelease} {
		l, d := simulated(t)
		must(t, l.Save(state(1, 9), entries(2, 10, 1), true))
		d.Fail(op, 0, cause)
		var err error
		switch op {
		case walsim.OpRecord:
			err = l.Record(meta(5, 1), 9)
		case walsim.OpRelease:
			must(t, l.Record(meta(5, 1), 9))
			err = l.Compact(5)
		default:
			err = l.Save(state(1, 10), entries(11, 12, 1), true)
		}
		if !errors.Is(err, syscall.EIO) || l.Err() != err { //nolint:errorlint // the very same one
			t.Fatalf("%s: %v, then Err %v", name, err, l.Err())
		}
		for what, again := range map[string]error{
			"save": l.Save(state(1, 10), nil, false), "record": l.Record(meta(7, 1), 9), "compact": l.Compact(2),
			"apply": l.ApplySnapshot(meta(90, 1), state(1, 90), nil), "raise": l.RaiseCommit(10),
		} {
			if again != err { //nolint:errorlint // the very same one
				t.Errorf("%s after a failed %s: %v", what, name, again)
			}
		}
		if s := span(l); s[1] != 10 {
			t.Errorf("%s: entries of a failed save are visible: %v", name, s)
		}
	}
}

func TestNoSpace(t *testing.T) {
	l, d := simulated(t)
	must(t, l.Save(state(1, 9), entries(2, 10, 1), true))
	d.SetCapacity(d.Bytes() + 100)
	if err := l.Save(state(1, 9), heavy(11, 20, 1, 100), true); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("full disk: %v", err)
	}
	d.Crash()
	d.SetCapacity(0)
	l = mustOpen(t, func() (raftlog.WAL, *raftlog.Replay, error) { return d.Open(first()) })
	equal(t, "entries", all(t, l)[:9], entries(2, 10, 1))
}

func TestClosed(t *testing.T) {
	l, _ := simulated(t)
	must(t, l.Close())
	must(t, l.Close())
	if err := l.Save(state(1, 1), entries(2, 2, 1), true); !errors.Is(err, raftlog.ErrClosed) || !errors.Is(err, sentinel.Closed) {
		t.Fatalf("save after close: %v", err)
	}
}

// TestReadersBesideWriters is for the race detector: status and senders read while the log is written.
func TestReadersBesideWriters(t *testing.T) {
	l, _ := simulated(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				s := span(l)
				got, err := l.Entries(s[0], s[1]+1, 500)
				switch empty := s[1] < s[0]; { // it is, until the first save
				case err != nil: // compacted in between
				case empty != (len(got) == 0):
					t.Errorf("%d entries of %v", len(got), s)
				case !empty && got[0].GetIndex() != s[0]:
					t.Errorf("entries begin at %d, want %d", got[0].GetIndex(), s[0])
				}
				_, _ = l.Snapshot()
				_, _, _ = l.InitialState()
				_ = l.Bytes() + l.BytesAbove(s[0])
			}
		})
	}
	for i := uint64(2); i < 3000; i += 3 {
		must(t, l.Save(state(1, i), entries(i, i+2, 1), true))
		if i%50 == 0 {
			must(t, l.Record(meta(i-10, 1), i))
			must(t, l.Compact(i-20))
		}
	}
	close(stop)
	wg.Wait()
}
