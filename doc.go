// Package snapferry keeps the local state of stateful services safe and movable.
//
// A service that keeps state in embedded stores on local disk opens a [Task], and
// from then on a commit is three lines beside its own checkpoint:
//
//	task, err := snapferry.Open(ctx, snapferry.TaskID{Job: "orders", Task: "p7"}, blobs, checkpoints, nil)
//	pending, err := task.Snapshot(ctx, map[string]source.Source{"kv": pebblesrc.New(db, nil)}, offsets)
//	report, err := pending.Commit(ctx)
//
// Snapshot freezes all stores in milliseconds while the caller stands still, so that
// they and the offsets are one cut. Commit compares each store with its last
// snapshot, uploads only what changed, publishes a checkpoint that names snapshot
// and offsets, and cleans up; the application runs on beside it. Restore brings a
// directory to a checkpoint and fetches only what is missing there.
//
// # Promises
//
// The last committed checkpoint restores byte for byte at every instant, whatever
// crashes and whoever else believes to own the task: claims of ownership and commits
// compete for the slots of one write-once log, so a paused old owner can publish
// nothing and no clock or lease decides. "Unchanged" is claimed only on proof.
// Nothing from the store is put in place before its digest was checked, and a target
// is the whole old or the whole new tree at every instant. docs/design.md numbers
// these invariants (I1..I12) and docs/format.md specifies every byte written.
//
// # Errors
//
// Conditions on which a caller branches are the exported Err variables, found by
// [errors.Is]. Messages read "op subject: cause".
//
// # Concurrency
//
// A [Task] runs one commit at a time; a second is [ErrBusy]. A [Repo] may be used
// from many goroutines. Every goroutine started here has ended when the call that
// started it returns.
//
// The life cycle follows the blob store state backend of Apache Samza; what differs
// and why is told in docs/from-samza.md.
package snapferry
