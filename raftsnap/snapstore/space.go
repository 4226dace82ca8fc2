package snapstore

import (
	"errors"
	"fmt"

	"github.com/snapferry/snapferry/snapshot"
)

// room tells whether what a receipt still lacks fits on the disk beside the reserve. Damaged
// snapshots that are kept for people to look at make room before a transfer is refused.
func (s *Store) room(r *Receipt) error {
	err := s.fits(r)
	if !errors.Is(err, ErrNoSpace) {
		return err
	}
	if err := s.prune(0); err != nil {
		return err
	}
	return s.fits(r)
}

// short tells whether the disk has less free than the reserve, so that even what is here of
// a transfer that does not fit is too much: others on the disk, like the log, need it.
func (s *Store) short() bool {
	free, total, _, err := s.volume()
	return err == nil && free < s.reserve(total)
}

func (s *Store) volume() (free, total, block int64, err error) {
	err = s.disk.do("statfs", ".", func() error {
		dir, err := s.disk.root.Open(".")
		if err != nil {
			return err
		}
		defer closeQuietly(dir)
		free, total, block, err = volume(dir)
		return err
	})
	return free, total, block, err
}

func (s *Store) fits(r *Receipt) error {
	free, total, block, err := s.volume()
	if err != nil {
		return err
	}
	need, reserve := s.need(r, block), s.reserve(total)
	if need > 0 && need > free-reserve {
		return fmt.Errorf("%w: %s of %s are still to come and %s are kept in reserve, but %s has %s free",
			ErrNoSpace, size(need), size(r.m.Bytes()), size(reserve), s.dir, size(free))
	}
	return nil
}

func (s *Store) reserve(total int64) int64 {
	switch {
	case s.opts.Reserve < 0:
		return 0
	case s.opts.Reserve > 0:
		return s.opts.Reserve
	}
	return min(defaultReserve, total/reservePart)
}

// need counts what a receipt takes beyond what it has. A file that can be linked, or moved
// here from another receipt, takes nothing.
func (s *Store) need(r *Receipt, block int64) (need int64) {
	here := s.contents()
	for _, st := range r.files {
		if here[snapshot.ContentID(st.e)] {
			continue
		}
		for j := range st.e.Chunks {
			if r.mu.state[st.first+j] == missing {
				need += (int64(st.e.Chunks[j].Length) + block - 1) / block * block
			}
		}
	}
	return need
}

// contents tells of the contents of all files that need not be written again.
func (s *Store) contents() map[snapshot.Digest]bool {
	here := map[snapshot.Digest]bool{}
	all, done := s.useAll()
	defer done()
	for _, h := range all {
		for i := range h.index.Entries {
			if e := &h.index.Entries[i]; e.Type == snapshot.Regular && canLink {
				here[snapshot.ContentID(e)] = true
			}
		}
	}
	donors := s.donors()
	defer s.releaseDonors(donors)
	for _, d := range donors {
		for _, st := range d.files {
			if d.count(st, claimed) == len(st.e.Chunks) {
				here[snapshot.ContentID(st.e)] = true
			}
		}
	}
	return here
}
