package raftlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	pb "go.etcd.io/raft/v3/raftpb"
)

// scanned is a WAL that was read without changing it.
type scanned struct {
	dir      string
	metadata []byte
	names    []string // the segments that count, oldest first
	fold     *Folder
	crc      uint32            // running checksum at the end of the segment before
	at       map[uint64]uint64 // the segment that holds the record of a snapshot

	replay *Replay
	end    int64 // of the last complete group in the last segment
	torn   error // why something after end has to be cut off, nil if nothing has
}

// scan reads all segments. The library could do it, but it neither tells an installed snapshot from an own one, nor
// an unfinished group from a finished one, nor a torn end from damage that only looks like one.
func scan(dir string, metadata []byte) (*scanned, error) {
	names, err := segments(dir)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, &DamageError{File: dir, Err: errors.New("there are files, but no segment of a log")}
	}
	names = unbroken(names)
	s := &scanned{
		dir: dir, metadata: metadata, names: names,
		fold: NewFolder(segmentOf(names[0]).index), at: map[uint64]uint64{},
	}
	for k, name := range names {
		if err := s.read(name, k == len(names)-1); err != nil {
			return nil, err
		}
	}
	if s.replay, err = s.fold.Replay(); err != nil {
		return nil, &DamageError{File: dir, Err: err}
	}
	s.replay.Metadata = metadata

	return s, nil
}

// unbroken gives the newest segments that follow each other. A crash amid a removal may leave others, whose removal
// the file system did in an order of its own.
func unbroken(names []string) []string {
	k := len(names) - 1
	for k > 0 && segmentOf(names[k-1]).seq+1 == segmentOf(names[k]).seq {
		k--
	}

	return names[k:]
}

// read takes the records of one segment.
func (s *scanned) read(name string, last bool) error {
	f, err := os.Open(filepath.Join(s.dir, name))
	if err != nil {
		return err
	}
	defer f.Close()

	d := wal.NewDecoder(fileutil.NewFileReader(f))
	rec, head := &walpb.Record{}, header(0)
	var end int64
	for {
		at := d.LastOffset()
		if err := d.Decode(rec); err != nil {
			s.crc = d.LastCRC()
			return s.finish(f, head, last, at, end, err)
		}
		if err := head.check(rec); err != nil {
			return &DamageError{File: f.Name(), Offset: at, Err: err}
		}
		if err := s.take(rec, d, segmentOf(name).seq); err != nil {
			if errors.Is(err, ErrOtherMember) {
				return err
			}
			return &DamageError{File: f.Name(), Offset: at, Err: err}
		}
		if s.fold.Complete() {
			end = d.LastOffset()
		}
	}
}

// header checks that a segment begins with a checksum and the metadata.
type header int

const wholeHeader header = 2

func (h *header) check(rec *walpb.Record) error {
	want := [...]int64{wal.CrcType, wal.MetadataType}
	if *h == wholeHeader {
		return nil
	}
	if rec.GetType() != want[*h] {
		return fmt.Errorf("record of type %d in the head of a segment", rec.GetType())
	}
	*h++

	return nil
}

// take gives one record to the folder.
func (s *scanned) take(rec *walpb.Record, d wal.Decoder, seq uint64) error {
	switch rec.GetType() {
	case wal.CrcType:
		if s.crc != 0 && rec.Validate(s.crc) != nil {
			return errors.New("does not continue the segment before it")
		}
		d.UpdateCRC(rec.GetCrc())
		return nil
	case wal.MetadataType:
		if !bytes.Equal(rec.Data, s.metadata) {
			return fmt.Errorf("%w: %q, this one is %q", ErrOtherMember, rec.Data, s.metadata)
		}
		return nil
	case wal.EntryType:
		e := &pb.Entry{}
		return errors.Join(proto.Unmarshal(rec.Data, e), s.fold.Entry(e))
	case wal.StateType:
		hs := &pb.HardState{}
		return errors.Join(proto.Unmarshal(rec.Data, hs), s.fold.State(hs))
	case wal.SnapshotType:
		m := &walpb.Snapshot{}
		err := errors.Join(proto.Unmarshal(rec.Data, m), s.fold.Snapshot(fromWAL(m)))
		if _, known := s.at[m.GetIndex()]; !known {
			s.at[m.GetIndex()] = seq
		}
		return err
	}

	return fmt.Errorf("unknown type of record %d", rec.GetType())
}

// finish judges how a segment ended: the decoder stopped at byte at for the given reason, the last complete group
// ended at end.
func (s *scanned) finish(f *os.File, head header, last bool, at, end int64, reason error) error {
	damage := func(err error) error { return &DamageError{File: f.Name(), Offset: at, Err: err} }
	clean, torn := errors.Is(reason, io.EOF), errors.Is(reason, io.ErrUnexpectedEOF)
	switch {
	case head != wholeHeader:
		return damage(errors.New("the head of the segment is missing"))
	case !clean && !torn:
		return damage(reason)
	case !last && !clean:
		return damage(reason)
	case !last:
		return nil // what is missing here the checksum of the next segment tells
	}

	rest, err := remainder(f, at)
	if err != nil {
		return err
	}
	if provesMore(rest) {
		return damage(fmt.Errorf("the record is not readable, but what was written after it is: %w", reason))
	}
	s.end = end
	if torn || len(rest) > 0 || !s.fold.Complete() {
		s.torn = reason
	}

	return nil
}

// remainder reads a segment from a place on; nothing if there are only the zeros that the space was reserved with.
func remainder(f *os.File, at int64) ([]byte, error) {
	block := make([]byte, 64<<10)
	for off := at; ; {
		n, err := f.ReadAt(block, off)
		off += int64(n)
		if len(bytes.TrimRight(block[:n], "\x00")) > 0 {
			break
		}
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	rest := make([]byte, info.Size()-at)
	_, err = io.ReadFull(io.NewSectionReader(f, at, int64(len(rest))), rest)

	return rest, err
}

// repair cuts off what a crash left unfinished.
func (s *scanned) repair(l *slog.Logger) error {
	if s.torn == nil {
		return nil
	}
	path := filepath.Join(s.dir, s.names[len(s.names)-1])
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if l != nil {
		l.Warn("raft log: an unfinished write at the end is cut off", "file", path, "offset", s.end, "reason", s.torn)
	}

	return errors.Join(clearFrom(f, s.end), f.Close())
}

// clearFrom makes everything from end on zeros, reserved again. Where records end, zeros or the file must begin: a
// file that ends within eight bytes of it would look torn again.
func clearFrom(f *os.File, end int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := f.Truncate(end); err != nil {
		return err
	}
	size := max(info.Size()+7, segmentBytes) &^ 7
	if err := fileutil.Preallocate(f, size, true); err != nil {
		return err
	}

	return f.Sync()
}
