package s3blob

import (
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/internal/blobservers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// use makes the environment that of one user of s, and of nobody else.
func use(t *testing.T, s *blobservers.S3) {
	t.Helper()
	t.Setenv("AWS_CA_BUNDLE", "")
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
	t.Setenv("AWS_ACCESS_KEY_ID", s.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s.SecretKey)
}

func open(t *testing.T, s *blobservers.S3, bucket string, opts Options) *Driver {
	t.Helper()
	opts.Region, opts.Endpoint = s.Region, s.Endpoint
	d, err := Open(t.Context(), bucket, &opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// parts makes bodies of more than a few hundred KiB go in several parts.
var manyParts = Options{SinglePut: 256 << 10, PartSize: 5 << 20, Buffers: 12 << 20}

func TestConformance(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	for name, opts := range map[string]Options{
		"default":   {},
		"prefix":    {Prefix: "a/b c+d", SinglePut: manyParts.SinglePut, PartSize: manyParts.PartSize, Buffers: manyParts.Buffers},
		"checksums": {Checksums: WhenSupported, SinglePut: manyParts.SinglePut, PartSize: manyParts.PartSize, Buffers: manyParts.Buffers},
	} {
		t.Run(name, func(t *testing.T) {
			blobtest.Run(t, func(t *testing.T) blob.Driver { return short(t, open(t, s, s.Bucket(), opts)) }, nil)
		})
	}
}

// short leaves out the one test whose keys no server at hand can hold: both keep objects
// under names of files, which have 255 bytes at most. TestOddNames has what else is odd.
func short(t *testing.T, d *Driver) blob.Driver {
	t.Helper()
	if strings.HasSuffix(t.Name(), "/OddKeys") {
		t.Skip("the server takes no component of more than 255 bytes")
	}
	return d
}

// Another server, which has rules for expiry too.
func TestConformanceSeaweedFS(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.SeaweedFS(t)
	use(t, s)
	opts := manyParts
	opts.Prefix = "p"
	blobtest.Run(t, func(t *testing.T) blob.Driver { return short(t, open(t, s, s.Bucket(), opts)) }, nil)
	for range 2 {
		if err := newStore(t, s, opts).InstallExpiry(t.Context(), 3*day); err != nil {
			t.Error(err)
		}
	}
}

// Names that XML, URLs and signatures each have trouble with.
func TestOddNames(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	st := newStore(t, s, Options{Prefix: "p+q %41"})
	names := []string{
		"a+b", "a b", " a", "a ", "a%2Bb", "%", "%zz", "a&b;c", "<x>", "\"'", "a\\b", "?q=1#f", "a\tb\nc", "\x01\x1f\x7f", "ü/日本/🙂",
		"~!@$^*(){}[]|`", "..x", "e\u0301", "\u00e9", "\u2028", "\u200b", "snapferry.json",
	}
	for _, k := range names {
		if err := st.Put(t.Context(), k, blob.Bytes([]byte(k)), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(names)
	for i, k := range names {
		wantObject(t, st, k, []byte(k))
		var after []string
		for info, err := range st.List(t.Context(), "", k) {
			if err != nil {
				t.Fatal(err)
			}
			after = append(after, info.Key)
		}
		if !slices.Equal(after, names[i+1:]) {
			t.Errorf("listed after %q: %q, want %q", k, after, names[i+1:])
		}
	}
	if err := st.Delete(t.Context(), names); err != nil {
		t.Fatal(err)
	}
	for info, err := range st.List(t.Context(), "", "") {
		t.Errorf("left: %v, %v", info, err)
	}
}

func TestLowerBound(t *testing.T) {
	for after, want := range map[string]string{
		"": "", "a/é": "a/é", "a/\xff": "a/\U0010ffff", "a/\xc3": "a/", "\ufffd": "\ufffd", "a\xe2\x82": "a",
	} {
		if got := lowerBound(after); got != want || got > after {
			t.Errorf("%q: %q, want %q", after, got, want)
		}
	}
}
