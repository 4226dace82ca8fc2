package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/snapferry/snapferry/snapshot"
)

// shownFile is one entry of a tree in JSON.
type shownFile struct {
	Path       string `json:"path"`
	Path64     string `json:"path_base64,omitempty"`
	Type       string `json:"type"` // file, dir, symlink or hardlink
	Mode       string `json:"mode"` // octal
	UID        uint32 `json:"uid"`
	GID        uint32 `json:"gid"`
	User       string `json:"user,omitempty"`
	User64     string `json:"user_base64,omitempty"`
	Group      string `json:"group,omitempty"`
	Group64    string `json:"group_base64,omitempty"`
	MTime      string `json:"mtime"`
	Size       int64  `json:"size"`
	Link       string `json:"link,omitempty"` // target of a symlink, other name of a hard link
	Link64     string `json:"link_base64,omitempty"`
	Xattrs     int    `json:"xattrs,omitempty"` // how many
	ChunkCount int    `json:"chunks,omitempty"`
}

func shownFiles(x *snapshot.Index) []shownFile {
	if x == nil {
		return nil
	}
	list := make([]shownFile, 0, len(x.Entries))
	for i := range x.Entries {
		e := &x.Entries[i]
		list = append(list, shownFile{
			Path: valid(e.Path), Path64: exact(e.Path), Type: typeName(e), Mode: fmt.Sprintf("%04o", e.Mode),
			UID: e.UID, GID: e.GID, User: valid(e.User), User64: exact(e.User), Group: valid(e.Group), Group64: exact(e.Group),
			MTime: mtime(e).Format("2006-01-02T15:04:05.000000000Z"), Size: e.Size,
			Link: valid(e.Link), Link64: exact(e.Link), Xattrs: len(e.Xattrs), ChunkCount: len(e.Chunks),
		})
	}
	return list
}

// valid replaces what JSON cannot hold.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func mtime(e *snapshot.Entry) time.Time { return time.Unix(e.MTime.Sec, int64(e.MTime.Nsec)).UTC() }

func isHardLink(e *snapshot.Entry) bool { return e.Type == snapshot.Regular && e.Link != "" }

func typeName(e *snapshot.Entry) string {
	switch {
	case e.Type == snapshot.Dir:
		return "dir"
	case e.Type == snapshot.Symlink:
		return "symlink"
	case isHardLink(e):
		return "hardlink"
	}
	return "file"
}

// printTree writes a tree in the manner of ls -l. A hard link shows the size 0 and,
// after "=>", the name that has the content.
func printTree(w io.Writer, x *snapshot.Index) {
	rows := make([]string, 0, len(x.Entries))
	for i := range x.Entries {
		e := &x.Entries[i]
		rows = append(rows, strings.Join([]string{
			modeText(e), owner(e.User, e.UID), owner(e.Group, e.GID), strconv.FormatInt(e.Size, 10),
			mtime(e).Format("2006-01-02 15:04:05"), nameText(e),
		}, "\t"))
	}
	table(w, rows)
}

func owner(name string, id uint32) string {
	if name == "" {
		return strconv.FormatUint(uint64(id), 10)
	}
	return quote(name)
}

func nameText(e *snapshot.Entry) string {
	name := e.Path
	if name == "" {
		name = "."
	}
	switch {
	case e.Type == snapshot.Symlink:
		return quote(name) + " -> " + quote(e.Link)
	case isHardLink(e):
		return quote(name) + " => " + quote(e.Link)
	}
	return quote(name)
}

// modeText writes type and permissions as ls does.
func modeText(e *snapshot.Entry) string {
	text := []byte("-rwxrwxrwx")
	switch e.Type {
	case snapshot.Dir:
		text[0] = 'd'
	case snapshot.Symlink:
		text[0] = 'l'
	}
	for i := range 9 {
		if e.Mode&(1<<(8-i)) == 0 {
			text[1+i] = '-'
		}
	}
	special(text, 3, e.Mode&0o4000 != 0, 's')
	special(text, 6, e.Mode&0o2000 != 0, 's')
	special(text, 9, e.Mode&0o1000 != 0, 't')
	return string(text)
}

// special puts setuid, setgid or sticky in the place of x, in capitals without x.
func special(text []byte, at int, set bool, letter byte) {
	if !set {
		return
	}
	if text[at] == '-' {
		letter -= 'a' - 'A'
	}
	text[at] = letter
}
