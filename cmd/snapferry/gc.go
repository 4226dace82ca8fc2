package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
)

type gcVerb struct {
	app       *app
	repo      repoFlags
	olderThan age
	dryRun    bool
}

func (a *app) newGC() *cobra.Command {
	v := &gcVerb{app: a, olderThan: age(24 * time.Hour)}
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Delete what no checkpoint needs any more",
		Long: `Delete blobs of the whole repository that no checkpoint needs and no running backup can
commit: of dropped checkpoints and of backups that died. It takes no task over. --older-than
is the grace for what was dropped and for a backup that seems to run; with 0s a running
backup may have to start again, and no checkpoint is ever lost. Tasks that keep their
checkpoints elsewhere, in a group for instance (--checkpoints), are skipped, and the exit
code is 4 then.`,
		Example: examples(`
			snapferry gc --repo /backup
			snapferry gc --repo /backup --older-than 0s --dry-run --json`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.repo.bind(a, cmd)
	v.repo.bindCheckpoints(cmd)
	cmd.Flags().Var(&v.olderThan, "older-than", "how long dropped blobs and unfinished backups are left alone, as in 0s, 24h or 7d")
	cmd.Flags().BoolVar(&v.dryRun, "dry-run", false, "say what would be deleted, and delete nothing")
	return cmd
}

func (v *gcVerb) run(ctx context.Context) error {
	var r *snapferry.GCReport
	err := v.repo.withRepo(ctx, &snapferry.RepoOptions{}, func(repo *snapferry.Repo) (err error) {
		r, err = repo.GC(ctx, snapferry.GCOptions{OlderThan: time.Duration(v.olderThan), DryRun: v.dryRun})
		return err
	})
	code, _ := classify(err)
	switch {
	case err == nil:
		return v.print(r)
	case r == nil || len(r.Skipped) == 0 || code != exitConflict:
		return err
	}
	// The report is complete, and scripts want it.
	if err := v.print(r); err != nil {
		return err
	}
	return v.repo.skipped(r.Skipped)
}

// skipped is the failure that follows the result of a verb that had to leave out tasks:
// what was not seen must not pass for empty, or for something that was checked.
func (f *repoFlags) skipped(tasks []string) error {
	if len(tasks) == 0 {
		return nil
	}
	return &reported{exitConflict, fmt.Sprintf("%s %s: %s", f.cmd.Name(), f.url, f.skippedText(tasks))}
}

// warnSkipped is skipped where the verb fails for a graver reason.
func (f *repoFlags) warnSkipped(tasks []string) {
	if len(tasks) > 0 {
		f.app.warn("%s", f.skippedText(tasks))
	}
}

// skippedText names the first tasks that were skipped and says how to reach them.
func (f *repoFlags) skippedText(tasks []string) string {
	const most = 3
	var names []string
	for _, text := range tasks[:min(len(tasks), most)] {
		name, _, _ := strings.Cut(text, ": ")
		names = append(names, name)
	}
	if len(tasks) > most {
		names = append(names, fmt.Sprintf("and %d more", len(tasks)-most))
	}
	how := "give --checkpoints raft+http://HOST:PORT of the group that keeps it"
	if f.checkpoints != "" {
		how = "leave --checkpoints out, or give that of the group that keeps it"
	}
	return fmt.Sprintf("skipped %s whose log is not here (%s): %s", count(int64(len(tasks)), "task"), strings.Join(names, ", "), how)
}

// printSkipped tells of each task that was skipped, and why.
func printSkipped(w io.Writer, tasks []string) {
	for _, s := range tasks {
		fmt.Fprintf(w, "skipped %s\n", s)
	}
}

// gcReport is the JSON of gc.
type gcReport struct {
	BlobsDeleted int64    `json:"blobs_deleted"`
	BytesDeleted int64    `json:"bytes_deleted"`
	Skipped      []string `json:"skipped"`
	DryRun       bool     `json:"dry_run,omitempty"`
}

func (v *gcVerb) print(r *snapferry.GCReport) error {
	report := gcReport{r.BlobsDeleted, r.BytesDeleted, append([]string{}, r.Skipped...), v.dryRun}
	return v.app.summary(report, func(w io.Writer) {
		did := "deleted"
		if v.dryRun {
			did = "dry run, would delete"
		}
		fmt.Fprintf(w, "%s %s, %s\n", did, count(r.BlobsDeleted, "blob"), size(r.BytesDeleted))
		printSkipped(w, r.Skipped)
	})
}
