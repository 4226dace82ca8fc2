package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"

	"github.com/snapferry/snapferry"
)

// output is standard output. It keeps the first error, so that a result that reached
// nobody is a failure, also where nobody looks at what a write returns.
type output struct {
	w   io.Writer
	err error
}

// Write passes p on.
func (o *output) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	if err != nil && o.err == nil {
		o.err = err
	}
	return n, err
}

// result prints what a verb found out or did: report as one JSON object with --json,
// else what human writes.
func (a *app) result(report any, human func(w io.Writer)) error {
	if !a.json {
		human(a.stdout)
		return nil
	}
	data, err := json.Marshal(report)
	if err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	fmt.Fprintf(a.stdout, "%s\n", data) // run tells of a failure
	return nil
}

// summary is result for verbs whose product is not what they print: --quiet keeps the
// text back.
func (a *app) summary(report any, human func(w io.Writer)) error {
	if a.quiet && !a.json {
		return nil
	}
	return a.result(report, human)
}

// table writes rows with aligned columns; cells are separated by tabs.
func table(w io.Writer, rows []string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(t, row)
	}
	_ = t.Flush() // run tells of a failure
}

// quote writes a name for people: as it is if that is unmistakable, else in C
// notation, where every byte that is no printable UTF-8 is \OOO.
func quote(s string) string {
	if plain(s) {
		return s
	}
	var b strings.Builder
	b.WriteByte('"')
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case escapes[s[0]] != 0:
			b.WriteByte('\\')
			b.WriteByte(escapes[s[0]])
		case r == utf8.RuneError && n == 1 || !unicode.IsPrint(r):
			for _, c := range []byte(s[:n]) {
				fmt.Fprintf(&b, `\%03o`, c)
			}
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	b.WriteByte('"')
	return b.String()
}

var escapes = [256]byte{'\n': 'n', '\t': 't', '\r': 'r', '"': '"', '\\': '\\'}

// plain tells whether a name can stand unquoted.
func plain(s string) bool {
	if s == "" || s[0] == ' ' || s[len(s)-1] == ' ' || strings.Contains(s, " -> ") || !utf8.ValidString(s) {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return r == '"' || r == '\\' || !unicode.IsPrint(r) }) < 0
}

// JSON strings are Unicode and cannot hold every path and offset. Nothing is lost for
// that: beside a field whose bytes are no UTF-8 there is one named FIELD_base64 with
// the exact bytes, and the field itself has U+FFFD in place of what does not fit.

// exact returns s in base64 if JSON cannot hold it, else "".
func exact(s string) string {
	if utf8.ValidString(s) {
		return ""
	}
	return base64.StdEncoding.EncodeToString([]byte(s))
}

// pairs are the offsets of a checkpoint in JSON. Those with a key or a value that is
// no UTF-8 are in Base64 only, with key and value in base64.
type pairs struct {
	Offsets map[string]string `json:"offsets"`
	Base64  map[string]string `json:"offsets_base64,omitempty"`
}

func newPairs(offsets map[string]string) pairs {
	p := pairs{Offsets: map[string]string{}}
	for k, v := range offsets {
		if utf8.ValidString(k) && utf8.ValidString(v) {
			p.Offsets[k] = v
			continue
		}
		if p.Base64 == nil {
			p.Base64 = map[string]string{}
		}
		e := base64.StdEncoding
		p.Base64[e.EncodeToString([]byte(k))] = e.EncodeToString([]byte(v))
	}
	return p
}

// timeText writes a time as the JSON of every verb does.
func timeText(c *snapferry.Checkpoint) string {
	return c.Time.UTC().Format("2006-01-02T15:04:05.000000000Z")
}
