package raftnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/peer"
	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftsnap"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
)

// Start brings the member up. In its first start it waits for the others, until ctx ends:
// a majority of the initial cluster has to answer, or the group it joins (R11). open opens
// the state machine in the directory that it is given; the node closes it.
//
// A Node is started once. When Start fails Close is still needed.
func (n *Node) Start(ctx context.Context, open func(dir string) (StateMachine, error)) error {
	n.start.Lock()
	defer n.start.Unlock()
	if n.started || n.life.Err() != nil {
		return wrap("start member", n.opts.Name, ErrClosed)
	}
	n.started = true
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.life, cancel)()

	err := n.bringUp(ctx, open)
	if err != nil {
		err = wrap("start member", n.opts.Name, err)
		n.stop(err)
	}
	return err
}

func (n *Node) bringUp(ctx context.Context, open func(dir string) (StateMachine, error)) (err error) {
	if n.identity, err = n.identify(ctx); err != nil {
		return err
	}
	ran, err := n.ranBefore()
	if err != nil {
		return err
	}
	wal, replay, err := n.openWAL(n.dir("log"), &raftlog.WALOptions{
		Metadata: n.walMetadata(), First: n.firstRecord(), MustExist: ran,
		Logger: n.opts.Logger, ObserveSync: n.observeSync,
	})
	if err != nil {
		return err
	}
	n.log = raftlog.New(wal, replay)
	if err := n.door.MarkRun(); err != nil {
		return err
	}
	if n.store, err = snapstore.Open(n.dir("snapshots"), &snapstore.Options{Retain: n.opts.Retain, Logger: n.opts.Logger}); err != nil {
		return err
	}
	if n.sm, err = open(n.dir("state")); err != nil {
		return err
	}
	at, id, err := n.startingPoint(ctx)
	if err != nil {
		return err
	}
	if err := n.log.RaiseCommit(n.sm.AppliedIndex()); err != nil {
		return err
	}
	return n.launch(at, id)
}

// identify returns who this member is, from its directory or for the first time (R11).
func (n *Node) identify(ctx context.Context) (*peer.Identity, error) {
	id := n.door.Identity()
	switch {
	case id != nil && id.Started, len(n.opts.InitialCluster) > 0:
		return n.door.Bootstrap(ctx, n.opts.Name, n.opts.URL, n.opts.InitialCluster)
	case len(n.opts.Join) > 0:
		id, _, err := n.door.Join(ctx, n.opts.Name, n.opts.URL, n.opts.Join)
		return id, err
	}
	return nil, fmt.Errorf("%s holds no member yet: give the initial cluster, or members to join", n.opts.Dir)
}

// walMetadata ties a log to its member, so that directories are not mixed up.
func (n *Node) walMetadata() []byte {
	data, err := json.Marshal(map[string]any{
		"group": n.identity.Group, "id": n.identity.ID, "incarnation": n.identity.Incarnation,
	})
	if err != nil {
		panic(err) // plain values only
	}
	return data
}

// ranBefore tells whether the member has had a log, which it must not begin anew then. The
// mark alone can be lost without harm: the folder of the snapshots came after it.
func (n *Node) ranBefore() (bool, error) {
	ran, err := n.door.HasRun()
	if ran || err != nil {
		return ran, err
	}
	_, err = os.Stat(n.dir("snapshots"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		n.opts.Logger.Warn("the mark of a member that has run is missing and is written anew", "dir", n.opts.Dir)
	}
	return true, err
}

// firstRecord is what the log of a group's first members begins with; a joined member's
// is empty.
func (n *Node) firstRecord() *pb.SnapshotMetadata {
	if len(n.identity.Joined) > 0 {
		return nil
	}
	var voters []uint64
	for _, r := range n.identity.Initial {
		voters = append(voters, r.ID)
	}
	index, term := uint64(bootIndex), uint64(bootTerm)
	return &pb.SnapshotMetadata{Index: &index, Term: &term, ConfState: &pb.ConfState{Voters: voters}}
}

// startingPoint brings the state machine to the newest record at least, and returns what
// is known of that record (R2).
func (n *Node) startingPoint(ctx context.Context) (protocol.Meta, protocol.ID, error) {
	rec := n.log.Recorded()
	bare := protocol.ID{Term: rec.GetTerm(), Index: rec.GetIndex()} // no directory backs it
	if rec.GetIndex() <= bootIndex {
		return n.metaOf(rec, n.identity.Table()), bare, nil
	}
	held, err := n.recordedSnapshot(ctx, rec)
	if err != nil {
		n.opts.Logger.Warn("snapshot of the newest record is missing", "index", rec.GetIndex(), "err", err)
		// A state that is whole needs only the member table, if that was kept.
		meta := n.metaOf(rec, n.keptTable(rec))
		if _, lacks := unnamed(meta.Conf, meta.Members); !lacks && n.sm.AppliedIndex() >= rec.GetIndex() {
			return meta, bare, nil
		}
		if held, err = n.refetch(ctx, rec); err != nil {
			return protocol.Meta{}, protocol.ID{}, err
		}
	}
	if n.sm.AppliedIndex() < held.Meta.Index {
		err = n.installAtStart(held)
	}
	return held.Meta, held.ID, err
}

func (n *Node) installAtStart(held protocol.Held) error {
	dir, err := n.store.Dir(held.ID)
	if err == nil {
		err = n.sm.Install(dir)
	}
	if have := n.sm.AppliedIndex(); err == nil && have != held.Meta.Index {
		err = fmt.Errorf("the state is at %d: %w", have, ErrCorrupt)
	}
	return wrap("install", fmt.Sprintf("snapshot %d", held.Meta.Index), err)
}

func (n *Node) metaOf(rec *pb.SnapshotMetadata, table []protocol.Member) protocol.Meta {
	return protocol.Meta{
		Group: n.identity.Group, Term: rec.GetTerm(), Index: rec.GetIndex(),
		Conf: fromConfState(rec.GetConfState()), Members: table,
	}
}

// keptTable returns the rows of a record's members as they were last. Rows do not change,
// so one of a later table will do; those of other members are left out, as Raft will
// deliver the changes that brought them once more.
func (n *Node) keptTable(rec *pb.SnapshotMetadata) []protocol.Member {
	conf := fromConfState(rec.GetConfState())
	return slices.DeleteFunc(n.lastTable(), func(r protocol.Member) bool { return !conf.Has(r.ID) })
}

// lastTable is the member table as it was last, or that of the first start where none was
// kept.
func (n *Node) lastTable() []protocol.Member {
	if kept, err := n.door.LoadTable(); err == nil {
		return kept
	}
	return n.identity.Table()
}

// recordedSnapshot finds the directory of a record. If it has to be installed it is
// checked first.
func (n *Node) recordedSnapshot(ctx context.Context, rec *pb.SnapshotMetadata) (protocol.Held, error) {
	for _, h := range n.store.List() {
		if h.Meta.Index != rec.GetIndex() || h.Meta.Term != rec.GetTerm() {
			continue
		}
		if n.sm.AppliedIndex() >= rec.GetIndex() {
			return h, nil
		}
		if err := n.store.Verify(ctx, h.ID, nil); err != nil {
			if errors.Is(err, ErrCorrupt) {
				err = errors.Join(err, n.store.Quarantine(h.ID, err.Error()))
			}
			return protocol.Held{}, err
		}
		return h, nil
	}
	return protocol.Held{}, fs.ErrNotExist
}

// launch starts what runs.
func (n *Node) launch(at protocol.Meta, id protocol.ID) error {
	n.applier = newApplier(n.identity.Group, n.lineage(), n.sm, at, n.finish)
	n.transport = peer.NewTransport(n.identity, n.door, receiver{n}, &peer.Options{
		ActiveWindow: time.Duration(n.opts.ElectionTicks) * n.opts.Tick,
		SnapshotLost: n.snapshotLost, Removed: n.removed, Refused: n.refused,
	})
	n.snaps = raftsnap.New(host{n}, n.store, n.snapOptions())
	m, err := newMember(memberConfig{
		group: n.identity.Group, id: n.identity.ID,
		electionTicks: n.opts.ElectionTicks, heartbeat: n.opts.HeartbeatTicks, logger: n.opts.Logger, now: n.now,
	}, n.log, at.Members, id, protocol.NewInstalls(n.protocolConfig()), nodeOutbox{n})
	if err != nil {
		return err
	}
	if err := n.life.Err(); err != nil {
		return ErrClosed
	}
	n.member = m
	n.membersChanged(m.members())
	n.publish()
	n.snaps.Start(n.life)
	n.owned.Go(n.keepTable)
	n.owned.Go(n.loop)
	n.owned.Go(n.apply)
	n.ready.Store(true)
	n.door.AnswerJoin(n.joinAnswer)
	return nil
}

func (n *Node) protocolConfig() protocol.Config {
	return protocol.Config{
		Entries: n.opts.SnapshotEntries, Bytes: n.opts.SnapshotBytes, Interval: n.opts.SnapshotInterval,
		Single: n.opts.Single, TrailingEntries: n.opts.TrailingEntries,
	}
}

func (n *Node) snapOptions() *raftsnap.Options {
	return &raftsnap.Options{
		Protocol: n.protocolConfig(), RateLimit: n.opts.RateLimit, Unpaced: n.opts.Unpaced,
		TLS: n.clientTLS, Header: peer.Header(n.identity), StateDir: n.dir("state"), Logger: n.opts.Logger,
	}
}

func (n *Node) observeSync(d time.Duration, bytes int64) {
	if n.ready.Load() {
		n.snaps.ObserveFsync(d, bytes)
	}
}

// joinAnswer tells a member that was added who it is.
func (n *Node) joinAnswer(name, url string) (group string, id uint64, members []protocol.Member, err error) {
	for _, r := range n.Members() {
		if r.Name == name && r.URL == url {
			return n.identity.Group, r.ID, n.Members(), nil
		}
	}
	return "", 0, nil, peer.NotAdded
}
