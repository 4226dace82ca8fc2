package transfer

import (
	"context"
	"errors"
	"net/http"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

const (
	maxMisses  = 8 // chunks that nobody has before the others are given up
	maxFailing = 2 // failures of one of the others before it is given up
)

// askOthers fetches pieces one by one, by digest, from members that do not hold the
// snapshot but may hold the bytes (R10). It fails with why when there is a piece that
// nobody has.
func (t *fetcher) askOthers(ctx context.Context, left []*piece, why *protocol.Failure) error {
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(t.Window)
	for i, p := range left {
		if ctx.Err() != nil || t.board.hopeless() {
			break
		}
		work.Go(func() error { return t.askEach(ctx, p, i) })
	}
	if err := work.Wait(); err != nil {
		return err
	}
	for _, p := range left {
		if !p.done {
			return why
		}
	}
	return nil
}

// hopeless tells whether so many pieces are with nobody that it makes no sense to go on.
func (b *board) hopeless() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.misses >= maxMisses
}

// askEach asks the others for a piece, beginning with another one each time.
func (t *fetcher) askEach(ctx context.Context, p *piece, turn int) error {
	n := len(t.board.others)
	for i := range n {
		s := t.board.others[(turn+i)%n]
		if !t.board.alive(s) {
			continue
		}
		err := t.askChunk(ctx, s, p)
		if local, ok := errors.AsType[*localError](err); ok {
			return local.err
		}
		if t.board.heard(s, p, err) {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	t.board.miss()
	return nil
}

// askChunk fetches one chunk by its digest.
func (t *fetcher) askChunk(ctx context.Context, s *source, p *piece) error {
	if err := t.Work.Wait(ctx, int(p.Length)); err != nil {
		return &localError{err}
	}
	w := newWatch(ctx, t.Idle)
	defer w.stop()
	req, err := t.client.request(w.ctx, http.MethodGet, s.URL, "chunks/"+p.Digest.String(), nil)
	if err != nil {
		return err
	}
	resp, err := w.do(t.client, req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.ContentLength != int64(p.Length) {
		return &answerError{resp.StatusCode, "chunk of another length"}
	}
	return t.readPiece(p, &body{resp.Body, w, func(n int64) {
		s.hear(n)
		t.meter.fetch(n)
	}})
}

func (b *board) alive(s *source) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return s.out == nil
}

// heard notes what one of the others answered, and returns whether the piece is here.
func (b *board) heard(s *source, p *piece, err error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests++
	refused, _ := errors.AsType[*protocol.Refusal](err)
	switch {
	case err == nil:
		s.prove()
		p.done = true
	case isCorrupt(err):
		s.bad++
		s.dropped(protocol.FailCorrupt, "gave a wrong chunk for digest %s", p.Digest)
	case refused != nil: // it does not have it, or no time
	default:
		if s.fails++; s.fails >= maxFailing {
			s.dropped(protocol.FailUnreachable, "%v", err)
		}
	}
	return err == nil
}

func (b *board) miss() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.misses++
}
