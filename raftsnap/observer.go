package raftsnap

import (
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Observer is told what happens. Any field may be nil, and so may the Observer. Functions
// are called from several goroutines at once, must return quickly and must not call Close.
type Observer struct {
	Made     func(Made)
	Fetched  func(Fetched)
	Recorded func(Recorded)
	Install  func(Installed)
	Served   func(Served)
	Attempt  func(Attempt)
	Refused  func(Refused)
	Damaged  func(Damaged)
	Alarm    func(text string)
	// Stepped is called after each batch of events with the state that came of it: the
	// place to read gauges (stage, staleness, pins).
	Stepped func(Status)
}

// Made: a snapshot was made here, or was not.
type Made struct {
	ID       protocol.ID
	Bytes    int64
	Leader   bool          // made while leading
	Frozen   time.Duration // of Duration: the member stood still for it
	Duration time.Duration
	Err      error // nil: it is durable
}

// Fetched: a transfer to this member ended.
type Fetched struct {
	ID       protocol.ID
	Purpose  protocol.Purpose
	Sources  []uint64
	Fetched  int64 // bytes that came over the network
	Reused   int64 // bytes that were here
	Duration time.Duration
	Err      error // nil: it is durable
}

// Recorded: Raft was given a snapshot to cut its log by, or refused it.
type Recorded struct {
	ID       protocol.ID
	Purpose  protocol.Purpose
	Source   uint64 // the own id for one made here
	Duration time.Duration
	Err      error
}

// Installed: a snapshot was handed to Raft to replace the state.
type Installed struct {
	ID       protocol.ID
	Outcome  protocol.OutcomeKind
	Duration time.Duration
	Err      error
}

// Served: another member has read a snapshot here, or has lost its lease of it.
type Served struct {
	Peer     uint64 // 0 where Options.Server.Peer does not tell
	ID       protocol.ID
	Bytes    int64
	Duration time.Duration
	Why      string // released, or how the lease was lost
}

// Attempt: another member was asked for something.
type Attempt struct {
	Peer    uint64
	What    string // info, fetch, tell or spread
	Outcome string // ok, or the kind of failure
}

// Refused: a typed refusal was given to a member, or received from it.
type Refused struct {
	Peer uint64 // 0 for oneself
	Kind protocol.RefusalKind
}

// Damaged: a snapshot did not pass a check and was put into quarantine.
type Damaged struct {
	ID   protocol.ID
	Text string
}
