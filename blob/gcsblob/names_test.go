package gcsblob

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/blob"
)

// The code of keys keeps order and prefixes, can be read back, and has no line ends (names
// of this store cannot).
func TestNames(t *testing.T) {
	const alphabet = "\b\t\n\v\f\r\x0e 12/ax\u00e9"
	r := rand.New(rand.NewPCG(3, 4))
	var keys []string
	for len(keys) < 5000 {
		var b strings.Builder
		for range 1 + r.IntN(6) {
			b.WriteRune([]rune(alphabet)[r.IntN(len([]rune(alphabet)))])
		}
		if key := b.String(); blob.ValidKey(key) == nil {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for i, key := range keys {
		name := encodeKey(key)
		if got, ok := decodeKey(name); !ok || got != key || strings.ContainsAny(name, "\r\n") {
			t.Fatalf("%q has name %q, which is of %q, %v", key, name, got, ok)
		}
		if i > 0 && encodeKey(keys[i-1]) >= name {
			t.Fatalf("names of %q and %q: %q, %q", keys[i-1], key, encodeKey(keys[i-1]), name)
		}
		if cut := r.IntN(len(key) + 1); !strings.HasPrefix(name, encodeKey(key[:cut])) {
			t.Fatalf("%q is not in a list of %q", key, key[:cut])
		}
	}
	for _, name := range []string{"\t", "a\f3", "\t1\t", "\n", "a\rb", "\t21\t9"} {
		if key, ok := decodeKey(name); ok {
			t.Errorf("the foreign name %q is of key %q", name, key)
		}
	}
}

func TestParseURL(t *testing.T) {
	bucket, o, err := ParseURL("gs://box/a/b/?endpoint=http://127.0.0.1:1/&anonymous=true&user-project=p")
	want := Options{Prefix: "a/b", Endpoint: "http://127.0.0.1:1", Anonymous: true, UserProject: "p"}
	if err != nil || bucket != "box" || o.Prefix != want.Prefix || o.Endpoint != want.Endpoint || !o.Anonymous || o.UserProject != "p" {
		t.Fatalf("%q %+v %v", bucket, o, err)
	}
	for raw, want := range map[string]string{
		"s3://box":                             "write gs://",
		"gs://u:secret@box":                    "credentials do not belong",
		"gs://Box":                             "no name of a bucket",
		"gs://box?key=secret":                  `unknown parameter "key"`,
		"gs://box?anonymous=1&anonymous=0":     "twice",
		"gs://box?endpoint=":                   "empty",
		"gs://box?anonymous=perhaps":           "neither true nor false",
		"gs://box?endpoint=host:1":             "no URL",
		"gs://box/" + strings.Repeat("p", 121): "121 bytes",
		"gs://box/a%0Ab":                       "characters",
	} {
		_, _, err := ParseURL(raw)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q", raw, err, want)
		}
	}
	d, err := Open(t.Context(), "box", &Options{Prefix: "/p/q/", Anonymous: true})
	if err != nil {
		t.Fatal(err)
	}
	if d.String() != "gs://box/p/q" {
		t.Error(d)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
