package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/blob/s3blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/checkpoint/raftcp"
)

// place is where a repository is to be opened, with what a driver may ask and tell.
type place struct {
	url    string
	create bool // a place that is absent is made, where the store can
	warn   func(text string)
}

// schemes is the table of URL schemes. The library has no such table: its users
// import the driver they want.
var schemes = map[string]func(context.Context, place) (blob.Driver, error){
	"file": openFileURL,
	"mem":  func(context.Context, place) (blob.Driver, error) { return memblob.New(), nil },
	"s3":   openS3,

	"gs":     openGCS,
	"azblob": openAzure,
}

// knownPlaces is how messages and help tell what --repo takes.
const knownPlaces = "a path, file:///DIR, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, azblob://CONTAINER/PREFIX and mem:"

var schemeOf = regexp.MustCompile(`^([a-zA-Z][a-zA-Z0-9+.-]*)://|^(mem|file|s3|gs|azblob):`)

// openDriver opens what --repo names: a URL or a plain path.
func openDriver(ctx context.Context, p place) (blob.Driver, error) {
	m := schemeOf.FindStringSubmatch(p.url)
	if m == nil {
		return openDir(p.url, p.create)
	}
	name := strings.ToLower(m[1] + m[2])
	if open, ok := schemes[name]; ok {
		return open(ctx, p)
	}
	return nil, usagef("unknown scheme %s://: known are %s", name, knownPlaces)
}

// openS3 makes no bucket: who may make one, and where, is for its owner to say.
func openS3(ctx context.Context, p place) (blob.Driver, error) {
	bucket, opts, err := s3blob.ParseURL(p.url)
	if err != nil {
		return nil, usagef("--repo: %w", err)
	}
	opts.Warn = p.warn
	d, err := s3blob.Open(ctx, bucket, opts)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func openFileURL(_ context.Context, p place) (blob.Driver, error) {
	u, err := url.Parse(p.url)
	if err != nil || u.Host != "" && u.Host != "localhost" || !strings.HasPrefix(u.Path, "/") || u.RawQuery != "" || u.Fragment != "" {
		return nil, usagef("%q is no file URL: write file:///DIR, with %%3F for a question mark", p.url)
	}
	return openDir(u.Path, p.create)
}

func openDir(dir string, create bool) (blob.Driver, error) {
	d, err := fsblob.Open(dir, &fsblob.Options{Create: create})
	if errors.Is(err, fs.ErrNotExist) && !create {
		err = errNoRepository
	}
	if err != nil {
		return nil, &snapferry.Error{Op: "open", Subject: dir, Err: err}
	}
	return d, nil
}

// errNoRepository is ErrNotFound when it is not for the lack of a checkpoint.
var errNoRepository = fmt.Errorf("no repository here: %w", snapferry.ErrNotFound)

// errBadInfo is ErrCorrupt when it is the repository's own file that is damaged, so
// that no verb can open the repository.
var errBadInfo = errors.New("its snapferry.json is damaged")

// refused adds what the command knows about a repository that was not opened.
func (f *repoFlags) refused(err error) error {
	switch {
	case errors.Is(err, snapferry.ErrCorrupt):
		err = fmt.Errorf("%w: %w", errBadInfo, err)
	case errors.Is(err, snapferry.ErrNotFound):
		err = errNoRepository
	default:
		return err
	}
	return &snapferry.Error{Op: "open", Subject: f.url, Err: err}
}

// localDir returns the directory of a repository on this machine.
func localDir(repo string) (string, bool) {
	if schemeOf.MatchString(repo) {
		u, err := url.Parse(repo)
		if err != nil || u.Scheme != "file" {
			return "", false
		}
		repo = u.Path
	}
	return realPath(repo), true
}

// realPath returns an absolute path without symbolic links, as far as it exists.
func realPath(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		return filepath.Clean(path)
	}
	rest := ""
	for dir := abs; ; dir = filepath.Dir(dir) {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			return filepath.Join(real, rest)
		}
		if dir == filepath.Dir(dir) {
			return abs
		}
		rest = filepath.Join(filepath.Base(dir), rest)
	}
}

// repoFlags are the flags of every verb that opens a repository.
type repoFlags struct {
	app       *app
	cmd       *cobra.Command
	url       string
	job, task string
	filter    bool // job and task pick tasks instead of naming one
	rate      byteRate

	checkpoints string // where the logs are; "" is the repository itself
	tls         tlsFlags
}

func (f *repoFlags) bind(a *app, cmd *cobra.Command) {
	f.app, f.cmd = a, cmd
	cmd.Flags().Var(once(&f.url), "repo", "`URL` of the repository: a path, file:///DIR, s3://BUCKET/PREFIX?endpoint=URL&region=NAME (docs/s3.md), gs://BUCKET/PREFIX (docs/gcs.md), azblob://CONTAINER/PREFIX?account=NAME (docs/azure.md) or mem: (default $SNAPFERRY_REPO)")
	a.outputFlags(cmd)
}

// bindCheckpoints adds the flags of verbs that read or write checkpoints.
func (f *repoFlags) bindCheckpoints(cmd *cobra.Command) {
	cmd.Flags().Var(once(&f.checkpoints), "checkpoints", "`URL` of the group that keeps the checkpoints: raft+http://HOST:PORT,HOST:PORT or raft+https:// (default the repository itself)")
	f.tls.bind(cmd)
}

// bindTask adds the flags that name one task.
func (f *repoFlags) bindTask(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.job, "job", "default", "`NAME` of the service whose state it is")
	cmd.Flags().StringVar(&f.task, "task", "default", "`NAME` of the owner of the state within the job: an instance, shard or partition")
}

// bindFilter adds the flags that pick tasks; without them it is all.
func (f *repoFlags) bindFilter(cmd *cobra.Command) {
	f.filter = true
	cmd.Flags().StringVar(&f.job, "job", "", "only the job `NAME` (default all)")
	cmd.Flags().StringVar(&f.task, "task", "", "only the task `NAME` (default all)")
}

func (f *repoFlags) bindRate(cmd *cobra.Command) {
	cmd.Flags().Var(&f.rate, "limit-rate", "at most so many bytes a second, as in 500K, 20MiB/s or 1GB")
}

func (f *repoFlags) id() (snapferry.TaskID, error) {
	id := snapferry.TaskID{Job: f.job, Task: f.task}
	if err := id.Validate(); err != nil {
		return id, usagef("%w", err)
	}
	return id, nil
}

// picked returns which tasks are meant.
func (f *repoFlags) picked() snapferry.ListFilter {
	return snapferry.ListFilter{Job: f.job, Task: f.task}
}

// checkFilter checks the names that pick tasks.
func (f *repoFlags) checkFilter() error {
	for flag, name := range map[string]string{"job": f.job, "task": f.task} {
		if !f.cmd.Flags().Changed(flag) {
			continue
		}
		if err := checkNames("--"+flag, []string{name}); err != nil {
			return err
		}
	}
	return nil
}

// checkFound fails if there is no task that --job and --task name: what is not there
// must not pass for something empty, or for something that was checked.
func (f *repoFlags) checkFound(ctx context.Context, cps *checkpoint.Store, repo *snapferry.Repo) error {
	if f.job == "" && f.task == "" {
		return nil
	}
	for id, err := range cps.Tasks(ctx) {
		if err != nil {
			return &snapferry.Error{Op: f.cmd.Name(), Subject: f.url, Err: err}
		}
		if (f.job == "" || f.job == id.Job) && (f.task == "" || f.task == id.Task) {
			return nil
		}
	}
	if skipped, err := repo.Skipped(ctx, f.picked()); err != nil || len(skipped) > 0 {
		return err // it is elsewhere, which the verb tells
	}
	what := cmp.Or(f.job, "*") + "/" + cmp.Or(f.task, "*")
	return &snapferry.Error{Op: f.cmd.Name(), Subject: f.url, Err: fmt.Errorf("no task %s in this repository: %w", what, snapferry.ErrNotFound)}
}

// location returns where the repository is. Every verb comes by here before it opens
// anything, so what is wrong with --checkpoints is told before something is made.
func (f *repoFlags) location() (string, error) {
	if _, err := f.group(); err != nil {
		return "", err
	}
	if f.url == "" {
		f.url = f.app.getenv("SNAPFERRY_REPO")
	}
	if f.url == "" {
		return "", usagef("no repository: give --repo URL or set SNAPFERRY_REPO")
	}
	return f.url, nil
}

// warnIfFleeting tells of a repository that was written for nothing.
func (f *repoFlags) warnIfFleeting() {
	if m := schemeOf.FindStringSubmatch(f.url); m != nil && strings.EqualFold(m[1]+m[2], "mem") {
		f.app.warn("%s is in memory only, and gone when this process ends", f.url)
	}
}

// warnIfUnfenced reminds of what init was told to accept.
func (f *repoFlags) warnIfUnfenced(info snapferry.RepoInfo) {
	if info.NoFencing {
		f.app.warn("the store does not keep writers apart (init --unsafe-no-fencing): never let two backups of one task run at a time")
	}
}

// blobs opens the blob store without looking whether a repository is in it.
func (f *repoFlags) blobs(ctx context.Context, create bool) (*blob.Store, error) {
	location, err := f.location()
	if err != nil {
		return nil, err
	}
	driver, err := f.app.openDriver(ctx, f.place(location, create))
	if err != nil {
		return nil, err
	}
	return f.store(driver, location), nil
}

func (f *repoFlags) place(location string, create bool) place {
	return place{url: location, create: create, warn: func(text string) { f.app.warn("%s", oneLine(text)) }}
}

func (f *repoFlags) store(driver blob.Driver, name string) *blob.Store {
	return blob.New(driver, &blob.Options{
		Name:           name,
		BytesPerSecond: int64(f.rate),
		OnRetry: func(op, key string, err error, delay time.Duration) {
			f.app.warn("%s %s did not work, again in %s: %s", op, key, delay.Round(time.Millisecond), oneLine(err.Error()))
		},
	})
}

// repository is an open repository with the checkpoint store that goes with it.
type repository struct {
	info    snapferry.RepoInfo
	created bool
	blobs   *blob.Store
	logs    checkpoint.Driver
	cps     *checkpoint.Store // over logs
}

func (r *repository) close() {
	_ = r.cps.Close() // reads and writes have been answered by now
	_ = r.blobs.Close()
}

// open opens a repository that exists.
func (f *repoFlags) open(ctx context.Context) (*repository, error) {
	blobs, err := f.blobs(ctx, false)
	if err != nil {
		return nil, err
	}
	info, err := snapferry.ReadInfo(ctx, blobs)
	if err != nil {
		_ = blobs.Close()
		return nil, f.refused(err)
	}
	return f.repository(info, false, blobs)
}

// ensure opens a repository and makes it if there is none.
func (f *repoFlags) ensure(ctx context.Context) (*repository, error) {
	if err := f.reachGroup(ctx); err != nil {
		return nil, err
	}
	blobs, err := f.blobs(ctx, true)
	if err != nil {
		return nil, err
	}
	info, created, err := snapferry.Ensure(ctx, blobs)
	if err != nil {
		_ = blobs.Close()
		return nil, f.refused(err)
	}
	f.warnIfFleeting()
	return f.repository(info, created, blobs)
}

// reachGroup fails if checkpoints are to lie in a group that does not answer, before a
// repository is made for nothing.
func (f *repoFlags) reachGroup(ctx context.Context) error {
	group, err := f.group()
	if group == nil || err != nil {
		return err
	}
	logs, err := f.logs(snapferry.RepoInfo{}, nil)
	if err != nil {
		return err
	}
	defer logs.Close()
	if _, err := logs.Info(ctx); err != nil {
		return &snapferry.Error{Op: "open", Subject: f.checkpoints, Err: err}
	}
	return nil
}

// openDry opens a repository for a dry run, or an empty one in memory in its place if
// there is none. Nothing is written.
func (f *repoFlags) openDry(ctx context.Context) (*repository, error) {
	location, err := f.location()
	if err != nil {
		return nil, err
	}
	driver, err := f.app.openDriver(ctx, f.place(location, false))
	if errors.Is(err, snapferry.ErrNotFound) {
		driver, err = memblob.New(), nil
	}
	if err != nil {
		return nil, err
	}
	blobs := f.store(driver, location)
	info, err := snapferry.ReadInfo(ctx, blobs)
	if err != nil && !errors.Is(err, snapferry.ErrNotFound) {
		_ = blobs.Close()
		return nil, f.refused(err)
	}
	return f.repository(info, false, blobs)
}

// repository adds the logs, which lie where --checkpoints says. It closes blobs if it fails.
func (f *repoFlags) repository(info snapferry.RepoInfo, created bool, blobs *blob.Store) (*repository, error) {
	f.warnIfUnfenced(info)
	logs, err := f.logs(info, blobs)
	if err != nil {
		_ = blobs.Close()
		return nil, err
	}
	return &repository{info: info, created: created, blobs: blobs, logs: logs, cps: checkpoint.New(logs, nil)}, nil
}

// logs opens the checkpoint store.
func (f *repoFlags) logs(info snapferry.RepoInfo, blobs *blob.Store) (checkpoint.Driver, error) {
	group, err := f.group()
	if err != nil {
		return nil, err
	}
	if group == nil {
		return blobcp.New(blobs, info.ID), nil
	}
	config, err := f.tls.config()
	if err != nil {
		return nil, err
	}
	return raftcp.Open(group, &raftcp.Options{TLS: config})
}

// group returns the members that --checkpoints names, or nil if it is not given.
func (f *repoFlags) group() ([]string, error) {
	if f.checkpoints == "" {
		if f.tls != (tlsFlags{}) {
			return nil, usagef("--tls-ca, --tls-cert and --tls-key are for --checkpoints raft+https://HOST:PORT")
		}
		return nil, nil
	}
	list, ok := strings.CutPrefix(f.checkpoints, "raft+")
	if !ok {
		return nil, usagef("--checkpoints %q: write raft+http://HOST:PORT,HOST:PORT or raft+https://, or leave it out to keep them in the repository", f.checkpoints)
	}
	group, err := parseServers("--checkpoints", list)
	if err != nil {
		return nil, err
	}
	return group, f.tls.check(group)
}

// withRepo calls do with the open repository; it is how the reading verbs work.
func (f *repoFlags) withRepo(ctx context.Context, opts *snapferry.RepoOptions, do func(*snapferry.Repo) error) error {
	p, err := f.open(ctx)
	if err != nil {
		return err
	}
	defer p.close()
	repo, err := snapferry.OpenRepo(ctx, p.blobs, p.cps, opts)
	if err != nil {
		return err
	}
	if f.filter {
		if err := f.checkFound(ctx, p.cps, repo); err != nil {
			return errors.Join(err, repo.Close())
		}
	}
	return errors.Join(do(repo), repo.Close())
}

// cacheDir returns where the identity caches lie.
func (a *app) cacheDir() (string, error) {
	if dir := a.getenv("SNAPFERRY_CACHE"); dir != "" {
		return dir, nil
	}
	if dir := a.getenv("XDG_CACHE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "snapferry"), nil
	}
	if dir := a.getenv("HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, ".cache", "snapferry"), nil
	}
	return "", errors.New("set SNAPFERRY_CACHE, XDG_CACHE_HOME or HOME to a directory")
}
