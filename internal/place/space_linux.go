package place

import (
	"fmt"
	"math"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"
)

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

// volume is a file system that targets lie on.
type volume struct {
	path        string // one target's directory
	old         bool   // some target has a tree, which stays until the swap
	need, nodes int64
	stat        unix.Statfs_t
}

// room tells whether every file system has room for the new trees.
func (r *run) room() error {
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
		v.old = v.old || t.holds()
		v.nodes += int64(len(t.store.Index.Entries))
	}
	for i := range r.wants.files {
		f := &r.wants.files[i]
		v := byTarget[f.t]
		v.need += f.allocation(int64(v.stat.Bsize))
	}
	for _, v := range volumes {
		if err := v.enough(); err != nil {
			return fmt.Errorf("restore: %w", err)
		}
	}
	return nil
}

// enough compares the need with what is free.
func (v *volume) enough() error {
	free := int64(v.stat.Bavail) * int64(v.stat.Bsize)
	if os.Geteuid() == 0 {
		free = int64(v.stat.Bfree) * int64(v.stat.Bsize)
	}
	switch {
	case v.need > free:
		return v.lack(size(free, math.Floor), size(v.need, math.Ceil))
	case v.stat.Files > 0 && v.nodes > int64(v.stat.Ffree):
		return v.lack(fmt.Sprintf("%d inodes", v.stat.Ffree), fmt.Sprint(v.nodes))
	}
	return nil
}

func (v *volume) lack(free, need string) error {
	beside := ""
	if v.old {
		beside = " beside the old tree, which stays until the new one is complete"
	}
	return fmt.Errorf("%w: %s has %s free and %s are needed%s; free space there, or restore to another file system",
		unix.ENOSPC, v.path, free, need, beside)
}

// size writes a number of bytes for people, rounded to a tenth of the unit.
func size(n int64, round func(float64) float64) string {
	units := []string{"KiB", "MiB", "GiB", "TiB"}
	if n < 1<<10 {
		return fmt.Sprintf("%d bytes", n)
	}
	for i, unit := range units {
		if one := int64(1) << (10 * (i + 1)); n < one<<10 || i == len(units)-1 {
			return fmt.Sprintf("%.1f %s", round(10*float64(n)/float64(one))/10, unit)
		}
	}
	return ""
}

// holds reports whether the target is a directory with something in it.
func (t *target) holds() bool {
	names, err := t.above.names(t.base)
	return err == nil && slices.ContainsFunc(names, func(n string) bool { return n != stagingName && n != lostFound })
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
