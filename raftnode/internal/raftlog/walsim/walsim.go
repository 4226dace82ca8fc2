// Package walsim has a raftlog.WAL in memory whose disk can lose what was not synced, fail and fill up, all from a
// seed, so that a test or a simulation of a whole group can repeat what it saw.
//
// A Disk is what survives; the WALs that its Open gives are processes that write to it. Crash ends such a process
// the hard way: what was synced stays, and of the rest a beginning whose length comes from the seed. Open reads the
// disk as raftlog.OpenWAL reads a directory and comes to the same Replay.
//
// A Disk and its WALs may be used by one goroutine at a time.
package walsim

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"syscall"

	"google.golang.org/protobuf/proto"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// Op is an operation that can be made to fail.
type Op int

// The operations. A failed OpSave or OpRecord may have written anything from nothing to everything; a failed OpSync
// has, but a crash may still lose it.
const (
	OpOpen    Op = iota // opening
	OpSave              // the write of Save
	OpRecord            // the write of SaveSnapshot
	OpSync              // the sync of any of them, and Sync
	OpRelease           // Release
	ops
)

// Options describe a Disk. Nil and zero values are valid.
type Options struct {
	// Seed decides what a crash keeps.
	Seed uint64
	// SegmentBytes is the size at which a segment ends; zero leaves it to Cut.
	SegmentBytes int64
	// Capacity is what the disk can hold, zero for any amount. Beyond it writes fail with ENOSPC.
	Capacity int64
}

// Disk is what survives a crash.
type Disk struct {
	opts     Options
	rng      *rand.Rand
	metadata []byte
	segments []*segment // the last one is written to
	durable  int        // records of the last segment that are synced; all others are
	open     *handle
	faults   [ops]fault
}

// segment is a run of records that is released as a whole, named after the first entry it may hold.
type segment struct {
	seq, index uint64
	records    []record
}

// record is one of its fields.
type record struct {
	entry *pb.Entry
	state *pb.HardState
	snap  *pb.SnapshotMetadata
}

func (r record) bytes() int64 {
	const frame = 24
	switch {
	case r.entry != nil:
		return frame + int64(proto.Size(r.entry))
	case r.state != nil:
		return frame + int64(proto.Size(r.state))
	}

	return frame + int64(proto.Size(r.snap))
}

type fault struct {
	after int
	err   error
}

// New gives an empty disk.
func New(opts *Options) *Disk {
	if opts == nil {
		opts = &Options{}
	}

	return &Disk{opts: *opts, rng: rand.New(rand.NewPCG(opts.Seed, 0x57a1))}
}

// Fail makes an operation return err, after as many more of its kind have succeeded.
func (d *Disk) Fail(op Op, after int, err error) { d.faults[op] = fault{after: after, err: err} }

// SetCapacity changes what the disk can hold, zero for any amount.
func (d *Disk) SetCapacity(bytes int64) { d.opts.Capacity = bytes }

// Bytes gives the size of everything on the disk.
func (d *Disk) Bytes() (n int64) {
	for _, s := range d.segments {
		for _, r := range s.records {
			n += r.bytes()
		}
	}

	return n
}

// Segments gives the number of segments.
func (d *Disk) Segments() int { return len(d.segments) }

// Crash ends the process that writes, if there is one, and loses what it had not synced, but for a beginning.
func (d *Disk) Crash() {
	d.open = nil
	if len(d.segments) == 0 {
		return
	}
	s := d.segments[len(d.segments)-1]
	keep := d.durable + d.rng.IntN(len(s.records)-d.durable+1)
	s.records = s.records[:keep:keep]
	d.durable = keep
}

// Cut ends the segment that is written to and begins the next one.
func (d *Disk) Cut() {
	if d.open != nil {
		d.open.cut()
	}
}

// Open reads the disk and gives a process that writes to it. An empty disk is set up as opts say. Of opts, Metadata,
// First and MustExist count.
func (d *Disk) Open(opts *raftlog.WALOptions) (raftlog.WAL, *raftlog.Replay, error) {
	if opts == nil {
		opts = &raftlog.WALOptions{}
	}
	if err := d.injected(OpOpen); err != nil {
		return nil, nil, err
	}
	if d.open != nil {
		return nil, nil, raftlog.ErrLocked
	}
	if len(d.segments) == 0 {
		if opts.MustExist {
			return nil, nil, fs.ErrNotExist
		}
		d.create(opts)
	}
	if string(d.metadata) != string(opts.Metadata) {
		return nil, nil, raftlog.ErrOtherMember
	}
	replay, err := d.replay()
	if err != nil {
		return nil, nil, errors.Join(raftlog.ErrDamaged, err)
	}
	h := &handle{disk: d, last: d.lastRead(replay.Newest.GetIndex()), state: replay.HardState}
	d.open = h
	if replay.Newest != nil { // every opening writes it again
		if err := h.SaveSnapshot(replay.Newest); err != nil {
			d.Crash()
			return nil, nil, err
		}
	}

	return h, replay, nil
}

func (d *Disk) create(opts *raftlog.WALOptions) {
	s := &segment{records: []record{{snap: &pb.SnapshotMetadata{}}}}
	d.metadata, d.segments = append([]byte(nil), opts.Metadata...), []*segment{s}
	if m := opts.First; m.GetIndex() > 0 {
		hs := &pb.HardState{Term: new(m.GetTerm()), Commit: new(m.GetIndex())}
		s.records = append(s.records, record{snap: proto.Clone(m).(*pb.SnapshotMetadata)}, record{state: hs})
	}
	d.durable = len(s.records)
}

// replay folds all records and cuts an unfinished group off.
func (d *Disk) replay() (*raftlog.Replay, error) {
	f := raftlog.NewFolder(d.segments[0].index)
	for k, s := range d.segments {
		end := 0
		for i, r := range s.records {
			if err := r.fold(f); err != nil {
				return nil, err
			}
			if f.Complete() {
				end = i + 1
			}
		}
		if k == len(d.segments)-1 {
			s.records = s.records[:end:end]
			d.durable = end
		}
	}
	r, err := f.Replay()
	if err == nil {
		r.Metadata = append([]byte(nil), d.metadata...)
	}

	return r, err
}

func (r record) fold(f *raftlog.Folder) error {
	switch {
	case r.entry != nil:
		return f.Entry(r.entry)
	case r.state != nil:
		return f.State(r.state)
	}

	return f.Snapshot(r.snap)
}

// lastRead gives the index of the last entry in the segments that a reader from newest on takes, in the order of
// writing; the log library goes by it.
func (d *Disk) lastRead(newest uint64) (last uint64) {
	from := len(d.segments) - 1
	for from > 0 && d.segments[from].index > newest {
		from--
	}
	for _, s := range d.segments[from:] {
		for _, r := range s.records {
			if r.entry != nil {
				last = r.entry.GetIndex()
			}
		}
	}

	return last
}

// injected gives the error that op is to fail with now.
func (d *Disk) injected(op Op) error {
	f := &d.faults[op]
	if f.err == nil {
		return nil
	}
	if f.after > 0 {
		f.after--
		return nil
	}
	err := f.err
	f.err = nil

	return err
}

// handle is a process that writes.
type handle struct {
	disk   *Disk
	last   uint64 // of the entries and records written; the next segment is named after it
	state  *pb.HardState
	failed error
}

var _ raftlog.WAL = (*handle)(nil)

// Save implements raftlog.WAL.
func (h *handle) Save(hs *pb.HardState, ents []*pb.Entry, sync bool) error {
	if raft.IsEmptyHardState(hs) {
		hs = h.state
	}
	if raft.IsEmptyHardState(hs) && len(ents) > 0 {
		return errors.New("entries without a hard state")
	}
	prev := h.state
	if prev == nil {
		prev = &pb.HardState{}
	}
	var records []record
	for _, e := range ents {
		records = append(records, record{entry: e})
	}
	if !raft.IsEmptyHardState(hs) {
		hs = proto.Clone(hs).(*pb.HardState)
		records = append(records, record{state: hs})
		sync = sync || raft.MustSync(hs, prev, len(ents))
	}
	if err := h.write(OpSave, records, sync); err != nil {
		return err
	}
	h.state = hs
	if len(ents) > 0 {
		h.last = ents[len(ents)-1].GetIndex()
	}
	if limit := h.disk.opts.SegmentBytes; limit > 0 && h.disk.tailBytes() >= limit {
		h.cut()
	}

	return nil
}

// SaveSnapshot implements raftlog.WAL.
func (h *handle) SaveSnapshot(m *pb.SnapshotMetadata) error {
	m = proto.Clone(m).(*pb.SnapshotMetadata)
	if err := h.write(OpRecord, []record{{snap: m}}, true); err != nil {
		return err
	}
	h.last = max(h.last, m.GetIndex())

	return nil
}

// Sync implements raftlog.WAL.
func (h *handle) Sync() error { return h.write(OpSave, nil, true) }

// write appends records; a failure leaves as many of them as the seed says.
func (h *handle) write(op Op, records []record, sync bool) error {
	if err := h.usable(); err != nil {
		return err
	}
	d := h.disk
	tail := d.segments[len(d.segments)-1]
	err := d.full(records)
	if err == nil && len(records) > 0 {
		err = d.injected(op)
	}
	if err != nil {
		tail.records = append(tail.records, records[:d.rng.IntN(len(records)+1)]...)
		return h.fail(err)
	}
	tail.records = append(tail.records, records...)
	if !sync {
		return nil
	}
	if err := d.injected(OpSync); err != nil {
		return h.fail(err)
	}
	d.durable = len(tail.records)

	return nil
}

func (d *Disk) full(records []record) error {
	if d.opts.Capacity == 0 || len(records) == 0 {
		return nil
	}
	n := d.Bytes()
	for _, r := range records {
		n += r.bytes()
	}
	if n > d.opts.Capacity {
		return syscall.ENOSPC
	}

	return nil
}

func (d *Disk) tailBytes() (n int64) {
	for _, r := range d.segments[len(d.segments)-1].records {
		n += r.bytes()
	}

	return n
}

// cut ends a segment; its successor begins with the hard state.
func (h *handle) cut() {
	d := h.disk
	s := &segment{seq: d.segments[len(d.segments)-1].seq + 1, index: h.last + 1}
	if !raft.IsEmptyHardState(h.state) {
		s.records = append(s.records, record{state: h.state})
	}
	d.segments, d.durable = append(d.segments, s), len(s.records)
}

// Release implements raftlog.WAL.
func (h *handle) Release(index uint64) error {
	if err := h.usable(); err != nil {
		return err
	}
	d := h.disk
	if err := d.injected(OpRelease); err != nil {
		return h.fail(err)
	}
	holder := d.holder(index)
	if holder < 0 {
		return h.fail(fmt.Errorf("no record of snapshot %d", index))
	}
	drop := len(d.segments) - 1
	for k, s := range d.segments {
		if s.index > index {
			drop = k - 1
			break
		}
	}
	d.segments = d.segments[max(0, min(drop, holder)):]

	return nil
}

// holder finds the first segment with a record of the snapshot at index.
func (d *Disk) holder(index uint64) int {
	for k, s := range d.segments {
		for _, r := range s.records {
			if r.snap != nil && r.snap.GetIndex() == index {
				return k
			}
		}
	}

	return -1
}

// Close implements raftlog.WAL. A WAL in good order is synced.
func (h *handle) Close() error {
	d := h.disk
	if d.open != h {
		return nil
	}
	if h.failed == nil {
		d.durable = len(d.segments[len(d.segments)-1].records)
	}
	d.Crash()

	return nil
}

// usable refuses writers that a crash has ended, and those that go on after a failure, which none may.
func (h *handle) usable() error {
	switch {
	case h.disk.open != h:
		return errors.New("written to after a crash")
	case h.failed != nil:
		return fmt.Errorf("written to after a failure: %w", h.failed)
	}

	return nil
}

func (h *handle) fail(err error) error {
	h.failed = err
	return err
}
