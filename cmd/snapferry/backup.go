package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
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
	hooks     hooks
	ckptDirs  []string
	compress  string
	metrics   metricsFile
}

func (a *app) newBackup() *cobra.Command {
	v := &backupVerb{app: a, hooks: hooks{warn: a.warn}}
	cmd := &cobra.Command{
		Use:   "backup [NAME=]PATH[,kind=KIND]...",
		Short: "Back up stores as one checkpoint",
		Long: `Back up each PATH, a directory or a single file, as the store NAME, by default the base
name of PATH. Only what changed since the last checkpoint is sent. All stores become one
checkpoint of the task; the first backup to an empty place makes the repository.

NAME ends at the first "=" if what stands before it is a valid name: write ./a=b for a
path with an equals sign. A path that is a symbolic link is followed; links below it are
stored as links.

KIND is auto, dir, sqlite, bolt, badger, pebble, pebble-hot or rocksdb; auto looks what is
there and says so. An SQLite database is read in a transaction while its owner writes. The
others are locked while they are read, and refused if another process has them open: that one
must end, or stand still by --freeze-cmd and --thaw-cmd with kind=dir, or make a checkpoint
that --from-checkpoint-dir names. pebble-hot copies a Pebble database that is open elsewhere
as a crash of its owner would leave it: all that was synced. kind=dir takes files as they are, and their writers should stand
still: a file that changes while it is read is read again, and the report says with
"consistent" whether nothing moved meanwhile.

--freeze-cmd runs before the stores are frozen. --thaw-cmd runs when what was frozen needs
no more standing still, which for files that are read in place is after the reading, and
always after a failure or an interrupt.
For --exclude conf, conf/, /conf and ./conf mean the same, and * and ? match no slash.

A backup takes the task over and waits for no one; an older one that still runs ends with
exit 4. All checkpoints are kept unless --keep-last says otherwise.`,
		Example: examples(`
			snapferry backup --repo /backup kv=/var/lib/app/kv
			snapferry backup --repo /backup --job orders --task p7 --offset topic-3=81723 kv=/data/kv meta=/data/meta.db
			snapferry backup --repo /backup /var/lib/app/app.sqlite users=/var/lib/app/users.db,kind=sqlite
			snapferry backup --repo /backup --freeze-cmd 'appctl pause' --thaw-cmd 'appctl resume' kv=/var/lib/app/kv,kind=dir
			snapferry backup --repo /backup --freeze-cmd 'appctl checkpoint' --from-checkpoint-dir /var/lib/app/ckpt kv=/var/lib/app/kv
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
	v.metrics.bind(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&v.offsets, "offset", nil, "`K=V`: where the application's input stands (may be repeated)")
	f.Var(&v.keepLast, "keep-last", "drop all but the newest N checkpoints (default keep all)")
	f.StringVar(&v.ifRunning, "if-running", "preempt", "`preempt|fail`: whether to end with exit 4 when another backup of the task wrote within 10 minutes")
	f.StringArrayVar(&v.exclude, "exclude", nil, "leave out what matches `GLOB`: a name at any depth, or a path if it has a slash (may be repeated)")
	f.StringArrayVar(&v.forget, "forget-store", nil, "`NAME` of a store that is gone for good: its last checkpoint need not be kept (may be repeated)")
	v.hooks.bind(cmd)
	f.StringArrayVar(&v.ckptDirs, "from-checkpoint-dir", nil, "take the files of a store from a checkpoint that its owner made: `[NAME=]DIR` (may be repeated)")
	f.BoolVar(&v.full, "full", false, "send everything again and reuse nothing that the repository holds: after damage")
	f.StringVar(&v.compress, "compression", "auto", "`auto|off`: whether chunks are compressed where a sample says that it pays")
	f.BoolVar(&v.dryRun, "dry-run", false, "say what would be sent, and change nothing")
	_ = cmd.RegisterFlagCompletionFunc("compression", cobra.FixedCompletions([]string{"auto", "off"}, cobra.ShellCompDirectiveNoFileComp))
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
	return v.metrics.around(v.app, "backup", id, func(counts *snapferry.Observer) error {
		opts.Observer = counts
		return v.task(ctx, id, opts, offsets, args)
	})
}

// task backs up one task.
func (v *backupVerb) task(ctx context.Context, id snapferry.TaskID, opts *snapferry.Options, offsets map[string]string, args []string) error {
	rules, err := v.rules(args)
	if err != nil {
		return err
	}
	repo, err := v.open(ctx, rules)
	if err != nil {
		return err
	}
	defer repo.close()
	opts.CacheDir = v.cacheDir()

	show := v.app.startProgress("read")
	opts.Observer = show.observer().With(opts.Observer)
	var report *snapferry.CommitReport
	if v.dryRun {
		report, err = snapferry.DryRun(ctx, id, repo.blobs, repo.cps, v.sources(rules), opts)
	} else {
		report, err = v.backup(ctx, id, repo, opts, rules, offsets)
	}
	_, told := errors.AsType[*reported](err)
	show.stop(err == nil || told)
	if err != nil && !told {
		return err
	}
	v.remind(show, report)
	return cmp.Or(v.print(id, report, rules), err)
}

// rules parses what is to be backed up and tells what was found.
func (v *backupVerb) rules(args []string) (map[string]rule, error) {
	rules, err := parseRules(args)
	if err != nil {
		return nil, err
	}
	if err := addCheckpointDirs(rules, v.ckptDirs); err != nil {
		return nil, err
	}
	for _, name := range v.forget {
		if _, ok := rules[name]; ok {
			return nil, usagef("--forget-store %s: that store is being backed up", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		switch r := rules[name]; {
		case r.checkpointDir != "":
			v.app.note("store %s: %s, from the checkpoint %s", name, kindNames[r.kind], r.checkpointDir)
		case r.kind == kindDir && hasJournal(r.path):
			v.app.warn("store %s is backed up as a plain file, without the %s-wal or -journal beside it: an encrypted database has its newest content there; stop its owner and back up the directory", name, filepath.Base(r.path))
		case howFrozen[r.kind] != "":
			v.app.note("store %s: %s, %s", name, kindNames[r.kind], howFrozen[r.kind])
		}
	}
	if v.dryRun && v.hooks.given() {
		v.app.note("a dry run runs neither --freeze-cmd nor --thaw-cmd")
	}
	return rules, nil
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
	switch v.compress {
	case "auto":
	case "off":
		opts.Compression = snapferry.CompressOff
	default:
		return nil, nil, usagef("--compression %q: it is auto or off", v.compress)
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
		sources[name] = r.source(v.exclude)
	}
	return sources
}

// backup takes the task, freezes the stores and commits them. A report with an error is a
// checkpoint that was committed while something else went wrong.
func (v *backupVerb) backup(ctx context.Context, id snapferry.TaskID, repo *repository, opts *snapferry.Options, rules map[string]rule, offsets map[string]string) (_ *snapferry.CommitReport, err error) {
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
	sources := v.sources(rules)
	if err := v.compareStores(task, sources); err != nil {
		return nil, err
	}
	return v.commit(ctx, task, rules, sources, offsets)
}

// commit freezes and commits the stores, with the hooks around as much of it as needs
// their owner to stand still.
func (v *backupVerb) commit(ctx context.Context, task *snapferry.Task, rules map[string]rule, sources map[string]source.Source, offsets map[string]string) (report *snapferry.CommitReport, err error) {
	var late error
	defer func() { err = v.thawed(report, err, errors.Join(late, v.hooks.thaw(ctx))) }()
	if err := v.hooks.freeze(ctx); err != nil {
		return nil, err
	}
	pending, err := task.Snapshot(ctx, sources, offsets)
	if err != nil {
		return nil, err
	}
	if !v.hooks.given() {
		return pending.Commit(ctx)
	}
	if allStandAlone(rules) {
		late = v.hooks.thaw(ctx)
	}
	if _, err := pending.Upload(ctx); err != nil {
		return nil, err
	}
	late = errors.Join(late, v.hooks.thaw(ctx))
	return pending.Publish(ctx)
}

// thawed joins the outcome of a commit with that of the command after it.
func (v *backupVerb) thawed(report *snapferry.CommitReport, err, thaw error) error {
	switch {
	case thaw == nil:
		return err
	case report == nil || err != nil:
		return errors.Join(err, thaw)
	}
	return &reported{exitFailed, fmt.Sprintf("checkpoint %s is committed, but its owner may still stand still: %v", report.Checkpoint, thaw)}
}

func allStandAlone(rules map[string]rule) bool {
	for _, r := range rules {
		if !r.standsAlone() {
			return false
		}
	}
	return true
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
	// Kinds says of each store that is more than plain files what it is.
	Kinds map[string]string `json:"kinds,omitempty"`
}

func (v *backupVerb) print(id snapferry.TaskID, r *snapferry.CommitReport, rules map[string]rule) error {
	kinds := map[string]string{}
	for name, rule := range rules {
		if rule.kind != kindDir {
			kinds[name] = rule.kind
		}
	}
	return v.app.summary(backupReport{r, v.dryRun, kinds}, func(w io.Writer) {
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
