package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry/internal/cpwire"
)

func (a *app) newBench() *cobra.Command {
	return newVerbGroup("bench VERB", "Measure a group of checkpoint servers",
		`Measure what a running group gives. It writes to logs of its own, which are no tasks of any
repository, and leaves them there.`,
		examples(`
			snapferry bench checkpoints --server http://10.0.0.1:7480,10.0.0.2:7480`),
		a.newBenchCheckpoints())
}

type benchVerb struct {
	app     *app
	servers serverFlags
	tasks   positive
	commits positive
	bytes   positive
	clients positive
	verify  bool
}

func (a *app) newBenchCheckpoints() *cobra.Command {
	v := &benchVerb{app: a, tasks: 100, commits: 2000, bytes: 2000, clients: 16}
	cmd := &cobra.Command{
		Use:   "checkpoints",
		Short: "Commit as fast as the group takes it, and check that nothing is lost",
		Long: `Append opaque values to the logs of many tasks, by several clients at once, and tell how many
commits a second were acknowledged and how long they took. A task has one client at a time.
The logs go on from where an earlier run left them. Commits are repeated over dead members and
elections with the same request id, so a change of leader costs time and no errors.

With --verify slot and digest of every acknowledged commit are read back, and the value where
the group still keeps it. The exit code is 0 only if every commit was acknowledged and none is
lost.`,
		Example: examples(`
			snapferry bench checkpoints --server http://10.0.0.1:7480,10.0.0.2:7480,10.0.0.3:7480
			snapferry bench checkpoints --server http://10.0.0.1:7480 --tasks 500 --commits 2500 --value-bytes 2000 --concurrency 64 --verify --json`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.servers.bind(cmd, 30*time.Second)
	f := cmd.Flags()
	f.Var(&v.tasks, "tasks", "how many logs are written to")
	f.Var(&v.commits, "commits", "how many commits in all")
	f.Var(&v.bytes, "value-bytes", "size of a value in bytes")
	f.Var(&v.clients, "concurrency", "how many clients commit at once, each with tasks of its own")
	f.BoolVar(&v.verify, "verify", false, "read every acknowledged commit back")
	a.outputFlags(cmd)
	return cmd
}

func (v *benchVerb) run(ctx context.Context) error {
	if v.bytes > cpwire.MaxBody {
		return usagef("--value-bytes %d: the group takes values of at most %d bytes", v.bytes, cpwire.MaxBody)
	}
	client, err := v.servers.open(cpwire.Options{})
	if err != nil {
		return err
	}
	defer client.Close()
	if _, err := client.Status(ctx); err != nil {
		return v.failed(err)
	}
	b := &bench{
		log: wireLog{client}, tasks: int(v.tasks), commits: int(v.commits), bytes: int(v.bytes),
		clients: int(v.clients), verify: v.verify, note: v.app.note,
	}
	r, err := b.run(ctx)
	if err != nil {
		return v.failed(err)
	}
	if err := v.print(r); err != nil {
		return err
	}
	switch {
	case r.lost > 0:
		return &reported{exitCorrupt, fmt.Sprintf("bench checkpoints: %s acknowledged and not there as acknowledged", count(r.lost, "commit"))}
	case r.Errors > 0:
		return &reported{exitFailed, fmt.Sprintf("bench checkpoints: %s never acknowledged, for instance: %s", count(r.Errors, "commit"), oneLine(r.cause.Error()))}
	}
	return nil
}

func (v *benchVerb) failed(err error) error {
	return &clusterError{op: "bench checkpoints", subject: v.servers.urls, err: err}
}

// benchReport is the JSON of bench checkpoints.
type benchReport struct {
	Commits   int64   `json:"commits"` // acknowledged
	Errors    int64   `json:"errors"`  // never acknowledged
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
	Max       float64 `json:"max_ms"`
	Lost      *int64  `json:"lost,omitempty"` // with --verify only

	lost  int64
	cause error // of one of the errors
}

func (v *benchVerb) print(r *benchReport) error {
	return v.app.result(r, func(w io.Writer) {
		fmt.Fprintf(w, "%s in %.2f s, %.0f/s; p50 %.1f ms, p99 %.1f ms, max %.1f ms",
			count(r.Commits, "commit"), r.Seconds, r.PerSecond, r.P50, r.P99, r.Max)
		if r.Errors > 0 {
			fmt.Fprintf(w, "; %d never acknowledged", r.Errors)
		}
		if r.Lost != nil {
			fmt.Fprintf(w, "; read back, %d lost", r.lost)
		}
		fmt.Fprintln(w)
	})
}

// wireLog is the group as the bench sees it.
type wireLog struct{ c *cpwire.Client }

func (l wireLog) head(ctx context.Context, task cpwire.Task) (position, error) {
	e, err := l.c.HeadRecord(ctx, task)
	if errors.Is(err, errNoLog) {
		return position{}, nil
	}
	return position{e.Slot, e.Digest}, err
}

func (l wireLog) append(ctx context.Context, a cpwire.Append) (cpwire.Result, error) {
	return l.c.Append(ctx, a)
}

func (l wireLog) history(ctx context.Context, task cpwire.Task, after uint64) ([]cpwire.Entry, error) {
	return l.c.History(ctx, task, after, true)
}
