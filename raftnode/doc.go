// Package raftnode is a member of a Raft group whose state lies in a directory on disk
// and whose leader never makes a snapshot.
//
// It runs go.etcd.io/raft/v3 over etcd's write-ahead log, carries messages between
// members, changes the membership one member at a time, and leaves snapshots to raftsnap:
// a follower makes them, the leader takes them over, and a member that fell behind the log
// fetches one from whoever holds it. Node is the whole of it; the state machine is the
// caller's.
//
// What Raft decides happens in member, which has no goroutine, clock or connection of its
// own, so that a simulation can run a whole group of them from one seed. Node drives a
// member with one goroutine, applies committed entries with a second one, and nothing
// that hashes, reads or sends a snapshot ever runs on either (I12).
//
// A Node may be used from any number of goroutines. The rules R1 to R12 that comments
// cite are explained in docs/raft.md.
package raftnode
