//go:build linux

package hotsrc_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2"
)

// ownerDir tells the test binary that it is the owner of a database, and of which one.
const ownerDir = "HOTSRC_OWNER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerDir); dir != "" {
		if err := own(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}
func (quiet) Fatalf(string, ...any) { panic("pebble: fatal") }

// small makes flushes, compactions and recycled logs frequent.
func small() *pebble.Options {
	return &pebble.Options{MemTableSize: 128 << 10, L0CompactionThreshold: 2, Logger: quiet{}}
}

// own opens the database, goes on with the history where it ends, and says each number
// that is synced. Of eight writes one is synced, and the seven before it with it.
func own(dir string) error {
	db, err := pebble.Open(dir, small())
	if err != nil {
		return err
	}
	numbers, err := numbersIn(db)
	if err != nil {
		return err
	}
	for n := uint64(len(numbers)) + 1; ; n++ {
		how := pebble.NoSync
		if n%8 == 0 {
			how = pebble.Sync
		}
		if err := db.Set(key(n), value(n), how); err != nil {
			return err
		}
		if n%8 == 0 {
			if _, err := fmt.Println(n); err != nil {
				return err
			}
		}
	}
}

func key(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func value(n uint64) []byte {
	v := make([]byte, 100+n%900)
	for i := range v {
		v[i] = byte(n + uint64(i)*7)
	}
	return v
}

func numbersIn(db *pebble.DB) (numbers []uint64, err error) {
	it, err := db.NewIter(nil)
	if err != nil {
		return nil, err
	}
	defer it.Close()
	for it.First(); it.Valid(); it.Next() {
		n := binary.BigEndian.Uint64(it.Key())
		if v, err := it.ValueAndErr(); err != nil || string(v) != string(value(n)) {
			return nil, fmt.Errorf("number %d has another value: %v", n, err)
		}
		numbers = append(numbers, n)
	}
	return numbers, it.Error()
}

// An owner is a process that writes to a database.
type owner struct {
	cmd    *exec.Cmd
	synced atomic.Uint64 // the last number that it said
	said   chan struct{} // closed when it has said something
	ended  chan struct{}
}

func startOwner(t *testing.T, dir string) *owner {
	t.Helper()
	o := &owner{cmd: exec.Command(os.Args[0]), said: make(chan struct{}), ended: make(chan struct{})}
	o.cmd.Env = append(os.Environ(), ownerDir+"="+dir)
	o.cmd.Stderr = os.Stderr
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(o.ended)
		lines := bufio.NewScanner(out)
		for first := true; lines.Scan(); first = false {
			n, err := strconv.ParseUint(strings.TrimSpace(lines.Text()), 10, 64)
			if err != nil {
				continue
			}
			o.synced.Store(n)
			if first {
				close(o.said)
			}
		}
	}()
	t.Cleanup(o.kill)
	select {
	case <-o.said:
	case <-o.ended:
		t.Fatal("the owner ended at once")
	}
	return o
}

func (o *owner) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := o.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// kill ends the owner as a crash does and waits for it.
func (o *owner) kill() {
	if o.cmd.ProcessState != nil {
		return
	}
	o.cmd.Process.Kill()
	<-o.ended
	o.cmd.Wait()
}
