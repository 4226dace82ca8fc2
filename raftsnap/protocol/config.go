package protocol

import (
	"math/rand/v2"
	"time"
)

// SinglePolicy says what a leader does that has nobody to take snapshots over from,
// because it is the only member of its group that could make one.
type SinglePolicy uint8

// The policies of a leader on its own.
const (
	SingleLocal  SinglePolicy = iota // makes its own when one is due
	SingleNever                      // makes one only when asked by Wanted
	SingleLogCap                     // makes one when the log is over LogCap
)

// String returns the word that settings use for the policy.
func (p SinglePolicy) String() string { return [...]string{"local", "never", "log_cap"}[p] }

// Config holds the thresholds and deadlines of a Machine and an Installs. The zero value
// of each field stands for the default that is named with it.
type Config struct {
	// When a recorded snapshot is too old. Any of the three is enough.

	Entries  uint64        // applied since it; default 100,000, math.MaxUint64 for never
	Bytes    int64         // of these entries; default 256 MiB, below 0 for never
	Interval time.Duration // since it, if anything was applied; default and below 0 for never

	// MinGap is the least time between two makings that thresholds ask for. A Wanted does
	// not wait for it. Default 1 s.
	MinGap time.Duration

	// StandIn is how long a follower's own recorded snapshot must have been older than
	// twice the thresholds, with no transfer under way, until it makes one by itself. Each
	// further rank waits half of it longer, so that never all pause at once. Default 10 s.
	StandIn time.Duration

	// SpreadInterval is how often the leader announces its recorded snapshot again, for
	// members that missed it. Default 30 s.
	SpreadInterval time.Duration

	// The deadlines of a transfer. There is none on the whole of it.

	InfoDeadline    time.Duration // for an answer to one Ask; default 10 s
	SurveyWait      time.Duration // for better answers once one is Ready; default 500 ms
	PollInterval    time.Duration // between two Asks of one that is Generating; default 250 ms
	MakeDeadline    time.Duration // until a maker is late, and its next in rank is asked; default 2 min
	ApplyDeadline   time.Duration // until own applied has reached what is to be made or recorded; default 30 s
	StartDeadline   time.Duration // from a Fetch to its first byte; default 20 s
	IdleDeadline    time.Duration // without a byte; default 30 s
	CancelDeadline  time.Duration // from a CancelFetch to the end of the Fetch; default 10 s
	InstallDeadline time.Duration // for a Hand or a Record, then an alarm; default 10 min

	// InfoWait is how long the answer to an Ask of the maker may be held open (long poll).
	// Default and upper bound: half of InfoDeadline.
	InfoWait time.Duration

	// ProgressInterval is how often a receiver tells the leader that its install is under
	// way; ReportDeadline is after how long without hearing that the leader gives up.
	// Defaults 1 s and 15 s.

	ProgressInterval time.Duration
	ReportDeadline   time.Duration

	// The back-off of a peer, of rounds and of makings that failed: from BackoffBase,
	// doubling to BackoffMax, with jitter. A failure is forgotten after BackoffDecay.
	// Defaults 250 ms, 30 s and 5 min.

	BackoffBase  time.Duration
	BackoffMax   time.Duration
	BackoffDecay time.Duration

	// Attempts is how many transfers of one install may fail until the leader is told that
	// the install has failed, and how many an announced snapshot is worth. Default 4.
	Attempts int

	// LogCap is the size of the log above which a leader that has got no snapshot from
	// anybody for LogCapWait makes one itself (R5). Defaults 4 GiB and 10 min; below 0 for
	// never.

	LogCap     int64
	LogCapWait time.Duration

	// Single is the policy of a leader on its own.
	Single SinglePolicy

	// TrailingEntries is how many entries below the recorded snapshot the log keeps at
	// least. Installs.Trailing raises it to at most four times as many while the extra
	// ones fit in TrailingBytes. Defaults 5,000 and 64 MiB.

	TrailingEntries uint64
	TrailingBytes   int64

	// FloorTime and FloorBytes bound how long, and up to which size of the log, the log
	// is held for an install in progress (R9). FloorGrace is how much longer it is held
	// once the install is done, until the member has fetched its first entries. Defaults
	// 30 min, 1 GiB and 5 s.

	FloorTime  time.Duration
	FloorBytes int64
	FloorGrace time.Duration

	// Seed of the jitter. The same seed and the same events give the same effects.
	Seed uint64
}

// withDefaults returns the configuration with its zero fields filled in.
func (c Config) withDefaults() Config {
	set(&c.Entries, 100_000)
	set(&c.Bytes, 256<<20)
	set(&c.MinGap, time.Second)
	set(&c.StandIn, 10*time.Second)
	set(&c.SpreadInterval, 30*time.Second)
	set(&c.InfoDeadline, 10*time.Second)
	set(&c.SurveyWait, 500*time.Millisecond)
	set(&c.PollInterval, 250*time.Millisecond)
	set(&c.MakeDeadline, 2*time.Minute)
	set(&c.ApplyDeadline, 30*time.Second)
	set(&c.StartDeadline, 20*time.Second)
	set(&c.IdleDeadline, 30*time.Second)
	set(&c.CancelDeadline, 10*time.Second)
	set(&c.InstallDeadline, 10*time.Minute)
	set(&c.InfoWait, c.InfoDeadline/2)
	c.InfoWait = min(c.InfoWait, c.InfoDeadline/2)
	set(&c.ProgressInterval, time.Second)
	set(&c.ReportDeadline, 15*time.Second)
	set(&c.BackoffBase, 250*time.Millisecond)
	set(&c.BackoffMax, 30*time.Second)
	set(&c.BackoffDecay, 5*time.Minute)
	set(&c.Attempts, 4)
	set(&c.LogCap, 4<<30)
	set(&c.LogCapWait, 10*time.Minute)
	set(&c.TrailingEntries, 5_000)
	set(&c.TrailingBytes, 64<<20)
	set(&c.FloorTime, 30*time.Minute)
	set(&c.FloorBytes, 1<<30)
	set(&c.FloorGrace, 5*time.Second)
	return c
}

// set gives a field its default.
func set[T comparable](field *T, def T) {
	var zero T
	if *field == zero {
		*field = def
	}
}

// backoff gives the wait after the n-th failure in a row: doubling, bounded, and spread
// from half of it to the whole so that members do not come back together.
func (c *Config) backoff(n int, rng *rand.Rand) time.Duration {
	wait := c.BackoffBase
	for range min(n-1, 40) {
		wait = min(2*wait, c.BackoffMax)
	}
	wait = min(wait, c.BackoffMax)
	return wait/2 + time.Duration(rng.Int64N(int64(wait/2)+1))
}
