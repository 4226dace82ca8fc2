package tasklog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/snapferry/snapferry/checkpoint"
)

// TestVerifySnapshot: a bit that has flipped in a table since it was written is found
// before anybody takes the snapshot over, also in a table that was whole the last time.
func TestVerifySnapshot(t *testing.T) {
	k := newKit(t)
	dir := t.TempDir()
	m, err := Open(filepath.Join(dir, "state"), small(vfs.Default))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	k.m = m
	k.fill(1, 200)
	first := filepath.Join(dir, "first")
	if err := m.Snapshot(first); err != nil {
		t.Fatal(err)
	}
	if err := m.VerifySnapshot(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	tables, err := filepath.Glob(filepath.Join(m.place.path(m.place.number), "*.sst"))
	if err != nil || len(tables) == 0 {
		t.Fatal("no tables", err)
	}
	data, err := os.ReadFile(tables[0])
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/3] ^= 1
	// In a new file, so that the snapshot above stays whole.
	if err := errors.Join(os.Remove(tables[0]), os.WriteFile(tables[0], data, 0o644)); err != nil {
		t.Fatal(err)
	}
	second := filepath.Join(dir, "second")
	if err := m.Snapshot(second); err != nil {
		t.Fatal(err)
	}
	if err := m.VerifySnapshot(t.Context(), second); !errors.Is(err, checkpoint.ErrCorrupt) {
		t.Errorf("a damaged table passes: %v", err)
	}
	if err := m.VerifySnapshot(t.Context(), first); err != nil {
		t.Errorf("a whole snapshot: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.VerifySnapshot(ctx, first); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
