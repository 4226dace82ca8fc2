package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/snapshot"
)

var (
	// errIdle ends a request on which nothing has come for too long.
	errIdle = errors.New("nothing came")
	// errCorrupt marks an answer that is known to be wrong as a whole.
	errCorrupt = errors.New("wrong bytes")
)

func isCorrupt(err error) bool { return errors.Is(err, errCorrupt) }

// localError is one that no other source would mend.
type localError struct{ err error }

func (e *localError) Error() string { return e.err.Error() }
func (e *localError) Unwrap() error { return e.err }

// leaseError is a failure to get a lease at all.
type leaseError struct{ err error }

func (e *leaseError) Error() string { return "lease: " + e.err.Error() }
func (e *leaseError) Unwrap() error { return e.err }

func isLease(err error) bool {
	_, ok := errors.AsType[*leaseError](err)
	return ok
}

// watch ends a request when nothing comes for a while. It is armed only while something is
// waited for, so a receiver that takes its time is not mistaken for a silent sender.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	idle   time.Duration
}

func newWatch(ctx context.Context, idle time.Duration) *watch {
	w := &watch{idle: idle}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(idle, func() { w.cancel(errIdle) })
	return w
}

// stop frees what the watch holds.
func (w *watch) stop() {
	w.timer.Stop()
	w.cancel(nil)
}

// cause returns why a request that ended with err did so.
func (w *watch) cause(err error) error {
	if err != nil && w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	return err
}

// do sends a request under the watch.
func (w *watch) do(c *Client, req *http.Request) (*http.Response, error) {
	w.timer.Reset(w.idle)
	defer w.timer.Stop()
	resp, err := c.do(req)
	return resp, w.cause(err)
}

// body reads an answer under the watch, telling count what comes.
type body struct {
	io.Reader
	w     *watch
	count func(n int64)
}

func (b *body) Read(p []byte) (int, error) {
	b.w.timer.Reset(b.w.idle)
	n, err := b.Reader.Read(p)
	b.w.timer.Stop()
	if n > 0 {
		b.count(int64(n))
	}
	if err != nil && err != io.EOF {
		err = b.w.cause(err)
	}
	return n, err
}

// snapshotRequest makes a request for something of the snapshot that is fetched.
func (t *fetcher) snapshotRequest(ctx context.Context, s *source, method, what string, payload any) (*http.Request, error) {
	var data []byte
	if payload != nil {
		var err error
		if data, err = json.Marshal(payload); err != nil {
			return nil, &localError{err}
		}
	}
	req, err := t.client.request(ctx, method, s.URL, "snapshots/"+t.ID.String()+"/"+what, data)
	if err == nil {
		req.Header.Set(transferHeader, string(t.Transfer))
	}
	return req, err
}

// askManifest gets the manifest, and a lease with it.
func (t *fetcher) askManifest(ctx context.Context, s *source) ([]byte, error) {
	w := newWatch(ctx, t.Idle)
	defer w.stop()
	req, err := t.snapshotRequest(w.ctx, s, http.MethodGet, "manifest", nil)
	if err != nil {
		return nil, err
	}
	resp, err := w.do(t.client, req)
	if err != nil {
		return nil, &leaseError{err}
	}
	defer resp.Body.Close()
	if resp.ContentLength < 0 || resp.ContentLength > snapstore.MaxManifest {
		return nil, fmt.Errorf("%w: manifest of %d bytes", errCorrupt, resp.ContentLength)
	}
	// Memory follows what really comes, whatever was promised.
	data, err := io.ReadAll(&body{resp.Body, w, func(int64) {}})
	if err != nil {
		return nil, err
	}
	if snapshot.Sum(data) != t.ID.Digest {
		return nil, fmt.Errorf("%w: the manifest is of another snapshot", errCorrupt)
	}
	return data, nil
}

// takeLease sees to it that the source has given a lease.
func (t *fetcher) takeLease(ctx context.Context, s *source) error {
	if t.board.isLeased(s) {
		return nil
	}
	w := newWatch(ctx, t.Idle)
	defer w.stop()
	if err := t.simple(w, s, http.MethodPost, "lease", nil); err != nil {
		return &leaseError{err}
	}
	t.board.leased(s)
	return nil
}

func (t *fetcher) dropLease(ctx context.Context, s *source) error {
	w := newWatch(ctx, t.Idle)
	defer w.stop()
	return t.simple(w, s, http.MethodDelete, "lease", nil)
}

// doubt tells a source that a chunk which it sent is wrong, so that it looks at its own.
func (t *fetcher) doubt(ctx context.Context, s *source, p *piece) error {
	w := newWatch(ctx, t.Idle)
	defer w.stop()
	return t.simple(w, s, http.MethodPost, "doubt", doubtRequest{p.File, p.Offset})
}

// simple sends a request whose answer matters only as a success.
func (t *fetcher) simple(w *watch, s *source, method, what string, payload any) error {
	req, err := t.snapshotRequest(w.ctx, s, method, what, payload)
	if err != nil {
		return err
	}
	resp, err := w.do(t.client, req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, io.LimitReader(&body{resp.Body, w, func(int64) {}}, maxControl))
	return errors.Join(err, resp.Body.Close())
}

// perform fetches a task from its source. The pace is kept before anything is asked and not
// while reading, lest slow transfers hold connections and leases of their sources.
func (t *fetcher) perform(ctx context.Context, s *source, k *task) error {
	extents, total := k.extents()
	if err := t.keepPace(ctx, total); err != nil {
		return &localError{err}
	}
	old := t.board.paid(k)
	err := t.request(ctx, s, k, extents, total)
	if old && k.got.Load() == 0 && isGone(err) && !isLease(err) {
		// An earlier lease ran out while the pace was kept. What was waited for once is not
		// waited for again: under a low limit every lease would run out like that.
		t.board.unleased(s)
		err = t.request(ctx, s, k, extents, total)
	}
	return err
}

// keepPace waits until n bytes may be moved. Tasks do that one after the other: all at once
// they would share the rate, come to their turn together, and leave the sources without a
// request until then.
func (t *fetcher) keepPace(ctx context.Context, n int64) error {
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
		return t.Work.Wait(ctx, int(n))
	case <-ctx.Done():
		return ctx.Err()
	}
}

func isGone(err error) bool {
	r, ok := errors.AsType[*protocol.Refusal](err)
	return ok && r.Kind == protocol.Gone
}

// request takes a lease, unless there is one, and fetches extents under it.
func (t *fetcher) request(ctx context.Context, s *source, k *task, extents []extent, total int64) error {
	if err := t.takeLease(ctx, s); err != nil {
		return err
	}
	w := newWatch(ctx, t.Idle)
	defer w.stop()
	t.board.begin(k, w.cancel)
	resp, err := t.askExtents(w, s, extents, total)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return t.readPieces(ctx, s, k, &body{resp.Body, w, func(n int64) {
		k.got.Add(n)
		s.hear(n)
		t.meter.fetch(n)
	}})
}

// extents joins the pieces of a task where they meet.
func (k *task) extents() (list []extent, total int64) {
	for _, p := range k.pieces[k.pos:] {
		n := int64(p.Length)
		total += n
		if last := len(list) - 1; last >= 0 && list[last].file == p.File && list[last].offset+list[last].length == p.Offset {
			list[last].length += n
			continue
		}
		list = append(list, extent{p.File, p.Offset, n})
	}
	return list, total
}

// askExtents asks for extents: one by GET, several by POST. Only an answer that promises
// exactly those bytes is returned.
func (t *fetcher) askExtents(w *watch, s *source, list []extent, total int64) (*http.Response, error) {
	want := http.StatusOK
	var req *http.Request
	var err error
	if len(list) == 1 {
		want = http.StatusPartialContent
		e := list[0]
		if req, err = t.snapshotRequest(w.ctx, s, http.MethodGet, "files/"+strconv.Itoa(e.file), nil); err == nil {
			req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", e.offset, e.offset+e.length-1))
		}
	} else {
		req, err = t.snapshotRequest(w.ctx, s, http.MethodPost, "pieces", piecesRequest{list})
	}
	if err != nil {
		return nil, err
	}
	resp, err := w.do(t.client, req)
	if err != nil {
		return nil, err
	}
	if err := checkAnswer(resp, want, list, total); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// checkAnswer refuses an answer that is not the one to the question.
func checkAnswer(resp *http.Response, want int, list []extent, total int64) error {
	if resp.StatusCode != want || resp.ContentLength != total || resp.Header.Get("Content-Encoding") != "" {
		return &answerError{resp.StatusCode, fmt.Sprintf("%d bytes, asked for %d", resp.ContentLength, total)}
	}
	if want != http.StatusPartialContent {
		return nil
	}
	var from, to, size int64
	got := resp.Header.Get("Content-Range")
	if _, err := fmt.Sscanf(got, "bytes %d-%d/%d", &from, &to, &size); err != nil ||
		from != list[0].offset || to != from+total-1 || got != contentRange(from, total, size) {
		return &answerError{resp.StatusCode, fmt.Sprintf("range %.80q, asked for %d+%d", got, list[0].offset, total)}
	}
	return nil
}

// chunkBuffers are for whole chunks.
var chunkBuffers = sync.Pool{New: func() any { return new([]byte) }}

// chunkBuffer returns a buffer of n bytes.
func chunkBuffer(n int) *[]byte {
	buf := chunkBuffers.Get().(*[]byte)
	if cap(*buf) < n {
		*buf = make([]byte, n)
	}
	*buf = (*buf)[:n]
	return buf
}

// readPieces reads the pieces of a task from an answer and puts them into the store, which
// checks each against its digest. After a wrong one it goes on: the rest may be right.
func (t *fetcher) readPieces(ctx context.Context, s *source, k *task, r io.Reader) error {
	var wrong *piece
	for p := t.board.claim(k); p != nil; p = t.board.claim(k) {
		switch err := t.readPiece(p, r); {
		case err == nil:
			t.board.accept(k, p)
		case isCorrupt(err):
			wrong = p
			t.board.reject(k, p)
		default:
			return err
		}
	}
	if wrong != nil {
		return ignore(t.doubt(ctx, s, wrong))
	}
	return nil
}

// ignore drops an error that changes nothing: if the source is in trouble, the next
// request will tell.
func ignore(error) error { return nil }

func (t *fetcher) readPiece(p *piece, r io.Reader) error {
	buf := chunkBuffer(int(p.Length))
	defer chunkBuffers.Put(buf)
	if _, err := io.ReadFull(r, *buf); err != nil {
		return err
	}
	err := t.receipt.Put(p.Piece, *buf)
	if errors.Is(err, snapstore.ErrCorrupt) {
		return fmt.Errorf("%w: %w", errCorrupt, err)
	}
	if err != nil {
		return &localError{err}
	}
	return nil
}
