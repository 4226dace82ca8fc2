package snapstore

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// sweep brings the directory into order when it is opened. Only what this package named is
// touched.
func (s *Store) sweep() error {
	list, err := s.disk.names(".")
	if err != nil {
		return err
	}
	for _, entry := range list {
		name := entry.Name()
		id, idErr := protocol.ParseID(name)
		switch {
		case strings.HasPrefix(name, draftPrefix):
			s.note("remove an unfinished draft", name, s.disk.discard(name))
		case strings.HasPrefix(name, asidePrefix):
			s.note("remove the rest of a removal", name, s.disk.remove(name))
		case idErr == nil:
			s.load(id)
		case name != lockName && name != receiveName && name != quarantineName:
			s.opts.Logger.Warn("a foreign file lies in the snapshot store", "dir", s.dir, "name", name)
		}
	}
	s.sweepReceipts()
	s.note("clear the quarantine", quarantineName, s.prune(maxQuarantined))
	return nil
}

// note logs what a clean-up did, or could not do.
func (s *Store) note(what, name string, err error) {
	if err != nil {
		s.opts.Logger.Warn("snapshot store: cannot "+what, "dir", s.dir, "name", name, "err", err)
		return
	}
	s.opts.Logger.Debug("snapshot store: "+what, "dir", s.dir, "name", name)
}

// load takes a snapshot in that lies in the directory.
func (s *Store) load(id protocol.ID) {
	name := id.String()
	m, err := s.readManifest(name, id)
	if err == nil {
		err = s.complete(name, m)
	}
	if errors.Is(err, ErrCorrupt) {
		s.opts.Logger.Error("snapshot store: a snapshot is damaged", "dir", s.dir, "name", name, "err", err)
		s.note("set a damaged snapshot aside", name, s.setAside(name, err.Error()))
		return
	}
	if err != nil {
		s.note("read a snapshot", name, err)
		return
	}
	if err := s.disk.remove(path.Join(name, journalName)); err != nil {
		s.note("remove the journal of a snapshot", name, err)
	}
	marks := s.disk.loadMarks(name, len(m.Index.Entries))
	s.mu.held[id] = &holding{Held: Held{ID: id, Meta: m.Meta, Bytes: m.Bytes()}, name: name, index: m.Index, marks: marks}
}

// readManifest reads the manifest of a snapshot or receipt.
func (s *Store) readManifest(name string, id protocol.ID) (*Manifest, error) {
	data, err := s.disk.readFile(path.Join(name, manifestName), MaxManifest)
	if err != nil {
		return nil, absent(manifestName, err)
	}
	m, err := DecodeManifest(data)
	if err != nil {
		return nil, err
	}
	if m.ID != id {
		return nil, corruptf("the manifest is that of %s", m.ID.Short())
	}
	return m, nil
}

// complete compares names and sizes; bytes are for Verify.
func (s *Store) complete(name string, m *Manifest) error {
	all, err := s.disk.scan(path.Join(name, dataName))
	if errors.Is(err, errForeign) {
		return corruptf("%v", err)
	}
	if err != nil {
		return absent(dataName, err)
	}
	return compare(m.Index, all)
}

// sweepReceipts keeps the receipts that Receive can go on with, the newest ones.
func (s *Store) sweepReceipts() {
	list, err := s.disk.names(receiveName)
	if err != nil {
		s.note("list the receipts", receiveName, err)
		return
	}
	for _, entry := range list {
		name := path.Join(receiveName, entry.Name())
		id, err := protocol.ParseID(entry.Name())
		foreign := err != nil
		if !foreign {
			_, err = s.readManifest(name, id)
		}
		if foreign || errors.Is(err, ErrCorrupt) {
			s.note("remove a receipt that is of no use", name, s.disk.discard(name))
		}
	}
	if err := s.dropReceipts(func(protocol.ID) bool { return true }); err != nil {
		s.note("remove old receipts", receiveName, err)
	}
}

// dropReceipts removes receipts that nobody works on and that keep does not want, and the
// oldest ones that are too many.
func (s *Store) dropReceipts(keep func(protocol.ID) bool) error {
	ids, err := s.receipts()
	if err != nil {
		return err
	}
	for i, id := range ids {
		if keep(id) && i < maxIdle || s.acquire(id) != nil {
			continue
		}
		err = errors.Join(err, s.disk.discard(receiptName(id)))
		s.yield(id)
	}
	return err
}

// receipts lists the receipts that lie in the store, newest index first.
func (s *Store) receipts() ([]protocol.ID, error) {
	list, err := s.disk.names(receiveName)
	if err != nil {
		return nil, err
	}
	var ids []protocol.ID
	for _, entry := range list {
		if id, err := protocol.ParseID(entry.Name()); err == nil {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b protocol.ID) int { return b.Compare(a) })
	return ids, nil
}

// acquire reserves the receipt of a snapshot until yield.
func (s *Store) acquire(id protocol.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.closed:
		return ErrClosed
	case s.mu.busy[id]:
		return fmt.Errorf("%w: %s is being received", ErrBusy, id.Short())
	}
	s.mu.busy[id] = true
	return nil
}

func (s *Store) yield(id protocol.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.busy, id)
}
