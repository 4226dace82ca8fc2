package raftnode

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/peer"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// refetch gets a snapshot at or above a record whose own directory is lost or damaged,
// from whoever holds one, before Raft starts (R2). Entries of the own log above it stay:
// this member has acknowledged them. This member serves nothing meanwhile: of two members
// that need each other's snapshot both wait for a third.
func (n *Node) refetch(ctx context.Context, rec *pb.SnapshotMetadata) (protocol.Held, error) {
	client := transfer.NewClient(&transfer.ClientOptions{TLS: n.clientTLS, Header: peer.Header(n.identity)})
	defer client.Close()
	for {
		held, err := n.refetchOnce(ctx, client, rec)
		if err == nil {
			err = adopt(n.log, held.Meta)
		}
		if err == nil {
			return held, nil
		}
		n.opts.Logger.Warn("no snapshot from anybody yet", "min_index", rec.GetIndex(), "err", err)
		select {
		case <-time.After(10 * n.opts.Tick):
		case <-ctx.Done():
			return protocol.Held{}, fmt.Errorf("fetch a snapshot at or above %d: %w: %w", rec.GetIndex(), err, ctx.Err())
		}
	}
}

func (n *Node) refetchOnce(ctx context.Context, client *transfer.Client, rec *pb.SnapshotMetadata) (protocol.Held, error) {
	all := errors.New("no other member is known")
	for _, r := range n.lastTable() {
		if r.ID == n.identity.ID {
			continue
		}
		answer, err := n.askFor(ctx, client, r, rec.GetIndex())
		if err == nil {
			var held protocol.Held
			held, _, err = client.Fetch(ctx, transfer.Fetch{
				Store: n.store, ID: answer.ID, Sources: []transfer.Source{{ID: r.ID, URL: r.URL}},
			})
			if err == nil {
				return held, nil
			}
		}
		all = errors.Join(all, fmt.Errorf("%s: %w", r.Name, err))
	}
	return protocol.Held{}, all
}

// askFor asks one member what it has.
func (n *Node) askFor(ctx context.Context, client *transfer.Client, r protocol.Member, index uint64) (protocol.Answer, error) {
	answer, err := client.Info(ctx, r.URL, protocol.InfoRequest{
		Group: n.identity.Group, From: n.identity.ID,
		Term:     math.MaxUint64, // a snapshot of any term will do
		Transfer: "start", MinIndex: index, Needs: n.identity.ID,
	})
	switch {
	case err != nil:
		return answer, err
	case answer.Refusal != nil:
		return answer, answer.Refusal
	case answer.State != protocol.Ready:
		return answer, fmt.Errorf("it has none: %s %s", answer.State, answer.Reason)
	}
	return answer, nil
}

// adopt makes a fetched snapshot the newest record of a log that Raft does not use yet.
func adopt(log *raftlog.Log, meta protocol.Meta) error {
	md := &pb.SnapshotMetadata{Index: &meta.Index, Term: &meta.Term, ConfState: toConfState(meta.Conf)}
	if meta.Index <= log.Recorded().GetIndex() {
		return nil
	}
	// A log that has the snapshot's last entry keeps what follows it: this member has
	// acknowledged that. One that has another entry there was superseded from there on.
	if term, err := log.Term(meta.Index); err == nil && term == meta.Term {
		if err := log.RaiseCommit(meta.Index); err != nil {
			return err
		}
		return log.Record(md, meta.Index)
	}
	hs := log.HardState()
	term, commit := max(hs.GetTerm(), meta.Term), meta.Index
	next := &pb.HardState{Term: &term, Commit: &commit}
	if term == hs.GetTerm() {
		next.Vote = hs.Vote
	}
	return log.ApplySnapshot(md, next, nil)
}
