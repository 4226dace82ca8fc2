package peer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Bootstrap is the first start of an initial member (R11), and returns at once on a later
// one, where the initial cluster no longer counts. The directory gets its incarnation
// first; then the other listed members are asked until enough have answered: see
// DoorOptions.OthersMajority. One that has seen this id with another directory ends it:
// errors.Is(err, OtherIncarnation). So does one that was given another initial cluster:
// errors.Is(err, OtherGroup). A first start that was cut short, however, goes on where it
// was.
//
// The URL may be empty: the initial cluster has it. A URL other than the one the directory
// knows is an error, as the others look for the member where their table says it is.
func (d *Door) Bootstrap(ctx context.Context, name, url string, initial map[string]string) (*Identity, error) {
	id, err := d.bootstrap(ctx, name, url, initial)
	if err != nil {
		return nil, fmt.Errorf("bootstrap %s: %w", name, err)
	}
	return id, nil
}

func (d *Door) bootstrap(ctx context.Context, name, url string, initial map[string]string) (*Identity, error) {
	if id, err := d.returning(name, url); id != nil || err != nil {
		return id, err
	}
	table, group, err := initialTable(name, url, initial, d.opts.Insecure)
	if err != nil {
		return nil, err
	}
	id := d.begin(name)
	id.Group, id.ID, id.Initial, id.Joined = group, InitialID(group, name), table, nil
	for _, m := range table {
		if m.ID == id.ID {
			id.URL = m.URL
		}
	}
	if err := d.save(id); err != nil {
		return nil, err
	}
	others := without(table, id.ID)
	if err := d.introduce(ctx, id, others, d.needed(len(others))); err != nil {
		return nil, err
	}
	return d.start(id)
}

// needed is how many of the others have to answer.
func (d *Door) needed(others int) int {
	if d.opts.OthersMajority {
		return othersMajority(others)
	}
	return (others + 1) / 2 // with oneself a majority of all
}

func othersMajority(others int) int {
	if others == 0 {
		return 0
	}
	return others/2 + 1
}

// returning gives the identity of a member that has started before, after a look at what
// it was started with this time; nil for a first start.
func (d *Door) returning(name, url string) (*Identity, error) {
	id := d.Identity()
	switch {
	case id == nil:
		return nil, nil
	case id.Removed:
		return nil, refuse(Removed, "the data directory is of member %s (%s), which was removed from the group; start with an empty directory", id.Name, formatID(id.ID))
	case id.Name != name:
		return nil, fmt.Errorf("the data directory belongs to member %s", id.Name)
	case !id.Started:
		return nil, nil
	}
	if url != "" {
		u, err := NormalURL(url, d.opts.Insecure)
		if err != nil {
			return nil, err
		}
		if u != id.URL {
			return nil, fmt.Errorf("the group knows this member at %s, not %s; to move it, remove it and add it anew", id.URL, u)
		}
	}
	return id, nil
}

// begin gives the unfinished identity of the directory, or a new one. What never started
// may change everything but its incarnation.
func (d *Door) begin(name string) *Identity {
	if id := d.Identity(); id != nil {
		return id
	}
	return &Identity{Name: name, Incarnation: newIncarnation()}
}

func (d *Door) start(id *Identity) (*Identity, error) {
	if err := d.known.keep(); err != nil {
		return nil, err
	}
	id.Started = true
	if err := d.save(id); err != nil {
		return nil, err
	}
	return id, nil
}

// joinAsk is what a member that was added asks, joinAnswer what it is told.
type (
	joinAsk struct {
		Name        string `json:"name"`
		URL         string `json:"url"`
		Incarnation string `json:"incarnation"`
	}
	joinAnswer struct {
		Group   string            `json:"group"`
		ID      uint64            `json:"id"`
		Members []protocol.Member `json:"members"`
	}
)

// Join is the first start of a member that add-learner puts into a running group, and
// returns at once on a later start. It asks the members at the given URLs in turn, waits
// until one knows of this member, and then tells a majority of the others who it is, as a
// wiped directory must not come back as itself here either (R11). The table is the one it
// was given; the own row is in it.
func (d *Door) Join(ctx context.Context, name, url string, peers []string) (*Identity, []protocol.Member, error) {
	id, err := d.joinGroup(ctx, name, url, peers)
	if err != nil {
		return nil, nil, fmt.Errorf("join %s: %w", name, err)
	}
	return id, id.Table(), nil
}

func (d *Door) joinGroup(ctx context.Context, name, url string, peers []string) (*Identity, error) {
	if id, err := d.returning(name, url); id != nil || err != nil {
		return id, err
	}
	id, err := d.beginJoin(name, url)
	if err != nil {
		return nil, err
	}
	asked, err := d.joinURLs(peers)
	if err != nil {
		return nil, err
	}
	answer, err := d.askToJoin(ctx, id, asked)
	if err != nil {
		return nil, err
	}
	id.Group, id.ID, id.Joined = answer.Group, answer.ID, answer.Members
	if err := d.save(id); err != nil {
		return nil, err
	}
	others := without(answer.Members, id.ID)
	if err := d.introduce(ctx, id, others, othersMajority(len(others))); err != nil {
		return nil, err
	}
	return d.start(id)
}

func (d *Door) beginJoin(name, url string) (*Identity, error) {
	u, err := NormalURL(url, d.opts.Insecure)
	if err := errors.Join(checkName(name), err); err != nil {
		return nil, err
	}
	id := d.begin(name)
	id.URL, id.Group, id.ID, id.Initial, id.Joined = u, "", 0, nil, nil
	return id, d.save(id)
}

func (d *Door) joinURLs(peers []string) ([]string, error) {
	var out []string
	for _, p := range peers {
		u, err := NormalURL(strings.TrimSpace(p), d.opts.Insecure)
		if err != nil {
			return nil, err
		}
		out = append(out, u)
	}
	if len(out) == 0 {
		return nil, errors.New("no member to ask is given")
	}
	return out, nil
}

// askToJoin asks one member after the other, round after round.
func (d *Door) askToJoin(ctx context.Context, id *Identity, urls []string) (*joinAnswer, error) {
	var said time.Time
	var last error // of a whole round
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		var errs []error
		for _, u := range urls {
			answer, err := d.askOneToJoin(ctx, id, u)
			if err == nil {
				return answer, nil
			}
			err = fmt.Errorf("%s: %w", u, err)
			if r, ok := errors.AsType[*Refusal](err); ok && !r.Kind.passes() {
				return nil, err
			}
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			return nil, errors.Join(last, context.Cause(ctx))
		}
		last = errors.Join(errs...)
		if time.Since(said) > progressTime {
			said = time.Now()
			d.log.Info("waiting to be let in: add this member with add-learner", "name", id.Name, "url", id.URL, "err", last)
		}
		pause(ctx, wait)
	}
}

func (d *Door) askOneToJoin(ctx context.Context, id *Identity, url string) (*joinAnswer, error) {
	var a joinAnswer
	ask := joinAsk{Name: id.Name, URL: id.URL, Incarnation: id.Incarnation}
	if err := d.ask(ctx, url+JoinPath, ask, &a); err != nil {
		return nil, err
	}
	if !isHex(a.Group, 64) || !validID(a.ID) {
		return nil, errors.New("answered nonsense")
	}
	for _, m := range a.Members {
		if m.ID != a.ID {
			continue
		}
		if m.Name != id.Name || m.URL != id.URL {
			return nil, refuse(OtherMember, "the group expects %s at %s, this is %s at %s", m.Name, m.URL, id.Name, id.URL)
		}
		return &a, nil
	}
	return nil, errors.New("answered with a table that lacks this member")
}

func (d *Door) joinAsked(w http.ResponseWriter, r *http.Request) {
	var a joinAsk
	if !readJSON(w, r, &a) {
		return
	}
	answer, err := d.answerJoin(&a)
	if err != nil {
		writeRefusal(w, asRefusal(err))
		return
	}
	writeJSON(w, http.StatusOK, answer)
}

// answerJoin asks the running member, and notes the incarnation before the answer goes out.
func (d *Door) answerJoin(a *joinAsk) (*joinAnswer, error) {
	d.mu.Lock()
	join := d.mu.join
	d.mu.Unlock()
	if join == nil {
		return nil, refuse(NotReady, "this member does not run yet")
	}
	group, id, members, err := join(a.Name, a.URL)
	if errors.Is(err, NotAdded) {
		return nil, refuse(NotAdded, "nobody has added %s at %s", a.Name, a.URL)
	}
	if err != nil {
		return nil, err
	}
	if err := d.admit(caller{group: group, id: id, incarnation: a.Incarnation}); err != nil {
		return nil, err
	}
	return &joinAnswer{Group: group, ID: id, Members: members}, nil
}
