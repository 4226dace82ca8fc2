package raftnode

import (
	"context"
	"errors"
	"slices"

	"github.com/snapferry/snapferry/raftsnap"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// host is the node as raftsnap sees it.
type host struct{ n *Node }

var _ raftsnap.Host = host{}

func (h host) View() protocol.View {
	v := *h.n.view.Load()
	v.Applied = max(v.Applied, h.n.applier.applied.Load())
	v.Peers = slices.Clone(v.Peers)
	for i := range v.Peers {
		v.Peers[i].Incarnation = h.n.door.Incarnation(v.Peers[i].ID)
	}
	if h.n.life.Err() != nil {
		v.Role, v.Leader = protocol.Follower, 0
	}
	return v
}

func (h host) Freeze(ctx context.Context, dir string) (protocol.Meta, error) {
	type frozen struct {
		meta protocol.Meta
		err  error
	}
	c := make(chan frozen, 1)
	w := work{freeze: &freezeWork{dir: dir, done: func(meta protocol.Meta, err error) { c <- frozen{meta, err} }}}
	if !h.n.pipe.put(w) {
		return protocol.Meta{}, ErrClosed
	}
	// Not given up when ctx ends: the state machine may be writing to dir.
	f := <-c
	if f.err == nil {
		f.err = ctx.Err()
	}
	if v, ok := h.n.sm.(Verifier); ok && f.err == nil {
		if f.err = v.VerifySnapshot(ctx, dir); errors.Is(f.err, ErrCorrupt) {
			h.n.stop(wrap("run member", h.n.opts.Name, f.err))
		}
	}
	// Whoever installs this learns which data directory belongs to which id (R1, R11).
	f.meta.Members = slices.Clone(f.meta.Members)
	for i := range f.meta.Members {
		f.meta.Members[i].Incarnation = h.n.door.Incarnation(f.meta.Members[i].ID)
	}
	return f.meta, f.err
}

func (h host) Record(ctx context.Context, id protocol.ID, meta protocol.Meta) error {
	var refusal *protocol.Refusal
	err := h.n.onLoop(ctx, func() (err error) {
		n := h.n
		refusal, err = n.member.record(id, meta, n.applier.applied.Load())
		n.publish()
		return n.fatal(err)
	})
	if err == nil && refusal != nil {
		return refusal
	}
	return err
}

func (h host) Install(ctx context.Context, e protocol.Envelope, id protocol.ID, meta protocol.Meta, dir string) (protocol.Outcome, error) {
	n := h.n
	o := protocol.Outcome{
		Group: n.identity.Group, From: n.identity.ID, To: e.From, Term: e.Term,
		Kind: protocol.Installed, Index: meta.Index,
	}
	installed := make(chan error, 1)
	var refusal *protocol.Refusal
	err := n.onLoop(ctx, func() (err error) {
		refusal, err = n.member.install(e, id, meta, dir, func(err error) { installed <- err })
		n.publish()
		return n.fatal(err)
	})
	if err != nil {
		return o, err
	}
	if refusal != nil {
		o.Kind, o.Refusal, o.Index = protocol.InstallFailed, refusal, e.SnapIndex
		if refusal.Kind == protocol.NotNeeded {
			o.Kind = protocol.StepNotNeeded
		}
		return o, nil
	}
	// Raft has it now, so there is no way back: not even ctx ends this wait.
	return o, <-installed
}

func (h host) Outcome(o protocol.Outcome) error {
	var refusal *protocol.Refusal
	err := h.n.onLoop(context.Background(), func() error {
		refusal = h.n.member.outcome(o)
		return nil
	})
	if err == nil && refusal != nil {
		return refusal
	}
	return err
}
