package main

import (
	"context"
	"fmt"
	"io"
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
checkpoints elsewhere are skipped, and the exit code is 4 then.`,
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
	return &reported{exitConflict, fmt.Sprintf("gc %s: skipped %s whose log is not here: run gc where it can be reached", v.repo.url, count(int64(len(r.Skipped)), "task"))}
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
		for _, s := range r.Skipped {
			fmt.Fprintf(w, "skipped %s\n", s)
		}
	})
}
