package peer

import (
	"crypto/tls"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/internal/certtest"
)

// authority makes certificates for one test.
type authority struct {
	*certtest.Authority
	t *testing.T
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	ca, err := certtest.New(t.TempDir(), "ca")
	if err != nil {
		t.Fatal(err)
	}
	return &authority{ca, t}
}

// member gives the files of a member's certificate.
func (a *authority) member(name string, mutual bool) *TLS {
	a.t.Helper()
	certFile, keyFile, err := a.Issue(name)
	if err != nil {
		a.t.Fatal(err)
	}
	return &TLS{CertFile: certFile, KeyFile: keyFile, CAFile: a.CAFile, RequireClientCert: mutual}
}

// TestTLS: a group over TLS, with and without certificates of the clients.
func TestTLS(t *testing.T) {
	for _, mutual := range []bool{false, true} {
		ca := newAuthority(t)
		a := newSiteTLS(t, "a", ca.member("a", mutual), nil)
		b := newSiteTLS(t, "b", ca.member("b", mutual), nil)
		bootstrap(t, a, b)
		for _, s := range []*site{a, b} {
			s.run(nil)
			s.tr.SetMembers(s.door.Identity().Table())
		}
		delivered(t, a, b)
		delivered(t, b, a)

		bare, err := (&TLS{CAFile: ca.CAFile}).Client()
		if err != nil {
			t.Fatal(err)
		}
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: bare, DisableKeepAlives: true}}
		resp, err := client.Post(a.url()+HelloPath, "", strings.NewReader("{}"))
		if err == nil {
			_ = resp.Body.Close()
		}
		if (err != nil) != mutual {
			t.Errorf("mutual %v: a client without a certificate got %v", mutual, err)
		}
	}
}

// TestForeignAuthority: who is signed by somebody else is not believed.
func TestForeignAuthority(t *testing.T) {
	a := newSiteTLS(t, "a", newAuthority(t).member("a", false), nil)
	b := newSiteTLS(t, "b", newAuthority(t).member("b", false), nil)
	_, err := a.door.Bootstrap(shortly(t), "a", "", cluster(a, b))
	if err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("got %v", err)
	}
}

func TestTLSFiles(t *testing.T) {
	ca := newAuthority(t)
	good := ca.member("a", true)
	junk := filepath.Join(t.TempDir(), "junk.pem")
	if err := os.WriteFile(junk, []byte("-----BEGIN JUNK-----\n-----END JUNK-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func(*TLS){
		"no certificate": func(c *TLS) { c.CertFile = "" },
		"no key":         func(c *TLS) { c.KeyFile = "" },
		"other key":      func(c *TLS) { c.KeyFile = ca.member("b", false).KeyFile },
		"no CA":          func(c *TLS) { c.CAFile = "" },
		"absent CA":      func(c *TLS) { c.CAFile += ".absent" },
		"junk CA":        func(c *TLS) { c.CAFile = junk },
	} {
		c := *good
		spoil(&c)
		if _, err := c.Server(); err == nil {
			t.Errorf("%s: a server starts", what)
		}
		if err := ConfigureServer(new(http.Server), &c); err == nil {
			t.Errorf("%s: a server is configured", what)
		}
	}
	if _, err := NewDoor(t.TempDir(), &DoorOptions{TLS: &TLS{CAFile: junk}}); err == nil {
		t.Error("a door opens with a junk CA")
	}
	c, err := good.Server()
	if err != nil || c.ClientAuth != tls.RequireAndVerifyClientCert || c.MinVersion != tls.VersionTLS13 {
		t.Errorf("got %+v, %v", c, err)
	}
}

// TestPlainNeedsInsecure: http URLs need the option, in every way in.
func TestPlainNeedsInsecure(t *testing.T) {
	d, err := NewDoor(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, one := d.Bootstrap(t.Context(), "a", "", map[string]string{"a": "http://127.0.0.1:1"})
	_, _, two := d.Join(t.Context(), "a", "http://127.0.0.1:1", []string{"https://127.0.0.1:2"})
	_, _, three := d.Join(t.Context(), "a", "https://127.0.0.1:1", []string{"http://127.0.0.1:2"})
	for i, err := range []error{one, two, three} {
		if err == nil || !strings.Contains(err.Error(), "insecure") {
			t.Errorf("%d: got %v", i, err)
		}
	}
}
