package raftnode

import (
	"context"
	"fmt"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// MaxProposal is the greatest size of a proposal in bytes.
const MaxProposal = 8 << 20

// Propose puts data into the log and returns what the state machine made of it, once it
// is committed and applied here. ErrNotLeader, ErrBusy and ErrClosed say that nothing was
// done; after any other error data may be committed, now or later.
func (n *Node) Propose(ctx context.Context, data []byte) ([]byte, error) {
	if len(data) > MaxProposal {
		return nil, wrap("propose", "", fmt.Errorf("%d bytes, at most %d are allowed", len(data), MaxProposal))
	}
	if err := n.mayLead(); err != nil {
		return nil, wrap("propose", "", err)
	}
	seq, c := n.waiting.add()
	k := proposalKey{n.run, seq}
	if err := n.box.proposal(k, k.encode(data)); err != nil {
		n.waiting.drop(seq)
		return nil, wrap("propose", "", err)
	}
	select {
	case a := <-c:
		return a.result, wrap("propose", "", a.err)
	case <-ctx.Done():
		n.waiting.drop(seq)
		return nil, wrap("propose", "", fmt.Errorf("%w: %w", ErrUnknown, ctx.Err()))
	}
}

// mayLead refuses early what the loop would refuse anyway.
func (n *Node) mayLead() error {
	if !n.ready.Load() {
		return &NotLeaderError{}
	}
	if n.leading.load().role == protocol.Leader {
		return nil
	}
	leader, _ := n.Leader()
	return &NotLeaderError{Leader: leader}
}

// ReadIndex returns when the state machine has everything that was acknowledged before
// the call, so that what is read afterwards is linearizable. Only the leader can say so.
func (n *Node) ReadIndex(ctx context.Context) error {
	if err := n.mayLead(); err != nil {
		return wrap("read", "", err)
	}
	r := &read{done: make(chan error, 1)}
	if err := n.box.read(r); err != nil {
		return wrap("read", "", err)
	}
	select {
	case err := <-r.done:
		return wrap("read", "", err)
	case <-n.life.Done():
		return wrap("read", "", ErrClosed)
	case <-ctx.Done():
		return wrap("read", "", ctx.Err())
	}
}

// Leader returns the leader, if there is one that this member knows.
func (n *Node) Leader() (protocol.Member, bool) {
	if !n.ready.Load() {
		return protocol.Member{}, false
	}
	id := n.leading.load().leader
	for _, r := range n.Members() {
		if r.ID == id {
			return r, id != 0
		}
	}
	return protocol.Member{}, false
}

// Members returns the member table as of the last change that is committed here.
func (n *Node) Members() []protocol.Member {
	if rows := n.rows.Load(); rows != nil {
		return *rows
	}
	return nil
}

// find looks a member up by its name.
func (n *Node) find(name string) (protocol.Member, error) {
	for _, r := range n.Members() {
		if r.Name == name {
			return r, nil
		}
	}
	return protocol.Member{}, ErrNoMember
}

// onLoop runs f on the loop and waits for what it returns. When the wait ends early f may
// run all the same, unless the error is ErrClosed and f was never queued.
func (n *Node) onLoop(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	if err := n.box.task(func() { done <- f() }); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-n.life.Done():
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fatal ends the member when what happened on the loop was final.
func (n *Node) fatal(err error) error {
	if err != nil {
		n.stop(wrap("run member", n.opts.Name, err))
	}
	return err
}
