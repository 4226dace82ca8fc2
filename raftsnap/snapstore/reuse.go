package snapstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// Reuse fills a receipt with what is on this machine already, and returns how many bytes it
// found: whole files of other snapshots by hard links, files of receipts that were given up
// by moving them, what an earlier receipt of the same snapshot had, and single chunks out of
// all of these, wherever they lie there. After that it looks into extra directories, such as
// that of the running state machine, which it only reads: into files that have the size or
// the name of one that lacks something, and no longer than they go on to match.
//
// Everything is verified on the way, save files of snapshots that were verified before and
// have not changed. It is called once, before the first Put. What cannot be read is left to
// be fetched; an error is of the receipt itself, of the Work or the context.
func (r *Receipt) Reuse(ctx context.Context, w *Work, extra ...string) (int64, error) {
	r.life.RLock()
	defer r.life.RUnlock()
	if r.done {
		return 0, fmt.Errorf("reuse for %s: %w", r.m.ID.Short(), ErrClosed)
	}
	before := r.presentBytes()
	u := &reuse{r: r, s: r.s, work: w, buf: make([]byte, ChunkSize)}
	err := u.run(ctx, extra)
	if err != nil {
		err = fmt.Errorf("reuse for %s: %w", r.m.ID.Short(), err)
	}
	return r.presentBytes() - before, err
}

func (r *Receipt) presentBytes() (n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, st := range r.files {
		for j := range st.e.Chunks {
			if r.mu.state[st.first+j] == present {
				n += int64(st.e.Chunks[j].Length)
			}
		}
	}
	return n
}

// reuse is one run of Reuse.
type reuse struct {
	r    *Receipt
	s    *Store
	work *Work
	buf  []byte // for one chunk
	held []*holding

	donors []*Receipt // receipts that nobody works on, which this run has acquired
}

func (u *reuse) run(ctx context.Context, extra []string) error {
	held, done := u.s.useAll()
	defer done()
	u.held, u.donors = held, u.s.donors()
	defer u.s.releaseDonors(u.donors)

	steps := []func(context.Context) error{u.linkFiles, u.moveFiles, u.verifyOwn, u.copyHeld, u.copyDonated, u.copyOwn}
	for _, dir := range extra {
		steps = append(steps, func(ctx context.Context) error { return u.copyExtra(ctx, dir) })
	}
	for _, step := range steps {
		if lacking, err := u.r.lacking(); lacking == 0 || err != nil {
			return err
		}
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// donors acquires the receipts that nobody works on, and have something.
func (s *Store) donors() []*Receipt {
	ids, err := s.receipts()
	if err != nil {
		s.note("list the receipts", receiveName, err)
	}
	var list []*Receipt
	for _, id := range ids {
		if s.acquire(id) != nil {
			continue
		}
		d, err := s.donor(id)
		if err != nil {
			s.note("reuse a receipt", receiptName(id), err)
			s.yield(id)
			continue
		}
		list = append(list, d)
	}
	return list
}

func (s *Store) donor(id protocol.ID) (*Receipt, error) {
	m, err := s.readManifest(receiptName(id), id)
	if err != nil {
		return nil, err
	}
	d := newReceipt(s, m)
	journal, err := d.resume()
	if err == nil && journal == 0 {
		err = errors.New("nothing is in it")
	}
	return d, err
}

func (s *Store) releaseDonors(list []*Receipt) {
	for _, d := range list {
		s.yield(d.m.ID)
	}
}

// wholes returns by content the files of which nothing is here that was verified.
func (u *reuse) wholes() map[snapshot.Digest][]*staged {
	wanted := map[snapshot.Digest][]*staged{}
	for _, st := range u.r.files {
		if len(st.e.Chunks) > 0 && u.r.count(st, present)+u.r.count(st, writing) == 0 {
			id := snapshot.ContentID(st.e)
			wanted[id] = append(wanted[id], st)
		}
	}
	return wanted
}

// linkFiles gives files of snapshots another name. It comes first, since it needs to read
// nothing, not even what an earlier receipt had of these files.
func (u *reuse) linkFiles(ctx context.Context) error {
	if !canLink {
		return nil
	}
	wanted := u.wholes()
	for _, h := range u.held {
		for i := range h.index.Entries {
			e := &h.index.Entries[i]
			if e.Type != snapshot.Regular || e.Size == 0 {
				continue
			}
			id := snapshot.ContentID(e)
			list := wanted[id]
			if len(list) == 0 {
				continue
			}
			m, err := u.trust(ctx, h, i)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err != nil {
				u.s.note("reuse a file of a snapshot", path.Join(h.data(), e.Path), err)
				continue
			}
			for _, st := range list {
				u.link(path.Join(h.data(), e.Path), m, st)
			}
			delete(wanted, id)
		}
	}
	return nil
}

// trust verifies a file of a snapshot, unless that was done and it is the same file still.
func (u *reuse) trust(ctx context.Context, h *holding, entry int) (mark, error) {
	e := &h.index.Entries[entry]
	f, err := u.s.disk.look(h.data(), e.Path)
	if err != nil {
		return mark{}, err
	}
	if u.s.marksOf(h)[entry].is(f.mark) {
		return f.mark, nil
	}
	began := time.Now()
	m, err := u.s.disk.hasher(u.work, u.buf[:readSize]).verify(ctx, h.data(), e)
	if err != nil {
		u.s.setMark(h, entry, mark{})
		return mark{}, err
	}
	m = m.settled(began)
	u.s.setMark(h, entry, m)
	return m, nil
}

// link makes a file of the receipt another name of one that is durable and was right when
// it had the given mark. Where that cannot be done its chunks are left for copying.
func (u *reuse) link(from string, m mark, st *staged) {
	if !u.r.takeFile(st) {
		return
	}
	err := errors.Join(st.close(), u.s.disk.remove(st.name))
	if err == nil {
		err = u.s.disk.link(from, st.name)
	}
	if err != nil {
		u.s.note("link a file of a snapshot", from, err)
		u.r.settleFile(st, missing)
		return
	}
	st.mu.Lock()
	st.linked, st.mark = true, m
	st.mu.Unlock()
	u.r.settleFile(st, present)
}

// takeFile reserves all chunks of a file for the caller, who settles them, if nobody else
// has one and none was verified.
func (r *Receipt) takeFile(st *staged) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	own := r.mu.state[st.first : st.first+len(st.e.Chunks)]
	if slices.Contains(own, writing) || slices.Contains(own, present) {
		return false
	}
	for j := range own {
		own[j] = writing
	}
	return true
}

// settleFile ends what takeFile began.
func (r *Receipt) settleFile(st *staged, to state) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for j := range st.e.Chunks {
		r.mu.state[st.first+j] = to
	}
	if to == present {
		st.left = 0
	}
}

// moveFiles takes complete files away from receipts that were given up, which costs neither
// time nor space, and makes them claims to be verified.
func (u *reuse) moveFiles(context.Context) error {
	wanted := u.wholes()
	for _, d := range u.donors {
		for _, from := range d.files {
			id := snapshot.ContentID(from.e)
			list := wanted[id]
			if len(list) == 0 || d.count(from, claimed) < len(from.e.Chunks) {
				continue
			}
			if err := u.move(d, from, list[0]); err != nil {
				return err
			}
			wanted[id] = list[1:]
		}
	}
	return nil
}

func (u *reuse) move(d *Receipt, from, to *staged) error {
	if u.r.count(to, claimed) == len(to.e.Chunks) || !u.r.takeFile(to) {
		return nil
	}
	err := to.close()
	if err == nil {
		err = u.s.disk.rename(from.name, to.name)
	}
	if err != nil {
		u.s.note("move a file of a receipt", from.name, err)
		u.r.settleFile(to, missing)
		return nil
	}
	d.settleFile(from, missing)
	u.r.settleFile(to, claimed)
	for j := range to.e.Chunks {
		if err := u.r.note(uint32(to.first + j)); err != nil {
			return err
		}
	}
	return nil
}

// verifyOwn reads what an earlier receipt had, and what was moved here.
func (u *reuse) verifyOwn(ctx context.Context) error {
	_, err := u.r.verifyClaims(ctx, u.work)
	return err
}

func (u *reuse) copyHeld(ctx context.Context) error {
	for _, h := range u.held {
		every := func(int, int) bool { return true }
		bad := func(entry int) { u.s.setMark(h, entry, mark{}) }
		if err := u.copyChunks(ctx, h.data(), h.index, every, bad); err != nil {
			return err
		}
	}
	return nil
}

func (u *reuse) copyDonated(ctx context.Context) error {
	for _, d := range u.donors {
		if err := u.copyReceived(ctx, d, claimed); err != nil {
			return err
		}
	}
	return nil
}

// copyOwn brings bytes that are here once to the other places where they belong.
func (u *reuse) copyOwn(ctx context.Context) error { return u.copyReceived(ctx, u.r, present) }

func (u *reuse) copyReceived(ctx context.Context, d *Receipt, want state) error {
	has := func(entry, chunk int) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.mu.state[d.byEntry[entry].first+chunk] == want
	}
	return u.copyChunks(ctx, path.Join(d.name, dataName), d.m.Index, has, func(int) {})
}

// copyChunks copies what the receipt lacks out of the files of an index. Chunks that turn
// out to be damaged are told to bad, and left to be fetched.
func (u *reuse) copyChunks(ctx context.Context, dir string, x *snapshot.Index, has func(entry, chunk int) bool, bad func(entry int)) error {
	for i := range x.Entries {
		e := &x.Entries[i]
		for j := range e.Chunks {
			c := &e.Chunks[j]
			places := u.r.byDigest[c.Digest]
			if !u.r.lacks(places) || !has(i, j) {
				continue
			}
			if err := u.work.waitAll(ctx, int(c.Length)); err != nil {
				return err
			}
			name, p := path.Join(dir, e.Path), u.buf[:c.Length]
			if err := u.s.disk.readChunk(name, c, p); err != nil {
				u.s.note("reuse a chunk", name, err)
				bad(i)
				continue
			}
			if err := u.place(ctx, places, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// place writes verified bytes to all places that lack them.
func (u *reuse) place(ctx context.Context, places []uint32, p []byte) error {
	if err := u.work.waitAll(ctx, len(p)); err != nil {
		return err
	}
	return u.r.spread(places, p)
}

// lacks tells whether one of some chunks is missing.
func (r *Receipt) lacks(places []uint32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(places, func(k uint32) bool { return r.mu.state[k] == missing })
}

// maxWalk is how many names of an extra directory are looked at.
const maxWalk = 1 << 20

// copyExtra looks for chunks in a directory that others write to. What it reads there is
// nobody's promise, so only the digest of the very bytes that were read counts.
func (u *reuse) copyExtra(ctx context.Context, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		u.s.note("look for chunks", dir, err)
		return nil
	}
	defer root.Close()
	own, err := u.s.disk.lstat(".")
	if err != nil {
		return err
	}
	likely, seen := u.likely(), 0
	return fs.WalkDir(root.FS(), ".", func(name string, entry fs.DirEntry, err error) error {
		if seen++; seen > maxWalk {
			return fs.SkipAll
		}
		if err != nil {
			return nil // it is gone by now, or not for us
		}
		info, err := entry.Info()
		switch {
		case err != nil:
			return nil
		case entry.IsDir() && os.SameFile(info, own):
			return fs.SkipDir
		case !entry.Type().IsRegular() || !likely(name, info.Size()):
			return ctx.Err()
		}
		return u.copyLikely(ctx, root, name, info.Size())
	})
}

// likely tells whether a file may have chunks that are missing.
func (u *reuse) likely() func(name string, size int64) bool {
	sizes, names := map[int64]bool{}, map[string]bool{}
	for _, st := range u.r.files {
		if u.r.count(st, missing) > 0 {
			sizes[st.e.Size], names[path.Base(st.e.Path)] = true, true
		}
	}
	return func(name string, size int64) bool { return size > 0 && (sizes[size] || names[path.Base(name)]) }
}

// copyLikely goes through a file as long as most of it belongs to the snapshot.
func (u *reuse) copyLikely(ctx context.Context, root *os.Root, name string, size int64) error {
	f, err := root.Open(name)
	if err != nil {
		return nil
	}
	defer closeQuietly(f)
	misses := 0
	for offset, length := range cells(size) {
		if err := u.work.waitAll(ctx, int(length)); err != nil {
			return err
		}
		p := u.buf[:length]
		if err := u.s.disk.readAt(f, name, p, offset); err != nil {
			return nil
		}
		places := u.r.byDigest[snapshot.Sum(p)]
		if len(places) == 0 {
			misses++
		} else {
			misses--
		}
		if misses > 0 {
			return nil
		}
		if !u.r.lacks(places) {
			continue
		}
		if err := u.place(ctx, places, p); err != nil {
			return err
		}
	}
	return nil
}
