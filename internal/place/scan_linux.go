package place

import (
	"context"
	"errors"
	"path"
	"slices"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/snapshot"
)

// scanUnit is how much of one file one job hashes; a multiple of every cell size.
const scanUnit = 64 << 20

// origin is a directory on the local disk whose files may hold wanted chunks. It is only
// read. Any file may serve any other: what counts is the digest of the bytes in memory,
// which are written from that very buffer, so a file that changes meanwhile does no harm.
type origin struct {
	t    *target
	tree *tree
	top  string // where the store's tree begins in tree
	skip string // a path to leave out
}

// scan is one run over local files.
type scan struct {
	b    *builder // nil: dry run
	w    *wants
	opts *Options
	jobs chan scanJob
}

// scanJob is a part of one file.
type scanJob struct {
	tree     *tree
	path     string
	size     int64
	from, to int64
	like     *file // the wanted file of the same path, whose chunks tell where to cut
	self     *file // the file is this one's staged copy, and chunks may be in place already
}

// local puts in place what the origins and the resumed files hold.
func (s *scan) local(ctx context.Context, origins []origin, workers int) error {
	g, ctx := errgroup.WithContext(ctx)
	s.jobs = make(chan scanJob, workers)
	g.Go(func() error {
		defer close(s.jobs)
		if err := s.resumed(ctx); err != nil {
			return err
		}
		for _, o := range origins {
			if err := s.walk(ctx, o); err != nil {
				return err
			}
		}
		return nil
	})
	for range workers {
		g.Go(func() error {
			var buf []byte
			for j := range s.jobs {
				if buf == nil {
					buf = make([]byte, s.w.longest)
				}
				if err := s.job(ctx, j, buf); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// resumed sends the staged files of an earlier run.
func (s *scan) resumed(ctx context.Context) error {
	for i := range s.w.files {
		if f := &s.w.files[i]; f.resumed {
			err := s.send(ctx, scanJob{tree: f.t.tree, path: f.entry.Path, size: f.entry.Size, like: f, self: f})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// walk sends every file below an origin that may hold a chunk. What cannot be read is no
// source, and no error either.
func (s *scan) walk(ctx context.Context, o origin) error {
	match := s.w.pathsOf(o.t)
	for todo := []string{o.top}; len(todo) > 0; {
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		inner, err := s.list(ctx, o, dir, match)
		if err != nil {
			return err
		}
		todo = append(todo, inner...)
	}
	return nil
}

// list sends the files of one directory and returns the directories in it.
func (s *scan) list(ctx context.Context, o origin, dir string, match map[string]*file) (inner []string, err error) {
	d, err := o.tree.sub(dir)
	if err != nil {
		return nil, nil
	}
	defer d.close()
	names, err := d.names("")
	if err != nil {
		return nil, nil
	}
	slices.Sort(names)
	for _, name := range names {
		p := path.Join(dir, name)
		st, err := d.lstat(name)
		switch {
		case err != nil || p == o.skip:
		case isDir(st):
			inner = append(inner, p)
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			like := match[rel(o.top, p)]
			if !s.mayHold(st, like) {
				continue
			}
			if err := s.send(ctx, scanJob{tree: o.tree, path: p, size: st.Size, like: like}); err != nil {
				return nil, err
			}
		}
	}
	return inner, nil
}

func rel(top, p string) string {
	if top == "" {
		return p
	}
	return p[min(len(top)+1, len(p)):]
}

// pathsOf maps the paths of a target's wanted files. One target at a time is kept.
func (w *wants) pathsOf(t *target) map[string]*file {
	m := map[string]*file{}
	for i := range w.files {
		if w.files[i].t == t {
			m[w.files[i].entry.Path] = &w.files[i]
		}
	}
	return m
}

// mayHold reports whether cutting this file can give a chunk of a length that is wanted.
func (s *scan) mayHold(st unix.Stat_t, like *file) bool {
	if st.Size == 0 || like != nil {
		return st.Size > 0
	}
	if st.Blocks*512 < st.Size {
		return true // holes: any length
	}
	return slices.ContainsFunc(s.w.cells, func(cell uint32) bool {
		return st.Size >= int64(cell) && s.w.wanted(int64(cell)) || s.w.wanted(st.Size%int64(cell))
	})
}

func (s *scan) send(ctx context.Context, j scanJob) error {
	for from := int64(0); from < j.size; from += scanUnit {
		j.from, j.to = from, min(from+scanUnit, j.size)
		select {
		case s.jobs <- j:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// job hashes the cuts of one part of a file and uses what is wanted.
func (s *scan) job(ctx context.Context, j scanJob, buf []byte) error {
	fd, err := j.tree.open(j.path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil // not a source
	}
	defer unix.Close(fd)
	for _, c := range s.cuts(j, fd) {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if j.self == nil && !s.w.wanted(c.Length) {
			continue
		}
		p := buf[:c.Length]
		if !readAt(fd, p, c.Offset) {
			continue
		}
		if err := s.use(ctx, snapshot.Sum(p), p, j.self, c.Offset); err != nil {
			return err
		}
	}
	return nil
}

// cuts tells where to cut: where the file of the same path is cut, else at every size of
// cells that occurs.
func (s *scan) cuts(j scanJob, fd int) []snapshot.Run {
	var cuts []snapshot.Run
	if j.like != nil {
		for _, c := range j.like.entry.Chunks {
			if c.Offset >= j.from && c.Offset < j.to && c.Offset+int64(c.Length) <= j.size {
				cuts = append(cuts, snapshot.Run{Offset: c.Offset, Length: int64(c.Length)})
			}
		}
		return cuts
	}
	runs := dataRuns(fd, j.from, j.to, j.size)
	for _, cell := range s.w.cells {
		for _, r := range runs {
			cuts = appendCells(cuts, r, int64(cell))
		}
	}
	return cuts
}

func appendCells(cuts []snapshot.Run, r snapshot.Run, cell int64) []snapshot.Run {
	for off, end := r.Offset, r.Offset+r.Length; off < end; {
		next := min(off-off%cell+cell, end)
		cuts = append(cuts, snapshot.Run{Offset: off, Length: next - off})
		off = next
	}
	return cuts
}

// dataRuns finds the data between from and to by the rules of S5: a hole begins and ends at
// multiples of 4 KiB and is at least 64 KiB long.
func dataRuns(fd int, from, to, size int64) []snapshot.Run {
	var runs []snapshot.Run
	for at := from; at < to; {
		data, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && data >= to {
			break
		}
		if err != nil {
			return []snapshot.Run{{Offset: from, Length: to - from}}
		}
		hole, err := unix.Seek(fd, data, unix.SEEK_HOLE)
		if err != nil || hole > to {
			hole = to
		}
		data = max(data&^(snapshot.HoleAlign-1), from)
		if hole < size {
			hole = min((hole+snapshot.HoleAlign-1)&^(snapshot.HoleAlign-1), to)
		}
		if n := len(runs) - 1; n >= 0 && data-runs[n].Offset-runs[n].Length < snapshot.MinHoleSize {
			runs[n].Length = hole - runs[n].Offset
		} else {
			runs = append(runs, snapshot.Run{Offset: data, Length: hole - data})
		}
		at = hole
	}
	return runs
}

func readAt(fd int, p []byte, offset int64) bool {
	for len(p) > 0 {
		n, err := retry(func() (int, error) { return unix.Pread(fd, p, offset) })
		if err != nil || n == 0 {
			return false
		}
		p, offset = p[n:], offset+int64(n)
	}
	return true
}

// use takes local bytes for every place that still wants them. In the staged copy of self
// they may lie where they belong.
func (s *scan) use(ctx context.Context, d snapshot.Digest, p []byte, self *file, offset int64) error {
	lo, hi := s.w.group(d, uint32(len(p)))
	for i := lo; i < hi; i++ {
		if s.w.isClaimed(i) || !s.w.claim(i) {
			continue
		}
		f := s.w.file(i)
		f.t.report.reused.Add(int64(len(p)))
		if s.b == nil {
			continue
		}
		var err error
		if f == self && s.w.chunk(i).Offset == offset {
			err = s.b.keep(ctx, f)
		} else {
			err = s.b.put(ctx, i, p)
		}
		if err != nil {
			return err
		}
		s.opts.bytes(f.t, len(p))
	}
	return nil
}

// keep counts a chunk that is in its place already.
func (b *builder) keep(ctx context.Context, f *file) error {
	fd, err := f.open()
	if err != nil {
		return f.t.fault(err)
	}
	return b.advance(ctx, f, fd)
}

func (o *Options) bytes(t *target, n int) {
	if o.OnBytes != nil {
		o.OnBytes(t.store.Name, int64(n))
	}
}
