package place

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

func parentOf(dir string) string { return filepath.Dir(dir) }

// resume moves files that an earlier run staged to the same paths of the new tree, where
// chunks that are in place already need not be written again. Only a file with one name is
// taken: another name could be meant to have other bytes this time.
func (r *run) resume(t *target) error {
	for _, name := range slices.Backward(t.left) {
		r.builder.staged.Store(true)
		if err := openUp(t.stage.tree, name); err != nil {
			return err
		}
		for i := range r.wants.files {
			if f := &r.wants.files[i]; f.t == t && !f.made {
				if err := f.adopt(t.stage.tree, path.Join(name, f.entry.Path)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// openUp lets a plain user into directories that had their final modes. What lies too deep
// to be resumed from under a longer path is left alone.
func openUp(t *tree, dir string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	st, err := t.lstat(dir)
	if err != nil || !isDir(st) {
		return ignore(err, unix.ENAMETOOLONG)
	}
	if st.Mode&0o700 != 0o700 {
		if err := t.chmod(dir, 0o700); err != nil {
			return err
		}
	}
	names, err := t.names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := openUp(t, path.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// adopt takes the file at p, if it is one that can be written to.
func (f *file) adopt(stage *tree, p string) error {
	st, ok := resumable(stage, p)
	if !ok {
		return nil
	}
	if st.Mode&0o600 != 0o600 && os.Geteuid() != 0 {
		if err := stage.chmod(p, 0o600); err != nil {
			return err
		}
	}
	if err := stage.move(p, f.t.tree, f.entry.Path, 0); err != nil {
		return err
	}
	f.made, f.resumed = true, true
	return f.trim()
}

func resumable(stage *tree, p string) (unix.Stat_t, bool) {
	st, err := stage.lstat(p)
	return st, err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1
}

// trim gives an adopted file its size and its holes. Where holes cannot be punched the file
// is made anew.
func (f *file) trim() error {
	t, p := f.t.tree, f.entry.Path
	fd, err := t.open(p, unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := t.do("truncate", p, func() error { return unix.Ftruncate(fd, f.entry.Size) }); err != nil {
		return err
	}
	err = holes(f.entry, func(offset, length int64) error {
		return t.do("punch", p, func() error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, length)
		})
	})
	if unsupported(err) {
		f.made, f.resumed = false, false
		return t.unlink(p, 0)
	}
	return err
}

// addOrigins opens what may hold wanted bytes: the target as it is, what was the target
// before an interrupted clean-up, and what earlier runs staged.
func (r *run) addOrigins(t *target, prefixes ...string) error {
	old, err := t.above.sub(t.base)
	if ignore(absent(err), fs.ErrPermission) != nil {
		return err
	}
	t.there = !errors.Is(err, fs.ErrNotExist)
	if err == nil {
		o := origin{t: t, tree: old}
		if t.base == "" {
			o.skip = stagingName
		}
		r.origins = append(r.origins, o)
	}
	if t.stage == nil {
		return nil
	}
	for _, prefix := range prefixes {
		names, err := t.stage.remains(prefix)
		if err != nil {
			return err
		}
		for _, name := range names {
			dir, err := t.stage.tree.sub(name)
			if err != nil {
				continue
			}
			r.origins = append(r.origins, origin{t: t, tree: dir})
		}
	}
	return nil
}
