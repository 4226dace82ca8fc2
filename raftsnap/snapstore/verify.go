package snapstore

import (
	"context"
	"errors"
	"fmt"
	"path"
	"sync/atomic"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// Verify checks that a snapshot is what its id says: the manifest, the names, and the bytes
// of every file. Files that were verified once, also by an earlier process, and have not
// changed since are not read again: that finds what was written to, and Scrub what decays.
// Damage is ErrCorrupt; it is the caller's to put the snapshot into quarantine.
func (s *Store) Verify(ctx context.Context, id protocol.ID, w *Work) error {
	h, done, err := s.use(id)
	if err == nil {
		defer done()
		err = s.verify(ctx, h, w, nil)
	}
	if err != nil {
		return fmt.Errorf("verify snapshot %s: %w", id.Short(), err)
	}
	return nil
}

// Scrub reads every byte of every snapshot, one after another, and returns those that are
// damaged. It is for the background, and to be called from time to time. A snapshot that
// cannot be read for another reason than damage does not keep it from the others; the
// reasons come back as the error.
func (s *Store) Scrub(ctx context.Context, w *Work) (damaged []protocol.ID, err error) {
	seen := &contents{s: s, ids: map[mark]snapshot.Digest{}}
	for _, held := range s.List() {
		h, done, findErr := s.use(held.ID)
		if findErr != nil {
			continue // retired meanwhile
		}
		verifyErr := s.verify(ctx, h, w, seen)
		done()
		switch {
		case ctx.Err() != nil:
			return damaged, fmt.Errorf("scrub snapshots: %w", context.Cause(ctx))
		case errors.Is(verifyErr, ErrCorrupt):
			damaged = append(damaged, held.ID)
			s.opts.Logger.Error("snapshot store: a snapshot is damaged", "dir", s.dir, "name", h.name, "err", verifyErr)
		case verifyErr != nil:
			err = errors.Join(err, fmt.Errorf("scrub snapshot %s: %w", h.name, verifyErr))
		}
	}
	return damaged, err
}

// verify checks one snapshot. With seen the marks do not count, but a file that several
// snapshots share is read once.
func (s *Store) verify(ctx context.Context, h *holding, w *Work, seen *contents) error {
	if _, err := s.rawManifest(h); err != nil {
		return err
	}
	all, err := s.disk.scan(h.data())
	if errors.Is(err, errForeign) {
		return corruptf("%v", err)
	}
	if err != nil {
		return absent(dataName, err)
	}
	if err := compare(h.index, all); err != nil {
		return err
	}
	marks := s.marksOf(h)
	var read atomic.Bool
	err = each(ctx, len(all), func(ctx context.Context, i int, buf []byte) error {
		e := &h.index.Entries[i]
		if e.Type != snapshot.Regular || seen == nil && marks[i].is(all[i].mark) || seen.has(all[i].mark, e) {
			return nil
		}
		read.Store(true)
		began := time.Now()
		m, err := s.disk.hasher(w, buf).verify(ctx, h.data(), e)
		if errors.Is(err, ErrCorrupt) {
			s.setMark(h, i, mark{})
		}
		if err != nil {
			return err
		}
		seen.add(m, e)
		s.setMark(h, i, m.settled(began))
		return nil
	})
	if err == nil && read.Load() {
		s.noteMarks(h)
	}
	return err
}

// noteMarks writes down what was verified, so that the next process need not read it.
func (s *Store) noteMarks(h *holding) {
	err := s.disk.writeFile(path.Join(h.name, marksName), encodeMarks(s.marksOf(h)), false)
	if err != nil {
		s.note("write down what was verified", h.name, err)
	}
}

// contents are the files that a scrub has read. A nil one has none. Guarded by Store.mu.
type contents struct {
	s   *Store
	ids map[mark]snapshot.Digest
}

func (c *contents) has(m mark, e *snapshot.Entry) bool {
	if c == nil || m == (mark{}) {
		return false
	}
	id := snapshot.ContentID(e)
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return c.ids[m] == id
}

func (c *contents) add(m mark, e *snapshot.Entry) {
	if c == nil {
		return
	}
	id := snapshot.ContentID(e)
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.ids[m] = id
}
