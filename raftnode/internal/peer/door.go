package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// The paths of this package.
const (
	HelloPath  = "/raft/v1/hello"  // answered by a Door
	JoinPath   = "/raft/v1/join"   // answered by a Door
	StreamPath = "/raft/v1/stream" // answered by a Transport
)

// JoinFunc tells a member that was added what it must know: the group, its Raft id, and
// the member table with itself in it. It answers from what this member has applied and
// need not be the leader's. The error is a *Refusal, or NotAdded for a name and URL that
// nobody has added, or something that may pass.
type JoinFunc func(name, url string) (group string, id uint64, members []protocol.Member, err error)

// DoorOptions are the options of a Door and of the Transport behind it. Nil and zero are valid.
type DoorOptions struct {
	TLS      *TLS // nil: the system's roots, no client certificate
	Insecure bool // allow http URLs, which anyone on the way can read and change
	Logger   *slog.Logger

	// OthersMajority makes a first start wait for a majority of the *other* listed members
	// instead of a majority that counts this one. A group of three then begins only with all
	// three up; in return any two first starts of one member have asked somebody in common,
	// so that a wiped member is always found out, whoever is away.
	OthersMajority bool
}

func (o *DoorOptions) withDefaults() DoorOptions {
	var c DoorOptions
	if o != nil {
		c = *o
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Door keeps the identity of a member and of those it has met, and decides who may come
// in. It is the http.Handler of HelloPath and JoinPath, and of use before Raft runs: a
// member that is still finding its group answers the others through it.
type Door struct {
	disk  disk
	opts  DoorOptions
	log   *slog.Logger
	tls   *tls.Config // of connections to others
	http  *http.Client
	known *known
	mux   *http.ServeMux
	quiet quiet
	grace time.Duration // graceTime, other in tests

	mu struct {
		sync.Mutex
		id   *Identity // nil without a member.json; never changed in place
		join JoinFunc
	}
}

// NewDoor opens the door of a data directory, which is made if need be. A directory whose
// member has taken part in a group and that lacks what it knew of the others is ErrCorrupt.
func NewDoor(dir string, opts *DoorOptions) (*Door, error) {
	d := &Door{opts: opts.withDefaults(), mux: http.NewServeMux(), grace: graceTime}
	d.log = d.opts.Logger
	var err error
	if d.tls, err = d.opts.TLS.Client(); err != nil {
		return nil, err
	}
	if d.disk, err = openDisk(dir); err != nil {
		return nil, err
	}
	if d.known, err = loadKnown(d.disk); err != nil {
		return nil, err
	}
	id, err := Load(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if id != nil {
		if id.Started && !id.Removed {
			if err := d.known.check(id.Group); err != nil {
				return nil, err
			}
		}
		d.setIdentity(id)
	}
	// Questions are few and far between: no connection is kept for them.
	d.http = &http.Client{
		Transport:     &http.Transport{TLSClientConfig: d.tls, DisableKeepAlives: true},
		Timeout:       askTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	d.mux.HandleFunc("POST "+HelloPath, d.hello)
	d.mux.HandleFunc("POST "+JoinPath, d.joinAsked)
	return d, nil
}

// ServeHTTP answers other members' hello and join.
func (d *Door) ServeHTTP(w http.ResponseWriter, r *http.Request) { d.mux.ServeHTTP(w, r) }

// Identity returns who this member is, nil while the directory is new.
func (d *Door) Identity() *Identity {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.id == nil {
		return nil
	}
	return d.mu.id.clone()
}

func (d *Door) setIdentity(id *Identity) {
	if id.Group != "" {
		d.known.bind(id.Group)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.id = id
}

// save makes an identity durable, then lets it be seen.
func (d *Door) save(id *Identity) error {
	id = id.clone()
	if err := d.disk.put(memberFile, memberKind, id); err != nil {
		return err
	}
	d.setIdentity(id)
	return nil
}

// AnswerJoin sets what answers join requests; until then they are told to come again.
func (d *Door) AnswerJoin(f JoinFunc) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.join = f
}

// Retire notes durably that the group has removed this member: the directory refuses to
// start from now on.
func (d *Door) Retire() error {
	id := d.Identity()
	if id == nil || id.Removed {
		return nil
	}
	id.Removed = true
	return d.save(id)
}

// SaveTable keeps the member table as it is now, for a start that finds no snapshot to
// take it from.
func (d *Door) SaveTable(members []protocol.Member) error {
	return d.disk.put(tableFile, tableKind, table{members})
}

// LoadTable returns what SaveTable kept last; nothing kept is fs.ErrNotExist.
func (d *Door) LoadTable() ([]protocol.Member, error) {
	var t table
	err := d.disk.get(tableFile, tableKind, &t)
	return t.Members, err
}

// MarkRun notes durably that the member's log exists: from then on the member must not begin
// with an empty one, since it would have forgotten its vote and its entries.
func (d *Door) MarkRun() error {
	if ran, err := d.HasRun(); ran || err != nil {
		return err
	}
	return d.disk.put(ranFile, ranKind, ran{d.Identity().Incarnation})
}

// HasRun reports whether MarkRun was called in this directory. The mark of another one is
// ErrCorrupt.
func (d *Door) HasRun() (bool, error) {
	var r ran
	err := d.disk.get(ranFile, ranKind, &r)
	switch own := d.Identity(); {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case own == nil || r.Incarnation != own.Incarnation:
		return false, fmt.Errorf("%w: %s is of another data directory", ErrCorrupt, ranFile)
	}
	return true, nil
}

const (
	tableFile = "table.json"
	tableKind = "table"
	ranFile   = "ran"
	ranKind   = "ran"
)

// ran is the mark of a directory whose member has run.
type ran struct {
	Incarnation string `json:"incarnation"`
}

type table struct {
	Members []protocol.Member `json:"members"`
}

// Incarnation returns the data directory that stands behind a Raft id as far as this
// member has seen, "" while it has not. The own one is known too.
func (d *Door) Incarnation(id uint64) string {
	if own := d.Identity(); own != nil && own.ID == id {
		return own.Incarnation
	}
	return d.known.incarnation(id)
}

// admit decides whether somebody may come in. A pair that is new is durable when it returns.
func (d *Door) admit(c caller) error {
	err := d.judge(c)
	if r, ok := errors.AsType[*Refusal](err); ok {
		if own := d.Identity(); own != nil {
			r.By = own.Name
		}
		if !r.Kind.passes() && d.quiet.first(string(r.Kind)+formatID(c.id)) {
			d.log.Warn("turned a member away", "member", formatID(c.id), "incarnation", c.incarnation, "err", r)
		}
	}
	return err
}

func (d *Door) judge(c caller) error {
	own := d.Identity()
	switch {
	case own == nil || own.Group == "":
		return refuse(NotReady, "this member does not know its group yet")
	case own.Removed:
		return refuse(NotReady, "this member was removed from the group itself")
	case c.group != own.Group:
		return refuse(OtherGroup, "this member belongs to group %s, not %s", short(own.Group), short(c.group))
	case !validID(c.id) || !isHex(c.incarnation, 32):
		return refuse(Malformed, "no member has id %s and incarnation %q", formatID(c.id), c.incarnation)
	case c.id != own.ID:
		return d.known.see(c.id, c.incarnation)
	case c.incarnation != own.Incarnation:
		return refuse(OtherIncarnation, "member %s is the one you ask", formatID(c.id))
	}
	return nil
}

// Guard lets only members of the group through, by the headers of Header.
func (d *Door) Guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := callerOf(r.Header)
		if err == nil {
			err = d.admit(c)
		}
		if err != nil {
			writeRefusal(w, asRefusal(err))
			return
		}
		h.ServeHTTP(w, r)
	})
}

// askTimeout is for one question to one member.
const askTimeout = 2 * time.Second

// ask posts a question to another member's door.
func (d *Door) ask(ctx context.Context, url string, question, answer any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := d.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return readAnswer(resp, answer)
}

// short is for texts: the first digits of a group id tell two groups apart.
func short(group string) string { return group[:min(len(group), 12)] }

// without returns the table without one member.
func without(table []protocol.Member, id uint64) []protocol.Member {
	return slices.DeleteFunc(slices.Clone(table), func(m protocol.Member) bool { return m.ID == id })
}

// quiet keeps what happens again and again from filling the log.
type quiet struct {
	mu   sync.Mutex
	last map[string]time.Time
}

const (
	quietTime = 10 * time.Second
	quietKeys = 1024
)

// first tells whether a key was not there in the last seconds.
func (q *quiet) first(key string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	if at, ok := q.last[key]; ok && now.Sub(at) < quietTime {
		return false
	}
	if q.last == nil || len(q.last) >= quietKeys {
		q.last = map[string]time.Time{}
	}
	q.last[key] = now
	return true
}
