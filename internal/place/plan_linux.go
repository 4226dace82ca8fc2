package place

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/snapshot"
)

// plan is the journal of a swap (S7). It lies in the staging of the first target by store
// name and is durable before the first swap. Whether a target was swapped is not written
// down but seen: the inode number of what lies there is compared with the recorded one.
//
// Paths are bytes, not text, and relative, so that they hold under another mount point.
type plan struct {
	ID         string // binds the pointers to this plan
	Checkpoint string
	Stores     []planned
}

// planned is the part of a plan about one target.
type planned struct {
	Store   string
	Dir     []byte // what holds the target's staging, relative to what holds the plan's
	Base    []byte // name of the target in Dir; empty in place
	Root    uint64 // inode number of the staged tree
	Existed bool   // there was a target before
	Mode    uint32 // of the staged tree, set once more after the swap

	InPlace bool
	Entries []placed        // in place: the staged top-level entries
	Meta    *snapshot.Entry `json:",omitempty"` // in place: metadata of the target itself
	Keep    string          `json:",omitempty"` // in place: an old entry that stays
}

// placed is a top-level entry of a restore in place.
type placed struct {
	Name  []byte
	Inode uint64
	Dir   bool
	Mode  uint32
}

// pointer stands in the staging of every other target of a plan.
type pointer struct {
	ID      string
	Dir     []byte // what holds the plan's staging, relative to what holds this one
	Staging []byte // the staging's name
}

func (p planned) spot() spot { return spot{base: string(p.Base)} }

const (
	planKind    = "restore-plan"
	pointerKind = "restore-pointer"
	planVersion = 1
)

// newPlan describes the swap of these targets, which are sorted by store name.
func newPlan(checkpoint string, targets []*target) (*plan, error) {
	p := &plan{ID: rand.Text(), Checkpoint: checkpoint}
	for _, t := range targets {
		rel, err := filepath.Rel(targets[0].dir, t.dir)
		if err != nil {
			return nil, err
		}
		st, err := t.tree.lstat("")
		if err != nil {
			return nil, err
		}
		s := planned{Store: t.store.Name, Dir: []byte(rel), Base: []byte(t.base), Root: st.Ino, Existed: t.there, Mode: st.Mode & 0o7777}
		if t.base == "" {
			err = s.addEntries(t)
		}
		if err != nil {
			return nil, err
		}
		p.Stores = append(p.Stores, s)
	}
	return p, nil
}

// addEntries records what a restore in place has to move.
func (p *planned) addEntries(t *target) error {
	p.InPlace = true
	if t.keepsLostFound() {
		p.Keep = lostFound
	}
	if root := entryAt(t.store.Index, ""); root != nil {
		p.Meta = root
		p.Mode = root.Mode
	}
	names, err := t.tree.names("")
	for _, name := range names {
		st, err := t.tree.lstat(name)
		if err != nil {
			return err
		}
		p.Entries = append(p.Entries, placed{Name: []byte(name), Inode: st.Ino, Dir: isDir(st), Mode: st.Mode & 0o7777})
	}
	return err
}

// write makes the pointers durable and then the plan, which is what makes them count.
func (p *plan) write(targets []*target) error {
	home := targets[0]
	for _, t := range targets[1:] {
		rel, err := filepath.Rel(t.dir, home.dir)
		if err != nil {
			return err
		}
		data, err := json.Marshal(pointer{p.ID, []byte(rel), []byte(home.staging())})
		if err != nil {
			return err
		}
		if err := t.stage.tree.writeFile(pointerName, frame.Encode(pointerKind, planVersion, data)); err != nil {
			return err
		}
	}
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	// The staging's own name has to be durable too before anything depends on its content.
	for _, t := range targets {
		if err := t.stage.dir.sync(); err != nil {
			return err
		}
	}
	return home.stage.tree.writeFile(planName, frame.Encode(planKind, planVersion, data))
}

// load reads a framed file of a staging into v. An absent one is fs.ErrNotExist.
func load(s *staging, name, kind string, v any) error {
	data, err := s.tree.readFile(name)
	if err != nil {
		return err
	}
	if data, err = frame.Decode(kind, planVersion, data); err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; it tells how far an interrupted restore came: without it, remove it and restore all its stores again", s.tree.join(name), err)
	}
	return nil
}

// pending finds the plan that a staging takes part in, and the staging it lies in. No plan:
// nil. A pointer whose plan is gone or is another one means nothing.
func (y *yard) pending(s *staging) (*plan, *staging, error) {
	p := new(plan)
	err := load(s, planName, planKind, p)
	if err == nil {
		return p, s, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	var to pointer
	if err := load(s, pointerName, pointerKind, &to); err != nil {
		return nil, nil, ignore(err, fs.ErrNotExist)
	}
	if name := string(to.Staging); !inside(name) {
		return nil, nil, fmt.Errorf("%s: bad name %q", s.tree.join(pointerName), name)
	}
	home, err := y.get(filepath.Join(s.dir.path, string(to.Dir)), string(to.Staging), false)
	if err != nil {
		return nil, nil, ignore(err, fs.ErrNotExist)
	}
	if err := load(home, planName, planKind, p); err != nil || p.ID != to.ID {
		return nil, nil, ignore(err, fs.ErrNotExist)
	}
	return p, home, nil
}

func ignore(err, which error) error {
	if errors.Is(err, which) {
		return nil
	}
	return err
}

func entryAt(x *snapshot.Index, path string) *snapshot.Entry {
	for i := range x.Entries {
		if x.Entries[i].Path == path {
			return &x.Entries[i]
		}
	}
	return nil
}
