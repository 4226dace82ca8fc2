package promobserver

import "github.com/prometheus/client_golang/prometheus"

// namespace begins every name.
const namespace = "snapferry"

// Labels. All of them are names that the program itself chose; Options.MaxStores bounds
// how many come together.
var (
	perTask  = []string{"job", "task"}
	perStore = []string{"job", "task", "store"}
	perOp    = []string{"job", "task", "op"}
)

// Buckets: a commit takes milliseconds or hours, a file microseconds or minutes.
var (
	seconds     = prometheus.ExponentialBuckets(0.001, 4, 12) // 1 ms to 70 min
	fileSeconds = prometheus.ExponentialBuckets(0.0001, 4, 11)
	fileBytes   = prometheus.ExponentialBuckets(1024, 8, 9) // 1 KiB to 16 GiB
)

// metrics is every metric with its help. docs/metrics.md is the same list, and a test
// compares the two.
type metrics struct {
	openSeconds, freezeSeconds, uploadSeconds, publishSeconds, cleanupSeconds *prometheus.HistogramVec

	epoch, sequence, published, uploadRate                                     *prometheus.GaugeVec
	commits, blobsWritten, bytesStored, blobsDeleted, bytesDeleted, failures   *prometheus.CounterVec
	warnings                                                                   *prometheus.CounterVec
	compareSeconds, readSeconds, readFileSeconds, readFileBytes                *prometheus.HistogramVec
	toReadFiles, toReadBytes, leftFiles, leftBytes, retainFiles, retainBytes   *prometheus.GaugeVec
	removeFiles, removeBytes, addDirs, retainDirs, removeDirs                  *prometheus.GaugeVec
	uploadedFiles, uploadedBytes, retainedFiles, retainedBytes                 *prometheus.CounterVec
	removedFiles, removedBytes, storedBytes, rewrittenBytes                    *prometheus.CounterVec
	restoreSeconds, prepareSeconds, transferSeconds, swapSeconds, indexSeconds *prometheus.HistogramVec
	restoreFileSeconds, restoreFileBytes                                       *prometheus.HistogramVec
	restores, restoredFiles, fetchedBytes, reusedBytes                         *prometheus.CounterVec
	toRestoreFiles, toRestoreBytes, restoreLeftFiles, restoreLeftBytes         *prometheus.GaugeVec
	restoreRate                                                                *prometheus.GaugeVec
}

// registry makes metrics and registers them, and remembers the first failure.
type registry struct {
	to  prometheus.Registerer
	err error
}

func (r *registry) add(c prometheus.Collector) {
	if err := r.to.Register(c); r.err == nil {
		r.err = err
	}
}

func (r *registry) histogram(name string, labels []string, buckets []float64, help string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
	r.add(v)
	return v
}

func (r *registry) counter(name string, labels []string, help string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	r.add(v)
	return v
}

func (r *registry) gauge(name string, labels []string, help string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
	r.add(v)
	return v
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	r, m := &registry{to: reg}, &metrics{}
	m.addTask(r)
	m.addStore(r)
	m.addRestore(r)
	return m, r.err
}

// addTask makes what is measured of the commits of a task.
func (m *metrics) addTask(r *registry) {
	m.openSeconds = r.histogram("open_seconds", perTask, seconds, "Time to claim a task, load its last index and sweep what is dead.")
	m.freezeSeconds = r.histogram("freeze_seconds", perTask, seconds, "Time for which all stores of a task were frozen as one cut; the application stands still.")
	m.uploadSeconds = r.histogram("upload_seconds", perTask, seconds, "Time to compare, read, upload and seal all stores of an attempt.")
	m.publishSeconds = r.histogram("publish_seconds", perTask, seconds, "Time to append the entry that makes a checkpoint count.")
	m.cleanupSeconds = r.histogram("cleanup_seconds", perTask, seconds, "Time to delete dead blobs.")
	m.epoch = r.gauge("epoch", perTask, "Epoch of this owner of the task.")
	m.sequence = r.gauge("checkpoint_sequence", perTask, "Sequence of the last checkpoint that was committed here.")
	m.published = r.gauge("checkpoint_timestamp_seconds", perTask, "When the last checkpoint was committed here, by the clock of this process (Unix time).")
	m.uploadRate = r.gauge("upload_bytes_per_second", perTask, "Bytes written to the blob store by the last upload, divided by its time.")
	m.commits = r.counter("checkpoints_total", perTask, "Checkpoints committed.")
	m.blobsWritten = r.counter("blobs_written_total", perTask, "Blobs written by uploads that were sealed.")
	m.bytesStored = r.counter("blob_bytes_written_total", perTask, "Bytes written to the blob store by uploads that were sealed.")
	m.blobsDeleted = r.counter("blobs_deleted_total", perTask, "Dead blobs deleted.")
	m.bytesDeleted = r.counter("blob_bytes_deleted_total", perTask, "Bytes of dead blobs deleted.")
	m.failures = r.counter("failures_total", perOp, "Operations that ended with an error: open, commit, upload, publish, restore; of the command also backup.")
	m.warnings = r.counter("warnings_total", perTask, "Warnings: something was left out or is not as asked, and the operation went on.")
}

// addStore makes what is measured of each store of a commit. Counters move when an upload
// is sealed; gauges show the attempt in progress, or the last one.
func (m *metrics) addStore(r *registry) {
	m.compareSeconds = r.histogram("compare_seconds", perStore, seconds, "Time to compare a store with its last snapshot.")
	m.readSeconds = r.histogram("read_seconds", perStore, seconds, "Time to compare and read a store and to hand its new chunks to the uploader.")
	m.readFileSeconds = r.histogram("read_file_seconds", perStore, fileSeconds, "Time to read a file and to hand its new chunks to the uploader.")
	m.readFileBytes = r.histogram("read_file_bytes", perStore, fileBytes, "Sizes of the files that were read.")
	m.toReadFiles = r.gauge("files_to_read", perStore, "Files whose content has to be looked at.")
	m.toReadBytes = r.gauge("bytes_to_read", perStore, "Bytes of the files whose content has to be looked at.")
	m.leftFiles = r.gauge("files_to_read_remaining", perStore, "Files of them that are not read yet.")
	m.leftBytes = r.gauge("bytes_to_read_remaining", perStore, "Bytes of them that are not read yet.")
	m.retainFiles = r.gauge("files_to_retain", perStore, "Files that are proven to be as in the last snapshot.")
	m.retainBytes = r.gauge("bytes_to_retain", perStore, "Bytes of the files that are proven to be as in the last snapshot.")
	m.removeFiles = r.gauge("files_to_remove", perStore, "Files of the last snapshot that the store lacks.")
	m.removeBytes = r.gauge("bytes_to_remove", perStore, "Bytes of the files of the last snapshot that the store lacks.")
	m.addDirs = r.gauge("dirs_to_add", perStore, "Directories that the last snapshot lacks.")
	m.retainDirs = r.gauge("dirs_to_retain", perStore, "Directories that the last snapshot has too.")
	m.removeDirs = r.gauge("dirs_to_remove", perStore, "Directories of the last snapshot that the store lacks.")
	m.uploadedFiles = r.counter("files_uploaded_total", perStore, "Files of which something had to be sent.")
	m.uploadedBytes = r.counter("bytes_uploaded_total", perStore, "File bytes that had to be sent.")
	m.retainedFiles = r.counter("files_retained_total", perStore, "Files of which nothing had to be sent.")
	m.retainedBytes = r.counter("bytes_retained_total", perStore, "File bytes that did not have to be sent.")
	m.removedFiles = r.counter("files_removed_total", perStore, "Files that were in the snapshot before and are gone.")
	m.removedBytes = r.counter("bytes_removed_total", perStore, "Bytes of the files that were in the snapshot before and are gone.")
	m.storedBytes = r.counter("bytes_stored_total", perStore, "Bytes written to the blob store for the content of files.")
	m.rewrittenBytes = r.counter("bytes_rewritten_total", perStore, "File bytes that were sent again from packs of which little was alive.")
}

// addRestore makes what is measured of restores.
func (m *metrics) addRestore(r *registry) {
	m.restoreSeconds = r.histogram("restore_seconds", perTask, seconds, "Time of a restore from its begin until the trees are swapped in.")
	m.prepareSeconds = r.histogram("restore_prepare_seconds", perTask, seconds, "Time of a restore before the transfer: checks and preparation of the targets.")
	m.transferSeconds = r.histogram("restore_transfer_seconds", perTask, seconds, "Time of a restore to fetch, place and make durable.")
	m.swapSeconds = r.histogram("restore_swap_seconds", perTask, seconds, "Time of a restore after the transfer, to swap the trees in.")
	m.restoreRate = r.gauge("restore_bytes_per_second", perTask, "Bytes put in place by the last restore, divided by the time of its transfer.")
	m.restores = r.counter("restores_total", perTask, "Restores that were completed.")
	m.indexSeconds = r.histogram("restore_index_seconds", perStore, seconds, "Time to fetch and check the index of a store.")
	m.restoreFileSeconds = r.histogram("restore_file_seconds", perStore, fileSeconds, "Time to restore a file whole.")
	m.restoreFileBytes = r.histogram("restore_file_bytes", perStore, fileBytes, "Sizes of the files that were restored.")
	m.toRestoreFiles = r.gauge("files_to_restore", perStore, "Files of the store in the checkpoint that is restored.")
	m.toRestoreBytes = r.gauge("bytes_to_restore", perStore, "Bytes of the store in the checkpoint that is restored.")
	m.restoreLeftFiles = r.gauge("files_to_restore_remaining", perStore, "Files of them that are not in place yet.")
	m.restoreLeftBytes = r.gauge("bytes_to_restore_remaining", perStore, "Bytes of them that are not in place yet.")
	m.restoredFiles = r.counter("files_restored_total", perStore, "Files restored.")
	m.fetchedBytes = r.counter("bytes_fetched_total", perStore, "File bytes read from the blob store by restores.")
	m.reusedBytes = r.counter("bytes_reused_total", perStore, "File bytes that restores took from the local disk.")
}
