package promobserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/promobserver"
	"github.com/snapferry/snapferry/source"
)

// world is a repository on disk, a store, and a registry that a server shows.
type world struct {
	t     *testing.T
	dir   string
	reg   *prometheus.Registry
	obs   *promobserver.Observer
	blobs *blob.Store
	cps   *checkpoint.Store
	url   string
}

var when = time.Unix(1800000000, 250e6)

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), reg: prometheus.NewRegistry()}
	obs, err := promobserver.New(w.reg, &promobserver.Options{Now: func() time.Time { return when }})
	w.must(err)
	w.obs = obs
	d, err := fsblob.Open(filepath.Join(w.dir, "repo"), &fsblob.Options{Create: true})
	w.must(err)
	w.blobs = blob.New(d, nil)
	info, _, err := snapferry.Ensure(t.Context(), w.blobs)
	w.must(err)
	w.cps = checkpoint.New(blobcp.New(w.blobs, info.ID), nil)
	w.must(os.MkdirAll(w.store(), 0o700))
	srv := httptest.NewServer(promhttp.HandlerFor(w.reg, promhttp.HandlerOpts{}))
	t.Cleanup(srv.Close)
	w.url = srv.URL
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) store() string { return filepath.Join(w.dir, "kv") }

func (w *world) write(name string, size int) {
	w.t.Helper()
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * len(name) * 7)
	}
	copy(data, name)
	w.must(os.WriteFile(filepath.Join(w.store(), name), data, 0o600))
}

func (w *world) open() *snapferry.Task {
	w.t.Helper()
	task, err := snapferry.Open(w.t.Context(), id, w.blobs, w.cps, &snapferry.Options{Observer: w.obs.Events()})
	w.must(err)
	w.t.Cleanup(func() { task.Close() })
	return task
}

var id = snapferry.TaskID{Job: "orders", Task: "p7"}

func (w *world) commit(task *snapferry.Task, path string) (*snapferry.CommitReport, error) {
	w.t.Helper()
	p, err := task.Snapshot(w.t.Context(), map[string]source.Source{"kv": source.Dir(path, nil)}, nil)
	if err != nil {
		return nil, err
	}
	return p.Commit(w.t.Context())
}

// scrape returns the samples as name{labels} without the buckets of histograms.
func (w *world) scrape() map[string]float64 {
	w.t.Helper()
	resp, err := http.Get(w.url)
	w.must(err)
	defer resp.Body.Close()
	samples := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, ok := cutLast(lines.Text())
		if !ok || strings.HasPrefix(name, "#") || strings.Contains(name, "_bucket") {
			continue
		}
		if samples[name], err = strconv.ParseFloat(value, 64); err != nil {
			w.t.Fatalf("%q: %v", lines.Text(), err)
		}
	}
	w.must(lines.Err())
	return samples
}

func cutLast(line string) (name, value string, ok bool) {
	i := strings.LastIndexByte(line, ' ')
	if i < 0 {
		return "", "", false
	}
	return line[:i], line[i+1:], true
}

const (
	ofTask  = `{job="orders",task="p7"}`
	ofStore = `{job="orders",store="kv",task="p7"}`
)

// expect compares single samples.
func (w *world) expect(want map[string]float64) {
	w.t.Helper()
	all, got := w.scrape(), map[string]float64{}
	for name := range want {
		v, ok := all[name]
		if !ok {
			w.t.Errorf("no sample %s", name)
			continue
		}
		got[name] = v
	}
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Errorf("samples (-want +got):\n%s", diff)
	}
}

// TestRealRun commits, commits again and restores, and compares what is scraped with what
// the reports say and with what was written.
func TestRealRun(t *testing.T) {
	w := newWorld(t)
	w.write("a", 300_000)
	w.write("b", 5_000)
	task := w.open()
	first, err := w.commit(task, w.store())
	w.must(err)
	w.expect(map[string]float64{
		"snapferry_files_to_read" + ofStore:           2,
		"snapferry_bytes_to_read" + ofStore:           305_000,
		"snapferry_files_to_read_remaining" + ofStore: 0,
		"snapferry_bytes_to_read_remaining" + ofStore: 0,
		"snapferry_dirs_to_add" + ofStore:             1,
		"snapferry_files_uploaded_total" + ofStore:    2,
		"snapferry_bytes_uploaded_total" + ofStore:    305_000,
		"snapferry_read_file_bytes_sum" + ofStore:     305_000,
		"snapferry_read_file_seconds_count" + ofStore: 2,
		"snapferry_read_seconds_count" + ofStore:      1,
	})

	w.write("c", 7_000)
	w.must(os.Remove(filepath.Join(w.store(), "b")))
	second, err := w.commit(task, w.store())
	w.must(err)
	kv := second.Stores["kv"]
	w.expect(map[string]float64{
		"snapferry_checkpoints_total" + ofTask:            2,
		"snapferry_checkpoint_sequence" + ofTask:          2,
		"snapferry_checkpoint_timestamp_seconds" + ofTask: 1800000000.25,
		"snapferry_epoch" + ofTask:                        float64(second.Epoch),
		"snapferry_open_seconds_count" + ofTask:           1,
		"snapferry_freeze_seconds_count" + ofTask:         2,
		"snapferry_upload_seconds_count" + ofTask:         2,
		"snapferry_publish_seconds_count" + ofTask:        2,
		"snapferry_compare_seconds_count" + ofStore:       2,
		"snapferry_files_to_remove" + ofStore:             1,
		"snapferry_bytes_to_remove" + ofStore:             5_000,
		"snapferry_dirs_to_retain" + ofStore:              1,
		"snapferry_files_uploaded_total" + ofStore:        3,
		"snapferry_bytes_uploaded_total" + ofStore:        312_000,
		"snapferry_files_removed_total" + ofStore:         1,
		"snapferry_bytes_removed_total" + ofStore:         5_000,
		"snapferry_files_retained_total" + ofStore:        float64(kv.FilesRetained),
		"snapferry_bytes_retained_total" + ofStore:        float64(kv.BytesRetained),
		"snapferry_bytes_stored_total" + ofStore:          float64(first.Stores["kv"].BytesStored + kv.BytesStored),
	})

	target := filepath.Join(w.dir, "restored")
	report, err := task.Restore(t.Context(), map[string]string{"kv": target}, nil)
	w.must(err)
	w.expect(map[string]float64{
		"snapferry_restores_total" + ofTask:                 1,
		"snapferry_restore_seconds_count" + ofTask:          1,
		"snapferry_restore_swap_seconds_count" + ofTask:     1,
		"snapferry_restore_index_seconds_count" + ofStore:   1,
		"snapferry_files_to_restore" + ofStore:              2,
		"snapferry_bytes_to_restore" + ofStore:              307_000,
		"snapferry_files_to_restore_remaining" + ofStore:    0,
		"snapferry_bytes_to_restore_remaining" + ofStore:    0,
		"snapferry_files_restored_total" + ofStore:          2,
		"snapferry_bytes_fetched_total" + ofStore:           float64(report.Stores["kv"].BytesFetched),
		"snapferry_bytes_reused_total" + ofStore:            float64(report.Stores["kv"].BytesReused),
		"snapferry_restore_file_bytes_sum" + ofStore:        307_000,
		"snapferry_restore_file_seconds_count" + ofStore:    2,
		"snapferry_restore_prepare_seconds_count" + ofTask:  1,
		"snapferry_restore_transfer_seconds_count" + ofTask: 1,
	})
	if got := w.scrape()["snapferry_restore_bytes_per_second"+ofTask]; got <= 0 {
		t.Errorf("rate of the restore: %v", got)
	}
}

// TestFailuresApart: what failed moves no counter of success.
func TestFailuresApart(t *testing.T) {
	w := newWorld(t)
	w.write("a", 1000)
	task := w.open()
	p, err := task.Snapshot(t.Context(), map[string]source.Source{"kv": source.Dir(w.store(), nil)}, nil)
	w.must(err)
	w.write("a", 2000) // in the library a file that changed fails the commit
	if _, err := p.Commit(t.Context()); !errors.Is(err, source.ErrChanged) {
		t.Fatalf("commit of a changed file: %v", err)
	}
	if _, err := task.Restore(t.Context(), map[string]string{"kv": filepath.Join(w.dir, "x")}, nil); !errors.Is(err, snapferry.ErrNotFound) {
		t.Fatalf("restore of nothing: %v", err)
	}
	w.expect(map[string]float64{
		`snapferry_failures_total{job="orders",op="commit",task="p7"}`:  1,
		`snapferry_failures_total{job="orders",op="restore",task="p7"}`: 1,
	})
	for name := range w.scrape() {
		if strings.Contains(name, "uploaded_total") || strings.Contains(name, "checkpoints_total") || strings.Contains(name, "restores_total") {
			t.Errorf("%s moved", name)
		}
	}
}

// TestDryRunCountsNothing: a dry run restores nothing.
func TestDryRunCountsNothing(t *testing.T) {
	w := newWorld(t)
	w.write("a", 1000)
	task := w.open()
	_, err := w.commit(task, w.store())
	w.must(err)
	_, err = task.Restore(t.Context(), map[string]string{"kv": filepath.Join(w.dir, "x")}, &snapferry.RestoreOptions{DryRun: true})
	w.must(err)
	for name := range w.scrape() {
		if strings.Contains(name, "restores_total") || strings.Contains(name, "restored_total") || strings.Contains(name, "fetched_total") {
			t.Errorf("%s moved", name)
		}
	}
}

// TestBoundedLabels (I10): what comes after MaxStores shares labels.
func TestBoundedLabels(t *testing.T) {
	reg := prometheus.NewRegistry()
	o, err := promobserver.New(reg, &promobserver.Options{MaxStores: 3})
	if err != nil {
		t.Fatal(err)
	}
	ev := o.Events()
	for i := range 10 {
		id := snapferry.TaskID{Job: "j", Task: fmt.Sprint(i)}
		ev.Warned(snapferry.Warned{Task: id})
		ev.FileUploaded(snapferry.FileDone{Task: id, Store: "kv"})
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if n := len(f.GetMetric()); n != 4 {
			t.Errorf("%s has %d label sets, want 3 and %q", f.GetName(), n, "other")
		}
	}
}

func TestRegisteredTwice(t *testing.T) {
	reg := prometheus.NewRegistry()
	if _, err := promobserver.New(reg, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := promobserver.New(reg, nil); err == nil {
		t.Fatal("two observers with one registry")
	}
}

func TestWriteFile(t *testing.T) {
	w := newWorld(t)
	w.write("a", 1000)
	_, err := w.commit(w.open(), w.store())
	w.must(err)
	path := filepath.Join(w.dir, "snapferry.prom")
	w.must(promobserver.WriteFile(path, w.reg))
	text, err := os.ReadFile(path)
	w.must(err)
	if want := "snapferry_bytes_uploaded_total" + ofStore + " 1000\n"; !strings.Contains(string(text), want) {
		t.Errorf("%q is not in the file:\n%s", want, text)
	}
	if err := promobserver.WriteFile(filepath.Join(w.dir, "no", "such", "dir.prom"), w.reg); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file in no directory: %v", err)
	}
}

// A rename would put a file in the place of a device.
func TestWriteFileLeavesDevices(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := promobserver.WriteFile(path, prometheus.NewRegistry()); err == nil {
		t.Error("a pipe was replaced")
	}
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != fs.ModeNamedPipe {
		t.Errorf("the pipe is gone: %v, %v", info, err)
	}
}

// TestConcurrent is for the race detector.
func TestConcurrent(t *testing.T) {
	w := newWorld(t)
	ev := w.obs.Events()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			ev.Progress(snapferry.Progress{Task: id, Store: "kv", Files: 1, Bytes: 1})
			ev.Compared(snapferry.Compared{Task: id, Store: "kv", ToReadFiles: 5})
			ev.RestoredStore(snapferry.RestoredStore{Task: id, Store: "kv"})
			ev.Restored(snapferry.Restored{Task: id})
		}
	}()
	for range 20 {
		w.scrape()
		ev.Progress(snapferry.Progress{Task: id, Store: "kv", Files: 1, Bytes: 1})
	}
	cancel()
	<-done
}
