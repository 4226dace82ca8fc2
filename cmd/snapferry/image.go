package main

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/snapferry/snapferry/source"
)

// closing is an image with something that is closed when it is released.
type closing struct {
	source.Image
	also    io.Closer
	once    sync.Once
	outcome error
}

// Release releases the image and closes the other.
func (c *closing) Release() error {
	c.once.Do(func() { c.outcome = errors.Join(c.Image.Release(), c.also.Close()) })
	return c.outcome
}

// shared is a source whose image stands alone. A backup from the command line looks at a
// store twice, to see whether it stood still; a second image of a store that is written
// meanwhile would never be like the first, which is one cut by itself. So the second look
// is given the first image, unless that has turned out to be spoilt.
type shared struct {
	source.Source

	mu    sync.Mutex
	image *counted // nil: none is in use
}

func newShared(s source.Source) *shared { return &shared{Source: s} }

// counted is an image and how many hold it.
type counted struct {
	source.Image
	holders int
	spoilt  bool
}

// Freeze returns the image that is in use, or freezes.
func (s *shared) Freeze(ctx context.Context) (source.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.image == nil || s.image.spoilt {
		img, err := s.Source.Freeze(ctx)
		if err != nil {
			return nil, err
		}
		s.image = &counted{Image: img}
	}
	s.image.holders++
	return &hold{counted: s.image, of: s}, nil
}

// hold is one holder's image.
type hold struct {
	*counted
	of      *shared
	once    sync.Once
	outcome error
}

// Release releases the image when the last holder does.
func (h *hold) Release() error {
	h.once.Do(func() {
		h.of.mu.Lock()
		defer h.of.mu.Unlock()
		if h.holders--; h.holders > 0 {
			return
		}
		if h.of.image == h.counted {
			h.of.image = nil
		}
		h.outcome = h.Image.Release()
	})
	return h.outcome
}

// Open notices when the image turns out to be spoilt.
func (h *hold) Open(path string) (source.File, error) {
	f, err := h.Image.Open(path)
	if err != nil {
		return nil, h.notice(err)
	}
	return &watched{f, h}, nil
}

func (h *hold) notice(err error) error {
	if errors.Is(err, source.ErrChanged) {
		h.of.mu.Lock()
		defer h.of.mu.Unlock()
		h.spoilt = true
	}
	return err
}

type watched struct {
	source.File
	hold *hold
}

// Check notices when the image turns out to be spoilt.
func (w *watched) Check() error { return w.hold.notice(w.File.Check()) }
