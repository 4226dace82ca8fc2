package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/pebblesrc"
)

const (
	demoCheckpoints = 4
	demoStep        = 8000 // events between two checkpoints
)

// demoID is whose state the demo keeps.
var demoID = snapferry.TaskID{Job: "demo", Task: "p0"}

// demo is one run: a service whose state is lost and comes back. It uses the library
// as a service would, so it can be read as an example.
type demo struct {
	app   *app
	dir   string // of everything
	state string // the service's store
	repo  string
	start time.Time

	report demoReport
}

// demoReport is the JSON of demo.
type demoReport struct {
	Checkpoints []demoCommit `json:"checkpoints"`
	Lost        uint64       `json:"lost_at"` // the offset when the directory was lost
	Restore     demoRestore  `json:"restore"`
	Proof       demoProof    `json:"proof"`
	Millis      int64        `json:"duration_ms"`
	Directory   string       `json:"directory,omitempty"` // left with --keep
}

type demoCommit struct {
	Checkpoint    string  `json:"checkpoint"`
	Offset        uint64  `json:"offset"`
	FilesUploaded int64   `json:"files_uploaded"`
	BytesUploaded int64   `json:"bytes_uploaded"`
	BytesRetained int64   `json:"bytes_retained"`
	FreezeMillis  float64 `json:"freeze_ms"`
	CommitMillis  float64 `json:"commit_ms"`
	AppliedBeside uint64  `json:"applied_meanwhile"` // events applied during the commit
}

type demoRestore struct {
	Checkpoint    string  `json:"checkpoint"`
	FilesRestored int64   `json:"files_restored"`
	BytesFetched  int64   `json:"bytes_fetched"`
	Millis        float64 `json:"duration_ms"`
}

type demoProof struct {
	Offset uint64 `json:"offset"`
	Events uint64 `json:"events"` // found, each with its bytes checked
	OK     bool   `json:"ok"`
}

func (a *app) newDemo() *cobra.Command {
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Lose a live Pebble store and get it back, with proof",
		Long: `Open a real Pebble store in a temporary directory, write to it without pause, and commit
checkpoints with offsets meanwhile. Then lose the store's directory, restore it, open it,
and prove that every event up to the committed offset is there and none after. It needs
nothing installed and takes some seconds. The exit code is not 0 if the proof fails.`,
		Example: examples(`
			snapferry demo
			snapferry demo --keep
			snapferry demo --json`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runDemo(cmd.Context(), keep) },
	}
	a.outputFlags(cmd)
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the store and the repository behind, to look at")
	return cmd
}

func (a *app) runDemo(ctx context.Context, keep bool) (err error) {
	dir, err := os.MkdirTemp("", "snapferry-demo-")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	d := &demo{app: a, dir: dir, state: filepath.Join(dir, "state", "kv"), repo: filepath.Join(dir, "repo"), start: time.Now()}
	if keep {
		d.report.Directory = dir
	} else {
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	if err := d.run(ctx); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	d.report.Millis = time.Since(d.start).Milliseconds()
	return a.summary(&d.report, d.print)
}

func (d *demo) say(format string, args ...any) {
	d.app.note("%6.2fs  %s", time.Since(d.start).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demo) run(ctx context.Context) error {
	driver, err := fsblob.Open(d.repo, &fsblob.Options{Create: true})
	if err != nil {
		return err
	}
	blobs := blob.New(driver, nil)
	defer blobs.Close()
	info, _, err := snapferry.Ensure(ctx, blobs)
	if err != nil {
		return err
	}
	checkpoints := checkpoint.New(blobcp.New(blobs, info.ID), nil)
	defer checkpoints.Close()

	if err := d.live(ctx, blobs, checkpoints); err != nil {
		return err
	}
	d.say("the directory of the store is lost, %d events after the last checkpoint", d.report.Lost-d.last().Offset)
	if err := os.RemoveAll(d.state); err != nil {
		return err
	}
	if err := d.recover(ctx, blobs, checkpoints); err != nil {
		return err
	}
	return d.prove()
}

func (d *demo) last() demoCommit { return d.report.Checkpoints[len(d.report.Checkpoints)-1] }

// live is the service's first life: it applies events and commits checkpoints.
func (d *demo) live(ctx context.Context, blobs *blob.Store, checkpoints *checkpoint.Store) (err error) {
	task, err := snapferry.Open(ctx, demoID, blobs, checkpoints, &snapferry.Options{CacheDir: filepath.Join(d.dir, "cache")})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, task.Close()) }()
	s, err := openService(d.state, 0)
	if err != nil {
		return err
	}
	stop := s.run(ctx)
	// What goes wrong in the service itself explains everything else, so it comes first.
	defer func() { err = errors.Join(stop(), err, s.close()) }()
	d.say("a service writes events to Pebble in %s", d.state)

	for range demoCheckpoints {
		if err := s.await(ctx, demoStep); err != nil {
			return err
		}
		if err := d.commit(ctx, task, s); err != nil {
			return err
		}
	}
	if err := s.await(ctx, demoStep/4); err != nil {
		return err
	}
	d.report.Lost = s.applied()
	return nil
}

// commit makes one checkpoint. Only Snapshot needs the service to stand still: the
// lock is held from before the offset is read until Snapshot returns, so that the
// store and the offset are one cut (S1). Commit runs beside the service.
func (d *demo) commit(ctx context.Context, task *snapferry.Task, s *service) error {
	// Snapshot makes every write durable. Most of that work can be done before.
	if err := s.db.LogData(nil, pebble.Sync); err != nil {
		return err
	}

	s.mu.Lock()
	start := time.Now()
	offset := s.offset
	pending, err := task.Snapshot(ctx,
		map[string]source.Source{"kv": pebblesrc.New(s.db, nil)},
		map[string]string{"events": strconv.FormatUint(offset, 10)})
	frozen := time.Since(start)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	rep, err := pending.Commit(ctx)
	if err != nil {
		return err
	}

	kv := rep.Stores["kv"]
	c := demoCommit{
		Checkpoint: rep.Checkpoint, Offset: offset,
		FilesUploaded: kv.FilesUploaded, BytesUploaded: kv.BytesUploaded, BytesRetained: kv.BytesRetained,
		FreezeMillis: inMillis(frozen), CommitMillis: inMillis(time.Since(start) - frozen), AppliedBeside: s.applied() - offset,
	}
	d.report.Checkpoints = append(d.report.Checkpoints, c)
	d.say("checkpoint %d at offset %d: stood still for %.1f ms, sent %s, %d events were applied meanwhile",
		rep.Sequence, offset, c.FreezeMillis, size(c.BytesUploaded), c.AppliedBeside)
	return nil
}

// recover is how the service's second life begins: take the task over, and bring the
// directory to the last checkpoint before the store is opened.
func (d *demo) recover(ctx context.Context, blobs *blob.Store, checkpoints *checkpoint.Store) (err error) {
	task, err := snapferry.Open(ctx, demoID, blobs, checkpoints, &snapferry.Options{CacheDir: filepath.Join(d.dir, "cache")})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, task.Close()) }()
	start := time.Now()
	rep, err := task.Restore(ctx, map[string]string{"kv": d.state}, nil)
	if err != nil {
		return err
	}
	kv := rep.Stores["kv"]
	d.report.Restore = demoRestore{rep.Checkpoint, kv.FilesRestored, kv.BytesFetched, inMillis(time.Since(start))}
	d.say("restored checkpoint %s: %s, %s", rep.Checkpoint, files(kv.FilesRestored), size(kv.BytesFetched))

	// Where the input has to be read on from stands in the checkpoint.
	repo, err := snapferry.OpenRepo(ctx, blobs, checkpoints, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, repo.Close()) }()
	at, err := snapferry.ParseAt(rep.Checkpoint)
	if err != nil {
		return err
	}
	c, err := repo.Show(ctx, demoID, at)
	if err != nil {
		return err
	}
	d.report.Proof.Offset, err = strconv.ParseUint(c.Offsets["events"], 10, 64)
	return err
}

// prove opens the restored store and checks it against the committed offset.
func (d *demo) prove() error {
	p := &d.report.Proof
	if want := d.last(); p.Offset != want.Offset || d.report.Restore.Checkpoint != want.Checkpoint {
		return fmt.Errorf("proof failed: restored %s with offset %d, the last commit was %s with %d", d.report.Restore.Checkpoint, p.Offset, want.Checkpoint, want.Offset)
	}
	s, err := openService(d.state, p.Offset)
	if err != nil {
		return fmt.Errorf("proof failed: %w", err)
	}
	p.Events, err = s.check()
	if err = errors.Join(err, s.close()); err != nil {
		return fmt.Errorf("proof failed: %w", err)
	}
	p.OK = true
	d.say("proved: all %d events up to the committed offset are there, none after", p.Events)
	return nil
}

func inMillis(t time.Duration) float64 { return float64(t.Microseconds()) / 1e3 }

func (d *demo) print(w io.Writer) {
	rows := []string{"CHECKPOINT\tOFFSET\tSENT\t\tKEPT\tSTOOD STILL\tCOMMIT"}
	for i, c := range d.report.Checkpoints {
		rows = append(rows, fmt.Sprintf("%d\t%d\t%s\t%s\t%s\t%.1f ms\t%.1f ms", i+1, c.Offset,
			files(c.FilesUploaded), size(c.BytesUploaded), size(c.BytesRetained), c.FreezeMillis, c.CommitMillis))
	}
	r, p := d.report.Restore, d.report.Proof
	rows = append(rows, fmt.Sprintf("restore\t%d\t%s\t%s\t\t\t%.1f ms", p.Offset, files(r.FilesRestored), size(r.BytesFetched), r.Millis))
	fmt.Fprintln(w)
	table(w, rows)
	fmt.Fprintf(w, "\nverified: events 1 to %d are all there with their bytes, and none after; took %s\n", p.Events, millis(d.report.Millis))
	if d.report.Directory != "" {
		fmt.Fprintf(w, "kept: try snapferry ls --repo %s/repo\n", d.report.Directory)
	}
}
