// Package raftlog keeps a member's Raft log: durable in a write-ahead log, complete in memory for the Raft library
// to read. It hides the order in which things must reach the disk so that a crash at any instant leaves a log the
// member may start from, and everything that is awkward about the log library below it.
//
// The main types are WAL, what is written to; Replay, what a WAL gave back when it was opened; and Log, which joins
// the two and is the raft.Storage of the member. OpenWAL opens the WAL on disk, package walsim has one in memory
// that loses what was not synced.
//
// # Two indexes
//
// A snapshot that was recorded and the place where the log begins are different things. The newest record says what
// Storage.Snapshot answers and which configuration a restart begins with; the log begins at an older record, so that
// entries below the newest snapshot stay available to members that lag a little, also after a restart.
//
// # Groups
//
// What one call writes is a group that is there as a whole or not at all after a crash: entries are always followed
// by a hard state, and the record of an installed snapshot by a hard state that commits it. OpenWAL cuts an
// unfinished group off the end; nobody was told that it had been written.
//
// # Concurrency and errors
//
// All methods of Log are safe for concurrent use. Reads never wait for the disk. Writes are serialised. The first
// failed write or fsync makes every later write fail with the same error: what the disk holds is then unknown, and
// the member has to stop.
package raftlog
