package transfer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// ClientOptions tunes a Client. The zero value of each field means its default.
type ClientOptions struct {
	// TLS is used for https URLs. Nil means Go's defaults.
	TLS *tls.Config
	// Transport replaces the Client's own transport, for tests and special networks; TLS
	// is then ignored. By default the Client has a transport of its own, so that no
	// transfer ever shares a connection with Raft's messages.
	Transport http.RoundTripper
	// Header is sent with every request: who this member is.
	Header http.Header
	// Timeout bounds the answer to a control message, besides what its Wait adds: 10 s by
	// default. Data has no total deadline.
	Timeout time.Duration
	// Attempts is how often in a row a source may fail before a Fetch gives it up: 5 by
	// default. It rests between them, Backoff after the first (100 ms by default) and then
	// each time twice as long.
	Attempts int
	Backoff  time.Duration
}

// Client talks to the Servers of other members. Make one with NewClient and Close it at
// the end; one serves any number of transfers at once.
type Client struct {
	http     *http.Client
	header   http.Header
	timeout  time.Duration
	attempts int
	backoff  time.Duration
}

// NewClient makes a Client. opts may be nil.
func NewClient(opts *ClientOptions) *Client {
	var o ClientOptions
	if opts != nil {
		o = *opts
	}
	if o.Transport == nil {
		o.Transport = newTransport(o.TLS)
	}
	return &Client{
		http: &http.Client{
			Transport: o.Transport,
			// A member answers for itself: nobody may send a transfer elsewhere.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		header:   o.Header.Clone(),
		timeout:  orDefault(o.Timeout, 10*time.Second),
		attempts: orDefault(o.Attempts, 5),
		backoff:  orDefault(o.Backoff, 100*time.Millisecond),
	}
}

// newTransport returns a transport for bulk data: HTTP/1.1, so that each request in flight
// has a connection of its own and the sender's kernel can copy files into it. Proxies from
// the environment are for the outside world, not for members of a group.
func newTransport(conf *tls.Config) *http.Transport {
	var one http.Protocols
	one.SetHTTP1(true)
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Transport{
		DialContext:         dialer.DialContext,
		TLSClientConfig:     conf.Clone(),
		TLSHandshakeTimeout: 5 * time.Second,
		Protocols:           &one,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 32,
		IdleConnTimeout:     90 * time.Second,
		// Reads longer than the buffer go past it, so a small one saves a copy.
		ReadBufferSize:         16 << 10,
		MaxResponseHeaderBytes: 64 << 10,
	}
}

// Close closes idle connections. Requests that run are not touched.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Info asks the member at url what it has (R5). A refusal may be in the Answer, or be the
// error.
func (c *Client) Info(ctx context.Context, url string, r protocol.InfoRequest) (protocol.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout+max(r.Wait, 0))
	defer cancel()
	var a protocol.Answer
	err := c.call(ctx, url, "info", r, &a)
	return a, err
}

// Announce tells the member at url of a recorded snapshot.
func (c *Client) Announce(ctx context.Context, url string, a protocol.Announce) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	return c.call(ctx, url, "announce", a, nil)
}

// Outcome tells the leader at url what became of an install. A *protocol.Refusal says that
// it does not lead, and who may.
func (c *Client) Outcome(ctx context.Context, url string, o protocol.Outcome) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	return c.call(ctx, url, "outcome", o, nil)
}

// call sends a control message and decodes the answer into out, if there is to be one.
func (c *Client) call(ctx context.Context, url, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("%s: encode: %w", path, err)
	}
	req, err := c.request(ctx, http.MethodPost, url, path, body)
	if err != nil {
		return err
	}
	resp, err := c.do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		return nil
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxControl+1))
	if err == nil && len(data) > maxControl {
		err = fmt.Errorf("answer over %d bytes", maxControl)
	}
	if err == nil {
		err = json.Unmarshal(data, out)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", path, url, err)
	}
	return nil
}

// request makes a request for a path of the interface. A nil body means none.
func (c *Client) request(ctx context.Context, method, url, path string, body []byte) (*http.Request, error) {
	full := strings.TrimSuffix(url, "/") + Prefix + path
	var r io.Reader
	if body != nil {
		r = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, full, r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	maps.Copy(req.Header, c.header)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, nil
}

// busyError is a refusal with the time that the answerer asked to wait.
type busyError struct {
	*protocol.Refusal
	wait time.Duration
}

// Unwrap returns the refusal.
func (b *busyError) Unwrap() error { return b.Refusal }

// do sends a request and returns the answer if it is a success; else the error is a
// *protocol.Refusal or says what came instead.
func (c *Client) do(req *http.Request) (*http.Response, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	err = readRefusal(resp)
	if r, ok := err.(*protocol.Refusal); ok && r.Kind == protocol.Busy {
		return nil, &busyError{r, waitAsked(resp.Header)}
	}
	return nil, fmt.Errorf("%s %s: %w", strings.ToLower(req.Method), req.URL.Redacted(), err)
}
