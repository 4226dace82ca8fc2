package snapstore

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// file makes an entry of a file with the given content.
func file(name string, data []byte) snapshot.Entry {
	e := snapshot.Entry{Path: name, Mode: fileMode, Size: int64(len(data)), ChunkSize: ChunkSize}
	for offset, length := range cells(e.Size) {
		p := data[offset : offset+int64(length)]
		e.Chunks = append(e.Chunks, snapshot.Chunk{Offset: offset, Length: length, Digest: snapshot.Sum(p), Location: location(length)})
	}
	return e
}

func directory(name string) snapshot.Entry {
	return snapshot.Entry{Path: name, Type: snapshot.Dir, Mode: dirMode}
}

// sealed makes a manifest that says what it is told, and is right in all digests.
func sealed(t testing.TB, meta any, x *snapshot.Index, tail string) []byte {
	t.Helper()
	head, err := json.Marshal(meta)
	must(t, err)
	object, _, err := snapshot.Encode(x, indexKey, nil)
	must(t, err)
	return frame.Encode(manifestKind, manifestVersion, append(append(append(head, '\n'), object...), tail...))
}

// Decode(Encode(x)) is x, and the id is the digest of all bytes.
func TestManifest(t *testing.T) {
	x := &snapshot.Index{Entries: []snapshot.Entry{file("a", noise(1, 2*ChunkSize+1)), directory("d"), file("d/b", nil)}}
	data, id, err := EncodeManifest(metaAt(9), x)
	must(t, err)
	m, err := DecodeManifest(data)
	must(t, err)
	if diff := cmp.Diff(&Manifest{ID: id, Meta: metaAt(9), Index: x}, m); diff != "" {
		t.Error(diff)
	}
	if id.Digest != snapshot.Sum(data) || id.Term != 3 || id.Index != 9 || m.Bytes() != 2*ChunkSize+1 {
		t.Errorf("id %v, %d bytes", id, m.Bytes())
	}
	for i := range data { // every bit counts
		data[i] ^= 4
		if _, err := DecodeManifest(data); err == nil {
			t.Fatalf("byte %d does not matter", i)
		}
		data[i] ^= 4
	}
}

// A manifest of the first format, as it was written: it must be readable for ever.
func TestManifestGolden(t *testing.T) {
	x := &snapshot.Index{Entries: []snapshot.Entry{file("000004.log", []byte("some bytes")), directory("d"), file("d/empty", nil)}}
	golden := filepath.Join("testdata", "manifest-1")
	if os.Getenv("SNAPSTORE_WRITE_GOLDEN") != "" {
		data, _, err := EncodeManifest(metaAt(9), x)
		must(t, err)
		must(t, os.MkdirAll("testdata", 0o755))
		must(t, os.WriteFile(golden, data, 0o644))
	}
	data, err := os.ReadFile(golden)
	must(t, err)
	m, err := DecodeManifest(data)
	must(t, err)
	if diff := cmp.Diff(&Manifest{ID: m.ID, Meta: metaAt(9), Index: x}, m); diff != "" {
		t.Error(diff)
	}
	if want := "0000000000000003-0000000000000009-" + snapshot.Sum(data).String(); m.ID.String() != want {
		t.Errorf("id %s, want %s", m.ID, want)
	}
}

// What is well formed and right in its digests, but not what this package writes, is
// ErrCorrupt: names that leave the directory, links, holes, another program's places.
func TestHostileManifests(t *testing.T) {
	change := func(do func(e *snapshot.Entry)) []snapshot.Entry {
		e := file("a", noise(1, 100))
		do(&e)
		return []snapshot.Entry{e}
	}
	hole := file("h", noise(1, 3*ChunkSize))
	hole.Chunks = hole.Chunks[:2:2]
	bad := map[string][]snapshot.Entry{
		"symbolic link": {{Path: "l", Type: snapshot.Symlink, Mode: 0o777, Link: "/etc"}},
		"hard link":     {file("a", nil), {Path: "b", Mode: fileMode, Link: "a"}},
		"root":          {directory("")},
		"mode":          change(func(e *snapshot.Entry) { e.Mode = 0o4755 }),
		"owner":         change(func(e *snapshot.Entry) { e.UID = 1 }),
		"time":          change(func(e *snapshot.Entry) { e.MTime.Nsec = 1 }),
		"xattr":         change(func(e *snapshot.Entry) { e.Xattrs = []snapshot.Xattr{{Name: "user.x"}} }),
		"elsewhere":     change(func(e *snapshot.Entry) { e.Chunks[0].Blob = "other" }),
		"offset":        change(func(e *snapshot.Entry) { e.Chunks[0].Location.Offset = 8 }),
		"cells":         change(func(e *snapshot.Entry) { e.ChunkSize = snapshot.MinChunkSize }),
		"hole":          {hole},
		"only a hole":   {{Path: "h", Mode: fileMode, Size: 1 << 60, ChunkSize: ChunkSize}},
	}
	for what, entries := range bad {
		x := &snapshot.Index{Entries: entries}
		_, err := DecodeManifest(sealed(t, metaAt(1), x, ""))
		if err == nil {
			t.Errorf("%s: accepted", what)
			continue
		}
		wantErr(t, err, ErrCorrupt)
		if _, _, err := EncodeManifest(metaAt(1), x); err == nil {
			t.Errorf("%s: written", what)
		}
	}
	x := &snapshot.Index{Entries: []snapshot.Entry{file("a", nil)}}
	named := &snapshot.Index{Entries: x.Entries, Job: "j"}
	dated := &snapshot.Index{Entries: x.Entries, Created: time.Unix(1, 0)}
	for what, data := range map[string][]byte{
		"index 0":      sealed(t, protocol.Meta{Term: 1}, x, ""),
		"term 0":       sealed(t, protocol.Meta{Index: 1}, x, ""),
		"no object":    sealed(t, "text", x, ""),
		"bytes follow": sealed(t, metaAt(1), x, "tail"),
		"job":          sealed(t, metaAt(1), named, ""),
		"date":         sealed(t, metaAt(1), dated, ""),
		"huge meta":    sealed(t, protocol.Meta{Group: strings.Repeat("x", maxMeta), Term: 1, Index: 1}, x, ""),
		"no index":     frame.Encode(manifestKind, manifestVersion, []byte("{}\n")),
		"no line":      frame.Encode(manifestKind, manifestVersion, []byte("{}")),
		"another kind": frame.Encode("marks", 1, nil),
		"nothing":      nil,
		"too long":     make([]byte, MaxManifest+1),
	} {
		if _, err := DecodeManifest(data); err == nil {
			t.Errorf("%s: accepted", what)
		} else {
			wantErr(t, err, ErrCorrupt)
		}
	}
	// What the codec refuses to write is met only as bytes: put other names in their place.
	for _, name := range []string{"../up", "/rooted", "aa//bb", "aa/../b", "nn\x00nn", "./here"} {
		good := sealed(t, metaAt(1), &snapshot.Index{Entries: []snapshot.Entry{file(strings.Repeat("n", len(name)), nil)}}, "")
		payload := bytes.ReplaceAll(good[bytes.IndexByte(good, '\n')+1:], bytes.Repeat([]byte("n"), len(name)), []byte(name))
		if _, err := DecodeManifest(frame.Encode(manifestKind, manifestVersion, payload)); err == nil {
			t.Errorf("%q: accepted", name)
		}
	}
}

// A newer format is told from damage.
func TestManifestOfTheFuture(t *testing.T) {
	_, err := DecodeManifest(frame.Encode(manifestKind, manifestVersion+1, []byte("whatever")))
	wantErr(t, err, snapshot.ErrUnsupported)
}

// FuzzManifest: whatever comes in, what is accepted is safe, and is what is written for it.
func FuzzManifest(f *testing.F) {
	x := &snapshot.Index{Entries: []snapshot.Entry{file("a", noise(1, 200)), directory("d"), file("d/b", nil)}}
	data, _, err := EncodeManifest(metaAt(9), x)
	must(f, err)
	payload := data[bytes.IndexByte(data, '\n')+1:]
	f.Add(payload)
	f.Add(sealed(f, metaAt(1), &snapshot.Index{}, "tail"))
	f.Add([]byte("{}\n"))
	f.Fuzz(func(t *testing.T, payload []byte) {
		data := frame.Encode(manifestKind, manifestVersion, payload)
		m, err := DecodeManifest(data)
		if err != nil {
			return
		}
		if err := m.Index.Validate(); err != nil {
			t.Fatal(err)
		}
		for i := range m.Index.Entries {
			if e := &m.Index.Entries[i]; !filepath.IsLocal(e.Path) || e.Type == snapshot.Symlink || e.Link != "" {
				t.Fatalf("%+v", e)
			}
		}
		if _, _, err := EncodeManifest(m.Meta, m.Index); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzJournal: any bytes give claims within bounds, and what is kept can be gone on with.
func FuzzJournal(f *testing.F) {
	id := snapshot.Sum([]byte("x"))
	good := appendRecord(appendRecord(newJournal(id), id, 3), id, 4)
	f.Add(good, 5)
	f.Add(good[:len(good)-3], 5)
	f.Add(good, 4)
	f.Add([]byte("SFRECPT1"), 1)
	f.Fuzz(func(t *testing.T, data []byte, n int) {
		n = max(0, min(n, snapshot.MaxChunks))
		got := map[uint32]bool{}
		keep := readJournal(data, id, n, func(k uint32) {
			if int64(k) >= int64(n) {
				t.Fatalf("chunk %d of %d", k, n)
			}
			got[k] = true
		})
		if keep < 0 || keep > int64(len(data)) || keep > 0 && (keep-int64(journalHeader))%recordLen != 0 {
			t.Fatalf("keeps %d of %d", keep, len(data))
		}
		if keep == 0 || n == 0 {
			return
		}
		more, found := appendRecord(data[:keep:keep], id, uint32(n-1)), false
		readJournal(more, id, n, func(k uint32) { found = found || k == uint32(n-1) })
		if !found {
			t.Fatal("a record that follows is lost")
		}
	})
}

// The records of a journal, one by one: what does not check is passed over.
func TestJournal(t *testing.T) {
	id := snapshot.Sum([]byte("x"))
	data := newJournal(id)
	for k := range uint32(5) {
		data = appendRecord(data, id, k)
	}
	data[journalHeader+2*recordLen+5] ^= 1
	var got []uint32
	keep := readJournal(append(data, 1, 2, 3), id, 4, func(k uint32) { got = append(got, k) })
	if diff := cmp.Diff([]uint32{0, 1, 3}, got); diff != "" || keep != int64(len(data)) {
		t.Errorf("%s, keeps %d of %d", diff, keep, len(data))
	}
	if keep := readJournal(data, snapshot.Sum(nil), 4, func(uint32) { t.Error("claims of another manifest") }); keep != 0 {
		t.Errorf("keeps %d", keep)
	}
}
