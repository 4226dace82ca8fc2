package snapshot

import (
	"errors"
	"strings"
	"testing"
)

func dir(path string) Entry  { return Entry{Path: path, Type: Dir} }
func file(path string) Entry { return Entry{Path: path, ChunkSize: MinChunkSize} }
func link(path, first string) Entry {
	return Entry{Path: path, Link: first}
}
func symlink(path, target string) Entry { return Entry{Path: path, Type: Symlink, Link: target} }

// data makes a file of the smallest cells from pairs of offset and length.
func data(size int64, pairs ...int64) Entry {
	e := Entry{Path: "f", Size: size, ChunkSize: MinChunkSize}
	for i := 0; i < len(pairs); i += 2 {
		e.Chunks = append(e.Chunks, Chunk{Offset: pairs[i], Length: uint32(pairs[i+1]), Location: Location{Blob: "b", Stored: uint32(pairs[i+1])}})
	}
	return e
}

// with changes an entry.
func with(e Entry, change func(e *Entry)) Entry {
	change(&e)
	return e
}

func place(l Location) func(*Entry) {
	return func(e *Entry) { e.Chunks[0].Location = l }
}

const cell = MinChunkSize

var longName = strings.Repeat("n", MaxName)

// refusals are what may not be in an index, and the words that say so.
var refusals = []struct {
	name    string
	entries []Entry
	want    string
}{
	{"absolute", []Entry{file("/a")}, "absolute"},
	{"dot dot", []Entry{file("..")}, `component ".."`},
	{"dot dot within", []Entry{dir("a"), file("a/../b")}, `component ".."`},
	{"dot dot at the end", []Entry{dir("a"), dir("a/..")}, `component ".."`},
	{"dot dot after shared bytes", []Entry{dir("a"), file("a/."), file("a/..")}, `component "."`},
	{"dot dot continues a name", []Entry{dir("a"), file("a/-"), file("a/..")}, `component ".."`},
	{"dot", []Entry{file(".")}, `component "."`},
	{"double slash", []Entry{dir("a"), file("a//b")}, "empty component"},
	{"trailing slash", []Entry{dir("a"), dir("a/")}, "empty component"},
	{"NUL", []Entry{file("a\x00b")}, "NUL"},
	{"long component", []Entry{file(longName + "n")}, "component of 256 bytes"},
	{"long path", append(deep(15), dir(deep(16)[15].Path+"d")), "path of 4096 bytes"},
	{"twice", []Entry{file("a"), file("a")}, "twice"},
	{"root twice", []Entry{dir(""), dir("")}, "twice"},
	{"unsorted", []Entry{file("b"), file("a")}, "not sorted"},
	{"child before parent", []Entry{dir("a"), file("a/b"), dir("a-")}, "not sorted"},
	{"root not first", []Entry{file("a"), dir("")}, "not sorted"},
	{"root is a file", []Entry{file("")}, "root is a file"},
	{"parent missing", []Entry{file("a/b")}, "parent directory is missing"},
	{"grandparent only", []Entry{dir("a"), file("a/b/c")}, "parent directory is missing"},
	{"parent is a prefix only", []Entry{dir("a"), file("ab/c")}, "parent directory is missing"},
	{"parent is a file", []Entry{file("a"), file("a/b")}, "parent is a file"},
	{"parent is a symlink", []Entry{symlink("a", "/etc"), file("a/b")}, "parent is a symlink"},
	{"type", []Entry{{Path: "a", Type: 3}}, "unknown type"},
	{"mode", []Entry{{Path: "a", Type: Dir, Mode: 0o10000}}, "mode"},
	{"nanoseconds", []Entry{{Path: "a", Type: Dir, MTime: Time{0, 1e9}}}, "nanoseconds"},
	{"negative nanoseconds", []Entry{{Path: "a", Type: Dir, MTime: Time{0, -1}}}, "nanoseconds"},
	{"user", []Entry{{Path: "a", Type: Dir, User: longName + "u"}}, "user or group"},
	{"group", []Entry{{Path: "a", Type: Dir, Group: longName + "u"}}, "user or group"},
	{"xattr without name", []Entry{{Path: "a", Type: Dir, Xattrs: []Xattr{{}}}}, "bad name"},
	{"xattr name with NUL", []Entry{{Path: "a", Type: Dir, Xattrs: []Xattr{{Name: "a\x00"}}}}, "bad name"},
	{"xattr name too long", []Entry{{Path: "a", Type: Dir, Xattrs: []Xattr{{Name: longName + "x"}}}}, "bad name"},
	{"xattrs unsorted", []Entry{{Path: "a", Type: Dir, Xattrs: []Xattr{{Name: "b"}, {Name: "a"}}}}, "out of order"},
	{"xattr twice", []Entry{{Path: "a", Type: Dir, Xattrs: []Xattr{{Name: "a"}, {Name: "a"}}}}, "occurs twice"},
	{"xattr too big", []Entry{{Path: "a", Type: Dir, Xattrs: []Xattr{{Name: "a", Value: make([]byte, MaxXattrValue+1)}}}}, "at most 65536"},
	{"xattrs too big", []Entry{{Path: "a", Type: Dir, Xattrs: manyXattrs(17)}}, "at most 1048576"},
	{"symlink to nothing", []Entry{symlink("a", "")}, "target"},
	{"symlink with NUL", []Entry{symlink("a", "b\x00")}, "target"},
	{"symlink too long", []Entry{symlink("a", strings.Repeat("x", MaxPath+1))}, "link of 4096 bytes"},
	{"symlink with size", []Entry{with(symlink("a", "b"), func(e *Entry) { e.Size = 1 })}, "no content of its own"},
	{"directory with link", []Entry{{Path: "a", Type: Dir, Link: "b"}}, "directory with a link"},
	{"directory with chunk size", []Entry{{Path: "a", Type: Dir, ChunkSize: cell}}, "no content of its own"},
	{"hard link to itself", []Entry{link("a", "a")}, "no earlier entry"},
	{"hard link to later", []Entry{link("a", "b"), file("b")}, "no earlier entry"},
	{"hard link to nothing", []Entry{file("a"), link("b", "../../etc/passwd")}, "no earlier entry"},
	{"hard link to link", []Entry{file("a"), link("b", "a"), link("c", "b")}, "not the first name"},
	{"hard link to directory", []Entry{dir("a"), link("b", "a")}, "not the first name"},
	{"hard link to symlink", []Entry{symlink("a", "x"), link("b", "a")}, "not the first name"},
	{"hard link with chunks", []Entry{file("a"), with(data(5, 0, 5), func(e *Entry) { e.Link = "a" })}, "no content of its own"},
	{"no chunk size", []Entry{{Path: "a"}}, "chunk size 0"},
	{"small chunk size", []Entry{{Path: "a", ChunkSize: MinChunkSize - HoleAlign}}, "chunk size"},
	{"large chunk size", []Entry{{Path: "a", ChunkSize: MaxChunkSize + HoleAlign}}, "chunk size"},
	{"odd chunk size", []Entry{{Path: "a", ChunkSize: MinChunkSize + 1}}, "chunk size"},
	{"negative size", []Entry{data(-1)}, "out of bounds"},
	{"sum of sizes", []Entry{data(MaxTotalSize), with(data(1, 0, 1), func(e *Entry) { e.Path = "g" })}, "out of bounds"},
	{"chunks missing", []Entry{data(5)}, "missing"},
	{"chunks missing at the end", []Entry{data(2*cell, 0, cell)}, "missing"},
	{"chunks missing at the begin", []Entry{data(2*cell, cell, cell)}, "missing"},
	{"hole a byte too short", []Entry{data(cell+64<<10-1, 0, cell)}, "too short for a hole"},
	{"hole begins unaligned", []Entry{data(100<<10, 0, 100)}, "misaligned for a hole"},
	{"hole ends unaligned", []Entry{data(128<<10, 100<<10+1, 12<<10-1)}, "misaligned for a hole"},
	{"overlap", []Entry{data(2*cell, 0, cell, cell-1, cell)}, "overlaps"},
	{"out of order", []Entry{data(2*cell, cell, cell, 0, cell)}, "missing"},
	{"going back", []Entry{data(3*cell, 0, cell, cell, cell, 0, cell)}, "out of order"},
	{"negative offset", []Entry{data(cell, -1, cell)}, "out of order"},
	{"empty chunk", []Entry{data(cell, 0, 0, 0, cell)}, "empty"},
	{"beyond the size", []Entry{data(cell-1, 0, cell)}, "beyond the size"},
	{"two cells", []Entry{data(2*cell, 0, 2*cell)}, "cross"},
	{"half cells", []Entry{data(cell, 0, cell/2, cell/2, cell/2)}, "misaligned"},
	{"no blob", []Entry{with(data(5, 0, 5), place(Location{Stored: 5}))}, "blob key"},
	{"blob key too long", []Entry{with(data(5, 0, 5), place(Location{Blob: strings.Repeat("k", MaxBlobKey+1), Stored: 5}))}, "blob key"},
	{"blob key leaves", []Entry{with(data(5, 0, 5), place(Location{Blob: "a/../b", Stored: 5}))}, "blob key"},
	{"stored length", []Entry{with(data(5, 0, 5), place(Location{Blob: "b", Stored: 4}))}, "raw bytes stored"},
	{"end of pack", []Entry{with(data(5, 0, 5), place(Location{Blob: "b", Stored: 5, Offset: MaxPackSize - 4}))}, "in its pack"},
}

// I6: no path leaves the target, and sizes and counts are bounded.
func TestValidateRefuses(t *testing.T) {
	for _, tt := range refusals {
		err := (&Index{Entries: tt.entries}).Validate()
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want ErrCorrupt with %q", tt.name, err, tt.want)
		}
	}
}

// deep makes a chain of directories whose names are as long as they may be.
func deep(n int) []Entry {
	var entries []Entry
	path := ""
	for i := range n {
		name := strings.Repeat("d", MaxName)
		if i > 0 {
			name = "/" + name
		}
		path += name
		entries = append(entries, dir(path))
	}
	return entries
}

func manyXattrs(n int) []Xattr {
	var list []Xattr
	for i := range n {
		list = append(list, Xattr{Name: "user." + string(rune('a'+i)), Value: make([]byte, MaxXattrValue)})
	}
	return list
}

func TestValidateRefusesHead(t *testing.T) {
	long := strings.Repeat("x", MaxLabel+1)
	for name, x := range map[string]*Index{
		"job": {Job: long}, "task": {Task: long}, "store": {Store: long}, "checkpoint": {Checkpoint: long},
		"prev": {Prev: strings.Repeat("x", MaxBlobKey+1)}, "borrows": {Borrows: []string{""}},
		"many borrows": {Borrows: make([]string, MaxBorrows+1)},
	} {
		if err := x.Validate(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValidateUnknownEncoding(t *testing.T) {
	e := with(data(5, 0, 5), place(Location{Blob: "b", Stored: 3, Encoding: Zstd + 1}))
	if err := (&Index{Entries: []Entry{e}}).Validate(); !errors.Is(err, ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}

// A compressed chunk is shorter than what it stands for.
func TestValidateCompressed(t *testing.T) {
	for stored, want := range map[uint32]error{0: ErrCorrupt, 1: nil, 4: nil, 5: ErrCorrupt, 1 << 31: ErrCorrupt} {
		e := with(data(5, 0, 5), place(Location{Blob: "b", Stored: stored, Encoding: Zstd}))
		if err := (&Index{Entries: []Entry{e}}).Validate(); !errors.Is(err, want) {
			t.Errorf("%d bytes: got %v, want %v", stored, err, want)
		}
	}
}

func TestValidateAccepts(t *testing.T) {
	name := strings.Repeat("d", MaxName)
	tests := map[string][]Entry{
		"nothing":               nil,
		"root only":             {dir("")},
		"no root":               {file("a")},
		"names around slash":    {dir("a"), dir("a "), file("a -"), file("a!"), file("a/b"), dir("a/c"), file("a/c/d"), file("a0")},
		"names with odd bytes":  {file("\x01\xff"), file("..."), file("..a"), file("a\\b"), file("~")},
		"longest path":          append(deep(15), dir(deep(15)[14].Path+"/"+name[:MaxName])),
		"hole at the begin":     {data(96<<10, 80<<10, cell)},
		"hole at the end":       {data(cell+64<<10, 0, cell)},
		"hole to an odd end":    {data(cell+64<<10+1, 0, cell)},
		"hole within":           {data(128<<10, 0, cell, 96<<10, cell, 112<<10, cell)},
		"only a hole":           {data(MaxTotalSize)},
		"chunk around hole":     {data(100<<10, 0, 4096, 72<<10, 8<<10, 80<<10, cell, 96<<10, 4096)},
		"further names":         {dir("a"), file("a/a"), link("b", "a/a"), link("c", "a/a")},
		"symlink out":           {symlink("a", "/etc/passwd"), symlink("b", "../../x")},
		"largest pack position": {with(data(5, 0, 5), place(Location{Blob: "b", Stored: 5, Offset: MaxPackSize - 5}))},
	}
	for name, entries := range tests {
		if err := (&Index{Entries: entries}).Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for seed := range uint64(200) {
		if err := randomIndex(seed).Validate(); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
}
