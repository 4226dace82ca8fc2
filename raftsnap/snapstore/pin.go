package snapstore

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"sync"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/snapshot"
)

// Pin keeps a snapshot from being removed while it is served. Should the snapshot go to
// quarantine, the pin still gives its files and no others.
type Pin struct {
	id       protocol.ID
	holder   string
	manifest []byte
	index    *snapshot.Index
	root     *os.Root // of the snapshot; it follows a rename
	done     func()
	once     sync.Once
	err      error
}

// Pin pins a snapshot for a holder, whose name is for people. A snapshot may have any
// number of pins. It is fs.ErrNotExist for one that is not held, and ErrCorrupt where the
// manifest is damaged.
func (s *Store) Pin(id protocol.ID, holder string) (*Pin, error) {
	h, done, err := s.use(id)
	if err != nil {
		return nil, fmt.Errorf("pin snapshot for %s: %w", holder, err)
	}
	p := &Pin{id: id, holder: holder, index: h.index, done: done}
	err = s.disk.do("open", h.name, func() (err error) { p.root, err = s.disk.root.OpenRoot(h.name); return err })
	if err != nil {
		done()
		return nil, fmt.Errorf("pin snapshot for %s: %w", holder, err)
	}
	if p.manifest, err = s.rawManifest(h); err != nil {
		return nil, fmt.Errorf("pin snapshot for %s: %w", holder, errors.Join(err, p.Close()))
	}
	return p, nil
}

// rawManifest reads the bytes of a manifest and checks them against the id.
func (s *Store) rawManifest(h *holding) ([]byte, error) {
	data, err := s.disk.readFile(path.Join(h.name, manifestName), MaxManifest)
	if err != nil {
		return nil, absent(manifestName, err)
	}
	if snapshot.Sum(data) != h.ID.Digest {
		return nil, corruptf("the manifest of %s is damaged", h.name)
	}
	return data, nil
}

// ID returns which snapshot is pinned.
func (p *Pin) ID() protocol.ID { return p.id }

// Holder returns for whom.
func (p *Pin) Holder() string { return p.holder }

// Manifest returns the manifest as it goes over the wire. Nobody may change it.
func (p *Pin) Manifest() []byte { return p.manifest }

// Open opens a file of the snapshot for reading, by the number of its entry in the index,
// and tells its size. The caller closes it, before or after the pin. A file that is gone
// or has another size is ErrCorrupt; bytes are for the receiver to verify.
func (p *Pin) Open(file int) (*os.File, int64, error) {
	f, err := p.open(file)
	if err != nil {
		return nil, 0, fmt.Errorf("open file %d of snapshot %s: %w", file, p.id.Short(), err)
	}
	return f, p.index.Entries[file].Size, nil
}

func (p *Pin) open(file int) (*os.File, error) {
	if file < 0 || file >= len(p.index.Entries) || p.index.Entries[file].Type != snapshot.Regular {
		return nil, os.ErrNotExist
	}
	e := &p.index.Entries[file]
	f, err := p.root.Open(filepath.Join(dataName, filepath.FromSlash(e.Path)))
	if errors.Is(err, os.ErrClosed) {
		return nil, ErrClosed
	}
	if err != nil {
		return nil, absent(e.Path, err)
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() != e.Size) {
		err = corruptf("%s has %d bytes, %d are right", e.Path, info.Size(), e.Size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close ends the pin. Only the first call does anything.
func (p *Pin) Close() error {
	p.once.Do(func() {
		p.err = p.root.Close()
		p.done()
	})
	return p.err
}

// Chunk returns a chunk with the given digest out of any snapshot that has it, verified.
// It is fs.ErrNotExist if none has, and ErrCorrupt if all that have are damaged there.
func (s *Store) Chunk(d snapshot.Digest) ([]byte, error) {
	all, done := s.useAll()
	defer done()
	err := os.ErrNotExist
	for _, h := range all {
		for i := range h.index.Entries {
			e := &h.index.Entries[i]
			for j := range e.Chunks {
				if e.Chunks[j].Digest != d {
					continue
				}
				data, readErr := s.readChunk(h, i, &e.Chunks[j])
				if readErr == nil {
					return data, nil
				}
				err = readErr
			}
		}
	}
	return nil, fmt.Errorf("read chunk %s: %w", d, err)
}

// readChunk reads and verifies a chunk of an entry. Where it is damaged, the file is not
// believed any more, and the next Verify finds the damage too.
func (s *Store) readChunk(h *holding, entry int, c *snapshot.Chunk) ([]byte, error) {
	e := &h.index.Entries[entry]
	p := make([]byte, c.Length)
	err := s.disk.readChunk(path.Join(h.data(), e.Path), c, p)
	if errors.Is(err, ErrCorrupt) {
		s.setMark(h, entry, mark{})
	}
	return p, err
}

// readChunk reads a chunk of a file into p and verifies it.
func (d *disk) readChunk(name string, c *snapshot.Chunk, p []byte) error {
	f, err := d.open(name)
	if err != nil {
		return absent(name, err)
	}
	defer closeQuietly(f)
	if err := d.readAt(f, name, p, c.Offset); err != nil {
		return short(name, err)
	}
	if snapshot.Sum(p) != c.Digest {
		return corruptf("%s differs from its digest within the %d bytes at %d", name, c.Length, c.Offset)
	}
	return nil
}
