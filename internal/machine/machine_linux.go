// Package machine says where measurements come from, and sums up their runs.
//
// It is for the programs that measure: Describe finds out what a reader needs to know of
// the machine, the file system and the source beside a number, and Median is what is shown
// of several runs. What cannot be found out is "unknown" and no error.
package machine

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Info is the place of a measurement.
type Info struct {
	CPUs       int    `json:"cpus"`
	Kernel     string `json:"kernel"`
	Go         string `json:"go"`
	FileSystem string `json:"file_system"` // of the directory that was measured in
	Commit     string `json:"commit"`
}

// Describe finds out where this program runs and which source it is of; dir is where it
// measures.
func Describe(ctx context.Context, dir string) Info {
	m := Info{CPUs: runtime.NumCPU(), Go: runtime.Version(), Kernel: "unknown", Commit: "unknown", FileSystem: "unknown"}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) == nil {
		m.FileSystem = fileSystem(int64(s.Type))
	}
	if out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output(); err == nil {
		m.Commit = strings.TrimSpace(string(out))
	}
	return m
}

// String is the description in one line.
func (m Info) String() string {
	return fmt.Sprintf("%d CPUs, Linux %s, %s, %s, commit %s", m.CPUs, m.Kernel, m.Go, m.FileSystem, m.Commit)
}

func fileSystem(magic int64) string {
	names := map[int64]string{
		unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs",
		unix.TMPFS_MAGIC: "tmpfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs",
	}
	if name, ok := names[magic]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", magic)
}

// Median returns the one in the middle, or the mean of the two in the middle; 0 of none.
func Median[T ~int64 | ~float64](runs []T) T {
	if len(runs) == 0 {
		return 0
	}
	runs = slices.Sorted(slices.Values(runs))
	return (runs[(len(runs)-1)/2] + runs[len(runs)/2]) / 2
}
