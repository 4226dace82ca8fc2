package snapstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// Draft is a snapshot in the making. The state machine puts its files into Dir, Commit
// makes a snapshot of them; without that, Abort or the next Open removes them.
type Draft struct {
	s    *Store
	name string
	done bool
	lost error // of a sync that failed
}

// Draft begins a snapshot that is made here. Several may be under way at once.
func (s *Store) Draft() (*Draft, error) {
	s.mu.Lock()
	closed := s.mu.closed
	s.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("begin draft: %w", ErrClosed)
	}
	d := &Draft{s: s, name: draftPrefix + rand.Text()}
	if err := s.disk.mkdir(d.name); err != nil {
		return nil, fmt.Errorf("begin draft: %w", err)
	}
	return d, nil
}

// Dir is where the files belong. It does not exist yet; whoever fills it makes it. Files
// that are hard links to files of earlier snapshots are not read again by Commit. None of
// the files may be written to after Commit has begun.
func (d *Draft) Dir() string { return filepath.Join(d.s.dir, d.name, dataName) }

// Commit reads the files, makes them durable and makes them a snapshot. What is neither a
// file nor a directory is refused, and so is a file that changes meanwhile. If exactly this
// snapshot is held already, that one is returned. After an error the draft is as it was and
// Commit may be called again, unless a sync failed: that draft can only be given up.
func (d *Draft) Commit(ctx context.Context, meta protocol.Meta, w *Work) (Held, error) {
	if d.done {
		return Held{}, fmt.Errorf("commit draft: %w", ErrClosed)
	}
	if d.lost != nil {
		return Held{}, fmt.Errorf("commit draft of index %d: an earlier try failed: %w", meta.Index, d.lost)
	}
	held, err := d.commit(ctx, meta, w)
	if isSyncError(err) {
		d.lost = err
	}
	if err != nil {
		return Held{}, fmt.Errorf("commit draft of index %d: %w", meta.Index, err)
	}
	d.done = true
	return held, nil
}

func (d *Draft) commit(ctx context.Context, meta protocol.Meta, w *Work) (Held, error) {
	m, raw, marks, err := d.describe(ctx, meta, w)
	if err != nil {
		return Held{}, err
	}
	if held, err := d.s.Get(m.ID); err == nil {
		return held, d.s.disk.discard(d.name)
	}
	disk := d.s.disk
	if err := disk.syncTree(path.Join(d.name, dataName), m.Index, disk.syncDir); err != nil {
		return Held{}, err
	}
	if err := disk.writeFile(path.Join(d.name, marksName), encodeMarks(marks), false); err != nil {
		return Held{}, err
	}
	if err := disk.writeFile(path.Join(d.name, manifestName), raw, true); err != nil {
		return Held{}, err
	}
	if err := disk.syncDir(d.name); err != nil {
		return Held{}, err
	}
	return d.s.publish(d.name, m, marks)
}

// describe makes the manifest of what lies in the draft, whose files are durable then.
func (d *Draft) describe(ctx context.Context, meta protocol.Meta, w *Work) (m *Manifest, raw []byte, marks []mark, err error) {
	all, err := d.s.disk.scan(path.Join(d.name, dataName))
	if err != nil {
		return nil, nil, nil, err
	}
	known := d.s.known()
	x := &snapshot.Index{Entries: make([]snapshot.Entry, len(all))}
	marks = make([]mark, len(all))
	err = each(ctx, len(all), func(ctx context.Context, i int, buf []byte) (err error) {
		h := d.s.disk.hasher(w, buf)
		x.Entries[i], marks[i], err = d.entry(ctx, h, &all[i], known)
		return err
	})
	if err != nil {
		return nil, nil, nil, err
	}
	raw, id, err := EncodeManifest(meta, x)
	return &Manifest{ID: id, Meta: meta, Index: x}, raw, marks, err
}

// known tells by their marks the contents of the files of all snapshots. What was written
// to since has another mark, under whichever of its names that was.
func (s *Store) known() map[mark][]snapshot.Chunk {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := map[mark][]snapshot.Chunk{}
	for _, h := range s.mu.held {
		for i, m := range h.marks {
			if m != (mark{}) {
				known[m] = h.index.Entries[i].Chunks
			}
		}
	}
	return known
}

// entry describes one file of the draft. One that is a link to a file of a snapshot is
// durable and not read again.
func (d *Draft) entry(ctx context.Context, h *hasher, f *found, known map[mark][]snapshot.Chunk) (snapshot.Entry, mark, error) {
	e := snapshot.Entry{Path: f.path, Type: snapshot.Dir, Mode: dirMode}
	if f.dir {
		return e, mark{}, nil
	}
	e.Type, e.Mode, e.Size, e.ChunkSize = snapshot.Regular, fileMode, f.size, ChunkSize
	if chunks, ok := known[f.mark]; ok {
		e.Chunks = chunks
		return e, f.mark, nil
	}
	began := time.Now()
	var err error
	if e.Chunks, err = d.read(ctx, h, f); err != nil {
		return e, mark{}, fmt.Errorf("%s: %w", f.path, err)
	}
	return e, f.mark.settled(began), nil
}

// errChanged says that the state machine has broken its promise.
var errChanged = errors.New("changed while the snapshot was made")

// read hashes a file and makes it durable.
func (d *Draft) read(ctx context.Context, h *hasher, want *found) ([]snapshot.Chunk, error) {
	name := path.Join(d.name, dataName, want.path)
	f, err := h.disk.open(name)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(f)
	chunks, err := h.file(ctx, f, name, want.size)
	if errors.Is(err, ErrCorrupt) { // it ended early
		return nil, errChanged
	}
	if err != nil {
		return nil, err
	}
	if err := h.disk.sync(f, name); err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if m, _ := identify(info); m != want.mark || info.Size() != want.size {
		return nil, errChanged
	}
	return chunks, nil
}

// Abort removes the draft. After Commit it does nothing.
func (d *Draft) Abort() error {
	if d.done {
		return nil
	}
	if err := d.s.disk.discard(d.name); err != nil {
		return fmt.Errorf("abort draft: %w", err)
	}
	d.done = true
	return nil
}
