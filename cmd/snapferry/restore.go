package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
)

type restoreVerb struct {
	app         *app
	repo        repoFlags
	at          string
	store       string
	to          string
	include     []string
	inPlace     bool
	strictOwner bool
	dryRun      bool
	metrics     metricsFile
}

func (a *app) newRestore() *cobra.Command {
	v := &restoreVerb{app: a}
	cmd := &cobra.Command{
		Use:   "restore --to DIR",
		Short: "Bring directories to a checkpoint",
		Long: `Restore a checkpoint, by default the latest. Each store goes into DIR/NAME, which becomes
exactly the checkpoint's tree: what else lies in it is removed. With --store that store's
files go into DIR itself. Other entries of DIR are not touched.

Until the new tree is complete and verified the old one stays; then they are swapped. A
restore that was interrupted goes on where it was. What the target has already is reused.
A target that is a mount point cannot be swapped: name a directory in it, or use --in-place,
which is not atomic.

With --include only a part is restored. A pattern without a slash matches a name at any depth,
one with a slash the path from the top of the store; * and ? match no slash. conf, conf/, /conf
and ./conf mean the same. A store in which nothing matches is left out.`,
		Example: examples(`
			snapferry restore --repo /backup --to /var/lib/app
			snapferry restore --repo /backup --store kv --to /var/lib/app/kv
			snapferry restore --repo /backup --job orders --task p7 --at 2026-01-31T12:00:00Z --to /tmp/then
			snapferry restore --repo /backup --store kv --include 'conf/*' --to /tmp/conf
			snapferry restore --repo /backup --to /var/lib/app --dry-run --json`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.flags(cmd)
	return cmd
}

func (v *restoreVerb) flags(cmd *cobra.Command) {
	v.repo.bind(v.app, cmd)
	v.repo.bindCheckpoints(cmd)
	v.repo.bindTask(cmd)
	v.repo.bindRate(cmd)
	v.metrics.bind(cmd)
	f := cmd.Flags()
	v.at = "latest"
	f.Var(once(&v.at), "at", "`CHECKPOINT`: latest, an id, or a time (RFC 3339) that means the newest checkpoint not after it")
	f.Var(once(&v.store), "store", "restore only the store `NAME`, into DIR itself")
	f.Var(once(&v.to), "to", "`DIR` to restore into (needed)")
	f.StringArrayVar(&v.include, "include", nil, "restore only what matches `GLOB`, with what lies below it, into an absent or empty target (may be repeated)")
	f.BoolVar(&v.inPlace, "in-place", false, "replace the entries of the target one by one: for mount points, not atomic")
	f.BoolVar(&v.strictOwner, "strict-owner", false, "fail if an owner cannot be set, instead of a warning")
	f.BoolVar(&v.dryRun, "dry-run", false, "say what would be fetched and reused, and change nothing")
	_ = cmd.MarkFlagDirname("to")
}

func (v *restoreVerb) run(ctx context.Context) error {
	id, at, err := v.check()
	if err != nil {
		return err
	}
	return v.metrics.around(v.app, "restore", id, func(counts *snapferry.Observer) error {
		return v.task(ctx, id, at, counts)
	})
}

// task restores one task.
func (v *restoreVerb) task(ctx context.Context, id snapferry.TaskID, at snapferry.At, counts *snapferry.Observer) error {
	show := v.app.startProgress("restore")
	var report *snapferry.RestoreReport
	opts := &snapferry.RepoOptions{Observer: show.observer().With(counts)}
	opts.CacheDir, _ = v.app.cacheDir() // without one nothing has to be made void
	err := v.repo.withRepo(ctx, opts, func(repo *snapferry.Repo) (err error) {
		if err := v.checkTargets(ctx, repo, id, at); err != nil {
			return err
		}
		report, err = repo.Restore(ctx, id, at, v.targets(), v.options())
		return err
	})
	show.stop(err == nil)
	if err != nil {
		return err
	}
	show.remind(report.Warnings)
	return v.print(id, report)
}

func (v *restoreVerb) check() (id snapferry.TaskID, at snapferry.At, err error) {
	if v.to == "" {
		return id, at, usagef("where to? Give --to DIR")
	}
	if v.store != "" {
		if err := checkNames("--store", []string{v.store}); err != nil {
			return id, at, err
		}
	}
	if v.include, err = cleanGlobs("--include", v.include); err != nil {
		return id, at, err
	}
	if len(v.include) > 0 && v.inPlace {
		return id, at, usagef("--include and --in-place cannot go together: a part never replaces a whole")
	}
	if at, err = parseAt(v.at); err != nil {
		return id, at, err
	}
	if id, err = v.repo.id(); err != nil {
		return id, at, err
	}
	// The directory that this process is in may be the one that is replaced.
	v.to, err = filepath.Abs(v.to)
	return id, at, err
}

// targets are given for one store only; otherwise each goes below the directory.
func (v *restoreVerb) targets() map[string]string {
	if v.store == "" {
		return nil
	}
	return map[string]string{v.store: v.to}
}

func (v *restoreVerb) options() *snapferry.RestoreOptions {
	o := &snapferry.RestoreOptions{Include: v.include, InPlace: v.inPlace, StrictOwner: v.strictOwner, DryRun: v.dryRun}
	if v.store == "" {
		o.Dir = v.to
	}
	return o
}

// checkTargets refuses targets that a restore would harm: those that hold the
// repository itself, and with --include those that hold anything, since what is left
// out would be removed there.
func (v *restoreVerb) checkTargets(ctx context.Context, repo *snapferry.Repo, id snapferry.TaskID, at snapferry.At) error {
	local, ok := localDir(v.repo.url)
	if ok && within(local, realPath(v.to)) {
		return usagef("--to %s lies in the repository: choose another place", v.to)
	}
	if len(v.include) == 0 && !ok {
		return nil
	}
	targets, err := v.targetDirs(ctx, repo, id, at)
	if err != nil {
		return err
	}
	for _, dir := range targets {
		if ok && within(realPath(dir), local) {
			return usagef("the repository lies in %s, which the restore would replace: choose another place", dir)
		}
		if err := v.checkEmpty(dir); err != nil {
			return err
		}
	}
	return nil
}

// targetDirs returns the directories that will be replaced.
func (v *restoreVerb) targetDirs(ctx context.Context, repo *snapferry.Repo, id snapferry.TaskID, at snapferry.At) ([]string, error) {
	if v.store != "" {
		return []string{v.to}, nil
	}
	c, err := repo.Show(ctx, id, at)
	if e, ok := errors.AsType[*snapferry.Error](err); ok {
		return nil, &snapferry.Error{Op: "restore", Subject: e.Subject, Err: e.Err}
	}
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, name := range slices.Sorted(maps.Keys(c.Stores)) {
		dirs = append(dirs, filepath.Join(v.to, name))
	}
	return dirs, nil
}

func (v *restoreVerb) checkEmpty(dir string) error {
	if len(v.include) == 0 {
		return nil
	}
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("restore %s: %w", dir, err)
	case len(entries) > 0:
		return usagef("%s is not empty: --include restores a part, which would remove the rest; name an absent or empty directory", dir)
	}
	return nil
}

// restoreReport is the JSON of restore.
type restoreReport struct {
	*snapferry.RestoreReport
	DryRun bool `json:"dry_run,omitempty"`
}

func (v *restoreVerb) print(id snapferry.TaskID, r *snapferry.RestoreReport) error {
	return v.app.summary(restoreReport{r, v.dryRun}, func(w io.Writer) {
		if v.dryRun {
			fmt.Fprintf(w, "dry run, nothing was changed: a restore of %s of %s would take this (%s)\n", r.Checkpoint, id, millis(r.Millis))
		} else {
			fmt.Fprintf(w, "restored %s of %s from %s, took %s\n", r.Checkpoint, id, v.repo.url, millis(r.Millis))
		}
		rows := []string{"STORE\tFILES\tFETCHED\tREUSED\tTARGET"}
		for _, name := range slices.Sorted(maps.Keys(r.Stores)) {
			target := v.to
			if v.store == "" {
				target = filepath.Join(v.to, name)
			}
			s := r.Stores[name]
			rows = append(rows, fmt.Sprintf("%s\t%d\t%s\t%s\t%s", name, s.FilesRestored, size(s.BytesFetched), size(s.BytesReused), quote(target)))
		}
		table(w, rows)
	})
}
