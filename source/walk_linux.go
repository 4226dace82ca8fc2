package source

import (
	"context"
	"errors"
	"fmt"
	"os/user"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	listTries = 8    // a directory that changes while it is listed is listed again
	statBatch = 1024 // names of one directory that one goroutine stats
)

// A walker lists a tree. It hides the parallelism: directories, and batches of the
// names of a large one, go to idle goroutines, and run in place when there is none.
type walker struct {
	tree    *tree
	exclude patterns
	group   *errgroup.Group
	ctx     context.Context

	// mu guards skipped.
	mu      sync.Mutex
	skipped []string
}

// A folder is a directory that was walked: its entries in the order of their names,
// and the folders below those that are directories.
type folder struct {
	entries []Entry
	below   map[int]*folder // by index in entries
}

// walk returns the entries of a tree in the order of Image.Entries and the lines of
// Image.Skipped. A name that vanished in between is an error that matches errGone.
func walk(ctx context.Context, t *tree, exclude patterns) ([]Entry, []string, error) {
	w := &walker{tree: t, exclude: exclude}
	w.group, w.ctx = errgroup.WithContext(ctx)
	w.group.SetLimit(max(4, 2*runtime.GOMAXPROCS(0)))

	root, err := w.root()
	if err != nil {
		return nil, nil, err
	}
	top := &folder{entries: []Entry{root}}
	w.group.Go(func() error { return w.descend(top, 0) })
	if err := w.group.Wait(); err != nil {
		return nil, nil, err
	}

	entries := (&flattener{}).flatten(top)
	slices.Sort(w.skipped)
	return entries, w.skipped, nil
}

func (w *walker) root() (Entry, error) {
	st, err := w.tree.stat("")
	if err != nil {
		return Entry{}, advise(w.tree.path, err)
	}
	return entryOf("", &st), nil
}

// descend walks the directory parent.entries[i] and puts it below its parent.
func (w *walker) descend(parent *folder, i int) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	e := &parent.entries[i]
	f, err := w.read(e)
	if err != nil {
		return err
	}
	w.mu.Lock()
	if parent.below == nil {
		parent.below = map[int]*folder{}
	}
	parent.below[i] = f
	w.mu.Unlock()

	for j := range f.entries {
		if f.entries[j].Type != Directory {
			continue
		}
		down := func() error { return w.descend(f, j) }
		if w.group.TryGo(down) {
			continue
		}
		if err := down(); err != nil {
			return err
		}
	}
	return nil
}

// read lists one directory and stats what is in it.
func (w *walker) read(dir *Entry) (*folder, error) {
	fd, err := w.tree.open(dir.Path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, w.explain(dir.Path, err)
	}
	defer unix.Close(fd)
	if st, err := statFD(fd); err != nil || st.Ino != dir.Identity.Ino || device(&st) != dir.Identity.Dev {
		return nil, w.explain(dir.Path, firstError(err, errGone))
	}

	names, err := listStable(fd)
	if err != nil {
		return nil, w.explain(dir.Path, err)
	}
	paths := w.keep(dir.Path, names)
	entries := make([]Entry, len(paths))
	if err := w.statAll(fd, dir.Path, paths, entries); err != nil {
		return nil, err
	}
	return &folder{entries: dropSkipped(entries)}, nil
}

// dropSkipped removes the entries that statBatch left empty.
func dropSkipped(entries []Entry) []Entry {
	kept := entries[:0]
	for i := range entries {
		if entries[i].Path == "" {
			continue
		}
		if len(kept) == i {
			kept = entries[:i+1]
			continue
		}
		kept = append(kept, entries[i])
	}
	return kept
}

// keep turns names into paths, leaves out what is excluded, and sorts.
func (w *walker) keep(dir string, names []string) []string {
	paths := names[:0]
	for _, name := range names {
		p := name
		if dir != "" {
			p = dir + "/" + name
		}
		if !w.exclude.match(p, name) {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	return paths
}

// statAll fills entries[i] for paths[i]; an entry that is skipped keeps its empty
// path. The batches are done when it returns.
func (w *walker) statAll(fd int, dir string, paths []string, entries []Entry) error {
	var batches sync.WaitGroup
	var mu sync.Mutex
	var first error
	for from := 0; from < len(paths); from += statBatch {
		to := min(from+statBatch, len(paths))
		batches.Add(1)
		batch := func() {
			defer batches.Done()
			if err := w.statBatch(fd, dir, paths[from:to], entries[from:to]); err != nil {
				mu.Lock()
				defer mu.Unlock()
				first = firstError(first, err)
			}
		}
		if to == len(paths) || !w.group.TryGo(func() error { batch(); return nil }) {
			batch()
		}
	}
	batches.Wait()
	return first
}

func (w *walker) statBatch(fd int, dir string, paths []string, entries []Entry) error {
	var st unix.Statx_t
	for i, p := range paths {
		name := p
		if dir != "" {
			name = p[len(dir)+1:]
		}
		if err := statAt(fd, name, &st); err != nil {
			return w.explain(p, err)
		}
		if w.tree.foreign(&st) {
			return w.tree.mountError(p)
		}
		if kind := special(st.Mode); kind != "" {
			w.skip(p + ": " + kind)
			continue
		}
		entries[i] = entryOf(p, &st)
		if entries[i].Type != Symlink {
			continue
		}
		target, err := readLink(fd, name, int(st.Size))
		if err != nil {
			return w.explain(p, err)
		}
		entries[i].Link = target
	}
	return nil
}

func (w *walker) skip(line string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.skipped = append(w.skipped, line)
}

func (w *walker) explain(path string, err error) error {
	return advise(join(w.tree.path, path), err)
}

// listStable returns the names in a directory. The times of the directory are
// compared before and after: a rename while a directory is read can hide both names.
func listStable(fd int) ([]string, error) {
	for range listTries {
		before, err := statFD(fd)
		if err != nil {
			return nil, err
		}
		names, err := list(fd)
		if err != nil {
			return nil, gone(err)
		}
		after, err := statFD(fd)
		if err != nil {
			return nil, err
		}
		if before.Mtime == after.Mtime && before.Ctime == after.Ctime {
			return names, nil
		}
		if _, err := unix.Seek(fd, 0, 0); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: names come and go while the directory is listed", errGone)
}

var listBuffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

func list(fd int) ([]string, error) {
	buf := listBuffers.Get().(*[]byte)
	defer listBuffers.Put(buf)
	var names []string
	for {
		n, err := unix.ReadDirent(fd, *buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent((*buf)[:n], -1, names)
	}
}

// special names what a backup leaves out; empty for what it keeps.
func special(mode uint16) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK:
		return ""
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFIFO:
		return "FIFO"
	case unix.S_IFBLK, unix.S_IFCHR:
		return "device"
	}
	return "unknown type of file"
}

func entryOf(path string, st *unix.Statx_t) Entry {
	e := Entry{
		Path:     path,
		Mode:     uint32(st.Mode) & 0o7777,
		UID:      st.Uid,
		GID:      st.Gid,
		Links:    st.Nlink,
		Identity: identity(st),
		// With DAX a store reaches the disk without a dirty page that a flush could
		// write protect.
		Fresh: st.Attributes&unix.STATX_ATTR_DAX != 0,
	}
	e.MTime = e.Identity.MTime
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.Type = Directory
	case unix.S_IFLNK:
		e.Type = Symlink
	default:
		e.Size = e.Identity.Size
	}
	return e
}

func readLink(fd int, name string, size int) (string, error) {
	for size = max(size, 64); ; size *= 2 {
		buf := make([]byte, size+1)
		n, err := unix.Readlinkat(fd, name, buf)
		if err == unix.EINVAL {
			return "", errGone
		}
		if err != nil {
			return "", gone(err)
		}
		if n < len(buf) {
			return string(buf[:n]), nil
		}
	}
}

// A flattener brings folders into the order of whole paths, in which a directory's
// content does not always follow the directory: "a-b" sorts between "a" and "a/b".
type flattener struct {
	entries       []Entry
	users, groups map[uint32]string
}

func (fl *flattener) flatten(top *folder) []Entry {
	fl.users, fl.groups = map[uint32]string{}, map[uint32]string{}
	fl.entries = make([]Entry, 0, top.count())
	fl.add(top)
	return fl.entries
}

func (f *folder) count() int {
	n := len(f.entries)
	for _, below := range f.below {
		n += below.count()
	}
	return n
}

func (fl *flattener) add(f *folder) {
	if len(f.below) == 0 {
		for i := range f.entries {
			fl.emit(&f.entries[i])
		}
		return
	}

	type part struct {
		key   string
		entry *Entry
		below *folder
	}
	parts := make([]part, 0, len(f.entries)+len(f.below))
	for i := range f.entries {
		parts = append(parts, part{key: f.entries[i].Path, entry: &f.entries[i]})
		if below := f.below[i]; below != nil {
			parts = append(parts, part{key: f.entries[i].Path + "/", below: below})
		}
	}
	slices.SortFunc(parts, func(a, b part) int { return strings.Compare(a.key, b.key) })
	for _, p := range parts {
		if p.below != nil {
			fl.add(p.below)
			continue
		}
		fl.emit(p.entry)
	}
}

func (fl *flattener) emit(e *Entry) {
	e.User = name(fl.users, e.UID, userName)
	e.Group = name(fl.groups, e.GID, groupName)
	fl.entries = append(fl.entries, *e)
}

func name(known map[uint32]string, id uint32, look func(string) string) string {
	n, ok := known[id]
	if !ok {
		n = look(strconv.FormatUint(uint64(id), 10))
		known[id] = n
	}
	return n
}

func userName(id string) string {
	u, err := user.LookupId(id)
	if err != nil {
		return ""
	}
	return u.Username
}

func groupName(id string) string {
	g, err := user.LookupGroupId(id)
	if err != nil {
		return ""
	}
	return g.Name
}

// firstError returns the first of two errors that is one.
func firstError(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// patterns are the globs of DirOptions.Exclude.
type patterns []string

func parsePatterns(globs []string) (patterns, error) {
	for _, g := range globs {
		if _, err := path.Match(g, ""); err != nil {
			return nil, fmt.Errorf("exclude %q: %w", g, err)
		}
		if g == "" {
			return nil, errors.New("exclude: empty pattern")
		}
	}
	return globs, nil
}

func (p patterns) match(rel, base string) bool {
	for _, g := range p {
		if ok, _ := path.Match(g, base); ok {
			return true
		}
		if ok, _ := path.Match(g, rel); ok {
			return true
		}
	}
	return false
}
