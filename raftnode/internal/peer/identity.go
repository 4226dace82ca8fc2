package peer

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

const (
	memberFile = "member.json"
	memberKind = "member"
)

// Identity is who the owner of a data directory is. It lies in member.json of that
// directory from the first moment on.
type Identity struct {
	Group       string            `json:"group,omitempty"` // empty while a joining member does not know it
	ID          uint64            `json:"id,omitempty"`    // Raft id, 0 while a joining member does not know it
	Name        string            `json:"name"`
	URL         string            `json:"url"`
	Incarnation string            `json:"incarnation"`       // of the data directory: random, never changed
	Initial     []protocol.Member `json:"initial,omitempty"` // the table at the bootstrap; empty when joined
	Joined      []protocol.Member `json:"joined,omitempty"`  // the table that a joined member was given; empty when bootstrapped
	Started     bool              `json:"started"`           // the way in is done: the member may take part
	Removed     bool              `json:"removed,omitempty"` // the group removed this member: it may never take part again
}

// Load reads the identity of a data directory. A directory without one is
// fs.ErrNotExist, a damaged one ErrCorrupt.
func Load(dir string) (*Identity, error) {
	var id Identity
	if err := (disk{dir: dir}).get(memberFile, memberKind, &id); err != nil {
		return nil, err
	}
	if err := id.validate(); err != nil {
		return nil, fmt.Errorf("read %s of %s: %w: %w", memberFile, dir, ErrCorrupt, err)
	}
	return &id, nil
}

func (id *Identity) validate() error {
	switch {
	case !isHex(id.Incarnation, 32):
		return errors.New("no incarnation")
	case checkName(id.Name) != nil:
		return checkName(id.Name)
	case id.Group != "" && !isHex(id.Group, 64):
		return errors.New("malformed group id")
	case id.Started && (id.Group == "" || !validID(id.ID)):
		return errors.New("started without a group or an id")
	case id.Started && len(id.Initial)+len(id.Joined) == 0:
		return errors.New("started without a member table")
	}
	return nil
}

// Table returns the member table with which the member began.
func (id *Identity) Table() []protocol.Member {
	if len(id.Initial) > 0 {
		return slices.Clone(id.Initial)
	}
	return slices.Clone(id.Joined)
}

// clone returns a copy that shares nothing that is ever written.
func (id *Identity) clone() *Identity {
	c := *id
	return &c
}

// GroupID derives the id of a group from its initial members: names and URLs count, in
// whatever order they are given.
func GroupID(initial []protocol.Member) string {
	sum := blake3.Sum256([]byte(lines(initial)))
	return hex.EncodeToString(sum[:])
}

// lines is the text that makes a group what it is: name=url, sorted, each on a line.
func lines(initial []protocol.Member) string {
	var all []string
	for _, m := range initial {
		all = append(all, m.Name+"="+m.URL+"\n")
	}
	slices.Sort(all)
	return strings.Join(all, "")
}

// InitialID derives the Raft id of an initial member.
func InitialID(group, name string) uint64 {
	for n := 0; ; n++ {
		sum := blake3.Sum256(fmt.Appendf(nil, "raft id %d\n%s\n%s\n", n, group, name))
		if id := binary.BigEndian.Uint64(sum[:]); validID(id) {
			return id
		}
	}
}

// NewID returns the Raft id for a member that is added later: random, as no id is ever
// used twice.
func NewID() uint64 {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		if id := binary.BigEndian.Uint64(b[:]); validID(id) {
			return id
		}
	}
}

// validID leaves out what raft uses itself: 0 for nobody, and the two highest for its
// storage threads.
func validID(id uint64) bool { return id != 0 && id < math.MaxUint64-1 }

func newIncarnation() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func isHex(s string, n int) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == n && s == strings.ToLower(s)
}

// The headers that tell who sends a request.
const (
	headerGroup       = "Snapferry-Group"
	headerMember      = "Snapferry-Member" // Raft id, in hex
	headerIncarnation = "Snapferry-Incarnation"
	headerTo          = "Snapferry-To"      // Raft id of the one meant, in hex; streams only
	headerLane        = "Snapferry-Lane"    // which stream; streams only
	headerVersion     = "Snapferry-Version" // of the protocol; streams only
)

// Header returns the headers by which Door.Guard of another member knows this one.
func Header(id *Identity) http.Header {
	h := http.Header{}
	h.Set(headerGroup, id.Group)
	h.Set(headerMember, formatID(id.ID))
	h.Set(headerIncarnation, id.Incarnation)
	return h
}

// caller is who a request says it comes from.
type caller struct {
	group       string
	id          uint64
	incarnation string
}

func callerOf(h http.Header) (caller, error) {
	id, err := parseID(h.Get(headerMember))
	if err != nil {
		return caller{}, refuse(Malformed, "header %s: %v", headerMember, err)
	}
	return caller{group: h.Get(headerGroup), id: id, incarnation: h.Get(headerIncarnation)}, nil
}

func formatID(id uint64) string { return fmt.Sprintf("%016x", id) }

func parseID(s string) (uint64, error) { return strconv.ParseUint(s, 16, 64) }
