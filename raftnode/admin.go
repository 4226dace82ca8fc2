package raftnode

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/peer"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// AddLearner adds a member that receives the log but does not vote, and returns its row
// of the member table once that is committed. The member is then started with Join. An
// id is never used twice, so a member that lost its disk is removed and added anew. Adding
// what is there already, with the same name and URL, does nothing.
func (n *Node) AddLearner(ctx context.Context, name, url string) (protocol.Member, error) {
	url, err := peer.NormalURL(url, n.opts.Insecure)
	if err != nil {
		return protocol.Member{}, wrap("add learner", name, err)
	}
	if err := errors.Join(peer.CheckName(name), n.mayLead()); err != nil {
		return protocol.Member{}, wrap("add learner", name, err)
	}
	if r, err := n.find(name); err == nil && r.URL == url {
		return r, nil
	}
	r := protocol.Member{ID: peer.NewID(), Name: name, URL: url}
	err = n.changeMembers(ctx, pb.ConfChangeAddLearnerNode, r, 0)
	return r, wrap("add learner", name, err)
}

// Promote makes a learner a voter, as soon as it has all that is committed (R12). It
// waits for that until ctx ends.
func (n *Node) Promote(ctx context.Context, name string) error {
	r, err := n.find(name)
	if err != nil {
		return wrap("promote", name, err)
	}
	if n.votes(r.ID) {
		return nil
	}
	if err := n.mayLead(); err != nil {
		return wrap("promote", name, err)
	}
	match := n.view.Load().Commit
	for {
		err := n.changeMembers(ctx, pb.ConfChangeAddNode, r, match)
		if !errors.Is(err, errNotYet) && !errors.Is(err, ErrBusy) {
			return wrap("promote", name, err)
		}
		select {
		case <-time.After(n.opts.Tick):
		case <-ctx.Done():
			return wrap("promote", name, fmt.Errorf("%w: %w", err, ctx.Err()))
		}
	}
}

// Remove takes a member out of the group, for good: its id is never used again.
func (n *Node) Remove(ctx context.Context, name string) error {
	r, err := n.find(name)
	if err == nil {
		err = n.changeMembers(ctx, pb.ConfChangeRemoveNode, r, 0)
	}
	return wrap("remove", name, err)
}

// TransferLeader makes a voter the leader, and returns when it is.
func (n *Node) TransferLeader(ctx context.Context, name string) error {
	r, err := n.find(name)
	if err == nil && !n.votes(r.ID) {
		err = fmt.Errorf("it is a learner: %w", ErrConflict)
	}
	if err == nil {
		err = n.onLoop(ctx, func() error {
			if n.member.role != protocol.Leader {
				return n.member.notLeader()
			}
			n.member.rn.TransferLeader(r.ID)
			return nil
		})
	}
	if err == nil {
		err = n.led(ctx, r.ID)
	}
	return wrap("transfer leadership to", name, err)
}

// led waits until a member leads. Raft gives a transfer up after an election timeout,
// without a word.
func (n *Node) led(ctx context.Context, id uint64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Duration(n.opts.ElectionTicks)*n.opts.Tick,
		fmt.Errorf("it did not take over: %w", ErrBusy))
	defer cancel()
	defer context.AfterFunc(n.life, cancel)()
	if err := n.leading.wait(ctx, func(l leadership) bool { return l.leader == id }); err != nil {
		return context.Cause(ctx)
	}
	return nil
}

// Snapshot asks for a snapshot that has all that is applied here, and returns when one is
// recorded: made by a follower and taken over if this member leads, made here otherwise.
func (n *Node) Snapshot(ctx context.Context) (protocol.ID, error) {
	if !n.ready.Load() {
		return protocol.ID{}, wrap("snapshot", n.opts.Name, ErrClosed)
	}
	id, err := n.snaps.Snapshot(ctx)
	return id, wrap("snapshot", n.opts.Name, err)
}

func (n *Node) votes(id uint64) bool {
	conf := n.conf.Load()
	return conf != nil && slices.Contains(conf.Voters, id)
}

// changeMembers proposes a change and returns when it is committed here.
func (n *Node) changeMembers(ctx context.Context, kind pb.ConfChangeType, r protocol.Member, match uint64) error {
	if err := n.mayLead(); err != nil {
		return err
	}
	c := change{Request: rand.Text(), Member: r}
	done := make(chan error, 1)
	n.mu.Lock()
	n.changes[c.Request] = done
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		delete(n.changes, c.Request)
		n.mu.Unlock()
	}()

	err := n.onLoop(ctx, func() error { return n.member.proposeConf(kind, c, match) })
	if errors.Is(err, ErrClosed) || err != nil && err == ctx.Err() {
		return fmt.Errorf("%w: %w", ErrUnknown, err) // it may have been proposed
	}
	if err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-n.life.Done():
		return ErrUnknown
	case <-time.After(confPatience): // Raft has dropped it, or has no majority
		return ErrUnknown
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknown, ctx.Err())
	}
}

// changeCommitted tells whoever proposed a change.
func (n *Node) changeCommitted(e *pb.Entry) {
	_, c, err := decodeChange(e)
	if err != nil {
		return // not of this program
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if done := n.changes[c.Request]; done != nil {
		done <- nil
		delete(n.changes, c.Request)
	}
}

func (n *Node) failChanges(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for request, done := range n.changes {
		done <- err
		delete(n.changes, request)
	}
}

// membersChanged brings everybody who asks up to date, on the loop; keepTable does the
// rest.
func (n *Node) membersChanged(rows []protocol.Member) {
	n.stale = true
	conf := fromConfState(n.member.conf)
	n.conf.Store(&conf)
	n.rows.Store(&rows)
	select {
	case n.tableChanged <- struct{}{}:
	default:
	}
}

// keepTable brings the transport and the file up to date, off the loop because both may
// have to wait for the disk.
func (n *Node) keepTable() {
	for {
		select {
		case <-n.life.Done():
			return
		case <-n.tableChanged:
		}
		rows := *n.rows.Load()
		n.transport.SetMembers(rows)
		if err := n.door.SaveTable(rows); err != nil {
			n.opts.Logger.Error("member table was not saved", "err", err)
		}
	}
}
