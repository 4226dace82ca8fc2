package azblob

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/blob"
)

// Keys that the engine makes are their own names, and others have readable ones.
func TestNames(t *testing.T) {
	for key, want := range map[string]string{
		"snapferry.json":                        "snapferry.json",
		"t/job/task-1.a_b/log/0000000000000001": "t/job/task-1.a_b/log/0000000000000001",
		"a b\\c":                                "a Vb[1c",
		"v1.0":                                  "v1.01",
		"a./b":                                  "a.00/b",
		"a.":                                    "a. !",
		"[~\ufffd\u0085é":                       "[0~0\ufffd0~7é",
		"🙂":                                     "\ufffdZ01F642",
	} {
		if got := encodeKey(key); got != want {
			t.Errorf("%q has name %q, want %q", key, got, want)
		}
		if got, ok := decodeKey(want); !ok || got != key {
			t.Errorf("%q is of key %q, %v, want %q", want, got, ok, key)
		}
	}
	for _, name := range []string{"[", "[9", "a.0", "x.", "~", "\xff", " ", "a.02", "\ufffdZ00FFFF", "a\\b"} {
		if key, ok := decodeKey(name); ok {
			t.Errorf("the foreign name %q is of key %q", name, key)
		}
	}
}

// randomKey is a valid key of characters that are trouble.
func randomKey(r *rand.Rand) string {
	alphabet := []rune("\x01\x1f !\"-./00112AVZ[[\\]a}~\x7f\u0085\u009f\u00a0\ue000\ufffc\ufffd\ufffe\uffff\U00010000\U0010ffff..//")
	for {
		n := 1 + r.IntN(8)
		if r.IntN(4) == 0 {
			n = 420
		}
		var b strings.Builder
		for range n {
			b.WriteRune(alphabet[r.IntN(len(alphabet))])
			if n > 100 {
				b.WriteString("/" + string(alphabet[r.IntN(len(alphabet))]))
			}
		}
		if key := b.String(); blob.ValidKey(key) == nil {
			return key
		}
	}
}

// deepKey has more slashes than Azure counts.
func deepKey(r *rand.Rand) string {
	parts := []string{"0", "1", "2", ".x", "x.", "00", "01", "a"}
	key := strings.Repeat("d/", maxSlashes-3)
	for range 1 + r.IntN(8) {
		key += parts[r.IntN(len(parts))] + "/"
	}
	return key + parts[r.IntN(len(parts))]
}

// The code keeps order, in bytes and in UTF-16, and prefixes; it can be read back; and its
// names have nothing that Azure changes or refuses.
func TestNamesModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var keys []string
	for range 3000 {
		keys = append(keys, randomKey(r), deepKey(r))
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for i, key := range keys {
		name := encodeKey(key)
		if got, ok := decodeKey(name); !ok || got != key {
			t.Fatalf("%q has name %q, which is of %q, %v", key, name, got, ok)
		}
		checkName(t, name)
		if i > 0 && encodeKey(keys[i-1]) >= name {
			t.Fatalf("names of %q and %q: %q, %q", keys[i-1], key, encodeKey(keys[i-1]), name)
		}
		if i > 0 && slices.Compare(utf16.Encode([]rune(encodeKey(keys[i-1]))), utf16.Encode([]rune(name))) >= 0 {
			t.Fatalf("in UTF-16, names of %q and %q", keys[i-1], key)
		}
		cut := r.IntN(len(key) + 1)
		if !strings.HasPrefix(name, encodePrefix(key[:cut])) {
			t.Fatalf("%q is not in a list of %q: %q, %q", key, key[:cut], name, encodePrefix(key[:cut]))
		}
	}
}

func checkName(t *testing.T, name string) {
	t.Helper()
	bad := func(r rune) bool { return r < 0x20 || r == '\\' || r >= 0x7f && r < 0xa0 || r >= 0xfffe }
	if strings.ContainsFunc(name, bad) || strings.HasSuffix(name, ".") || strings.Contains(name, "./") || strings.Count(name, "/") > 254 {
		t.Fatalf("Azure would not keep the name %q", name)
	}
}

func TestParseURL(t *testing.T) {
	clear := []string{"AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"}
	for _, name := range clear {
		t.Setenv(name, "")
	}
	container, o, err := ParseURL("azblob://box/a/b?account=acc&expiry-tags=true")
	if err != nil || container != "box" || o.Prefix != "a/b" || o.Account != "acc" || !o.ExpiryTags {
		t.Fatalf("%q %+v %v", container, o, err)
	}
	for raw, want := range map[string]string{
		"s3://box":                                          "write azblob://",
		"azblob://u:secret@box?account=a":                   "credentials do not belong",
		"azblob://box":                                      "no storage account",
		"azblob://Box?account=a":                            "no name of a container",
		"azblob://box?account=a&sig=SIG":                    `unknown parameter "sig"`,
		"azblob://box?account=a&account=b":                  "twice",
		"azblob://box?account=":                             "empty",
		"azblob://box?anonymous=perhaps":                    "neither true nor false",
		"azblob://box?endpoint=http://h/?sig=SIG":           "signature",
		"azblob://box?endpoint=http%3A%2F%2Fh%2F%3Fsig=SIG": "signature",
		"azblob://box/a%5Cb?account=a":                      "prefix",
	} {
		_, _, err := ParseURL(raw)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "SIG") {
			t.Errorf("%s: %v, want %q", raw, err, want)
		}
	}
	d, err := Open("box", &Options{Prefix: "/p/q/", Account: "a", Anonymous: true})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(d.String(), "azblob://box/p/q"); diff != "" {
		t.Error(diff)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
