package tasklog

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/cockroachdb/pebble/v2/sstable"

	"github.com/snapferry/snapferry/checkpoint"
)

// tableKey tells a table file from every other one: its name is never used twice in one
// database, but a damaged disk or a careless hand may put another file there.
type tableKey struct {
	name  string
	inode uint64
	size  int64
	mtime int64
}

// VerifySnapshot checks the tables of a snapshot that this machine made, all that were not
// checked before: every block against its checksum. What it lets pass is taken over by the
// whole group, whose members have only this one's word that the files hold the state. It
// runs beside everything else.
func (m *Machine) VerifySnapshot(ctx context.Context, dir string) error {
	names, err := m.opts.FS.List(dir)
	if err != nil {
		return fmt.Errorf("verify snapshot: %w", err)
	}
	seen := map[tableKey]bool{}
	for _, name := range names {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		path := m.opts.FS.PathJoin(dir, name)
		key, known := m.tableKey(name, path)
		if !known || !m.verified[key] {
			if err := m.verifyTable(ctx, path); err != nil {
				return fmt.Errorf("verify table %s of the state: %w: %w", name, checkpoint.ErrCorrupt, err)
			}
		}
		if known {
			seen[key] = true
		}
	}
	m.verified = seen
	return nil
}

// tableKey returns false where the file system tells too little.
func (m *Machine) tableKey(name, path string) (tableKey, bool) {
	info, err := m.opts.FS.Stat(path)
	if err != nil {
		return tableKey{}, false
	}
	inode, ok := inodeOf(info.Sys())
	return tableKey{name, inode, info.Size(), info.ModTime().UnixNano()}, ok
}

func (m *Machine) verifyTable(ctx context.Context, path string) error {
	f, err := m.opts.FS.Open(path)
	if err != nil {
		return err
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	r, err := sstable.NewReader(ctx, readable, sstable.ReaderOptions{})
	if err != nil {
		return errors.Join(err, readable.Close())
	}
	return errors.Join(r.ValidateBlockChecksums(), r.Close())
}
