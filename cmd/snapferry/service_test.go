package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
)

// The demo's proof fails when one event is missing, one is too many, or a byte is wrong.
func TestProofCanFail(t *testing.T) {
	const events = 20
	for _, tt := range []struct {
		name   string
		damage func(db *pebble.DB) error
		want   string // "": the proof holds
	}{
		{"whole", func(*pebble.DB) error { return nil }, ""},
		{"first missing", func(db *pebble.DB) error { return db.Delete(eventKey(1), nil) }, "is missing"},
		{"one missing", func(db *pebble.DB) error { return db.Delete(eventKey(7), nil) }, "is missing"},
		{"last missing", func(db *pebble.DB) error { return db.Delete(eventKey(events), nil) }, "events 20 to 20 are missing"},
		{"one too many", func(db *pebble.DB) error { return db.Set(eventKey(events+1), eventValue(events+1), nil) }, "after the offset 20"},
		{"other bytes", func(db *pebble.DB) error { return db.Set(eventKey(3), eventValue(4), nil) }, "has other bytes"},
		{"other offset", func(db *pebble.DB) error { return db.Set(appliedKey, make([]byte, 8), nil) }, "the store is at event 0"},
		{"no offset", func(db *pebble.DB) error { return db.Delete(appliedKey, nil) }, "offset in the store"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := openService(filepath.Join(t.TempDir(), "kv"), 0)
			if err != nil {
				t.Fatal(err)
			}
			defer s.close()
			for range events {
				if err := s.apply(); err != nil {
					t.Fatal(err)
				}
			}
			if err := tt.damage(s.db); err != nil {
				t.Fatal(err)
			}
			_, err = s.check()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("check: %v, want %q", err, tt.want)
			}
		})
	}
}
