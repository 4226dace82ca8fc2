package snapferry

import "time"

// CommitReport says what a commit did.
type CommitReport struct {
	Checkpoint string                 `json:"checkpoint"`
	Epoch      uint64                 `json:"epoch"`
	Sequence   uint64                 `json:"sequence"`
	Millis     int64                  `json:"duration_ms"`
	Stores     map[string]StoreReport `json:"stores"`
	// Consistent tells whether each directory was seen unchanged from the first
	// look to the last byte read (S2). It is false only with Options.Reread.
	Consistent bool     `json:"consistent"`
	Warnings   []string `json:"warnings,omitempty"`
}

// StoreReport counts what a commit did with one store. Bytes are file bytes, holes
// not counted, except BytesStored: what was written to the blob store for them.
type StoreReport struct {
	FilesUploaded int64 `json:"files_uploaded"`
	BytesUploaded int64 `json:"bytes_uploaded"`
	FilesRetained int64 `json:"files_retained"`
	BytesRetained int64 `json:"bytes_retained"`
	FilesRemoved  int64 `json:"files_removed"`
	BytesRemoved  int64 `json:"bytes_removed"`
	BytesStored   int64 `json:"bytes_stored"`
	// BytesRewritten is what was written to the blob store in place of packs that are
	// mostly dead (P12). It counts nowhere else: the bytes are retained.
	BytesRewritten int64 `json:"bytes_rewritten,omitempty"`
}

// Markers name the snapshot of each store: what an application that publishes by
// itself writes into its own checkpoint (P6).
type Markers struct {
	Checkpoint string
	Stores     map[string]string
}

// RestoreReport says what a restore did.
type RestoreReport struct {
	Checkpoint string                  `json:"checkpoint"`
	Millis     int64                   `json:"duration_ms"`
	Stores     map[string]RestoreStore `json:"stores"`
	Warnings   []string                `json:"warnings,omitempty"`
}

// RestoreStore counts what a restore did with one store: file bytes read from the
// blob store, and those taken from local disk.
type RestoreStore struct {
	FilesRestored int64 `json:"files_restored"`
	BytesFetched  int64 `json:"bytes_fetched"`
	BytesReused   int64 `json:"bytes_reused"`
}

// Checkpoint is a committed point of a task.
type Checkpoint struct {
	Job        string
	Task       string
	ID         string
	Epoch      uint64
	Sequence   uint64
	Time       time.Time
	Offsets    map[string]string // opaque bytes
	Labels     map[string]string
	Stores     map[string]StoreInfo
	Bytes      int64 // sum of the file sizes of all stores
	Consistent bool
	// Damaged says why the checkpoint cannot be restored, if its blob could not be read:
	// then offsets, labels and sizes are not known. Verify finds other damage.
	Damaged string
}

// StoreInfo is what a checkpoint says of one store.
type StoreInfo struct {
	Marker string // names the snapshot index: KEY#SIZE#DIGEST
	Files  int64
	Dirs   int64
	Links  int64
	Bytes  int64
}

// VerifyReport is the outcome of Verify.
type VerifyReport struct {
	OK          bool     `json:"ok"`
	Checkpoints int64    `json:"checkpoints"`
	Blobs       int64    `json:"blobs"`
	Bytes       int64    `json:"bytes"`
	Missing     []Damage `json:"missing"`
	Corrupt     []Damage `json:"corrupt"`
	// Skipped are tasks that were not checked since their log is not here, and why.
	Skipped []string `json:"skipped,omitempty"`
}

// Damage is one place of the repository that is not as it was written.
type Damage struct {
	Blob       string `json:"blob"`
	Checkpoint string `json:"checkpoint"`
	Store      string `json:"store"`
	Path       string `json:"path"`
	Offset     int64  `json:"offset"`
	Length     int64  `json:"length"`
}

// GCReport says what GC deleted, or with DryRun would have.
type GCReport struct {
	BlobsDeleted int64    `json:"blobs_deleted"`
	BytesDeleted int64    `json:"bytes_deleted"`
	Skipped      []string `json:"skipped"` // tasks that were left alone, and why
}
