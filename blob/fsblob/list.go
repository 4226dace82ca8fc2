package fsblob

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/snapferry/snapferry/blob"
)

// List implements blob.Driver. It reads a directory when it comes to it and none that
// holds only keys outside of what was asked for.
func (d *Driver) List(ctx context.Context, prefix, startAfter string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		base := prefix[:strings.LastIndexByte(prefix, '/')+1]
		dir := d.root
		if base != "" {
			key := strings.TrimSuffix(base, "/")
			if blob.ValidKey(key) != nil {
				return // no object has such a prefix
			}
			dir = d.path(key)
		}
		w := walk{d: d, ctx: ctx, prefix: prefix, after: startAfter, yield: yield}
		err := w.dir(dir, base)
		if err == nil {
			err = d.checkRoot() // what vanishes with the store is not empty
		}
		if err != nil && err != errStopped {
			yield(blob.Info{}, explain(err, d.root))
		}
	}
}

var errStopped = errors.New("the caller stopped the listing")

type walk struct {
	d             *Driver
	ctx           context.Context
	prefix, after string
	yield         func(blob.Info, error) bool
}

// dir yields what lies below a directory, whose keys begin with base. One that vanishes
// meanwhile is empty.
func (w *walk) dir(path, base string) error {
	entries, err := readDir(path)
	if err != nil && !isAbsent(err) {
		return err
	}
	for _, e := range entries {
		key := base + e.key
		if !w.wants(key, e.isDir()) {
			continue
		}
		if err := w.ctx.Err(); err != nil {
			return err
		}
		step := w.file
		if e.isDir() {
			step = w.dir
		}
		if err := step(filepath.Join(path, e.path), key); err != nil {
			return err
		}
	}
	return nil
}

// wants tells whether key, or any key that begins with it when it is of a directory, is
// to be listed.
func (w *walk) wants(key string, dir bool) bool {
	if len(key) > blob.MaxKey {
		return false
	}
	if !dir {
		return key > w.after && strings.HasPrefix(key, w.prefix)
	}
	return (key > w.after || strings.HasPrefix(w.after, key)) &&
		(strings.HasPrefix(key, w.prefix) || strings.HasPrefix(w.prefix, key))
}

func (w *walk) file(path, key string) error {
	info, err := w.d.stat(key, path)
	if isAbsent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !w.yield(info, nil) {
		return errStopped
	}
	return nil
}

// entry is a component of keys in one directory. Its key ends in a slash if more
// components follow, which makes the order of entries that of whole keys.
type entry struct {
	key  string
	path string // relative to the directory
}

func (e entry) isDir() bool { return strings.HasSuffix(e.key, "/") }

// readDir is the components in a directory, in order.
func readDir(path string) ([]entry, error) {
	entries, err := appendDir(nil, path, nil)
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.key, b.key) })
	return entries, err
}

// appendDir adds the components in a directory; above are the names of the directories
// in which they begin, for long ones. Those are rare, so it reads them at once.
func appendDir(list []entry, path string, above []string) ([]entry, error) {
	found, err := readNames(path)
	if err != nil {
		return list, err
	}
	for _, f := range found {
		names := append(slices.Clip(above), f.Name())
		if strings.HasSuffix(f.Name(), more) {
			if f.IsDir() && len(f.Name()) >= maxName && len(names) < maxNames {
				list, err = appendDir(list, filepath.Join(path, f.Name()), names)
				if err != nil && !isAbsent(err) {
					return list, err
				}
			}
			continue
		}
		if c, ok := component(names); ok && (f.IsDir() || f.Type().IsRegular()) {
			e := entry{key: c, path: filepath.Join(names...)}
			if f.IsDir() {
				e.key += "/"
			}
			list = append(list, e)
		}
	}
	return list, nil
}

func readNames(path string) (found []fs.DirEntry, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return f.ReadDir(-1)
}
