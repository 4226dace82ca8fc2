// Package head is the state of a task: what the newest entry of its log says, and
// what each kind of entry makes of it.
//
// It is pure. A transition takes the state before, checks the action against it and
// returns the state after; whoever calls it appends the result to the log under the
// rules of P3, so that a transition whose state has moved on is asked again. Rule
// numbers (P1..P12) are those of docs/design.md.
package head

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/snapferry/snapferry/internal/sentinel"
)

// ErrBaseGone says that a checkpoint whose content an attempt reuses is not
// retained any more: upload again without it (P5e).
var ErrBaseGone = errors.New("a checkpoint this one borrows from is gone")

// Ref names a blob of the task, and the digest of its bytes (of a checkpoint blob
// the frame's, of a segment likewise).
type Ref struct {
	Key    string `json:"key"` // below the task's blob prefix: ATTEMPT/N
	Digest string `json:"digest"`
}

// Checkpoint is what the head knows of one checkpoint; the rest is in its blob.
type Checkpoint struct {
	ID       string   `json:"id"`
	Epoch    uint64   `json:"epoch"`
	Sequence uint64   `json:"sequence"`
	Stores   []string `json:"stores"`
	Blob     Ref      `json:"blob"`
}

// Dropped is a checkpoint that the entry at Slot took out of the retained ones. Its
// blobs wait for the grace (P10).
type Dropped struct {
	Checkpoint
	Slot uint64    `json:"slot"`
	At   time.Time `json:"at"`
}

// Hold pins a checkpoint, retained or not, for a reader (P10) or a clone (P11).
type Hold struct {
	Checkpoint
	Slot  uint64    `json:"slot"`
	At    time.Time `json:"at"`
	Owner string    `json:"owner"` // unique: whoever releases it names it
}

// Partial is the progress of an upload that has not committed (P5g).
type Partial struct {
	Attempt string `json:"attempt"`
	Chunks  Ref    `json:"chunks"`
	Bytes   int64  `json:"bytes"`
}

// State is the whole state of a task after one entry.
type State struct {
	Epoch    uint64            `json:"epoch"`
	LastID   string            `json:"last_id,omitempty"`
	LastTime time.Time         `json:"last_time,omitzero"` // the time in LastID
	Sequence uint64            `json:"sequence"`           // of the last commit or prepare
	Ordinal  uint32            `json:"ordinal"`            // last committed or prepared one of this epoch
	LastDone string            `json:"last_attempt,omitempty"`
	Retained []Checkpoint      `json:"retained,omitempty"` // oldest first
	Prepared []Checkpoint      `json:"prepared,omitempty"`
	Partial  *Partial          `json:"partial,omitempty"`
	Holds    []Hold            `json:"holds,omitempty"`
	Voided   []string          `json:"voided,omitempty"` // attempts of this epoch
	Dropped  []Dropped         `json:"dropped,omitempty"`
	Holders  map[string]string `json:"holders,omitempty"` // store: id of the newest retained checkpoint that has it
	Gone     bool              `json:"gone,omitempty"`    // the task was dropped
}

// decode reads the body of an entry, without the lists that stand in segments.
func decode(body []byte) (*wire, error) {
	var w wire
	if err := json.Unmarshal(body, &w); err != nil {
		return nil, fmt.Errorf("%w: head: %v", sentinel.Corrupt, err)
	}
	return &w, nil
}

func (s *State) clone() *State {
	c := *s
	c.Retained = slices.Clone(s.Retained)
	c.Prepared = slices.Clone(s.Prepared)
	c.Holds = slices.Clone(s.Holds)
	c.Voided = slices.Clone(s.Voided)
	c.Dropped = slices.Clone(s.Dropped)
	c.Holders = maps.Clone(s.Holders)
	if c.Holders == nil {
		c.Holders = map[string]string{}
	}
	return &c
}

// Latest returns the newest retained checkpoint, or nil.
func (s *State) Latest() *Checkpoint {
	if len(s.Retained) == 0 {
		return nil
	}
	return &s.Retained[len(s.Retained)-1]
}

// Find returns the retained checkpoint with this id, or nil.
func (s *State) Find(id string) *Checkpoint {
	i := slices.IndexFunc(s.Retained, func(c Checkpoint) bool { return c.ID == id })
	if i < 0 {
		return nil
	}
	return &s.Retained[i]
}

// Live returns every checkpoint whose content may be reused and must be kept:
// retained, held and prepared.
func (s *State) Live() []Checkpoint {
	out := slices.Concat(s.Retained, s.Prepared)
	seen := make(map[string]bool, len(out))
	for _, c := range out {
		seen[c.ID] = true
	}
	for _, h := range s.Holds {
		if !seen[h.ID] {
			seen[h.ID] = true
			out = append(out, h.Checkpoint)
		}
	}
	return out
}

// NextID returns the id of a checkpoint whose attempt begins now: ids grow whatever
// the clock does (P1).
func (s *State) NextID(now time.Time, ordinal uint32) (string, time.Time) {
	at := now.UTC().Truncate(time.Microsecond)
	if floor := s.LastTime.Add(time.Microsecond); at.Before(floor) {
		at = floor.UTC()
	}
	return fmt.Sprintf("%s-%d-%d", at.Format("20060102T150405.000000Z"), s.Epoch, ordinal), at
}

// Claim begins a new epoch (P4). Attempts of older epochs can commit no more.
func (s *State) Claim() *State {
	n := s.clone()
	n.Epoch++
	n.Ordinal = 0
	n.Voided = nil
	n.Gone = false
	return n
}

// Commit is an attempt that is ready to be published.
type Commit struct {
	Attempt    Attempt
	Checkpoint Checkpoint
	Time       time.Time // the time in the checkpoint's id
	Borrows    []string  // ids of the checkpoints whose blobs it names
	Resumed    string    // attempt of the partial whose chunks it names, or ""
	Forget     []string  // stores that retention need not keep any more
	KeepLast   int       // retention; 0 or less keeps all
	Cleaned    []string  // dropped items whose blobs are gone
	Slot       uint64    // where the entry will stand
	Now        time.Time
}

// ErrDone says that the attempt is in the log already, by an earlier try whose answer was
// lost.
var ErrDone = errors.New("published already")

func (s *State) admit(c *Commit) error {
	if s.Names(c.Attempt) {
		return fmt.Errorf("attempt %s: %w", c.Attempt, ErrDone)
	}
	if s.Epoch != c.Attempt.Epoch {
		return fmt.Errorf("epoch %d: %w", c.Attempt.Epoch, sentinel.Fenced)
	}
	if slices.Contains(s.Voided, c.Attempt.String()) || c.Attempt.Ordinal <= s.Ordinal {
		return fmt.Errorf("attempt %s was given up for dead: %w", c.Attempt, sentinel.Conflict)
	}
	live := map[string]bool{}
	for _, l := range s.Live() {
		live[l.ID] = true
	}
	for _, b := range c.Borrows {
		if !live[b] {
			return fmt.Errorf("%s: %w", b, ErrBaseGone)
		}
	}
	if c.Resumed != "" && (s.Partial == nil || s.Partial.Attempt != c.Resumed) {
		return fmt.Errorf("unfinished upload %s: %w", c.Resumed, ErrBaseGone)
	}
	return nil
}

// follows is admit for what becomes a checkpoint: ids and sequences only grow (P1).
func (s *State) follows(c *Commit) error {
	if err := s.admit(c); err != nil {
		return err
	}
	if c.Checkpoint.Sequence <= s.Sequence || c.Checkpoint.ID <= s.LastID {
		return fmt.Errorf("checkpoint %s was begun before %s was known: %w", c.Checkpoint.ID, s.LastID, sentinel.Conflict)
	}
	return nil
}

// Commit publishes an attempt and applies retention in the same step (P5e).
func (s *State) Commit(c *Commit) (*State, error) {
	if err := s.follows(c); err != nil {
		return nil, err
	}
	n := s.clone()
	n.done(c)
	n.forget(c.Forget) // what older checkpoints were kept for; this one counts anew
	n.retain(c.Checkpoint)
	n.forgetCleaned(c.Cleaned)
	n.keepLast(c.KeepLast, c.Slot, c.Now)
	return n, nil
}

// Prepare makes an attempt permanent before the application publishes it (P6).
func (s *State) Prepare(c *Commit) (*State, error) {
	if err := s.follows(c); err != nil {
		return nil, err
	}
	n := s.clone()
	n.done(c)
	n.forgetCleaned(c.Cleaned)
	n.Prepared = append(n.Prepared, c.Checkpoint)
	return n, nil
}

// Confirm makes the prepared checkpoint id the newest retained one, and drops what
// was prepared before it (P6). One that is retained already, as after a crash between
// the two, stays where it is.
func (s *State) Confirm(id string, drop bool, forget, cleaned []string, keepLast int, slot uint64, now time.Time) (*State, error) {
	n := s.clone()
	n.forgetCleaned(cleaned)
	cp := s.Find(id)
	known := cp != nil
	if i := slices.IndexFunc(s.Prepared, func(c Checkpoint) bool { return c.ID == id }); i >= 0 {
		cp = &s.Prepared[i]
	}
	if cp == nil {
		return nil, fmt.Errorf("checkpoint %s was not prepared here: %w", id, sentinel.Conflict)
	}
	n.Prepared = slices.DeleteFunc(n.Prepared, func(c Checkpoint) bool {
		if c.ID == id {
			return true
		}
		lower := drop && c.Sequence < cp.Sequence
		if lower {
			n.drop(c, slot, now)
		}
		return lower
	})
	if known {
		return n, nil
	}
	n.forget(forget)
	n.retain(*cp)
	n.keepLast(keepLast, slot, now)
	return n, nil
}

// KeepPartial records how far an upload has come (P5g). It replaces an earlier one,
// whose chunks the new one must name too.
func (s *State) KeepPartial(a Attempt, p Partial, resumed string) (*State, error) {
	if err := s.admit(&Commit{Attempt: a, Resumed: resumed}); err != nil {
		return nil, err
	}
	n := s.clone()
	n.Partial = &p
	return n, nil
}

// Void makes attempts of the current epoch unable to commit (P9).
func (s *State) Void(attempts []string) *State {
	n := s.clone()
	for _, a := range attempts {
		if !slices.Contains(n.Voided, a) {
			n.Voided = append(n.Voided, a)
		}
	}
	return n
}

// Trim applies retention without a commit (P12).
func (s *State) Trim(keepLast int, forget []string, slot uint64, now time.Time) *State {
	n := s.clone()
	n.forget(forget)
	n.keepLast(keepLast, slot, now)
	return n
}

// AddHold pins a checkpoint (P10, P11).
func (s *State) AddHold(id, owner string, slot uint64, now time.Time) (*State, error) {
	n := s.clone()
	for _, c := range s.Live() {
		if c.ID == id {
			n.Holds = append(n.Holds, Hold{Checkpoint: c, Owner: owner, Slot: slot, At: now})
			return n, nil
		}
	}
	return nil, fmt.Errorf("hold %s: %w", id, ErrBaseGone)
}

// Release removes holds. A held checkpoint that is not retained any more is dropped
// by it.
func (s *State) Release(owners []string, slot uint64, now time.Time) *State {
	n := s.clone()
	var freed []Checkpoint
	n.Holds = slices.DeleteFunc(n.Holds, func(h Hold) bool {
		if !slices.Contains(owners, h.Owner) {
			return false
		}
		freed = append(freed, h.Checkpoint)
		return true
	})
	for _, c := range freed {
		alive := slices.ContainsFunc(n.Live(), func(l Checkpoint) bool { return l.ID == c.ID })
		if !alive && !slices.ContainsFunc(n.Dropped, func(d Dropped) bool { return d.ID == c.ID }) {
			n.drop(c, slot, now)
		}
	}
	return n
}

// Names tells whether a checkpoint of the attempt is, or was last, in the log.
func (s *State) Names(a Attempt) bool {
	own := a.String()
	return s.LastDone == own || slices.ContainsFunc(s.Live(), func(c Checkpoint) bool { return strings.HasPrefix(c.Blob.Key, own+"/") })
}

// CanCommit tells whether an attempt may still become a checkpoint (P8): of a blob
// of one that cannot, and that nothing names, everybody knows that it is dead.
func (s *State) CanCommit(a Attempt) bool {
	return a.Epoch > s.Epoch || a.Epoch == s.Epoch && a.Ordinal > s.Ordinal && !slices.Contains(s.Voided, a.String())
}

func (s *State) done(c *Commit) {
	s.Ordinal = c.Attempt.Ordinal
	s.LastDone = c.Attempt.String()
	s.LastID = c.Checkpoint.ID
	s.LastTime = c.Time
	s.Sequence = c.Checkpoint.Sequence
	s.Voided = nil // ordinals up to this one are dead without it
	s.Partial = nil
}

func (s *State) retain(c Checkpoint) {
	at := len(s.Retained)
	for at > 0 && s.Retained[at-1].Sequence > c.Sequence { // a late Confirm
		at--
	}
	s.Retained = slices.Insert(s.Retained, at, c)
	for _, name := range c.Stores {
		if old := s.Find(s.Holders[name]); old == nil || old.Sequence < c.Sequence {
			s.Holders[name] = c.ID
		}
	}
}

func (s *State) forget(stores []string) {
	for _, name := range stores {
		delete(s.Holders, name)
	}
}

func (s *State) forgetCleaned(ids []string) {
	s.Dropped = slices.DeleteFunc(s.Dropped, func(d Dropped) bool { return slices.Contains(ids, d.ID) })
}

// keepLast drops all but the newest n. The newest checkpoint of a store that later
// ones lack stays until that store is forgotten.
func (s *State) keepLast(n int, slot uint64, now time.Time) {
	if n <= 0 || len(s.Retained) <= n {
		return
	}
	keep := make(map[string]bool, len(s.Holders))
	for _, id := range s.Holders {
		keep[id] = true
	}
	old := slices.Clone(s.Retained[:len(s.Retained)-n])
	recent := s.Retained[len(s.Retained)-n:]
	var kept []Checkpoint
	for _, c := range old {
		if keep[c.ID] {
			kept = append(kept, c)
			continue
		}
		s.drop(c, slot, now)
	}
	s.Retained = append(kept, recent...)
}

func (s *State) drop(c Checkpoint, slot uint64, now time.Time) {
	s.Dropped = append(s.Dropped, Dropped{Checkpoint: c, Slot: slot, At: now.UTC()})
}
