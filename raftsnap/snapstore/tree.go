package snapstore

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"time"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/snapshot"
)

// mark tells a file, as it was when its bytes were verified, from one that was replaced or
// written since. The time of the inode's last change is left out: it moves whenever a link
// to the file is made or removed, and snapshots live on links. The zero mark fits nothing.
type mark struct {
	Ino         uint64
	Size, MTime int64
}

func (m mark) is(other mark) bool { return m == other && m != mark{} }

// found is a directory or file that lies in a snapshot's data.
type found struct {
	path  string
	dir   bool
	size  int64
	mark  mark
	links uint64
}

// errForeign is what scan says of what no snapshot holds.
var errForeign = errors.New("a snapshot holds files and directories only")

// scan lists what lies below a directory, sorted as in an index.
func (d *disk) scan(dir string) ([]found, error) {
	var all []found
	for todo := []string{""}; len(todo) > 0; {
		at := todo[0]
		todo = todo[1:]
		list, err := d.names(path.Join(dir, at))
		if err != nil {
			return nil, err
		}
		for _, entry := range list {
			f, err := d.look(dir, path.Join(at, entry.Name()))
			if err != nil {
				return nil, err
			}
			if all = append(all, f); f.dir {
				todo = append(todo, f.path)
			}
		}
		if len(all) > snapshot.MaxEntries {
			return nil, fmt.Errorf("more than %d files", snapshot.MaxEntries)
		}
	}
	slices.SortFunc(all, func(a, b found) int { return cmp.Compare(a.path, b.path) })
	return all, nil
}

func (d *disk) look(dir, name string) (found, error) {
	info, err := d.lstat(path.Join(dir, name))
	if err != nil {
		return found{}, err
	}
	f := found{path: name, dir: info.IsDir()}
	if f.dir {
		return f, nil
	}
	if !info.Mode().IsRegular() {
		return f, fmt.Errorf("%s is a %s: %w", name, kindOf(info.Mode()), errForeign)
	}
	f.size = info.Size()
	f.mark, f.links = identify(info)
	return f, nil
}

func kindOf(m fs.FileMode) string {
	switch {
	case m&fs.ModeSymlink != 0:
		return "symbolic link"
	case m&fs.ModeSocket != 0:
		return "socket"
	case m&fs.ModeNamedPipe != 0:
		return "named pipe"
	}
	return "device"
}

// compare tells the first difference in names, types and sizes between an index and what
// lies there. The digests alone would not notice a file too many.
func compare(x *snapshot.Index, all []found) error {
	for i := range x.Entries {
		e := &x.Entries[i]
		if i >= len(all) || e.Path < all[i].path {
			return corruptf("%s is missing", e.Path)
		}
		f := &all[i]
		switch {
		case f.path < e.Path:
			return corruptf("%s does not belong to the snapshot", f.path)
		case f.dir != (e.Type == snapshot.Dir):
			return corruptf("%s is of another type", e.Path)
		case f.size != e.Size:
			return corruptf("%s has %d bytes, %d are right", e.Path, f.size, e.Size)
		}
	}
	if len(all) > len(x.Entries) {
		return corruptf("%s does not belong to the snapshot", all[len(x.Entries)].path)
	}
	return nil
}

// syncTree makes the names in all directories of a snapshot's data durable, children first,
// by a call of syncDir for each.
func (d *disk) syncTree(dir string, x *snapshot.Index, syncDir func(name string) error) error {
	for i := range slices.Backward(x.Entries) {
		if e := &x.Entries[i]; e.Type == snapshot.Dir {
			if err := syncDir(path.Join(dir, e.Path)); err != nil {
				return err
			}
		}
	}
	return syncDir(dir)
}

// racy is how old a file must be when it is read for a later write to move its time in any
// case: two ticks of the slowest clock that kernels stamp files with.
const racy = 20 * time.Millisecond

// settled returns the mark of a file whose reading began at the given time, or no mark if
// a write since then might not show.
func (m mark) settled(began time.Time) mark {
	if m.MTime > began.Add(-racy).UnixNano() {
		return mark{}
	}
	return m
}

const (
	marksKind    = "marks"
	marksVersion = 1
	markLen      = 24
)

// encodeMarks encodes the marks of all entries, in their order. They are a note for the
// next start and not part of the snapshot: if they are lost, files are read once more.
func encodeMarks(marks []mark) []byte {
	b := make([]byte, 0, len(marks)*markLen)
	for _, m := range marks {
		b = binary.LittleEndian.AppendUint64(b, m.Ino)
		b = binary.LittleEndian.AppendUint64(b, uint64(m.Size))
		b = binary.LittleEndian.AppendUint64(b, uint64(m.MTime))
	}
	return frame.Encode(marksKind, marksVersion, b)
}

// decodeMarks returns n marks, without any where data is not what encodeMarks wrote.
func decodeMarks(data []byte, n int) []mark {
	marks := make([]mark, n)
	b, err := frame.Decode(marksKind, marksVersion, data)
	if err != nil || len(b) != n*markLen {
		return marks
	}
	for i := range marks {
		at := b[i*markLen:]
		marks[i] = mark{binary.LittleEndian.Uint64(at), int64(binary.LittleEndian.Uint64(at[8:])), int64(binary.LittleEndian.Uint64(at[16:]))}
	}
	return marks
}

// loadMarks reads the marks of a snapshot.
func (d *disk) loadMarks(name string, n int) []mark {
	data, err := d.readFile(path.Join(name, marksName), int64(n)*markLen+frameHeader)
	if err != nil {
		return make([]mark, n)
	}
	return decodeMarks(data, n)
}

const frameHeader = 200 // bytes that the header line of a frame has at most

// size writes a number of bytes for people.
func size(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for ; v >= 1024 && i < len(units)-1; i++ {
		v /= 1024
	}
	if i == 0 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f %s", math.Round(10*v)/10, units[i])
}

// closeQuietly closes a file that was only read.
func closeQuietly(f *os.File) { _ = f.Close() }
