//go:build linux

// Command raft measures Raft groups and snapshot transfers against a reference in the
// same run on the same machine: a group of etcd servers, a plain HTTP transfer, a group
// without snapshots. It prints one table of ratios.
//
// Absolute numbers say little on a shared machine; ratios do. Ours and the reference take
// turns, and what is shown is the median. Results are checked: a load that loses a commit,
// or a transfer whose bytes differ, is an error and not a row.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/snapferry/snapferry/internal/machine"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	met, err := true, error(nil)
	if args := os.Args[1:]; len(args) > 0 && args[0] == partCommand {
		err = runPart(ctx, args[1:])
	} else {
		met, err = run(ctx, args)
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	case !met:
		os.Exit(1)
	}
}

// row is one line of the table. measure returns the runs of ours and of the reference in
// one unit, and what is worth saying beside it.
type row struct {
	name, work, unit string
	limit            limit
	measure          func(*bench) (measured, error)
}

// limit is what ours divided by the reference must reach.
type limit struct {
	atLeast, atMost float64
}

func (l limit) met(ratio float64) bool {
	return ratio >= l.atLeast && (l.atMost == 0 || ratio <= l.atMost)
}

func (l limit) String() string {
	if l.atMost > 0 {
		return fmt.Sprintf("<= %.2f", l.atMost)
	}
	return fmt.Sprintf(">= %.2f", l.atLeast)
}

// measured is what a row found, run by run.
type measured struct {
	Ours      []float64 `json:"ours"`
	Reference []float64 `json:"reference"`
	Note      string    `json:"note,omitempty"`
	Missed    bool      `json:"missed,omitempty"` // a limit beside the ratio's, which Note tells
}

var rows = []row{
	{"commits", "commits of 64 clients to 500 tasks, 2 kB each, against etcd's puts", "/s", limit{atLeast: 1}, (*bench).commits},
	{"latency", "p99 of the same load while snapshots of 1 GiB are made and moved, against none", "ms", limit{atMost: 1.5}, (*bench).latency},
	{"install", "full install of 2 GiB over loopback, against plain HTTP to a file with fdatasync", " MiB/s", limit{atLeast: 0.8}, (*bench).install},
	{"delta", "install of 2 GiB, 1 % changed since the snapshot that is held, against a full one", " MiB/s", limit{atLeast: 8}, (*bench).delta},
	{"rtt", "install into memory over a round trip of 10 ms, against stop and wait with 4 MiB at a time", " MiB/s", limit{atLeast: 5}, far(5 * time.Millisecond)},
	{"rtt50", "the same over a round trip of 50 ms", " MiB/s", limit{atLeast: 5}, far(25 * time.Millisecond)},
}

// bench is one run of this program.
type bench struct {
	ctx     context.Context
	work    string
	command string
	runs    int
	scale   float64
	log     io.Writer

	etcdBinary string // built when first needed
}

func run(ctx context.Context, args []string) (met bool, err error) {
	var names []string
	for _, r := range rows {
		names = append(names, r.name)
	}
	fs := flag.NewFlagSet("raft", flag.ContinueOnError)
	want := fs.String("rows", strings.Join(names, ","), "rows to measure, separated by commas")
	b := &bench{ctx: ctx, log: os.Stderr}
	fs.IntVar(&b.runs, "n", 3, "runs of each row; the median is shown")
	fs.Float64Var(&b.scale, "scale", 1, "size of loads and states; the limits are for 1")
	dir := fs.String("dir", os.TempDir(), "where everything is kept; the file system that is measured")
	asJSON := fs.Bool("json", false, "print one JSON object instead of the table")
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	picked := strings.Split(*want, ",")
	for _, p := range picked {
		if !slices.Contains(names, p) {
			return false, fmt.Errorf("unknown row %q; there are %s", p, strings.Join(names, ", "))
		}
	}
	if b.work, err = os.MkdirTemp(*dir, "snapferry-bench-raft."); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.work)) }()
	b.command = filepath.Join(b.work, "snapferry")
	if err := goBuild(ctx, ".", b.command, "github.com/snapferry/snapferry/cmd/snapferry"); err != nil {
		return false, err
	}
	return b.report(picked, *asJSON)
}

// goBuild builds a package, seen from a directory.
func goBuild(ctx context.Context, dir, out, pkg string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, pkg)
	cmd.Dir = dir
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return nil
}

// line is a row with its result.
type line struct {
	Row   string  `json:"row"`
	Work  string  `json:"work"`
	Unit  string  `json:"unit"`
	Ratio float64 `json:"ratio"`
	Limit string  `json:"limit"`
	Met   bool    `json:"met"`
	measured
}

func (b *bench) report(picked []string, asJSON bool) (met bool, err error) {
	met = true
	var lines []line
	for _, r := range rows {
		if !slices.Contains(picked, r.name) {
			continue
		}
		fmt.Fprintf(b.log, "bench: %s: %s\n", r.name, r.work)
		m, err := r.measure(b)
		if err != nil {
			return false, fmt.Errorf("%s: %w", r.name, err)
		}
		l := line{Row: r.name, Work: r.work, Unit: r.unit, Limit: r.limit.String(), measured: m}
		l.Ratio = machine.Median(m.Ours) / machine.Median(m.Reference)
		l.Met = r.limit.met(l.Ratio) && !m.Missed
		met = met && l.Met
		lines = append(lines, l)
	}
	if asJSON {
		enc := json.NewEncoder(os.Stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(map[string]any{"scale": b.scale, "runs": b.runs, "machine": machine.Describe(b.ctx, b.work), "rows": lines})
	} else {
		err = table(os.Stdout, machine.Describe(b.ctx, b.work), b.scale, lines)
	}
	return met || b.scale != 1, err
}
