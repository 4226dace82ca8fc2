package protocol

import (
	"slices"
	"time"

	"github.com/snapferry/snapferry/snapshot"
)

// ID names one snapshot. Two members that hold a snapshot of the same ID hold the same
// bytes; snapshots of different makers at one index hold the same state in different
// bytes and so have different IDs (R10).
type ID struct {
	Term, Index uint64          // of the last entry in the state
	Digest      snapshot.Digest // of the manifest
}

// Lineage tells who made a snapshot. Snapshots of one lineage share most of their bytes
// with the ones before them; those of different lineages share little (R10).
type Lineage struct {
	Maker       uint64 `json:"maker"`       // Raft id of the member that made it
	Incarnation string `json:"incarnation"` // of that member's data directory
}

// Conf is the membership as of one log index: Raft's ConfState in its own words (R1).
type Conf struct {
	Voters       []uint64 `json:"voters"`
	Learners     []uint64 `json:"learners,omitempty"`
	Outgoing     []uint64 `json:"outgoing,omitempty"`
	LearnersNext []uint64 `json:"learners_next,omitempty"`
	AutoLeave    bool     `json:"auto_leave,omitempty"`
}

// Has reports whether a member belongs to the configuration in any role. Raft ignores a
// snapshot whose configuration does not have the receiver (R6).
func (c Conf) Has(id uint64) bool {
	return slices.Contains(c.Voters, id) || slices.Contains(c.Learners, id) ||
		slices.Contains(c.Outgoing, id) || slices.Contains(c.LearnersNext, id)
}

// Member is a row of the member table, which a snapshot carries because Raft's own
// configuration has no names and addresses (R1).
type Member struct {
	ID          uint64 `json:"id"`
	Name        string `json:"name"`
	URL         string `json:"url"`
	Incarnation string `json:"incarnation,omitempty"` // first one seen, "" while unknown
}

// Meta is what a snapshot says of itself beside its files (R1). All of it is as of Index.
type Meta struct {
	Group   string   `json:"group"`
	Term    uint64   `json:"term"`
	Index   uint64   `json:"index"`
	Conf    Conf     `json:"conf"`
	Members []Member `json:"members"`
	Lineage Lineage  `json:"lineage"`
}

// Held is a snapshot that lies durable and complete in this member's store.
type Held struct {
	ID    ID
	Meta  Meta
	Bytes int64 // of its files
}

// Role is what a member is in its group at the moment.
type Role uint8

// The roles. A candidate is a follower without a leader.
const (
	Follower Role = iota
	Leader
	Learner
)

// String returns the word for the role.
func (r Role) String() string { return [...]string{"follower", "leader", "learner"}[r] }

// Peer is another member of the group as this one sees it.
type Peer struct {
	Member
	Voter  bool
	Active bool   // heard from lately
	Match  uint64 // leader only: the last entry known to be in its log
}

// View is what a member knows of itself when an event is handled. The host fills it;
// Held is filled by whoever owns the snapshot store.
type View struct {
	Group         string
	Self          uint64
	Lineage       Lineage // of the snapshots that this member makes
	Role          Role
	Term          uint64
	Leader        uint64 // 0 while unknown
	Applied       uint64 // last entry that is in the state machine
	Commit        uint64
	First, Last   uint64 // of the entries in the log
	LogBytes      int64  // of the entries in the log
	AppliedBytes  int64  // of the entries above the recorded snapshot that are applied
	RecordedTerm  uint64 // the newest recorded snapshot (R4), 0 for none
	RecordedIndex uint64
	Peers         []Peer // the others, learners included, sorted by ID
	Held          []Held // durable snapshots, oldest first
}

// RefusalKind says why something that was asked for is not done.
type RefusalKind string

// The refusals. Each one ends what was asked for; none is ever silent.
const (
	NotLeader    RefusalKind = "not_leader"    // Leader names the right one where it is known
	StaleTerm    RefusalKind = "stale_term"    // the asker's term has passed
	OtherGroup   RefusalKind = "other_group"   // the asker belongs to another group
	Busy         RefusalKind = "busy"          // come again later
	NothingNewer RefusalKind = "nothing_newer" // no snapshot at or above the minimum
	NotNeeded    RefusalKind = "not_needed"    // older than or equal to what is there
	Ahead        RefusalKind = "ahead"         // above the own applied index: parked
	Forked       RefusalKind = "forked"        // contradicts the own log: quarantined
	NoSpace      RefusalKind = "no_space"      // the disk cannot take it
	Gone         RefusalKind = "gone"          // no longer held, or the lease has ended
	Closed       RefusalKind = "closed"        // the member is shutting down
)

// Refusal is a typed "no". It is an error, and travels as JSON.
type Refusal struct {
	Kind   RefusalKind `json:"kind"`
	Leader uint64      `json:"leader,omitempty"` // hint
	Term   uint64      `json:"term,omitempty"`   // of the one who refuses
	Text   string      `json:"text,omitempty"`
}

// Error returns the kind and the text.
func (r *Refusal) Error() string {
	if r.Text == "" {
		return string(r.Kind)
	}
	return string(r.Kind) + ": " + r.Text
}

// FailureKind says what ended a transfer or a making early.
type FailureKind string

// The failures.
const (
	FailGone        FailureKind = "gone"        // no source holds the target any more
	FailNoSpace     FailureKind = "no_space"    // local
	FailCorrupt     FailureKind = "corrupt"     // sources gave bytes that do not fit the digest
	FailUnreachable FailureKind = "unreachable" // sources did not answer
	FailIdle        FailureKind = "idle"        // no byte within the idle deadline
	FailBusy        FailureKind = "busy"        // sources refused for now
	FailCancelled   FailureKind = "cancelled"   // by a CancelFetch or Close
	FailLocal       FailureKind = "local"       // own disk or state machine
)

// Failure is why a transfer or a making ended without a snapshot.
type Failure struct {
	Kind FailureKind
	Peer uint64 // the one to blame, 0 for none or oneself
	Text string
}

// Error returns the kind and the text.
func (f *Failure) Error() string { return string(f.Kind) + ": " + f.Text }

// TransferID tells the messages of one transfer from those of every other one, also of
// an earlier term or an earlier run of the member.
type TransferID string

// InfoRequest asks a member what it has, and with Make set to make a snapshot if it has
// none at or above MinIndex (R5).
type InfoRequest struct {
	Group    string        `json:"group"`
	From     uint64        `json:"from"`
	Term     uint64        `json:"term"`
	Transfer TransferID    `json:"transfer"`
	Held     ID            `json:"held"`    // the newest that the asker holds
	Lineage  Lineage       `json:"lineage"` // of Held
	MinTerm  uint64        `json:"min_term"`
	MinIndex uint64        `json:"min_index"`
	Needs    uint64        `json:"needs,omitempty"` // member that the configuration must have, 0 for none
	Make     bool          `json:"make"`
	Wait     time.Duration `json:"wait"` // how long the answer may wait for Ready or Failed; bounded by the answerer
}

// AnswerState is what the answerer has for the asker.
type AnswerState string

// The states of an answer.
const (
	None       AnswerState = "none"
	Generating AnswerState = "generating"
	Ready      AnswerState = "ready"
	Failed     AnswerState = "failed"
)

// Answer answers an InfoRequest. With Refusal set nothing else counts.
type Answer struct {
	Transfer TransferID  `json:"transfer"`
	From     uint64      `json:"from"`
	Term     uint64      `json:"term"`
	State    AnswerState `json:"state"`
	ID       ID          `json:"id"`      // when Ready: the best that fits
	Lineage  Lineage     `json:"lineage"` // of it
	Bytes    int64       `json:"bytes"`   // of it
	Applied  uint64      `json:"applied"` // of the answerer
	Reason   string      `json:"reason,omitempty"`
	Refusal  *Refusal    `json:"refusal,omitempty"`
}

// Announce tells the others that the leader has recorded a snapshot, so that they adopt
// it and become sources of it (R10).
type Announce struct {
	Group   string   `json:"group"`
	From    uint64   `json:"from"`
	Term    uint64   `json:"term"`
	ID      ID       `json:"id"`
	Lineage Lineage  `json:"lineage"`
	Holders []uint64 `json:"holders"` // members that hold it
}

// Envelope is what a MsgSnap from the leader says, without data (R6).
type Envelope struct {
	From      uint64   // the leader
	Term      uint64   // of the message
	SnapTerm  uint64   // of the announced snapshot
	SnapIndex uint64   // of the announced snapshot
	Target    ID       // the announced snapshot; may be gone by now
	Holders   []uint64 // members that hold it
	First     uint64   // the leader's first index: what ends below First-1 is of no use
}

// OutcomeKind is what became of an install (R7, R8).
type OutcomeKind string

// The outcomes. Progress is not an end: it keeps the leader from giving up.
const (
	Progress      OutcomeKind = "progress"
	Installed     OutcomeKind = "installed"
	StepNotNeeded OutcomeKind = "not_needed"
	InstallFailed OutcomeKind = "failed"
)

// Outcome tells the leader what became of the install that it asked for.
type Outcome struct {
	Group    string      `json:"group"`
	From     uint64      `json:"from"` // the receiver
	To       uint64      `json:"to"`   // the leader that asked
	Term     uint64      `json:"term"` // of the envelope
	Transfer TransferID  `json:"transfer"`
	Kind     OutcomeKind `json:"kind"`
	Index    uint64      `json:"index"` // Installed: of the installed snapshot; else of the announced one
	Bytes    int64       `json:"bytes"` // moved so far
	Refusal  *Refusal    `json:"refusal,omitempty"`
	Reason   string      `json:"reason,omitempty"`
}

// Purpose is what a snapshot is fetched for.
type Purpose uint8

// The purposes, most urgent last.
const (
	Adopt    Purpose = iota // follower or learner: to become a source and to cut its log
	TakeOver                // leader: to record what it did not make
	Rescue                  // install: a member that is too far behind the log
)

// String returns the word for the purpose.
func (p Purpose) String() string { return [...]string{"adopt", "take over", "install"}[p] }

// Event is something that has happened. See the types below.
type Event interface{ event() }

// The events of a Machine.
type (
	// Tick says that time has passed; also sent when something in the View has changed.
	Tick struct{}
	// Wanted asks for a recorded snapshot at or above MinIndex whose configuration has
	// the member Needs (0: any), soon and also in a quiet group (R6).
	Wanted struct{ MinIndex, Needs uint64 }
	// InstallAsked brings a MsgSnap whose data this member needs (R8; what raft would
	// take without data was stepped before).
	InstallAsked struct{ Envelope Envelope }
	// Announced brings the leader's announcement.
	Announced struct{ Announce Announce }
	// Asked brings another member's InfoRequest; Machine.Answer then gives the answer.
	Asked struct{ Request InfoRequest }
	// InfoCame brings an answer to an Ask.
	InfoCame struct{ Answer Answer }
	// InfoFailed says that an Ask got no answer.
	InfoFailed struct {
		Transfer TransferID
		Peer     uint64
		Text     string
	}
	// FetchMoved tells the bytes moved so far, fetched and reused together.
	FetchMoved struct {
		Transfer TransferID
		Bytes    int64
	}
	// FetchDone says that the snapshot lies durable and verified in the store.
	FetchDone struct {
		Transfer TransferID
		Held     Held
	}
	// FetchEnded says that a fetch ended without a snapshot. Its staging is kept by digest.
	FetchEnded struct {
		Transfer TransferID
		Failure  Failure
	}
	// RecordDone tells how a Record ended; nil is success (R4).
	RecordDone struct {
		Transfer TransferID
		Refusal  *Refusal
		Err      string // a local failure, "" for none
	}
	// HandDone tells how a Hand ended (R8.4).
	HandDone struct {
		Transfer TransferID
		Outcome  Outcome
	}
	// Made says that a Make ended with a durable snapshot.
	Made struct{ Held Held }
	// MakeFailed says that a Make ended without one.
	MakeFailed struct{ Failure Failure }
	// Damaged says that a held snapshot turned out to be damaged and is quarantined.
	Damaged struct{ ID ID }
	// Close ends everything; no effect but cancellations follows it.
	Close struct{}
)

func (Tick) event()         {}
func (Wanted) event()       {}
func (InstallAsked) event() {}
func (Announced) event()    {}
func (Asked) event()        {}
func (InfoCame) event()     {}
func (InfoFailed) event()   {}
func (FetchMoved) event()   {}
func (FetchDone) event()    {}
func (FetchEnded) event()   {}
func (RecordDone) event()   {}
func (HandDone) event()     {}
func (Made) event()         {}
func (MakeFailed) event()   {}
func (Damaged) event()      {}
func (Close) event()        {}

// Effect is something to be done. See the types below.
type Effect interface{ effect() }

// The effects of a Machine. Whoever carries one out answers with the event named.
type (
	// Ask sends an InfoRequest: InfoCame or InfoFailed.
	Ask struct {
		Peer    uint64
		Request InfoRequest
	}
	// Fetch moves a snapshot here: FetchMoved, then FetchDone or FetchEnded. Sources hold
	// the same id; Others may hold single chunks of it (R10).
	Fetch struct {
		Transfer TransferID
		Purpose  Purpose
		Target   ID
		Sources  []uint64
		Others   []uint64
	}
	// CancelFetch ends a fetch: FetchEnded with FailCancelled follows, or FetchDone if it
	// was done already. Why is what is wrong with the fetch, of the kind FailCancelled where
	// nothing is: it is not needed any more, or something else goes first.
	CancelFetch struct {
		Transfer TransferID
		Why      Failure
	}
	// Record makes a durable snapshot the one that Raft knows (R4): RecordDone. Source is
	// the member it was taken from, the own id for one made here.
	Record struct {
		Transfer TransferID
		Purpose  Purpose
		ID       ID
		Source   uint64
	}
	// Hand gives a durable snapshot to Raft as an install (R8.3): HandDone.
	Hand struct {
		Transfer TransferID
		ID       ID
		Envelope Envelope
	}
	// Tell sends an Outcome to the leader; it is not answered.
	Tell struct{ Outcome Outcome }
	// Spread sends an Announce to a member; it is not answered.
	Spread struct {
		Peer     uint64
		Announce Announce
	}
	// Make makes a snapshot of the state at or above MinIndex here: Made or MakeFailed.
	Make struct{ MinIndex uint64 }
	// Quarantine moves a held snapshot out of use.
	Quarantine struct {
		ID   ID
		Text string
	}
	// Freed is the finaliser of a transfer: emitted exactly once for each transfer that
	// began, on every path; pins of it end, and its staging stays only with Keep.
	Freed struct {
		Transfer TransferID
		Keep     bool
	}
	// Refused counts and logs a typed refusal given or received.
	Refused struct {
		Peer    uint64
		Refusal Refusal
	}
	// Alarm is for people: something is wrong that does not mend itself.
	Alarm struct{ Text string }
)

func (Ask) effect()         {}
func (Fetch) effect()       {}
func (CancelFetch) effect() {}
func (Record) effect()      {}
func (Hand) effect()        {}
func (Tell) effect()        {}
func (Spread) effect()      {}
func (Make) effect()        {}
func (Quarantine) effect()  {}
func (Freed) effect()       {}
func (Refused) effect()     {}
func (Alarm) effect()       {}
