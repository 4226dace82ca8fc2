package cpwire

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"sync"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

var errClosed = fmt.Errorf("client: %w", sentinel.Closed)

// Deadlines of one try of what takes longer than an append.
const (
	changeTimeout   = 20 * time.Second
	snapshotTimeout = 10 * time.Minute
	tellTimeout     = 5 * time.Second // a member asks all others before it tells
)

// Change is the body of a request that changes the membership.
type Change struct {
	ID  string `json:"id"`
	URL string `json:"url,omitempty"`
	// Wait is how many milliseconds the member may wait until the change can be made; 0
	// leaves it to the member.
	Wait int64 `json:"wait_ms,omitempty"`
}

// Status returns what some member says of itself and its group. A member that is not in a
// group yet, because it waits in its first start, does not count.
func (c *Client) Status(ctx context.Context) (s OwnStatus, err error) {
	err = c.anyone(ctx, func(ctx context.Context) error {
		a, err := c.ask(ctx, PathStatus)
		if err != nil {
			return err
		}
		s = OwnStatus{}
		if err := json.Unmarshal(a.body, &s); err != nil || s.Group != "" {
			return err
		}
		return &failure{err: notInGroup(&s.Member), harmless: true}
	})
	return s, about("read status", "", err)
}

func notInGroup(m *MemberStatus) error {
	return fmt.Errorf("%s is not in a group yet: %s", m.ID, cmp.Or(m.Why, "it waits in its first start"))
}

// Cluster returns the state of the group as told by any member that answers. A member that
// is not in a group yet tells of itself alone; that counts if no other answers.
func (c *Client) Cluster(ctx context.Context) (s ClusterStatus, err error) {
	err = c.anyone(ctx, func(ctx context.Context) error {
		a, err := c.ask(ctx, PathCluster)
		if err != nil {
			return err
		}
		s = ClusterStatus{}
		return json.Unmarshal(a.body, &s)
	})
	return s, about("read status of the group", "", err)
}

// AddLearner adds a member that does not vote. Adding the same one again is success.
func (c *Client) AddLearner(ctx context.Context, id, url string) (m Member, err error) {
	u, err := address(url)
	if err != nil {
		return Member{}, about("add learner", id, err)
	}
	err = c.change(ctx, PathAddLearner, Change{ID: id, URL: u}, &m)
	return m, about("add learner", id, err)
}

// Promote makes a learner a voter, once it has all that is committed; it waits for that as
// long as the client has patience, and no longer than MaxPromote. One that votes is success.
func (c *Client) Promote(ctx context.Context, id string) error {
	wait := min(c.opts.Patience, MaxPromote)
	return about("promote", id, c.change(ctx, PathPromote, Change{ID: id, Wait: wait.Milliseconds()}, nil))
}

// Remove removes a member from the group. An absent one is fs.ErrNotExist.
func (c *Client) Remove(ctx context.Context, id string) error {
	err := c.change(ctx, PathRemove, Change{ID: id}, nil)
	if errors.Is(err, sentinel.Unknown) && errors.Is(err, fs.ErrNotExist) {
		err = nil // an earlier try removed it
	}
	return about("remove", id, err)
}

// TransferLeader makes a member the leader.
func (c *Client) TransferLeader(ctx context.Context, id string) error {
	return about("transfer leadership to", id, c.change(ctx, PathTransferLeader, Change{ID: id}, nil))
}

// Snapshot returns when the leader has recorded a snapshot of the state of now or later.
func (c *Client) Snapshot(ctx context.Context) (id SnapshotID, err error) {
	c.findLeader(ctx)
	a, err := c.do(ctx, request{http.MethodPost, PathSnapshot, nil, snapshotTimeout})
	if err == nil {
		err = json.Unmarshal(a.body, &id)
	}
	return id, about("snapshot", "", err)
}

// change sends a change of the membership, which may be done twice without harm, and reads
// the answer if it is wanted.
func (c *Client) change(ctx context.Context, path string, body Change, out any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	c.findLeader(ctx)
	timeout := changeTimeout + time.Duration(body.Wait)*time.Millisecond
	a, err := c.do(ctx, request{http.MethodPost, path, data, timeout})
	if err != nil || out == nil {
		return err
	}
	return json.Unmarshal(a.body, out)
}

// findLeader looks for the leader where none is known, before a request that may take long
// is sent to a member that takes it and says nothing. Whatever comes of it the request
// follows the leader by itself.
func (c *Client) findLeader(ctx context.Context) {
	c.mu.Lock()
	known := c.mu.leader != ""
	c.mu.Unlock()
	if known {
		return
	}
	a, err := c.ask(ctx, PathStatus)
	var s OwnStatus
	if err != nil || json.Unmarshal(a.body, &s) != nil {
		return
	}
	for _, m := range s.Members {
		if m.ID == s.Leader && m.URL != "" {
			c.mu.Lock()
			c.mu.leader = m.URL
			c.mu.Unlock()
		}
	}
}

// nextMember is how long a member may take before the next one is asked too.
const nextMember = 200 * time.Millisecond

// fairTry is how long members have to answer a client that has no patience at all.
const fairTry = time.Second

// anyone repeats a read that any member can answer until there is an answer. It takes no
// longer than the client has patience, whatever the members do.
func (c *Client) anyone(ctx context.Context, read func(ctx context.Context) error) error {
	limit := max(c.opts.Patience, fairTry)
	within, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("gave up after %s", limit))
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	retry := c.newRetry()
	var last error // says more than that the time is over
	for {
		err := read(within)
		switch {
		case err == nil:
			return nil
		case within.Err() != nil && last != nil:
			return fmt.Errorf("%w: %w", context.Cause(within), last)
		case within.Err() != nil:
			return err
		}
		last = err
		if err := retry.again(within, err); err != nil {
			return err
		}
	}
}

// ask asks all members for what any of them can tell, one after the other but without
// waiting long, and returns the first answer of one that is in a group. One that is not
// counts when all were asked. An error is a *failure unless ctx has ended.
func (c *Client) ask(ctx context.Context, path string) (*answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(c.life, cancel)()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	urls := c.known()
	answers := make(chan outcomeOf[*answer], len(urls))
	ask := func(at string) {
		wg.Go(func() {
			a, err := c.exchange(ctx, at, request{http.MethodGet, path, nil, tellTimeout})
			answers <- outcomeOf[*answer]{a, err}
		})
	}
	var alone *answer
	var errs []error
	tick := time.NewTicker(nextMember)
	defer tick.Stop()
	ask(urls[0])
	for asked, answered := 1, 0; answered < len(urls); {
		select {
		case o := <-answers:
			answered++
			switch {
			case o.err != nil:
				errs = append(errs, o.err)
			case o.value.header.Get(HeaderGroup) != "":
				return o.value, nil
			default:
				alone = o.value
			}
		case <-tick.C:
		case <-ctx.Done():
			errs = append([]error{context.Cause(ctx)}, errs...)
			asked, answered = len(urls), len(urls)
		}
		if asked < len(urls) {
			ask(urls[asked])
			asked++
		}
	}
	if alone != nil {
		return alone, nil
	}
	return nil, together(errs)
}

// together is the failure of all members that were asked. It is final if none of them would
// say anything else another time.
func together(errs []error) *failure {
	f := &failure{err: errors.Join(errs...), harmless: true, final: true}
	for _, err := range errs {
		one, ok := errors.AsType[*failure](err)
		f.final = f.final && ok && (one.final || one.stranger)
	}
	return f
}

type outcomeOf[T any] struct {
	value T
	err   error
}

// known returns the addresses of all members known, the leader's first.
func (c *Client) known() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var urls []string
	if c.mu.leader != "" {
		urls = append(urls, c.mu.leader)
	}
	for _, u := range c.mu.urls {
		if u != c.mu.leader {
			urls = append(urls, u)
		}
	}
	return urls
}

func about(op, subject string, err error) error {
	switch {
	case err == nil:
		return nil
	case subject == "":
		return fmt.Errorf("%s: %w", op, err)
	}
	return fmt.Errorf("%s %s: %w", op, subject, err)
}
