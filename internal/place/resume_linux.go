package place

import (
	"errors"
	"fmt"
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

// checkSpace compares what has to be allocated anew with what is free, by file system. Old
// trees of an interrupted clean-up are a source, but not at the price of failing.
func (r *run) checkSpace() error {
	err := r.room()
	if err == nil {
		return nil
	}
	dropped := false
	for _, t := range r.targets {
		old, listErr := t.stage.remains(oldPrefix)
		if listErr != nil {
			return t.fault(listErr)
		}
		for _, name := range old {
			dropped = true
			if err := t.stage.tree.remove(name); err != nil {
				return t.fault(err)
			}
		}
	}
	if dropped {
		err = r.room()
	}
	return err
}

func (r *run) room() error {
	type volume struct {
		need, nodes int64
		stat        unix.Statfs_t
		path        string
	}
	volumes := map[uint64]*volume{}
	byTarget := map[*target]*volume{}
	for _, t := range r.targets {
		st, err := t.above.lstat("")
		if err != nil {
			return t.fault(err)
		}
		v := volumes[st.Dev]
		if v == nil {
			v = &volume{path: t.dir}
			volumes[st.Dev] = v
			if err := unix.Fstatfs(t.above.fd, &v.stat); err != nil {
				return t.fault(err)
			}
		}
		byTarget[t] = v
		v.nodes += int64(len(t.store.Index.Entries))
	}
	for i := range r.wants.files {
		f := &r.wants.files[i]
		v := byTarget[f.t]
		v.need += f.allocation(int64(v.stat.Bsize))
	}
	for _, v := range volumes {
		free := int64(v.stat.Bavail) * int64(v.stat.Bsize)
		if os.Geteuid() == 0 {
			free = int64(v.stat.Bfree) * int64(v.stat.Bsize)
		}
		if v.need > free {
			return fmt.Errorf("restore: %s has %d bytes free and %d are needed beside the old tree: %w", v.path, free, v.need, unix.ENOSPC)
		}
		if v.stat.Files > 0 && v.nodes > int64(v.stat.Ffree) {
			return fmt.Errorf("restore: %s has %d inodes free and %d are needed: %w", v.path, v.stat.Ffree, v.nodes, unix.ENOSPC)
		}
	}
	return nil
}

// allocation is what f takes beyond what its resumed copy has.
func (f *file) allocation(block int64) int64 {
	var n int64
	for i := range f.entry.Chunks {
		n += (int64(f.entry.Chunks[i].Length) + block - 1) / block * block
	}
	for _, name := range slices.Backward(f.t.left) {
		if st, ok := resumable(f.t.stage.tree, path.Join(name, f.entry.Path)); ok {
			return max(0, n-st.Blocks*512)
		}
	}
	return n
}
