package place

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// state is how far the swap of one target is.
type state int

const (
	waiting state = iota // the staged tree is staged and the target is the old one
	torn                 // begun: between two renames, or in place
	swapped              // the target is the staged tree
	lost                 // the staged tree is neither here nor there: somebody moved it
)

// move is the swap of one target.
type move struct {
	planned
	opts  *Options
	stage *staging
	aside string  // two renames: where this run put the old tree
	old   *uint32 // mode of the old tree, if this run changed it
}

// swap is a plan with its stagings open.
type swap struct {
	plan  *plan
	home  *staging
	moves []*move
}

// errStagingGone says that a plan cannot be completed, since what it has staged was
// removed or, in place, replaced.
var errStagingGone = errors.New("what was staged is gone")

// swapOf opens all stagings of a plan that lies in home.
func (y *yard) swapOf(p *plan, home *staging) (*swap, error) {
	s := &swap{plan: p, home: home}
	for _, one := range p.Stores {
		m := &move{planned: one, opts: y.opts}
		name := one.spot().staging()
		var err error
		m.stage, err = y.get(filepath.Join(home.dir.path, string(one.Dir)), name, false)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", errStagingGone, err)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: store %s: %w", ErrUnfinished, one.Store, err)
		}
		s.moves = append(s.moves, m)
	}
	return s, nil
}

// states tells how far each move is, whether anything was begun, and whether all is done.
func (s *swap) states() (all []state, begun, done bool, err error) {
	done = true
	for _, m := range s.moves {
		st, err := m.state()
		if err != nil {
			return nil, false, false, err
		}
		all = append(all, st)
		begun = begun || st == torn || st == swapped
		done = done && st == swapped
	}
	return all, begun, done, nil
}

func (m *move) base() string { return string(m.planned.Base) }

func (m *move) target() string { return filepath.Join(m.stage.dir.path, m.base()) }

func (m *move) state() (state, error) {
	if m.InPlace {
		return m.stateInPlace()
	}
	there, err := m.stage.dir.inode(m.base())
	if err != nil || there == m.Root {
		return swapped, err
	}
	here, err := m.stage.tree.inode(treeName)
	switch {
	case err != nil || here != m.Root:
		return lost, err
	case there == 0 && m.Existed:
		return torn, nil
	}
	return waiting, nil
}

// forward swaps unless that has been done, and sets the mode that the swap may need to
// loosen.
func (m *move) forward() error {
	st, err := m.state()
	if err != nil {
		return err
	}
	switch {
	case st == lost:
		return fmt.Errorf("the staged tree of %s is gone", m.target())
	case m.InPlace:
		return m.forwardInPlace()
	case st != swapped:
		if err := m.exchange(); err != nil {
			return err
		}
	}
	return settleMode(m.stage.dir, m.base(), m.Mode)
}

// exchange puts the staged tree at the target and the old tree, if there is one, in the
// staging (I7: in one step where the file system can).
func (m *move) exchange() error {
	s := m.stage
	there, err := s.dir.inode(m.base())
	if err != nil {
		return err
	}
	if err := loosen(s.tree, treeName); err != nil {
		return err
	}
	if there == 0 {
		return advise(renameNew(s.tree, treeName, s.dir, m.base()))
	}
	st, err := s.dir.lstat(m.base())
	if err != nil {
		return err
	}
	if mode := st.Mode & 0o7777; mode&0o200 == 0 && os.Geteuid() != 0 {
		m.old = &mode
	}
	if err := loosen(s.dir, m.base()); err != nil {
		return err
	}
	err = s.tree.move(treeName, s.dir, m.base(), unix.RENAME_EXCHANGE)
	if unsupported(err) {
		err = m.twoRenames()
	}
	return advise(err)
}

// twoRenames is for file systems without an exchange. Between the two the target is absent,
// and the plan is what the next restore repairs it by.
func (m *move) twoRenames() (err error) {
	s := m.stage
	if m.aside, err = s.free(oldPrefix); err != nil {
		return err
	}
	if err := s.dir.move(m.base(), s.tree, m.aside, 0); err != nil {
		return err
	}
	return renameNew(s.tree, treeName, s.dir, m.base())
}

// renameNew renames to a name that must be free. Where the kernel cannot check that in the
// same step, a directory at least never replaces anything but an empty directory.
func renameNew(from *tree, p string, to *tree, q string) error {
	err := from.move(p, to, q, unix.RENAME_NOREPLACE)
	if unsupported(err) {
		err = from.move(p, to, q, 0)
	}
	return err
}

func unsupported(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP)
}

func advise(err error) error {
	if errors.Is(err, unix.EXDEV) {
		return fmt.Errorf("the directory cannot be renamed, as happens in the image of a container: %s: %w", adviceInPlace, err)
	}
	return err
}

// loosen makes a directory writable for its owner: a plain user may otherwise not move it
// to another parent.
func loosen(t *tree, name string) error {
	st, err := t.lstat(name)
	if err != nil || st.Mode&0o200 != 0 || os.Geteuid() == 0 || !isDir(st) {
		return err
	}
	return t.chmod(name, st.Mode&0o7777|0o700)
}

// settleMode sets the mode of name unless it is set.
func settleMode(t *tree, name string, mode uint32) error {
	st, err := t.lstat(name)
	if err != nil || st.Mode&0o7777 == mode {
		return err
	}
	return t.chmod(name, mode)
}

func isDir(st unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFDIR }

// undo takes back what forward did in this run.
func (m *move) undo() error {
	st, err := m.state()
	if err != nil || m.InPlace {
		return errors.Join(err, m.undoable())
	}
	s := m.stage
	switch {
	case st == swapped && !m.Existed:
		err = renameNew(s.dir, m.base(), s.tree, treeName)
	case st == swapped && m.aside == "":
		err = s.dir.move(m.base(), s.tree, treeName, unix.RENAME_EXCHANGE)
	case st == swapped:
		if err = renameNew(s.dir, m.base(), s.tree, treeName); err == nil {
			err = renameNew(s.tree, m.aside, s.dir, m.base())
		}
	case st == torn && m.aside != "":
		err = renameNew(s.tree, m.aside, s.dir, m.base())
	}
	if err == nil && m.old != nil {
		err = settleMode(s.dir, m.base(), *m.old)
	}
	return err
}

func (m *move) undoable() error {
	if m.InPlace {
		return errors.New("a restore in place is only completed, not taken back")
	}
	return nil
}

// run makes all swaps of a plan that is durable. When one fails the ones before it are taken
// back, so that the error leaves every target as it was. What even then is neither old nor
// new stays with its plan, and the error is ErrUnfinished.
func (s *swap) run() error {
	for i, m := range s.moves {
		err := m.forward()
		if err == nil {
			continue
		}
		for _, done := range s.moves[:i+1] {
			if back := done.undo(); back != nil {
				return fmt.Errorf("%w: %w; and back: %w", ErrUnfinished, err, back)
			}
		}
		return errors.Join(err, s.sync(), s.clear())
	}
	return s.finish()
}

// finish makes done swaps durable and ends the plan.
func (s *swap) finish() error {
	if err := s.sync(); err != nil {
		return err
	}
	return s.clear()
}

func (s *swap) sync() error {
	for _, m := range s.moves {
		if err := errors.Join(m.stage.dir.sync(), m.stage.tree.sync()); err != nil {
			return err
		}
	}
	return nil
}

// clear ends the plan. What lies under the name of the staged tree and is not it was the
// target once: it is set aside durably before the plan, by which one tells, is removed.
func (s *swap) clear() error {
	for _, m := range s.moves {
		if err := errors.Join(keepOld(m.stage, m.Root), m.stage.tree.sync()); err != nil {
			return err
		}
	}
	if err := absent(s.home.tree.unlink(planName, 0)); err != nil {
		return err
	}
	if err := s.home.tree.sync(); err != nil {
		return err
	}
	for _, m := range s.moves {
		if err := absent(m.stage.tree.unlink(pointerName, 0)); err != nil {
			return err
		}
	}
	return nil
}

// absent takes "not there" for success of a removal.
func absent(err error) error { return ignore(err, fs.ErrNotExist) }

// recover completes the plan that a staging takes part in (S7), if any target of it was
// swapped. A plan of which nothing was done is void: all its targets are still the old ones.
// It returns the stagings of the plan when it was completed.
func (y *yard) recover(s *staging) ([]*staging, error) {
	p, home, err := y.pending(s)
	if err != nil {
		return nil, err
	}
	if p == nil {
		return nil, absent(s.tree.unlink(pointerName, 0))
	}
	w, err := y.swapOf(p, home)
	if err != nil {
		return nil, err
	}
	all, begun, _, err := w.states()
	if err != nil {
		return nil, err
	}
	gone := slices.Index(all, lost)
	if gone >= 0 && (begun || w.moves[gone].InPlace) {
		return nil, fmt.Errorf("%w: store %s: %w", ErrUnfinished, w.moves[gone].Store, errStagingGone)
	}
	if !begun {
		return nil, w.clear()
	}
	var done []*staging
	for _, m := range w.moves {
		if err := m.forward(); err != nil {
			return nil, fmt.Errorf("%w: checkpoint %s, store %s: %w", ErrUnfinished, p.Checkpoint, m.Store, err)
		}
		done = append(done, m.stage)
	}
	return done, w.finish()
}

// unfinished is Unfinished.
func unfinished(dir string) error {
	y := newYard(&Options{})
	y.peek = true
	defer y.close()
	for _, inPlace := range []bool{false, true} {
		at, err := locate(dir, inPlace)
		if err != nil {
			return err
		}
		s, err := y.get(at.dir, at.staging(), false)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = y.torn(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// torn returns the error for a plan that is begun and not done.
func (y *yard) torn(s *staging) error {
	p, home, err := y.pending(s)
	if p == nil {
		return err
	}
	w, err := y.swapOf(p, home)
	if err != nil {
		return err
	}
	all, begun, done, err := w.states()
	for i, m := range w.moves { // in place, what was put there may have been replaced since
		begun = begun || m.InPlace && all != nil && all[i] == lost
	}
	if err != nil || done || !begun {
		return err
	}
	var old, now []string
	for i, m := range w.moves {
		if all[i] == swapped {
			now = append(now, m.target())
		} else {
			old = append(old, m.target())
		}
	}
	return fmt.Errorf("%w: checkpoint %s is in [%s], not yet or half in [%s]: run the restore again to complete it",
		ErrUnfinished, p.Checkpoint, strings.Join(now, " "), strings.Join(old, " "))
}
