//go:build race

package badgersrc_test

// collects is false: Badger's collector itself reads a memtable's highest version without
// a lock (v4.9.6, DB.MaxVersion), which the race detector finds.
const collects = false
