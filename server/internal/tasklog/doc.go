// Package tasklog is the replicated state of the checkpoint service: the logs of all
// tasks, kept in a Pebble database.
//
// It hides how the state lies on disk, how it is copied and replaced as a whole, and how a
// repeated append gets the answer of the first one. A log is a sequence of opaque entries;
// of the newest 64 the bodies are kept, of the newest 1,024 the nonces and digests (P13).
// Machine applies the commands that a Raft group has agreed on and answers reads.
//
// # Contract
//
// What commands do is decided by the commands alone, so members that applied the same ones
// hold the same state, however the commands were split into calls of Apply. Nothing is
// durable when Apply returns: Raft's log is, and after a crash the state is that of an
// earlier index, which AppliedIndex tells.
//
// Apply, Snapshot, Install and Close are called by one goroutine at a time; reads may run
// beside them. A read shows the state at one index.
package tasklog
