package snapferry

import (
	"cmp"
	"time"
)

// Observer is told what happens. Any field may be nil, and so may the Observer.
// Functions are called from several goroutines at once and must return quickly; they
// must not call back into the task. Counts are made on success only.
type Observer struct {
	Opened       func(Opened)
	Frozen       func(Frozen)
	Compared     func(Compared)
	FileUploaded func(FileDone)
	StoreRead    func(StoreRead)
	Progress     func(Progress)
	Uploaded     func(Uploaded)
	Published    func(Published)
	CleanedUp    func(CleanedUp)
	Failed       func(Failed)

	RestorePlanned func(RestorePlanned)
	RestoredStore  func(RestoredStore)
	FileRestored   func(FileDone)
	Restored       func(Restored)

	Warned func(Warned)
}

// Opened: a task was claimed, its last index loaded, what is dead swept.
type Opened struct {
	Task     TaskID
	Epoch    uint64
	Duration time.Duration
}

// Frozen: all stores were frozen as one cut.
type Frozen struct {
	Task     TaskID
	Stores   int
	Duration time.Duration
}

// Compared: a store was compared with its last snapshot.
type Compared struct {
	Task     TaskID
	Store    string
	Duration time.Duration
	// ToRead counts files whose content has to be looked at; how much of it is new
	// shows in Uploaded. Retained and Removed count against the last snapshot.
	ToReadFiles, ToReadBytes     int64
	RetainedFiles, RetainedBytes int64
	RemovedFiles, RemovedBytes   int64
	// Directories: AddedDirs are not in the last snapshot, RetainedDirs are.
	AddedDirs, RetainedDirs, RemovedDirs int64
}

// FileDone: one file was read and its new chunks handed to the uploader, or one was
// restored whole.
type FileDone struct {
	Task     TaskID
	Store    string
	Bytes    int64
	Duration time.Duration
}

// StoreRead: a store was compared and read, and its new chunks were handed to the uploader.
type StoreRead struct {
	Task     TaskID
	Store    string
	Duration time.Duration
}

// Progress: bytes moved since the last report of this store. Restore and backup both
// report; Files counts files finished.
type Progress struct {
	Task         TaskID
	Store        string
	Files, Bytes int64 // read and compared (backup), or put in place (restore)
	Moved        int64 // backup: bytes that had to be sent
}

// Uploaded: all blobs of an attempt are durable and sealed.
type Uploaded struct {
	Task     TaskID
	Blobs    int64
	Stored   int64 // bytes written to the blob store
	Duration time.Duration
	Stores   map[string]StoreReport
}

// Published: a checkpoint was committed.
type Published struct {
	Task       TaskID
	Checkpoint string
	Sequence   uint64
	Duration   time.Duration
}

// CleanedUp: dead blobs were deleted.
type CleanedUp struct {
	Task         TaskID
	Blobs, Bytes int64
	Duration     time.Duration
}

// Failed: a commit or restore ended with an error.
type Failed struct {
	Task TaskID
	Op   string
	Err  error
}

// RestorePlanned: the indexes of a checkpoint were fetched.
type RestorePlanned struct {
	Task     TaskID
	Store    string
	Files    int64
	Bytes    int64
	Duration time.Duration // fetching and checking the index
}

// RestoredStore: what one store of a restore took.
type RestoredStore struct {
	Task  TaskID
	Store string
	RestoreStore
}

// Restored: a restore is complete and swapped in.
type Restored struct {
	Task       TaskID
	Checkpoint string
	Duration   time.Duration
	// Before, during and after the transfer: checks and preparation; fetching, placing,
	// metadata and making it durable; swapping the trees in.
	Prepare, Transfer, Swap time.Duration
}

// Warned: something was left out or is not as asked, but the operation goes on.
type Warned struct {
	Task  TaskID
	Store string
	Text  string
}

// With returns an observer that tells both: each function of o, then that of other. Either
// may be nil.
func (o *Observer) With(other *Observer) *Observer {
	if o == nil || other == nil {
		return cmp.Or(o, other)
	}
	return &Observer{
		Opened:       both(o.Opened, other.Opened),
		Frozen:       both(o.Frozen, other.Frozen),
		Compared:     both(o.Compared, other.Compared),
		FileUploaded: both(o.FileUploaded, other.FileUploaded),
		StoreRead:    both(o.StoreRead, other.StoreRead),
		Progress:     both(o.Progress, other.Progress),
		Uploaded:     both(o.Uploaded, other.Uploaded),
		Published:    both(o.Published, other.Published),
		CleanedUp:    both(o.CleanedUp, other.CleanedUp),
		Failed:       both(o.Failed, other.Failed),

		RestorePlanned: both(o.RestorePlanned, other.RestorePlanned),
		RestoredStore:  both(o.RestoredStore, other.RestoredStore),
		FileRestored:   both(o.FileRestored, other.FileRestored),
		Restored:       both(o.Restored, other.Restored),

		Warned: both(o.Warned, other.Warned),
	}
}

func both[E any](f, g func(E)) func(E) {
	return func(e E) {
		emit(f, e)
		emit(g, e)
	}
}

func emit[E any](f func(E), e E) {
	if f != nil {
		f(e)
	}
}
