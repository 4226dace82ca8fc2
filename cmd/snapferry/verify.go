package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
)

type verifyVerb struct {
	app      *app
	repo     repoFlags
	readData bool
}

func (a *app) newVerify() *cobra.Command {
	v := &verifyVerb{app: a}
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check that every checkpoint can be restored",
		Long: `Check every index, and that each blob it names is there in its full size; with --read-data
read every byte and compare its digest. It changes nothing. What is missing or corrupt is
listed and the exit code is 5; with --json the report is printed then too. A backup --full
stores the present state again, whatever is damaged of older ones.

Tasks that keep their checkpoints elsewhere, in a group for instance (--checkpoints), cannot
be checked from here: they are told as skipped, and the exit code is 4. "ok" in JSON is about
the others only.`,
		Example: examples(`
			snapferry verify --repo /backup
			snapferry verify --repo /backup --read-data --json
			snapferry verify --repo /backup --job orders --task p7`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.repo.bind(a, cmd)
	v.repo.bindCheckpoints(cmd)
	v.repo.bindFilter(cmd)
	v.repo.bindRate(cmd)
	cmd.Flags().BoolVar(&v.readData, "read-data", false, "read every byte")
	return cmd
}

func (v *verifyVerb) run(ctx context.Context) error {
	if err := v.repo.checkFilter(); err != nil {
		return err
	}
	show := v.app.startProgress("check")
	var r *snapferry.VerifyReport
	err := v.repo.withRepo(ctx, &snapferry.RepoOptions{Observer: show.observer()}, func(repo *snapferry.Repo) (err error) {
		r, err = repo.Verify(ctx, snapferry.VerifyOptions{Job: v.repo.job, Task: v.repo.task, ReadData: v.readData, OnBytes: show.read})
		return err
	})
	show.stop(err == nil)
	if err != nil {
		return err
	}
	if err := v.print(r); err != nil {
		return err
	}
	if r.OK {
		return v.repo.skipped(r.Skipped)
	}
	v.repo.warnSkipped(r.Skipped)
	return &reported{exitCorrupt, fmt.Sprintf("verify %s: %d missing, %d corrupt: run backup --full to store the present state again; older damaged checkpoints cannot be repaired", v.repo.url, len(r.Missing), len(r.Corrupt))}
}

// verifyReport is the JSON of verify.
type verifyReport struct {
	OK          bool     `json:"ok"`
	Checkpoints int64    `json:"checkpoints"`
	Blobs       int64    `json:"blobs"`
	Bytes       int64    `json:"bytes"`
	Missing     []damage `json:"missing"`
	Corrupt     []damage `json:"corrupt"`
	Skipped     []string `json:"skipped,omitempty"`
}

type damage struct {
	snapferry.Damage
	Path64 string `json:"path_base64,omitempty"`
}

func damages(list []snapferry.Damage) []damage {
	out := []damage{}
	for _, d := range list {
		e := damage{d, exact(d.Path)}
		e.Path = valid(d.Path)
		out = append(out, e)
	}
	return out
}

func (v *verifyVerb) print(r *snapferry.VerifyReport) error {
	report := verifyReport{r.OK, r.Checkpoints, r.Blobs, r.Bytes, damages(r.Missing), damages(r.Corrupt), r.Skipped}
	return v.app.summary(report, func(w io.Writer) {
		how := "all there in full size; --read-data reads every byte"
		if v.readData {
			how = "every byte was read"
		}
		if !r.OK {
			how = fmt.Sprintf("%d missing, %d corrupt", len(r.Missing), len(r.Corrupt))
		}
		fmt.Fprintf(w, "%s, %s, %s: %s\n", count(r.Checkpoints, "checkpoint"), count(r.Blobs, "blob"), size(r.Bytes), how)
		printDamage(w, "missing", r.Missing)
		printDamage(w, "corrupt", r.Corrupt)
		printSkipped(w, r.Skipped)
	})
}

func printDamage(w io.Writer, what string, list []snapferry.Damage) {
	for _, d := range list {
		fmt.Fprintf(w, "%s: blob %s bytes %d+%d: checkpoint %s store %s", what, d.Blob, d.Offset, d.Length, d.Checkpoint, d.Store)
		if d.Path != "" {
			fmt.Fprintf(w, " file %s", quote(d.Path))
		}
		fmt.Fprintln(w)
	}
}
