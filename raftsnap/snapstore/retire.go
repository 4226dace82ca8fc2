package snapstore

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// Retire removes snapshots and returns which. It keeps the newest ones, as many as Options
// say, those that are pinned, and those that keep wants; keep may be nil. Receipts that
// nobody works on go too when a snapshot of their index or a newer one is there and keep
// does not want them, and the oldest ones when there are many.
func (s *Store) Retire(keep func(protocol.ID) bool) ([]protocol.ID, error) {
	if keep == nil {
		keep = func(protocol.ID) bool { return false }
	}
	victims, newest, err := s.victims(keep)
	if err != nil {
		return nil, fmt.Errorf("retire snapshots: %w", err)
	}
	var gone []protocol.ID
	var errs []error
	for _, h := range victims {
		if err := s.disk.discard(h.name); err != nil {
			errs = append(errs, err)
			s.restore(h)
			continue
		}
		gone = append(gone, h.ID)
	}
	errs = append(errs, s.dropReceipts(func(id protocol.ID) bool { return id.Index > newest || keep(id) }))
	if err := errors.Join(errs...); err != nil {
		return gone, fmt.Errorf("retire snapshots: %w", err)
	}
	return gone, nil
}

// victims takes out what Retire removes, and tells the newest index that is held. From then
// on nobody finds them, so nobody can pin them.
func (s *Store) victims(keep func(protocol.ID) bool) (victims []*holding, newest uint64, err error) {
	s.mu.Lock()
	all := s.sortedLocked()
	closed := s.mu.closed
	s.mu.Unlock()
	if closed {
		return nil, 0, ErrClosed
	}
	wanted := map[protocol.ID]bool{} // asked without the lock: keep may call the store
	for _, h := range all {
		newest = max(newest, h.ID.Index)
		wanted[h.ID] = keep(h.ID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range all[:max(0, len(all)-s.opts.Retain)] {
		if h.pins == 0 && !wanted[h.ID] && s.mu.held[h.ID] == h {
			delete(s.mu.held, h.ID)
			victims = append(victims, h)
		}
	}
	return victims, newest, nil
}

// restore takes a snapshot in again that could not be removed, if it is still whole.
func (s *Store) restore(h *holding) {
	if _, err := s.disk.lstat(path.Join(h.name, manifestName)); err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.held[h.ID] = h
}

// Quarantine sets a damaged snapshot aside, with a note that says why: nobody finds it from
// then on, and the next transfer fetches its chunks anew. Pins stay usable. The newest two
// are kept for people to look at, as long as nobody needs their space.
func (s *Store) Quarantine(id protocol.ID, why string) error {
	s.mu.Lock()
	h, err := s.findLocked(id)
	delete(s.mu.held, id)
	s.mu.Unlock()
	if err == nil {
		err = s.setAside(h.name, why)
	}
	if err != nil {
		return fmt.Errorf("quarantine snapshot: %w", err)
	}
	return nil
}

// setAside moves the directory of a snapshot to the quarantine. If it is there already from
// another time, that one goes.
func (s *Store) setAside(name, why string) error {
	to := path.Join(quarantineName, name)
	// Without its marks every file is read again, should it be met under its name once more.
	if err := errors.Join(s.disk.remove(path.Join(name, marksName)), s.disk.remove(to)); err != nil {
		return err
	}
	if err := s.disk.rename(name, to); err != nil {
		return err
	}
	err := errors.Join(s.disk.syncDir("."), s.disk.syncDir(quarantineName))
	return errors.Join(err, s.disk.writeFile(path.Join(to, whyName), []byte(why+"\n"), false), s.prune(maxQuarantined))
}

// prune removes all but the n snapshots that came to the quarantine last.
func (s *Store) prune(n int) error {
	list, err := s.disk.names(quarantineName)
	if err != nil {
		return err
	}
	infos := make([]fs.FileInfo, 0, len(list))
	for _, entry := range list {
		info, err := s.disk.lstat(path.Join(quarantineName, entry.Name()))
		if err != nil {
			return err
		}
		infos = append(infos, info)
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int { // the note is the last change in there
		return cmp.Or(b.ModTime().Compare(a.ModTime()), cmp.Compare(b.Name(), a.Name()))
	})
	for _, info := range infos[min(n, len(infos)):] {
		err = errors.Join(err, s.disk.remove(path.Join(quarantineName, info.Name())))
	}
	return err
}
