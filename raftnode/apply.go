package raftnode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// work is a piece of what the applier does, in the order in which Raft decided it. One
// of its parts is set, or entries with conf.
type work struct {
	entries []*pb.Entry
	conf    *confWork // the membership after the one entry beside it
	install *installWork
	freeze  *freezeWork
}

type confWork struct {
	conf  protocol.Conf
	table []protocol.Member
	left  bool // the change takes this member out of the group
}

type installWork struct {
	meta protocol.Meta
	dir  string
	done func(error)
}

type freezeWork struct {
	dir  string
	done func(protocol.Meta, error)
}

// bytes is how much memory the work holds.
func (w work) bytes() (n int) {
	for _, e := range w.entries {
		n += len(e.GetData())
	}
	return n
}

// proposalKey tells a member its own proposals among the entries: which run of which
// member proposed it, and the how manieth of that run.
type proposalKey struct{ run, seq uint64 }

const keySize = 16

func (k proposalKey) encode(data []byte) []byte {
	b := make([]byte, 0, keySize+len(data))
	b = binary.BigEndian.AppendUint64(b, k.run)
	b = binary.BigEndian.AppendUint64(b, k.seq)
	return append(b, data...)
}

func splitProposal(data []byte) (k proposalKey, rest []byte) {
	if len(data) < keySize {
		return proposalKey{}, nil
	}
	return proposalKey{binary.BigEndian.Uint64(data), binary.BigEndian.Uint64(data[8:])}, data[keySize:]
}

// applier brings committed work into the state machine. One goroutine uses it; applied
// may be read by all.
type applier struct {
	group   string
	lineage protocol.Lineage
	sm      StateMachine
	finish  func(k proposalKey, result []byte) // an entry of a proposal is applied

	applied atomic.Uint64 // last index whose work is done
	term    uint64        // of that entry
	conf    protocol.Conf // as of that entry
	table   []protocol.Member
	batch   []Entry // reused
	keys    []proposalKey
}

// newApplier begins at a record (R2): what the state machine has above it is skipped, but
// changes of the membership are followed.
func newApplier(group string, lineage protocol.Lineage, sm StateMachine, at protocol.Meta, finish func(proposalKey, []byte)) *applier {
	a := &applier{group: group, lineage: lineage, sm: sm, finish: finish, term: at.Term, conf: at.Conf, table: at.Members}
	a.applied.Store(at.Index)
	return a
}

// do does one piece of work. An error means that the state machine can go on no more.
func (a *applier) do(w work) error {
	switch {
	case w.install != nil:
		err := a.install(w.install)
		w.install.done(err)
		return err
	case w.freeze != nil:
		w.freeze.done(a.freeze(w.freeze.dir))
		return nil
	}
	return a.apply(w)
}

func (a *applier) apply(w work) error {
	a.batch, a.keys = a.batch[:0], a.keys[:0]
	have := a.sm.AppliedIndex()
	for _, e := range w.entries {
		if e.GetIndex() <= have {
			continue
		}
		var k proposalKey
		var data []byte
		if e.GetType() == pb.EntryNormal {
			k, data = splitProposal(e.GetData())
		}
		a.batch = append(a.batch, Entry{Index: e.GetIndex(), Term: e.GetTerm(), Data: data})
		a.keys = append(a.keys, k)
	}
	results, err := a.applyBatch()
	if err != nil {
		return err
	}
	last := w.entries[len(w.entries)-1]
	a.term = last.GetTerm()
	if w.conf != nil {
		a.conf, a.table = w.conf.conf, w.conf.table
	}
	a.applied.Store(last.GetIndex())
	for i, k := range a.keys {
		if k != (proposalKey{}) {
			a.finish(k, results[i])
		}
	}
	clear(a.batch)
	return nil
}

func (a *applier) applyBatch() ([][]byte, error) {
	if len(a.batch) == 0 {
		return nil, nil
	}
	results, err := a.sm.Apply(a.batch)
	if err == nil && len(results) != len(a.batch) {
		err = fmt.Errorf("%d results for %d entries", len(results), len(a.batch))
	}
	return results, wrap("apply", fmt.Sprintf("entry %d", a.batch[0].Index), err)
}

// freeze takes the state and all that R1 wants beside it, between two entries.
func (a *applier) freeze(dir string) (protocol.Meta, error) {
	index := a.applied.Load()
	if have := a.sm.AppliedIndex(); have > index {
		return protocol.Meta{}, fmt.Errorf("the state is at %d and the log only at %d", have, index)
	}
	if index <= bootIndex {
		return protocol.Meta{}, errors.New("nothing is applied yet")
	}
	if id, ok := unnamed(a.conf, a.table); ok {
		return protocol.Meta{}, fmt.Errorf("member %d has no row in the member table", id)
	}
	if err := a.sm.Snapshot(dir); err != nil {
		return protocol.Meta{}, err
	}
	return protocol.Meta{
		Group: a.group, Term: a.term, Index: index, Conf: a.conf, Members: a.table, Lineage: a.lineage,
	}, nil
}

// install replaces the state (R8.4).
func (a *applier) install(w *installWork) error {
	if err := a.sm.Install(w.dir); err != nil {
		return wrap("install", w.dir, err)
	}
	if have := a.sm.AppliedIndex(); have != w.meta.Index {
		return wrap("install", w.dir, fmt.Errorf("the state is at %d, its manifest says %d", have, w.meta.Index))
	}
	a.term, a.conf, a.table = w.meta.Term, w.meta.Conf, w.meta.Members
	a.applied.Store(w.meta.Index)
	return nil
}
