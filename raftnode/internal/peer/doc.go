// Package peer is everything between one member of a Raft group and the others: who a
// member is, how it gets in, and how Raft's messages travel.
//
// An Identity is the file that says who the owner of a data directory is. A Door is the
// part of a member that answers before Raft runs: it takes the first start through the
// rules for new and returning members (R11), remembers which data directory stands behind
// every Raft id, and refuses another one for good. A Transport keeps two streams to every
// other member, one for short urgent messages and one for entries, so that a heartbeat
// never waits behind a megabyte.
//
// All three are safe for concurrent use. What the Door promises about a member is on disk
// before it says so. The Transport promises little, as Raft needs little: messages of one
// stream arrive in order or not at all, none is kept for ever, and Send never blocks.
package peer
