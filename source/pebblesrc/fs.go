package pebblesrc

import (
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/snapferry/snapferry/source"
)

// FS returns fs for pebble.Options.FS with a difference that makes Freeze short: what
// is written into an image is not synced. A checkpoint syncs every file that it makes,
// while writers and compactions keep the disk busy; an image is of no use after a
// crash, and its tables are synced long before. Checkpoints made anywhere else are as
// durable as ever. That the disk cannot take an image is noticed when it is read, if it
// had to be read from there.
//
// Pebble watches the health of the disk (EventListener.DiskSlow) by itself only where no
// file system is set:
//
//	opts.FS = pebblesrc.FS(vfs.Default)
//	opts.EnsureDefaults()
//	opts.WithFSDefaults()
func FS(fs vfs.FS) vfs.FS { return imageFS{fs} }

type imageFS struct{ vfs.FS }

// Unwrap implements vfs.FS.
func (f imageFS) Unwrap() vfs.FS { return f.FS }

// Create implements vfs.FS.
func (f imageFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.Create(name, category)
	return unsync(name, file, err)
}

// OpenReadWrite implements vfs.FS.
func (f imageFS) OpenReadWrite(name string, category vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	file, err := f.FS.OpenReadWrite(name, category, opts...)
	return unsync(name, file, err)
}

// OpenDir implements vfs.FS.
func (f imageFS) OpenDir(name string) (vfs.File, error) {
	file, err := f.FS.OpenDir(name)
	return unsync(name, file, err)
}

func unsync(name string, file vfs.File, err error) (vfs.File, error) {
	if err != nil || !source.InScratch(name) {
		return file, err
	}
	return unsynced{file}, nil
}

// unsynced is a file of an image.
type unsynced struct{ vfs.File }

func (unsynced) Sync() error                { return nil }
func (unsynced) SyncData() error            { return nil }
func (unsynced) SyncTo(int64) (bool, error) { return true, nil }
