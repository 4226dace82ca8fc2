package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/source"
)

type backupVerb struct {
	app       *app
	repo      repoFlags
	offsets   []string
	exclude   []string
	forget    []string
	keepLast  positive
	ifRunning string
	full      bool
	dryRun    bool
}

func (a *app) newBackup() *cobra.Command {
	v := &backupVerb{app: a}
	cmd := &cobra.Command{
		Use:   "backup [NAME=]PATH[,kind=auto|dir]...",
		Short: "Back up stores as one checkpoint",
		Long: `Back up each PATH, a directory or a single file, as the store NAME, by default the base
name of PATH. Only what changed since the last checkpoint is sent. All stores become one
checkpoint of the task; the first backup to an empty place makes the repository.

NAME ends at the first "=" if what stands before it is a valid name: write ./a=b for a
path with an equals sign. A path that is a symbolic link is followed; links below it are
stored as links. Writers of the stores should stand still: a file that changes while it is
read is read again, and the report says with "consistent" whether nothing moved meanwhile.
For --exclude conf, conf/, /conf and ./conf mean the same, and * and ? match no slash.

A backup takes the task over and waits for no one; an older one that still runs ends with
exit 4. All checkpoints are kept unless --keep-last says otherwise.`,
		Example: examples(`
			snapferry backup --repo /backup kv=/var/lib/app/kv
			snapferry backup --repo /backup --job orders --task p7 --offset topic-3=81723 kv=/data/kv meta=/data/meta.db
			snapferry backup --repo /backup --keep-last 30 --if-running fail --limit-rate 20MiB/s /var/lib/app/kv
			snapferry backup --repo /backup --exclude '*.tmp' --dry-run --json kv=/var/lib/app/kv
			snapferry backup --repo /backup --checkpoints raft+http://10.0.0.1:7480,10.0.0.2:7480,10.0.0.3:7480 kv=/var/lib/app/kv`),
		RunE: func(cmd *cobra.Command, args []string) error { return v.run(cmd.Context(), args) },
	}
	v.flags(cmd)
	return cmd
}

func (v *backupVerb) flags(cmd *cobra.Command) {
	v.repo.bind(v.app, cmd)
	v.repo.bindCheckpoints(cmd)
	v.repo.bindTask(cmd)
	v.repo.bindRate(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&v.offsets, "offset", nil, "`K=V`: where the application's input stands (may be repeated)")
	f.Var(&v.keepLast, "keep-last", "drop all but the newest N checkpoints (default keep all)")
	f.StringVar(&v.ifRunning, "if-running", "preempt", "`preempt|fail`: whether to end with exit 4 when another backup of the task wrote within 10 minutes")
	f.StringArrayVar(&v.exclude, "exclude", nil, "leave out what matches `GLOB`: a name at any depth, or a path if it has a slash (may be repeated)")
	f.StringArrayVar(&v.forget, "forget-store", nil, "`NAME` of a store that is gone for good: its last checkpoint need not be kept (may be repeated)")
	f.BoolVar(&v.full, "full", false, "send everything again and reuse nothing that the repository holds: after damage")
	f.BoolVar(&v.dryRun, "dry-run", false, "say what would be sent, and change nothing")
	_ = cmd.RegisterFlagCompletionFunc("if-running", cobra.FixedCompletions([]string{"preempt", "fail"}, cobra.ShellCompDirectiveNoFileComp))
}

func (v *backupVerb) run(ctx context.Context, args []string) error {
	id, err := v.repo.id()
	if err != nil {
		return err
	}
	opts, offsets, err := v.options()
	if err != nil {
		return err
	}
	rules, err := parseRules(args)
	if err != nil {
		return err
	}
	for _, name := range v.forget {
		if _, ok := rules[name]; ok {
			return usagef("--forget-store %s: that store is being backed up", name)
		}
	}
	repo, err := v.open(ctx, rules)
	if err != nil {
		return err
	}
	defer repo.close()
	opts.CacheDir = v.cacheDir()

	show := v.app.startProgress("read")
	opts.Observer = show.observer()
	var report *snapferry.CommitReport
	if v.dryRun {
		report, err = snapferry.DryRun(ctx, id, repo.blobs, repo.cps, v.sources(rules), opts)
	} else {
		report, err = v.backup(ctx, id, repo, opts, v.sources(rules), offsets)
	}
	show.stop(err == nil)
	if err != nil {
		return err
	}
	v.remind(show, report)
	return v.print(id, report)
}

// remind tells of what a report has and nobody may miss.
func (v *backupVerb) remind(show *progress, r *snapferry.CommitReport) {
	show.remind(r.Warnings)
	if !r.Consistent {
		v.app.warn("files changed during the backup: each one is whole, but together they may be no single moment of the store")
	}
}

// cacheDir makes the directory of the identity caches, and warns if there is none.
func (v *backupVerb) cacheDir() string {
	dir, err := v.app.cacheDir()
	if err == nil && !v.dryRun {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		v.app.warn("no cache, so every file is read each time: %v", err)
		return ""
	}
	return dir
}

// options checks the flags.
func (v *backupVerb) options() (*snapferry.Options, map[string]string, error) {
	opts := &snapferry.Options{KeepLast: snapferry.KeepAll, Reread: true, Full: v.full}
	if v.keepLast > 0 {
		opts.KeepLast = int(v.keepLast)
	}
	switch v.ifRunning {
	case "preempt":
		opts.IfRunning = snapferry.Preempt
	case "fail":
		opts.IfRunning = snapferry.Fail
	default:
		return nil, nil, usagef("--if-running %q: it is preempt or fail", v.ifRunning)
	}
	if err := checkNames("--forget-store", v.forget); err != nil {
		return nil, nil, err
	}
	exclude, err := cleanGlobs("--exclude", v.exclude)
	if err != nil {
		return nil, nil, err
	}
	v.exclude = exclude
	offsets, err := parseOffsets(v.offsets)
	return opts, offsets, err
}

// open opens the repository, for a dry run so that nothing in it can change.
func (v *backupVerb) open(ctx context.Context, rules map[string]rule) (*repository, error) {
	if v.dryRun {
		return v.repo.openDry(ctx)
	}
	repo, err := v.repo.ensure(ctx)
	if err != nil {
		return nil, err
	}
	if repo.created {
		v.app.note("made a new repository %s (id %s)", v.repo.url, repo.info.ID)
	}
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		if dir, ok := localDir(v.repo.url); ok && within(rules[name].path, dir) {
			v.app.warn("store %s contains the repository itself, which grows with each backup: move it, or leave it out with --exclude", name)
		}
	}
	return repo, nil
}

func (v *backupVerb) sources(rules map[string]rule) map[string]source.Source {
	sources := map[string]source.Source{}
	for name, r := range rules {
		sources[name] = source.Dir(r.path, &source.DirOptions{Exclude: v.exclude})
	}
	return sources
}

// backup takes the task, freezes the stores and commits them.
func (v *backupVerb) backup(ctx context.Context, id snapferry.TaskID, repo *repository, opts *snapferry.Options, sources map[string]source.Source, offsets map[string]string) (_ *snapferry.CommitReport, err error) {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	waits := newPatience(repo.logs, giveUp, v.app.warn)
	defer waits.end()
	cps := checkpoint.New(waits, nil) // not closed: the repository closes its logs

	task, err := snapferry.Open(ctx, id, repo.blobs, cps, opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, task.Close()) }()
	if err := v.compareStores(task, sources); err != nil {
		return nil, err
	}
	pending, err := task.Snapshot(ctx, sources, offsets)
	if err != nil {
		return nil, err
	}
	return pending.Commit(ctx)
}

// compareStores forgets the stores that are to be forgotten and warns of others that
// the last checkpoint had and this one will not.
func (v *backupVerb) compareStores(task *snapferry.Task, sources map[string]source.Source) error {
	before, err := task.Stores()
	if err != nil {
		return err
	}
	for _, name := range before {
		if _, ok := sources[name]; !ok && !slices.Contains(v.forget, name) {
			v.app.warn("the last checkpoint had a store %s and this one has not; its newest checkpoint is kept (--forget-store %s ends that)", name, name)
		}
	}
	if len(v.forget) == 0 {
		return nil
	}
	return task.Forget(v.forget...)
}

// backupReport is the JSON of backup.
type backupReport struct {
	*snapferry.CommitReport
	DryRun bool `json:"dry_run,omitempty"`
}

func (v *backupVerb) print(id snapferry.TaskID, r *snapferry.CommitReport) error {
	return v.app.summary(backupReport{r, v.dryRun}, func(w io.Writer) {
		if v.dryRun {
			fmt.Fprintf(w, "dry run, nothing was changed: a backup of %s to %s would send this (%s)\n", id, v.repo.url, millis(r.Millis))
		} else {
			fmt.Fprintf(w, "checkpoint %s of %s, sequence %d, in %s, took %s\n", r.Checkpoint, id, r.Sequence, v.repo.url, millis(r.Millis))
		}
		rows := []string{"STORE\tSENT\t\tSTORED\tKEPT\t\tREMOVED\t"}
		for _, name := range slices.Sorted(maps.Keys(r.Stores)) {
			s := r.Stores[name]
			rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", name,
				files(s.FilesUploaded), size(s.BytesUploaded), size(s.BytesStored),
				files(s.FilesRetained), size(s.BytesRetained), files(s.FilesRemoved), size(s.BytesRemoved)))
		}
		table(w, rows)
	})
}
