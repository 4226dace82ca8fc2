package snapshot

import (
	"bytes"
	"iter"
	"slices"
	"strings"
)

// Compare yields what happened to every path between two indexes, in the order of the
// paths, unchanged ones included. old may be nil: then everything is added.
func Compare(old, new *Index) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		a, b := entriesOf(old), entriesOf(new)
		for len(a) > 0 || len(b) > 0 {
			var c Change
			switch order := firstOrder(a, b); {
			case order < 0:
				c = Change{Kind: Removed, Old: &a[0]}
				a = a[1:]
			case order > 0:
				c = Change{Kind: Added, New: &b[0]}
				b = b[1:]
			default:
				c = Change{Kind: kindOf(&a[0], &b[0]), Old: &a[0], New: &b[0]}
				a, b = a[1:], b[1:]
			}
			if !yield(c) {
				return
			}
		}
	}
}

func entriesOf(x *Index) []Entry {
	if x == nil {
		return nil
	}
	return x.Entries
}

// firstOrder compares the first paths of two lists; the end of a list comes last.
func firstOrder(a, b []Entry) int {
	switch {
	case len(a) == 0:
		return 1
	case len(b) == 0:
		return -1
	}
	return strings.Compare(a[0].Path, b[0].Path)
}

func kindOf(a, b *Entry) ChangeKind {
	switch {
	case !sameContent(a, b):
		return ContentChanged
	case !sameMeta(a, b):
		return MetaChanged
	}
	return Unchanged
}

func sameContent(a, b *Entry) bool {
	return a.Type == b.Type && a.Size == b.Size && a.ChunkSize == b.ChunkSize && a.Link == b.Link &&
		slices.EqualFunc(a.Chunks, b.Chunks, func(p, q Chunk) bool {
			return p.Offset == q.Offset && p.Length == q.Length && p.Digest == q.Digest
		})
}

func sameMeta(a, b *Entry) bool {
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID && a.User == b.User && a.Group == b.Group &&
		a.MTime == b.MTime && slices.EqualFunc(a.Xattrs, b.Xattrs, func(p, q Xattr) bool {
		return p.Name == q.Name && bytes.Equal(p.Value, q.Value)
	})
}

// Apply returns old with the changes made to its entries: Apply(a, Compare(a, b)) has the
// entries of b, and so it has when the changes that say Unchanged are left out, save that
// chunks then stay where they were stored. Changes come in the order of their paths. Everything but
// the entries is taken from old, which may be nil and is not changed.
func Apply(old *Index, changes iter.Seq[Change]) *Index {
	x := &Index{}
	if old != nil {
		*x = *old
	}
	rest := x.Entries
	x.Entries = make([]Entry, 0, len(rest))
	for c := range changes {
		path := c.Path()
		n := 0
		for n < len(rest) && rest[n].Path < path {
			n++
		}
		x.Entries = append(x.Entries, rest[:n]...)
		rest = rest[n:]
		if len(rest) > 0 && rest[0].Path == path {
			rest = rest[1:]
		}
		if c.New != nil {
			x.Entries = append(x.Entries, *c.New)
		}
	}
	x.Entries = append(x.Entries, rest...)
	return x
}

// Filter returns x with the entries that keep wants and the directories that lead to them.
// Where a hard-link group loses its first name, the first name that remains takes the
// content over. x must be valid and is not changed; chunks and xattrs are shared with it.
func Filter(x *Index, keep func(path string) bool) *Index {
	kept := wanted(x.Entries, keep)
	y := *x
	y.Entries = nil
	promoted := map[string]string{} // first name that is not kept -> name that took over
	for i := range x.Entries {
		if !kept[i] {
			continue
		}
		e := x.Entries[i]
		if e.IsLink() {
			x.relink(&e, kept, promoted)
		}
		y.Entries = append(y.Entries, e)
	}
	return &y
}

// relink mends a further name of a group for a tree in which the first one may be gone.
func (x *Index) relink(e *Entry, kept []bool, promoted map[string]string) {
	i, _ := slices.BinarySearchFunc(x.Entries, e.Link, func(f Entry, path string) int {
		return strings.Compare(f.Path, path)
	})
	if kept[i] {
		return
	}
	first := &x.Entries[i]
	if name, ok := promoted[first.Path]; ok {
		e.Link = name
		return
	}
	promoted[first.Path] = e.Path
	e.Link, e.Size, e.ChunkSize, e.Chunks = "", first.Size, first.ChunkSize, first.Chunks
}

// wanted marks the entries that keep wants and their ancestors. Children follow their
// parents, so one pass from the end carries the marks up.
func wanted(entries []Entry, keep func(path string) bool) []bool {
	kept := make([]bool, len(entries))
	parent := make([]int32, len(entries))
	var open ancestors
	for i := range entries {
		parent[i] = int32(open.enter(entries, i))
		kept[i] = keep(entries[i].Path)
	}
	for i := len(entries) - 1; i >= 0; i-- {
		if kept[i] && parent[i] >= 0 {
			kept[parent[i]] = true
		}
	}
	return kept
}
