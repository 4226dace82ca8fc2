package peer

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"sync"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

const (
	knownFile = "peers.json"
	knownKind = "peers"
	maxKnown  = 4096 // ids ever seen; a group that changes a member a day gets there in 11 years
)

// known is what this member has seen of the others (R11): which data directory stands
// behind each Raft id, for good, and which ids were removed, for good too.
type known struct {
	disk disk
	// mu is held over the write of the file: nothing is believed before it is durable.
	// That happens once in the life of each member; all else is a look into a map.
	mu    sync.Mutex
	group string
	rows  map[uint64]knownRow
	kept  bool // there is a file of this group
}

type knownRow struct {
	ID          uint64 `json:"id"`
	Incarnation string `json:"incarnation,omitempty"` // empty while never seen
	Removed     bool   `json:"removed,omitempty"`
}

// knownTable is the file.
type knownTable struct {
	Group string     `json:"group"`
	Peers []knownRow `json:"peers"`
}

func loadKnown(d disk) (*known, error) {
	var file knownTable
	err := d.get(knownFile, knownKind, &file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	k := &known{disk: d, group: file.Group, rows: map[uint64]knownRow{}, kept: err == nil}
	for _, r := range file.Peers {
		k.rows[r.ID] = r
	}
	return k, nil
}

// bind says which group the rows are of. Rows of another one are dropped: this member
// never took part in it, or bind would not be called with a new one.
func (k *known) bind(group string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.group != group {
		k.group, k.rows, k.kept = group, map[uint64]knownRow{}, false
	}
}

// keep sees to it that there is a file, if only an empty one, before the member takes part
// in its group: from then on a file that is gone was taken away.
func (k *known) keep() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.kept {
		return nil
	}
	return k.writeLocked(k.rows)
}

// check refuses a member that has taken part and has lost what it knew of the others. It
// could let a wiped member in, which votes anew in a term that it has voted in (R11).
func (k *known) check(group string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	const advice = "it says which data directories the other members have, and without it a wiped one could vote twice; " +
		"put the file of this directory back, or remove the member from the group and add it anew with an empty directory"
	switch {
	case !k.kept:
		return fmt.Errorf("%w: %s is missing in the data directory of a member that has run: %s", ErrCorrupt, knownFile, advice)
	case k.group != group:
		return fmt.Errorf("%w: %s is of group %s, this member of %s: %s", ErrCorrupt, knownFile, short(k.group), short(group), advice)
	}
	return nil
}

// see takes the first incarnation of an id for the true one, durably, and refuses every
// other one, and every removed member.
func (k *known) see(id uint64, incarnation string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	row := k.rows[id]
	switch {
	case row.Removed:
		return refuse(Removed, "member %s was removed from the group; add it anew and start it with an empty data directory", formatID(id))
	case row.Incarnation == incarnation:
		return nil
	case row.Incarnation != "":
		return refuse(OtherIncarnation,
			"member %s was here before with another data directory; remove it and add it anew", formatID(id))
	}
	row.ID, row.Incarnation = id, incarnation
	return k.putLocked(row)
}

// learn takes over what a member table says of incarnations, where nothing is known yet.
func (k *known) learn(members []protocol.Member) error {
	var errs []error
	for _, m := range members {
		if isHex(m.Incarnation, 32) && !k.removed(m.ID) {
			errs = append(errs, k.see(m.ID, m.Incarnation))
		}
	}
	return errors.Join(errs...)
}

// remove marks an id for good.
func (k *known) remove(id uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	row := k.rows[id]
	if row.Removed {
		return nil
	}
	row.ID, row.Removed = id, true
	return k.putLocked(row)
}

func (k *known) removed(id uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rows[id].Removed
}

func (k *known) incarnation(id uint64) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rows[id].Incarnation
}

func (k *known) putLocked(row knownRow) error {
	if _, ok := k.rows[row.ID]; !ok && len(k.rows) >= maxKnown {
		return refuse(Malformed, "this member has seen %d others, which is the limit", maxKnown)
	}
	next := maps.Clone(k.rows)
	next[row.ID] = row
	return k.writeLocked(next)
}

func (k *known) writeLocked(rows map[uint64]knownRow) error {
	file := knownTable{Group: k.group}
	for _, id := range slices.Sorted(maps.Keys(rows)) {
		file.Peers = append(file.Peers, rows[id])
	}
	if err := k.disk.put(knownFile, knownKind, file); err != nil {
		return err
	}
	k.rows, k.kept = rows, true
	return nil
}
