package raftsnap

import (
	"crypto/tls"
	"log/slog"
	"net/http"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// Options adjust a Manager. The zero value and nil are valid.
type Options struct {
	// Protocol says when snapshots are made, and how long each step may take.
	Protocol protocol.Config
	// Tick is the resolution of all times in Protocol (default 100 ms).
	Tick time.Duration

	// RateLimit bounds what transfers and makings move, in bytes a second; 0 is no limit.
	// They yield to the WAL besides (see ObserveFsync).
	RateLimit int64
	// Unpaced turns the yielding to the WAL off; RateLimit holds all the same.
	Unpaced bool
	// HTTP carries calls and transfers by its Transport; nil takes one of its own, without
	// client certificates. It must not share connections with Raft's messages.
	HTTP *http.Client
	// TLS is what connections to other members use unless HTTP is set.
	TLS *tls.Config
	// Header is sent along with every request: who is asking.
	Header http.Header
	// StateDir is the directory of the running state, looked through for bytes that need
	// not be fetched; "" is none.
	StateDir string
	// Server adjusts serving; nil takes its defaults. Work, Ended, Damaged and MaxWait are
	// the Manager's and replaced.
	Server *transfer.ServerOptions

	// CallTimeout bounds a call to another member, beyond the time that it was asked to
	// wait (default 5 s).
	CallTimeout time.Duration
	// MaxWait is how long another member's question is kept open at most (default 30 s).
	MaxWait time.Duration
	// ManualTimeout is how long Snapshot goes on trying at most (default 2 min).
	ManualTimeout time.Duration

	// ScrubEvery is how often every held snapshot is read and checked in the background
	// (default 24 h; negative is never), and ScrubRate at how many bytes a second
	// (default 8 MiB).
	ScrubEvery time.Duration
	ScrubRate  int64

	Logger   *slog.Logger // nil: no log
	Observer *Observer    // nil: nobody looks
}

func (o *Options) withDefaults() Options {
	var d Options
	if o != nil {
		d = *o
	}
	setDefault(&d.Tick, 100*time.Millisecond)
	setDefault(&d.CallTimeout, 5*time.Second)
	setDefault(&d.MaxWait, 30*time.Second)
	setDefault(&d.ManualTimeout, 2*time.Minute)
	setDefault(&d.ScrubEvery, 24*time.Hour)
	setDefault(&d.ScrubRate, 8<<20)
	if d.Logger == nil {
		d.Logger = slog.New(slog.DiscardHandler)
	}
	if d.Observer == nil {
		d.Observer = &Observer{}
	}
	return d
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
