package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
)

type lsVerb struct {
	app  *app
	repo repoFlags
}

func (a *app) newLs() *cobra.Command {
	v := &lsVerb{app: a}
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List checkpoints, newest first",
		Long: `List the checkpoints of the repository, newest first: of all tasks, or of those that --job
and --task name. Sizes are those of the files, not what they take in the repository. A
checkpoint that cannot be read is marked "damaged", and the exit code is 5 then. Tasks that
keep their checkpoints elsewhere, in a group for instance (--checkpoints), are not listed but
told as skipped, and the exit code is 4 then.

In JSON an offset whose key or value is no UTF-8 is not in "offsets" but in
"offsets_base64", key and value in base64.`,
		Example: examples(`
			snapferry ls --repo /backup
			snapferry ls --repo /backup --job orders --task p7 --json`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.repo.bind(a, cmd)
	v.repo.bindCheckpoints(cmd)
	v.repo.bindFilter(cmd)
	return cmd
}

func (v *lsVerb) run(ctx context.Context) error {
	if err := v.repo.checkFilter(); err != nil {
		return err
	}
	var list []snapferry.Checkpoint
	var skipped []string
	err := v.repo.withRepo(ctx, &snapferry.RepoOptions{}, func(repo *snapferry.Repo) (err error) {
		if list, err = repo.List(ctx, v.repo.picked()); err == nil {
			skipped, err = repo.Skipped(ctx, v.repo.picked())
		}
		return err
	})
	if err != nil {
		return err
	}
	report := struct {
		Checkpoints []listed `json:"checkpoints"`
		Skipped     []string `json:"skipped,omitempty"`
	}{[]listed{}, skipped}
	for i := range list {
		report.Checkpoints = append(report.Checkpoints, newListed(&list[i]))
	}
	if err := v.app.result(report, func(w io.Writer) { printList(w, list) }); err != nil {
		return err
	}
	if err := v.damaged(list); err != nil {
		v.repo.warnSkipped(skipped)
		return err
	}
	return v.repo.skipped(skipped)
}

// damaged is the failure that follows a list with entries that cannot be read.
func (v *lsVerb) damaged(list []snapferry.Checkpoint) error {
	n := int64(0)
	for i := range list {
		if list[i].Damaged != "" {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return &reported{exitCorrupt, fmt.Sprintf("ls %s: %s damaged: the others may be whole, which verify finds out", v.repo.url, count(n, "checkpoint"))}
}

// listed is a checkpoint in the JSON of ls.
type listed struct {
	Job        string `json:"job"`
	Task       string `json:"task"`
	Checkpoint string `json:"checkpoint"`
	Epoch      uint64 `json:"epoch"`
	Sequence   uint64 `json:"sequence"`
	Time       string `json:"time"`
	pairs
	Stores []string `json:"stores"`
	Bytes  int64    `json:"bytes"`
	// Damaged says why the checkpoint cannot be read; offsets and bytes are empty then.
	Damaged string `json:"damaged,omitempty"`
}

func newListed(c *snapferry.Checkpoint) listed {
	return listed{
		Job: c.Job, Task: c.Task, Checkpoint: c.ID, Epoch: c.Epoch, Sequence: c.Sequence,
		Time: timeText(c), pairs: newPairs(c.Offsets),
		Stores: slices.Sorted(maps.Keys(c.Stores)), Bytes: c.Bytes, Damaged: valid(c.Damaged),
	}
}

func printList(w io.Writer, list []snapferry.Checkpoint) {
	if len(list) == 0 {
		fmt.Fprintln(w, "no checkpoints")
		return
	}
	rows := []string{"TASK\tSEQ\tCHECKPOINT\tTIME\tSIZE\tSTORES\tOFFSETS"}
	for i := range list {
		c := &list[i]
		bytes := size(c.Bytes)
		if c.Damaged != "" {
			bytes = "damaged"
		}
		rows = append(rows, strings.Join([]string{
			c.Job + "/" + c.Task, fmt.Sprint(c.Sequence), c.ID, c.Time.UTC().Format("2006-01-02 15:04:05Z"), bytes,
			strings.Join(slices.Sorted(maps.Keys(c.Stores)), ","), offsetsText(c.Offsets, 40),
		}, "\t"))
	}
	table(w, rows)
}

// offsetsText writes offsets in one cell, cut when they are longer than limit.
func offsetsText(offsets map[string]string, limit int) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(offsets)) {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		pair := quote(k) + "=" + quote(offsets[k])
		if b.Len()+len(pair) > limit {
			b.WriteString("...")
			break
		}
		b.WriteString(pair)
	}
	return b.String()
}
