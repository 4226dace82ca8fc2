package server

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"sync"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/server/internal/tasklog"
)

// appends turns requests into commands. A request is one command, so that what a client
// gathered stays together; when many clients come at once, their requests share one.
type appends struct {
	s       *service
	batcher cpwire.Batcher[*pending]
	life    context.Context // ends with the service: commands outlast the requests they came in
	end     context.CancelFunc
}

// inFlight is how many commands are on their way before requests begin to share.
const inFlight = 16

// pending is a request with appends on its way.
type pending struct {
	buf  *[]byte // a command's header, then the request's count and items
	n    int
	done chan proposed
}

type proposed struct {
	results []byte
	err     error
}

// The header of a command takes more room than what comes before the count in a request,
// so a request that is read at the right place becomes a command where it lies.
const (
	commandHeader = 1 + 1 + 8
	readAt        = commandHeader - 1 // after the codec's version comes the count
	itemsAt       = commandHeader + 2
)

var commands = sync.Pool{New: func() any { return new([]byte) }}

func (a *appends) init(s *service) {
	a.s = s
	a.life, a.end = context.WithCancel(context.Background())
	a.batcher = cpwire.Batcher[*pending]{
		Run: a.run, Workers: inFlight,
		MaxItems: cpwire.MaxBatch, MaxSize: cpwire.MaxRequest, Size: func(p *pending) int { return len(*p.buf) },
	}
}

// close ends what is on its way and waits for it.
func (a *appends) close() {
	a.end()
	a.batcher.Wait()
}

func (a *appends) serveAppend(w http.ResponseWriter, r *http.Request) {
	p, err := readAppends(w, r)
	if err != nil {
		a.s.fail(w, "append", "", err)
		return
	}
	a.batcher.Add(p)

	// Whoever waits here no more gets no answer; the command goes on all the same.
	var o proposed
	select {
	case o = <-p.done:
	case <-r.Context().Done():
		return
	}
	if o.err != nil {
		a.s.fail(w, "append", "", o.err)
		return
	}
	a.s.write(w, "application/octet-stream", cpwire.AppendAnswer(nil, o.results))
}

// readAppends reads a request and checks all of it.
func readAppends(w http.ResponseWriter, r *http.Request) (*pending, error) {
	p := &pending{buf: commands.Get().(*[]byte), done: make(chan proposed, 1)}
	body := http.MaxBytesReader(w, r.Body, cpwire.MaxRequest)
	b, err := readAll(body, append((*p.buf)[:0], make([]byte, readAt)...), r.ContentLength)
	*p.buf = b
	if err == nil {
		if _, p.n, err = cpwire.DecodeBatch(b[readAt:]); err != nil {
			err = fmt.Errorf("%w: %w", fs.ErrInvalid, err)
		}
	}
	if err != nil {
		commands.Put(p.buf)
		return nil, err
	}
	return p, nil
}

// readAll appends what r has to b.
func readAll(r io.Reader, b []byte, want int64) ([]byte, error) {
	if want > 0 && want <= cpwire.MaxRequest && cap(b)-len(b) <= int(want) {
		b = append(make([]byte, 0, len(b)+int(want)+1), b...)
	}
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if err == io.EOF {
			return b, nil
		}
		if err != nil {
			return b, err
		}
	}
}

// run proposes some requests as one command and gives each its results.
func (a *appends) run(all []*pending) {
	results, err := a.propose(all)
	for _, p := range all {
		o := proposed{err: err}
		if size := p.n * cpwire.ResultSize; err == nil {
			o.results, results = results[:size:size], results[size:]
		}
		p.done <- o
	}
}

func (a *appends) propose(all []*pending) ([]byte, error) {
	total := 0
	for _, p := range all {
		total += p.n
	}
	command := *all[0].buf
	for _, p := range all[1:] {
		command = append(command, (*p.buf)[itemsAt:]...)
	}
	*all[0].buf = command
	tasklog.BeginAppends(command[:0], a.s.now().UnixNano(), total)

	ctx, cancel := context.WithTimeout(a.life, proposeTimeout)
	defer cancel()
	result, err := a.s.node.Propose(ctx, command)
	for _, p := range all {
		commands.Put(p.buf) // a node copies what it is given
	}
	if err != nil {
		return nil, err
	}
	result, err = tasklog.DecodeResult(result)
	if err == nil && len(result) != total*cpwire.ResultSize {
		err = fmt.Errorf("%d bytes of results for %d appends", len(result), total)
	}
	return result, err
}

func (s *service) serveTrim(w http.ResponseWriter, r *http.Request) {
	task, err := taskOf(r)
	if err == nil {
		ctx, cancel := context.WithTimeout(r.Context(), proposeTimeout)
		defer cancel()
		var result []byte
		if result, err = s.node.Propose(ctx, tasklog.EncodeTrim(s.now().UnixNano(), task)); err == nil {
			_, err = tasklog.DecodeResult(result)
		}
	}
	if err != nil {
		s.fail(w, "trim", task.String(), err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
