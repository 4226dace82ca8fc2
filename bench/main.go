//go:build linux

// Command bench measures the built command end to end against `cp -r` + `sync`, `find`
// and rclone, in one run on one machine, and prints one table: our time, the reference's
// time, their ratio, what was sent, the limit, the peak memory. One thing is measured in
// this process: for how long the freezing of a database holds up its writers.
//
// Absolute times say little on a shared machine; the ratios do. Reference and command
// take turns, a sync comes before every timed step, the page cache is warm, and what
// is shown is the median. The results are checked: a restore that is fast and wrong
// is an error, not a row.
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

	"github.com/snapferry/snapferry/internal/machine"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	met, err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
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

// config is what the flags say.
type config struct {
	rows    []string
	scale   float64
	runs    int
	dir     string
	command string
	rclone  string
	json    bool
}

func parseFlags(args []string, stderr io.Writer) (*config, error) {
	c := &config{}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	names := strings.Join(rowNames(), ",")
	rows := fs.String("rows", names, "rows to measure, separated by commas")
	fs.Float64Var(&c.scale, "scale", 1, "size of the trees; the limits are for 1 (2 GiB, 50,000 files, databases of 1 GiB)")
	fs.IntVar(&c.runs, "n", 3, "runs of each row; the median is shown")
	fs.StringVar(&c.dir, "dir", os.TempDir(), "where the trees are made; the file system that is measured")
	fs.StringVar(&c.command, "command", "", "a built snapferry command (default: build ./cmd/snapferry)")
	fs.StringVar(&c.rclone, "rclone", "rclone", "the rclone to compare with; rows that need it fail without one")
	fs.BoolVar(&c.json, "json", false, "print one JSON object instead of the table")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	c.rows = strings.Split(*rows, ",")
	for _, r := range c.rows {
		if !slices.Contains(rowNames(), r) {
			return nil, fmt.Errorf("unknown row %q; there are %s", r, names)
		}
	}
	if c.runs < 1 || c.scale <= 0 || fs.NArg() > 0 {
		return nil, fmt.Errorf("usage: bench [-rows ROWS] [-scale X] [-n RUNS] [-dir DIR] [-command PATH] [-rclone PATH] [-json]")
	}
	return c, nil
}

// run measures what the arguments ask for and tells whether every limit was met. At
// another scale than 1 the limits are shown and not judged.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) (met bool, err error) {
	c, err := parseFlags(args, stderr)
	if err != nil {
		return false, err
	}
	work, err := os.MkdirTemp(c.dir, "snapferry-bench.")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if work, err = filepath.Abs(work); err != nil {
		return false, err
	}
	b := &bench{config: c, ctx: ctx, work: work, log: stderr, command: c.command, env: os.Environ()}
	b.host = &host{ctx: ctx, dir: work, log: stderr}
	if b.command == "" {
		if b.command, err = build(ctx, work); err != nil {
			return false, err
		}
	} else if b.command, err = filepath.Abs(b.command); err != nil {
		return false, err
	}
	results, err := b.measure()
	if err = errors.Join(err, b.host.close()); err != nil {
		return false, err
	}
	rep := newReport(c, machine.Describe(ctx, work), results)
	if c.json {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(rep)
	} else {
		err = rep.table(stdout)
	}
	return rep.Met || c.scale != 1, err
}

// build makes the command from the source of this module, wherever one stands in it.
func build(ctx context.Context, work string) (string, error) {
	bin := filepath.Join(work, "snapferry")
	out, err := exec.CommandContext(ctx, "go", "build", "-o", bin,
		"github.com/snapferry/snapferry/cmd/snapferry").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the command: %w\n%s", err, out)
	}
	return bin, nil
}
