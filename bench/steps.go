//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"syscall"
	"time"
)

// storeName is the store that every row backs up.
const storeName = "kv"

// usage is what one timed step took.
type usage struct {
	Wall      time.Duration `json:"wall_ns"`
	CPU       time.Duration `json:"cpu_ns"`
	PeakBytes int64         `json:"peak_bytes"`
}

// smallest is the scale from which a step begins with a sync. Below it nothing is measured in
// earnest, and a sync waits for what the rest of the machine has written.
const smallest = 0.01

// timed runs commands one after another as one step, after a sync, and returns what
// the last of them wrote.
//
// The peak of a child counts the greatest memory of this process so far (they share it until
// the exec), so this program gives back what it has used and begins to count anew.
func (b *bench) timed(cmds ...*exec.Cmd) (u usage, out []byte, err error) {
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		return u, nil, err
	}
	if b.scale >= smallest {
		syscall.Sync()
	}
	start := time.Now()
	for _, cmd := range cmds {
		var stdout, stderr bytes.Buffer
		if cmd.Stdout == nil {
			cmd.Stdout = &stdout
		}
		cmd.Stderr = &stderr
		if err := cmd.Run(); err != nil {
			return u, nil, fmt.Errorf("%s: %w: %s", cmd.Args[0], err, bytes.TrimSpace(stderr.Bytes()))
		}
		out = stdout.Bytes()
		u.CPU += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
		if r, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
			u.PeakBytes = max(u.PeakBytes, int64(r.Maxrss)<<10)
		}
	}
	u.Wall = time.Since(start)
	return u, out, nil
}

// snapferry is the command under test, with an identity cache of its own.
func (b *bench) snapferry(cache string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(b.ctx, b.command, args...)
	cmd.Env = append(slices.Clip(b.env), "SNAPFERRY_CACHE="+cache)
	return cmd
}

// backupReport is what a backup said and took.
type backupReport struct {
	usage
	Checkpoint string
	Stores     map[string]struct {
		BytesUploaded int64 `json:"bytes_uploaded"`
	}
}

func (b *bench) backup(repo, cache, dir string) (rep backupReport, err error) {
	u, out, err := b.timed(b.snapferry(cache, "backup", "--repo", repo, "--json", storeName+"="+dir))
	if err != nil {
		return rep, err
	}
	if err := json.Unmarshal(out, &rep); err != nil {
		return rep, fmt.Errorf("answer of backup: %w: %s", err, out)
	}
	rep.usage = u
	return rep, nil
}

// uploaded checks that a backup did the work that its row is about.
func (rep *backupReport) uploaded(want int64) error {
	if got := rep.Stores[storeName].BytesUploaded; got != want {
		return fmt.Errorf("backup uploaded %d bytes, want %d", got, want)
	}
	return nil
}

func (b *bench) restoreTo(repo, dir string) (usage, error) {
	u, _, err := b.timed(b.snapferry(b.path("restore-cache"), "restore", "--repo", repo, "--json", "--to", dir))
	return u, err
}

// copyAndSync is the reference for moving a tree to disk.
func (b *bench) copyAndSync(from, to string) (*usage, error) {
	u, _, err := b.timed(exec.CommandContext(b.ctx, "cp", "-r", from, to), exec.CommandContext(b.ctx, "sync"))
	return &u, err
}

// find is the reference for looking at every file of a tree.
func (b *bench) find(dir string) (*usage, error) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	cmd := exec.CommandContext(b.ctx, "find", dir, "-printf", "%s %T@")
	cmd.Stdout = null
	u, _, err := b.timed(cmd)
	return &u, err
}
