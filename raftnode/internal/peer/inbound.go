package peer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// inboundKey says that a member has one stream of a kind to this one. A new stream ends
// the old one, which may be a dead connection that nobody has noticed yet.
type inboundKey struct {
	from uint64
	lane string
}

// inbound is one incoming stream. Its handler reads; a second goroutine gives signs of
// life, and ends the stream when there are none from the other side.
type inbound struct {
	t       *Transport
	key     inboundKey
	body    io.Reader
	w       http.ResponseWriter
	control *http.ResponseController
	contact *atomic.Int64
	reading atomic.Int64 // since when the handler waits for bytes, 0 while it does not

	once   sync.Once
	stop   chan struct{} // closed by abort
	reason *Refusal      // the last word; set before stop is closed
}

// abort ends the stream from outside.
func (in *inbound) abort(why *Refusal) {
	in.once.Do(func() {
		in.reason = why
		close(in.stop)
	})
}

func (in *inbound) aborted() bool {
	select {
	case <-in.stop:
		return true
	default:
		return false
	}
}

func (t *Transport) serveStream(w http.ResponseWriter, r *http.Request) {
	key, err := t.checkStream(r)
	if err != nil {
		writeRefusal(w, asRefusal(err))
		return
	}
	in := &inbound{
		t: t, key: key, body: r.Body, w: w, control: http.NewResponseController(w),
		contact: t.contact(key.from), stop: make(chan struct{}),
	}
	if !t.enter(in) {
		writeRefusal(w, refuse(NotReady, "this member is shutting down"))
		return
	}
	defer t.leave(in)
	for name, values := range Header(&t.self) {
		w.Header()[name] = values
	}
	w.WriteHeader(http.StatusOK)
	if err := in.control.Flush(); err != nil {
		return
	}
	if err := in.run(); err != nil && !in.aborted() && t.door.quiet.first("inbound "+formatID(key.from)+key.lane) {
		t.log.Warn("incoming stream ended", "member", formatID(key.from), "stream", key.lane, "err", err)
	}
}

// checkStream decides about a stream by its headers.
func (t *Transport) checkStream(r *http.Request) (inboundKey, error) {
	h := r.Header
	key := inboundKey{lane: h.Get(headerLane)}
	switch {
	case r.Method != http.MethodPost || r.ProtoMajor != 2:
		return key, refuse(Malformed, "a stream is a POST over HTTP/2, this is a %s over %s", r.Method, r.Proto)
	case h.Get(headerVersion) != strconv.Itoa(protocolVersion):
		return key, refuse(OtherVersion, "version %q, this member speaks %d", h.Get(headerVersion), protocolVersion)
	case key.lane != urgent.String() && key.lane != bulk.String():
		return key, refuse(Malformed, "no stream is called %q", key.lane)
	}
	c, err := callerOf(h)
	if err != nil {
		return key, err
	}
	if err := t.door.admit(c); err != nil {
		return key, err
	}
	if to, err := parseID(h.Get(headerTo)); err != nil || to != t.self.ID {
		return key, refuse(OtherMember, "this is member %s (%s), not %s", formatID(t.self.ID), t.self.Name, h.Get(headerTo))
	}
	if c.id == t.self.ID {
		return key, refuse(Malformed, "a member has no stream to itself")
	}
	key.from = c.id
	return key, nil
}

// enter puts a stream in its place; the one that was there ends.
func (t *Transport) enter(in *inbound) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	if old := t.mu.inbound[in.key]; old != nil {
		old.abort(nil)
	}
	t.mu.inbound[in.key] = in
	t.wg.Add(1)
	return true
}

func (t *Transport) leave(in *inbound) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.inbound[in.key] == in {
		delete(t.mu.inbound, in.key)
	}
	t.wg.Done()
}

// lastWrite is for a write that is under way when a stream ends.
const lastWrite = 100 * time.Millisecond

// run reads until the stream ends, and waits for the other goroutine, which must not use
// the response after that.
func (in *inbound) run() error {
	quit := make(chan struct{})
	var beats sync.WaitGroup
	beats.Go(func() { in.beats(quit) })
	err := in.receive()
	close(quit)
	_ = in.control.SetWriteDeadline(time.Now().Add(lastWrite)) // it may hang in a write
	beats.Wait()
	return err
}

func (in *inbound) receive() error {
	frames := newFrameReader(in, readBuffer, in.t.opts.MaxMessage)
	for !in.aborted() {
		kind, payload, err := frames.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if kind == frameBeat && len(payload) == 0 {
			continue
		}
		if kind != frameMessage {
			return fmt.Errorf("%w: kind %d with %d bytes", errFrame, kind, len(payload))
		}
		m, err := decodeMessage(payload, in.key.from, in.t.self.ID)
		if err != nil {
			return err
		}
		in.t.recv.Receive(m)
	}
	return nil
}

// Read reads the request, and notes that the other side is alive.
func (in *inbound) Read(p []byte) (int, error) {
	in.reading.Store(int64(time.Since(in.t.epoch)))
	n, err := in.body.Read(p)
	in.reading.Store(0)
	if n > 0 {
		in.t.touch(in.contact)
	}
	return n, err
}

// silent tells whether the reader waits for longer than a living sender lets it wait.
func (in *inbound) silent() bool {
	since := in.reading.Load()
	return since != 0 && time.Since(in.t.epoch)-time.Duration(since) > in.t.opts.Dead
}

// beats writes signs of life until quit, and ends the reader when the stream must end.
func (in *inbound) beats(quit <-chan struct{}) {
	ticker := time.NewTicker(in.t.opts.Beat)
	defer ticker.Stop()
	beat := appendFrame(nil, frameBeat, nil)
	for {
		select {
		case <-quit:
			return
		case <-in.stop:
			if in.reason != nil {
				_ = in.write(refusalFrame(in.reason)) // who does not read it is told at the next try
			}
		case <-ticker.C:
			if in.write(beat) == nil && !in.silent() {
				continue
			}
		}
		_ = in.control.SetReadDeadline(time.Now())
		return
	}
}

func (in *inbound) write(frame []byte) error {
	_ = in.control.SetWriteDeadline(time.Now().Add(in.t.opts.Dead))
	if _, err := in.w.Write(frame); err != nil {
		return err
	}
	return in.control.Flush()
}

func refusalFrame(r *Refusal) []byte {
	var b bytes.Buffer
	_ = json.NewEncoder(&b).Encode(r) // two strings and a word
	return appendFrame(nil, frameRefusal, b.Bytes())
}

func asRefusalFrame(payload []byte) error {
	var r Refusal
	if err := json.Unmarshal(payload, &r); err != nil || r.Kind == "" {
		return errors.Join(errFrame, err)
	}
	return &r
}
