package source

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Freeze lets the application write an image and walks it.
func (f *fromFunc) Freeze(ctx context.Context) (Image, error) {
	live, err := f.live()
	if err != nil {
		return nil, fmt.Errorf("freeze %w", err)
	}
	s, err := newScratch(f.scratch(live), scratchName(live))
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", f.subject(), err)
	}
	img, err := f.image(ctx, s, live)
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", f.subject(), errors.Join(err, s.remove()))
	}
	img.remove = s.remove
	return img, nil
}

// live returns the absolute path of the live store, empty if there is none.
func (f *fromFunc) live() (string, error) {
	if f.opts.Live == "" {
		return "", nil
	}
	path, err := filepath.Abs(f.opts.Live)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return "", advise(f.opts.Live, err)
	}
	return path, nil
}

func (f *fromFunc) scratch(live string) string {
	switch {
	case f.opts.Scratch != "":
		return f.opts.Scratch
	case live != "":
		return filepath.Dir(live)
	}
	return os.TempDir()
}

func scratchName(live string) string {
	if live == "" {
		return "func"
	}
	return filepath.Base(live)
}

func (f *fromFunc) subject() string {
	if f.opts.Live != "" {
		return f.opts.Live
	}
	return "image of a func source"
}

func (f *fromFunc) image(ctx context.Context, s *scratch, live string) (*image, error) {
	if err := f.make(ctx, s.image); err != nil {
		return nil, err
	}
	img, err := openImage(ctx, s.image, "", nil)
	if err != nil {
		return nil, err
	}
	img.cacheKey, img.probeDir = live, s.dir
	if err := f.declare(img, live); err != nil {
		return nil, errors.Join(err, img.Release())
	}
	return img, nil
}

// declare turns the entries of a walk of the image into those of the store.
func (f *fromFunc) declare(img *image, live string) error {
	if live != "" {
		if err := adoptRoot(&img.entries[0], live); err != nil {
			return err
		}
	}
	for i := range img.entries {
		e := &img.entries[i]
		e.Fresh = true
		if e.Type != Regular {
			continue
		}
		if f.opts.ChunkSize != nil {
			e.ChunkSize = f.opts.ChunkSize(e.Path)
		}
		e.Compressed = f.opts.Compressed != nil && f.opts.Compressed(e.Path)
		if f.opts.Immutable == nil || !f.opts.Immutable(e.Path) {
			continue
		}
		e.Immutable = true
		e.Identity.CTime = Timespec{}
		// With one name it is a copy, or its store has dropped it already: it has
		// another inode next time.
		e.Fresh = e.Links < 2
	}
	return nil
}

// adoptRoot gives the root of an image the metadata of the live store's.
func adoptRoot(root *Entry, live string) error {
	t, err := openTree(live)
	if err != nil {
		return err
	}
	defer t.close()
	st, err := t.stat("")
	if err != nil {
		return advise(live, err)
	}
	own := *root
	own.Mode, own.UID, own.GID = uint32(st.Mode)&0o7777, st.Uid, st.Gid
	own.MTime = timespec(st.Mtime)
	fl := flattener{}
	*root = fl.flatten(&folder{entries: []Entry{own}})[0]
	return nil
}
