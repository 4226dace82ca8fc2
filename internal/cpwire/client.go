package cpwire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// Options tunes a Client. The zero value and nil are valid.
type Options struct {
	// TLS is used for https addresses; nil means the system's roots.
	TLS *tls.Config
	// Patience is how long one call goes on while no member gives an answer. Default 30 s.
	Patience time.Duration
	// TryTimeout bounds one try of a call at one member. Default 3 s.
	TryTimeout time.Duration
	// FirstDelay and MaxDelay bound the jittered delay between tries. Defaults: 10 ms and 250 ms.
	FirstDelay, MaxDelay time.Duration
	// InFlight is how many requests with appends travel at once. Default 2, which
	// keeps the group busy and lets appends gather.
	InFlight int
}

func (o *Options) withDefaults() Options {
	var out Options
	if o != nil {
		out = *o
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&out.Patience, 30*time.Second)
	def(&out.TryTimeout, 3*time.Second)
	def(&out.FirstDelay, 10*time.Millisecond)
	def(&out.MaxDelay, 250*time.Millisecond)
	out.MaxDelay = max(out.MaxDelay, out.FirstDelay)
	if out.InFlight <= 0 {
		out.InFlight = 2
	}
	return out
}

// Client speaks to a group.
type Client struct {
	opts    Options
	http    *http.Client
	batcher Batcher[*call]
	// life ends with Close, and with it every request on its way.
	life context.Context
	end  context.CancelFunc

	mu struct { // guards what is known of the group
		sync.Mutex
		urls   []string
		next   int    // of urls, to be tried while the leader is not known
		leader string // "" while not known
		failed map[string]time.Time
		group  string // "" until the first answer
	}
}

// New returns a client of the group that has members at these addresses ("http://host:port",
// "https://host:port" or "host:port", which is http). Not all members need be among them.
// Close ends it.
func New(urls []string, opts *Options) (*Client, error) {
	c := &Client{opts: opts.withDefaults()}
	for _, raw := range urls {
		u, err := address(raw)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(c.mu.urls, u) {
			c.mu.urls = append(c.mu.urls, u)
		}
	}
	if len(c.mu.urls) == 0 {
		return nil, fmt.Errorf("no address of a checkpoint server: %w", fs.ErrInvalid)
	}
	c.mu.failed = map[string]time.Time{}
	c.life, c.end = context.WithCancel(context.Background())
	c.http = &http.Client{
		Transport: &http.Transport{
			TLSClientConfig:     c.opts.TLS,
			MaxIdleConnsPerHost: 64,
			IdleConnTimeout:     90 * time.Second,
			ReadBufferSize:      16 << 10,
			WriteBufferSize:     64 << 10,
			DisableCompression:  true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	c.batcher = Batcher[*call]{
		Run: c.send, Workers: c.opts.InFlight,
		MaxItems: MaxBatch, MaxSize: MaxRequest - batchHeader, Size: func(k *call) int { return len(k.item) },
	}
	return c, nil
}

// address completes an address and checks it.
func address(raw string) (string, error) {
	if !strings.Contains(raw, "://") {
		raw = "http://" + raw
	}
	u, err := url.Parse(strings.TrimSuffix(raw, "/"))
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Path != "" || u.RawQuery != "" || u.User != nil {
		return "", fmt.Errorf("address %.200q, want http://HOST:PORT: %w", raw, fs.ErrInvalid)
	}
	return u.String(), nil
}

// Close waits for the requests on their way and ends the client. Calls that wait are
// ended as if their context had.
func (c *Client) Close() error {
	c.end()
	c.batcher.Wait()
	c.http.CloseIdleConnections()
	return nil
}

// target returns the address to try next.
func (c *Client) target() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.leader != "" {
		return c.mu.leader
	}
	u := c.mu.urls[c.mu.next%len(c.mu.urls)]
	c.mu.next++
	return u
}

// hintAfterFailure is how long a member that could not be reached is not tried again on
// the word of others, who may not have noticed yet.
const hintAfterFailure = 500 * time.Millisecond

// follow notes whom a member took for the leader, and reports whether it is worth trying at once.
func (c *Client) follow(from, leader string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(from)
	u, err := address(leader)
	if leader == "" || err != nil || u == from || time.Since(c.mu.failed[u]) < hintAfterFailure {
		return false
	}
	c.mu.leader = u
	return true
}

// answered notes that a member did what only a leader does.
func (c *Client) answered(from string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.leader = from
	delete(c.mu.failed, from)
}

// forget notes that a member may not lead any more.
func (c *Client) forget(from string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(from)
}

func (c *Client) forgetLocked(from string) {
	if c.mu.leader == from {
		c.mu.leader = ""
	}
}

// forgetLeader lets the next try go round.
func (c *Client) forgetLeader() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.leader = ""
}

// unreachable notes that a member could not be reached.
func (c *Client) unreachable(from string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(from)
	if len(c.mu.failed) > 64 {
		clear(c.mu.failed)
	}
	c.mu.failed[from] = time.Now()
}

// belongs compares the group of an answer with the one before. A member that is not in a
// group yet names an empty one, and has nothing but its status to tell.
func (c *Client) belongs(header http.Header, success bool) error {
	group := header.Get(HeaderGroup)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case len(header.Values(HeaderGroup)) == 0 && success:
		return fmt.Errorf("the answer is not a checkpoint server's: %w", fs.ErrInvalid)
	case group == "":
		return nil
	case c.mu.group == "":
		c.mu.group = group
	case group != c.mu.group:
		return fmt.Errorf("the addresses lead to two groups, %.80q and %.80q: %w", c.mu.group, group, fs.ErrInvalid)
	}
	return nil
}

func (c *Client) group() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.group
}

// retry is one call's way through the members: how often, how long, and what is not known.
type retry struct {
	c       *Client
	started time.Time
	delay   time.Duration
	hops    int
	unknown bool // a try may have done it
}

func (c *Client) newRetry() retry { return retry{c: c, started: time.Now(), delay: c.opts.FirstDelay} }

// again takes the failure of a try and waits until it is time for the next one. It returns
// what the call failed for if there is to be none.
func (r *retry) again(ctx context.Context, err error) error {
	f, ok := errors.AsType[*failure](err)
	if !ok {
		return err
	}
	r.unknown = r.unknown || !f.harmless
	switch {
	case f.final:
		return err
	case f.follow && r.hops < 2:
		r.hops++
		return nil
	case time.Since(r.started) > r.c.opts.Patience:
		return err
	}

	if f.follow { // members that take each other for the leader
		r.c.forgetLeader()
	}
	r.hops = 0
	wait := time.NewTimer(r.delay/2 + rand.N(r.delay/2+1))
	defer wait.Stop()
	r.delay = min(2*r.delay, r.c.opts.MaxDelay)
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
}

// verdict says of an error whether the call may have had an effect.
func (r *retry) verdict(err error) error {
	if r.unknown {
		return fmt.Errorf("%w: %w", sentinel.Unknown, err)
	}
	return sentinel.Harmless(err)
}
