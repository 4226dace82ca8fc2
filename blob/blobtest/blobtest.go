// Package blobtest is for tests of blob drivers and of what stands on them.
//
// Run is the conformance suite: the promises of blob.Driver and blob.Store as tests. A
// driver passes it whole; there are no switches to leave parts out. Benchmark
// measures a driver. The decorators wrap a driver and pass the suite themselves: Faults
// fails chosen operations, Recorder writes a transcript, Latency slows, Stale makes List
// lag, Hold stops an operation at a gate.
package blobtest
