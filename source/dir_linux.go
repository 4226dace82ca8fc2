package source

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const walkTries = 3

// Freeze records the walk of the directory.
func (d *dir) Freeze(ctx context.Context) (Image, error) {
	img, err := d.freeze(ctx)
	if err != nil {
		return nil, fmt.Errorf("freeze %w", err)
	}
	return img, nil
}

func (d *dir) freeze(ctx context.Context) (*image, error) {
	exclude, err := parsePatterns(d.opts.Exclude)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.path, err)
	}
	given, err := filepath.Abs(d.path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.path, err)
	}
	path, err := filepath.EvalSymlinks(given)
	if err != nil {
		return nil, advise(d.path, err)
	}

	img, err := openImage(ctx, path, filepath.Base(given), exclude)
	if err != nil {
		return nil, err
	}
	img.cacheKey = path
	return img, nil
}

// openImage walks the directory or file at an absolute path without symbolic links.
// A single file gets the name given.
func openImage(ctx context.Context, path, given string, exclude patterns) (*image, error) {
	t, err := openTree(path)
	if errors.Is(err, unix.ENOTDIR) {
		return openSingle(path, given)
	}
	if err != nil {
		return nil, err
	}
	img := &image{tree: t, probeDir: path}
	err = untilStable(func() (err error) {
		img.entries, img.skipped, err = walk(ctx, t, exclude)
		return err
	})
	if err != nil {
		t.close()
		return nil, err
	}
	return img, nil
}

// untilStable calls walk again, a few times, while names vanish under it.
func untilStable(walk func() error) error {
	for try := 1; ; try++ {
		err := walk()
		if !errors.Is(err, errGone) {
			return err
		}
		if try == walkTries {
			return fmt.Errorf("%w while the directory was listed, in each of %d tries; back up while nothing writes there, exclude it, or use the source made for this kind of store", err, walkTries)
		}
	}
}

// openSingle makes the image of one file. Its tree is the directory it lies in.
func openSingle(path, given string) (*image, error) {
	t, err := openTree(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	base := filepath.Base(path)
	st, err := t.stat(base)
	if err == nil && special(st.Mode) != "" {
		err = fmt.Errorf("is a %s; a store is a directory or a regular file", special(st.Mode))
	}
	if err != nil {
		t.close()
		return nil, advise(path, err)
	}
	one := &folder{entries: []Entry{entryOf(given, &st)}}
	entries := (&flattener{}).flatten(one)
	return &image{tree: t, entries: entries, single: base, probeDir: t.path}, nil
}
