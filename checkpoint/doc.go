// Package checkpoint keeps the log of a task: the one sequence of write-once
// entries in which owners claim the task, publish checkpoints and drop them.
//
// It hides how an entry comes to stand at exactly one place of that sequence
// although several processes append at once, answers get lost, and requests land
// long after their sender gave up. What an entry means is the caller's business: an
// entry is an envelope (Entry) around a body, the head, that holds the whole state of
// the task after it. So readers need the newest entry only.
//
// Callers hold a Store and take a task's Log from it. A Log appends through a Driver;
// the driver of package blobcp keeps entries in a blob store, others may keep them in
// a replicated state machine. Package checkpointtest is the contract as a test suite.
//
// # Contract
//
// Append either returns the entry that now stands in the log, or an error after which
// it does not and never will, or ErrUnknown: the entry may stand in the log, now or
// later. After ErrUnknown nothing that the entry might name may be deleted; Resolve,
// or the next Append, settles it. An owner whose epoch is below the head's gets
// ErrFenced. No clock decides any of this: an entry's time is a label.
//
// An entry is at most MaxEntrySize bytes on the wire, so its body stays well below.
// docs/format.md describes the bytes.
package checkpoint
