package snapstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// pair is a store that has a snapshot and one that receives it.
type pair struct {
	testing.TB
	from, to *Store
	held     Held
	manifest []byte
}

func newPair(t testing.TB, tr tree) *pair {
	t.Helper()
	from := openStore(t, t.TempDir(), nil)
	return pairWith(t, from, makeHeld(t, from, 10, tr))
}

func pairWith(t testing.TB, from *Store, held Held) *pair {
	t.Helper()
	return &pair{TB: t, from: from, to: openStore(t, t.TempDir(), nil), held: held, manifest: manifestOf(t, from, held.ID)}
}

func (p *pair) receive() *Receipt {
	p.Helper()
	r, err := p.to.Receive(p.Context(), p.manifest)
	must(p, err)
	return r
}

// reopen restarts the receiver.
func (p *pair) reopen() {
	p.Helper()
	must(p, p.to.Close())
	p.to = openStore(p.TB, p.to.dir, nil)
}

func (p *pair) staging(name string) string {
	return filepath.Join(p.to.dir, "receive", p.held.ID.String(), name)
}

// chunky has several chunks in a file.
func chunky() tree {
	return tree{"big": noise(7, 3*ChunkSize+5), "more/one": noise(8, ChunkSize), "small": noise(9, 100), "none": nil}
}

// What a receipt has survives Close and a restart; what it had is verified and not fetched
// again, whether Reuse is called or not.
func TestResume(t *testing.T) {
	for _, reuse := range []bool{false, true} {
		p := newPair(t, chunky())
		r := p.receive()
		first := pull(t, p.from, r, 2*ChunkSize)
		_, err := r.Commit(t.Context())
		wantErr(t, err, ErrIncomplete)
		must(t, r.Close())
		must(t, r.Close())
		p.reopen()
		must(t, p.receive().Close()) // looks, and changes nothing
		r = p.receive()
		if reuse {
			n, err := r.Reuse(t.Context(), nil)
			must(t, err)
			if n != first {
				t.Errorf("reused %d bytes, had %d", n, first)
			}
		}
		if n := pull(t, p.from, r, -1); n != p.held.Bytes-first {
			t.Errorf("fetched %d of %d after %d", n, p.held.Bytes, first)
		}
		if held, err := r.Commit(t.Context()); err != nil || held.ID != p.held.ID {
			t.Fatalf("%v, %v", held.ID, err)
		}
		sameTree(t, p.to, p.held.ID, chunky())
		only(t, filepath.Join(p.to.dir, "receive"))
		only(t, filepath.Join(p.to.dir, p.held.ID.String()), "data", "manifest", "marks")
	}
}

// The journal is a hint: damaged bytes, a torn or foreign journal, or files that shrank are
// found, and their chunks are fetched again. Nothing unverified is ever installed.
func TestResumeTrustsNoJournal(t *testing.T) {
	tr := tree{"big": noise(7, ChunkSize+50_000), "small": noise(9, 100), "zero": nil}
	from := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, from, 10, tr)
	for what, damage := range map[string]func(p *pair){
		"flipped data":    func(p *pair) { flip(p, p.staging("data/big"), 5) },
		"cut data":        func(p *pair) { must(p, os.Truncate(p.staging("data/big"), ChunkSize+1)) },
		"missing data":    func(p *pair) { must(p, os.Remove(p.staging("data/big"))) },
		"longer data":     func(p *pair) { must(p, os.Truncate(p.staging("data/big"), 9*ChunkSize)) },
		"torn journal":    func(p *pair) { must(p, os.Truncate(p.staging("journal"), int64(journalHeader)+13)) },
		"flipped journal": func(p *pair) { flip(p, p.staging("journal"), int64(journalHeader)+1) },
		"foreign journal": func(p *pair) { flip(p, p.staging("journal"), 20) },
		"endless journal": func(p *pair) { must(p, os.Truncate(p.staging("journal"), 1<<20)) },
		"no journal":      func(p *pair) { must(p, os.Remove(p.staging("journal"))) },
		"flipped manifest": func(p *pair) {
			flip(p, p.staging("manifest"), 50)
		},
		"linked data": func(p *pair) { must(p, os.Link(p.staging("data/big"), p.staging("data/other"))) },
		"stray": func(p *pair) {
			must(p, os.Mkdir(p.staging("data/stray"), 0o755))
			must(p, os.WriteFile(p.staging("data/stray/f"), nil, 0o644))
		},
		"symbolic link": func(p *pair) { must(p, os.Symlink("/etc/passwd", p.staging("data/ln"))) },
		"directory for file": func(p *pair) {
			must(p, os.Remove(p.staging("data/big")))
			must(p, os.Mkdir(p.staging("data/big"), 0o755))
		},
	} {
		for _, pullBefore := range []bool{false, true} {
			t.Run(fmt.Sprint(what, pullBefore), func(t *testing.T) {
				p := pairWith(t, from, held)
				r := p.receive()
				pull(t, p.from, r, ChunkSize+1)
				must(t, r.Close())
				damage(p)
				r = p.receive()
				for range 3 { // claims that turn out wrong are missing after the first Commit
					if pullBefore {
						pull(t, p.from, r, -1)
					}
					_, err := r.Commit(t.Context())
					if err == nil {
						break
					}
					wantErr(t, err, ErrIncomplete)
					pull(t, p.from, r, -1)
				}
				sameTree(t, p.to, p.held.ID, tr)
			})
		}
	}
}

// Put takes the right bytes and no others, any number of times.
func TestPut(t *testing.T) {
	p := newPair(t, chunky())
	r := p.receive()
	pieces := r.Missing()
	good, err := p.from.Chunk(pieces[1].Digest)
	must(t, err)
	bad := slices.Clone(good)
	bad[len(bad)-1] ^= 1
	for _, data := range [][]byte{bad, good[:len(good)-1], append(slices.Clone(good), 0), nil} {
		wantErr(t, r.Put(pieces[1], data), ErrCorrupt)
	}
	if err := r.Put(Piece{Digest: snapshot.Digest{1}}, nil); err == nil {
		t.Error("a chunk of another snapshot is taken")
	}
	if got := r.Missing(); len(got) != len(pieces) {
		t.Errorf("%d of %d pieces are missing", len(got), len(pieces))
	}
	for range 2 {
		must(t, r.Put(pieces[1], good))
	}
	if got := r.Missing(); len(got) != len(pieces)-1 {
		t.Errorf("%d of %d pieces are missing", len(got), len(pieces))
	}
	must(t, r.Drop())
	must(t, r.Drop())
	wantErr(t, r.Put(pieces[1], good), ErrClosed)
	_, err = r.Commit(t.Context())
	wantErr(t, err, ErrClosed)
	_, err = r.Reuse(t.Context(), nil)
	wantErr(t, err, ErrClosed)
	only(t, filepath.Join(p.to.dir, "receive"))
}

// Many goroutines put the same pieces in any order while others ask what is missing.
func TestConcurrentPuts(t *testing.T) {
	tr := chunky()
	for i := range 200 { // more than stay open
		tr[fmt.Sprintf("many/%d", i)] = noise(uint64(1000+i), 2000)
	}
	tr["wide"] = append(noise(7, ChunkSize), noise(77, 3)...)
	p := newPair(t, tr)
	r := p.receive()
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Go(func() {
			list := r.Missing()
			for i := range list {
				piece := list[(i*7+w*31)%len(list)]
				data, err := p.from.Chunk(piece.Digest)
				if err == nil {
					err = r.Put(piece, data)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	pull(t, p.from, r, -1)
	if err := r.flush.Wait(); err != nil || r.countOpen(0) > 0 {
		t.Errorf("%d files are open, %v", r.countOpen(0), err)
	}
	_, err := r.Commit(t.Context())
	must(t, err)
	sameTree(t, p.to, p.held.ID, tr)
}

// A manifest that says one digest of two lengths is never fulfilled, and the right chunk is
// not written over its bounds.
func TestDigestOfTwoLengths(t *testing.T) {
	data := noise(1, 100)
	long, cut := file("a", data), file("b", data[:50])
	cut.Chunks[0].Digest = long.Chunks[0].Digest
	manifest, _, err := EncodeManifest(metaAt(1), &snapshot.Index{Entries: []snapshot.Entry{long, cut}})
	must(t, err)
	s := openStore(t, t.TempDir(), nil)
	r, err := s.Receive(t.Context(), manifest)
	must(t, err)
	must(t, r.Put(r.Missing()[0], data))
	wantErr(t, r.Put(r.Missing()[0], data[:50]), ErrCorrupt)
	_, err = r.Commit(t.Context())
	wantErr(t, err, ErrIncomplete)
	must(t, r.Drop())
}

// While one sender writes a chunk, another with the same one has nothing to do: the chunk is
// counted once, and the file flushed after all of them.
func TestSamePieceAtOnce(t *testing.T) {
	p := newPair(t, tree{"f": noise(7, ChunkSize+5)})
	writes, began, release := 0, make(chan bool), make(chan bool)
	s := openStore(t, t.TempDir(), &Options{Reserve: -1, around: func(op, name string, do func() error) error {
		if op == "write" && strings.HasSuffix(name, "data/f") {
			if writes++; writes == 1 {
				close(began)
				<-release
			}
		}
		return do()
	}})
	r, err := s.Receive(t.Context(), p.manifest)
	must(t, err)
	piece := r.Missing()[0]
	data, err := p.from.Chunk(piece.Digest)
	must(t, err)
	first := make(chan error)
	go func() { first <- r.Put(piece, data) }()
	<-began
	must(t, r.Put(piece, data))
	if writes != 1 {
		t.Errorf("%d writes", writes)
	}
	close(release)
	must(t, <-first)
	must(t, r.Drop())
}

// Files that are too many to stay open are flushed and closed between two chunks.
func TestFewOpenFiles(t *testing.T) {
	tr := chunky()
	tr["big2"] = noise(70, 2*ChunkSize)
	p := newPair(t, tr)
	r := p.receive()
	r.maxOpen = 0
	list := r.Missing()
	for i := range list { // from both ends in turn
		piece := list[i/2]
		if i%2 == 1 {
			piece = list[len(list)-1-i/2]
		}
		data, err := p.from.Chunk(piece.Digest)
		must(t, err)
		must(t, r.Put(piece, data))
		if n := r.countOpen(0); n > flushers {
			t.Errorf("%d files are open", n)
		}
	}
	_, err := r.Commit(t.Context())
	must(t, err)
	sameTree(t, p.to, p.held.ID, tr)
}

// A Work that refuses, at any moment, ends Reuse with its error and loses nothing: what it
// had not come to another Reuse brings.
func TestReuseEnds(t *testing.T) {
	p := newPair(t, chunky())
	r := p.receive()
	pull(t, p.from, r, 2*ChunkSize)
	must(t, r.Close())
	next := chunky()
	next["big"] = append(slices.Clone(next["big"][:2*ChunkSize]), noise(99, 10)...)
	second := makeHeld(t, p.from, 11, next)
	transfer(t, p.from, p.to, makeHeld(t, p.from, 9, tree{"small": next["small"], "odd": append([]byte{1}, next["more/one"]...)}).ID)
	state := t.TempDir()
	tree{"one": next["more/one"]}.build(t, state)
	refused := errors.New("refused")
	for i, ended := int64(1), true; ended; i += 3 {
		r, err := p.to.Receive(t.Context(), manifestOf(t, p.from, second.ID))
		must(t, err)
		var n atomic.Int64
		w := &Work{Wait: func(context.Context, int) error {
			if n.Add(1) >= i {
				return refused
			}
			return nil
		}}
		if _, err = r.Reuse(t.Context(), w, state); err == nil {
			ended = false
		} else {
			wantErr(t, err, refused)
		}
		if _, err = r.Reuse(t.Context(), nil, state); err != nil {
			t.Fatalf("refused at %d: %v", i, err)
		}
		if got := r.presentBytes(); got != 3*ChunkSize+100 {
			t.Errorf("refused at %d: %d bytes are here", i, got)
		}
		must(t, r.Close()) // the receipt of the first target has given what it had
	}
}

// One receipt of a snapshot at a time; none of one that is held.
func TestReceiveTwice(t *testing.T) {
	p := newPair(t, small())
	r := p.receive()
	_, err := p.to.Receive(t.Context(), p.manifest)
	wantErr(t, err, ErrBusy)
	pull(t, p.from, r, -1)
	_, err = r.Commit(t.Context())
	must(t, err)
	_, err = p.to.Receive(t.Context(), p.manifest)
	wantErr(t, err, fs.ErrExist)
	_, err = p.to.Receive(t.Context(), p.manifest[:100])
	wantErr(t, err, ErrCorrupt)
}

// A receipt whose snapshot is made here meanwhile gives that one.
func TestCommitMeetsTwin(t *testing.T) {
	p := newPair(t, small())
	r := p.receive()
	pull(t, p.from, r, -1)
	held := makeHeld(t, p.to, 10, small())
	got, err := r.Commit(t.Context())
	if err != nil || got.ID != held.ID {
		t.Fatalf("%v, %v", got.ID, err)
	}
	only(t, p.to.dir, "LOCK", "quarantine", "receive", held.ID.String())
	only(t, filepath.Join(p.to.dir, "receive"))
	sameTree(t, p.to, held.ID, small())
}

func linksOf(t testing.TB, name string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(name, &st))
	return uint64(st.Nlink)
}

// Whole files of a held snapshot are linked, under whatever name, without being read;
// single chunks of it are copied (R8.5, E.2).
func TestReuseHeld(t *testing.T) {
	p := newPair(t, chunky())
	transfer(t, p.from, p.to, p.held.ID)
	next := chunky()
	next["renamed"] = next["more/one"]
	delete(next, "more/one")
	next["big"] = append(slices.Clone(next["big"][:2*ChunkSize]), noise(99, 10)...)
	second := makeHeld(t, p.from, 11, next)
	m := &meter{}
	r, err := p.to.Receive(t.Context(), manifestOf(t, p.from, second.ID))
	must(t, err)
	reused, err := r.Reuse(t.Context(), m.work())
	must(t, err)
	if want := int64(3*ChunkSize + 100); reused != want {
		t.Errorf("reused %d bytes, want %d", reused, want)
	}
	if got := m.take(); got != 2*2*ChunkSize {
		t.Errorf("read and wrote %d bytes", got)
	}
	if n := pull(t, p.from, r, -1); n != 10 {
		t.Errorf("fetched %d bytes", n)
	}
	_, err = r.Commit(t.Context())
	must(t, err)
	sameTree(t, p.to, second.ID, next)
	dir, err := p.to.Dir(second.ID)
	must(t, err)
	if linksOf(t, filepath.Join(dir, "renamed")) != 2 || linksOf(t, filepath.Join(dir, "big")) != 1 {
		t.Error("linked what is to be copied, or the other way")
	}
	sameTree(t, p.to, p.held.ID, chunky())
}

// A file of a held snapshot that was written to since is read before it is linked, and what
// is wrong in it is fetched. What is written after the link is seen by Verify.
func TestReuseDamagedHeld(t *testing.T) {
	p := newPair(t, chunky())
	transfer(t, p.from, p.to, p.held.ID)
	next := chunky()
	next["new"] = []byte("new")
	second := makeHeld(t, p.from, 11, next)
	dir, err := p.to.Dir(p.held.ID)
	must(t, err)
	flip(t, filepath.Join(dir, "big"), ChunkSize+3)
	r, err := p.to.Receive(t.Context(), manifestOf(t, p.from, second.ID))
	must(t, err)
	_, err = r.Reuse(t.Context(), nil)
	must(t, err)
	if n := pull(t, p.from, r, -1); n != ChunkSize+3 {
		t.Errorf("fetched %d bytes", n)
	}
	flip(t, filepath.Join(dir, "more/one"), 3)
	_, err = r.Commit(t.Context())
	must(t, err)
	wantErr(t, p.to.Verify(t.Context(), second.ID, nil), ErrCorrupt)
	flip(t, filepath.Join(dir, "more/one"), 3)
	sameTree(t, p.to, second.ID, next)
}

// A receipt that was given up for a newer target gives its files and chunks to the next one
// (R8.2), and goes when that is held.
func TestReuseReceipt(t *testing.T) {
	p := newPair(t, chunky())
	r := p.receive()
	pull(t, p.from, r, 4*ChunkSize+5) // big, more/one
	must(t, r.Close())
	next := chunky()
	next["moved"] = next["more/one"]
	delete(next, "more/one")
	next["big"] = append(slices.Clone(next["big"][:2*ChunkSize]), noise(99, 10)...)
	second := makeHeld(t, p.from, 11, next)
	p.reopen()
	fetched, reused := transfer(t, p.from, p.to, second.ID)
	if fetched != 110 || reused != 3*ChunkSize {
		t.Errorf("fetched %d, reused %d", fetched, reused)
	}
	sameTree(t, p.to, second.ID, next)

	// It can be gone on with all the same: what was taken away is missing.
	r = p.receive()
	_, err := r.Reuse(t.Context(), nil)
	must(t, err)
	must(t, r.Close())
	_, err = p.to.Retire(func(id protocol.ID) bool { return id == p.held.ID })
	must(t, err)
	only(t, filepath.Join(p.to.dir, "receive"), p.held.ID.String())
	_, err = p.to.Retire(nil)
	must(t, err)
	only(t, filepath.Join(p.to.dir, "receive"))
}

// Extra directories: files of the same size or name are looked into and copied, never
// linked; others are not read, nor any further than they match.
func TestReuseExtra(t *testing.T) {
	tr := tree{"000012.sst": noise(1, 2*ChunkSize), "MANIFEST-1": noise(2, 3*ChunkSize), "000013.sst": noise(3, 50_000)}
	p := newPair(t, tr)
	state := filepath.Join(t.TempDir(), "state")
	tree{
		"db/000099.sst": tr["000012.sst"],                                    // the same bytes under another name
		"db/MANIFEST-1": append(slices.Clone(tr["MANIFEST-1"]), "longer"...), // written to since
		"db/other.sst":  noise(4, 2*ChunkSize),                               // the size, but other bytes
		"db/unlike":     noise(5, 9*ChunkSize),
		"store/LOCK":    nil,
	}.build(t, state)
	m := &meter{}
	r := p.receive()
	reused, err := r.Reuse(t.Context(), m.work(), state, filepath.Join(state, "none"))
	must(t, err)
	if want := int64(5 * ChunkSize); reused != want {
		t.Errorf("reused %d bytes, want %d", reused, want)
	}
	if read := m.take() - reused; read > 5*ChunkSize+ChunkSize+6 {
		t.Errorf("read %d bytes", read)
	}
	if n := pull(t, p.from, r, -1); n != 50_000 {
		t.Errorf("fetched %d bytes", n)
	}
	_, err = r.Commit(t.Context())
	must(t, err)
	dir, err := p.to.Dir(p.held.ID)
	must(t, err)
	if linksOf(t, filepath.Join(dir, "000012.sst")) != 1 {
		t.Error("a file of the state machine was linked")
	}
	sameTree(t, p.to, p.held.ID, tr)
}

// The store's own directory is no extra one, wherever it lies.
func TestReuseExtraLeavesStoreAlone(t *testing.T) {
	p := newPair(t, chunky())
	r := p.receive()
	lost := filepath.Join(p.to.dir, "lost")
	tree{"big": chunky()["big"]}.build(t, lost)
	if n, err := r.Reuse(t.Context(), nil, p.to.dir); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := r.Reuse(t.Context(), nil, lost); n != 3*ChunkSize+5 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	must(t, r.Drop())
}

// Staged files that share their bytes with a snapshot are never written to: a receipt that
// goes on after a restart makes them anew.
func TestResumeNeverWritesToLinks(t *testing.T) {
	p := newPair(t, chunky())
	transfer(t, p.from, p.to, p.held.ID)
	next := chunky()
	next["big"] = append(slices.Clone(next["big"]), 1) // not linked
	second := makeHeld(t, p.from, 11, next)
	r, err := p.to.Receive(t.Context(), manifestOf(t, p.from, second.ID))
	must(t, err)
	_, err = r.Reuse(t.Context(), nil)
	must(t, err)
	must(t, r.Close())
	p.reopen()
	r, err = p.to.Receive(t.Context(), manifestOf(t, p.from, second.ID))
	must(t, err)
	pull(t, p.from, r, -1) // without Reuse
	_, err = r.Commit(t.Context())
	must(t, err)
	dir, err := p.to.Dir(second.ID)
	must(t, err)
	if linksOf(t, filepath.Join(dir, "more/one")) != 1 {
		t.Error("still a link")
	}
	sameTree(t, p.to, second.ID, next)
	sameTree(t, p.to, p.held.ID, chunky())
}

// The reserve: what is missing must fit beside it. The text says how much is needed and how
// much is there, and nothing is left behind.
func TestReserve(t *testing.T) {
	p := newPair(t, chunky())
	must(t, p.to.Close())
	var st unix.Statfs_t
	must(t, unix.Statfs(p.to.dir, &st))
	free := int64(st.Bfree) * int64(st.Bsize)
	p.to = openStore(t, p.to.dir, &Options{Reserve: 2 * free})
	_, err := p.to.Receive(t.Context(), p.manifest)
	wantErr(t, err, ErrNoSpace)
	for _, part := range []string{"16.0 MiB of 16.0 MiB are still to come", "kept in reserve", "free"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v says nothing of %q", err, part)
		}
	}
	only(t, filepath.Join(p.to.dir, "receive"))

	// What can be linked needs no space.
	must(t, p.to.Close())
	p.to = openStore(t, p.to.dir, nil)
	transfer(t, p.from, p.to, p.held.ID)
	must(t, p.to.Close())
	p.to = openStore(t, p.to.dir, &Options{Reserve: 2 * free})
	second := makeHeld(t, p.from, 11, chunky())
	transfer(t, p.from, p.to, second.ID)
}

// mount mounts a small tmpfs; where that is not permitted the test is skipped.
func mount(t testing.TB, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); errors.Is(err, syscall.EPERM) {
		t.Skip("cannot mount")
	} else {
		must(t, err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// A disk that fills up in mid-receive or mid-draft is ErrNoSpace. What was received stays,
// and with space the receipt is completed.
func TestDiskFull(t *testing.T) {
	dir := mount(t, "size=24m,mode=0755")
	from := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, from, 10, chunky())
	s := openStore(t, dir, nil)
	r, err := s.Receive(t.Context(), manifestOf(t, from, held.ID))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 14<<20), 0o644))
	var had int64
	for _, p := range r.Missing() {
		data, err := from.Chunk(p.Digest)
		must(t, err)
		if err = r.Put(p, data); err != nil {
			wantErr(t, err, ErrNoSpace)
			wantErr(t, err, syscall.ENOSPC)
			continue
		}
		had += int64(len(data))
	}
	if had == 0 {
		t.Error("nothing fitted")
	}
	must(t, r.Close())
	_, err = s.Receive(t.Context(), manifestOf(t, from, held.ID))
	wantErr(t, err, ErrNoSpace)
	must(t, os.Remove(filepath.Join(dir, "filler")))
	fetched, reused := transfer(t, from, s, held.ID)
	if reused != had || fetched != held.Bytes-had {
		t.Errorf("had %d: fetched %d, reused %d", had, fetched, reused)
	}
	sameTree(t, s, held.ID, chunky())

	d, err := s.Draft()
	must(t, err)
	small().build(t, d.Dir())
	fill, err := os.Create(filepath.Join(dir, "filler"))
	must(t, err)
	for err == nil {
		_, err = fill.Write(make([]byte, 4096))
	}
	must(t, fill.Close())
	_, err = d.Commit(t.Context(), metaAt(11), nil)
	wantErr(t, err, ErrNoSpace)
	must(t, os.Remove(fill.Name()))
	second, err := d.Commit(t.Context(), metaAt(11), nil)
	must(t, err)
	sameTree(t, s, second.ID, small())
}

// Damaged snapshots give way to a transfer that needs their space.
func TestQuarantineGivesWay(t *testing.T) {
	dir := mount(t, "size=24m,mode=0755")
	from := openStore(t, t.TempDir(), nil)
	held := makeHeld(t, from, 10, chunky())
	s := openStore(t, dir, nil)
	transfer(t, from, s, held.ID)
	_, err := s.Receive(t.Context(), manifestOf(t, from, makeHeld(t, from, 11, tree{"x": noise(50, 16<<20)}).ID))
	wantErr(t, err, ErrNoSpace)
	must(t, s.Quarantine(held.ID, "test"))
	transfer(t, from, s, held.ID)
	only(t, filepath.Join(dir, "quarantine"))
}

// Missing names pieces in the order of the files, each digest once, with its entry.
func TestMissing(t *testing.T) {
	p := newPair(t, small())
	r := p.receive()
	defer r.Drop()
	var got []string
	for _, piece := range r.Missing() {
		if e := r.Manifest().Index.Entries[piece.File]; e.Path != piece.Path {
			t.Errorf("%+v is of %s", piece, e.Path)
		}
		got = append(got, piece.Path)
	}
	if want := []string{"a", "d-h", "d/e/f", "d/g"}; !slices.Equal(got, want) {
		t.Errorf("missing %q, want %q", got, want)
	}
	if h := r.Held(); h.ID != p.held.ID || h.Bytes != p.held.Bytes {
		t.Errorf("%+v", h)
	}
}
