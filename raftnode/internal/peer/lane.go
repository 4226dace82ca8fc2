package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// laneKind tells the two streams to a member apart.
type laneKind int

// Everything of the leader's log takes one stream, as raft reads an overtaken MsgApp as a
// hole in the log. All else is short and must not wait behind entries.
const (
	urgent laneKind = iota
	bulk
	lanes
)

func (k laneKind) String() string { return [...]string{"urgent", "bulk"}[k] }

func laneOf(m *raftpb.Message) laneKind {
	switch m.GetType() {
	case raftpb.MsgApp, raftpb.MsgSnap, raftpb.MsgProp:
		return bulk
	}
	return urgent
}

const (
	protocolVersion = 1
	dialPatience    = time.Second
	shakePatience   = 2 * time.Second // from dialling to the answer
	firstBackoff    = 50 * time.Millisecond
	lastBackoff     = 500 * time.Millisecond
	refusedBackoff  = 3 * time.Second // people have to act first
)

// lane is one outgoing stream, which is made anew whenever it breaks.
type lane struct {
	t       *Transport
	to      protocol.Member
	kind    laneKind
	queue   *queue
	contact *atomic.Int64

	mu        sync.Mutex
	connected bool
	trouble   string // what ended the last session or try
}

func newLane(t *Transport, to protocol.Member, kind laneKind) *lane {
	q := newQueue(t.opts.QueueLength, t.opts.QueueBytes)
	l := &lane{t: t, to: to, kind: kind, queue: q}
	return l
}

// run keeps the stream up until ctx ends.
func (l *lane) run(ctx context.Context) {
	l.contact = l.t.contact(l.to.ID)
	backoff := firstBackoff
	for ctx.Err() == nil {
		stood, err := l.session(ctx)
		if ctx.Err() != nil {
			break
		}
		l.ended(stood, err)
		if stood {
			backoff = firstBackoff
		}
		wait := backoff
		if r, ok := errors.AsType[*Refusal](err); ok && !r.Kind.passes() {
			wait = refusedBackoff
		}
		pause(ctx, wait/2+rand.N(wait/2))
		backoff = min(2*backoff, lastBackoff)
	}
	l.drop()
}

// ended notes the end of a session, or of a try to begin one. After a session the queue
// stays as it is for one more try; after a failed one nothing more is queued.
func (l *lane) ended(stood bool, err error) {
	if stood {
		l.t.notes.cut(l.to.ID)
	} else {
		l.drop()
	}
	l.note(false, err.Error())
	r, ok := errors.AsType[*Refusal](err)
	if !ok || r.Kind.passes() {
		return
	}
	if l.t.opts.Refused != nil && l.t.door.quiet.first("refused "+l.to.Name+string(r.Kind)) {
		l.t.opts.Refused(l.to.ID, r)
	}
	if r.Kind == Removed && l.t.opts.Removed != nil {
		l.t.told.Do(func() { l.t.opts.Removed(l.to.ID) })
	}
}

func (l *lane) drop() {
	for _, m := range l.queue.setDown(true) {
		l.t.notes.lost(m)
	}
}

// note keeps the state for status, and logs what is new in it.
func (l *lane) note(connected bool, trouble string) {
	l.mu.Lock()
	same := l.connected == connected && l.trouble == trouble
	l.connected, l.trouble = connected, trouble
	l.mu.Unlock()
	switch {
	case same || l.kind != urgent && trouble == "":
	case connected:
		l.t.log.Info("connected", "member", l.to.Name, "url", l.to.URL)
	case l.t.door.quiet.first(l.kind.String() + l.to.URL + trouble):
		l.t.log.Warn("no connection", "member", l.to.Name, "url", l.to.URL, "stream", l.kind, "err", trouble)
	}
}

func (l *lane) status() (connected bool, trouble string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.connected, l.trouble
}

// session makes one connection, sends what is queued, and reads signs of life until there
// are none. stood tells whether the other side had taken the stream.
func (l *lane) session(ctx context.Context) (stood bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	s := &session{l: l, open: make(chan struct{}), done: make(chan struct{}), beat: time.NewTicker(l.t.opts.Beat)}
	end := func(cause error) {
		cancel(cause)
		s.hangUp()
	}
	defer s.beat.Stop()
	defer s.Close()
	defer end(nil)
	watchdog := time.AfterFunc(shakePatience, func() { end(errors.New("no sign of life")) })
	defer watchdog.Stop()

	req, err := l.request(ctx, s)
	if err != nil {
		return false, err
	}
	trip := s.transport()
	defer trip.CloseIdleConnections()
	resp, err := trip.RoundTrip(req)
	if err != nil {
		return false, causeOf(ctx, err)
	}
	defer resp.Body.Close()
	defer end(nil) // before that Close, which waits for a write that may hang
	if err := l.accepted(resp); err != nil {
		return false, causeOf(ctx, err)
	}
	l.queue.setDown(false)
	l.note(true, "")
	close(s.open)
	return true, causeOf(ctx, l.listen(resp.Body, watchdog))
}

// causeOf prefers why a session was ended to what that looked like.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

func (l *lane) request(ctx context.Context, body io.ReadCloser) (*http.Request, error) {
	url, err := NormalURL(l.to.URL, l.t.door.opts.Insecure)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+StreamPath, body)
	if err != nil {
		return nil, err
	}
	req.Header = Header(&l.t.self)
	req.Header.Set(headerTo, formatID(l.to.ID))
	req.Header.Set(headerLane, l.kind.String())
	req.Header.Set(headerVersion, strconv.Itoa(protocolVersion))
	req.ContentLength = -1
	return req, nil
}

// accepted checks the answer, also for who gives it.
func (l *lane) accepted(resp *http.Response) error {
	if resp.StatusCode != http.StatusOK {
		return readAnswer(resp, nil)
	}
	c, err := callerOf(resp.Header)
	if err != nil {
		return err
	}
	if c.id != l.to.ID {
		return refuse(OtherMember, "member %s answers at %s instead of %s", formatID(c.id), l.to.URL, formatID(l.to.ID))
	}
	return l.t.door.admit(c)
}

// listen reads what the other side says, which is little.
func (l *lane) listen(body io.Reader, watchdog *time.Timer) error {
	frames := newFrameReader(body, 512, maxJSON)
	for {
		watchdog.Reset(l.t.opts.Dead)
		l.t.touch(l.contact)
		kind, payload, err := frames.next()
		if err != nil {
			return fmt.Errorf("stream ended: %w", err)
		}
		switch kind {
		case frameBeat:
		case frameRefusal:
			return asRefusalFrame(payload)
		default:
			return fmt.Errorf("%w: kind %d in an answer", errFrame, kind)
		}
	}
}

// session is the body of a request: reading it takes messages out of the queue. That puts
// no goroutine and no copy between the queue and the connection, and whatever waits goes
// out in one piece.
type session struct {
	l     *lane
	open  chan struct{} // closed when the other side has taken the stream
	done  chan struct{} // closed when nobody wants to read any more
	once  sync.Once
	beat  *time.Ticker
	spill []byte // the rest of a message that was larger than the reader's buffer
	big   []byte // its memory

	mu   sync.Mutex
	conn net.Conn
	hung bool
}

// transport makes an HTTP client of one connection, which nobody else shares and which
// can be cut: what a dead connection holds back is not waited for.
func (s *session) transport() *http.Transport {
	p := new(http.Protocols)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Transport{
		Protocols:          p,
		TLSClientConfig:    s.l.t.door.tls.Clone(),
		DialContext:        s.dial,
		DisableCompression: true,
	}
}

func (s *session) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialPatience}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hung || s.conn != nil {
		return nil, errors.Join(net.ErrClosed, conn.Close())
	}
	s.conn = conn
	return conn, nil
}

// hangUp cuts the connection, now or as soon as there is one.
func (s *session) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hung = true
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

// Close ends the body.
func (s *session) Close() error {
	s.once.Do(func() { close(s.done) })
	return nil
}

// Read waits for messages and fills p with as many frames as there are.
func (s *session) Read(p []byte) (int, error) {
	if len(s.spill) > 0 {
		n := copy(p, s.spill)
		s.spill = s.spill[n:]
		return n, nil
	}
	select {
	case <-s.open:
	case <-s.done:
		return 0, io.ErrClosedPipe
	}
	for {
		select {
		case <-s.done: // first of all: what is queued is for the next session
			return 0, io.ErrClosedPipe
		default:
		}
		if n, err := s.fill(p); n > 0 || err != nil {
			return n, err
		}
		select {
		case <-s.l.queue.wake:
		case <-s.beat.C:
			return s.overflow(p, 0, appendFrame(s.big[:0], frameBeat, nil)), nil
		case <-s.done:
		}
	}
}

// fill encodes queued messages into p.
func (s *session) fill(p []byte) (n int, err error) {
	for n < len(p) {
		m := s.l.queue.pop()
		if m == nil {
			return n, nil
		}
		size := proto.Size(m)
		if size > s.l.t.opts.MaxMessage {
			s.l.t.log.Error("message is too large to be sent", "member", s.l.to.Name, "type", m.GetType(), "bytes", size)
			s.l.t.notes.lost(m)
			continue
		}
		if n+frameHeader+size > len(p) {
			b, err := appendMessage(slices.Grow(s.big[:0], frameHeader+size), m, size)
			if err != nil {
				return 0, err
			}
			return s.overflow(p, n, b), nil
		}
		b, err := appendMessage(p[:n], m, size)
		if err != nil {
			return 0, err
		}
		n = len(b)
	}
	return n, nil
}

// overflow puts as much of b into p[n:] as fits, and keeps the rest for the next Read.
func (s *session) overflow(p []byte, n int, b []byte) int {
	n2 := copy(p[n:], b)
	s.spill, s.big = b[n2:], nil
	if cap(b) <= keepBuffer {
		s.big = b[:0]
	}
	return n + n2
}
