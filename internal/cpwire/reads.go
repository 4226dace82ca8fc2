package cpwire

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Head returns the newest entry with its body. A log that does not exist is fs.ErrNotExist.
// It is never older than any entry whose append was answered before.
func (c *Client) Head(ctx context.Context, task Task) (Entry, error) {
	return c.entry(ctx, "read head of", task, "head")
}

// HeadRecord is Head without the body.
func (c *Client) HeadRecord(ctx context.Context, task Task) (Entry, error) {
	e, err := c.entry(ctx, "read head of", task, "head?body=0")
	e.Body = nil
	return e, err
}

// Get returns the entry at a slot with its body. One that is not kept is fs.ErrNotExist.
func (c *Client) Get(ctx context.Context, task Task, slot uint64) (Entry, error) {
	return c.entry(ctx, "read entry of", task, "entries/"+strconv.FormatUint(slot, 10))
}

// Watch waits until the newest entry's slot is above after, and returns that entry.
func (c *Client) Watch(ctx context.Context, task Task, after uint64) (Entry, error) {
	if err := task.Validate(); err != nil {
		return Entry{}, wrap("watch", task, err)
	}
	path := taskPath(task, fmt.Sprintf("head?after=%d&wait=%d", after, int(watchWait/time.Second)))
	for {
		a, err := c.do(ctx, request{http.MethodGet, path, nil, watchWait + c.opts.TryTimeout})
		if err == nil && a.status == http.StatusNoContent {
			continue
		}
		if err != nil {
			return Entry{}, wrap("watch", task, err)
		}
		e, err := readEntry(a)
		return e, wrap("watch", task, err)
	}
}

const watchWait = 20 * time.Second

func (c *Client) entry(ctx context.Context, op string, task Task, rest string) (Entry, error) {
	if err := task.Validate(); err != nil {
		return Entry{}, wrap(op, task, err)
	}
	a, err := c.do(ctx, request{http.MethodGet, taskPath(task, rest), nil, c.opts.TryTimeout})
	if err != nil {
		return Entry{}, wrap(op, task, err)
	}
	e, err := readEntry(a)
	return e, wrap(op, task, err)
}

// History returns the records of the newest KeptRecords entries whose slot is above after,
// oldest first, with their bodies where these are kept and bodies is set. A log that does not
// exist is fs.ErrNotExist.
func (c *Client) History(ctx context.Context, task Task, after uint64, bodies bool) ([]Entry, error) {
	const op = "read history of"
	if err := task.Validate(); err != nil {
		return nil, wrap(op, task, err)
	}
	path := taskPath(task, fmt.Sprintf("history?after=%d&bodies=%t", after, bodies))
	a, err := c.do(ctx, request{http.MethodGet, path, nil, c.opts.TryTimeout})
	if err != nil {
		return nil, wrap(op, task, err)
	}
	var es []Entry
	for b := a.body; len(b) > 0; {
		var e Entry
		if e, b, err = decodeEntry(b); err != nil {
			return nil, wrap(op, task, err)
		}
		es = append(es, e)
	}
	return es, nil
}

// Tasks yields every task that has a log, in the order of the bytes of "job/name". After
// an error it ends.
func (c *Client) Tasks(ctx context.Context) iter.Seq2[Task, error] {
	return func(yield func(Task, error) bool) {
		after := ""
		for {
			page, err := c.page(ctx, after)
			if err != nil {
				yield(Task{}, fmt.Errorf("list tasks: %w", err))
				return
			}
			for _, t := range page {
				if !yield(t, nil) {
					return
				}
			}
			if len(page) < MaxPage {
				return
			}
			after = page[len(page)-1].String()
		}
	}
}

func (c *Client) page(ctx context.Context, after string) ([]Task, error) {
	path := fmt.Sprintf("%s?limit=%d&after=%s", PathTasks, MaxPage, url.QueryEscape(after))
	a, err := c.do(ctx, request{http.MethodGet, path, nil, c.opts.TryTimeout})
	if err != nil {
		return nil, err
	}
	var page []Task
	for line := range strings.Lines(string(a.body)) {
		job, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "/")
		t := Task{Job: job, Name: name}
		if err := t.Validate(); err != nil {
			return nil, err
		}
		page = append(page, t)
	}
	return page, nil
}

// Trim removes the bodies of entries that were superseded a day ago by the leader's clock.
func (c *Client) Trim(ctx context.Context, task Task) error {
	if err := task.Validate(); err != nil {
		return wrap("trim", task, err)
	}
	_, err := c.do(ctx, request{http.MethodPost, taskPath(task, "trim"), nil, c.opts.TryTimeout})
	return wrap("trim", task, err)
}

// do repeats a request, which may be done more than once without harm, until there is an
// answer.
func (c *Client) do(ctx context.Context, r request) (*answer, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(c.life, func() { cancel(errClosed) })()
	retry := c.newRetry()
	for {
		a, err := c.try(ctx, r)
		if err == nil {
			return a, nil
		}
		if err := retry.again(ctx, err); err != nil {
			if r.method == http.MethodGet {
				return nil, err
			}
			return nil, retry.verdict(err)
		}
	}
}
