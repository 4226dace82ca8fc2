package place

import (
	"slices"

	"golang.org/x/sys/unix"
)

// A restore in place (S8) moves the entries of the staged tree to the target one by one,
// and what was there to the staging. Every step can be told from the inode numbers in the
// plan, so the moves go forward from wherever they stopped; there is no way back.

// lostFound is where the check of a file system puts what it finds. It belongs to the file
// system and not to the store.
const lostFound = "lost+found"

// keepsLostFound reports whether the target has one that stays: at the top of a mount point,
// a directory of root's, and no entry of the store.
func (t *target) keepsLostFound() bool {
	st, err := t.above.lstat(lostFound)
	return err == nil && isDir(st) && st.Uid == 0 && isMount(t.path, mounts()) && entryAt(t.store.Index, lostFound) == nil
}

func (m *move) stateInPlace() (state, error) {
	names, err := m.stage.dir.names("")
	if err != nil {
		return lost, err
	}
	extras := slices.ContainsFunc(names, m.extra)
	missing := false
	for _, e := range m.Entries {
		there, err := m.stage.dir.inode(string(e.Name))
		if err != nil {
			return lost, err
		}
		if there == e.Inode {
			continue
		}
		missing = true
		if here, err := m.stage.tree.inode(treeName + "/" + string(e.Name)); err != nil || here != e.Inode {
			return lost, err
		}
	}
	if extras || missing {
		return torn, nil
	}
	return swapped, nil
}

// extra reports whether an entry of the target has to go.
func (m *move) extra(name string) bool {
	return name != m.stage.name && name != m.Keep && m.entry(name) == nil
}

func (m *move) entry(name string) *placed {
	for i := range m.Entries {
		if string(m.Entries[i].Name) == name {
			return &m.Entries[i]
		}
	}
	return nil
}

func (m *move) forwardInPlace() error {
	s := m.stage
	old, err := s.free(oldPrefix)
	if err != nil {
		return err
	}
	if err := s.tree.mkdir(old); err != nil {
		return err
	}
	names, err := s.dir.names("")
	if err != nil {
		return err
	}
	for _, name := range names {
		if !m.extra(name) {
			continue
		}
		if err := m.away(s.dir, name, old+"/"+name); err != nil {
			return err
		}
	}
	for _, e := range m.Entries {
		if err := m.placeEntry(e, old); err != nil {
			return err
		}
	}
	return m.setMeta()
}

// away moves an old entry into the staging.
func (m *move) away(from *tree, name, to string) error {
	if err := loosen(from, name); err != nil {
		return err
	}
	return from.move(name, m.stage.tree, to, 0)
}

// placeEntry brings one staged entry to the target.
func (m *move) placeEntry(e placed, old string) error {
	s, name := m.stage, string(e.Name)
	staged := treeName + "/" + name
	there, err := s.dir.inode(name)
	if err != nil {
		return err
	}
	if there != e.Inode {
		if err := loosen(s.tree, staged); err != nil {
			return err
		}
		if err := m.bring(staged, name, there != 0, old); err != nil {
			return err
		}
	}
	// An exchange has left the old entry where the staged one was.
	here, err := s.tree.inode(staged)
	if err == nil && here != 0 && here != e.Inode {
		err = m.away(s.tree, staged, old+"/"+name)
	}
	if err != nil || !e.Dir {
		return err
	}
	return settleMode(s.dir, name, e.Mode)
}

func (m *move) bring(staged, name string, exists bool, old string) error {
	s := m.stage
	if !exists {
		return advise(renameNew(s.tree, staged, s.dir, name))
	}
	if err := loosen(s.dir, name); err != nil {
		return err
	}
	err := s.tree.move(staged, s.dir, name, unix.RENAME_EXCHANGE)
	if unsupported(err) {
		if err = s.dir.move(name, s.tree, old+"/"+name, 0); err == nil {
			err = renameNew(s.tree, staged, s.dir, name)
		}
	}
	return advise(err)
}

// setMeta sets what the index says of the target directory itself. Its mtime is set again
// when the staging, which lies in it, has gone.
func (m *move) setMeta() error {
	if m.Meta == nil {
		return nil
	}
	return newMeta(m.opts, m.Store).dir(m.stage.dir, "", m.Meta)
}
