//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// describe says where the numbers come from.
func describe(ctx context.Context, dir string) string {
	var u unix.Utsname
	kernel := "unknown"
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Release[:])
	}
	commit := "unknown"
	if out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output(); err == nil {
		commit = strings.TrimSpace(string(out))
	}
	var s unix.Statfs_t
	kind := "unknown file system"
	if unix.Statfs(dir, &s) == nil {
		kind = fmt.Sprintf("file system %#x", s.Type)
	}
	return fmt.Sprintf("%d CPUs, Linux %s, %s, %s, commit %s", runtime.NumCPU(), kernel, runtime.Version(), kind, commit)
}

func table(w io.Writer, machine string, scale float64, lines []line) error {
	fmt.Fprintf(w, "%s; medians\n\n", machine)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "row\twork\tours\treference\tratio\tlimit\t")
	for _, l := range lines {
		verdict := "pass"
		if !l.Met {
			verdict = "FAIL"
		}
		fmt.Fprintf(tw, "%s\t%s\t%.2f%s\t%.2f%s\t%.2f\t%s\t%s\n", l.Row, l.Work,
			median(l.Ours), l.Unit, median(l.Reference), l.Unit, l.Ratio, l.Limit, verdict)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, l := range lines {
		if l.Note != "" {
			fmt.Fprintf(w, "\n%s: %s\n", l.Row, l.Note)
		}
	}
	if scale != 1 {
		fmt.Fprintf(w, "\nscale %g: the limits are for scale 1, so the verdicts mean little\n", scale)
	}
	return nil
}
