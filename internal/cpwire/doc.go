// Package cpwire is what the checkpoint service and its clients say to each other: the
// codec of appends, the JSON of states and errors, and the client.
//
// The service keeps one log of opaque entries for each task in a Raft group. A Client
// hides which member leads the group: it follows the leader, goes on over dead members
// and elections, and repeats what got no answer with the same nonce, so that an append is
// in the log once however often it was sent. Appends that are made at the same time by
// one process travel together in one request.
//
// All methods of a Client may be called concurrently. docs/format.md describes the bytes
// and the paths.
package cpwire
