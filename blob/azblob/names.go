package azblob

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Azure takes a backslash for a slash, refuses control characters, counts at most 254
// slashes, and drops dots at the end of what stands between two. So keys are written
// in a code whose names sort as the keys do, and in which a prefix of a key is one of its
// name: every character, by what stands before it, has a word, the words sort like the
// characters, and none begins with another one.
//
// Some servers sort by UTF-16, in which characters beyond U+FFFF come too early, so those have
// words too.
//
// Keys of letters, digits, "-", "_", "/" and dots elsewhere are their own names.

// group is characters that share the first character of their words; the second one
// numbers them.
type group struct{ lo, hi, first rune }

var groups = []group{
	{0x01, ' ', ' '},
	{'[', '\\', '['},
	{'~', 0x9f, '~'},
	{0xfffd, 0xffff, 0xfffd},
}

const (
	numbers = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	// beyond begins the words of characters beyond U+FFFF: it sorts after those of the last group.
	beyond = "\ufffdZ"
	// atEnd follows a dot that ends a key, and sorts before all that could.
	atEnd = " !"
	// maxSlashes are written as they are; deeper ones have another word.
	maxSlashes = 190
)

// coder is where in a key the coding stands.
type coder struct {
	afterDot bool
	slashes  int
}

// word is the code of the next character.
func (c *coder) word(r rune) string {
	deep, afterDot := c.slashes >= maxSlashes, c.afterDot
	c.afterDot = r == '.'
	switch {
	case deep && r == '/':
		return "0"
	case deep && (r == '0' || r == '1'):
		return "1" + string(r)
	case r == '/':
		c.slashes++
		if afterDot {
			return "00/"
		}
	case afterDot && !deep && r == '0':
		return "01"
	}
	for _, g := range groups {
		if r >= g.lo && r <= g.hi {
			return string(g.first) + numbers[r-g.lo:r-g.lo+1]
		}
	}
	if r > 0xffff {
		return beyond + fmt.Sprintf("%06X", r)
	}
	return string(r)
}

// encodeKey makes a name of a key.
func encodeKey(key string) string {
	name := encodePrefix(key)
	if strings.HasSuffix(key, ".") {
		name += atEnd
	}
	return name
}

// encodePrefix makes what all names of keys with a prefix begin with. A character that is cut
// in two is left out.
func encodePrefix(prefix string) string {
	var c coder
	var b strings.Builder
	for i, r := range prefix {
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(prefix[i:]); n <= 1 {
				break
			}
		}
		b.WriteString(c.word(r))
	}
	return b.String()
}

// decodeKey is the key of a name. It is not ok for names that encodeKey does not make.
func decodeKey(name string) (key string, ok bool) {
	if !utf8.ValidString(name) {
		return "", false
	}
	var c coder
	var b strings.Builder
	for rest := strings.TrimSuffix(name, atEnd); rest != ""; {
		r, n := c.next(rest)
		if n == 0 {
			return "", false
		}
		b.WriteRune(r)
		rest = rest[n:]
	}
	key = b.String()
	return key, encodeKey(key) == name
}

// next reads one word; its length is 0 when there is none.
func (c *coder) next(name string) (r rune, n int) {
	r, n = utf8.DecodeRuneInString(name)
	candidates := []rune{r, '/', '0', '1'}
	for _, g := range groups {
		if r == g.first && len(name) > n {
			candidates = append(candidates, g.lo+rune(strings.IndexByte(numbers, name[n])))
		}
	}
	if hex, ok := strings.CutPrefix(name, beyond); ok && len(hex) >= 6 {
		if v, err := strconv.ParseUint(hex[:6], 16, 32); err == nil && v > 0xffff {
			candidates = []rune{rune(v)}
		}
	}
	for _, candidate := range candidates {
		after := *c
		if w := after.word(candidate); strings.HasPrefix(name, w) {
			*c = after
			return candidate, len(w)
		}
	}
	return 0, 0
}
