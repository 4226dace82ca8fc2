package head

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/sentinel"
)

// A head stays small whatever a task retains: the newest checkpoints stand in the
// entry, older ones in write-once segments (P1).
const (
	inlineMax   = 96   // above it the oldest move out ...
	inlineLeft  = 64   // ... until so many are left
	segmentMax  = 1024 // checkpoints in a segment
	MaxBody     = 32 << 10
	segmentKind = "checkpoints"
)

// segment is one write-once piece of a list.
type segment[T any] struct {
	ref   Ref
	items []T
}

// wire is State as an entry holds it.
type wire struct {
	State
	RetainedSegments []Ref `json:"retained_segments,omitempty"`
	DroppedSegments  []Ref `json:"dropped_segments,omitempty"`
}

// Loaded is a state together with the segments it was read from, so that what did
// not change need not be written again.
type Loaded struct {
	State    *State
	retained []segment[Checkpoint]
	dropped  []segment[Dropped]
}

// Segments returns the blobs that the entry itself names besides checkpoint blobs.
func (l *Loaded) Segments() []Ref {
	var out []Ref
	for _, s := range l.retained {
		out = append(out, s.ref)
	}
	for _, s := range l.dropped {
		out = append(out, s.ref)
	}
	return out
}

// Load reads the body of an entry; get fetches a segment's blob.
func Load(body []byte, get func(Ref) ([]byte, error)) (*Loaded, error) {
	if len(body) == 0 {
		return &Loaded{State: (&State{}).clone()}, nil
	}
	w, err := decode(body)
	if err != nil {
		return nil, err
	}
	l := &Loaded{State: w.State.clone()}
	if l.retained, err = loadSegments[Checkpoint](w.RetainedSegments, get); err != nil {
		return nil, err
	}
	if l.dropped, err = loadSegments[Dropped](w.DroppedSegments, get); err != nil {
		return nil, err
	}
	l.State.Retained = append(flatten(l.retained), l.State.Retained...)
	l.State.Dropped = append(flatten(l.dropped), l.State.Dropped...)
	if c := l.State.Latest(); c != nil {
		for _, name := range c.Stores {
			l.State.Holders[name] = c.ID
		}
	}
	return l, nil
}

// laggards returns the holders that do not follow from the newest checkpoint.
func (s *State) laggards() map[string]string {
	newest := s.Latest()
	out := map[string]string{}
	for name, id := range s.Holders {
		if newest == nil || id != newest.ID {
			out[name] = id
		}
	}
	return out
}

// Encode returns the body of the entry that makes next the state, and what Load
// would give for it; put stores a segment's bytes and names it.
func (l *Loaded) Encode(next *State, put func([]byte) (Ref, error)) ([]byte, *Loaded, error) {
	n := &Loaded{State: next}
	w := wire{State: *next}
	var err error
	if n.retained, w.Retained, err = spill(l.retained, next.Retained, sameCheckpoint, put); err != nil {
		return nil, nil, err
	}
	if n.dropped, w.Dropped, err = spill(l.dropped, next.Dropped, sameDropped, put); err != nil {
		return nil, nil, err
	}
	w.RetainedSegments, w.DroppedSegments = refs(n.retained), refs(n.dropped)
	w.Holders = next.laggards()
	body, err := json.Marshal(&w)
	if err != nil {
		return nil, nil, fmt.Errorf("encode head: %w", err)
	}
	if len(body) > MaxBody {
		return nil, nil, fmt.Errorf("encode head: %d bytes, at most %d fit an entry: too many stores, holds or prepared checkpoints", len(body), MaxBody)
	}
	return body, n, nil
}

func sameCheckpoint(a, b Checkpoint) bool { return a.ID == b.ID }
func sameDropped(a, b Dropped) bool       { return a.ID == b.ID && a.Slot == b.Slot }

// spill cuts a list into segments and the part that stays inline. The segments of
// before are kept where their items are, in order, still there.
func spill[T any](old []segment[T], items []T, same func(a, b T) bool, put func([]byte) (Ref, error)) (segs []segment[T], inline []T, err error) {
	rest := items
	for _, s := range old {
		n := 0 // items of this segment that survive; lists only lose items, or grow at the end
		for _, it := range s.items {
			if n < len(rest) && same(it, rest[n]) {
				n++
			}
		}
		if n == len(s.items) {
			segs = append(segs, s)
		} else if n > 0 {
			if segs, err = appendSegment(segs, rest[:n], put); err != nil {
				return nil, nil, err
			}
		}
		rest = rest[n:]
	}
	for len(rest) > inlineMax || oversize(rest) {
		out := max(1, min(len(rest)-inlineLeft, segmentMax))
		if oversize(rest) {
			out = max(out, min(len(rest)/2, segmentMax))
		}
		move := rest[:out]
		if last := len(segs) - 1; last >= 0 && len(segs[last].items)+len(move) <= segmentMax {
			move = append(append([]T(nil), segs[last].items...), move...)
			segs = segs[:last:last]
		}
		if segs, err = appendSegment(segs, move, put); err != nil {
			return nil, nil, err
		}
		rest = rest[out:]
	}
	return segs, rest, nil
}

// oversize tells whether a list of many items would crowd the entry out, as the
// items of tasks with many stores do.
func oversize[T any](items []T) bool {
	if len(items) == 0 {
		return false
	}
	b, err := json.Marshal(items)
	return err == nil && len(b) > MaxBody*2/5
}

func appendSegment[T any](segs []segment[T], items []T, put func([]byte) (Ref, error)) ([]segment[T], error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, it := range items {
		if err := enc.Encode(it); err != nil {
			return nil, fmt.Errorf("encode segment of the head: %w", err)
		}
	}
	ref, err := put(frame.Encode(segmentKind, 1, b.Bytes()))
	if err != nil {
		return nil, err
	}
	return append(segs, segment[T]{ref, append([]T(nil), items...)}), nil
}

func loadSegments[T any](refs []Ref, get func(Ref) ([]byte, error)) ([]segment[T], error) {
	var out []segment[T]
	for _, ref := range refs {
		data, err := get(ref)
		if err != nil {
			return nil, fmt.Errorf("read segment %s of the head: %w", ref.Key, err)
		}
		if frame.Digest(data) != ref.Digest {
			return nil, fmt.Errorf("read segment %s of the head: %w: not the bytes that were written", ref.Key, sentinel.Corrupt)
		}
		payload, err := frame.Decode(segmentKind, 1, data)
		if err != nil {
			return nil, fmt.Errorf("read segment %s of the head: %w", ref.Key, err)
		}
		seg := segment[T]{ref: ref}
		for dec := json.NewDecoder(bytes.NewReader(payload)); dec.More(); {
			var it T
			if err := dec.Decode(&it); err != nil {
				return nil, fmt.Errorf("read segment %s of the head: %w: %v", ref.Key, sentinel.Corrupt, err)
			}
			seg.items = append(seg.items, it)
		}
		out = append(out, seg)
	}
	return out, nil
}

func flatten[T any](segs []segment[T]) []T {
	var out []T
	for _, s := range segs {
		out = append(out, s.items...)
	}
	return out
}

func refs[T any](segs []segment[T]) []Ref {
	var out []Ref
	for _, s := range segs {
		out = append(out, s.ref)
	}
	return out
}
