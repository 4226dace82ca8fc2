package s3blob

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/blobservers"
)

// rules is the lifecycle configuration that the Versity gateway lacks, kept as it was sent.
type rules struct {
	xml    string
	refuse string // a code
	forget bool
}

func (r *rules) serve(op string, _ int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
	switch {
	case !strings.HasSuffix(op, " lifecycle"):
		return send()
	case r.refuse != "":
		return answered(req, 403, failure(r.refuse, "")), nil
	case op == "PUT lifecycle":
		body, err := io.ReadAll(req.Body)
		if !r.forget {
			r.xml = string(body)
		}
		return answered(req, 200, ""), err
	case r.xml == "":
		return answered(req, 404, failure("NoSuchLifecycleConfiguration", "")), nil
	}
	return answered(req, 200, r.xml), nil
}

const foreignRule = `<Rule><ID>theirs</ID><Filter><Prefix>logs/</Prefix></Filter><Status>Enabled</Status><Expiration><Days>30</Days></Expiration></Rule>`

// The rule is added to those of the bucket, once, and covers this prefix only.
func TestInstallExpiry(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	for name, before := range map[string]string{"no rules": "", "others' rules": "<LifecycleConfiguration>" + foreignRule + "</LifecycleConfiguration>"} {
		t.Run(name, func(t *testing.T) {
			r := &rules{xml: before}
			opts, _ := spoiled(Options{Prefix: "mine"}, r.serve)
			st := newStore(t, s, opts)
			for range 2 {
				if err := st.InstallExpiry(t.Context(), 3*day); err != nil {
					t.Fatal(err)
				}
				if n := strings.Count(r.xml, "<Days>3</Days>"); n != 1 {
					t.Errorf("%d rules of 3 days in %s", n, r.xml)
				}
			}
			for _, want := range []string{"<Key>snapferry-expire</Key>", "<Value>3</Value>", "<Prefix>mine/</Prefix>", "<Status>Enabled</Status>"} {
				if !strings.Contains(r.xml, want) {
					t.Errorf("no %s in %s", want, r.xml)
				}
			}
			if before != "" && (!strings.Contains(r.xml, "<ID>theirs</ID>") || !strings.Contains(r.xml, "<Days>30</Days>")) {
				t.Errorf("the others' rule is gone: %s", r.xml)
			}
			for info, err := range st.List(t.Context(), "", "") {
				t.Errorf("left behind: %v, %v", info, err)
			}
		})
	}
}

// A store without rules, without the permission, or that forgets rules, is told apart.
func TestInstallExpiryRefused(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	if err := newStore(t, s, Options{}).InstallExpiry(t.Context(), 3*day); !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("a gateway without lifecycle rules: %v", err)
	}
	opts, _ := spoiled(Options{}, (&rules{refuse: "AccessDenied"}).serve)
	err := newStore(t, s, opts).InstallExpiry(t.Context(), 3*day)
	meaning{is: fs.ErrPermission, text: "s3:GetLifecycleConfiguration"}.check(t, err)
	opts, _ = spoiled(Options{}, (&rules{xml: "<LifecycleConfiguration></LifecycleConfiguration>", forget: true}).serve)
	if err := newStore(t, s, opts).InstallExpiry(t.Context(), 3*day); !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("a store that forgets rules: %v", err)
	}
	opts, _ = spoiled(Options{}, func(op string, n int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
		req.Header.Del("X-Amz-Tagging") // a store that ignores them; the signature is then wrong
		if op == "PUT" {
			return answered(req, 200, ""), nil
		}
		if op == "GET tagging" {
			return answered(req, 200, "<Tagging><TagSet></TagSet></Tagging>"), nil
		}
		return (&rules{}).serve(op, n, req, send)
	})
	if err := newStore(t, s, opts).InstallExpiry(t.Context(), 3*day); !errors.Is(err, blob.ErrUnsupported) {
		t.Errorf("a store that ignores tags: %v", err)
	}
}

// Who may not tag puts without, is told so once, and seals what it put (P9 does the rest).
func TestNoPermissionToTag(t *testing.T) {
	s := blobservers.Versity(t)
	use(t, s)
	var warnings []string
	opts, _ := spoiled(manyParts, func(op string, _ int, req *http.Request, send func() (*http.Response, error)) (*http.Response, error) {
		if req.Header.Get("X-Amz-Tagging") != "" || op == "DELETE tagging" {
			return answered(req, 403, failure("AccessDenied", "")), nil
		}
		return send()
	})
	opts.Warn = func(text string) { warnings = append(warnings, text) }
	st := newStore(t, s, opts)
	large := big()
	for key, body := range map[string][]byte{"a": []byte("v"), "large": large} {
		if err := st.Put(t.Context(), key, blob.Bytes(body), blob.PutOptions{TTL: time.Hour}); err != nil {
			t.Fatal(err)
		}
		wantObject(t, st, key, body)
	}
	if err := st.RemoveTTL(t.Context(), []string{"a", "large"}); err != nil {
		t.Errorf("sealing what has no tag: %v", err)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "s3:PutObjectTagging") {
		t.Errorf("warnings: %q", warnings)
	}
	if err := st.Put(t.Context(), "permanent", blob.Bytes(nil), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	// Of what another process put nobody knows whether it has a tag.
	if err := st.RemoveTTL(t.Context(), []string{"permanent"}); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("sealing something else: %v", err)
	}
	if err := st.Delete(t.Context(), []string{"a"}); err != nil {
		t.Fatal(err)
	}
	if err := st.RemoveTTL(t.Context(), []string{"a"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("sealing what is gone: %v", err)
	}
}

// Whole days, never less than asked for, and three at least (P7).
func TestDays(t *testing.T) {
	for ttl, want := range map[time.Duration]int{time.Second: 3, 3 * day: 3, 3*day + 1: 4, 10 * day: 10} {
		if got := daysOf(ttl); got != want {
			t.Errorf("%v: %d days, want %d", ttl, got, want)
		}
	}
	if tagFor(0) != nil {
		t.Error("what stays has a tag")
	}
}
