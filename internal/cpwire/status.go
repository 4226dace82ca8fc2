package cpwire

// ClusterStatus is the state of a group as one member sees it: of members that do not
// answer it has what was known of them last. Every field is always there.
type ClusterStatus struct {
	Group   string         `json:"group"`
	Leader  string         `json:"leader"` // "" while there is none
	Term    uint64         `json:"term"`
	Members []MemberStatus `json:"members"` // sorted by id
}

// MemberStatus is the state of one member.
type MemberStatus struct {
	ID         string         `json:"id"`
	URL        string         `json:"url"`
	Role       string         `json:"role"` // leader, follower or learner
	Reachable  bool           `json:"reachable"`
	Applied    uint64         `json:"applied"`
	FirstIndex uint64         `json:"first_index"`
	LastIndex  uint64         `json:"last_index"`
	LogBytes   int64          `json:"log_bytes"`
	Snapshot   SnapshotStatus `json:"snapshot"`
	Stats      Stats          `json:"stats"`
	Why        string         `json:"why"`
}

// SnapshotStatus is the newest snapshot that a member's Raft log is cut by.
type SnapshotStatus struct {
	Term   uint64 `json:"term"`
	Index  uint64 `json:"index"`
	Source string `json:"source"` // id of the member it was taken from, local, or none
}

// Stats count since a member's process started.
type Stats struct {
	Generated         int64 `json:"generated"`          // snapshots made while leader
	GeneratedFollower int64 `json:"generated_follower"` // snapshots made while not
	TakenOver         int64 `json:"taken_over"`
	Installed         int64 `json:"installed"`
	Served            int64 `json:"served"`
	Refused           int64 `json:"refused"`
	Failed            int64 `json:"failed"`
	BytesFetched      int64 `json:"bytes_fetched"`
	BytesReused       int64 `json:"bytes_reused"`
}

// OwnStatus is what a member says of itself.
type OwnStatus struct {
	Group   string       `json:"group"`
	Leader  string       `json:"leader"`
	Term    uint64       `json:"term"`
	Member  MemberStatus `json:"member"`
	Members []Member     `json:"members"` // of the group, as this member knows it
}

// Member is a row of a group's member table.
type Member struct {
	ID   string `json:"id"`
	URL  string `json:"url"`
	Role string `json:"role,omitempty"`
}

// SnapshotID names a snapshot.
type SnapshotID struct {
	Term   uint64 `json:"term"`
	Index  uint64 `json:"index"`
	Digest string `json:"digest"`
}
