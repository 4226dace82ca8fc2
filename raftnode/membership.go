package raftnode

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"google.golang.org/protobuf/proto"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// confPatience is how long a proposed change blocks the next one. It only matters when
// Raft dropped the change without a word; otherwise the change is committed, or its
// leader is one no more, and both end the wait.
const confPatience = 10 * time.Second

// errNotYet says that a learner has not caught up far enough to vote (R12).
var errNotYet = fmt.Errorf("it has not caught up yet: %w", ErrConflict)

// change is a change of the membership as the log carries it.
type change struct {
	Request string          `json:"request"` // tells its proposer that it was committed
	Member  protocol.Member `json:"member"`
}

// proposeConf proposes one change. Another one that is on its way is ErrBusy: changes go
// one at a time and never jointly (R12).
//
// match is what a learner must have to be promoted.
func (m *member) proposeConf(kind pb.ConfChangeType, c change, match uint64) error {
	if m.role != protocol.Leader {
		return m.notLeader()
	}
	if m.pendingConf == math.MaxUint64 && m.cfg.now()-m.confSince > confPatience {
		m.pendingConf = 0
	}
	if m.pendingConf > m.delivered {
		return fmt.Errorf("another change is not committed yet: %w", ErrBusy)
	}
	if err := m.checkConf(kind, c.Member, match); err != nil {
		return err
	}
	about, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cc := &pb.ConfChangeV2{
		Changes: []*pb.ConfChangeSingle{{Type: kind.Enum(), NodeId: &c.Member.ID}},
		Context: about,
	}
	if err := m.rn.ProposeConfChange(cc); err != nil {
		if errors.Is(err, raft.ErrProposalDropped) {
			return ErrBusy
		}
		return err
	}
	m.pendingConf, m.confSince = math.MaxUint64, m.cfg.now() // until it is delivered
	return nil
}

// checkConf refuses a change that makes no sense or is not safe now.
func (m *member) checkConf(kind pb.ConfChangeType, r protocol.Member, match uint64) error {
	voters := m.conf.GetVoters()
	switch kind {
	case pb.ConfChangeAddLearnerNode:
		for _, other := range m.table {
			if other.Name == r.Name || other.URL == r.URL {
				return fmt.Errorf("%s at %s is a member: %w", other.Name, other.URL, ErrConflict)
			}
		}
	case pb.ConfChangeRemoveNode:
		if len(voters) == 1 && voters[0] == r.ID {
			return fmt.Errorf("it is the only voter: %w", ErrConflict)
		}
	case pb.ConfChangeAddNode:
		return m.caughtUp(r.ID, match)
	}
	return nil
}

// caughtUp reports whether a learner replicates and has all that was committed at the
// request (R12).
func (m *member) caughtUp(id, match uint64) error {
	err := errNotYet
	m.rn.WithProgress(func(peer uint64, _ raft.ProgressType, pr tracker.Progress) {
		if peer == id && pr.State == tracker.StateReplicate && pr.Match >= match {
			err = nil
		}
	})
	return err
}

// applyConf makes a committed change take effect, and tells whether it takes this member
// out of the group.
func (m *member) applyConf(e *pb.Entry) (left bool, err error) {
	v2, c, err := decodeChange(e)
	if err != nil {
		return false, fmt.Errorf("entry %d: change of the membership: %w: %v", e.GetIndex(), ErrCorrupt, err)
	}
	m.conf = m.rn.ApplyConfChange(v2)
	for _, single := range v2.GetChanges() {
		m.applySingle(single, c.Member, e.GetIndex())
		left = left || single.GetType() == pb.ConfChangeRemoveNode && single.GetNodeId() == m.cfg.id
	}
	if m.pendingConf == math.MaxUint64 {
		m.pendingConf = 0
	}
	m.out.Members(m.members())
	if m.role == protocol.Leader && len(m.table) > 1 {
		m.wantFor(v2.GetChanges(), e.GetIndex())
	}
	return left, nil
}

// decodeChange reads an entry of either kind that Raft has for changes.
func decodeChange(e *pb.Entry) (v2 *pb.ConfChangeV2, c change, err error) {
	if e.GetType() == pb.EntryConfChange {
		var old pb.ConfChange
		err = proto.Unmarshal(e.GetData(), &old)
		v2 = old.AsV2()
	} else {
		v2 = &pb.ConfChangeV2{}
		err = proto.Unmarshal(e.GetData(), v2)
	}
	if err == nil && len(v2.GetContext()) > 0 {
		err = json.Unmarshal(v2.GetContext(), &c)
	}
	return v2, c, err
}

func (m *member) applySingle(c *pb.ConfChangeSingle, r protocol.Member, index uint64) {
	id := c.GetNodeId()
	switch {
	case c.GetType() == pb.ConfChangeRemoveNode:
		delete(m.table, id)
		delete(m.added, id)
	case !slices.Contains(m.conf.GetVoters(), id) && !slices.Contains(m.conf.GetLearners(), id):
		// refused by Raft
	default:
		if r.ID == id && r.Name != "" {
			m.table[id] = r
		}
		m.added[id] = index
	}
}

// wantFor asks at once for a snapshot that names a new or promoted member (R6): in a
// quiet group there would never be one.
func (m *member) wantFor(changes []*pb.ConfChangeSingle, index uint64) {
	for _, c := range changes {
		if c.GetType() != pb.ConfChangeRemoveNode {
			m.out.Want(index, c.GetNodeId())
		}
	}
}

func be64(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func fromBE64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}
