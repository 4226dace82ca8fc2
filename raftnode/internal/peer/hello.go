package peer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// hello is a member that comes in for the first time.
type hello struct {
	Group       string            `json:"group"`
	ID          uint64            `json:"id"`
	Name        string            `json:"name"`
	Incarnation string            `json:"incarnation"`
	Initial     []protocol.Member `json:"initial,omitempty"` // to say what differs where the group does
}

// welcome is the answer of one that has no objection, and has noted the other durably.
type welcome struct {
	ID          uint64 `json:"id"`
	Name        string `json:"name"`
	Incarnation string `json:"incarnation"`
	Started     bool   `json:"started"`
}

func (d *Door) hello(w http.ResponseWriter, r *http.Request) {
	var h hello
	if !readJSON(w, r, &h) {
		return
	}
	own := d.Identity()
	if own != nil && own.Group != "" && h.Group != own.Group {
		no := refuse(OtherGroup, "%s", differ(own, &h))
		no.By = own.Name
		writeRefusal(w, no)
		return
	}
	if err := d.admit(caller{group: h.Group, id: h.ID, incarnation: h.Incarnation}); err != nil {
		writeRefusal(w, asRefusal(err))
		return
	}
	writeJSON(w, http.StatusOK, welcome{ID: own.ID, Name: own.Name, Incarnation: own.Incarnation, Started: own.Started})
}

// differ names what two members that should be of one group were told.
func differ(own *Identity, h *hello) string {
	if len(own.Initial) == 0 || len(h.Initial) == 0 {
		return fmt.Sprintf("%s is of group %s, %s of group %s", own.Name, short(own.Group), h.Name, short(h.Group))
	}
	return fmt.Sprintf("the initial cluster of %s is %s, that of %s is %s", own.Name, flag(own.Initial), h.Name, flag(h.Initial))
}

// flag is a table as it is typed.
func flag(table []protocol.Member) string {
	return strings.ReplaceAll(strings.TrimSpace(lines(table)), "\n", ",")
}

// How one that comes in asks.
const (
	firstRetry   = 50 * time.Millisecond
	lastRetry    = time.Second
	progressTime = 5 * time.Second
	// graceTime is for those who have not answered when enough others have: a late word of
	// another incarnation is worth waiting for, once in the life of a member.
	graceTime = 500 * time.Millisecond
)

// reply is what became of asking one member: an answer, an end, or a failed try.
type reply struct {
	from protocol.Member
	err  error
	last bool // nothing more comes from this one
}

// introduce tells the others who this member is, until enough have answered that they
// know of no other incarnation, or one says no.
func (d *Door) introduce(ctx context.Context, id *Identity, others []protocol.Member, need int) error {
	work, cancel := context.WithCancel(ctx)
	replies := make(chan reply)
	for _, m := range others {
		go d.helloUntil(work, id, m, replies)
	}
	// Each one ends with exactly one last reply, so this waits for all of them.
	open := len(others)
	defer func() {
		cancel()
		for open > 0 {
			if r := <-replies; r.last {
				open--
			}
		}
	}()

	missing := map[string]error{}
	for _, m := range others {
		missing[m.Name] = errors.New("no answer yet")
	}
	progress := time.NewTicker(progressTime)
	defer progress.Stop()
	var grace <-chan time.Time
	for {
		answered := len(others) - len(missing)
		if answered == len(others) {
			return nil
		}
		if answered >= need && grace == nil {
			grace = time.After(d.grace)
		}
		select {
		case r := <-replies:
			if r.last {
				open--
			}
			switch {
			case r.err == nil:
				delete(missing, r.from.Name)
			case r.last && work.Err() == nil:
				return fmt.Errorf("hello %s at %s: %w", r.from.Name, r.from.URL, r.err)
			case work.Err() == nil: // else the end of ctx is not what is wrong with that member
				missing[r.from.Name] = r.err
			}
		case <-grace:
			return nil
		case <-progress.C:
			d.log.Info("waiting for more members before the first start", "answered", answered, "needed", need, "missing", missingText(missing))
		case <-ctx.Done():
			return fmt.Errorf("%d of the %d answers needed came, missing are %s: %w", answered, need, missingText(missing), context.Cause(ctx))
		}
	}
}

func missingText(missing map[string]error) string {
	var all []string
	for name, err := range missing {
		all = append(all, fmt.Sprintf("%s (%v)", name, err))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// helloUntil asks one member until it has answered. Its last reply is marked.
func (d *Door) helloUntil(ctx context.Context, id *Identity, m protocol.Member, replies chan<- reply) {
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		err := d.sayHello(ctx, id, m)
		r, refused := errors.AsType[*Refusal](err)
		last := err == nil || refused && !r.Kind.passes() || errors.Is(err, errOwnDisk) || ctx.Err() != nil
		replies <- reply{from: m, err: err, last: last}
		if last {
			return
		}
		pause(ctx, wait)
	}
}

// pause waits, or less when ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func (d *Door) sayHello(ctx context.Context, id *Identity, m protocol.Member) error {
	var w welcome
	h := hello{Group: id.Group, ID: id.ID, Name: id.Name, Incarnation: id.Incarnation, Initial: id.Initial}
	if err := d.ask(ctx, m.URL+HelloPath, h, &w); err != nil {
		return err
	}
	if w.ID != m.ID {
		return refuse(OtherMember, "%s answers as %s, but the member table has %s there", m.URL, w.Name, m.Name)
	}
	err := d.judge(caller{group: id.Group, id: w.ID, incarnation: w.Incarnation})
	if _, refused := errors.AsType[*Refusal](err); err != nil && !refused {
		return fmt.Errorf("%w: %w", errOwnDisk, err)
	}
	return err
}

// errOwnDisk ends a first start, as asking again would not help.
var errOwnDisk = errors.New("note a member")
