package raftnode

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

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
	if r, err := n.find(name); err == nil && r.URL == url {
		return r, nil
	}
	r := protocol.Member{ID: peer.NewID(), Name: name, URL: url}
	err = n.changeMembers(ctx, pb.ConfChangeAddLearnerNode, r)
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
	for {
		err := n.changeMembers(ctx, pb.ConfChangeAddNode, r)
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
		err = n.changeMembers(ctx, pb.ConfChangeRemoveNode, r)
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
		err = n.leading.wait(ctx, n.ending, func(l leadership) bool { return l.leader == r.ID })
	}
	return wrap("transfer leadership to", name, err)
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
	for _, v := range conf.Voters {
		if v == id {
			return true
		}
	}
	return false
}

// changeMembers proposes a change and returns when it is committed here.
func (n *Node) changeMembers(ctx context.Context, kind pb.ConfChangeType, r protocol.Member) error {
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

	if err := n.onLoop(ctx, func() error { return n.member.proposeConf(kind, c) }); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-n.ending:
		return ErrUnknown
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknown, ctx.Err())
	}
}

// changeCommitted tells whoever proposed a change.
func (n *Node) changeCommitted(e *pb.Entry) {
	var cc pb.ConfChangeV2
	var c change
	if proto.Unmarshal(e.GetData(), &cc) != nil || json.Unmarshal(cc.GetContext(), &c) != nil {
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

// membersChanged brings the transport and everybody who asks up to date.
func (n *Node) membersChanged(rows []protocol.Member) {
	n.stale = true
	n.rows.Store(&rows)
	n.transport.SetMembers(rows)
}
