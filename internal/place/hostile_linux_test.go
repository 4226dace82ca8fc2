package place

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// I6: an index that no Validate has seen cannot make anything outside the staging tree,
// change it, or read it into the tree. Every entry list here is hostile; all must fail, and
// leave the world as it was, the target included.
func TestHostileIndex(t *testing.T) {
	w := newWorld(t)
	build(t, w.path("outside"), literal{"secret": text("secret").perm(0o600), "dir": dir(0o755), "dir/keep": text("k")})
	outside := w.path("outside")
	payload := w.packs.put([]byte("payload"))
	file := func(p string) snapshot.Entry {
		return snapshot.Entry{Path: p, Mode: 0o4755, Size: 7, ChunkSize: snapshot.MinChunkSize, Chunks: []snapshot.Chunk{payload}}
	}
	link := func(p, to string) snapshot.Entry { return snapshot.Entry{Path: p, Type: snapshot.Symlink, Link: to} }
	hardLink := func(p, to string) snapshot.Entry { return snapshot.Entry{Path: p, Mode: 0o644, Link: to} }
	subdir := func(p string) snapshot.Entry { return snapshot.Entry{Path: p, Type: snapshot.Dir, Mode: 0o777} }
	at := func(off int64, length, stored uint32, size int64) snapshot.Entry {
		e := file("f")
		e.Size = size
		e.Chunks = []snapshot.Chunk{{Offset: off, Length: length, Digest: payload.Digest, Location: snapshot.Location{Blob: payload.Blob, Stored: stored}}}
		return e
	}
	zstd := file("f")
	zstd.Chunks = []snapshot.Chunk{payload}
	zstd.Chunks[0].Encoding = snapshot.Zstd + 1
	inflated := file("f")
	inflated.Chunks = []snapshot.Chunk{payload}
	inflated.Chunks[0].Encoding, inflated.Chunks[0].Stored = snapshot.Zstd, 8
	for name, entries := range map[string][]snapshot.Entry{
		"dots":                 {file("../escaped")},
		"dots in the middle":   {subdir("d"), file("d/../../../escaped")},
		"absolute":             {file(outside + "/escaped")},
		"empty component":      {subdir("d"), file("d//x")},
		"dot":                  {file("./x")},
		"empty name":           {file("")},
		"nul":                  {file("a\x00b")},
		"trailing slash":       {file("a/")},
		"directory outside":    {subdir("../escaped")},
		"directory is dots":    {subdir("..")},
		"symlink outside":      {link("../escaped", "x")},
		"through a symlink":    {link("l", outside), file("l/escaped")},
		"through a dir link":   {link("l", outside), subdir("l/escaped")},
		"onto a symlink":       {link("l", outside+"/secret"), file("l")},
		"onto a symlink after": {file("l"), link("l", outside+"/secret")},
		"link to outside":      {hardLink("h", "../../outside/secret")},
		"link to absolute":     {hardLink("h", outside+"/secret")},
		"link through symlink": {link("a", outside), hardLink("h", "a/secret")},
		"link deep through":    {link("a", outside), hardLink("h", "a/dir/keep")},
		"onto deep through":    {link("a", outside), link("a/dir/escaped", "x")},
		"link outside":         {file("a"), hardLink("../escaped", "a")},
		"link to nothing":      {hardLink("h", "h")},
		"link to a directory":  {subdir("d"), hardLink("h", "d")},
		"dir meta by symlink":  {link("l", outside+"/dir"), {Path: "l", Type: snapshot.Dir, Mode: 0}},
		"twice":                {file("a"), file("a")},
		"no parent":            {file("no/parent")},
		"parent is a file":     {file("a"), file("a/b")},
		"chunk past the end":   {at(100, 7, 7, 7)},
		"chunk before":         {at(-7, 7, 7, 7)},
		"chunk overflows":      {at(1<<63-1, 7, 7, 1<<63-1)},
		"chunk huge":           {at(0, 1<<31, 1<<31, 1<<32)},
		"chunk empty":          {at(0, 0, 0, 7)},
		"stored differs":       {at(0, 7, 9, 7)},
		"negative size":        {at(0, 7, 7, -1)},
		"size without end":     {{Path: "f", Size: -1}},
		"encoding":             {zstd},
		"compressed to more":   {inflated},
	} {
		t.Run(name, func(t *testing.T) {
			for _, target := range []string{"p/kv", "q/kv"} { // absent and there
				build(t, w.path("q/kv"), literal{"old": text("old")})
				before := listing(t, w.dir)
				x := &snapshot.Index{Entries: entries}
				if _, err := w.restore(x, w.path(target), nil); err == nil {
					t.Errorf("%s: no error", target)
				}
				for _, d := range []string{"p/.kv.snapferry", "q/.kv.snapferry"} {
					must(t, os.RemoveAll(w.path(d)))
				}
				os.Remove(w.path("p"))
				after := listing(t, w.dir)
				after["q"], before["q"] = "", ""
				after["."], before["."] = "", ""
				if d := cmp.Diff(before, after); d != "" {
					t.Errorf("%s: it changed (-was +is):\n%s", target, d)
				}
			}
		})
	}
}

// I6: neither way of resolving a path follows a link or enters a mount, in no component.
func TestTreeStaysInside(t *testing.T) {
	w := newWorld(t)
	build(t, w.path("outside"), literal{"dir/f": text("f")})
	build(t, w.path("in"), literal{"l": sym("../outside"), "self": sym("d"), "d/f": text("f"), "m/x": text("x")})
	mount(t, w.path("in/m"), "size=1m")
	must(t, os.Mkdir(w.path("in/m/d"), 0o755))
	in, err := openTree(w.path("in"), nil)
	must(t, err)
	defer in.close()
	for _, old := range []bool{false, true} {
		noOpenat2.Store(old)
		for _, p := range []string{"l", "l/dir", "l/dir/f", "self/f", "self", "m", "m/d", "../outside/dir", "d/../d/f", "/", "d/", "d//f"} {
			if fd, err := in.open(p, 0, 0); err == nil {
				unix.Close(fd)
				t.Errorf("old way %v: opened %q", old, p)
			}
			if err := in.mkdir(p + "/new"); err == nil {
				t.Errorf("old way %v: made a directory in %q", old, p)
			}
		}
		fd, err := in.open("d/f", 0, 0)
		must(t, err)
		unix.Close(fd)
	}
	noOpenat2.Store(false)
}

// A digest under which an index lists two lengths is only ever the bytes of one length.
func TestOneDigestTwoLengths(t *testing.T) {
	w := newWorld(t)
	c := w.packs.put([]byte("payload"))
	short := c
	short.Length, short.Stored = 3, 3
	x := &snapshot.Index{Entries: []snapshot.Entry{
		{Path: "a", Size: 7, ChunkSize: snapshot.MinChunkSize, Chunks: []snapshot.Chunk{c}},
		{Path: "b", Size: 3, ChunkSize: snapshot.MinChunkSize, Chunks: []snapshot.Chunk{short}}}}
	if _, err := w.restore(x, w.path("kv"), nil); err == nil {
		t.Error("no error")
	}
	x.Entries = x.Entries[:1]
	_, err := w.restore(x, w.path("kv"), nil)
	must(t, err)
}

// What a hostile user put into the old target cannot lead the restore outside either.
func TestHostileOldTarget(t *testing.T) {
	w := newWorld(t)
	src, x := w.source("src", small())
	build(t, w.path("outside"), literal{"keep": noise(1, 100_000), "dir/keep": text("k")})
	outside := listing(t, w.path("outside"))
	build(t, w.path("p/kv"), literal{"a": sym("../../outside/keep"), "d": sym("../../outside/dir"), "z": sym(w.path("outside"))})
	rep := w.mustRestore(src, x, w.path("p/kv"), nil)
	if rep.BytesReused != 0 {
		t.Errorf("read through a symbolic link: %+v", rep)
	}
	if d := cmp.Diff(outside, listing(t, w.path("outside"))); d != "" {
		t.Error(d)
	}
}
