package blobcp_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
)

// childDir names the store directory; a test binary that finds it set is an owner.
const childDir = "BLOBCP_TEST_OWNER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if err := ownForEver(dir, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// ownForEver claims the task, commits until it is fenced, and claims again, until the
// process is killed or nobody reads any more. It prints a line per acknowledged entry.
func ownForEver(dir string, out io.Writer) error {
	d, err := fsblob.Open(dir, nil)
	if err != nil {
		return err
	}
	opts := &checkpoint.Options{FirstDelay: time.Millisecond, MaxDelay: 20 * time.Millisecond}
	log := checkpoint.New(blobcp.New(blob.New(d, nil), "repo-1"), opts).Log(task)
	for next := decideClaim; ; {
		e, err := log.Append(context.Background(), next)
		switch {
		case errors.Is(err, checkpoint.ErrFenced):
			next = decideClaim
			continue
		case err != nil:
			return err
		}
		if _, err := fmt.Fprintln(out, e.Slot, e.Digest); err != nil {
			return nil
		}
		next = decide(checkpoint.Commit, e.Epoch)
	}
}

// ack is what a process was told to be in the log.
type ack struct {
	slot   uint64
	digest string
}

// owner starts an owner as a process of its own, lets it get n acknowledgements, kills it
// wherever it stands then, and returns all it was told.
func owner(t *testing.T, dir string, n int) []ack {
	exe, err := os.Executable()
	if err != nil {
		t.Error(err)
		return nil
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Error(err)
		return nil
	}

	var acks []ack
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		var a ack
		if _, err := fmt.Sscan(lines.Text(), &a.slot, &a.digest); err != nil || len(a.digest) != 64 {
			break // cut off by the kill
		}
		if acks = append(acks, a); len(acks) == n {
			_ = cmd.Process.Kill()
		}
	}
	_ = cmd.Wait() // killed
	if len(acks) < n {
		t.Errorf("owner ended after %d of %d acknowledgements", len(acks), n)
	}
	return acks
}

// I4, I9, P3 to P5: owners in processes of their own fence each other and are killed
// during appends; the log is one chain and holds all that any of them was told.
func TestProcessesAreKilled(t *testing.T) {
	dir := t.TempDir()
	var mu sync.Mutex
	var acks []ack
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for round := range 4 {
				got := owner(t, dir, 4+3*i+round)
				mu.Lock()
				acks = append(acks, got...)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	checkChain(t, dir, acks)
}

func checkChain(t *testing.T, dir string, acks []ack) {
	t.Helper()
	d := blobcp.New(blob.New(openFiles(t, dir), nil), "repo-1")
	head, err := d.Head(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	digests := map[uint64]string{}
	epoch := uint64(0)
	for slot := uint64(1); slot <= head.Slot; slot++ {
		e, err := d.Get(t.Context(), task, slot)
		if err != nil {
			t.Fatal(err)
		}
		if e.Kind == checkpoint.Claim {
			epoch++
		}
		if e.Prev != digests[slot-1] || e.Epoch != epoch {
			t.Errorf("slot %d (%s, epoch %d) does not follow", slot, e.Kind, e.Epoch)
		}
		digests[slot] = e.Digest
	}
	for _, a := range acks {
		if digests[a.slot] != a.digest {
			t.Errorf("acknowledged entry at slot %d is not in the log", a.slot)
		}
	}
	if uint64(len(acks)) > head.Slot {
		t.Errorf("%d acknowledgements, %d entries", len(acks), head.Slot)
	}
}
