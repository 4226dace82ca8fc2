package snapferry

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
)

// TaskID names one owner of state within a service.
type TaskID = checkpoint.TaskID

// KeepAll as Options.KeepLast keeps every checkpoint.
const KeepAll = -1

// IfRunning says what Open does when the current owner wrote a short while ago.
type IfRunning int

const (
	// Preempt takes the epoch over and waits for no one. The older owner ends with ErrFenced.
	Preempt IfRunning = iota
	// Fail ends with ErrRunning if the current epoch wrote within RunningWindow.
	Fail
)

// Compression says which chunks are compressed before they are sent.
type Compression int

const (
	// CompressAuto compresses, with zstd, what a probe of it says gets shorter by an
	// eighth at least. Files that their store compresses itself are left as they are.
	CompressAuto Compression = iota
	// CompressOff stores chunks as they are.
	CompressOff
)

// RunningWindow is how recent a write makes an owner count as running, by the
// store's clock.
const RunningWindow = 10 * time.Minute

// Options of a task. The zero value, and nil, are what most callers want.
type Options struct {
	// Observer is told what happens.
	Observer *Observer
	// KeepLast is how many checkpoints a commit retains: 0 means 10, KeepAll all.
	KeepLast int
	// Grace is how long the blobs of a dropped checkpoint stay for readers that
	// began before, by the store's clock. 0 means 1 h; negative means none.
	Grace time.Duration
	// CacheDir is where the identity caches lie, by which unchanged files need not
	// be read. Empty: no cache, every file is read each time.
	CacheDir string
	// IfRunning says what to do about a recent owner.
	IfRunning IfRunning
	// Reread allows a file that changed while it was read to be read again: each
	// file is then whole, but the store need not be one cut (CommitReport.Consistent
	// tells). Without it a change fails the commit with ErrChanged (S2).
	Reread bool
	// Full sends everything again and reuses nothing that the repository holds: the way
	// to a good checkpoint when Verify found damaged bytes.
	Full bool
	// Labels are stored with each checkpoint.
	Labels map[string]string
	// Compression says whether new chunks are compressed. Up to GOMAXPROCS of them are at
	// a time, which takes up to 12 MiB each.
	Compression Compression
	// External says that the application publishes checkpoints itself (P6).
	External *External
	// Readers bounds the chunks being read and hashed at a time; each takes up to
	// 4 MiB. 0 means 2 x GOMAXPROCS, at least 4.
	Readers int
	// PackSize is the size of data blobs, at most 64 MiB; up to Uploads+1 of them are
	// in memory. 0 means 32 MiB.
	PackSize int
	// Uploads bounds the packs being sent at a time. 0 means 3.
	Uploads int
	// PartialAfter and PartialBytes say how long, and how much, an upload may run
	// before its progress is recorded, so that an interrupted one goes on where it
	// was (P5g). 0 means 5 min and 1 GiB.
	PartialAfter time.Duration
	PartialBytes int64

	now         func() time.Time // for tests of P1
	keepWorth   int64            // for tests of P5g
	abandonTime time.Duration    // for tests of what comes after a cancelled commit
}

// External is how a task whose checkpoints the application publishes itself learns
// what was published last.
type External struct {
	// Last returns the id of the last checkpoint the application published, or "".
	// Open calls it after it has claimed the task; the caller must have fenced its
	// own transactions before, so that no older owner of them can publish later.
	Last func(ctx context.Context) (string, error)
}

func (o *Options) withDefaults() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	if v.Observer == nil {
		v.Observer = &Observer{}
	}
	setDefault(&v.KeepLast, 10)
	setDefault(&v.Grace, time.Hour)
	setDefault(&v.Readers, max(4, 2*runtime.GOMAXPROCS(0)))
	setDefault(&v.PackSize, 32<<20)
	setDefault(&v.Uploads, 3)
	setDefault(&v.PartialAfter, 5*time.Minute)
	setDefault(&v.PartialBytes, 1<<30)
	setDefault(&v.keepWorth, keepWorth)
	setDefault(&v.abandonTime, abandonTime)
	if v.now == nil {
		v.now = time.Now
	}
	if v.PackSize < minPackSize || v.PackSize > maxPackSize {
		return v, fmt.Errorf("PackSize is %d: it must be between %d and %d bytes", v.PackSize, minPackSize, maxPackSize)
	}
	if v.Compression != CompressAuto && v.Compression != CompressOff {
		return v, fmt.Errorf("Compression is %d: it must be CompressAuto or CompressOff", v.Compression)
	}
	if v.KeepLast < KeepAll || v.Readers < 1 || v.Uploads < 1 {
		return v, fmt.Errorf("KeepLast, Readers and Uploads must not be negative (KeepAll is %d)", KeepAll)
	}
	return v, nil
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}
