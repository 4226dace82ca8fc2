package snapferry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/head"
	"github.com/snapferry/snapferry/snapshot"
)

// I6: whatever is damaged in a repository, nothing is put in place that was not checked,
// and verify tells where.

// patient is a repository of which single objects are damaged.
type patient struct {
	*world
	mem    *memblob.Driver
	first  *CommitReport
	latest *CommitReport
	opened *Repo // before the damage
	healed map[string][]byte
}

func newPatient(t *testing.T, commits int) *patient {
	p := &patient{mem: memblob.New(), healed: map[string][]byte{}}
	p.world = newWorldOn(t, p.mem)
	p.opts.KeepLast, p.opts.CacheDir = KeepAll, ""
	p.write(map[string]string{"big": bulk(1, 200_000), "d/small": "small", "e/x": bulk(2, 3000)})
	task := p.open()
	p.first = p.mustCommit(task, map[string]string{"in": "0"})
	for i := range commits - 1 {
		p.write(map[string]string{"d/small": fmt.Sprint("small", i), "new": bulk(3, 5000)})
		p.latest = p.mustCommit(task, map[string]string{"in": fmt.Sprint(i)})
	}
	p.opened = p.repo()
	return p
}

// damage replaces an object by what change makes of it until the returned function is
// called; nil removes it.
func (p *patient) damage(key string, change func([]byte) []byte) (heal func()) {
	p.t.Helper()
	old, err := p.blobs.ReadAll(p.t.Context(), key, 0, -1)
	check(p.t, err)
	if change == nil {
		check(p.t, p.mem.Delete(p.t.Context(), []string{key}))
		return func() { check(p.t, p.mem.Put(p.t.Context(), key, blob.Bytes(old), blob.PutOptions{})) }
	}
	check(p.t, p.mem.Corrupt(key, change))
	return func() { check(p.t, p.mem.Corrupt(key, func([]byte) []byte { return old })) }
}

// harms are ways to damage an object; want is what reading it says.
type harm struct {
	name   string
	change func([]byte) []byte
	want   error
}

func harms(size int) []harm {
	var out []harm
	step := max(1, size/40)
	for i := 0; i < size; i += step {
		out = append(out, harm{fmt.Sprint("flip ", i), func(b []byte) []byte { b[i] ^= 1 << (i % 8); return b }, ErrCorrupt})
	}
	for _, n := range []int{0, 1, size / 2, size - 1} {
		out = append(out, harm{fmt.Sprint("cut to ", n), func(b []byte) []byte { return b[:n] }, ErrCorrupt})
	}
	return append(out, harm{"zeroed", func(b []byte) []byte { clear(b); return b }, ErrCorrupt},
		harm{"other", func(b []byte) []byte { return []byte("<html>not found</html>") }, ErrCorrupt},
		harm{"absent", nil, ErrCorrupt})
}

// newer makes the object one of a format that is not known yet.
func newer(b []byte) []byte {
	if head, rest, ok := bytes.Cut(b, []byte(" 1 ")); ok && bytes.HasPrefix(b, []byte("snapferry ")) {
		return slices.Concat(head, []byte(" 9 "), rest)
	}
	b[8] = 9 // docs/format.md: the version follows the magic
	return b
}

// tryRestore restores the newest checkpoint and checks that it is whole or absent.
func (p *patient) tryRestore() error {
	p.t.Helper()
	out := filepath.Join(p.t.TempDir(), "kv")
	_, err := p.opened.Restore(p.t.Context(), kvTask, At{}, map[string]string{"kv": out}, nil)
	if err == nil {
		wantSameTree(p.t, out, p.dir)
		return nil
	}
	if _, serr := os.Lstat(out); !errors.Is(serr, fs.ErrNotExist) {
		p.t.Fatalf("restore failed (%v) and left a target", err)
	}
	return err
}

// object is one class of what a repository is made of.
type object struct {
	name    string
	key     func(p *patient) string
	skip    []string // harms that it does not notice
	version bool     // it may be replaced by one of a newer format
}

var objects = []object{
	{name: "chunk", key: func(p *patient) string { return p.chunkOf(p.latest.Checkpoint, "big").Blob }},
	{name: "index", key: func(p *patient) string { return p.indexOf(p.latest.Checkpoint).Key }},
	{name: "checkpoint", key: func(p *patient) string { return blobPrefix(kvTask) + p.state().Latest().Blob.Key }},
	{name: "entry", key: func(p *patient) string { k := p.keys("log/"); return k[len(k)-1] }, version: true, skip: []string{"absent"}},
	{name: "bind", key: func(*patient) string { return bindKey(kvTask) }, version: true},
}

func (p *patient) indexOf(id string) marker {
	p.t.Helper()
	cp, err := p.opened.Show(p.t.Context(), kvTask, at(p.t, id))
	check(p.t, err)
	m, err := parseMarker(cp.Stores["kv"].Marker)
	check(p.t, err)
	return m
}

// Each class of object, damaged in each way: restore fails with ErrCorrupt and leaves no
// target, verify names the object, and a healed one restores again.
func TestI6Damage(t *testing.T) {
	p := newPatient(t, 3)
	for _, o := range objects {
		t.Run(o.name, func(t *testing.T) {
			p.t = t
			key := o.key(p)
			data, err := p.blobs.ReadAll(t.Context(), key, 0, -1)
			check(t, err)
			for _, h := range harms(len(data)) {
				if slices.Contains(o.skip, h.name) {
					continue
				}
				p.t = t
				heal := p.damage(key, h.change)
				p.wantDamage(o, key, h)
				heal()
			}
			if o.version {
				heal := p.damage(key, newer)
				if err := p.tryRestore(); !errors.Is(err, ErrUnsupported) {
					t.Errorf("newer version: restore = %v", err)
				}
				heal()
			}
			check(t, p.tryRestore())
		})
	}
	p.t = t
	p.wantSound()
}

func (p *patient) wantDamage(o object, key string, h harm) {
	p.t.Helper()
	err := p.tryRestore()
	if o.name == "chunk" && err == nil {
		// A byte that the newest checkpoint does not need; verify finds it all the same.
	} else if !errors.Is(err, h.want) && !(o.name == "bind" && h.name == "absent" && err == nil) { // the log is here, so it is whose it was
		p.t.Errorf("%s: restore = %v, want %v", h.name, err, h.want)
	}
	rep, err := p.opened.Verify(p.t.Context(), VerifyOptions{ReadData: true})
	check(p.t, err)
	places := slices.Concat(rep.Missing, rep.Corrupt)
	named := slices.ContainsFunc(places, func(d Damage) bool {
		return d.Blob == key || o.name == "entry" && strings.HasPrefix(key, d.Blob)
	})
	if rep.OK || !named {
		p.t.Errorf("%s: verify = %+v, want one that names %s", h.name, rep, key)
	}
	if h.name == "absent" && len(rep.Missing) == 0 {
		p.t.Errorf("absent: nothing is missing in %+v", rep)
	}
}

// verify tells exactly which bytes of which file are damaged, and a file that shares the
// pack is not blamed.
func TestI6VerifyTellsTheExactPlace(t *testing.T) {
	p := newPatient(t, 2)
	c := p.chunkOf(p.latest.Checkpoint, "e/x")
	defer p.damage(c.Blob, func(b []byte) []byte { b[int(c.Location.Offset)+7] ^= 4; return b })()
	rep, err := p.opened.Verify(t.Context(), VerifyOptions{ReadData: true})
	check(t, err)
	if len(rep.Missing) != 0 || len(rep.Corrupt) != 1 {
		t.Fatalf("verify = %+v", rep)
	}
	d := rep.Corrupt[0]
	if d.Blob != c.Blob || d.Path != "e/x" || d.Offset != 0 || d.Length != 3000 || d.Store != "kv" {
		t.Fatalf("damage = %+v", d)
	}
	if quick, err := p.opened.Verify(t.Context(), VerifyOptions{}); err != nil || !quick.OK {
		t.Fatalf("verify of presence and size = %+v, %v", quick, err)
	}
	if err := p.tryRestore(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "e/x") || !strings.Contains(err.Error(), c.Blob) {
		t.Fatalf("restore = %v, want one that names blob and file", err)
	}
}

// A cut pack shows without reading data.
func TestI6VerifyChecksSizes(t *testing.T) {
	p := newPatient(t, 2)
	c := p.chunkOf(p.latest.Checkpoint, "big")
	defer p.damage(c.Blob, func(b []byte) []byte { return b[:len(b)-1] })()
	rep, err := p.opened.Verify(t.Context(), VerifyOptions{})
	if err != nil || rep.OK || len(rep.Corrupt) == 0 {
		t.Fatalf("verify = %+v, %v", rep, err)
	}
}

// The object that says what the repository is.
func TestI6RepoObject(t *testing.T) {
	p := newPatient(t, 2)
	data, err := p.blobs.ReadAll(t.Context(), repoKey, 0, -1)
	check(t, err)
	for _, h := range harms(len(data)) {
		want := h.want
		if h.name == "absent" {
			want = ErrNotFound
		}
		heal := p.damage(repoKey, h.change)
		if _, err := OpenRepo(t.Context(), p.blobs, p.cps, nil); !errors.Is(err, want) {
			t.Errorf("%s: OpenRepo = %v, want %v", h.name, err, want)
		}
		if _, err := Open(t.Context(), kvTask, p.blobs, p.cps, nil); !errors.Is(err, want) {
			t.Errorf("%s: Open = %v, want %v", h.name, err, want)
		}
		heal()
	}
	defer p.damage(repoKey, newer)()
	if _, err := OpenRepo(t.Context(), p.blobs, p.cps, nil); !errors.Is(err, ErrUnsupported) {
		t.Errorf("newer: OpenRepo = %v", err)
	}
	if _, _, err := Ensure(t.Context(), p.blobs); !errors.Is(err, ErrUnsupported) {
		t.Errorf("newer: Ensure = %v", err)
	}
}

// A long head has segments; damage there is found like any other.
func TestI6HeadSegment(t *testing.T) {
	p := newPatient(t, 110)
	v := &view{id: kvTask, blobs: p.blobs, log: p.cps.Log(kvTask)}
	_, l, err := v.head(t.Context())
	check(t, err)
	if len(l.Segments()) == 0 {
		t.Fatal("the head has no segments")
	}
	key := blobPrefix(kvTask) + l.Segments()[0].Key
	for _, h := range []harm{{"flip", flip, ErrCorrupt}, {"cut", func(b []byte) []byte { return b[:len(b)/2] }, ErrCorrupt}, {"absent", nil, ErrCorrupt}} {
		heal := p.damage(key, h.change)
		if err := p.tryRestore(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), filepath.Base(key)) {
			t.Errorf("%s: restore = %v", h.name, err)
		}
		if _, err := Open(t.Context(), kvTask, p.blobs, p.cps, &p.opts); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: Open = %v", h.name, err)
		}
		rep, err := p.opened.Verify(t.Context(), VerifyOptions{})
		if err != nil || rep.OK {
			t.Errorf("%s: verify = %+v, %v", h.name, rep, err)
		}
		if _, err := p.opened.GC(t.Context(), GCOptions{}); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: gc = %v", h.name, err)
		}
		heal()
	}
	check(t, p.tryRestore())
	p.wantSound()
}

// With damage among what is alive gc does not know what is dead, and deletes nothing.
func TestI6GCDeletesNothingOnDamage(t *testing.T) {
	p := newPatient(t, 3)
	for _, key := range []string{p.indexOf(p.first.Checkpoint).Key, blobPrefix(kvTask) + p.state().Latest().Blob.Key, p.keys("log/")[len(p.keys("log/"))-1]} {
		for _, h := range []harm{{"flip", func(b []byte) []byte { b[30] ^= 1; return b }, nil}, {"cut", func(b []byte) []byte { return b[:9] }, nil}, {"newer", newer, nil}} {
			heal := p.damage(key, h.change)
			before := p.keys("")
			if rep, err := p.opened.GC(t.Context(), GCOptions{}); err == nil {
				t.Errorf("%s %s: gc = %+v", key, h.name, rep)
			}
			if after := p.keys(""); len(after) != len(before) {
				t.Errorf("%s %s: gc deleted %d objects", key, h.name, len(before)-len(after))
			}
			heal()
		}
	}
	p.wantSound()
}

// A damaged checkpoint does not stop the next backup, which is whole: what would have been
// reused from it is sent again.
func TestI6BackupGoesOnAfterDamage(t *testing.T) {
	for name, key := range map[string]func(p *patient) string{
		"newest index":      func(p *patient) string { return p.indexOf(p.latest.Checkpoint).Key },
		"newest checkpoint": func(p *patient) string { return blobPrefix(kvTask) + p.state().Latest().Blob.Key },
		"older index":       func(p *patient) string { return p.indexOf(p.first.Checkpoint).Key },
		"older checkpoint":  func(p *patient) string { return blobPrefix(kvTask) + p.state().Retained[0].Blob.Key },
	} {
		for _, change := range []func([]byte) []byte{flip, nil} {
			t.Run(fmt.Sprint(name, " absent=", change == nil), func(t *testing.T) {
				p := newPatient(t, 3)
				p.damage(key(p), change)
				p.write(map[string]string{"more": bulk(7, 10_000)})
				rep, err := p.commit(t.Context(), p.open(), nil)
				check(t, err)
				wantSameTree(t, p.restore(rep.Checkpoint), p.dir)
			})
		}
	}
}

// What is newer than this program is readable as far as it is known, and is not written.
func TestI6NewerFormatIsNotWritten(t *testing.T) {
	p := newPatient(t, 2)
	for _, key := range []string{repoKey, bindKey(kvTask), p.keys("log/")[len(p.keys("log/"))-1]} {
		heal := p.damage(key, newer)
		before := p.keys("")
		if _, err := Open(t.Context(), kvTask, p.blobs, p.cps, &p.opts); !errors.Is(err, ErrUnsupported) {
			t.Errorf("%s: Open = %v", key, err)
		}
		if after := p.keys(""); len(after) != len(before) {
			t.Errorf("%s: Open wrote %d objects", key, len(after)-len(before))
		}
		heal()
	}
}

// A newer program may have written the newest checkpoint: its blob or index is
// ErrUnsupported and no damage, while older checkpoints can be restored.
func TestI6NewerCheckpoint(t *testing.T) {
	for _, part := range []string{"checkpoint", "index"} {
		t.Run(part, func(t *testing.T) {
			p := newPatient(t, 2)
			p.reviseLatest(func(b *checkpointBlob) []byte {
				if part == "index" {
					b.Stores["kv"] = p.newerIndex(b.Stores["kv"])
				}
				payload, err := json.Marshal(b)
				check(t, err)
				version := map[string]int{"checkpoint": 2, "index": 1}[part]
				return frame.Encode("checkpoint", version, payload)
			})
			if err := p.tryRestore(); !errors.Is(err, ErrUnsupported) {
				t.Errorf("restore = %v", err)
			}
			if rep, err := p.opened.Verify(t.Context(), VerifyOptions{}); !errors.Is(err, ErrUnsupported) {
				t.Errorf("verify = %+v, %v", rep, err)
			}
			if _, err := p.opened.GC(t.Context(), GCOptions{}); !errors.Is(err, ErrUnsupported) {
				t.Errorf("gc = %v", err)
			}
			p.restore(p.first.Checkpoint)
		})
	}
}

// reviseLatest gives the newest checkpoint of the head another blob.
func (p *patient) reviseLatest(change func(*checkpointBlob) []byte) {
	p.t.Helper()
	v := &view{id: kvTask, blobs: p.blobs, log: p.cps.Log(kvTask)}
	check(p.t, v.amend(p.t.Context(), checkpoint.Release, func(s *head.State, _ uint64) (*head.State, error) {
		n := *s
		n.Retained = slices.Clone(s.Retained)
		c := n.Latest()
		b, err := v.checkpointBlob(p.t.Context(), c)
		if err != nil {
			return nil, err
		}
		data := change(b)
		c.Blob.Key += "9"
		c.Blob.Digest = frame.Digest(data)
		return &n, p.blobs.Put(p.t.Context(), blobPrefix(kvTask)+c.Blob.Key, blob.Bytes(data), blob.PutOptions{})
	}))
}

func (p *patient) newerIndex(s storeEntry) storeEntry {
	p.t.Helper()
	data, err := p.blobs.ReadAll(p.t.Context(), s.Index.Key, 0, s.Index.Size)
	check(p.t, err)
	const atDigest, header = 24, 56 // docs/format.md
	newer(data)
	sum := snapshot.Sum(slices.Concat(data[:atDigest], data[header:]))
	copy(data[atDigest:], sum[:])
	s.Index = marker{Key: s.Index.Key + "9", Size: s.Index.Size, Digest: sum.String()}
	check(p.t, p.blobs.Put(p.t.Context(), s.Index.Key, blob.Bytes(data), blob.PutOptions{}))
	return s
}
