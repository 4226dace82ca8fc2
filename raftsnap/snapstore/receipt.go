package snapstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"sort"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// Piece is a chunk that a receipt lacks.
type Piece struct {
	File   int    // number of its entry in the index
	Path   string // of that entry
	Offset int64  // in the file
	Length uint32
	Digest snapshot.Digest
}

// Receipt is a snapshot that is being received. It is filled by Reuse with what is here
// already and by Put with what others send, each chunk verified before it counts, and
// becomes a snapshot by Commit. What it has survives Close, a killed process, and a change
// of source; it is found again by the id of the snapshot.
type Receipt struct {
	s    *Store
	m    *Manifest
	name string // of its directory

	files    []*staged
	byEntry  map[int]*staged
	byDigest map[snapshot.Digest][]uint32 // chunks by number
	flush    errgroup.Group               // flushes complete files
	journal  *os.File
	maxOpen  int // files that stay open

	syncing, synced atomic.Int64 // makings durable that go on, and that have ended

	life sync.RWMutex // held shared by what fills the receipt, and alone by what ends it
	done bool         // guarded by life

	mu struct { // taken for moments, never around I/O
		sync.Mutex
		state  []state // by chunk
		opened int     // files that are open
		err    error   // of the first flush that failed; it stays
	}
}

// state is what a receipt knows of a chunk.
type state uint8

const (
	missing state = iota
	claimed       // said to be in its file, not verified in this process
	writing       // somebody brings it
	present       // in its file, and was verified
)

func receiptName(id protocol.ID) string { return path.Join(receiveName, id.String()) }

// Receive begins to receive the snapshot of a manifest, or goes on where an earlier receipt
// of the same snapshot ended. A manifest that breaks a rule is ErrCorrupt; a snapshot that
// is held is fs.ErrExist; one that is being received is ErrBusy. ErrNoSpace says that what
// is not here yet does not fit beside the reserve, and how much of both there is; what is
// here already is removed then if the disk lacks even the reserve.
func (s *Store) Receive(ctx context.Context, manifest []byte) (*Receipt, error) {
	m, err := DecodeManifest(manifest)
	if err != nil {
		return nil, fmt.Errorf("receive snapshot: %w", err)
	}
	r, err := s.receive(ctx, m, manifest)
	if err != nil {
		return nil, fmt.Errorf("receive snapshot %s: %w", m.ID.Short(), err)
	}
	return r, nil
}

func (s *Store) receive(ctx context.Context, m *Manifest, manifest []byte) (*Receipt, error) {
	if err := s.acquire(m.ID); err != nil {
		return nil, err
	}
	r := newReceipt(s, m)
	_, err := s.find(m.ID)
	switch {
	case err == nil:
		err = fs.ErrExist
	case errors.Is(err, fs.ErrNotExist):
		err = r.open(ctx, manifest)
	}
	if err != nil {
		s.yield(m.ID)
		return nil, err
	}
	return r, nil
}

func newReceipt(s *Store, m *Manifest) *Receipt {
	r := &Receipt{s: s, m: m, name: receiptName(m.ID), maxOpen: maxOpen, byEntry: map[int]*staged{}, byDigest: map[snapshot.Digest][]uint32{}}
	r.flush.SetLimit(flushers)
	n := 0
	for i := range m.Index.Entries {
		e := &m.Index.Entries[i]
		if e.Type != snapshot.Regular {
			continue
		}
		st := &staged{r: r, entry: i, e: e, first: n, left: len(e.Chunks), name: path.Join(r.name, dataName, e.Path)}
		r.files, r.byEntry[i] = append(r.files, st), st
		for j := range e.Chunks {
			d := e.Chunks[j].Digest
			r.byDigest[d] = append(r.byDigest[d], uint32(n+j))
		}
		n += len(e.Chunks)
	}
	r.mu.state = make([]state, n)
	return r
}

// open finds what an earlier receipt left, sees to the space, and makes the rest ready.
func (r *Receipt) open(ctx context.Context, manifest []byte) error {
	journal, err := r.resume()
	if err == nil && journal == 0 {
		err = r.s.disk.discard(r.name)
	}
	if err == nil {
		err = r.s.room(r)
	}
	if errors.Is(err, ErrNoSpace) && r.s.short() {
		err = errors.Join(err, r.s.disk.discard(r.name)) // nothing goes on with it soon
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	err = r.create(manifest, journal)
	if err != nil && journal == 0 { // nothing is lost with it
		err = errors.Join(err, r.s.disk.discard(r.name))
	}
	return err
}

// resume learns which chunks were journalled, and returns how long the journal is as far as
// it is of use: 0 says that there is nothing to go on with. Files that share their bytes
// with a snapshot are taken out, as nothing may ever be written to those.
func (r *Receipt) resume() (journal int64, err error) {
	if _, err := r.s.readManifest(r.name, r.m.ID); err != nil {
		return 0, useless(err)
	}
	all, err := r.s.disk.scan(path.Join(r.name, dataName))
	if err != nil {
		return 0, useless(err)
	}
	sizes := map[string]int64{}
	for i := range all {
		if keep, err := r.resumeFile(&all[i]); err != nil {
			return 0, err
		} else if keep {
			sizes[all[i].path] = all[i].size
		}
	}
	longest := int64(journalHeader) + 2*recordLen*int64(len(r.mu.state)+1)
	data, err := r.s.disk.readFile(path.Join(r.name, journalName), longest)
	if err != nil {
		return 0, useless(err)
	}
	return readJournal(data, r.m.ID.Digest, len(r.mu.state), func(k uint32) {
		if st, c := r.chunk(k); sizes[st.e.Path] >= c.Offset+int64(c.Length) {
			r.mu.state[k] = claimed
		}
	}), nil
}

// useless forgives errors that say that there is nothing to go on with.
func useless(err error) error {
	if errors.Is(err, ErrCorrupt) || errors.Is(err, errForeign) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// resumeFile tells whether a file may be gone on with, and removes it if not.
func (r *Receipt) resumeFile(f *found) (keep bool, err error) {
	e, ok := r.m.Index.Lookup(f.path)
	if ok && f.dir == (e.Type == snapshot.Dir) && f.links <= 1 {
		return true, nil
	}
	return false, r.s.disk.remove(path.Join(r.name, dataName, f.path))
}

// create makes everything that Put relies on.
func (r *Receipt) create(manifest []byte, journal int64) error {
	disk := r.s.disk
	for _, name := range []string{r.name, path.Join(r.name, dataName)} {
		if err := disk.mkdir(name); err != nil {
			return err
		}
	}
	if journal == 0 {
		if err := disk.writeFile(path.Join(r.name, manifestName), manifest, true); err != nil {
			return err
		}
	}
	for i := range r.m.Index.Entries {
		if e := &r.m.Index.Entries[i]; e.Type == snapshot.Dir {
			if err := disk.mkdir(path.Join(r.name, dataName, e.Path)); err != nil {
				return err
			}
		}
	}
	return r.openJournal(journal)
}

func (r *Receipt) openJournal(keep int64) error {
	name := path.Join(r.name, journalName)
	f, err := r.s.disk.openNew(name)
	if err != nil {
		return err
	}
	err = r.s.disk.truncate(f, name, keep)
	if err == nil && keep == 0 {
		keep = int64(journalHeader)
		err = r.s.disk.write(f, name, newJournal(r.m.ID.Digest), 0)
	}
	if err == nil {
		_, err = f.Seek(keep, 0)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	r.journal = f
	return nil
}

// note journals a chunk. A record is one write, so that records of several writers follow
// each other whole.
func (r *Receipt) note(k uint32) error {
	name := path.Join(r.name, journalName)
	return r.s.disk.do("write", name, func() error {
		_, err := r.journal.Write(appendRecord(nil, r.m.ID.Digest, k))
		return err
	})
}

// chunk returns a chunk by its number, and the file it belongs to.
func (r *Receipt) chunk(k uint32) (*staged, *snapshot.Chunk) {
	// Of the files that begin at k, all but the last are empty.
	st := r.files[sort.Search(len(r.files), func(i int) bool { return r.files[i].first > int(k) })-1]
	return st, &st.e.Chunks[int(k)-st.first]
}

// Held returns what Commit will return.
func (r *Receipt) Held() Held { return Held{ID: r.m.ID, Meta: r.m.Meta, Bytes: r.m.Bytes()} }

// Manifest returns the manifest. Nobody may change it.
func (r *Receipt) Manifest() *Manifest { return r.m }

// Syncing tells how often so far a file or a directory was made durable, and whether one is
// just being. It never blocks, and also answers during Commit.
func (r *Receipt) Syncing() (done int64, busy bool) {
	return r.synced.Load(), r.syncing.Load() > 0
}

// durable runs something that waits for the disk, which Syncing then tells of.
func (r *Receipt) durable(do func() error) error {
	r.syncing.Add(1)
	err := do()
	r.synced.Add(1)
	r.syncing.Add(-1)
	return err
}

// Missing returns the chunks that are to be fetched, in the order of the files. Of several
// with the same bytes it returns the first: Put brings those bytes to all their places.
// Chunks that an earlier receipt left count as here; Reuse and Commit look whether they are.
func (r *Receipt) Missing() []Piece {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Piece
	seen := map[snapshot.Digest]bool{}
	for _, st := range r.files {
		for j := range st.e.Chunks {
			c := &st.e.Chunks[j]
			if s := r.mu.state[st.first+j]; s != missing && s != writing || seen[c.Digest] {
				continue
			}
			seen[c.Digest] = true
			list = append(list, Piece{File: st.entry, Path: st.e.Path, Offset: c.Offset, Length: c.Length, Digest: c.Digest})
		}
	}
	return list
}

// Put takes a piece that Missing named. Bytes that are not those of the digest are
// ErrCorrupt and touch nothing. The same piece may be put again, at the same time too.
func (r *Receipt) Put(p Piece, data []byte) error {
	r.life.RLock()
	defer r.life.RUnlock()
	err := ErrClosed
	if !r.done {
		err = r.put(p, data)
	}
	if err != nil {
		return fmt.Errorf("put chunk of %s at %d: %w", p.Path, p.Offset, err)
	}
	return nil
}

func (r *Receipt) put(p Piece, data []byte) error {
	places := r.byDigest[p.Digest]
	if len(places) == 0 {
		return fmt.Errorf("the snapshot has no chunk %s", p.Digest)
	}
	if _, c := r.chunk(places[0]); len(data) != int(c.Length) || snapshot.Sum(data) != p.Digest {
		return corruptf("%d bytes that differ from the digest", len(data))
	}
	return r.spread(places, data)
}

// spread writes verified bytes to all places that lack them. A place of another length is
// the lie of a manifest: no bytes have two.
func (r *Receipt) spread(places []uint32, data []byte) error {
	for _, k := range places {
		st, c := r.chunk(k)
		if int(c.Length) != len(data) || !r.take(k) {
			continue
		}
		err := st.write(c.Offset, data)
		if err == nil {
			err = r.note(k)
		}
		if err = errors.Join(err, r.settle(st, k, err == nil)); err != nil {
			return err
		}
	}
	return nil
}

// take reserves a chunk that is not known to be here for the caller, who settles it.
func (r *Receipt) take(k uint32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.mu.state[k]; s == writing || s == present {
		return false
	}
	r.mu.state[k] = writing
	return true
}

// settle ends what take began. With the last chunk of a file its flush begins.
func (r *Receipt) settle(st *staged, k uint32, ok bool) error {
	r.mu.Lock()
	r.mu.state[k] = missing
	if ok {
		r.mu.state[k] = present
		st.left--
	}
	whole, err := ok && st.left == 0, r.mu.err
	r.mu.Unlock()
	if whole && err == nil {
		r.flush.Go(st.finish)
	}
	return err
}

// fail keeps the first error of a flush: this receipt cannot be committed any more.
func (r *Receipt) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.err == nil {
		r.mu.err = err
	}
}

// lacking counts the chunks that are not present.
func (r *Receipt) lacking() (n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.mu.state {
		if s != present {
			n++
		}
	}
	return n, r.mu.err
}
