package raftnode

import (
	"errors"
	"log/slog"
	"time"

	"github.com/snapferry/snapferry/raftnode/internal/peer"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// TLS names the certificates of a member. With ClientAuth members must show one that the
// CA signed (mTLS).
type TLS = peer.TLS

// SinglePolicy says who makes snapshots in a group of one member.
type SinglePolicy = protocol.SinglePolicy

// Options configure a Node. Name, Dir and URL must be set.
type Options struct {
	// Name of this member, unique in the group.
	Name string
	// Dir holds everything that the member keeps: its identity, its log, its snapshots,
	// and in the folder "state" the state machine.
	Dir string
	// URL is where the others reach this member. It is needed in its first start; later
	// it may be empty, and must not be another one.
	URL string

	// InitialCluster is every member's URL by name. It is needed in the very first start
	// of a group's first members and ignored later.
	InitialCluster map[string]string
	// Join are URLs of members of a running group that this member was added to. They
	// are needed in its first start and ignored later.
	Join []string

	// SnapshotEntries, SnapshotBytes and SnapshotInterval say how old the newest snapshot
	// may get before a new one is made. Defaults: 100,000 entries, 256 MiB of entries,
	// and no limit in time.
	SnapshotEntries  uint64
	SnapshotBytes    int64
	SnapshotInterval time.Duration
	// TrailingEntries is how many entries below the newest snapshot stay in the log for
	// members that are only a little behind. Up to four times as many are kept while
	// installs take long. Default 10,000.
	TrailingEntries uint64
	// Single is the policy of a group of one.
	Single SinglePolicy
	// Retain is how many snapshots are kept; default 2.
	Retain int
	// RateLimit bounds what this member fetches, in bytes a second; 0 is no limit beside
	// the pacing that yields to the write-ahead log.
	RateLimit int64
	// Unpaced turns that pacing off.
	Unpaced bool

	// Tick is the unit of Raft's time; default 100 ms. ElectionTicks and HeartbeatTicks
	// count in it; defaults 10 and 1.
	Tick                          time.Duration
	ElectionTicks, HeartbeatTicks int

	TLS *TLS
	// Insecure allows http URLs: no secrecy, and anybody who reaches the port is believed.
	Insecure bool

	Logger *slog.Logger
}

func (o Options) withDefaults() Options {
	def(&o.SnapshotEntries, 100_000)
	def(&o.SnapshotBytes, 256<<20)
	def(&o.TrailingEntries, 10_000)
	def(&o.Retain, 2)
	def(&o.Tick, 100*time.Millisecond)
	def(&o.ElectionTicks, 10)
	def(&o.HeartbeatTicks, 1)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

func (o *Options) validate() error {
	switch {
	case o.Dir == "":
		return errors.New("a directory is needed")
	case o.Tick < time.Millisecond || o.HeartbeatTicks < 1 || o.ElectionTicks <= o.HeartbeatTicks:
		return errors.New("a tick takes at least a millisecond, and an election more ticks than a heartbeat")
	}
	return peer.CheckName(o.Name)
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
