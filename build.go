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
	base := walker{index: r.base}
	r.entries = make([]snapshot.Entry, len(in))
	rep := StoreReport{FilesRemoved: r.report.FilesRemoved, BytesRemoved: r.report.BytesRemoved}
	for i := range in {
		e, out := &in[i], &r.entries[i]
		*out = metadata(e)
		if err := r.xattrs(e, base.find(e.Path), out); err != nil {
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
	r.report = rep
	r.warnings = r.img.Skipped()
	return nil
}

// content puts the chunks of a file into its entry and counts it.
func (r *storeRun) content(e *source.Entry, out *snapshot.Entry, rep *StoreReport) error {
	var sent int64
	if b := r.retained[e.Path]; b != nil {
		out.ChunkSize, out.Chunks = b.ChunkSize, b.Chunks
	} else if c := r.read[e.Path]; c != nil {
		out.ChunkSize, out.Chunks, sent = c.chunkSize, c.chunks, c.sent
	} else {
		return fmt.Errorf("%s: neither read nor proven unchanged", e.Path)
	}
	var data int64
	for i := range out.Chunks {
		data += int64(out.Chunks[i].Length)
	}
	rep.BytesUploaded += sent
	rep.BytesRetained += data - sent
	if sent > 0 {
		rep.FilesUploaded++
	} else {
		rep.FilesRetained++
	}
	return nil
}

// xattrs fills the extended attributes in. A file that the cache proves unchanged has
// the base's: setting one would have moved its ctime. Files without a ctime in their
// identity are asked.
func (r *storeRun) xattrs(e *source.Entry, b *snapshot.Entry, out *snapshot.Entry) error {
	if kept := r.retained[e.Path]; kept != nil && kept == b && !e.Immutable {
		out.Xattrs = b.Xattrs
		return nil
	}
	list, err := r.img.Xattrs(e.Path)
	if err != nil {
		return err
	}
	for _, x := range list {
		out.Xattrs = append(out.Xattrs, snapshot.Xattr(x))
	}
	return nil
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
