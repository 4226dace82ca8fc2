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
)

// history answers listings of versions from pages, the way S3 cuts them.
func history(pages ...string) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
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

func putAt(key string, second, size int) string {
	return fmt.Sprintf(`<Version><Key>p/%s</Key><VersionId>%d</VersionId><LastModified>2026-01-01T00:00:%02d.000Z</LastModified><Size>%d</Size></Version>`, key, second, second, size)
}

func deletedAt(key string, second int) string {
	return fmt.Sprintf(`<DeleteMarker><Key>p/%s</Key><VersionId>%d</VersionId><LastModified>2026-01-01T00:00:%02d.000Z</LastModified></DeleteMarker>`, key, second, second)
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
		putAt("a", 10, 1) + putAt("b", 40, 3),
		putAt("b", 20, 2) + deletedAt("b", 30) + putAt("c", 20, 4) + deletedAt("c", 20) + putAt("d/e", 50, 5),
	}
	st := blob.New(alone(t, history(pages...)), nil)
	defer st.Close()
	cases := []struct {
		prefix, after string
		second        int
		want          string
	}{
		{"", "", 5, ""},
		{"", "", 10, "a:1"},
		{"", "", 25, "a:1 b:2 c:4"}, // c came and went within one second
		{"", "", 35, "a:1 c:4"},
		{"", "", 45, "a:1 b:3 c:4"},
		{"", "a", 59, "b:3 c:4 d/e:5"},
		{"d/", "", 59, "d/e:5"},
		{"", "d/e", 59, ""},
	}
	for _, c := range cases {
		at := time.Date(2026, 1, 1, 0, 0, c.second, 0, time.UTC)
		if got := strings.Join(listAt(t, st, c.prefix, c.after, at), " "); got != c.want {
			t.Errorf("%q after %q at %d s: %s, want %s", c.prefix, c.after, c.second, got, c.want)
		}
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
	if got := listAt(t, st, "", "", time.Now().Add(time.Hour)); !slices.Equal(got, now) {
		t.Errorf("an hour from now there is %v, now %v", got, now)
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
