package gcsblob

import "strings"

// Names of objects cannot have carriage returns and line feeds, which keys can. Each is
// written as the character below it and a digit, and so is that character itself. So
// the order of names is that of keys, and a prefix of a key is one of its name.
var escapes = map[byte]string{'\t': "\t1", '\n': "\t2", '\f': "\f1", '\r': "\f2"}

// encodeKey makes a name, or part of one, of a key.
func encodeKey(key string) string {
	if !strings.ContainsAny(key, "\t\n\f\r") {
		return key
	}
	var b strings.Builder
	for i := range len(key) {
		if e, ok := escapes[key[i]]; ok {
			b.WriteString(e)
		} else {
			b.WriteByte(key[i])
		}
	}
	return b.String()
}

// decodeKey is the key of a name. It is not ok for names that encodeKey does not make.
func decodeKey(name string) (key string, ok bool) {
	if !strings.ContainsAny(name, "\t\n\f\r") {
		return name, true
	}
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		c := name[i]
		if c != '\t' && c != '\f' {
			b.WriteByte(c)
			continue
		}
		if i++; i == len(name) || name[i] != '1' && name[i] != '2' {
			return "", false
		}
		b.WriteByte(c + name[i] - '1')
	}
	key = b.String()
	return key, encodeKey(key) == name
}
