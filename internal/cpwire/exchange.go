package cpwire

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// maxAnswer bounds what is read of an answer: a whole history with its bodies.
const maxAnswer = KeptRecords*entryFixed + KeptBodies*MaxBody

// failure is a try that brought no success, and what that means for the call.
type failure struct {
	err      error
	harmless bool // this try has changed nothing
	final    bool // another try would bring the same
	follow   bool // another member is known to lead
	stranger bool // one of the two does not accept the other's certificate
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// request is what is sent to one member after the other.
type request struct {
	method, path string
	body         []byte
	timeout      time.Duration // of one try
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

// try sends a request to whoever is thought to lead. Every error is a *failure.
func (c *Client) try(ctx context.Context, r request) (*answer, error) {
	at := c.target()
	a, err := c.exchange(ctx, at, r)
	if err == nil {
		c.answered(at)
	}
	return a, err
}

// exchange sends a request to one member and judges what comes back.
func (c *Client) exchange(ctx context.Context, at string, r request) (*answer, error) {
	one, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	a, err := c.roundTrip(one, at, r)
	if err != nil {
		return nil, c.lost(ctx, at, err)
	}
	success := a.status == http.StatusOK || a.status == http.StatusNoContent
	if err := c.belongs(a.header, success); err != nil {
		return nil, &failure{err: err, final: true, harmless: !success}
	}
	if success {
		return a, nil
	}
	return nil, c.judge(at, a)
}

// lost judges a request that got no answer.
func (c *Client) lost(ctx context.Context, at string, err error) *failure {
	op, ok := errors.AsType[*net.OpError](err)
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	f := &failure{err: err, harmless: ok && op.Op == "dial", stranger: untrusted || ok && op.Op == "remote error"}
	switch {
	case ctx.Err() != nil: // the caller has gone
	case f.harmless || errors.Is(err, context.DeadlineExceeded):
		c.unreachable(at)
	default:
		c.forget(at)
	}
	return f
}

func (c *Client) roundTrip(ctx context.Context, at string, r request) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, r.method, at+r.path, bytes.NewReader(r.body))
	if err != nil {
		return nil, err
	}
	if g := c.group(); g != "" {
		req.Header.Set(HeaderGroup, g)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	a := &answer{status: resp.StatusCode, header: resp.Header}
	if n := resp.ContentLength; n >= 0 && n <= maxAnswer {
		a.body = make([]byte, n)
		_, err = io.ReadFull(resp.Body, a.body)
	} else {
		a.body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	}
	if err == nil && len(a.body) > maxAnswer {
		err = fmt.Errorf("answer has more than %d bytes", maxAnswer)
	}
	return a, err
}

// judge reads the JSON of an answer that is no success.
func (c *Client) judge(at string, a *answer) *failure {
	var f Failure
	if err := json.Unmarshal(a.body, &f); err != nil || f.Error == nil {
		return &failure{err: fmt.Errorf("%s answers %d %s", at, a.status, http.StatusText(a.status)), final: a.status < 500}
	}
	told := &toldError{f.Error}
	switch f.Error.Code {
	case CodeNotLeader:
		leader := ""
		if f.Leader != nil {
			leader = f.Leader.URL
		}
		return &failure{err: told, harmless: true, follow: c.follow(at, leader)}
	case CodeUnavailable:
		c.forget(at)
		return &failure{err: told, harmless: true}
	case CodeUnknown, CodeInternal:
		c.forget(at)
		return &failure{err: told}
	}
	return &failure{err: told, harmless: true, final: true}
}

// toldError is an error of a member inside of one of the client, which says by itself what
// was tried on what.
type toldError struct{ told *Error }

func (e *toldError) Error() string { return e.told.Message }
func (e *toldError) Unwrap() error { return e.told }
