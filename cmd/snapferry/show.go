package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/snapshot"
)

type showVerb struct {
	app   *app
	repo  repoFlags
	at    string
	store string
	files bool
}

func (a *app) newShow() *cobra.Command {
	v := &showVerb{app: a}
	cmd := &cobra.Command{
		Use:   "show [CHECKPOINT]",
		Short: "Print a checkpoint: its stores, offsets, totals, and with --files the tree",
		Long: `Print one checkpoint, by default the latest: what CHECKPOINT or --at names. With --files
the tree of each store follows in the manner of ls -l, names that are not plain text
quoted as in C.

In JSON a path, link or user name whose bytes are no UTF-8 has U+FFFD for them, and
beside it stands a field with "_base64" after its name that has the exact bytes.`,
		Example: examples(`
			snapferry show --repo /backup
			snapferry show --repo /backup --job orders --task p7 --at 2026-01-31T12:00:00Z --json
			snapferry show --repo /backup --store kv --files`),
		Args: atMostOneArg,
		RunE: func(cmd *cobra.Command, args []string) error { return v.run(cmd.Context(), args) },
	}
	v.repo.bind(a, cmd)
	v.repo.bindCheckpoints(cmd)
	v.repo.bindTask(cmd)
	f := cmd.Flags()
	f.Var(once(&v.at), "at", "`CHECKPOINT`: latest, an id, or a time (RFC 3339) that means the newest checkpoint not after it")
	f.Var(once(&v.store), "store", "only the store `NAME`")
	f.BoolVar(&v.files, "files", false, "print every file")
	return cmd
}

func (v *showVerb) run(ctx context.Context, args []string) error {
	if len(args) == 1 {
		if v.at != "" {
			return usagef("CHECKPOINT and --at are both given: one is enough")
		}
		if v.at = args[0]; v.at == "" {
			return usagef("CHECKPOINT may not be empty")
		}
	}
	at, err := parseAt(v.at)
	if err != nil {
		return err
	}
	id, err := v.repo.id()
	if err != nil {
		return err
	}
	return v.repo.withRepo(ctx, &snapferry.RepoOptions{}, func(repo *snapferry.Repo) error {
		c, err := repo.Show(ctx, id, at)
		if err != nil {
			return err
		}
		if err := v.pick(c); err != nil {
			return err
		}
		trees, err := v.trees(ctx, repo, c)
		if err != nil {
			return err
		}
		return v.app.result(newShown(c, trees), func(w io.Writer) { printShown(w, c, trees) })
	})
}

// pick leaves only the store that --store names.
func (v *showVerb) pick(c *snapferry.Checkpoint) error {
	if v.store == "" {
		return nil
	}
	s, ok := c.Stores[v.store]
	if !ok {
		return &snapferry.Error{Op: "show", Subject: c.ID, Err: fmt.Errorf("no store %s in this checkpoint: %w", v.store, snapferry.ErrNotFound)}
	}
	c.Stores, c.Bytes = map[string]snapferry.StoreInfo{v.store: s}, s.Bytes
	return nil
}

func (v *showVerb) trees(ctx context.Context, repo *snapferry.Repo, c *snapferry.Checkpoint) (map[string]*snapshot.Index, error) {
	if !v.files {
		return nil, nil
	}
	trees := map[string]*snapshot.Index{}
	for name := range c.Stores {
		x, err := repo.Index(ctx, c, name)
		if err != nil {
			return nil, err
		}
		trees[name] = x
	}
	return trees, nil
}

func printShown(w io.Writer, c *snapferry.Checkpoint, trees map[string]*snapshot.Index) {
	rows := []string{
		"checkpoint\t" + c.ID,
		"task\t" + c.Job + "/" + c.Task,
		fmt.Sprintf("epoch\t%d", c.Epoch),
		fmt.Sprintf("sequence\t%d", c.Sequence),
		"time\t" + timeText(c),
		fmt.Sprintf("consistent\t%t", c.Consistent),
		"size\t" + size(c.Bytes),
	}
	for _, k := range slices.Sorted(maps.Keys(c.Labels)) {
		rows = append(rows, "label "+quote(k)+"\t"+quote(c.Labels[k]))
	}
	for _, k := range slices.Sorted(maps.Keys(c.Offsets)) {
		rows = append(rows, "offset "+quote(k)+"\t"+quote(c.Offsets[k]))
	}
	table(w, rows)
	fmt.Fprintln(w)
	rows = []string{"STORE\tFILES\tDIRS\tLINKS\tSIZE\tINDEX"}
	for _, name := range slices.Sorted(maps.Keys(c.Stores)) {
		s := c.Stores[name]
		rows = append(rows, fmt.Sprintf("%s\t%d\t%d\t%d\t%s\t%s", name, s.Files, s.Dirs, s.Links, size(s.Bytes), s.Marker))
	}
	table(w, rows)
	for _, name := range slices.Sorted(maps.Keys(trees)) {
		fmt.Fprintf(w, "\n%s:\n", name)
		printTree(w, trees[name])
	}
}

// shown is the JSON of show.
type shown struct {
	Job        string `json:"job"`
	Task       string `json:"task"`
	Checkpoint string `json:"checkpoint"`
	Epoch      uint64 `json:"epoch"`
	Sequence   uint64 `json:"sequence"`
	Time       string `json:"time"`
	Consistent bool   `json:"consistent"`
	pairs
	Labels map[string]string     `json:"labels,omitempty"`
	Stores map[string]shownStore `json:"stores"`
	Bytes  int64                 `json:"bytes"`
}

type shownStore struct {
	Files   int64       `json:"files"`
	Dirs    int64       `json:"dirs"`
	Links   int64       `json:"links"`
	Bytes   int64       `json:"bytes"`
	Index   string      `json:"index"`
	Entries []shownFile `json:"entries,omitempty"`
}

func newShown(c *snapferry.Checkpoint, trees map[string]*snapshot.Index) shown {
	s := shown{
		Job: c.Job, Task: c.Task, Checkpoint: c.ID, Epoch: c.Epoch, Sequence: c.Sequence, Time: timeText(c),
		Consistent: c.Consistent, pairs: newPairs(c.Offsets), Labels: c.Labels, Stores: map[string]shownStore{}, Bytes: c.Bytes,
	}
	for name, i := range c.Stores {
		s.Stores[name] = shownStore{Files: i.Files, Dirs: i.Dirs, Links: i.Links, Bytes: i.Bytes, Index: i.Marker, Entries: shownFiles(trees[name])}
	}
	return s
}
