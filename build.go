package snapferry

import (
	"fmt"

	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// build makes the entries of the index, and the counts, once all content is known.
func (r *storeRun) build() error {
	in := r.img.Entries()
	links := source.HardLinks(in)
	entries := make([]snapshot.Entry, len(in))
	rep := StoreReport{FilesRemoved: r.report.FilesRemoved, BytesRemoved: r.report.BytesRemoved}
	for i := range in {
		e, out := &in[i], &entries[i]
		*out = metadata(e)
		if err := r.attributes(e, out); err != nil {
			return err
		}
		if e.Type != source.Regular {
			continue
		}
		if first, ok := links[i]; ok {
			out.Link, out.Size = in[first].Path, 0
			continue
		}
		if err := r.content(e, out, &rep); err != nil {
			return err
		}
	}
	r.report, r.entries = rep, entries
	r.warnings = r.img.Skipped()
	return nil
}

// content puts the chunks of a file into its entry and counts it.
func (r *storeRun) content(e *source.Entry, out *snapshot.Entry, rep *StoreReport) error {
	var m moved
	if b := r.retained[e.Path]; b != nil {
		out.ChunkSize, out.Chunks = b.ChunkSize, b.Chunks
	} else if c := r.read[e.Path]; c != nil {
		out.ChunkSize, out.Chunks, m = c.chunkSize, c.chunks, c.moved
	} else {
		return fmt.Errorf("%s: neither read nor proven unchanged", e.Path)
	}
	var data int64
	for i := range out.Chunks {
		data += int64(out.Chunks[i].Length)
	}
	rep.BytesUploaded += m.sent
	rep.BytesStored += m.stored
	rep.BytesRewritten += m.rewritten
	rep.BytesRetained += data - m.sent
	if m.sent > 0 {
		rep.FilesUploaded++
	} else {
		rep.FilesRetained++
	}
	return nil
}

// attributes fills the extended attributes in. A file that was proven unchanged by its
// ctime has those of the base, and one that was read has those found then; everything
// else is asked, files without a ctime in their identity too.
func (r *storeRun) attributes(e *source.Entry, out *snapshot.Entry) (err error) {
	if kept := r.retained[e.Path]; kept != nil && !e.Immutable {
		out.Xattrs = kept.Xattrs
	} else if c := r.read[e.Path]; c != nil && kept == nil {
		out.Xattrs = c.xattrs
	} else {
		out.Xattrs, err = r.xattrs(e)
	}
	return err
}

func (r *storeRun) xattrs(e *source.Entry) ([]snapshot.Xattr, error) {
	list, err := r.img.Xattrs(e.Path)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	out := make([]snapshot.Xattr, len(list))
	for i, x := range list {
		out[i] = snapshot.Xattr(x)
	}
	return out, nil
}

func metadata(e *source.Entry) snapshot.Entry {
	out := snapshot.Entry{
		Path: e.Path, Mode: e.Mode, UID: e.UID, GID: e.GID, User: e.User, Group: e.Group,
		MTime: snapshot.Time(e.MTime), Size: e.Size,
	}
	switch e.Type {
	case source.Directory:
		out.Type = snapshot.Dir
	case source.Symlink:
		out.Type, out.Link = snapshot.Symlink, e.Link
	}
	return out
}
