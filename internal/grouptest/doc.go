// Package grouptest holds the tests of whole groups: real processes of the snapferry
// command that fail as machines and networks do. It has no code of its own.
//
// Where the tests may make namespaces they run in a private world: members are in network
// namespaces of their own, joined by a bridge, and everything is gone when the test's
// process is, however it ended. Elsewhere members are at loopback addresses and a proxy
// between them loses what a network would.
//
// While clients work, members are killed, stopped, cut off or run out of disk. Afterwards
// the history that the clients saw must be linearizable, every acknowledged entry must be
// where it was said to be, all members must hold the same, and no process may have ended
// by itself. SNAPFERRY_LONG=1 makes the tests longer, SNAPFERRY_CHAOS=1 draws new seeds,
// and SNAPFERRY_SEED=N repeats one. SNAPFERRY_GROUPTEST_LOOPBACK=1 keeps to loopback addresses.
package grouptest
