// Package raftsnap keeps the snapshots of a Raft group moving between its members: a
// follower makes them, the leader takes them over and never makes one while somebody else
// can, the others adopt them, and a member that is too far behind the log installs one from
// whoever has it. It is free of any Raft library.
//
// It hides when that happens, who is asked, what is fetched from where, what is kept on
// disk, and how all of it ends when members, links or disks fail. Manager is the one type
// to hold; Host is what it needs of the Raft member that it serves. The decisions are
// protocol.Machine's, the disk is snapstore's, the network is transfer's: this package
// carries out the effects of the first with the other two.
//
// One goroutine, started by Start, owns the Machine. Everything else (calls of other
// members, of Raft, ends of transfers) queues events for it and never waits for it, so
// Manager.Poll, Install, Want and ObserveFsync may be called from Raft's own loop. Each
// piece of work that takes time runs in a goroutine of its own, which Close cancels and
// waits for. What a cancelled transfer has moved stays on disk and is used by the next one,
// also after a restart and from another source.
//
// The rules R1 to R12 that comments cite are explained in docs/raft.md.
package raftsnap
