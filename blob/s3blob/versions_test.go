package s3blob

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
)

// history answers listings of versions from pages, the way S3 cuts them.
func history(asked *[]string, pages ...string) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
		if q := req.URL.Query(); q.Has("versions") && !q.Has("version-id-marker") {
			*asked = append(*asked, q.Get("prefix")+" "+q.Get("key-marker"))
		}
		if req.URL.Query().Has("versioning") {
			return answered(req, 200, `<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>`), nil
		}
		i, more := 0, ""
		_, _ = fmt.Sscanf(req.URL.Query().Get("version-id-marker"), "page%d", &i) // the first has none
		if i+1 < len(pages) {
			more = fmt.Sprintf("<IsTruncated>true</IsTruncated><NextKeyMarker>m</NextKeyMarker><NextVersionIdMarker>page%d</NextVersionIdMarker>", i+1)
		}
		return answered(req, 200, "<ListVersionsResult>"+more+pages[i]+"</ListVersionsResult>"), nil
	}
}

// putAt is a version; of an object's last one the key ends in *.
func putAt(key string, second, size int) string {
	key, latest := strings.CutSuffix(key, "*")
	return fmt.Sprintf(`<Version><Key>p/%s</Key><VersionId>%d</VersionId><IsLatest>%t</IsLatest><LastModified>2026-01-01T00:00:%02d.000Z</LastModified><Size>%d</Size></Version>`, key, second, latest, second, size)
}

// deletedAt is the mark of a deletion, with a time more exact than that of versions.
func deletedAt(key string, second int) string {
	key, latest := strings.CutSuffix(key, "*")
	return fmt.Sprintf(`<DeleteMarker><Key>p/%s</Key><VersionId>%d</VersionId><IsLatest>%t</IsLatest><LastModified>2026-01-01T00:00:%02d.300Z</LastModified></DeleteMarker>`, key, second, latest, second)
}

func listAt(t *testing.T, st *blob.Store, prefix, after string, at time.Time) (keys []string) {
	t.Helper()
	for info, err := range st.ListAt(t.Context(), prefix, after, at) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, fmt.Sprintf("%s:%d", info.Key, info.Size))
	}
	return keys
}

// A listing as of a time has what was there then, whatever came later and wherever the store
// cuts its pages.
func TestListAt(t *testing.T) {
	pages := []string{
		putAt("a*", 10, 1) + putAt("b*", 40, 3),
		putAt("b", 20, 2) + deletedAt("b", 30) + putAt("c", 20, 4) + deletedAt("c*", 20) + putAt("d/e*", 50, 5) + putAt("d/f*", 50, 6) + deletedAt("d/f", 50),
	}
	var asked []string
	faults := blobtest.NewFaults(alone(t, history(&asked, pages...)), nil)
	st := blob.New(faults, &blob.Options{Retry: blob.Retry{First: time.Millisecond}})
	defer st.Close()
	cases := []struct {
		prefix, after string
		second        int
		want          string
	}{
		{"", "", 5, ""},
		{"", "", 10, "a:1"},
		{"", "", 20, "a:1 b:2 c:4"}, // c came and went within this second
		{"", "", 25, "a:1 b:2"},
		{"", "", 35, "a:1"},
		{"", "", 45, "a:1 b:3"},
		{"", "a", 59, "b:3 d/e:5 d/f:6"}, // d/f came again in the second in which it had gone
		{"d/", "", 59, "d/e:5 d/f:6"},
		{"", "d/e", 59, "d/f:6"},
	}
	for _, c := range cases {
		at := time.Date(2026, 1, 1, 0, 0, c.second, 0, time.UTC)
		if got := strings.Join(listAt(t, st, c.prefix, c.after, at), " "); got != c.want {
			t.Errorf("%q after %q at %d s: %s, want %s", c.prefix, c.after, c.second, got, c.want)
		}
	}
	if want := []string{"p/ ", "p/ p/a", "p/d/ ", "p/ p/d/e"}; !slices.Equal(slices.Compact(asked), want) {
		t.Errorf("asked for %q, want %q", slices.Compact(asked), want)
	}
	faults.FailAt(0, blob.Retriable(errLost))
	if got := listAt(t, st, "", "", time.Date(2026, 1, 1, 0, 1, 0, 0, time.UTC)); len(got) != 4 {
		t.Errorf("after a broken connection: %v", got)
	}
	for range st.ListAt(t.Context(), "", "", time.Now()) {
		break // stops at once
	}
}

// wantListed checks that the listing of the present is that of a time to come, and that
// nothing was there long ago.
func wantListed(t *testing.T, st *blob.Store) {
	t.Helper()
	var now []string
	for info, err := range st.List(t.Context(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		now = append(now, fmt.Sprintf("%s:%d", info.Key, info.Size))
	}
	later := time.Now().Add(time.Hour)
	if got := listAt(t, st, "", "", later); !slices.Equal(got, now) {
		t.Errorf("an hour from now there is %v, now %v", got, now)
	}
	first, _, _ := strings.Cut(now[0], ":")
	if got := listAt(t, st, "", first, later); !slices.Equal(got, now[1:]) {
		t.Errorf("after %s there is %v of %v", first, got, now)
	}
	if got := listAt(t, st, first, "", later); !slices.Equal(got, now[:1]) {
		t.Errorf("below %s there is %v of %v", first, got, now)
	}
	if got := listAt(t, st, "", "", time.Unix(1e9, 0)); len(got) > 0 {
		t.Errorf("in 2001 there was %v", got)
	}
}

// firstError is how a listing begins.
func firstError(t *testing.T, st *blob.Store) error {
	t.Helper()
	for _, err := range st.ListAt(t.Context(), "", "", time.Now()) {
		return err
	}
	return fs.ErrNotExist
}

func wantUnversioned(t *testing.T, st *blob.Store) {
	t.Helper()
	if err := firstError(t, st); !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("a bucket without versions: %v", err)
	}
}
