package raftlog_test

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"google.golang.org/protobuf/proto"
)

// BenchmarkSave compares Save with the least that any log has to do: encode, checksum, one write into reserved
// space, one fdatasync. The two take turns, because the speed of a disk drifts.
func BenchmarkSave(b *testing.B) {
	for _, n := range []uint64{1, 64, 512} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			dir := b.TempDir()
			w, r, err := raftlog.OpenWAL(filepath.Join(dir, "log"), first())
			must(b, err)
			l := raftlog.New(w, r)
			plain := newPlainLog(b, filepath.Join(dir, "plain"))
			batch := heavy(2, 1+n, 1, 2048)
			b.SetBytes(int64(n) * 2048)
			var ours, least stopwatch
			next := uint64(2)
			for b.Loop() {
				for k, e := range batch {
					batch[k] = &pb.Entry{Index: new(next), Term: new(uint64(1)), Type: pb.EntryNormal.Enum(), Data: e.Data}
					next++
				}
				ours.time(func() { must(b, l.Save(state(1, next-2), batch, true)) })
				least.time(func() { must(b, plain.save(batch)) })
				if next%4096 < n { // what a member does with its log, so that the benchmark fits on a disk
					must(b, l.Record(meta(next-2, 1), next-2))
					must(b, l.Compact(next-2))
				}
			}
			b.ReportMetric(ours.median()/1e3, "log-µs")
			b.ReportMetric(least.median()/1e3, "plain-µs")
			b.ReportMetric(ours.median()/least.median(), "ratio-p50")
			b.ReportMetric(ours.at(0.99)/least.at(0.99), "ratio-p99")
			must(b, l.Close())
			must(b, plain.f.Close())
		})
	}
}

// BenchmarkSaveCPU is Save without a disk to wait for: what encoding and copying cost.
func BenchmarkSaveCPU(b *testing.B) {
	l := openOn(b, "/dev/shm")
	batch := heavy(2, 65, 1, 2048)
	b.SetBytes(64 * 2048)
	b.ReportAllocs()
	next := uint64(2)
	for b.Loop() {
		for k, e := range batch {
			batch[k] = &pb.Entry{Index: new(next), Term: new(uint64(1)), Type: pb.EntryNormal.Enum(), Data: e.Data}
			next++
		}
		must(b, l.Save(state(1, next-2), batch, true))
		if next%4096 < 64 {
			must(b, l.Record(meta(next-2, 1), next-2))
			must(b, l.Compact(next-2))
		}
	}
}

// BenchmarkOpen opens a log of 64 MiB.
func BenchmarkOpen(b *testing.B) {
	dir := filepath.Join(b.TempDir(), "log")
	w, r, err := raftlog.OpenWAL(dir, first())
	must(b, err)
	l := raftlog.New(w, r)
	for i := uint64(2); i < 32<<10; i += 512 {
		must(b, l.Save(state(1, i), heavy(i, i+511, 1, 2048), true))
	}
	must(b, l.Close())
	b.SetBytes(64 << 20)
	for b.Loop() {
		w, _, err := raftlog.OpenWAL(dir, first())
		must(b, err)
		must(b, w.Close())
	}
}

func openOn(b *testing.B, parent string) *raftlog.Log {
	dir, err := os.MkdirTemp(parent, "raftlog")
	must(b, err)
	w, r, err := raftlog.OpenWAL(filepath.Join(dir, "log"), first())
	must(b, err)
	l := raftlog.New(w, r)
	b.Cleanup(func() {
		must(b, l.Close())
		must(b, os.RemoveAll(dir))
	})
	return l
}

// plainLog appends frames to a file of reserved space and begins again at its end.
type plainLog struct {
	f   *os.File
	off int64
	buf []byte
}

func newPlainLog(b *testing.B, path string) *plainLog {
	f, err := os.Create(path)
	must(b, err)
	must(b, fileutil.Preallocate(f, raftlog.SegmentBytes, true))
	must(b, f.Sync())
	return &plainLog{f: f}
}

func (p *plainLog) save(ents []*pb.Entry) error {
	p.buf = p.buf[:0]
	for _, e := range ents {
		at := len(p.buf)
		p.buf = append(p.buf, make([]byte, 8)...)
		var err error
		if p.buf, err = (proto.MarshalOptions{}).MarshalAppend(p.buf, e); err != nil {
			return err
		}
		body := p.buf[at+8:]
		binary.LittleEndian.PutUint32(p.buf[at:], uint32(len(body)))
		binary.LittleEndian.PutUint32(p.buf[at+4:], crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
	}
	if p.off+int64(len(p.buf)) > raftlog.SegmentBytes {
		p.off = 0
	}
	if _, err := p.f.WriteAt(p.buf, p.off); err != nil {
		return err
	}
	p.off += int64(len(p.buf))
	return fileutil.Fdatasync(p.f)
}
