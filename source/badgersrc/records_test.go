package badgersrc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"testing"

	"github.com/dgraph-io/badger/v4/pb"
	"google.golang.org/protobuf/proto"
)

// logOf returns a log of records, each a meta byte and a value, and zeros behind them.
func logOf(records ...[]byte) []byte {
	data := make([]byte, logHeader)
	for _, r := range records {
		rec := append([]byte{r[0], 0, 1}, binary.AppendUvarint(nil, uint64(len(r)-1))...)
		rec = append(rec, 0, 'k')
		rec = append(rec, r[1:]...)
		rec = binary.BigEndian.AppendUint32(rec, crc32.Checksum(rec, castagnoli))
		data = append(data, rec...)
	}
	return append(data, make([]byte, 100)...)
}

func pointer(file, length, offset uint32) []byte {
	b := []byte{metaTxn | metaPointer}
	for _, v := range []uint32{file, length, offset} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

// A log ends behind its last whole transaction; what it points at in one that has no end
// yet does not count.
func TestScanLog(t *testing.T) {
	fin := []byte{metaFinTxn, '1'}
	whole := logOf(pointer(3, 100, 50), fin)
	end := int64(len(whole) - 100)
	for name, data := range map[string][]byte{
		"whole":     whole,
		"open":      logOf(pointer(3, 100, 50), fin, pointer(4, 1, 1)),
		"truncated": whole[:end],
	} {
		s, err := scanLog(bytes.NewReader(data), int64(len(data)))
		if err != nil || s.end != end || s.torn || s.last != (place{3, 150}) {
			t.Errorf("%s: %+v, %v; want an end at %d", name, s, err, end)
		}
	}
	for at := int64(logHeader); at < end; at++ {
		data := bytes.Clone(whole)
		data[at] ^= 0x55
		s, err := scanLog(bytes.NewReader(data), int64(len(data)))
		if err != nil || s.end == end || !s.torn {
			t.Errorf("byte %d damaged: %+v, %v", at, s, err)
		}
	}
}

// The values end behind the last whole record; one that is not whole is told.
func TestEndOfValues(t *testing.T) {
	data := logOf(bytes.Repeat([]byte{0}, 3000), bytes.Repeat([]byte{0}, 70000))
	want := int64(len(data) - 100)
	if got, err := endOfValues(bytes.NewReader(data), int64(len(data)), logHeader); err != nil || got != want {
		t.Errorf("end %d, %v, want %d", got, err, want)
	}
	if got, err := endOfValues(bytes.NewReader(data), int64(len(data)), want); err != nil || got != want {
		t.Errorf("from the end: %d, %v, want %d", got, err, want)
	}
	data[want-10] ^= 1
	if _, err := endOfValues(bytes.NewReader(data), int64(len(data)), logHeader); !errors.Is(err, errTorn) {
		t.Errorf("error %v, want errTorn", err)
	}
	if _, err := endOfValues(bytes.NewReader(data[:want-20]), want-20, logHeader); !errors.Is(err, errTorn) {
		t.Errorf("short: error %v, want errTorn", err)
	}
}

// A MANIFEST is cut where it names the tables that are wanted, at the last such place.
func TestCutManifest(t *testing.T) {
	data := []byte("Bdgr\x00\x00\x00\x08")
	var ends []int
	add := func(op pb.ManifestChange_Operation, ids ...uint64) {
		set := &pb.ManifestChangeSet{}
		for _, id := range ids {
			set.Changes = append(set.Changes, &pb.ManifestChange{Id: id, Op: op})
		}
		body, err := proto.Marshal(set)
		if err != nil {
			t.Fatal(err)
		}
		data = binary.BigEndian.AppendUint32(data, uint32(len(body)))
		data = binary.BigEndian.AppendUint32(data, crc32.Checksum(body, castagnoli))
		data = append(data, body...)
		ends = append(ends, len(data))
	}
	add(pb.ManifestChange_CREATE, 1, 2)
	add(pb.ManifestChange_CREATE, 3)
	add(pb.ManifestChange_DELETE, 3)
	add(pb.ManifestChange_DELETE, 1)
	for _, c := range []struct {
		want []uint64
		end  int
	}{{[]uint64{1, 2}, ends[2]}, {[]uint64{1, 2, 3}, ends[1]}, {[]uint64{2}, ends[3]}, {nil, manifestHeader}} {
		want := map[uint64]bool{}
		for _, id := range c.want {
			want[id] = true
		}
		got, err := cutManifest(append(bytes.Clone(data), 0, 0, 0, 9, 1), want)
		if err != nil || len(got) != c.end {
			t.Errorf("tables %v: cut at %d, %v, want %d", c.want, len(got), err, c.end)
		}
	}
	if _, err := cutManifest(data, map[uint64]bool{1: true, 3: true}); !errors.Is(err, errMoved) {
		t.Errorf("error %v, want errMoved", err)
	}
	data[manifestHeader+changesHeader] ^= 1
	if _, err := cutManifest(data, map[uint64]bool{2: true}); err == nil || errors.Is(err, errMoved) {
		t.Errorf("damaged: error %v", err)
	}
}
