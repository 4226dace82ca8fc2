// Package server is the checkpoint service: a member of a Raft group that keeps the logs of
// tasks, and the HTTP API through which clients append to them and read them.
//
// It hides how appends become commands of the group, and how what the group decides
// becomes an answer. The logs themselves are package tasklog's, the group package
// raftnode's, the words of the API package cpwire's, which clients use too. One listener
// serves clients, other members and snapshots.
//
// # Contract
//
// An append is answered when a majority has it on disk. Whatever is read was committed,
// and is not older than anything that was answered before the read began: reads go to the
// leader and no further than it can prove that it leads. A member that does not lead says
// who does. When an answer says that the outcome is unknown, the same request finds out.
//
// A Server may be used from any number of goroutines; it owns those it starts, and Close
// waits for them.
package server
