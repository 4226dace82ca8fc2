//go:build linux

package main

import (
	"path/filepath"
	"slices"
	"testing"
)

// TestChecks: what looks at restored databases takes the round that was written and no other.
func TestChecks(t *testing.T) {
	sqlite, bolt := filepath.Join(t.TempDir(), "s"), filepath.Join(t.TempDir(), "b")
	numbers := chosen(50, 20, 1)
	if err := writeSQLite(sqlite, sqliteTable, sqliteInsert, numbers, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := fillBolt(bolt, 1); err != nil {
		t.Fatal(err)
	}
	if err := updateBolt(bolt, numbers, 1); err != nil {
		t.Fatal(err)
	}
	for _, check := range []func(round int) error{
		func(round int) error { return checkSQLite(sqlite, numbers, round) },
		func(round int) error { return checkBolt(bolt, numbers, round) },
	} {
		if err := check(1); err != nil {
			t.Error(err)
		}
		if err := check(2); err == nil {
			t.Error("took the values of another round")
		}
	}
}

func TestChosen(t *testing.T) {
	a := chosen(1000, 10, 1)
	if !slices.Equal(a, chosen(1000, 10, 1)) || slices.Equal(a, chosen(1000, 10, 2)) {
		t.Error("a round has other numbers each time, or those of the next round")
	}
	slices.Sort(a)
	if len(slices.Compact(a)) != 10 {
		t.Errorf("numbers are chosen twice: %v", a)
	}
}
