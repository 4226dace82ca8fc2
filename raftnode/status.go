package raftnode

import (
	"cmp"
	"slices"

	"github.com/snapferry/snapferry/raftsnap"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Status is what a member knows of itself and of the others.
type Status struct {
	ID       uint64
	Name     string
	URL      string
	Role     protocol.Role
	Term     uint64
	Leader   string // name, "" while unknown
	Applied  uint64
	Commit   uint64
	First    uint64 // index of the first entry in the log
	Last     uint64
	LogBytes int64 // of the entries
	Snapshot SnapshotStatus
	Snaps    raftsnap.Status
	Members  []MemberStatus // of the whole group, oneself included, sorted by name
}

// SnapshotStatus is the newest snapshot that Raft knows here.
type SnapshotStatus struct {
	Term, Index uint64
	Source      string // "local", the name of the member it was taken from, or "none"
}

// MemberStatus is a member as another one sees it.
type MemberStatus struct {
	protocol.Member
	Role   protocol.Role
	Active bool // heard from lately
}

// Status tells how the member is. It never blocks; before Start has come far enough
// only names are known.
func (n *Node) Status() Status {
	s := Status{Name: n.opts.Name, URL: n.opts.URL, Snapshot: SnapshotStatus{Source: "none"}}
	if !n.ready.Load() {
		return s
	}
	v := host{n}.View()
	leader, _ := n.Leader()
	s.ID, s.Role, s.Term, s.Leader = v.Self, v.Role, v.Term, leader.Name
	s.Applied, s.Commit, s.First, s.Last, s.LogBytes = v.Applied, v.Commit, v.First, max(v.Last, v.Applied), v.LogBytes
	s.Snaps = n.snaps.Status()
	s.Snapshot = SnapshotStatus{Term: v.RecordedTerm, Index: v.RecordedIndex, Source: n.sourceName(s.Snaps.Source)}
	s.Members = n.memberStatus()
	return s
}

// Group is the id of the group, "" while it is not known yet.
func (n *Node) Group() string {
	if !n.ready.Load() {
		return ""
	}
	return n.identity.Group
}

// sourceName translates who a snapshot was taken from.
func (n *Node) sourceName(id uint64) string {
	switch id {
	case 0:
		return "none"
	case n.identity.ID:
		return "local"
	}
	if name := n.nameOf(id); name != "" {
		return name
	}
	return "removed"
}

// nameOf returns the name of a member, "" for none.
func (n *Node) nameOf(id uint64) string {
	for _, r := range n.Members() {
		if r.ID == id {
			return r.Name
		}
	}
	return ""
}

func (n *Node) memberStatus() []MemberStatus {
	conf, leader := n.conf.Load(), n.leading.load().leader
	var all []MemberStatus
	for _, r := range n.Members() {
		one := MemberStatus{Member: r, Active: r.ID == n.identity.ID || n.transport.Active(r.ID)}
		switch {
		case r.ID == leader:
			one.Role = protocol.Leader
		case slices.Contains(conf.Learners, r.ID):
			one.Role = protocol.Learner
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b MemberStatus) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
