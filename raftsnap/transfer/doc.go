// Package transfer moves snapshots between the members of a group: it serves what a
// member's store holds, and fetches what another member's store holds into its own.
//
// The package hides HTTP and everything that goes wrong with it. Server is the
// http.Handler of a member: control messages go to its Control, files are served as plain
// ranges so that the kernel copies them, and a snapshot that is being read is pinned by a
// lease which only bytes that move keep alive (R9). Client sends control messages, and its
// Fetch brings one snapshot here from several sources at once: ranges in a window, every
// chunk checked against the manifest, bad chunks taken again from somebody else, slow
// sources relieved of what others can do faster, and all of it resumable in mid-file after
// a restart and after a change of source (R10). Pacer keeps transfers below a byte rate and
// makes them yield while the log's fsyncs suffer.
//
// Paths name a snapshot by its id, never "the latest", and files by their number in the
// manifest, so no answer can be bytes of something else. What cannot be served is refused
// with a protocol.Refusal as JSON, which the Client returns as that error; a Fetch that
// fails returns a *protocol.Failure. Nothing that a peer sends is believed: sizes are
// bounded before memory is taken, redirects are not followed, and whoever sends wrong bytes
// is marked.
//
// All methods of Server, Client and Pacer may be called concurrently. A Server owns a
// goroutine for its leases and one for each verification, and Close waits for them and for
// the data requests; a Fetch owns its workers and waits for them before it returns.
//
// The HTTP interface is described in docs/format.md, section "Snapshot transfer".
package transfer
