//go:build rocksdb && linux

package snapferry_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
)

// rocksDB is a RocksDB database that another process has open (testdata/rocks).
type rocksDB struct {
	t       *testing.T
	program string
	dir     string
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
}

func openRocksDB(t *testing.T, program, dir string) *rocksDB {
	t.Helper()
	r := &rocksDB{t: t, program: program, dir: dir, cmd: exec.Command(program, "own", dir)}
	r.cmd.Stderr = os.Stderr
	out, err := r.cmd.StdoutPipe()
	if err == nil {
		r.in, err = r.cmd.StdinPipe()
	}
	if err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	r.out = bufio.NewReader(out)
	t.Cleanup(func() { r.in.Close() })
	return r
}

// ask sends a command and returns how long the history was when it was done.
func (r *rocksDB) ask(command string) (uint64, error) {
	if _, err := fmt.Fprintln(r.in, command); err != nil {
		return 0, err
	}
	line, err := r.out.ReadString('\n')
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(line)
	return strconv.ParseUint(fields[len(fields)-1], 10, 64)
}

// write lets the owner write n numbers from now on, and returns where it begins.
func (r *rocksDB) write(n int) uint64 {
	r.t.Helper()
	last, err := r.ask(fmt.Sprintf("write %d", n))
	if err != nil {
		r.t.Fatal(err)
	}
	return last
}

// wait returns when all is written.
func (r *rocksDB) wait() {
	r.t.Helper()
	if _, err := r.ask("wait"); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rocksDB) close() {
	r.t.Helper()
	r.in.Close()
	if err := r.cmd.Wait(); err != nil {
		r.t.Fatal(err)
	}
}

// source is the recipe of docs/rocksdb.md. The checkpoint's place in the history is the
// answer to the command; at holds it.
func (r *rocksDB) source(at *uint64) source.Source {
	return source.Func(func(ctx context.Context, dir string) error {
		for ctx.Err() == nil {
			err := os.RemoveAll(dir) // RocksDB insists on making it
			if err == nil {
				*at, err = r.ask("checkpoint " + dir)
			}
			if err != nil || !linkedLogs(r.t, dir) {
				return err
			}
		}
		return context.Cause(ctx)
	}, &source.FuncOptions{
		Live:      r.dir,
		Immutable: func(p string) bool { return strings.HasSuffix(p, ".sst") || strings.HasSuffix(p, ".blob") },
	})
}

// linkedLogs tells whether a checkpoint has a hard link of a live log, which RocksDB may
// recycle: write over, in the checkpoint too.
func linkedLogs(t *testing.T, dir string) bool {
	t.Helper()
	logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range logs {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Sys().(*syscall.Stat_t).Nlink > 1 {
			t.Logf("%s is a link: made again", filepath.Base(name))
			return true
		}
	}
	return false
}

func historyOf(t *testing.T, program, dir string) uint64 {
	t.Helper()
	out, err := exec.Command(program, "read", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("read %s: %v: %s", dir, err, out)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(out)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A RocksDB database under writes, with recycled logs: each commit restores to the
// history as it was at its checkpoint. After a restore the database goes on with file
// numbers that were used before, for other content, and nothing is taken for what it was
// (I5).
func TestRocksDB(t *testing.T) {
	program := filepath.Join(t.TempDir(), "rocks")
	if out, err := exec.Command("go", "build", "-o", program, "./testdata/rocks").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	ctx := t.Context()
	blobs := blob.New(memblob.New(), nil)
	info, _, err := snapferry.Ensure(ctx, blobs)
	if err != nil {
		t.Fatal(err)
	}
	id := snapferry.TaskID{Job: "rocks", Task: "p0"}
	task, err := snapferry.Open(ctx, id, blobs, checkpoint.New(blobcp.New(blobs, info.ID), nil),
		&snapferry.Options{CacheDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer task.Close()

	live := filepath.Join(t.TempDir(), "kv")
	db := openRocksDB(t, program, live)
	commit := func() (at uint64, sent, total int64) {
		t.Helper()
		pending, err := task.Snapshot(ctx, map[string]source.Source{"kv": db.source(&at)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		report, err := pending.Commit(ctx)
		if err != nil {
			t.Fatal(err)
		}
		kv := report.Stores["kv"]
		return at, kv.BytesUploaded, kv.BytesUploaded + kv.BytesRetained
	}
	restored := func(dir string) uint64 {
		t.Helper()
		if _, err := task.Restore(ctx, map[string]string{"kv": dir}, nil); err != nil {
			t.Fatal(err)
		}
		return historyOf(t, program, dir)
	}

	least := db.write(30000)
	for range 5 {
		at, sent, total := commit() // beside the writes
		if got := restored(filepath.Join(t.TempDir(), "kv")); got != at || got < least {
			t.Errorf("restored 1..%d, the checkpoint was made at %d, %d were written before it", got, at, least)
		}
		t.Logf("sent %d of %d bytes at %d", sent, total, at)
		least = db.write(30000)
	}
	// A last one at rest, and 1 % more.
	db.write(0)
	first, _, _ := commit()
	db.write(int(first / 100))
	db.wait()
	_, sent, total := commit()
	t.Logf("a second commit sent %d of %d bytes (%.1f %%)", sent, total, 100*float64(sent)/float64(total))
	if share := float64(sent) / float64(total); share > 0.15 {
		t.Errorf("it sent %.1f %% of the bytes", 100*share)
	}

	// Back to an older state, and another history from there: the numbers of files come again.
	at, _, _ := commit()
	db.write(3000)
	db.wait()
	db.close()
	if got := restored(live); got != at {
		t.Errorf("restored 1..%d in place, want 1..%d", got, at)
	}
	for range 3 {
		db = openRocksDB(t, program, live)
		db.write(5000)
		db.wait()
		at, _, _ := commit()
		db.close()
		if got := restored(filepath.Join(t.TempDir(), "kv")); got != at {
			t.Errorf("restored 1..%d of the second history, want 1..%d", got, at)
		}
		if _, err := task.Restore(ctx, map[string]string{"kv": live}, nil); err != nil {
			t.Fatal(err)
		}
	}
}
