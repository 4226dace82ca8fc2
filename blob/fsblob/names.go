package fsblob

import (
	"path/filepath"
	"strings"

	"github.com/snapferry/snapferry/blob"
)

const (
	// maxName is the longest file name made of a component; longer ones are cut.
	maxName = 240
	// maxNames is how many names a component can become: a byte takes up to three, and
	// a cut may come two before maxName.
	maxNames = 3*blob.MaxKey/(maxName-2) + 1
	// more ends the name of a directory in which a component goes on.
	more = "%+"
	// tempDir is below the root and holds temporary files. No component's name begins
	// with a dot.
	tempDir = ".tmp"

	hexDigits = "0123456789ABCDEF"
)

// path is the file of a valid key.
func (d *Driver) path(key string) string {
	var b strings.Builder
	b.WriteString(d.root)
	for c := range strings.SplitSeq(key, "/") {
		for _, name := range names(c) {
			b.WriteByte(filepath.Separator)
			b.WriteString(name)
		}
	}
	return b.String()
}

func plain(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-'
}

// escape writes every byte that is not plain, and a leading dot, as %XX.
func escape(component string) string {
	var b strings.Builder
	for i := range len(component) {
		c := component[i]
		if plain(c) && (c != '.' || i > 0) {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
	return b.String()
}

// names is a component as file names: one, or when it is too long directories that end
// in "more" and the rest below them.
func names(component string) []string {
	var list []string
	name := escape(component)
	for len(name) > maxName {
		n := maxName
		switch { // not within an escape
		case name[n-1] == '%':
			n--
		case name[n-2] == '%':
			n -= 2
		}
		list = append(list, name[:n]+more)
		if name = name[n:]; name[0] == '.' {
			name = "%2E" + name[1:]
		}
	}
	return append(list, name)
}

// component is the inverse of names. It is false for what names never gives, so every
// object has one path, and files that are not ours are not taken for objects.
func component(list []string) (string, bool) {
	if len(list) == 1 && isPlain(list[0]) {
		return list[0], true
	}
	var b strings.Builder
	for i, name := range list {
		if i < len(list)-1 {
			name = strings.TrimSuffix(name, more)
		}
		if !unescape(&b, name) {
			return "", false
		}
	}
	c := b.String()
	if blob.ValidKey(c) != nil || strings.IndexByte(c, '/') >= 0 {
		return "", false
	}
	return c, strings.Join(names(c), "/") == strings.Join(list, "/")
}

func isPlain(name string) bool {
	for i := range len(name) {
		if !plain(name[i]) {
			return false
		}
	}
	return name != "" && name[0] != '.' && len(name) <= maxName
}

func unescape(b *strings.Builder, name string) bool {
	for i := 0; i < len(name); i++ {
		if name[i] != '%' {
			b.WriteByte(name[i])
			continue
		}
		if i+2 >= len(name) {
			return false
		}
		hi, lo := strings.IndexByte(hexDigits, name[i+1]), strings.IndexByte(hexDigits, name[i+2])
		if hi < 0 || lo < 0 {
			return false
		}
		b.WriteByte(byte(hi<<4 | lo))
		i += 2
	}
	return true
}
