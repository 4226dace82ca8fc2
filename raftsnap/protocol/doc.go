// Package protocol is the pure heart of snapshot replication in a Raft group: who makes a
// snapshot, who takes it over, who installs it, and what happens when any of that goes
// wrong. Events go in and effects come out; it opens no file and no connection, starts no
// goroutine, and knows the time only from what it is told, so the same events always give
// the same effects.
//
// Machine is the state machine of one member: making, taking over, adopting, installing,
// and answering what others ask. Installs is the leader's book of the installs that it
// has asked other members for, from which Raft is told how each one ended and how far the
// log must be held. Both are used from one goroutine.
//
// The rules R1 to R12 that the comments cite are explained in docs/raft.md. The idea that
// the leader never makes a snapshot but takes one over from a follower comes from
// Alluxio's SnapshotReplicationManager; docs/from-alluxio.md maps it to this package.
package protocol
