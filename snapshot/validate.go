package snapshot

import (
	"fmt"
	"sort"
	"strings"
)

// Validate reports the first rule of the format that x breaks, as ErrCorrupt with the path
// and the rule, or nil. An index that passes names nothing outside the directory it is
// restored to, has no loops, and its sizes and counts are within the limits of this package.
func (x *Index) Validate() error {
	if err := x.checkHead(); err != nil {
		return fmt.Errorf("validate index: %w", err)
	}
	v := validator{entries: x.Entries}
	for i := range x.Entries {
		if err := v.check(i); err != nil {
			return fmt.Errorf("validate index: %q: %w", x.Entries[i].Path, err)
		}
	}
	return nil
}

func corruptf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
}

func (x *Index) checkHead() error {
	labels := []struct{ what, text string }{
		{"job", x.Job}, {"task", x.Task}, {"store", x.Store}, {"checkpoint id", x.Checkpoint},
	}
	for _, l := range labels {
		if len(l.text) > MaxLabel {
			return corruptf("%s of %d bytes, at most %d are allowed", l.what, len(l.text), MaxLabel)
		}
	}
	if len(x.Prev) > MaxBlobKey {
		return corruptf("previous index named by %d bytes, at most %d are allowed", len(x.Prev), MaxBlobKey)
	}
	if len(x.Borrows) > MaxBorrows {
		return corruptf("borrows from %d checkpoints, at most %d are allowed", len(x.Borrows), MaxBorrows)
	}
	for _, id := range x.Borrows {
		if id == "" || len(id) > MaxLabel {
			return corruptf("borrows from %.200q, which is no checkpoint id", id)
		}
	}
	if len(x.Entries) > MaxEntries {
		return corruptf("%d entries, at most %d are allowed", len(x.Entries), MaxEntries)
	}
	return nil
}

// validator carries from entry to entry what the rules need to know of earlier ones.
type validator struct {
	entries []Entry
	open    ancestors
	blob    string // the key that was found good last
	bytes   int64
	chunks  int
}

func (v *validator) check(i int) error {
	e := &v.entries[i]
	if err := v.checkPath(i); err != nil {
		return err
	}
	if err := checkMeta(e); err != nil {
		return err
	}
	if err := v.checkLink(i); err != nil {
		return err
	}
	if e.Type != Regular || e.IsLink() {
		if e.Size != 0 || e.ChunkSize != 0 || len(e.Chunks) != 0 {
			return corruptf("size or chunks on a %s that has no content of its own", e.Type)
		}
		return nil
	}
	return v.checkContent(e)
}

func (v *validator) checkPath(i int) error {
	path := v.entries[i].Path
	parent := v.open.enter(v.entries, i)
	shared := v.open.shared
	if i > 0 {
		prev := v.entries[i-1].Path
		if shared == len(path) && shared == len(prev) {
			return corruptf("path occurs twice")
		}
		if shared == len(path) || shared < len(prev) && prev[shared] > path[shared] {
			return corruptf("entries are not sorted: it follows %q", prev)
		}
	}
	if path == "" {
		if v.entries[i].Type != Dir {
			return corruptf("the root is a %s", v.entries[i].Type)
		}
		return nil
	}
	if err := checkPathText(path, shared); err != nil {
		return err
	}
	if parent >= 0 && v.entries[parent].Type != Dir {
		return corruptf("parent is a %s", v.entries[parent].Type)
	}
	if parent < 0 && strings.IndexByte(path, '/') >= 0 {
		return corruptf("parent directory is missing")
	}
	return nil
}

// checkPathText checks the form of a path whose first bytes it shares with a good one.
func checkPathText(path string, shared int) error {
	if len(path) > MaxPath {
		return corruptf("path of %d bytes, at most %d are allowed", len(path), MaxPath)
	}
	if path[0] == '/' {
		return corruptf("path is absolute")
	}
	rest := path[strings.LastIndexByte(path[:shared], '/')+1:]
	if strings.IndexByte(rest, 0) >= 0 {
		return corruptf("path contains NUL")
	}
	for more := true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		switch {
		case name == "":
			return corruptf("path has an empty component")
		case name == "." || name == "..":
			return corruptf("path has a component %q", name)
		case len(name) > MaxName:
			return corruptf("path has a component of %d bytes, at most %d are allowed", len(name), MaxName)
		}
	}
	return nil
}

func checkMeta(e *Entry) error {
	switch {
	case e.Type > Symlink:
		return corruptf("unknown type %d", e.Type)
	case e.Mode&^0o7777 != 0:
		return corruptf("mode %#o has bits beyond 07777", e.Mode)
	case e.MTime.Nsec < 0 || e.MTime.Nsec >= 1e9:
		return corruptf("time has %d nanoseconds", e.MTime.Nsec)
	case len(e.User) > MaxOwnerName || len(e.Group) > MaxOwnerName:
		return corruptf("name of user or group is longer than %d bytes", MaxOwnerName)
	case len(e.Xattrs) > 0:
		return checkXattrs(e.Xattrs)
	}
	return nil
}

func checkXattrs(xattrs []Xattr) error {
	total := 0
	for i, a := range xattrs {
		if a.Name == "" || len(a.Name) > MaxName || strings.IndexByte(a.Name, 0) >= 0 {
			return corruptf("bad name of an extended attribute: %.300q", a.Name)
		}
		if i > 0 && xattrs[i-1].Name >= a.Name {
			return corruptf("extended attribute %q is out of order or occurs twice", a.Name)
		}
		if len(a.Value) > MaxXattrValue {
			return corruptf("extended attribute %q has %d bytes, at most %d are allowed", a.Name, len(a.Value), MaxXattrValue)
		}
		total += len(a.Name) + len(a.Value)
	}
	if total > MaxXattrBytes {
		return corruptf("extended attributes of %d bytes, at most %d are allowed", total, MaxXattrBytes)
	}
	return nil
}

func (v *validator) checkLink(i int) error {
	e := &v.entries[i]
	if len(e.Link) > MaxPath {
		return corruptf("link of %d bytes, at most %d are allowed", len(e.Link), MaxPath)
	}
	switch {
	case e.Type == Symlink && (e.Link == "" || strings.IndexByte(e.Link, 0) >= 0):
		return corruptf("symbolic link with the target %q", e.Link)
	case e.Type == Dir && e.Link != "":
		return corruptf("directory with a link")
	case !e.IsLink():
		return nil
	}
	earlier := v.entries[:i]
	at, ok := sort.Find(len(earlier), func(i int) int { return strings.Compare(e.Link, earlier[i].Path) })
	if !ok {
		return corruptf("hard link to %q, which is no earlier entry", e.Link)
	}
	if first := &earlier[at]; first.Type != Regular || first.IsLink() {
		return corruptf("hard link to %q, which is not the first name of a file", e.Link)
	}
	return nil
}

func (v *validator) checkContent(e *Entry) error {
	if e.ChunkSize < MinChunkSize || e.ChunkSize > MaxChunkSize || e.ChunkSize%HoleAlign != 0 {
		return corruptf("chunk size %d", e.ChunkSize)
	}
	if e.Size < 0 || e.Size > MaxTotalSize-v.bytes {
		return corruptf("size %d, or the sum of all sizes, is out of bounds", e.Size)
	}
	v.bytes += e.Size
	if v.chunks += len(e.Chunks); v.chunks > MaxChunks {
		return corruptf("more than %d chunks in the index", MaxChunks)
	}
	pos := int64(0)
	for i := range e.Chunks {
		c := &e.Chunks[i]
		if err := checkChunk(e, c, pos); err != nil {
			return fmt.Errorf("chunk %d at %d: %w", i, c.Offset, err)
		}
		if err := v.checkLocation(&c.Location, c.Length); err != nil {
			return fmt.Errorf("chunk %d at %d: %w", i, c.Offset, err)
		}
		pos = c.Offset + int64(c.Length)
	}
	return checkHole(e, pos, e.Size)
}

// checkChunk checks a chunk against the file and against pos, where the one before ends.
func checkChunk(e *Entry, c *Chunk, pos int64) error {
	cell := int64(e.ChunkSize)
	switch {
	case c.Offset < pos:
		return corruptf("overlaps the chunk before it or is out of order")
	case c.Length == 0:
		return corruptf("empty")
	case c.Offset > e.Size-int64(c.Length):
		return corruptf("%d bytes lie beyond the size %d", c.Length, e.Size)
	case c.Offset%cell+int64(c.Length) > cell:
		return corruptf("%d bytes cross a multiple of the chunk size %d", c.Length, cell)
	case c.Offset == pos && pos%cell != 0:
		return corruptf("misaligned: touches the chunk before it within a cell of %d bytes", cell)
	}
	return checkHole(e, pos, c.Offset)
}

// checkHole checks the hole between two offsets; there is none if they are equal.
func checkHole(e *Entry, from, to int64) error {
	switch {
	case from == to:
		return nil
	case to-from < MinHoleSize:
		return corruptf("chunks are missing from %d to %d: too short for a hole", from, to)
	case from%HoleAlign != 0 || to%HoleAlign != 0 && to != e.Size:
		return corruptf("chunks are missing from %d to %d: misaligned for a hole", from, to)
	}
	return nil
}

func (v *validator) checkLocation(l *Location, length uint32) error {
	if err := l.checkStored(length); err != nil {
		return err
	}
	if l.Blob == v.blob && l.Blob != "" {
		return nil
	}
	v.blob = l.Blob
	return checkKey(l.Blob)
}

// checkStored checks all but the key of where a chunk of this length is stored.
func (l *Location) checkStored(length uint32) error {
	switch {
	case l.Encoding > Zstd:
		return fmt.Errorf("%w: chunk encoding %d", ErrUnsupported, l.Encoding)
	case l.Encoding == Raw && l.Stored != length:
		return corruptf("%d raw bytes stored for %d", l.Stored, length)
	case l.Encoding == Zstd && (l.Stored == 0 || l.Stored >= length):
		return corruptf("%d compressed bytes stored for %d", l.Stored, length)
	case uint64(l.Offset)+uint64(l.Stored) > MaxPackSize:
		return corruptf("lies at %d in its pack, beyond %d", l.Offset, MaxPackSize)
	}
	return nil
}

// checkKey checks the form of a blob's key.
func checkKey(key string) error {
	if key == "" || len(key) > MaxBlobKey {
		return corruptf("blob key of %d bytes, 1 to %d are allowed", len(key), MaxBlobKey)
	}
	for rest, more := key, true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		if name == "" || name == "." || name == ".." || strings.IndexByte(name, 0) >= 0 {
			return corruptf("blob key %q has a component %q", key, name)
		}
	}
	return nil
}

// ancestors finds the parent of each entry of a sorted list without a map. It is fed the
// entries in order and keeps those whose paths begin the current one. That is more than
// the directories above it: "a", "a-b", "a/c" is the sorted order, and "a" must not be
// forgotten at "a-b".
type ancestors struct {
	stack  []int // indexes of the entries, paths growing
	prev   string
	shared int // bytes that the current path has in common with the one before
}

// enter goes on to entry i and returns the index of its parent, or -1 if there is none.
func (a *ancestors) enter(entries []Entry, i int) int {
	path := entries[i].Path
	a.shared = commonPrefix(a.prev, path)
	a.prev = path
	for len(a.stack) > 0 && len(entries[a.stack[len(a.stack)-1]].Path) > a.shared {
		a.stack = a.stack[:len(a.stack)-1]
	}
	parent := -1
	want := max(strings.LastIndexByte(path, '/'), 0)
	for j := len(a.stack) - 1; j >= 0 && parent < 0; j-- {
		n := len(entries[a.stack[j]].Path)
		if n < want {
			break
		}
		if n == want {
			parent = a.stack[j]
		}
	}
	a.stack = append(a.stack, i)
	return parent
}

func commonPrefix(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
