package raftlog_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	pb "go.etcd.io/raft/v3/raftpb"
)

// disk is a WAL in a directory, with what a crash or a bad disk can do to it.
type disk struct {
	t    testing.TB
	dir  string
	opts *raftlog.WALOptions
}

func newDisk(t testing.TB) *disk {
	return &disk{t: t, dir: filepath.Join(t.TempDir(), "log"), opts: first()}
}

func (d *disk) open() (raftlog.WAL, *raftlog.Replay, error) { return raftlog.OpenWAL(d.dir, d.opts) }

func (d *disk) log() *raftlog.Log { return mustOpen(d.t, d.open) }

// segments gives the paths of the segments.
func (d *disk) segments() (paths []string) {
	d.t.Helper()
	names, err := raftlog.Segments(d.dir)
	must(d.t, err)
	for _, n := range names {
		paths = append(paths, filepath.Join(d.dir, n))
	}
	return paths
}

func (d *disk) tail() string {
	s := d.segments()
	return s[len(s)-1]
}

// used gives how much of a segment is written, in whole records.
func (d *disk) used(path string) int64 {
	d.t.Helper()
	data, err := os.ReadFile(path)
	must(d.t, err)
	return int64(len(bytes.TrimRight(data, "\x00"))+7) / 8 * 8
}

// change edits a file.
func (d *disk) change(path string, edit func(data []byte) []byte) {
	d.t.Helper()
	data, err := os.ReadFile(path)
	must(d.t, err)
	must(d.t, os.WriteFile(path, edit(data), 0o600))
}

// clone copies the directory as it is, open or not.
func (d *disk) clone() *disk {
	d.t.Helper()
	c := newDisk(d.t)
	must(d.t, os.CopyFS(c.dir, os.DirFS(d.dir)))
	return c
}

func (d *disk) refused(what string) *raftlog.DamageError {
	d.t.Helper()
	before := d.contents()
	w, _, err := d.open()
	if err == nil {
		must(d.t, w.Close())
	}
	var damage *raftlog.DamageError
	if !errors.As(err, &damage) || !errors.Is(err, raftlog.ErrDamaged) || !errors.Is(err, sentinel.Corrupt) {
		d.t.Fatalf("%s: %v, want a DamageError", what, err)
	}
	if !strings.Contains(err.Error(), damage.File) || !strings.Contains(err.Error(), "remove it from the group") {
		d.t.Errorf("%s: the message does not say which file or what to do: %v", what, err)
	}
	equal(d.t, "files after a refusal", d.contents(), before)
	return damage
}

func (d *disk) contents() map[string]string {
	out := map[string]string{}
	for _, p := range d.segments() {
		data, err := os.ReadFile(p)
		must(d.t, err)
		out[p] = string(data)
	}
	return out
}

func TestCreateIsAtomic(t *testing.T) {
	for name, crash := range map[string]func(d *disk){
		"draft of the draft": func(d *disk) { must(t, os.MkdirAll(d.dir+".new.tmp", 0o700)) },
		"draft without first record": func(d *disk) {
			w, err := wal.Create(nil, d.dir+".new", d.opts.Metadata)
			must(t, err)
			must(t, w.Close())
		},
		"empty directory": func(d *disk) { must(t, os.MkdirAll(d.dir, 0o700)) },
	} {
		d := newDisk(t)
		crash(d)
		l := d.log()
		equal(t, name, l.Recorded(), meta(1, 1))
		left, err := filepath.Glob(d.dir + ".*")
		must(t, err)
		if len(left) > 0 {
			t.Errorf("%s: %v left", name, left)
		}
	}
}

// TestLostLogIsNotBegunAnew: a member that lost its log has lost its vote, and an empty one would give it again (F35).
func TestLostLogIsNotBegunAnew(t *testing.T) {
	d := newDisk(t)
	d.opts.MustExist = true
	for range 2 {
		if _, _, err := d.open(); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("open: %v", err)
		}
		must(t, os.MkdirAll(d.dir, 0o700))
	}
	must(t, os.WriteFile(filepath.Join(d.dir, "0.tmp"), nil, 0o600))
	if _, _, err := d.open(); !errors.Is(err, raftlog.ErrDamaged) {
		t.Fatalf("open without segments: %v", err)
	}
	if _, err := os.Stat(d.dir + ".new"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal("a draft was made")
	}
}

func TestMetadataAndLock(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	if _, _, err := d.open(); !errors.Is(err, raftlog.ErrLocked) {
		t.Fatalf("second process: %v", err)
	}
	must(t, l.Close())
	other := &raftlog.WALOptions{Metadata: []byte("member 2"), First: meta(1, 1)}
	if _, _, err := raftlog.OpenWAL(d.dir, other); !errors.Is(err, raftlog.ErrOtherMember) || errors.Is(err, raftlog.ErrDamaged) {
		t.Fatalf("other member: %v", err)
	}
	_, r, err := func() (io.Closer, *raftlog.Replay, error) {
		w, r, err := d.open()
		if err == nil {
			err = w.Close()
		}
		return w, r, err
	}()
	must(t, err)
	equal(t, "metadata", string(r.Metadata), "member 1")
}

// grown gives a disk with three saves of the given size and where the last one begins in the last segment.
func grown(t *testing.T, bytes int) (d *disk, start int64) {
	d = newDisk(t)
	l := d.log()
	must(t, l.Save(state(1, 1), heavy(2, 4, 1, bytes), true))
	must(t, l.Save(state(1, 4), heavy(5, 7, 1, bytes), true))
	start = d.used(d.tail())
	must(t, l.Save(state(1, 7), heavy(8, 10, 1, bytes), true))
	must(t, l.Close())
	return d, start
}

// TestTornTailIsCutOff ends the file within the last write, and writes on afterwards.
func TestTornTailIsCutOff(t *testing.T) {
	whole, start := grown(t, 300)
	end := whole.used(whole.tail())
	for at := start; at < end; at += 1 + (at-start)%13 {
		whole.endsAt(at, false)
	}
	for at := (start + 511) &^ 511; at < end; at += 512 {
		whole.endsAt(at, true)
	}
}

// endsAt opens a copy that ends at a byte, with zeros after it if the space was reserved.
func (d *disk) endsAt(at int64, reserved bool) {
	d.t.Helper()
	c := d.clone()
	c.change(c.tail(), func(data []byte) []byte {
		if reserved {
			clear(data[at:])
			return data
		}
		return data[:at]
	})
	l := c.log()
	equal(c.t, "entries", all(c.t, l), heavy(2, 7, 1, 300))
	equal(c.t, "hard state", l.HardState(), state(1, 4))
	must(c.t, l.Save(state(2, 7), entries(8, 9, 2), true))
	l = reopen(c.t, l, c.open)
	equal(c.t, "entries", all(c.t, l), append(heavy(2, 7, 1, 300), entries(8, 9, 2)...))
	must(c.t, l.Close())
}

// TestHoleInTheLastWrite: sectors reach the disk in any order. One of the last write is missing, later ones came.
func TestHoleInTheLastWrite(t *testing.T) {
	whole, start := grown(t, 1500)
	end := whole.used(whole.tail())
	for at := (start + 511) / 512 * 512; at+512 <= end; at += 512 {
		d := whole.clone()
		d.change(d.tail(), func(data []byte) []byte {
			clear(data[at : at+512])
			return data
		})
		l := d.log()
		equal(t, "entries", all(t, l), heavy(2, 7, 1, 1500))
		must(t, l.Save(state(2, 7), entries(8, 9, 2), true))
		l = reopen(t, l, d.open)
		equal(t, "entries", all(t, l), append(heavy(2, 7, 1, 1500), entries(8, 9, 2)...))
		must(t, l.Close())
	}
}

// TestDamageIsRefused: what was synced and cannot be read is never taken for a torn tail.
func TestDamageIsRefused(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	for i := uint64(2); i < 60; i += 3 {
		must(t, l.Save(state(1, i), heavy(i, i+2, 1, 700), true))
	}
	must(t, l.Close())
	segments := d.segments()
	if len(segments) < 3 {
		t.Fatalf("%d segments", len(segments))
	}
	middle, last := filepath.Base(segments[1]), filepath.Base(segments[len(segments)-1])
	used := d.used(filepath.Join(d.dir, last))
	flip := func(at int64) func([]byte) []byte {
		return func(b []byte) []byte { b[at] ^= 0x20; return b }
	}
	for name, c := range map[string]struct {
		file string
		edit func([]byte) []byte
	}{
		"bit in the middle":             {middle, flip(3000)},
		"bit in the head":               {middle, flip(20)},
		"middle cut short":              {middle, func(b []byte) []byte { return b[:len(b)-700] }},
		"middle empty":                  {middle, func([]byte) []byte { return nil }},
		"bit in the last segment":       {last, flip(400)},
		"bit in the last record":        {last, flip(used - 60)},
		"length in the last segment":    {last, lengthened(used)},
		"sector of the last segment":    {last, func(b []byte) []byte { clear(b[512:1024]); return b }},
		"length gone, last segment":     {last, func(b []byte) []byte { clear(b[secondRecord(b):][:8]); return b }},
		"last segment without its head": {last, func(b []byte) []byte { clear(b[:512]); return b }},
		"last segment empty":            {last, func(b []byte) []byte { return b[:0] }},
	} {
		t.Run(name, func(t *testing.T) {
			c2 := d.clone()
			c2.t = t
			c2.change(filepath.Join(c2.dir, c.file), c.edit)
			damage := c2.refused(name)
			if base := filepath.Base(damage.File); base != c.file && c.file != middle {
				t.Errorf("blamed %s, damaged was %s", base, c.file)
			}
		})
	}
	t.Run("middle missing", func(t *testing.T) {
		c := d.clone()
		c.t = t
		must(t, os.Remove(filepath.Join(c.dir, middle)))
		c.refused("middle missing")
	})
}

// secondRecord gives the offset of the first record after the head (checksum, metadata, hard state).
func secondRecord(b []byte) (at int) {
	for range 3 {
		n := int(b[at]) | int(b[at+1])<<8
		at += 8 + (n+7)/8*8
	}
	return at
}

// lengthened makes a record in the last segment seem longer than the file.
func lengthened(int64) func([]byte) []byte {
	return func(b []byte) []byte {
		b[secondRecord(b)+3] ^= 0x7f
		return b
	}
}

// TestImpossibleLogsAreRefused: contents that no run of this package writes.
func TestImpossibleLogsAreRefused(t *testing.T) {
	hs := func(term, commit uint64) *pb.HardState { return state(term, commit) }
	for name, write := range map[string]func(w *wal.WAL) error{
		"commit above the entries": func(w *wal.WAL) error { return w.Save(hs(1, 50), entries(1, 10, 1)) },
		"gap": func(w *wal.WAL) error {
			return errors.Join(w.Save(hs(1, 5), entries(1, 10, 1)), w.Save(hs(1, 5), entries(12, 13, 1)))
		},
		"rewritten commit": func(w *wal.WAL) error {
			return errors.Join(w.Save(hs(1, 5), entries(1, 10, 1)), w.Save(hs(2, 5), entries(4, 13, 2)))
		},
		"term goes back": func(w *wal.WAL) error {
			return errors.Join(w.Save(hs(3, 5), entries(1, 10, 1)), w.Save(hs(2, 5), nil))
		},
		"record of another history": func(w *wal.WAL) error {
			return errors.Join(w.Save(hs(3, 5), entries(1, 10, 1)),
				w.SaveSnapshot(&walpb.Snapshot{Index: new(uint64(4)), Term: new(uint64(3)), ConfState: &pb.ConfState{}}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t)
			w, err := wal.Create(nil, d.dir, d.opts.Metadata)
			must(t, err)
			must(t, errors.Join(write(w), w.Close()))
			d.refused(name)
		})
	}
}

// TestUnfinishedInstall: a record above the saved commit does not count, and goes (F38).
func TestUnfinishedInstall(t *testing.T) {
	onBoth(t, first(), func(t *testing.T, open opener) {
		w, r, err := open()
		must(t, err)
		l := raftlog.New(w, r)
		must(t, l.Save(state(3, 10), entries(2, 20, 3), true))
		must(t, w.SaveSnapshot(meta(200, 3))) // and then the crash
		must(t, l.Close())
		for range 2 {
			l = mustOpen(t, open)
			equal(t, "recorded", l.Recorded(), meta(1, 1))
			equal(t, "entries", all(t, l), entries(2, 20, 3))
			must(t, l.Close())
		}
		// The group goes on by log past 200: the old record must not come to life.
		l = mustOpen(t, open)
		must(t, l.Save(state(3, 250), entries(21, 260, 3), true))
		l = reopen(t, l, open)
		equal(t, "recorded", l.Recorded(), meta(1, 1))
		equal(t, "span", span(l), [2]uint64{2, 260})
	})
}

// TestTrailingEntriesSurviveARestart: F38, R2. Segments go, but never what a restart needs to begin at the newest
// record below the compaction.
func TestTrailingEntriesSurviveARestart(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	most := 0
	for i := uint64(2); i <= 3000; i += 10 {
		must(t, l.Save(state(1, i+9), heavy(i, i+9, 1, 300), true))
		if i%200 == 2 && i > 200 {
			must(t, l.Record(meta(i, 1), i))
			must(t, l.Compact(i-150))
			most = max(most, len(d.segments()))
		}
	}
	if most > 10 { // 150 entries and an interval of 200 are seven segments of 16 KiB
		t.Errorf("%d segments were kept", most)
	}
	before := span(l)
	equal(t, "span", before, [2]uint64{2653, 3001})
	l = reopen(t, l, d.open)
	after := span(l)
	if after[0] > before[0] || after[1] != before[1] {
		t.Fatalf("log %v, after the restart %v", before, after)
	}
	equal(t, "recorded", l.Recorded(), meta(2802, 1))
	equal(t, "entries", all(t, l), heavy(after[0], after[1], 1, 300))
	term, err := l.Term(after[0] - 1)
	must(t, err)
	equal(t, "term before the first", term, uint64(1))
}

// TestHoleBelowTheLog: a crash amid a removal can bring back an older segment than one that stayed away.
func TestHoleBelowTheLog(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	must(t, l.Save(state(1, 1), heavy(2, 200, 1, 300), true))
	must(t, l.Save(state(1, 200), nil, true))
	oldest := d.segments()[0]
	kept, err := os.ReadFile(oldest)
	must(t, err)
	for i := uint64(201); i < 400; i += 10 {
		must(t, l.Save(state(1, i), heavy(i, i+9, 1, 300), true))
	}
	must(t, l.Record(meta(390, 1), 391))
	must(t, l.Compact(390))
	want := all(t, l)
	must(t, l.Close())
	rest := d.segments()
	if raftlog.SegmentSeq(filepath.Base(d.segments()[0])) < 2 {
		t.Fatal("nothing was released")
	}
	must(t, os.WriteFile(oldest, kept, 0o600))
	l = d.log()
	got := all(t, l)
	equal(t, "entries", got[len(got)-len(want):], want)
	equal(t, "segments", d.segments(), rest)
}

// TestSegmentBegunWithoutEntries: the library names a segment after the last entry it read. After an install there
// may be none, and the name would be too low.
func TestSegmentBegunWithoutEntries(t *testing.T) {
	d := newDisk(t)
	l := d.log()
	must(t, l.Save(state(1, 5), heavy(2, 40, 1, 300), true))
	must(t, l.ApplySnapshot(meta(500, 2), state(2, 500), nil))
	for k := range 1000 { // hard states alone fill several
		must(t, l.Save(state(3+uint64(k), 500), nil, true))
		if k%50 == 0 {
			l = reopen(t, l, d.open)
			equal(t, "recorded", l.Recorded(), meta(500, 2))
		}
	}
	if n := len(d.segments()); n < 3 {
		t.Fatalf("%d segments", n)
	}
	for _, s := range d.segments()[1:] {
		if i := raftlog.SegmentIndex(filepath.Base(s)); i != 501 {
			t.Errorf("a segment after the install is named after entry %d", i)
		}
	}
	must(t, l.Save(state(2000, 502), heavy(501, 510, 2000, 10), true))
	must(t, l.Record(meta(502, 2000), 502))
	must(t, l.Compact(502))
	l = reopen(t, l, d.open)
	equal(t, "recorded", l.Recorded(), meta(502, 2000))
	got := all(t, l)
	equal(t, "entries", got[len(got)-8:], heavy(503, 510, 2000, 10))
}

// TestForeignSegmentIsRefused: a segment of another log with the same entries in other words.
func TestForeignSegmentIsRefused(t *testing.T) {
	var disks [2]*disk
	for k := range disks {
		disks[k] = newDisk(t)
		l := disks[k].log()
		for i := uint64(2); i < 60; i += 3 {
			ents := heavy(i, i+2, 1, 700)
			ents[0].Data[0] = byte(k + 1)
			must(t, l.Save(state(1, i), ents, true))
		}
		must(t, l.Close())
	}
	from := disks[1].segments()[1]
	to := filepath.Join(disks[0].dir, filepath.Base(from))
	data, err := os.ReadFile(from)
	must(t, err)
	disks[0].change(to, func([]byte) []byte { return data })
	disks[0].refused("foreign segment")
}

// TestLeftoversOfReservedSpace: a crash leaves the file that was to be the next segment, with a head in it or worse.
// The library would write over its beginning only.
func TestLeftoversOfReservedSpace(t *testing.T) {
	d := newDisk(t)
	must(t, d.log().Close())
	for _, name := range []string{"0.tmp", "1.tmp"} {
		must(t, os.WriteFile(filepath.Join(d.dir, name), bytes.Repeat([]byte{16, 0, 0, 0, 0, 0, 0, 0}, smallSegment/8), 0o600))
	}
	l := d.log()
	must(t, l.Save(state(1, 1), heavy(2, 40, 1, 700), true))
	must(t, l.Save(state(1, 2), heavy(41, 80, 1, 700), true))
	must(t, l.Save(state(1, 2), heavy(81, 82, 1, 700), true))
	l = reopen(t, l, d.open)
	equal(t, "entries", all(t, l), heavy(2, 82, 1, 700))
}

// TestEntriesAreClosed: entries without a hard state are a whole group all the same.
func TestEntriesAreClosed(t *testing.T) {
	onBoth(t, first(), func(t *testing.T, open opener) {
		w, _, err := open()
		must(t, err)
		must(t, w.Save(nil, entries(2, 5, 1), true))
		must(t, w.Close())
		equal(t, "entries", all(t, mustOpen(t, open)), entries(2, 5, 1))
	})
}

func TestUnneededSegments(t *testing.T) {
	names := []string{ // the third begins where entries had been replaced
		"0000000000000004-0000000000000032.wal", "0000000000000005-0000000000000064.wal",
		"0000000000000006-0000000000000050.wal", "0000000000000007-0000000000000096.wal"}
	for _, c := range []struct {
		index, seq uint64
		want       int
	}{
		{0x31, 4, 0}, {0x32, 4, 0}, {0x40, 5, 0}, {0x55, 6, 0}, {0x63, 6, 0}, {0x64, 6, 2}, {0x95, 7, 2}, {0x96, 7, 3},
		{0x200, 7, 3}, // everything is below, the last one stays
		{0x200, 5, 1}, // never the one with the record
	} {
		if got := raftlog.Unneeded(names, c.index, c.seq); got != c.want {
			t.Errorf("record %#x in segment %d: %d unneeded, want %d", c.index, c.seq, got, c.want)
		}
	}
}

// TestLibraryLogsToSlog: what the library says is there for who asks, and never ends the process.
func TestLibraryLogsToSlog(t *testing.T) {
	d := newDisk(t)
	var out bytes.Buffer
	d.opts.Logger = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	l := d.log()
	for i := uint64(2); i < 60; i += 20 {
		must(t, l.Save(state(1, 1), heavy(i, i+19, 1, 700), true))
	}
	must(t, l.Close())
	if s := out.String(); !strings.Contains(s, "level=DEBUG") || !strings.Contains(s, "created a new WAL segment") || !strings.Contains(s, d.dir) {
		t.Errorf("logged:\n%s", s)
	}
}

func TestQuietUnlessAsked(t *testing.T) {
	whole, start := grown(t, 40)
	whole.change(whole.tail(), func(b []byte) []byte { return b[:start+20] })
	var out bytes.Buffer
	var syncs int
	var written int64
	whole.opts.Logger = slog.New(slog.NewTextHandler(&out, nil))
	whole.opts.ObserveSync = func(_ time.Duration, bytes int64) { syncs, written = syncs+1, written+bytes }
	l := whole.log()
	must(t, l.Save(state(1, 7), entries(8, 8, 1), true))
	if syncs == 0 || written == 0 {
		t.Errorf("%d syncs of %d bytes were observed", syncs, written)
	}
	if n := strings.Count(out.String(), "\n"); n != 1 || !strings.Contains(out.String(), "cut off") {
		t.Errorf("logged:\n%s", &out)
	}
}
