package tasklog

import (
	"fmt"
	"io"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// kit drives one machine as Raft would.
type kit struct {
	t  *testing.T
	m  *Machine
	fs *crashFS
}

const stateDir = "data/state"

func newKit(t *testing.T) *kit {
	t.Helper()
	k := &kit{t: t, fs: newCrashFS()}
	k.m = open(t, k.fs)
	return k
}

// crashFS is a file system in memory whose crashes may be cloned beside anything. Pebble's
// own takes its lock twice in the operations below, and one that comes between a clone that
// waits and its second turn stands still with it for ever.
type crashFS struct {
	*vfs.MemFS
	mu sync.Mutex
}

func newCrashFS() *crashFS { return &crashFS{MemFS: vfs.NewCrashableMem()} }

func (c *crashFS) CrashClone(cfg vfs.CrashCloneCfg) *crashFS {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &crashFS{MemFS: c.MemFS.CrashClone(cfg)}
}

func (c *crashFS) Link(oldname, newname string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.MemFS.Link(oldname, newname)
}

func (c *crashFS) Lock(name string) (io.Closer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.MemFS.Lock(name)
}

func (c *crashFS) ReuseForWrite(oldname, newname string, category vfs.DiskWriteCategory) (vfs.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.MemFS.ReuseForWrite(oldname, newname, category)
}

// open opens the state on a file system and closes it after the test.
func open(t *testing.T, fs vfs.FS) *Machine {
	t.Helper()
	m, err := Open(stateDir, small(fs))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// small makes memtables that fill up and a cache that forgets within a test.
func small(fs vfs.FS) *Options {
	return &Options{FS: fs, MemTableSize: 256 << 10, CachedTasks: 3}
}

// do applies commands as one Ready and returns their results.
func (k *kit) do(commands ...[]byte) [][]byte {
	k.t.Helper()
	results, err := k.m.Apply(entries(k.m.AppliedIndex()+1, commands...))
	if err != nil {
		k.t.Fatal(err)
	}
	return results
}

func entries(from uint64, commands ...[]byte) []Entry {
	es := make([]Entry, len(commands))
	for i, c := range commands {
		es[i] = Entry{Index: from + uint64(i), Term: 2, Data: c}
	}
	return es
}

// append applies appends as one command.
func (k *kit) append(stamp int64, as ...cpwire.Append) []cpwire.Result {
	k.t.Helper()
	return results(k.t, k.do(command(stamp, as...))[0])
}

func command(stamp int64, as ...cpwire.Append) []byte {
	b := BeginAppends(nil, stamp, len(as))
	for i := range as {
		b = cpwire.AppendItem(b, &as[i])
	}
	return b
}

func results(t *testing.T, raw []byte) []cpwire.Result {
	t.Helper()
	b, err := DecodeResult(raw)
	if err != nil {
		t.Fatal(err)
	}
	rs, err := cpwire.DecodeAnswer(cpwire.AppendAnswer(nil, b), len(b)/cpwire.ResultSize)
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

var orders = cpwire.Task{Job: "orders", Name: "p7"}

// after is an append on top of a log whose head is at slot with that digest.
func after(slot uint64, prev cpwire.Digest, body string) cpwire.Append {
	a := cpwire.Append{Task: orders, Slot: slot + 1, Prev: prev, Body: []byte(body)}
	sum := blake3.Sum256([]byte(fmt.Sprint(slot, prev, body)))
	copy(a.Nonce[:], sum[:])
	return a
}

// fill appends n entries, each in a command of its own, and returns them.
func (k *kit) fill(stamp int64, n int) []cpwire.Append {
	k.t.Helper()
	head, err := k.m.Head(orders, false)
	if err != nil {
		head = cpwire.Entry{}
	}
	var as []cpwire.Append
	for range n {
		a := after(head.Slot, head.Digest, fmt.Sprint("body of slot ", head.Slot+1))
		r := k.append(stamp, a)[0]
		if r.Status != cpwire.Appended {
			k.t.Fatalf("append at slot %d: %v", a.Slot, r.Status)
		}
		head.Slot, head.Digest = r.Slot, r.Digest
		as = append(as, a)
	}
	return as
}

func (k *kit) sum() cpwire.Digest {
	k.t.Helper()
	return sumOf(k.t, k.m)
}

func sumOf(t *testing.T, m *Machine) cpwire.Digest {
	t.Helper()
	sum, applied, err := m.Sum()
	if err != nil {
		t.Fatal(err)
	}
	if applied != m.AppliedIndex() {
		t.Fatalf("sum is of index %d, applied is %d", applied, m.AppliedIndex())
	}
	return sum
}
