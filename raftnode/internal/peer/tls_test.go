package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority makes certificates for one test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.key = a.newKey()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.write("ca.pem", "CERTIFICATE", der)
	return a
}

func (a *authority) newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return key
}

func (a *authority) write(name, kind string, der []byte) string {
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// member gives the files of a member's certificate for 127.0.0.1.
func (a *authority) member(name string, mutual bool) *TLS {
	a.next++
	key := a.newKey()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1 + a.next), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return &TLS{
		CertFile: a.write(name+".pem", "CERTIFICATE", der), KeyFile: a.write(name+".key", "EC PRIVATE KEY", keyDER),
		CAFile: filepath.Join(a.dir, "ca.pem"), RequireClientCert: mutual,
	}
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

		bare, err := (&TLS{CAFile: filepath.Join(ca.dir, "ca.pem")}).Client()
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
	junk := ca.write("junk.pem", "JUNK", nil)
	for what, spoil := range map[string]func(*TLS){
		"no certificate": func(c *TLS) { c.CertFile = "" },
		"no key":         func(c *TLS) { c.KeyFile = "" },
		"other key":      func(c *TLS) { c.KeyFile = ca.member("b", false).KeyFile },
		"no CA":          func(c *TLS) { c.CAFile = "" },
		"absent CA":      func(c *TLS) { c.CAFile = filepath.Join(ca.dir, "absent") },
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
