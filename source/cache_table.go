package source

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"os"
	"sort"
	"sync/atomic"

	"github.com/zeebo/blake3"
)

// The layout of the file is docs/format.md.
const (
	tableMagic = "SFIDC\x00\x00\x01"

	sumAt        = 8
	scopeAt      = sumAt + 32
	generationAt = scopeAt + 32
	countAt      = generationAt + 16
	recordsAt    = countAt + 4
	recordSize   = 104

	flagImmutable = 1
)

// A generation changes with every Forget; zero where there is no file.
type generation [16]byte

func newGeneration() (g generation) {
	rand.Read(g[:]) // does not fail
	return g
}

// A record is what is known of one file.
type record struct {
	id        Identity
	immutable bool
	content   [32]byte
}

type named struct {
	path string
	record
}

// A table is the file of a cache, read in place: records of one size in the order
// of their paths, and the paths behind them.
type table struct {
	scope      [32]byte
	generation generation
	records    []byte
	paths      []byte
	near       *atomic.Int64 // where the last search ended: searches come in path order
}

// parseTable checks the bytes of a file. Anything unexpected makes it false.
func parseTable(data []byte) (t table, ok bool) {
	if len(data) < recordsAt || string(data[:sumAt]) != tableMagic {
		return t, false
	}
	if sum := blake3.Sum256(data[scopeAt:]); !bytes.Equal(sum[:], data[sumAt:scopeAt]) {
		return t, false
	}
	count := int(binary.LittleEndian.Uint32(data[countAt:]))
	if (len(data)-recordsAt)/recordSize < count {
		return t, false
	}
	split := recordsAt + count*recordSize
	t = table{records: data[recordsAt:split], paths: data[split:], near: new(atomic.Int64)}
	copy(t.scope[:], data[scopeAt:])
	copy(t.generation[:], data[generationAt:])
	for i := range count {
		from, length := t.span(i)
		if from+length > len(t.paths) {
			return table{}, false
		}
	}
	return t, true
}

func (t *table) len() int { return len(t.records) / recordSize }

// span returns where the path of record i lies.
func (t *table) span(i int) (from, length int) {
	r := t.records[i*recordSize:]
	return int(binary.LittleEndian.Uint32(r)), int(binary.LittleEndian.Uint16(r[4:]))
}

func (t *table) path(i int) []byte {
	from, length := t.span(i)
	return t.paths[from : from+length]
}

func (t *table) find(path string) (record, bool) {
	n := t.len()
	if n == 0 {
		return record{}, false
	}
	near := int(t.near.Load())
	for i := near; i < min(near+3, n); i++ {
		if string(t.path(i)) == path {
			t.near.Store(int64(i) + 1)
			return t.record(i), true
		}
	}
	i := sort.Search(n, func(i int) bool { return string(t.path(i)) >= path })
	if i == n || string(t.path(i)) != path {
		return record{}, false
	}
	t.near.Store(int64(i) + 1)
	return t.record(i), true
}

func (t *table) record(i int) (r record) {
	b := t.records[i*recordSize:][:recordSize]
	le := binary.LittleEndian
	r.immutable = le.Uint16(b[6:])&flagImmutable != 0
	r.id = Identity{
		Dev:   le.Uint64(b[8:]),
		Ino:   le.Uint64(b[16:]),
		Size:  int64(le.Uint64(b[24:])),
		MTime: Timespec{int64(le.Uint64(b[32:])), int32(le.Uint32(b[56:]))},
		CTime: Timespec{int64(le.Uint64(b[40:])), int32(le.Uint32(b[60:]))},
		BTime: Timespec{int64(le.Uint64(b[48:])), int32(le.Uint32(b[64:]))},
	}
	copy(r.content[:], b[72:])
	return r
}

// encodeTable lays out records that are sorted by path.
func encodeTable(scope [32]byte, g generation, list []named) []byte {
	total := recordsAt + len(list)*recordSize
	for i := range list {
		total += len(list[i].path)
	}
	le := binary.LittleEndian
	b := append(make([]byte, 0, total), tableMagic...)
	b = append(b, make([]byte, scopeAt-sumAt)...)
	b = append(b, scope[:]...)
	b = append(b, g[:]...)
	b = le.AppendUint32(b, uint32(len(list)))

	at := uint32(0)
	for i := range list {
		b = appendRecord(b, at, &list[i])
		at += uint32(len(list[i].path))
	}
	for i := range list {
		b = append(b, list[i].path...)
	}
	sum := blake3.Sum256(b[scopeAt:])
	copy(b[sumAt:], sum[:])
	return b
}

func appendRecord(b []byte, pathAt uint32, n *named) []byte {
	le := binary.LittleEndian
	flags := uint16(0)
	if n.immutable {
		flags |= flagImmutable
	}
	b = le.AppendUint32(b, pathAt)
	b = le.AppendUint16(b, uint16(len(n.path)))
	b = le.AppendUint16(b, flags)
	b = le.AppendUint64(b, n.id.Dev)
	b = le.AppendUint64(b, n.id.Ino)
	b = le.AppendUint64(b, uint64(n.id.Size))
	for _, t := range []Timespec{n.id.MTime, n.id.CTime, n.id.BTime} {
		b = le.AppendUint64(b, uint64(t.Sec))
	}
	for _, t := range []Timespec{n.id.MTime, n.id.CTime, n.id.BTime} {
		b = le.AppendUint32(b, uint32(t.Nsec))
	}
	b = le.AppendUint32(b, 0)
	return append(b, n.content[:]...)
}

// generationOf reads the generation of a file; zero if there is none or it is damaged.
func generationOf(file string) generation {
	data, err := os.ReadFile(file)
	if err != nil {
		return generation{}
	}
	t, _ := parseTable(data)
	return t.generation
}

// replace puts data in place of a file in one step. The caller holds the lock of the
// directory, so one name for the temporary file is enough, and one left by a crash
// is used again. It is not synced: a cache that does not survive costs reading.
func replace(file string, data []byte) error {
	tmp := file + ".tmp"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		os.Remove(tmp)
		return err
	}
	return os.Rename(tmp, file)
}
