// Package protocolsearch tries every interleaving, within bounds, of the commit
// protocol that packages checkpoint, blobcp and the engine implement over a blob store
// (rules P2 to P5, P8 to P10, P12).
//
// The model has two owners of one task, a sweeper, a pruner, a restorer, store-side
// expiry of unsealed blobs, lost answers, a PUT that lands after its sender gave up,
// crashes, processes that pause anywhere, and removal of old log names. One blob
// stands for all blobs of an attempt. Bounds say how much of each there is; Break takes
// a rule away, to see that the search would notice.
//
// What must never happen:
//   - a checkpoint that the newest entry retains has lost a blob (I1);
//   - an append is acknowledged although another entry is at that slot of history (I4);
//   - two entries of the history do not follow each other;
//   - a restorer misses a blob of a checkpoint that is still retained.
//
// External publishing, clone holds, partials, several ghosts and stale listings are not
// modelled.
package protocolsearch
