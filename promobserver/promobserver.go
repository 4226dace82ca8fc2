// Package promobserver turns the events of the engine into Prometheus metrics. It is the
// only package that knows Prometheus.
//
//	o, err := promobserver.New(prometheus.DefaultRegisterer, nil)
//	task, err := snapferry.Open(ctx, id, blobs, checkpoints, &snapferry.Options{Observer: o.Events()})
//
// # Contract
//
// One Observer may serve any number of tasks and repositories, from many goroutines at
// once. Counters move only when what they count has succeeded: an upload when it is
// sealed, a checkpoint when it is committed, a restore when it is swapped in. Failures are
// counted apart, by operation. Gauges of a store show the attempt in progress or the last
// one. Nothing is lost when a process ends before it is scraped that a later run would
// not count anew: for one-shot runs WriteFile leaves a file for node exporter's textfile
// collector.
//
// Labels are job, task and store, which the program chose. Options.MaxStores bounds how
// many of their combinations are kept apart; what comes later is counted under the labels
// "other". docs/metrics.md lists every metric.
package promobserver

import (
	"cmp"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/snapferry/snapferry"
)

// overflow labels what comes after MaxStores.
const overflow = "other"

// Options adjusts New. The zero value and nil are valid.
type Options struct {
	// MaxStores bounds the stores, and the tasks, that have labels of their own; default
	// 1000 of each.
	MaxStores int
	// Now is the clock of checkpoint_timestamp_seconds; default time.Now.
	Now func() time.Time
}

// An Observer holds the metrics.
type Observer struct {
	opts Options
	m    *metrics

	mu     sync.Mutex // guards what follows
	tasks  map[snapferry.TaskID]bool
	stores map[store]*plan
}

type store struct {
	task snapferry.TaskID
	name string
}

// plan is how far a store is: what has to be done and what is.
type plan struct {
	files       int64
	bytes       int64
	leftFiles   *prometheus.GaugeVec
	leftBytes   *prometheus.GaugeVec
	doneFiles   int64
	doneBytes   int64
	placedBytes int64 // of the restore in progress
}

// New registers the metrics. It fails if reg has metrics of these names already: make one
// Observer and share it.
func New(reg prometheus.Registerer, opts *Options) (*Observer, error) {
	var v Options
	if opts != nil {
		v = *opts
	}
	v.MaxStores = cmp.Or(max(v.MaxStores, 0), 1000)
	if v.Now == nil {
		v.Now = time.Now
	}
	m, err := newMetrics(reg)
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return &Observer{opts: v, m: m, tasks: map[snapferry.TaskID]bool{}, stores: map[store]*plan{}}, nil
}

// WriteFile writes what g gathers in the text format of Prometheus, by a rename, so that
// nobody reads half of it: what node exporter's textfile collector takes, if the name ends
// in .prom. What is there and is no regular file, such as a device, is left alone.
func WriteFile(path string, g prometheus.Gatherer) error {
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("write metrics %s: there is something that is no regular file", path)
	}
	if err := prometheus.WriteToTextfile(path, g); err != nil {
		return fmt.Errorf("write metrics %s: %w", path, err)
	}
	return nil
}

// Events returns the functions to hand to the engine.
func (o *Observer) Events() *snapferry.Observer {
	return &snapferry.Observer{
		Opened:         o.opened,
		Frozen:         o.frozen,
		Compared:       o.compared,
		StoreRead:      o.storeRead,
		FileUploaded:   o.fileRead,
		Progress:       o.progress,
		Uploaded:       o.uploaded,
		Published:      o.committed,
		CleanedUp:      o.cleanedUp,
		Failed:         o.failed,
		RestorePlanned: o.restorePlanned,
		RestoredStore:  o.restoredStore,
		FileRestored:   o.fileRestored,
		Restored:       o.restored,
		Warned:         o.warned,
	}
}

// task returns the labels of a task.
func (o *Observer) task(id snapferry.TaskID) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.tasks[id] {
		if len(o.tasks) >= o.opts.MaxStores {
			return []string{overflow, overflow}
		}
		o.tasks[id] = true
	}
	return []string{id.Job, id.Task}
}

// store returns the labels of a store and how far it is.
func (o *Observer) store(id snapferry.TaskID, name string) ([]string, *plan) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := store{id, name}
	if o.stores[key] == nil && len(o.stores) >= o.opts.MaxStores {
		key = store{snapferry.TaskID{Job: overflow, Task: overflow}, overflow}
	}
	if o.stores[key] == nil {
		o.stores[key] = &plan{leftFiles: o.m.leftFiles, leftBytes: o.m.leftBytes}
	}
	return []string{key.task.Job, key.task.Task, key.name}, o.stores[key]
}

func (o *Observer) opened(e snapferry.Opened) {
	l := o.task(e.Task)
	o.m.openSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	o.m.epoch.WithLabelValues(l...).Set(float64(e.Epoch))
}

func (o *Observer) frozen(e snapferry.Frozen) {
	o.m.freezeSeconds.WithLabelValues(o.task(e.Task)...).Observe(e.Duration.Seconds())
}

func (o *Observer) compared(e snapferry.Compared) {
	l, p := o.store(e.Task, e.Store)
	m := o.m
	m.compareSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	for gauge, v := range map[*prometheus.GaugeVec]int64{
		m.toReadFiles: e.ToReadFiles, m.toReadBytes: e.ToReadBytes,
		m.retainFiles: e.RetainedFiles, m.retainBytes: e.RetainedBytes,
		m.removeFiles: e.RemovedFiles, m.removeBytes: e.RemovedBytes,
		m.addDirs: e.AddedDirs, m.retainDirs: e.RetainedDirs, m.removeDirs: e.RemovedDirs,
	} {
		gauge.WithLabelValues(l...).Set(float64(v))
	}
	o.begin(l, p, plan{files: e.ToReadFiles, bytes: e.ToReadBytes, leftFiles: m.leftFiles, leftBytes: m.leftBytes})
}

func (o *Observer) storeRead(e snapferry.StoreRead) {
	l, _ := o.store(e.Task, e.Store)
	o.m.readSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
}

func (o *Observer) fileRead(e snapferry.FileDone) {
	l, _ := o.store(e.Task, e.Store)
	o.m.readFileSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	o.m.readFileBytes.WithLabelValues(l...).Observe(float64(e.Bytes))
}

// begin replaces the plan of a store.
func (o *Observer) begin(labels []string, p *plan, now plan) {
	o.mu.Lock()
	defer o.mu.Unlock()
	*p = now
	p.showLocked(labels)
}

func (o *Observer) progress(e snapferry.Progress) {
	l, p := o.store(e.Task, e.Store)
	o.mu.Lock()
	defer o.mu.Unlock()
	p.doneFiles += e.Files
	p.doneBytes += e.Bytes
	p.showLocked(l)
}

// showLocked sets what is left. A file that had to be read twice leaves no less than none.
func (p *plan) showLocked(labels []string) {
	p.leftFiles.WithLabelValues(labels...).Set(float64(max(0, p.files-p.doneFiles)))
	p.leftBytes.WithLabelValues(labels...).Set(float64(max(0, p.bytes-p.doneBytes)))
}

func (o *Observer) uploaded(e snapferry.Uploaded) {
	l := o.task(e.Task)
	m := o.m
	m.uploadSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	m.uploadRate.WithLabelValues(l...).Set(rate(e.Stored, e.Duration))
	m.blobsWritten.WithLabelValues(l...).Add(float64(e.Blobs))
	m.bytesStored.WithLabelValues(l...).Add(float64(e.Stored))
	for name, s := range e.Stores {
		l, _ := o.store(e.Task, name)
		for counter, v := range map[*prometheus.CounterVec]int64{
			m.uploadedFiles: s.FilesUploaded, m.uploadedBytes: s.BytesUploaded,
			m.retainedFiles: s.FilesRetained, m.retainedBytes: s.BytesRetained,
			m.removedFiles: s.FilesRemoved, m.removedBytes: s.BytesRemoved, m.storedBytes: s.BytesStored, m.rewrittenBytes: s.BytesRewritten,
		} {
			counter.WithLabelValues(l...).Add(float64(v))
		}
	}
}

func (o *Observer) committed(e snapferry.Published) {
	l := o.task(e.Task)
	o.m.publishSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	o.m.commits.WithLabelValues(l...).Inc()
	o.m.sequence.WithLabelValues(l...).Set(float64(e.Sequence))
	o.m.published.WithLabelValues(l...).Set(float64(o.opts.Now().UnixMilli()) / 1000)
}

func (o *Observer) cleanedUp(e snapferry.CleanedUp) {
	l := o.task(e.Task)
	o.m.cleanupSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	o.m.blobsDeleted.WithLabelValues(l...).Add(float64(e.Blobs))
	o.m.bytesDeleted.WithLabelValues(l...).Add(float64(e.Bytes))
}

func (o *Observer) failed(e snapferry.Failed) {
	o.m.failures.WithLabelValues(append(o.task(e.Task), e.Op)...).Inc()
}

func (o *Observer) warned(e snapferry.Warned) {
	o.m.warnings.WithLabelValues(o.task(e.Task)...).Inc()
}

func (o *Observer) restorePlanned(e snapferry.RestorePlanned) {
	l, p := o.store(e.Task, e.Store)
	m := o.m
	m.indexSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	m.toRestoreFiles.WithLabelValues(l...).Set(float64(e.Files))
	m.toRestoreBytes.WithLabelValues(l...).Set(float64(e.Bytes))
	o.begin(l, p, plan{files: e.Files, bytes: e.Bytes, leftFiles: m.restoreLeftFiles, leftBytes: m.restoreLeftBytes})
}

func (o *Observer) fileRestored(e snapferry.FileDone) {
	l, _ := o.store(e.Task, e.Store)
	o.m.restoreFileSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	o.m.restoreFileBytes.WithLabelValues(l...).Observe(float64(e.Bytes))
}

func (o *Observer) restoredStore(e snapferry.RestoredStore) {
	l, p := o.store(e.Task, e.Store)
	o.m.restoredFiles.WithLabelValues(l...).Add(float64(e.FilesRestored))
	o.m.fetchedBytes.WithLabelValues(l...).Add(float64(e.BytesFetched))
	o.m.reusedBytes.WithLabelValues(l...).Add(float64(e.BytesReused))
	o.mu.Lock()
	defer o.mu.Unlock()
	p.placedBytes = e.BytesFetched + e.BytesReused
}

func (o *Observer) restored(e snapferry.Restored) {
	l := o.task(e.Task)
	m := o.m
	m.restores.WithLabelValues(l...).Inc()
	m.restoreSeconds.WithLabelValues(l...).Observe(e.Duration.Seconds())
	m.prepareSeconds.WithLabelValues(l...).Observe(e.Prepare.Seconds())
	m.transferSeconds.WithLabelValues(l...).Observe(e.Transfer.Seconds())
	m.swapSeconds.WithLabelValues(l...).Observe(e.Swap.Seconds())
	m.restoreRate.WithLabelValues(l...).Set(rate(o.placed(e.Task), e.Transfer))
}

// placed takes the bytes that the restore of a task put in place.
func (o *Observer) placed(id snapferry.TaskID) (bytes int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, p := range o.stores {
		if key.task == id {
			bytes += p.placedBytes
			p.placedBytes = 0
		}
	}
	return bytes
}

func rate(bytes int64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(bytes) / d.Seconds()
}
